"""Output files are complete or absent; one that cannot be written is a user error, never an internal one."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
from click.testing import CliRunner

from rldsl.cli import main
from rldsl.commands.fmt import formatted
from rldsl.diag import Failure
from rldsl.files import write


def test_a_file_is_replaced(tmp_path: Path) -> None:
    write(str(tmp_path / "a"), b"1")
    write(str(tmp_path / "a"), b"2")
    assert (tmp_path / "a").read_bytes() == b"2" and [p.name for p in tmp_path.iterdir()] == ["a"]


def test_a_name_that_is_too_long(tmp_path: Path) -> None:
    """Removing the part that was never written fails like writing it, as on a read-only file system."""
    with pytest.raises(Failure, match="RL0094") as caught:
        write(str(tmp_path / ("x" * 300)), b"1")
    assert os.strerror(errno.ENAMETOOLONG) in str(caught.value)


def test_a_read_only_file_system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(Path, "write_bytes", refuse)
    monkeypatch.setattr(Path, "unlink", refuse)
    with pytest.raises(Failure, match="RL0094") as caught:
        write(str(tmp_path / "a"), b"1")
    assert os.strerror(errno.EROFS) in str(caught.value)


def test_ctrl_c_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    (tmp_path / "a").write_bytes(b"1")
    monkeypatch.setattr(Path, "replace", interrupt)
    with pytest.raises(KeyboardInterrupt):
        write(str(tmp_path / "a"), b"2")
    assert (tmp_path / "a").read_bytes() == b"1" and [p.name for p in tmp_path.iterdir()] == ["a"]


def test_what_is_no_file_is_written_and_never_replaced(tmp_path: Path) -> None:
    """As `-o /dev/null`, which root could replace by a file."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        write(str(pipe), b"1")
        assert os.read(reader, 9) == b"1" and pipe.is_fifo() and [p.name for p in tmp_path.iterdir()] == ["pipe"]
    finally:
        os.close(reader)
    (tmp_path / "d").mkdir()
    with pytest.raises(Failure, match="RL0094"):
        write(str(tmp_path / "d"), b"1")


LONG, LOOP = "y" * 300 + ".rlf", "loop.rlf"


@pytest.mark.parametrize("path", [LONG, LOOP, "", "file/x.rlf"])
@pytest.mark.parametrize("arguments", [
    ["check", "PATH"], ["check", "--fix", "PATH"], ["check", "p.rlf", "--place", "none/PATH"], ["compile", "PATH"], ["fmt", "PATH"],
    ["graph", "PATH"], ["search", "PATH", "--cluster", "h100x8"], ["sim", "p.rlf", "--cluster", "PATH"], ["plot", "PATH"],
    ["new", "sft", "-o", "none/PATH/x"], ["runs", "PATH"], ["run", "PATH"], ["run", "p.plan", "--resume", "none/PATH"],
    ["postmortem", "PATH"], ["diff-runs", "PATH", "PATH"], ["push", "PATH", "me/x"], ["report", "PATH"]], ids=lambda x: " ".join(x))
def test_paths_that_name_nothing(arguments: list[str], path: str, tmp_path: Path,
                                 monkeypatch: pytest.MonkeyPatch) -> None:
    """A name that is too long, a link to itself, nothing at all, a file in place of a directory."""
    monkeypatch.chdir(tmp_path)
    Path(LOOP).symlink_to(LOOP)
    Path("file").touch()
    Path("p.rlf").write_text("flow f(steps=1, seed=1) { }\n")
    done = CliRunner().invoke(main, [a.replace("PATH", path) for a in arguments])
    assert done.exit_code in (1, 2) and "internal error" not in done.output and "Traceback" not in done.output, done.output


def test_programs_below_a_directory_that_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What vanishes during the walk is passed over, and so is what is hidden."""
    for name in ("a.rlf", "b/c.rlf", ".hidden/d.rlf", "b/.e.rlf"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("param a = 1\n")
    (tmp_path / "gone.rlf").symlink_to("nothing")
    done, found = formatted([str(tmp_path)], b"")
    assert [one.path for one in done] == [str(tmp_path / "a.rlf"), str(tmp_path / "b/c.rlf")] and not found
