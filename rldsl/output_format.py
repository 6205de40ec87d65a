"""The output format that a command line asks for, known before anything of it is parsed.

A program that asks for JSON gets one JSON object, also if the rest of the command line is wrong, or if Ctrl-C comes
while Python still imports the command line. Imports nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

FORMATS = ("text", "json", "github")
OPTIONS = ("--output-format", "--output")  # the second is the earlier name of the first
# what Ctrl-C prints before the command line is imported; as `rldsl.report.to_json` writes it
EARLY_INTERRUPTION = """{
 "format": 1,
 "diagnostics": [
  {
   "code": "RL0090",
   "severity": "error",
   "title": "interrupted",
   "place": "",
   "label": "",
   "span": null,
   "labels": [],
   "notes": [],
   "help": "to start again, repeat the command",
   "fix": null
  }
 ]
}
"""


def json_requested(arguments: Sequence[str]) -> bool:
    """Whether the arguments of `rlc` ask for JSON. The last option decides, as it does when they are parsed."""
    found, before = False, ""
    for word in arguments:
        if word == "--":
            break
        name, equals, value = word.partition("=")
        if word == "--json":
            found = True
        elif before in OPTIONS:
            found = word == "json"
        elif equals and name in OPTIONS:
            found = value == "json"
        before = word
    return found
