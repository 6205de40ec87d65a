"use strict";
// As much of VS Code's API as the extension uses, and a record of what it was asked.

const path = require("path");

class Uri {
  constructor(scheme, fsPath, query = "") {
    Object.assign(this, { scheme, fsPath, path: fsPath, query });
  }
  static file(name) {
    return new Uri("file", name);
  }
  static from({ scheme, path: name, query }) {
    return new Uri(scheme, name, query);
  }
  toString() {
    return `${this.scheme}:${this.path}?${this.query}`;
  }
}

class EventEmitter {
  constructor() {
    this.heard = [];
    this.event = () => ({ dispose() {} });
  }
  fire(value) {
    this.heard.push(value);
  }
}

class ProcessExecution {
  constructor(process, args, options) {
    Object.assign(this, { process, args, options });
  }
}

class Task {
  constructor(definition, scope, name, source, execution, matchers) {
    Object.assign(this, { definition, scope, name, source, execution, matchers });
  }
}

class RelativePattern {
  constructor(base, pattern) {
    Object.assign(this, { base, pattern });
  }
}

/** @param {{folder?: string, values?: object, files?: string[], answer?: string}} given */
function make({ folder, values = {}, files = [], answer } = {}) {
  const seen = { commands: {}, shown: [], told: [], tasks: [], panels: [], providers: {}, ran: [], output: [], documents: [] };
  const heard = {};
  const none = { dispose() {} };
  const listen = (name) => (call) => ((heard[name] = call), none);
  const message = (kind) => async (text, ...choices) => (seen.told.push([kind, text, ...choices]), answer);
  const folders = folder ? [{ uri: Uri.file(folder), name: "workspace", index: 0 }] : undefined;
  const vscode = {
    Uri, EventEmitter, ProcessExecution, Task, RelativePattern,
    TaskScope: { Workspace: 2 }, TaskGroup: { Build: "build" }, TaskRevealKind: { Always: 1 },
    ViewColumn: { Beside: -2 }, ProgressLocation: { Notification: 15 },
    workspace: {
      workspaceFolders: folders,
      textDocuments: seen.documents,
      getWorkspaceFolder: (uri) => (folders || []).find((f) => !path.relative(f.uri.fsPath, uri.fsPath).startsWith("..")),
      getConfiguration: () => ({ get: (name) => values[name] }),
      createFileSystemWatcher: (pattern) => ({ pattern, dispose() {} }),
      findFiles: async () => files.map((name) => Uri.file(path.join(folder, name))),
      registerTextDocumentContentProvider: (scheme, provider) => ((seen.providers[scheme] = provider), none),
      openTextDocument: async (uri) => ({ uri, text: seen.providers[uri.scheme].provideTextDocumentContent(uri) }),
      onDidChangeConfiguration: listen("configuration"),
      onDidGrantWorkspaceTrust: listen("trust"),
    },
    window: {
      activeTextEditor: undefined,
      createOutputChannel: () => ({ appendLine: (text) => seen.output.push(text), show: () => seen.output.push("shown"),
        dispose() {} }),
      showInformationMessage: message("information"),
      showErrorMessage: message("error"),
      showTextDocument: async (document, options) => seen.shown.push([document, options]),
      withProgress: (_, body) => body({}, { onCancellationRequested: (stop) => (heard.cancel = stop) }),
      createWebviewPanel: (type, title, column, options) => {
        const panel = { type, title, column, options, webview: { html: "" } };
        seen.panels.push(panel);
        return panel;
      },
    },
    commands: {
      registerCommand: (name, call) => ((seen.commands[name] = call), none),
      executeCommand: async (...args) => seen.ran.push(args),
    },
    tasks: {
      registerTaskProvider: (type, provider) => ((seen.providers[type] = provider), none),
      executeTask: async (task) => (seen.tasks.push(task), task),
    },
  };
  const open = (file, { dirty = false, saves = true } = {}) => {
    const document = { uri: Uri.file(file), languageId: "rlf", isDirty: dirty, saved: 0,
      save: async () => ((document.saved += 1), saves) };
    seen.documents.push(document);
    vscode.window.activeTextEditor = { document };
    return document;
  };
  return { vscode, seen, heard, open };
}

module.exports = { make, Uri };
