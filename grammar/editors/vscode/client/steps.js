"use strict";
// What each command of the editor asks the compiler, as arguments of `rlc`.

const isPlan = (file) => file.endsWith(".plan");

/**
 * The plan of a program or of a plan file, as text on standard output; nothing is written.
 * @param {string} file @param {import("./settings").Settings} given
 * @returns {string[]}
 */
function plan(file, given) {
  return isPlan(file) ? ["show", file] : ["compile", "--emit", "plan", ...given.compileArguments, file];
}

/**
 * The steps that write the report of a program or of a plan file.
 * @param {string} file @param {import("./settings").Settings} given
 * @param {{plan: string, page: string}} into where the plan of a program and the page go
 * @returns {string[][]}
 */
function report(file, given, into) {
  const cluster = given.cluster ? ["--cluster", given.cluster] : [];
  const source = isPlan(file) ? file : into.plan;
  const page = ["report", source, "-o", into.page, ...cluster];
  return isPlan(file) ? [page] : [["compile", ...given.compileArguments, "-o", into.plan, file], page];
}

/**
 * A task of tasks.json.
 * @param {{command: string, files?: string[], arguments?: string[]}} definition
 * @param {string[]} files those to take where the definition names none
 * @param {import("./settings").Settings} given
 * @returns {string[] | undefined} undefined where the task has no file, or compiles more than one
 */
function task(definition, files, given) {
  const named = definition.files && definition.files.length ? definition.files : files;
  const more = definition.arguments || [];
  if (definition.command === "compile") {
    return named.length === 1 ? ["compile", ...given.compileArguments, ...more, ...named] : undefined;
  }
  return definition.command === "check" && named.length ? ["check", ...more, ...named] : undefined;
}

module.exports = { plan, report, task, isPlan };
