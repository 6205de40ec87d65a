"use strict";
// The commands of the palette: Compile, Show plan, Open report.

const fs = require("fs/promises");
const os = require("os");
const path = require("path");
const vscode = require("vscode");
const { placeOf } = require("./place");
const { run } = require("./run");
const steps = require("./steps");
const { tasks } = require("./tasks");

const SCHEME = "rlf-plan";

/** Plans as texts that cannot be changed. uri: of the scheme, its query the file's uri. */
class Plans {
  constructor() {
    /** @type {Map<string, string>} */
    this.texts = new Map();
    this.changes = new vscode.EventEmitter();
    this.onDidChange = this.changes.event;
  }

  provideTextDocumentContent(uri) {
    return this.texts.get(uri.toString()) || "";
  }

  /** @param {vscode.Uri} file @param {string} text */
  put(file, text) {
    const shown = `/${path.basename(file.fsPath)}${steps.isPlan(file.fsPath) ? "" : ".plan"}.txt`;
    const uri = vscode.Uri.from({ scheme: SCHEME, path: shown, query: file.toString() });
    this.texts.set(uri.toString(), text);
    this.changes.fire(uri);
    return uri;
  }
}

/** @param {vscode.ExtensionContext} context @param {vscode.OutputChannel} output */
function commands(context, output) {
  const plans = new Plans();

  /** Runs `body` on the file that is meant, with a sign of progress; shows what the compiler says against it. */
  const about = (title, body) => async (uri) => {
    const place = await placeOf(uri);
    if (!place) {
      return;
    }
    const location = vscode.ProgressLocation.Notification;
    const stop = new AbortController();
    try {
      const sign = { location, title: `${title}: ${place.file}`, cancellable: true };
      await vscode.window.withProgress(sign, (_, token) => {
        token.onCancellationRequested(() => stop.abort());
        return body(place, (args) => run(place.given, place.folder, args, stop.signal));
      });
    } catch (error) {
      if (stop.signal.aborted) {
        return;
      }
      output.appendLine(String(error.message));
      const first = String(error.message).split("\n")[0];
      if (await vscode.window.showErrorMessage(first, "Show all")) {
        output.show();
      }
    }
  };

  const compile = async (uri) => {
    const place = await placeOf(uri);
    const made = place && tasks.make({ type: "rlc", command: "compile", files: [place.file] }, place);
    return made && vscode.tasks.executeTask(made);
  };

  const showPlan = about("Plan", async (place, rlc) => {
    const text = await rlc(steps.plan(place.file, place.given));
    const document = await vscode.workspace.openTextDocument(plans.put(place.uri, text));
    await vscode.window.showTextDocument(document, { viewColumn: vscode.ViewColumn.Beside, preserveFocus: true });
  });

  const openReport = about("Report", async (place, rlc) => {
    const folder = await fs.mkdtemp(path.join(os.tmpdir(), "rlf-"));
    try {
      const page = path.join(folder, "report.html");
      for (const args of steps.report(place.file, place.given, { plan: path.join(folder, "program.plan"), page })) {
        await rlc(args);
      }
      const panel = vscode.window.createWebviewPanel("rlf.report", `${path.basename(place.file)}: report`,
        { viewColumn: vscode.ViewColumn.Beside, preserveFocus: true },
        { enableScripts: true, localResourceRoots: [], retainContextWhenHidden: true });
      panel.webview.html = await fs.readFile(page, "utf8");
    } finally {
      await fs.rm(folder, { recursive: true, force: true });
    }
  });

  context.subscriptions.push(
    vscode.workspace.registerTextDocumentContentProvider(SCHEME, plans),
    vscode.commands.registerCommand("rlf.compile", compile),
    vscode.commands.registerCommand("rlf.showPlan", showPlan),
    vscode.commands.registerCommand("rlf.openReport", openReport),
  );
}

module.exports = { commands };
