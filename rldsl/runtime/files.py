"""The files of a run: an error of the operating system becomes a message, and contents have a digest.

In: a path. Out: a written file, or its digest. Errors: RL0708 the file cannot be written.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from fnmatch import fnmatch
from hashlib import sha256
from pathlib import Path

from rldsl.diag import fail
from rldsl.plan.disk_paths import shown


@contextmanager
def written(file: Path) -> Iterator[None]:
    """RL0708 if the block, which writes `file`, raises an OSError."""
    try:
        yield
    except OSError as error:
        raise fail("RL0708", f"the file cannot be written: {error.strerror or error}", place=str(file),
                   help="check the path, its permissions and the free disk space") from None


def check_writable(file: Path) -> None:
    """RL0708 unless `file` can be written now. Its contents stay, and no new file is left behind."""
    with written(file):
        file.parent.mkdir(parents=True, exist_ok=True)
        new = not file.exists()
        file.open("a").close()
        if new:
            file.unlink()


def refuse_link_out(file: Path, out: Path) -> None:
    """RL0708 where `file`, which by its name lies in the run's directory `out`, leads out of it through a link: what
    the link names would be overwritten. Every link on the way counts, also one to something that does not exist yet."""
    own, named = Path(os.path.abspath(out)), Path(os.path.abspath(file))
    if own not in named.parents:
        return
    try:
        real, inside = named.resolve(), own.resolve()
    except (OSError, RuntimeError) as error:  # links that go round
        raise fail("RL0708", f"the file cannot be written: {getattr(error, 'strerror', None) or error}",
                   place=str(file), help="remove the link") from None
    if real != inside and inside not in real.parents:
        raise fail("RL0708", "the file cannot be written: a link leads out of the run's directory, to "
                   + shown(str(real)), place=str(file),
                   help="remove the link, or use `--out` to choose another directory")


def refuse_links_out(out: Path, names: Sequence[str]) -> None:
    """`refuse_link_out` for what is in `out` under these names: NAME or DIRECTORY/NAME, patterns of `fnmatch`. A
    directory that is named only with a file in it is looked at, too. Errors: RL0708."""
    for path in _entries(out):
        if any(fnmatch(path.name, name.partition("/")[0]) for name in names):
            refuse_link_out(path, out)
            for inner in _entries(path):
                if any(fnmatch(f"{path.name}/{inner.name}", name) for name in names if "/" in name):
                    refuse_link_out(inner, out)


def _entries(directory: Path) -> list[Path]:
    with written(directory):
        return sorted(directory.iterdir()) if directory.is_dir() else []


def replace_text(file: Path, text: str) -> None:
    """Write a file that is complete under its name, or as it was: next to it, to the disk, then renamed. What is no
    file (a pipe, /dev/null) is written as it is. OSError."""
    file = file.resolve()  # a link stays a link
    if file.exists() and not file.is_file():
        file.write_text(text, encoding="utf-8")
        return
    partial = file.with_name(f".{file.name}.partial")
    try:
        partial.write_text(text, encoding="utf-8")
        sync(partial)
        os.replace(partial, file)
    except OSError:
        partial.unlink(missing_ok=True)
        raise


def sync(path: Path) -> None:
    """Until it is on the disk: a crash of the machine must not leave a name without its bytes. Of a directory, its
    names."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def digest(file: Path) -> str:
    """sha256 of the bytes, in hexadecimal."""
    total = sha256()
    with file.open("rb") as opened:
        while part := opened.read(1 << 22):
            total.update(part)
    return total.hexdigest()
