"""Code repair as an environment: the tool runs a version of the code and its tests. Data: {"prompt", "tests"}; tests are
a list of statements, each of which fails by raising.

`sandbox.py`, next to this file, says what its interpreter stops and what it does not.
"""

import json
import secrets

from sandbox import run

# runs what is on its standard input, and says after each test whether it passed. What the code prints is not taken for
# that, nor that it exits early: the lines begin with a word of this run, which is not in the code's scope. Code that
# searches the interpreter for it, or changes the interpreter, can cheat
PROGRAM = """
import json, os, sys
task = json.load(sys.stdin)
say = os.fdopen(os.dup(1), "w", buffering=1)
word, code, tests = task.pop("word"), task.pop("code"), task.pop("tests")
scope = {"__name__": "code"}
exec(compile(code, "code", "exec"), scope)
for i, test in enumerate(tests):
    try:
        exec(compile(test, "test", "exec"), scope)
        say.write(f"{word} {i} passed\\n")
    except Exception as error:
        say.write(f"{word} {i} {type(error).__name__}: {str(error)[:200]}\\n")
"""


class CodeRepair:
    def reset(self, tests, **row):
        """Begins with one row of the data."""
        self.tests, self.passed, self.runs = [str(t) for t in tests], 0, 0

    def run_tests(self, code: str) -> str:
        """Runs a version of the code and its tests.

        Args:
            code: The whole Python code, without the tests.
        """
        word = secrets.token_hex(8)
        status, output = run(PROGRAM, json.dumps({"word": word, "code": code, "tests": self.tests}))
        said = dict(line.split(" ", 2)[1:] for line in output.splitlines() if line.startswith(f"{word} "))
        shown = [line for line in output.splitlines() if not line.startswith(f"{word} ")]
        self.passed, self.runs = sum(text == "passed" for text in said.values()), self.runs + 1
        results = [f"{test}: {said.get(str(i), 'was not run')}" for i, test in enumerate(self.tests)]
        return "\n".join([*results, *([f"the interpreter {status}"] if status else []), *shown[-10:]])

    def get_reward(self) -> float:
        """The share of tests that the last version has passed."""
        return self.passed / len(self.tests)
