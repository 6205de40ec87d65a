"""Files and imports: from one syntax tree to the names of its module.

`use std.ppo (...)` reads the library inside this package, `use "file.rlf" (...)` a file next to the importing one, and
`use py "file.py" (...)` records a Python file without importing it. Circular imports are errors.
"""

from __future__ import annotations

import ast as python
import os
import re
from collections.abc import Callable
from hashlib import sha256
from importlib import resources
from typing import cast

from rldsl.diag import Failure, Label
from rldsl.plan.function import Function, Returns
from rldsl.plan.local_modules import local_modules
from rldsl.plan.operators import BUILTINS
from rldsl.semantics.errors import BAD, Errors, suggest
from rldsl.semantics.values import EnvRef, FnRef, LossRef, Meaning, Module, PyRef
from rldsl.source import SourceFile, Span
from rldsl.syntax import ast
from rldsl.syntax.slips import slips

Parse = Callable[[SourceFile], ast.File]
Read = Callable[[str], str]
LIBRARY, SHIPPED = "rldsl.stdlib", "std/"
PYTHON = ("std/rewards.py", "std/text.py")
# Names that a program cannot bind. Those of functions that make sequences are words that programs use: `pair`.
RESERVED = {n for n, b in BUILTINS.items() if b.form != "frames"} | {"mesh", "true", "false"}


def relative_path(importer: str, path: str) -> str:
    """`path` as seen from the file `importer`, relative to the working directory when it lies below it."""
    joined = os.path.normpath(os.path.join(os.path.dirname(importer), path))
    if os.path.isabs(joined):
        near = os.path.relpath(joined)
        return joined if near.startswith(os.pardir) else near
    return joined


def python_path(importer: str, path: str) -> str:
    """The path of a Python file: `std/...` is in this package, even if the importer's directory has a `std`."""
    if path.startswith(SHIPPED):
        return path
    found = relative_path(importer, path)
    return f"./{found}" if found.startswith(SHIPPED) else found


def library() -> list[str]:
    """The modules of the standard library."""
    return sorted(p.name[:-4] for p in resources.files(LIBRARY).iterdir() if p.name.endswith(".rlf"))


def library_modules_with(name: str) -> list[str]:
    """The modules of the standard library that declare the function or loss `name`."""
    texts = {m: (resources.files(LIBRARY) / f"{m}.rlf").read_text("utf-8") for m in library()}
    return [m for m, text in texts.items() if re.search(rf"^(fn|loss) {re.escape(name)}\b", text, re.MULTILINE)]


