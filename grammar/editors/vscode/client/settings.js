"use strict";
// Settings, and the command lines that follow from them. Nothing of VS Code is needed here.

const path = require("path");

/**
 * @typedef {{path: string, arguments: string[], compileArguments: string[], cluster: string}} Settings
 * @typedef {{command: string, args: string[], cwd: string}} CommandLine
 */

/**
 * The settings of a scope, each of the right type whatever a settings file holds.
 * @param {(name: string) => unknown} get a setting by its name without "rlf."
 * @param {string} folder of the workspace
 * @returns {Settings}
 */
function settings(get, folder) {
  const text = (name, otherwise) => {
    const value = get(name);
    return typeof value === "string" && value.trim() ? expand(value.trim(), folder) : otherwise;
  };
  const list = (name) => {
    const value = get(name);
    return Array.isArray(value) ? value.map((item) => expand(String(item), folder)) : [];
  };
  return {
    path: text("path", "rlc"),
    arguments: list("arguments"),
    compileArguments: list("compileArguments"),
    cluster: text("cluster", ""),
  };
}

/** @param {string} text @param {string} folder */
function expand(text, folder) {
  return text.replace(/\$\{workspaceFolder\}/g, () => folder);
}

/**
 * How to start the compiler. A path with a separator in it is one from the folder, a bare name one of the PATH.
 * @param {Settings} given @param {string} folder @param {...string} args
 * @returns {CommandLine}
 */
function commandLine(given, folder, ...args) {
  const command = /[\\/]/.test(given.path) ? path.resolve(folder, given.path) : given.path;
  return { command, args: [...given.arguments, ...args], cwd: folder };
}

/**
 * A file as a user of the folder's terminal would name it: what the compiler writes into plans and messages.
 * @param {string} file @param {string} folder
 */
function named(file, folder) {
  const relative = path.relative(folder, file);
  const outside = relative === "" || relative.startsWith("..") || path.isAbsolute(relative);
  return outside ? file : relative;
}

module.exports = { settings, commandLine, named };
