"use strict";
// Tasks of the type "rlc": their mistakes go to the panel of problems by the matcher "$rlc".

const vscode = require("vscode");
const { commandLine, named } = require("./settings");
const { folderOf, settingsOf } = require("./place");
const steps = require("./steps");

const TYPE = "rlc";
const MATCHER = "$rlc";

/**
 * @param {any} definition @param {import("./place").Place} place
 * @param {vscode.WorkspaceFolder | vscode.TaskScope} [scope]
 * @returns {vscode.Task | undefined} undefined for a task without a file
 */
function make(definition, place, scope) {
  const args = steps.task(definition, place.file ? [place.file] : [], place.given);
  if (!args) {
    return undefined;
  }
  const line = commandLine(place.given, place.folder, ...args);
  const name = `${definition.command} ${(definition.files || []).join(" ")}`.trim();
  const execution = new vscode.ProcessExecution(line.command, line.args, { cwd: line.cwd });
  const made = new vscode.Task(definition, scope || vscode.TaskScope.Workspace, name, TYPE, execution, MATCHER);
  made.group = vscode.TaskGroup.Build;
  made.presentationOptions = { clear: true, reveal: vscode.TaskRevealKind.Always };
  return made;
}

/** The place of a task: the program in the editor, of the task's folder. */
function here(scope) {
  const folder = scope && scope.uri ? scope.uri.fsPath : folderOf();
  const document = vscode.window.activeTextEditor && vscode.window.activeTextEditor.document;
  const file = document && document.languageId === "rlf" && document.uri.scheme === "file" ? document.uri.fsPath : "";
  return { uri: document && document.uri, file: file && named(file, folder), folder,
    given: settingsOf(scope && scope.uri) };
}

const provider = {
  /** Of every program: check, compile; and check of all together. */
  async provideTasks() {
    const found = [];
    for (const scope of vscode.workspace.workspaceFolders || []) {
      const place = { ...here(scope), file: "" };
      const pattern = new vscode.RelativePattern(scope, "**/*.rlf");
      const uris = await vscode.workspace.findFiles(pattern, "**/{node_modules,.venv,runs}/**", 500);
      const files = uris.map((uri) => named(uri.fsPath, place.folder)).sort();
      const each = (file) => ["check", "compile"].map((command) => ({ command, files: [file] }));
      const wanted = files.flatMap(each);
      for (const one of [{ command: "check", files }, ...wanted]) {
        const made = make({ type: TYPE, ...one }, place, scope);
        if (made) {
          made.name = one.files === files ? "check all programs" : made.name;
          found.push(made);
        }
      }
    }
    return found;
  },

  /** A task as tasks.json has it. Its definition must come back as it was. */
  resolveTask(task) {
    const made = make(task.definition, here(task.scope), task.scope);
    if (made) {
      made.name = task.name;
    }
    return made;
  },
};

/** @param {vscode.ExtensionContext} context */
function register(context) {
  context.subscriptions.push(vscode.tasks.registerTaskProvider(TYPE, provider));
}

module.exports = { tasks: { make, register, provider, TYPE, MATCHER } };
