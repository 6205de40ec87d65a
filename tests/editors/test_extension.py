"""The extension of VS Code: what package.json promises is what the client's code and the compiler do."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.samples import thorough_between

HERE = Path(__file__).parent
FOLDER = HERE.parents[1] / "grammar" / "editors" / "vscode"
PACKAGE: dict[str, Any] = json.loads((FOLDER / "package.json").read_text())
CODE = "\n".join(p.read_text() for p in [FOLDER / "extension.js", *sorted((FOLDER / "client").glob("*.js"))])


def test_commands_are_those_of_the_code() -> None:
    declared = {c["command"] for c in PACKAGE["contributes"]["commands"]}
    assert declared == set(re.findall(r'registerCommand\("([\w.]+)"', CODE))
    assert {c["title"] for c in PACKAGE["contributes"]["commands"]} >= {"Compile", "Show plan", "Open report"}
    assert {m["command"] for menu in PACKAGE["contributes"]["menus"].values() for m in menu} <= declared


def test_settings_are_those_of_the_code() -> None:
    properties = PACKAGE["contributes"]["configuration"]["properties"]
    declared = {name.removeprefix("rlf."): p for name, p in properties.items()}
    del declared["trace.server"]  # the client's library reads it
    kinds = {"text": "string", "list": "array"}
    read = dict((name, kinds[kind]) for kind, name in re.findall(r'(text|list)\("(\w+)"', CODE))
    assert read == {name: p["type"] for name, p in declared.items()}
    untrusted = PACKAGE["capabilities"]["untrustedWorkspaces"]
    restricted = {s.removeprefix("rlf.") for s in untrusted["restrictedConfigurations"]}
    assert restricted == set(read) - {"cluster"}  # all that say what is run


def test_tasks_are_those_of_the_code() -> None:
    (definition,) = PACKAGE["contributes"]["taskDefinitions"]
    (matcher,) = PACKAGE["contributes"]["problemMatchers"]
    assert f'TYPE = "{definition["type"]}"' in CODE and f'MATCHER = "${matcher["name"]}"' in CODE
    assert f"onTaskType:{definition['type']}" in PACKAGE["activationEvents"]
    told = set(re.findall(r'definition\.command === "(\w+)"', CODE))
    assert told == set(definition["properties"]["command"]["enum"])
    assert matcher["pattern"] == f"${PACKAGE['contributes']['problemPatterns'][0]['name']}"


def test_what_the_compiler_is_asked_it_knows() -> None:
    from rldsl.cli import main

    asked = set(re.findall(r'\["(check|compile|show|report)"', CODE)) | {"lsp"}
    assert asked == {"check", "compile", "show", "report", "lsp"} <= set(main.commands)
    options = {name: {o for p in main.commands[name].params for o in p.opts} for name in asked}
    assert {"--emit", "-o"} <= options["compile"] and {"-o", "--cluster"} <= options["report"]


def test_the_extension_and_its_lock_agree() -> None:
    lock = json.loads((FOLDER / "package-lock.json").read_text())
    assert lock["packages"][""]["dependencies"] == PACKAGE["dependencies"] and lock["version"] == PACKAGE["version"]
    assert all("integrity" in p for name, p in lock["packages"].items() if name)
    import tomllib

    project = tomllib.loads((FOLDER.parents[2] / "pyproject.toml").read_text())["project"]
    assert (PACKAGE["version"], PACKAGE["license"]) == (project["version"], project["license"])


# ----------------------------------------------------------------------------------------- the problem matcher

LIBRARY = "fn half(x: seq) -> seq {\n  return x / 2 + nothing\n}\n"
PROGRAMS = {
    "name.rlf": "flow f(steps=1) {\n  metric größe = mean(nothing)\n}\n",
    "broken.rlf": "flow f(steps=1) {\n  x = = 1\n}\nparam a = \n",
    "two.rlf": 'use std.grpo (group_nrm)\nuse std.nothing (x)\nmodel m = causal_lm("m")\nmodel m = causal_lm("m")\n'
               "flow f(steps=1) {\n  x = 1\n}\n",
    "with space.rlf": 'use "mine.rlf" (half)\nparam unused = 1\ndata d = jsonl("d", batch=1)\nflow f(steps=1) {\n'
                      "  p = d.next()\n  metric m = count(p) + half\n}\n",
}


def matched(output: str) -> list[tuple[str, str, str, str, int, int]]:
    """What an editor makes of an output: its matcher's lines, one right after the other."""
    first, second = PACKAGE["contributes"]["problemPatterns"][0]["patterns"]
    lines, found = output.splitlines(), []
    for line, after in zip(lines, lines[1:]):
        head, place = re.match(first["regexp"], line), re.match(second["regexp"], after)
        if head and place:
            found.append((head[first["severity"]], head[first["code"]], head[first["message"]], place[second["file"]],
                          int(place[second["line"]]), int(place[second["column"]])))
    return found