class Modules:
    """Loads modules, each once."""

    def __init__(self, parse: Parse, read: Read, errors: Errors):
        self.parse, self.read, self.errors = parse, read, errors
        self.sources: list[tuple[str, str]] = []  # (name, sha256) of every .rlf read
        self.functions: dict[str, Function] = {}  # every Python function, by id
        self.files: list[tuple[Module, ast.File]] = []
        self._loaded: dict[str, Module | None] = {}  # by key; None after an error
        self._open: list[str] = []  # being loaded, outermost first

    def main(self, file: ast.File) -> Module:
        """The module of the program itself: its imports, functions and losses."""
        return self._fill(file, file.source.name, main=True)

    def prelude(self) -> Module:
        """stdlib/prelude.rlf, whose names are always in scope."""
        return self._module("std.prelude", "", Span(SourceFile("std.prelude", ""), 0, 0)) or Module("std.prelude")

    def _module(self, module: str, importer: str, span: Span) -> Module | None:
        standard = module.startswith("std.")
        key = f"std/{module[4:]}.rlf" if standard else relative_path(importer, module)
        if key in self._open:
            circle = " -> ".join([*self._open[self._open.index(key):], key])
            self.errors.add("RL0105", "circular import", span, circle,
                            help="move the shared definitions into a third file")
            return None
        if key in self._loaded:
            return self._loaded[key]
        if not standard and not module.endswith(".rlf"):
            self.errors.add("RL0103", f"no module `{module}`", span,
                            help='write `use std.NAME (...)` or `use "file.rlf" (...)`')
            return None
        try:
            if standard:
                if module[4:] not in library():
                    self.errors.add("RL0103", f"no module `{module}`", span,
                                    help=suggest(module, [f"std.{m}" for m in library()]))
                    return None
                text = (resources.files(LIBRARY) / f"{module[4:]}.rlf").read_text("utf-8")
            else:
                text = self.read(key)
        except (OSError, UnicodeDecodeError) as error:
            self.errors.add("RL0103", f"cannot read `{key}`", span, _reason(error),
                            help="paths are relative to the importing file")
            return None
        self._loaded[key] = None
        try:
            file = self.parse(SourceFile(key, text))
            self.errors.found += slips(file)
        except Failure as failure:
            self.errors.extend(failure)
            return None
        self._loaded[key] = filled = self._fill(file, key, main=False)
        return filled

    def _fill(self, file: ast.File, key: str, main: bool) -> Module:
        self._open.append(key)
        self.sources.append((key, sha256(file.source.text.encode()).hexdigest()))
        module = Module(key)
        if not key.startswith("std/"):
            self.files.append((module, file))
        for item in file.items:
            match item:
                case ast.Use():
                    self._use(module, item)
                case ast.UsePy():
                    self._use_py(module, item)
                case ast.FnDecl():
                    self.bind(module, item.name, FnRef(item, module))
                case ast.LossDecl():
                    self.bind(module, item.name, LossRef(item, module))
                case _ if not main:
                    self.errors.add("RL0108", "a module may contain only `use`, `fn` and `loss`", item.span,
                                    help="move this to the main program")
        self._open.pop()
        return module

    def bind(self, module: Module, ident: ast.Ident, value: Meaning) -> None:
        """Give a name its one meaning in a module."""
        name = ident.name
        if name in RESERVED:
            self.errors.add("RL0111", f"`{name}` is built in", ident.span, help="choose another name")
            module.names[name] = BAD  # its uses stay silent
        elif name in module.names:
            first = module.bound_at.get(name)
            self.errors.add("RL0102", f"`{name}` is defined twice", ident.span, "the second definition",
                            labels=(Label(first, "the first definition"),) if first else (), help="choose another name")
        else:
            module.names[name] = value
            module.bound_at[name] = ident.span

    def _use(self, module: Module, use: ast.Use) -> None:
        other = self._module(use.module, module.name, _path(use.span))
        for ident in use.names:
            if other is None:
                self.bind(module, ident, BAD)
            elif ident.name in other.names:
                self.bind(module, ident, other.names[ident.name])
            else:
                advice = suggest(ident.name, other.names)
                self.errors.add("RL0104", f"`{use.module}` does not define `{ident.name}`", ident.span, help=advice)
                self.bind(module, ident, BAD)
                meant = getattr(advice, "word", "")  # what the rest of the program then uses
                if meant and meant not in module.names and meant not in [n.name for n in use.names]:
                    module.names[meant] = other.names[meant]

    def _python(self, path: str) -> str:
        if not path.startswith(SHIPPED):
            return self.read(path)
        if path not in PYTHON:
            raise FileNotFoundError(2, "not in the standard library")
        return (resources.files(LIBRARY) / path.removeprefix(SHIPPED)).read_text("utf-8")

    def _use_py(self, module: Module, use: ast.UsePy) -> None:
        path = python_path(module.name, use.path)
        tree, digest = None, ""
        try:
            text = self._python(path)
            digest = sha256(text.encode()).hexdigest()
            tree = python.parse(text)
        except (OSError, UnicodeDecodeError) as error:
            self.errors.add("RL0110", f"cannot read the Python file `{path}`", _path(use.span), _reason(error),
                            help="paths are relative to the .rlf file" if not path.startswith(SHIPPED) else
                            suggest(path, PYTHON))
        except (SyntaxError, ValueError) as error:
            line = getattr(error, "lineno", None)
            self.errors.add("RL0110", f"`{path}` is not valid Python", _path(use.span),
                            f"line {line}: {getattr(error, 'msg', error)}" if line else str(error))
        body = tree.body if tree is not None else []
        for fn in use.functions:
            is_env = fn.returns is None  # a class, or a function that returns an object of one
            what = "class" if is_env else "function"
            functions = (python.FunctionDef, python.AsyncFunctionDef) if is_env else (python.FunctionDef,)
            kinds = (*functions, python.ClassDef) if is_env else functions
            defined = {n.name: n for n in body if isinstance(n, kinds)}
            returns = "env" if fn.returns is None else fn.returns.name + "?" * fn.optional
            if not self._may_return(fn):
                self.bind(module, fn.name, BAD)
            elif tree is None or fn.name.name not in defined:
                if tree is not None:
                    self.errors.add("RL0110", f"`{path}` does not define a {what} `{fn.name.name}`", fn.name.span,
                                    help=suggest(fn.name.name, defined))
                self.bind(module, fn.name, BAD)
            else:
                key = fn.name.name
                if key in self.functions and self.functions[key].path != path:
                    key = f"{path}:{key}"
                modules = () if path.startswith(SHIPPED) else local_modules(path, tree)
                found = defined[fn.name.name]
                columns = _reset_columns(found) if isinstance(found, python.ClassDef) else ()
                self.functions[key] = Function(key, path, fn.name.name, digest, cast(Returns, returns), modules,
                                               columns)
                self.bind(module, fn.name, EnvRef(key, fn.span) if is_env else PyRef(
                    key, tuple(p.name for p in fn.params), cast(Returns, returns), fn.span, fn.options, module))

    def _may_return(self, fn: ast.PyFunction) -> bool:
        """Whether a Python function can return what it is declared to, or a class is an environment; says why not."""
        if fn.returns is None:
            return True
        what = fn.returns.name
        if what not in ("seq", "prompt", "prompts"):
            self.errors.add("RL0201", f"a Python function cannot return `{what}`", fn.returns.span,
                            help="it returns one number per row: declare `seq`, or `prompt` if it takes prompts; or "
                                 "one text per row: declare `prompts(max_tokens=...)`")
        elif what != "prompts" and (fn.optional or fn.options):
            self.errors.add("RL0201", f"`{fn.result}`: only `prompts` has `?` or options", fn.returns.span,
                            "a number per row, for every row", help=f"declare `-> {what}`")
        else:
            return True
        return False


def _reset_columns(environment: python.ClassDef) -> tuple[str, ...]:
    """The parameters of `reset` that have no default: columns of data that every row must have. Those of a `reset` that
    the class inherits are not known here."""
    reset = next((n for n in environment.body if isinstance(n, python.FunctionDef | python.AsyncFunctionDef)
                  and n.name == "reset"), None)
    if reset is None:
        return ()
    positional = [*reset.args.posonlyargs, *reset.args.args][1:]
    needed = positional[: len(positional) - len(reset.args.defaults)]
    needed += [a for a, default in zip(reset.args.kwonlyargs, reset.args.kw_defaults, strict=True) if default is None]
    return tuple(a.arg for a in needed if a.arg != "seed")  # the run gives one


def _path(use: Span) -> Span:
    """The module's name or path in a `use`."""
    found = re.match(r"use\s+(?:py\s+)?(\S+|\"[^\"]*\")", use.text)
    return Span(use.file, use.start + found.start(1), use.start + found.end(1)) if found else use


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error)
