"""Broken files: real slips, one in each. The first message names the fault, and hardly any other follows.

A file begins with `# expect CODE at line N`, then says what the slip is.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from rldsl import api, explain
from rldsl.diag import Diagnostic
from rldsl.fix import apply
from rldsl.report import render, to_github, to_json
from rldsl.source import SourceFile

FILES = sorted((Path(__file__).parent / "broken").glob("*.rlf"))
FOLLOW_UPS = 2


def load(path: Path) -> tuple[SourceFile, str, int]:
    text = path.read_text("utf-8")
    head = re.match(r"# expect (RL\d{4}) at line (\d+)\n# \S", text)
    assert head, f"{path.name} does not say what to expect"
    return SourceFile(path.name, text), head[1], int(head[2])


def check(source: SourceFile) -> tuple[Diagnostic, ...]:
    return api.check(source.text, source.name)


def test_there_are_enough_and_of_many_kinds() -> None:
    assert len(FILES) >= 45
    assert len({load(f)[1] for f in FILES}) >= 12


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)
def test_the_first_message_names_the_fault(path: Path) -> None:
    source, code, line = load(path)
    found = check(source)
    assert found and found[0].span is not None, "no message"
    assert (found[0].code, found[0].span.line) == (code, line), render(found)
    assert len(found) <= 1 + FOLLOW_UPS, render(found)
    assert "\n" not in found[0].span.text.rstrip("\n"), "the underlined part is one line at most"
    assert code in explain.codes() and code in to_json(found) and "::error" in to_github(found)


def test_follow_up_messages_in_all() -> None:
    """One mistake, one message: what is measured here may only become better."""
    extra = {path.stem: len(check(load(path)[0])) - 1 for path in FILES}
    assert sum(extra.values()) <= 3, {k: v for k, v in extra.items() if v}


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)
def test_fixes_mend(path: Path) -> None:
    """Where there is a fix, the program is right after it; at most two more may come to light below it."""
    source, _, _ = load(path)
    found = check(source)
    if not any(d.fix for d in found):
        return
    for _ in range(3):
        text, number = apply(source, found)
        assert number == sum(d.fix is not None for d in found)
        source = SourceFile(path.name, text)
        found = check(source)
        if not found:
            return
    raise AssertionError(f"{source.text}\n{render(found)}")


def test_many_slips_have_a_fix() -> None:
    assert sum(any(d.fix for d in check(load(path)[0])) for path in FILES) >= 28
