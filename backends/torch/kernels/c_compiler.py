"""C sources, compiled for the machine's processor at their first use and kept in the cache folder.

In: a source, the flags of its compilation, and the arguments of its functions. Out: the functions, or None without a
compiler (`cc`) or a cache folder; then torch's operators run.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import Any

from rldsl.files import cache_folder

COMPILER = "cc"
# The last flag: GCC fuses products and sums on some processors only where a loop has several sums, so that the same
# number would have other bits in a tile of another size
FAST_FLAGS = ("-O3", "-march=native", "-std=c11", "-fPIC", "-shared", "-fno-math-errno", "-fno-trapping-math",
              "-ffp-contract=fast", "-fno-tree-vectorize", "-fno-tree-slp-vectorize", "-fopenmp",
              "--param=avoid-fma-max-bits=0")
PROCESSOR = (b"vendor_id", b"cpu family", b"model\t", b"flags", b"Features")  # lines of /proc/cpuinfo


def load(source: Path, flags: Sequence[str], arguments: Mapping[str, Sequence[Any]]) -> Any:
    """The functions of a source, by the name of each with the C types of its arguments; None if they cannot be had."""
    try:
        path = compiled(source, flags)
        library = None if path is None else ctypes.CDLL(str(path))
    except (OSError, subprocess.SubprocessError):
        return None
    for name, types in arguments.items() if library is not None else ():
        getattr(library, name).argtypes = types
    return library


def compiled(source: Path, flags: Sequence[str]) -> Path | None:
    """The shared library, compiled if it is not in the cache folder. Its name says what it was made from, on what."""
    folder = cache_folder()
    if folder is None or os.name != "posix":
        return None
    # a source may include others of its folder
    texts = b"\0".join(file.read_bytes() for file in sorted(source.parent.glob("*.[ch]")))
    made_from = source.name.encode(), texts, " ".join(flags).encode(), _processor(), _run(COMPILER, "--version")
    path = folder / "kernels" / (sha256(b"\0".join(made_from)).hexdigest() + ".so")
    if _is_ours(path):
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as place:  # other ranks compile it, too
        made = Path(place) / "kernels.so"
        _run(COMPILER, *flags, "-o", str(made), str(source), "-lm")
        made.chmod(0o600)
        made.replace(path)
    return path


def _is_ours(path: Path) -> bool:
    """Whether a file is there that nobody else can have written."""
    try:
        found = path.stat()
    except OSError:
        return False
    return found.st_uid == os.getuid() and not found.st_mode & 0o022


def _run(*command: str) -> bytes:
    return subprocess.run(command, check=True, capture_output=True, stdin=subprocess.DEVNULL, timeout=120).stdout


def _processor() -> bytes:
    """What `-march=native` depends on."""
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_bytes().split(b"\n\n")[0].splitlines()
        return b"\n".join(x for x in lines if x.startswith(PROCESSOR))
    return b""
