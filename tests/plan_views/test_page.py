"""docs/plans.md shows what the commands say: each `$ rlc ...` of it is run, and its output compared. Numbers of bytes
and seconds and ids of plans change with the compiler and are left out; `...` stands for lines that are not shown."""

from __future__ import annotations

import re
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from rldsl.cli import main
from rldsl.inspect.diff import Change, diff
from rldsl.inspect.diff_text import as_json
from tests.plan_views.plans import change, grpo
from tests.tiny import make_all

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/plans.md").read_text()


def sessions(text: str) -> Iterator[tuple[str, str]]:
    """(command, what it says) of each fence that begins with `$ `; a command may go on after a backslash."""
    for fence in re.findall(r"^```\n(\$ .*?)^```", text, re.MULTILINE | re.DOTALL):
        for part in re.split(r"^\$ ", fence, flags=re.MULTILINE)[1:]:
            command, output = re.fullmatch(r"((?:[^\n]*\\\n)*[^\n]*)\n(.*)", part, re.DOTALL).groups()  # type: ignore
            yield command.replace("\\\n", " "), output


def masked(text: str) -> str:
    text = re.sub(r"\b[0-9a-f]{12}\b", "ID", text)
    text = re.sub(r"\b[\d.]+ ([KMGT]i)?B\b|(?<=\()\d+(?=\))|\b[\d.]+ (ms|s)\b", "N", text)
    return re.sub(r"  \([+-]\d+%\)", "  (P)", text)


def fits(shown: str, said: str) -> bool:
    """Whether `said` is what `shown` shows."""
    parts = [re.escape(part) for part in re.split(r"^ *\.\.\.\n", masked(shown), flags=re.MULTILINE)]
    return re.fullmatch(r"(?:.*\n)*?".join(parts), masked(said)) is not None


def test_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(make_all(tmp_path))
    shutil.copy(ROOT / "examples/ppo.rlf", tmp_path)
    ran = []
    for command, shown in sessions(PAGE):
        said = CliRunner().invoke(main, shlex.split(command)[1:])
        assert fits(shown, said.output), f"{command}\n{said.output}"
        ran.append(shlex.split(command)[1])
    assert set(ran) == {"compile", "show", "diff", "emit"}


def documented(name: str) -> set[str]:
    text = PAGE.partition(f"<!-- fields: {name} -->\n")[2].partition("\n\n")[0]
    return {word for row in text.splitlines()[2:] for word in re.findall(r"`(\w+)`", row.split("|")[1])}


def test_the_json_of_a_diff_is_as_documented() -> None:
    made = as_json(diff(grpo(), change(grpo(), 4, bytes=7), (1.0, 2.0)), "A", "B")
    assert documented("diff") == made.keys() and documented("diff event") == made["inserted"][0].keys()
    assert documented("diff side") == made["inserted"][0]["after"].keys()
    assert documented("change") == set(Change.__dataclass_fields__)
    assert documented("moved") == made["moved"][0].keys()


@pytest.mark.parametrize("shown, said, same", [
    ("a\nb\n", "a\nb\n", True), ("a\n...\nc\n", "a\nb\nb\nc\n", True), ("a\n...\n", "a\n", True), ("a\n", "a\nb\n", False),
    ("a  1.5 KiB\n", "a  2 B\n", True), ("plan 0123456789ab\n", "plan ffffffffffff\n", True), ("a\n", "b\n", False),
    ("...\nc\n", "a\nb\n", False), ("a  (+5%)\n", "a  (-71%)\n", True), ("e4  load\n", "e5  load\n", False)])
def test_a_wrong_page_is_seen(shown: str, said: str, same: bool) -> None:
    assert fits(shown, said) == same
