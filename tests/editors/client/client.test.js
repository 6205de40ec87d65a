"use strict";
// The extension in node, with VS Code and the language client replaced. EXTENSION: its folder.

const assert = require("node:assert/strict");
const fs = require("fs");
const Module = require("module");
const os = require("os");
const path = require("path");
const { test } = require("node:test");
const { make, Uri } = require("./vscode");

const EXTENSION = process.env.EXTENSION;
const FAKE = { path: process.execPath, arguments: [path.join(__dirname, "rlc.js")] };
const folder = fs.realpathSync(fs.mkdtempSync(path.join(os.tmpdir(), "client-")));
test.after(() => fs.rmSync(folder, { recursive: true }));

/** The extension, loaded anew, in a window of its own. client: what stands for the language client's library. */
function window(given = {}, client = undefined) {
  const made = make({ folder, values: FAKE, ...given });
  const load = Module._load;
  for (const name of Object.keys(require.cache)) {
    if (name.startsWith(EXTENSION)) {
      delete require.cache[name];
    }
  }
  const clients = [];
  class LanguageClient {
    constructor(...args) {
      Object.assign(this, { args, started: 0, disposed: 0 });
      clients.push(this);
    }
    async start() {
      this.started += 1;
      if (client instanceof Error) throw client;
    }
    async dispose() {
      this.disposed += 1;
    }
  }
  Module._load = function (name, ...rest) {
    if (name === "vscode") return made.vscode;
    if (name === "vscode-languageclient/node") {
      if (client === "absent") throw Object.assign(new Error("no such module"), { code: "MODULE_NOT_FOUND" });
      return { LanguageClient };
    }
    return load.call(this, name, ...rest);
  };
  const own = (name) => require(path.join(EXTENSION, name));
  const extension = own("extension.js");
  const context = { subscriptions: [] };
  return { ...made, extension, context, clients, own, rest: () => new Promise((done) => setTimeout(done, 20)) };
}

// ---------------------------------------------------------------------------------------------- settings

test("settings of a wrong type are the defaults", () => {
  const { settings } = window().own("client/settings.js");
  const none = { path: "rlc", arguments: [], compileArguments: [], cluster: "" };
  assert.deepEqual(settings(() => undefined, "/w"), none);
  const wrong = { path: 3, arguments: "-v", compileArguments: { a: 1 }, cluster: ["h100x8"] };
  assert.deepEqual(settings((name) => wrong[name], "/w"), none);
  assert.deepEqual(settings((name) => (name === "path" ? "  " : undefined), "/w"), none);
});

test("settings may name the workspace's folder", () => {
  const { settings } = window().own("client/settings.js");
  const given = { path: " ${workspaceFolder}/.venv/bin/rlc ", arguments: [1, "${workspaceFolder}/$&"], cluster: " h100x8" };
  const found = settings((name) => given[name], "/w $1");
  assert.deepEqual([found.path, found.arguments, found.cluster], ["/w $1/.venv/bin/rlc", ["1", "/w $1/$&"], "h100x8"]);
});

test("a path is one from the folder, a name one of the PATH", () => {
  const { commandLine } = window().own("client/settings.js");
  const of = (name) => commandLine({ path: name, arguments: ["-v"] }, "/w", "lsp");
  assert.deepEqual(of("rlc"), { command: "rlc", args: ["-v", "lsp"], cwd: "/w" });
  assert.equal(of(".venv/bin/rlc").command, path.resolve("/w", ".venv/bin/rlc"));
  assert.equal(of("/opt/rlc").command, path.resolve("/opt/rlc"));
});

test("files are named as in the folder's terminal, others in full", () => {
  const { named } = window().own("client/settings.js");
  assert.equal(named("/w/a/b.rlf", "/w"), path.join("a", "b.rlf"));
  assert.equal(named("/else/b.rlf", "/w"), "/else/b.rlf");
});

// ------------------------------------------------------------------------------------------------- steps

const GIVEN = { compileArguments: ["--set", "a=1"], cluster: "h100x8" };

test("what the commands ask of the compiler", () => {
  const { plan, report } = window().own("client/steps.js");
  assert.deepEqual(plan("a.rlf", GIVEN), ["compile", "--emit", "plan", "--set", "a=1", "a.rlf"]);
  assert.deepEqual(plan("a.plan", GIVEN), ["show", "a.plan"]);
  const into = { plan: "t.plan", page: "t.html" };
  const page = ["report", "t.plan", "-o", "t.html", "--cluster", "h100x8"];
  assert.deepEqual(report("a.rlf", GIVEN, into), [["compile", "--set", "a=1", "-o", "t.plan", "a.rlf"], page]);
  assert.deepEqual(report("a.plan", { ...GIVEN, cluster: "" }, into), [["report", "a.plan", "-o", "t.html"]]);
});

