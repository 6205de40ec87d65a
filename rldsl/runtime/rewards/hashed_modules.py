"""A user's Python code runs from exactly the bytes that were hashed: never from a `.pyc` or from a changed file.

In: functions of a plan, which record the sha256 of their file and of the local modules that it imports
(`plan/local_modules.py`). All of them are read and compared before anything runs, and are kept: a module that is
imported late, after its file has changed, still executes the bytes that were compared.
Out: a finder on `sys.meta_path`, in front of the one that reads `sys.path`. It serves the modules of the folders of
these functions and no others. A file of these folders that the plan does not contain is refused where users' code asks
for it; a library that asks for a module of its name gets the installed one. It is in every process that loads
functions; a process that such code spawns with `multiprocessing` gets it from `spawned_modules.py`.
Codes: RL0770 a local module that the plan does not contain, RL0771 a file cannot be read, RL0772 it changed.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Collection, Sequence
from hashlib import sha256
from importlib.abc import MetaPathFinder
from importlib.machinery import ExtensionFileLoader, ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import CodeType, FrameType, ModuleType

from rldsl.diag import Failure, fail
from rldsl.plan.function import Function
from rldsl.plan.local_modules import OURS, find_local, folders_of

RECORD = "RLDSL_PYTHON_MODULES"  # environment variable: what spawned processes may import


class HashedModules(MetaPathFinder):
    """The local modules of this process. `refused` keeps what was refused, because users' code may catch exceptions."""

    def __init__(self) -> None:
        self.folders: list[Path] = []
        # real path -> (path as the plan has it, its bytes)
        self.files: dict[Path, tuple[str, bytes]] = {}
        # module -> the real path that each plan record names
        self.names: dict[str, Path] = {}
        self.served: set[str] = set()
        self.refused: Failure | None = None

    def add(self, function: Function, path: Path) -> None:
        """The modules of a function may be imported from now on. path: of its file. RL0771, RL0772."""
        for name, file, digest in function.modules:
            place = Path(os.path.realpath(file))
            if self.names.setdefault(name, place) != place:
                raise fail("RL0770", f"two Python files import different modules as `{name}`", place=function.path,
                           notes=(f"{self.files[self.names[name]][0]} and {file}",),
                           help="rename one of the modules: the functions of a program share one process")
            self.files[place] = (file, read_hashed(place, file, digest))
        self.folders += [folder for folder in folders_of(path) if folder not in self.folders]
        os.environ[RECORD] = json.dumps({
            "folders": [str(folder) for folder in self.folders],
            "files": {str(place): [file, sha256(data).hexdigest()] for place, (file, data) in self.files.items()}})

    def restore(self, record: str) -> None:
        """What `add` has written to the environment of a process that spawned this one."""
        fields = json.loads(record)
        self.folders = [Path(folder) for folder in fields["folders"]]
        self.files = {Path(place): (file, read_hashed(Path(place), file, digest))
                      for place, (file, digest) in fields["files"].items()}

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
                  ) -> ModuleSpec | None:
        top, _, _ = fullname.partition(".")
        if top == OURS or path is not None and fullname.rpartition(".")[0] not in self.served:
            return None
        spec = find_local(fullname, self.folders if path is None else [Path(p) for p in path])
        if spec is None:
            return None
        if path is None and spec.loader is not None and self._is_unknown(spec) and not _asked_by_users(self.files):
            return self._elsewhere(fullname, str(spec.origin))
        if spec.loader is None:  # a directory: any regular module elsewhere comes first
            elsewhere = PathFinder.find_spec(fullname, None) if path is None else None
            if elsewhere is not None and elsewhere.loader is not None and elsewhere.origin is not None:
                return None
        elif isinstance(spec.loader, ExtensionFileLoader):
            spec.loader = HashedExtension(spec.loader.name, spec.loader.path, self)
        else:
            spec.loader = HashedSource(fullname, str(spec.origin), self)
        spec.cached = None
        self.served.add(fullname)
        return spec

    def _is_unknown(self, spec: ModuleSpec) -> bool:
        return Path(os.path.realpath(str(spec.origin))) not in self.files

    def _elsewhere(self, name: str, stray: str) -> ModuleSpec:
        """The module as if the folders of users did not have it. stray: their file of this name."""
        outside = [p for p in sys.path if Path(os.path.realpath(p)) not in self.folders]
        for finder in sys.meta_path:
            if finder is PathFinder:
                spec = PathFinder.find_spec(name, outside)
            else:
                spec = finder.find_spec(name, None) if finder is not self else None
            if spec is not None:
                return spec
        raise ModuleNotFoundError(f"No module named {name!r}: {os.path.relpath(stray)} is not part of the plan, since "
                                  "no `import` statement of a local file names it", name=name)

    def source(self, name: str, path: str) -> bytes:
        """The bytes to execute. RL0770: the plan has no digest for them."""
        expected = self.files.get(Path(os.path.realpath(path)))
        if expected is None or path.endswith(".pyc"):
            self.refused = self.refused or fail(
                "RL0770", f"the plan does not contain the local module `{name}`", place=os.path.relpath(path),
                notes=("only local modules that are named in an `import` statement are recorded and executed",),
                help="compile the program again" if not path.endswith(".pyc") else
                "a compiled file is not executed: keep its source next to the Python file")
            raise ImportError(f"the plan does not contain the local module {name}", name=name, path=path)
        return expected[1]


