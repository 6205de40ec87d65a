"use strict";
// Runs the compiler and waits for it.

const { execFile } = require("child_process");
const { commandLine } = require("./settings");

/** What the compiler said when it refused. */
class Refused extends Error {}

/**
 * One run. Errors: Refused with the compiler's words, or why it could not be started.
 * @param {import("./settings").Settings} given @param {string} folder @param {string[]} args
 * @param {AbortSignal} [signal] ends the run
 * @returns {Promise<string>} its standard output
 */
function run(given, folder, args, signal) {
  const line = commandLine(given, folder, ...args);
  const options = { cwd: line.cwd, maxBuffer: 1 << 28, signal, env: { ...process.env, NO_COLOR: "1" } };
  return new Promise((done, refuse) => {
    execFile(line.command, line.args, options, (error, out, said) => {
      if (!error) {
        done(out);
      } else if (/** @type {any} */ (error).code === "ENOENT") {
        refuse(new Refused(`cannot start ${line.command}: set rlf.path to the location of rlc`));
      } else {
        refuse(new Refused(said.trim() || out.trim() || error.message));
      }
    });
  });
}

module.exports = { run, Refused };
