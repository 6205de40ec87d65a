"""Output files are complete or absent; one that cannot be written is a user error, never an internal one."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

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