def _asked_by_users(files: Collection[Path]) -> bool:
    """Whether the import under way stands in a file of users, and not in one of a library. files: those of users."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        loader, file = frame.f_globals.get("__loader__"), frame.f_code.co_filename
        machinery = frame.f_globals.get("__name__", "").partition(".")[0] in ("importlib", "_frozen_importlib")
        if isinstance(loader, HashedSource | MainSource) or Path(os.path.realpath(file)) in files:
            return True
        if not machinery and loader is not None:
            return False
        frame = frame.f_back  # of the import system, or of code that has no file
    return True


class HashedSource(SourceFileLoader):
    """A module whose code is compiled here and now, from bytes that were compared."""

    def __init__(self, name: str, path: str, modules: HashedModules):
        super().__init__(name, path)
        self.modules = modules

    def get_code(self, fullname: str) -> CodeType:
        data = self.modules.source(self.name, self.path)
        return self.source_to_code(data, self.path)


class HashedExtension(ExtensionFileLoader):
    """A compiled extension: the system loads it from a private copy of the bytes that were compared."""

    def __init__(self, name: str, path: str, modules: HashedModules):
        super().__init__(name, path)
        self.modules = modules

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        data = self.modules.source(self.name, self.path)
        with tempfile.TemporaryDirectory(prefix="rldsl-") as folder:
            copy = Path(folder) / Path(self.path).name
            copy.write_bytes(data)
            private = ModuleSpec(spec.name, self, origin=str(copy))
            return super().create_module(private)


class MainSource(SourceFileLoader):
    """The file of a function: its code is compiled from the bytes that were compared."""

    def __init__(self, name: str, path: str, data: bytes):
        super().__init__(name, path)
        self.data = data

    def get_code(self, fullname: str) -> CodeType:
        return self.source_to_code(self.data, self.path)


def installed() -> HashedModules:
    """The finder of this process."""
    for finder in sys.meta_path:
        if isinstance(finder, HashedModules):
            return finder
    added = HashedModules()
    at = next((i for i, finder in enumerate(sys.meta_path) if finder is PathFinder), len(sys.meta_path))
    sys.meta_path.insert(at, added)
    return added


def read_hashed(place: Path, path: str, digest: str) -> bytes:
    """The bytes of a file, which are those of this sha256. path: what messages call it. RL0771, RL0772."""
    try:
        data = place.read_bytes()
    except (OSError, ValueError) as error:
        raise fail("RL0771", f"the Python file cannot be read: {getattr(error, 'strerror', None) or error}", place=path,
                   help="paths are relative to the working directory") from None
    if sha256(data).hexdigest() != digest:
        raise fail("RL0772", "this Python file changed since the plan was compiled", place=path,
                   help="compile the program again")
    return data


def raise_refused() -> None:
    """What was refused while users' code ran, even where that code caught the exception."""
    finder = installed()
    if finder.refused is not None:
        refused, finder.refused = finder.refused, None
        raise refused