@pytest.fixture(scope="module")
def checked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checked")
    for name, text in {**PROGRAMS, "mine.rlf": LIBRARY}.items():
        (folder / name).write_text(text)
    return folder


def check(folder: Path, *args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "rldsl.cli", "check", *args], cwd=folder, capture_output=True,
                          text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})


@pytest.mark.thorough
@pytest.mark.parametrize("names", [[n] for n in PROGRAMS] + [list(PROGRAMS)], ids=lambda n: "+".join(n))
def test_the_matcher_finds_what_check_says(checked: Path, names: list[str]) -> None:
    spoken, records = check(checked, *names), json.loads(check(checked, "--output-format", "json", *names).stdout)
    expected = [(d["severity"], d["code"], d["title"], d["span"]["file"], d["span"]["line"], d["span"]["column"])
                for d in records["diagnostics"] if d["span"]]
    assert expected and matched(spoken.stdout + spoken.stderr) == expected


@pytest.mark.parametrize("output", [
    "ppo.rlf: no errors found\n",
    "error[RL0091]: no such file: nowhere.rlf\n --> nowhere.rlf\n  = help: paths are relative\n",
    "error[RL0101]: unknown name\n\n --> a.rlf:1:2\n",
    "  error[RL0101]: quoted\n --> a.rlf:1:2\n",
    "internal compiler error: x\n --> a.rlf:1:2\n",
])
def test_the_matcher_takes_nothing_else(output: str) -> None:
    assert matched(output) == []


# --------------------------------------------------------------------------------------------------- in node


def in_node(extension: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["node", "--test", str(HERE / "client/client.test.js")], capture_output=True, text=True,
                          timeout=120, env=os.environ | {"EXTENSION": str(extension)})


@pytest.mark.skipif(shutil.which("node") is None, reason="no node on this machine")
def test_the_client_in_node() -> None:
    done = in_node(FOLDER)
    assert done.returncode == 0, done.stdout + done.stderr
    count = re.search(r"^# pass (\d+)$|^ℹ pass (\d+)$", done.stdout, re.MULTILINE)
    assert count is not None and int(count[1] or count[2]) >= 22


@pytest.mark.skipif(shutil.which("node") is None, reason="no node on this machine")
@pytest.mark.parametrize("before, after", thorough_between([
    ('"compile", "--emit", "plan"', '"compile"'),
    ("stop.abort()", "undefined"),
    ("scheme !== \"file\"", "scheme === 1"),
]))
def test_the_tests_in_node_can_fail(tmp_path: Path, before: str, after: str) -> None:
    shutil.copytree(FOLDER, tmp_path / "vscode", ignore=shutil.ignore_patterns("node_modules"))
    changed = [p for p in (tmp_path / "vscode/client").glob("*.js") if before in p.read_text()]
    assert changed
    for path in changed:
        path.write_text(path.read_text().replace(before, after))
    assert in_node(tmp_path / "vscode").returncode != 0
