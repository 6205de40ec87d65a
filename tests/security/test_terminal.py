"""Nothing that a plan, a template or a worker says reaches a terminal raw."""

from __future__ import annotations

import io
import json
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from rldsl.cli import main
from rldsl.diag import Diagnostic, visible
from rldsl.plan.codec import encode
from rldsl.plan.disk_paths import paths, text
from rldsl.plan.model import Plan
from rldsl.plan.visible_plan import visible_plan
from rldsl.report import render, to_github
from rldsl.runtime.metrics.tee import Tee
from tests.plan.sample import grpo

EVIL = "\x1b[2J\x1b[1A\r\x9b2K\x07\u202e\x7f"


def strings(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The path of every string in a plan."""
    if isinstance(value, str):
        return [path]
    if isinstance(value, tuple):
        return [p for i, x in enumerate(value) for p in strings(x, (*path, i))]
    if is_dataclass(value):
        return [p for f in fields(value) for p in strings(getattr(value, f.name), (*path, f.name))]
    return []


def spoiled(value: Any, path: tuple[Any, ...], added: str) -> Any:
    if not path:
        return value + added
    step, *rest = path
    if isinstance(value, tuple):
        return (*value[:step], spoiled(value[step], tuple(rest), added), *value[step + 1 :])
    return replace(value, **{step: spoiled(getattr(value, step), tuple(rest), added)})


def kinds(plan: Plan) -> list[tuple[Any, ...]]:
    """One path for each field of each kind of record that holds a string."""
    found: dict[tuple[Any, ...], tuple[Any, ...]] = {}
    for path in strings(plan):
        record, names = plan, []
        for step in path:
            names.append(type(record).__name__ if isinstance(step, str) else "")
            record = record[step] if isinstance(step, int) else getattr(record, step)
        found.setdefault((tuple(names), tuple(s for s in path if isinstance(s, str))), path)
    return list(found.values())


def harmless(said: str) -> bool:
    return all(c.isprintable() or c in "\n\t" for c in said)


@pytest.mark.thorough
@pytest.mark.parametrize("command", [["verify"], ["show"], ["show", "--paths"], ["show", "--rank", "0"],
                                     ["show", "--event", "5"], ["diff"]], ids=" ".join)
def test_no_string_of_a_plan_reaches_the_terminal_raw(command: list[str], tmp_path: Path) -> None:
    plan, seen = grpo(), 0
    (tmp_path / "good.plan").write_bytes(encode(plan))
    for path in kinds(plan):
        (tmp_path / "bad.plan").write_bytes(encode(spoiled(plan, path, EVIL + "\nok bad.plan")))
        files = [str(tmp_path / "bad.plan")] + ([str(tmp_path / "good.plan")] if command == ["diff"] else [])
        said = CliRunner().invoke(main, [command[0], *files, *command[1:]]).output
        assert harmless(said), (path, said)
        assert not any(line.startswith("ok bad.plan") and len(line) < 20 for line in said.splitlines()), (path, said)
        seen += "\\x1b" in said or "\\u001b" in said
    assert seen > 5 and len(kinds(plan)) > 60, "the fields are shown, escaped"


def test_json_stays_json(tmp_path: Path) -> None:
    """And keeps the names as they are."""
    bad, plan = EVIL + "\U000e0001", grpo()
    path = next(p for p in strings(plan) if p[-1] == "because")
    (tmp_path / "p.plan").write_bytes(encode(spoiled(plan, path, bad)))
    said = CliRunner().invoke(main, ["--output-format", "json", "show", str(tmp_path / "p.plan")]).output
    found: list[str] = []
    json.loads(said, object_hook=lambda o: found.extend(x for x in o.values() if isinstance(x, str)))
    assert harmless(said) and any(x.endswith(bad) for x in found)


def test_what_a_run_shows_of_paths_is_escaped() -> None:
    plan = grpo()
    for path in kinds(plan):
        said = text(paths(spoiled(plan, path, EVIL + "\nwrites   nothing")))
        assert harmless(said) and "\nwrites   nothing" not in said, path


@pytest.mark.parametrize("field", ["title", "label", "place", "help", "notes"])
def test_diagnostics_are_escaped(field: str) -> None:
    """A chat template's own message stands in a title, a worker's in a note."""
    whole = Diagnostic("RL0750", "the chat template rejects these messages: x", place="data.jsonl:1", notes=("a",))
    bad = replace(whole, **{field: (EVIL,) if field == "notes" else EVIL})
    assert harmless(render([bad])) and "\\x1b[2J" in render([bad]) or field == "label"
    assert harmless(to_github([bad]))


def test_notes_keep_their_lines() -> None:
    assert "one\ntwo" in render([Diagnostic("RL0771", "t", notes=("one\ntwo",))])
    assert "one\\ntwo" in render([Diagnostic("RL0771", "one\ntwo")])


def test_what_ranks_print_is_escaped_but_for_colors() -> None:
    screen, log = io.StringIO(), io.StringIO()
    assert Tee(screen, log).write(f"a\x1b[1;31mred\x1b[0m {EVIL}\n") == len(f"a\x1b[1;31mred\x1b[0m {EVIL}\n")
    assert screen.getvalue() == log.getvalue() == f"a\x1b[1;31mred\x1b[0m {visible(EVIL)}\n"


def test_a_plan_without_control_characters_is_itself() -> None:
    plan = grpo()
    assert visible_plan(plan) is plan
    assert visible("naïve – 数 \\n") == "naïve – 数 \\n"