test("tasks take their own files first, and there is none without a file", () => {
  const { task } = window().own("client/steps.js");
  assert.deepEqual(task({ command: "check", files: ["a", "b"], arguments: ["--strict"] }, ["c"], GIVEN),
    ["check", "--strict", "a", "b"]);
  assert.deepEqual(task({ command: "compile" }, ["c"], GIVEN), ["compile", "--set", "a=1", "c"]);
  for (const wrong of [{ command: "check", files: [] }, { command: "compile" }, { command: "else", files: ["a"] },
    { command: "compile", files: ["a", "b"] }]) {
    assert.equal(task(wrong, [], GIVEN), undefined);
  }
});

// ---------------------------------------------------------------------------------------- language server

test("the server is the settings' compiler, in the folder, and hears of the cluster", async () => {
  const w = window({ values: { path: ".venv/bin/rlc", arguments: ["-v"], cluster: "h100x8" } });
  await w.extension.activate(w.context);
  await w.rest();
  const [id, , server, options] = w.clients[0].args;
  assert.deepEqual([id, server.command, server.args, server.options.cwd],
    ["rlf", path.join(folder, ".venv/bin/rlc"), ["-v", "lsp"], folder]);
  assert.deepEqual(options.initializationOptions, { cluster: "h100x8" });
  assert.deepEqual(options.documentSelector, [{ scheme: "file", language: "rlf" }]);
  assert.equal(w.clients[0].started, 1);
});

test("another path starts another server, another cluster does not", async () => {
  const w = window();
  await w.extension.activate(w.context);
  await w.rest();
  await w.heard.configuration({ affectsConfiguration: (name) => name === "rlf.cluster" });
  assert.equal(w.clients.length, 1);
  await Promise.all([1, 2].map(() => w.heard.configuration({ affectsConfiguration: (name) => name === "rlf.path" })));
  assert.deepEqual(w.clients.map((c) => [c.started, c.disposed]), [[1, 1], [1, 1], [1, 0]]);
  await w.extension.deactivate();
  assert.equal(w.clients[2].disposed, 1);
});

test("a server that does not start is told of, with the way to the setting", async () => {
  const w = window({ answer: "Open settings" }, new Error("spawn rlc ENOENT"));
  await w.extension.activate(w.context);
  await w.rest();
  assert.match(w.seen.told[0][1], /pip install 'rldsl\[lsp\]'/);
  assert.deepEqual(w.seen.ran, [["workbench.action.openSettings", "rlf.path"]]);
  await w.seen.commands["rlf.restart"]();
  assert.equal(w.clients.length, 2);
});

test("a folder without its libraries says so, and the commands are there", async () => {
  const w = window({}, "absent");
  await w.extension.activate(w.context);
  await w.rest();
  assert.match(w.seen.told[0][1], /npm ci/);
  assert.ok(w.seen.commands["rlf.compile"]);
});

// ----------------------------------------------------------------------------------------------- commands

const ready = async (given) => {
  const w = window(given);
  await w.extension.activate(w.context);
  return w;
};

test("Show plan runs the compiler in the folder and shows what it prints", async () => {
  const w = await ready({ values: { ...FAKE, compileArguments: ["--set", "a=1"] } });
  const document = w.open(path.join(folder, "a.rlf"), { dirty: true });
  await w.seen.commands["rlf.showPlan"]();
  assert.equal(document.saved, 1);
  const said = JSON.parse(w.seen.shown[0][0].text);
  assert.deepEqual(said, { args: ["compile", "--emit", "plan", "--set", "a=1", "a.rlf"], cwd: folder, plain: "1" });
  assert.match(w.seen.shown[0][0].uri.path, /a\.rlf\.plan\.txt$/);
});

test("Show plan of a plan in the explorer", async () => {
  const w = await ready();
  await w.seen.commands["rlf.showPlan"](Uri.file(path.join(folder, "b.plan")));
  assert.deepEqual(JSON.parse(w.seen.shown[0][0].text).args, ["show", "b.plan"]);
});

