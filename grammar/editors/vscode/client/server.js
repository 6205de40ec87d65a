"use strict";
// The language server's side: starts `rlc lsp`, and says what to do where it cannot be started.

const vscode = require("vscode");
const { commandLine } = require("./settings");
const { folderOf, settingsOf } = require("./place");

/** One server for the window. */
class Server {
  constructor() {
    this.client = undefined;
    this.turn = Promise.resolve();
  }

  /** Starts are one after the other, however quickly settings change. */
  restart() {
    this.turn = this.turn.then(() => this.stop()).then(() => this.start());
    return this.turn;
  }

  async start() {
    const given = settingsOf();
    const run = commandLine(given, folderOf(), "lsp");
    try {
      const { LanguageClient } = require("vscode-languageclient/node");
      this.client = new LanguageClient(
        "rlf",
        "rldsl",
        { command: run.command, args: run.args, options: { cwd: run.cwd } },
        {
          documentSelector: [{ scheme: "file", language: "rlf" }],
          initializationOptions: { cluster: given.cluster },
          synchronize: {
            configurationSection: "rlf",
            fileEvents: vscode.workspace.createFileSystemWatcher("**/*.{rlf,yaml,yml}"),
          },
        },
      );
      await this.client.start();
    } catch (error) {
      this.client = undefined;
      await failed(error, [run.command, ...run.args].join(" "));
    }
  }

  async stop() {
    const client = this.client;
    this.client = undefined;
    if (client) {
      await client.dispose().catch(() => undefined); // one that died has nothing to say
    }
  }
}

/** @param {any} error @param {string} line the command line */
async function failed(error, line) {
  const bundled = !(error && error.code === "MODULE_NOT_FOUND");
  const why = bundled
    ? `The language server did not start (${line}). Install it with: pip install 'rldsl[lsp]', or set rlf.path.`
    : "The extension's dependencies are missing: run `npm ci --omit=dev` in its folder, or install the packed extension.";
  const pick = await vscode.window.showErrorMessage(why, ...(bundled ? ["Open settings"] : []));
  if (pick) {
    await vscode.commands.executeCommand("workbench.action.openSettings", "rlf.path");
  }
}

module.exports = { Server };
