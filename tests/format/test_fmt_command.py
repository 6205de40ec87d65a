"""`rlc fmt` from the outside: what it writes, what it leaves alone, and its exit status."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from rldsl.cli import main

UGLY, PRETTY = "param x=1 # one\r\n", "param x = 1  # one\n"


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.rlf").write_text(UGLY, newline="")
    (tmp_path / "b.rlf").write_text(PRETTY)
    (tmp_path / "deep/er").mkdir(parents=True)
    (tmp_path / "deep/er/c.rlf").write_text(UGLY, newline="")
    (tmp_path / "deep/notes.txt").write_text(UGLY, newline="")
    return tmp_path


def rlc(*arguments: str, input: str | bytes = "") -> Result:
    return CliRunner().invoke(main, ["fmt", *arguments], input=input)


def text(path: Path) -> str:
    return path.read_bytes().decode()


def test_writes(work: Path) -> None:
    result = rlc("a.rlf", "b.rlf")
    assert (result.exit_code, result.output) == (0, "")
    assert text(work / "a.rlf") == text(work / "b.rlf") == PRETTY
    assert not list(work.glob("*.part"))
    assert rlc("--check", "a.rlf", "b.rlf").exit_code == 0


def test_leaves_what_is_right(work: Path) -> None:
    before = os.stat(work / "b.rlf").st_mtime_ns
    assert rlc("b.rlf").exit_code == 0 and os.stat(work / "b.rlf").st_mtime_ns == before


def test_keeps_links_and_modes(work: Path) -> None:
    (work / "a.rlf").chmod(0o600)
    (work / "link.rlf").symlink_to("a.rlf")
    assert rlc("link.rlf").exit_code == 0
    assert (work / "link.rlf").is_symlink() and text(work / "a.rlf") == PRETTY
    assert (work / "a.rlf").stat().st_mode & 0o777 == 0o600


def test_directories(work: Path) -> None:
    (work / ".hidden").mkdir()
    (work / ".hidden/d.rlf").write_text("broken (")
    assert rlc(".", "a.rlf", "deep").exit_code == 0
    assert text(work / "deep/er/c.rlf") == PRETTY and text(work / "deep/notes.txt") == UGLY


def test_check_names_what_would_change(work: Path) -> None:
    result = rlc("--check", ".")
    assert result.exit_code == 1 and result.output.splitlines() == ["a.rlf", "deep/er/c.rlf"]
    assert text(work / "a.rlf") == UGLY


def test_diff(work: Path) -> None:
    result = rlc("--diff", "a.rlf", "b.rlf")
    assert result.exit_code == 0 and "+param x = 1  # one\n" in result.output and "b.rlf" not in result.output
    assert rlc("--diff", "--check", "a.rlf").exit_code == 1
    assert text(work / "a.rlf") == UGLY
    assert "\\ No newline" in rlc("--diff", "-", input="param x = 1").output


def test_standard_input(work: Path) -> None:
    assert rlc("-", input=UGLY).stdout == PRETTY
    assert rlc("-", input=PRETTY).stdout == PRETTY
    assert rlc("-", input="").stdout == ""
    result = rlc("--check", "-", input=UGLY)
    assert (result.exit_code, result.output) == (1, "<stdin>\n")


@pytest.mark.parametrize("content, code", [
    (b"param x =\n", "RL0001"), (b"flow f {\n  a = (1\n", "RL00"), (b"param caf\xe9 = 1\n", "RL0093"),
    (b"\x00\n", "RL0003")])
def test_a_broken_file_stays_as_it_is(work: Path, content: bytes, code: str) -> None:
    (work / "bad.rlf").write_bytes(content)
    result = rlc("bad.rlf", "a.rlf")
    assert result.exit_code == 1 and code in result.stderr and "bad.rlf" in result.stderr
    assert (work / "bad.rlf").read_bytes() == content
    assert text(work / "a.rlf") == PRETTY  # the others are formatted all the same
    result = rlc("-", input=content)
    assert result.exit_code == 1 and code in result.stderr and result.stdout == ""


def test_machines_read_the_messages(work: Path) -> None:
    (work / "bad.rlf").write_text("param x =\n")
    result = rlc("--output-format", "json", "bad.rlf")
    assert result.exit_code == 1 and json.loads(result.stdout)["diagnostics"][0]["code"] == "RL0001"
    assert rlc("--output-format", "github", "bad.rlf").stdout.startswith("::error file=bad.rlf,line=1,")


def test_files_that_are_not_there(work: Path) -> None:
    result = rlc("aa.rlf", "a.rlf")
    assert result.exit_code == 1 and "RL0091" in result.stderr and "did you mean a.rlf" in result.stderr
    (work / "empty").mkdir()
    result = rlc("empty", "a.rlf")
    assert result.exit_code == 1 and "RL0092" in result.stderr and "no .rlf files in empty" in result.stderr
    assert rlc("gone/").exit_code == 1
    assert rlc().exit_code == 2
    assert rlc("--fix", "a.rlf").exit_code == 2


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read and write anything")
def test_files_that_may_not_be_touched(work: Path) -> None:
    (work / "a.rlf").chmod(0)
    assert "RL0092" in rlc("a.rlf").stderr
    (work / "a.rlf").chmod(0o600)
    work.chmod(0o500)
    try:
        result = rlc("a.rlf")
    finally:
        work.chmod(0o700)
    assert result.exit_code == 1 and "RL0094" in result.stderr and text(work / "a.rlf") == UGLY


def test_a_file_that_cannot_be_written(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Path, target: Path) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "replace", refuse)
    result = rlc("a.rlf")
    assert result.exit_code == 1 and "RL0094" in result.stderr
    assert text(work / "a.rlf") == UGLY and not list(work.glob("*.part"))


def test_a_mistake_of_the_formatter_changes_nothing(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rldsl.syntax.format._rows", lambda found: ["param y = 1"])
    result = rlc("a.rlf")
    assert result.exit_code == 3 and "report" in result.stderr and text(work / "a.rlf") == UGLY


def test_no_torch(work: Path) -> None:
    import subprocess

    code = "import sys\nfrom click.testing import CliRunner\nfrom rldsl.cli import main\n" \
           "r = CliRunner().invoke(main, ['fmt', 'a.rlf'])\n" \
           "print(r.exit_code, [m for m in ('torch', 'transformers', 'networkx') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "0 []\n"