test("Open report shows the page, and leaves no files", async () => {
  const w = await ready({ values: { ...FAKE, cluster: "h100x8" } });
  w.open(path.join(folder, "a.rlf"));
  await w.seen.commands["rlf.openReport"]();
  const [panel] = w.seen.panels;
  const { args, cwd } = JSON.parse(panel.webview.html.slice("<html>".length));
  assert.equal(cwd, folder);
  assert.deepEqual([args[0], args.slice(4)], ["report", ["--cluster", "h100x8"]]);
  assert.equal(fs.existsSync(path.dirname(args[1])), false);
  assert.deepEqual(panel.options.localResourceRoots, []);
});

test("Compile is the task of the program", async () => {
  const w = await ready();
  w.open(path.join(folder, "sub", "a.rlf"));
  await w.seen.commands["rlf.compile"]();
  const [task] = w.seen.tasks;
  assert.deepEqual(task.execution.args.slice(1), ["compile", path.join("sub", "a.rlf")]);
  assert.deepEqual([task.source, task.matchers, task.execution.options.cwd], ["rlc", "$rlc", folder]);
});

test("what the compiler says against a program is shown, and nothing else", async () => {
  const w = await ready({ answer: "Show all" });
  w.open(path.join(folder, "wrong.rlf"));
  await w.seen.commands["rlf.showPlan"]();
  await w.seen.commands["rlf.openReport"]();
  assert.deepEqual(w.seen.told.map((x) => x[1]), Array(2).fill("error[RL0101]: unknown name `x`"));
  assert.match(w.seen.output.join("\n"), / --> wrong\.rlf:1:2[^]*shown/);
  assert.deepEqual([w.seen.shown, w.seen.panels], [[], []]);
});

test("a compiler that is not there", async () => {
  const w = await ready({ values: { path: "/nowhere/rlc" } });
  w.open(path.join(folder, "a.rlf"));
  await w.seen.commands["rlf.showPlan"]();
  assert.match(w.seen.told.at(-1)[1], /cannot start .*rlf\.path/);
});

test("a run can be cancelled", async () => {
  const w = await ready();
  w.open(path.join(folder, "slow.rlf"));
  const running = w.seen.commands["rlf.showPlan"]();
  while (!w.heard.cancel) await w.rest();
  w.heard.cancel();
  await running;
  assert.deepEqual([w.seen.shown, w.seen.told], [[], []]);
});

test("without a program of this machine nothing runs", async () => {
  const w = await ready();
  for (const name of ["rlf.compile", "rlf.showPlan", "rlf.openReport"]) {
    await w.seen.commands[name]();
    await w.seen.commands[name](new Uri("untitled", "Untitled-1"));
  }
  assert.equal(w.seen.told.filter(([kind]) => kind === "information").length, 6);
  assert.deepEqual([w.seen.tasks, w.seen.shown, w.seen.panels], [[], [], []]);
});

test("a program that cannot be saved is not compiled", async () => {
  const w = await ready();
  w.open(path.join(folder, "a.rlf"), { dirty: true, saves: false });
  await w.seen.commands["rlf.compile"]();
  assert.deepEqual(w.seen.tasks, []);
});

// -------------------------------------------------------------------------------------------------- tasks

test("there is a task to check and one to compile for each program, and one to check all", async () => {
  const w = await ready({ files: ["b.rlf", "a.rlf"] });
  const found = await w.seen.providers.rlc.provideTasks();
  assert.deepEqual(found.map((t) => t.name),
    ["check all programs", "check a.rlf", "compile a.rlf", "check b.rlf", "compile b.rlf"]);
  assert.deepEqual(found[0].execution.args.slice(1), ["check", "a.rlf", "b.rlf"]);
});

test("there are none without programs, and none without a folder", async () => {
  assert.deepEqual(await (await ready()).seen.providers.rlc.provideTasks(), []);
  assert.deepEqual(await (await ready({ folder: undefined })).seen.providers.rlc.provideTasks(), []);
});

test("a task of tasks.json keeps its definition; without files it takes the program in the editor", async () => {
  const w = await ready();
  const { resolveTask } = w.seen.providers.rlc;
  const definition = { type: "rlc", command: "check", arguments: ["--strict"] };
  const scope = w.vscode.workspace.workspaceFolders[0];
  assert.equal(resolveTask({ definition, scope, name: "mine" }), undefined);
  w.open(path.join(folder, "a.rlf"));
  const made = resolveTask({ definition, scope, name: "mine" });
  assert.equal(made.definition, definition);
  assert.deepEqual([made.name, made.execution.args.slice(1)], ["mine", ["check", "--strict", "a.rlf"]]);
});
