"""The Python modules of a user that a Python file imports: those in its directory and in the working directory.

In: a file's path and its text. Out: every module that its import statements can reach, transitively and wherever they
stand (in functions too), with the sha256 of its source. Nothing is imported: the compiler only reads the syntax trees.
The runtime executes such modules only from the bytes recorded here (`runtime/rewards/hashed_modules.py`).
Installed packages, and directories that code adds to `sys.path`, are not covered.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from hashlib import sha256
from importlib.machinery import (
    BYTECODE_SUFFIXES,
    EXTENSION_SUFFIXES,
    SOURCE_SUFFIXES,
    ExtensionFileLoader,
    FileFinder,
    ModuleSpec,
    SourceFileLoader,
    SourcelessFileLoader,
)
from pathlib import Path

OURS = "rldsl"  # this package is never a module of a user
KINDS: tuple[tuple[type, list[str]], ...] = (
    (ExtensionFileLoader, EXTENSION_SUFFIXES),
    (SourceFileLoader, SOURCE_SUFFIXES),
    (SourcelessFileLoader, BYTECODE_SUFFIXES),
)


def folders_of(path: Path) -> tuple[Path, ...]:
    """Where the imports of the file at `path` are looked for before installed packages: as Python does for a script,
    in its directory; then in the working directory, to which the paths of programs are relative."""
    return tuple(dict.fromkeys((path.resolve().parent, Path.cwd().resolve())))


def find_local(name: str, folders: Sequence[Path]) -> ModuleSpec | None:
    """The module `name` (with dots) in the first folder that has it. A directory without `__init__.py` counts only
    where no folder has a regular module, and its spec has no loader."""
    portions: list[str] = []
    for folder in folders:
        spec = FileFinder(str(folder), *KINDS).find_spec(name)
        if spec is not None and spec.loader is not None:
            return spec
        portions += (spec.submodule_search_locations or []) if spec is not None else []
    if not portions:
        return None
    namespace = ModuleSpec(name, None, is_package=True)
    namespace.submodule_search_locations = portions
    return namespace


def local_modules(path: str, tree: ast.Module) -> tuple[tuple[str, str, str], ...]:
    """(name, path, sha256) of every local module that the file at `path` can import, sorted by name. tree: the file's.
    A path is written like `path`: relative to the working directory unless `path` is absolute."""
    found: dict[str, tuple[str, str, str]] = {}
    seen: dict[str, ModuleSpec | None] = {}
    base, todo = folders_of(Path(path)), list(_imported(tree, ""))
    while todo:
        name = todo.pop()
        if name in seen or name.partition(".")[0] == OURS:
            continue
        parent = name.rpartition(".")[0]
        if parent and parent not in seen:
            todo += [name, parent]  # the package first
            continue
        outer = seen[parent] if parent else None
        if parent and (outer is None or outer.submodule_search_locations is None):
            seen[name] = None  # a name inside a module, or of an installed package
            continue
        folders = [Path(p) for p in outer.submodule_search_locations or ()] if outer is not None else base
        spec = seen[name] = find_local(name, folders)
        if spec is None or not spec.has_location or spec.origin is None:
            continue
        try:
            data = Path(spec.origin).read_bytes()
            package = name if spec.submodule_search_locations is not None else parent
            todo += _imported(ast.parse(data), package) if isinstance(spec.loader, SourceFileLoader) else ()
        except (OSError, SyntaxError, ValueError):  # the run reports it when it imports the module
            continue
        found[name] = (name, _written(Path(spec.origin), path), sha256(data).hexdigest())
    return tuple(found[name] for name in sorted(found))


def _written(file: Path, importer: str) -> str:
    here = Path.cwd().resolve()
    if not Path(importer).is_absolute() and file.is_relative_to(here):
        return file.relative_to(here).as_posix()
    return file.as_posix()


def _imported(tree: ast.Module, package: str) -> Iterator[str]:
    """Names of modules that import statements anywhere in a file may load. package: the one that the file is in."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            outer = package.split(".")
            above = outer[: len(outer) - node.level + 1] if node.level else []
            base = ".".join([*(above if node.level and package else []), *([node.module] if node.module else [])])
            if not base or node.level and not (package and above):
                continue
            yield base
            yield from (f"{base}.{alias.name}" for alias in node.names if alias.name != "*")
