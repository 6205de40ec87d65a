"use strict";
// Where the user is: the file a command is about, the folder it is run in, the settings that hold there.

const path = require("path");
const vscode = require("vscode");
const { settings, named } = require("./settings");

/**
 * @typedef {{uri: vscode.Uri, file: string, folder: string, given: import("./settings").Settings}} Place
 */

/** @param {vscode.Uri} [uri] of a file in the folder; without one, the first folder that is open */
function folderOf(uri) {
  const found = uri && vscode.workspace.getWorkspaceFolder(uri);
  const first = (vscode.workspace.workspaceFolders || [])[0];
  return found ? found.uri.fsPath : !uri && first ? first.uri.fsPath : uri ? path.dirname(uri.fsPath) : process.cwd();
}

/** @param {vscode.Uri} [uri] */
function settingsOf(uri) {
  const values = vscode.workspace.getConfiguration("rlf", uri);
  return settings((name) => values.get(name), folderOf(uri));
}

/**
 * The file that a command is about: the one it was called on, else the one in the editor. A changed text is saved
 * first, since the compiler reads files. undefined where there is none.
 * @param {vscode.Uri} [uri] @returns {Promise<Place | undefined>}
 */
async function placeOf(uri) {
  const editor = vscode.window.activeTextEditor;
  const at = uri instanceof vscode.Uri ? uri : editor && editor.document.uri;
  if (!at || at.scheme !== "file") {
    vscode.window.showInformationMessage("First open a program (.rlf) from a local folder.");
    return undefined;
  }
  const open = vscode.workspace.textDocuments.find((d) => d.uri.toString() === at.toString());
  if (open && open.isDirty && !(await open.save())) {
    return undefined;
  }
  const folder = folderOf(at);
  return { uri: at, file: named(at.fsPath, folder), folder, given: settingsOf(at) };
}

module.exports = { folderOf, settingsOf, placeOf };
