"use strict";
// The extension: the language server, three commands, and tasks. Each in its own file under client/.

const vscode = require("vscode");
const { commands } = require("./client/commands");
const { Server } = require("./client/server");
const { tasks } = require("./client/tasks");

const server = new Server();

/** @param {vscode.ExtensionContext} context */
async function activate(context) {
  const output = vscode.window.createOutputChannel("rlf");
  commands(context, output);
  tasks.register(context);
  context.subscriptions.push(
    output,
    vscode.commands.registerCommand("rlf.restart", () => server.restart()),
    vscode.workspace.onDidChangeConfiguration((change) => {
      const another = ["rlf.path", "rlf.arguments"].some((name) => change.affectsConfiguration(name));
      return another ? server.restart() : undefined;
    }),
    vscode.workspace.onDidGrantWorkspaceTrust(() => server.restart()),
  );
  server.restart(); // the editor need not wait for it
}

function deactivate() {
  return server.stop();
}

module.exports = { activate, deactivate };
