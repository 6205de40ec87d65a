"""Python functions and environments of a script or a notebook as the text of a module, which a plan can hash and
workers can run.

In: functions and classes. Out: source text that defines them and everything of their own module that they use: imports,
constants, other functions and classes; and where each definition comes from. Nothing is pickled, so what workers run is
what one can read, and the same functions give the same text.
Errors: RL0790 a function whose source is unknown, or that uses a value which cannot be written as source.
"""

from __future__ import annotations

import ast
import builtins
import inspect
import linecache
import re
import sys
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from symtable import SymbolTable, symtable
from types import FunctionType, ModuleType
from typing import Any

from rldsl.diag import Failure, fail

_CONSTANTS = (bool, int, float, complex, str, bytes, type(None))


@dataclass(frozen=True, slots=True)
class Definition:
    """A function or class in the text of a module, and where the user wrote it."""

    first: int  # its first line in the text, from 1
    count: int  # how many lines it has
    file: str   # the user's file, or what Python calls the cell of a notebook
    line: int   # its first line there, from 1


@dataclass(frozen=True, slots=True)
class CapturedModule:
    """A module that defines functions of a script or a notebook."""

    text: str                             # its source
    definitions: tuple[Definition, ...]   # in the order of the text


def captured(functions: Mapping[str, Callable[..., Any]]) -> CapturedModule:
    """The module that defines every function. functions: the name in the program -> the function, or the
    class of an environment, which must have this name itself. Errors: RL0790."""
    capture = _Capture()
    for name, function in functions.items():
        if not isinstance(function, FunctionType | type):
            raise _refused(name, f"it is {_described(function)}, not a function defined with `def`, and no class")
        if function.__name__ != name:
            kind, word = ("class", "class") if isinstance(function, type) else ("function", "def")
            what = "a lambda" if function.__name__ == "<lambda>" else f"called `{function.__name__}`"
            raise _refused(name, f"the {kind} is {what}; workers find it by its name",
                           help=f"define it as `{word} {name}" + ("`" if word == "class" else "(...)`"))
        capture.define(name, function, function)
    return capture.module()


class _Capture:
    """What a module needs, in the order in which it can be executed."""

    def __init__(self) -> None:
        self._imports: dict[str, str] = {}      # name -> the import statement that binds it
        self._definitions: dict[str, str] = {}  # name -> the statements that bind it, what they need first
        self._values: dict[str, Any] = {}       # name -> what it is bound to: functions of two modules may disagree
        self._written: dict[str, tuple[str, int]] = {}  # name -> the file and line where the user wrote it

    def module(self) -> CapturedModule:
        imports = sorted(set(self._imports.values()))
        lines = ["from __future__ import annotations", "", *imports]
        definitions = []
        for name, source in self._definitions.items():
            lines += ["", "", *source.split("\n")]
            count = source.count("\n") + 1
            if name in self._written:
                definitions.append(Definition(len(lines) - count + 1, count, *self._written[name]))
        return CapturedModule("\n".join([*lines, ""]), tuple(definitions))

    def define(self, name: str, value: Any, root: Callable[..., Any]) -> None:
        """Bind `name` to `value`, a function or class, with everything that it uses. root: the user's function."""
        if self._is_bound(name, value, root):
            return
        source, self._written[name] = _source(value, root)
        for used, found in _uses(source, value, annotations=value is root and isinstance(root, type)).items():
            self._bind(used, found, root)
        self._definitions[name] = source

    def _is_bound(self, name: str, value: Any, root: Callable[..., Any]) -> bool:
        if name in self._values:
            known = self._values[name]
            if known is not value and not (isinstance(value, _CONSTANTS) and known == value):
                raise _refused(root.__name__, f"`{name}` has two meanings in the functions passed",
                               help=f"rename one `{name}`")
            return True
        self._values[name] = value
        return False

    def _bind(self, name: str, value: Any, root: Callable[..., Any]) -> None:
        """Bind a global name that captured code uses."""
        if isinstance(value, ModuleType):
            self._is_bound(name, value, root)
            self._imports[name] = _import(name, value.__name__)
        elif isinstance(value, FunctionType | type) and value.__module__ == root.__module__:
            if value.__name__ != name:
                raise _refused(root.__name__, f"`{name}` is another name of `{value.__name__}`",
                               help=f"use `{value.__name__}` in the function")
            self.define(name, value, root)
        elif (origin := _importable(value)) is not None:
            self._is_bound(name, value, root)
            module, attribute = origin
            alias = "" if attribute == name else f" as {name}"
            self._imports[name] = f"from {module} import {attribute}{alias}"
        elif not self._is_bound(name, value, root):
            self._definitions[name] = f"{name} = {self._literal(name, value, root)}"

    def _literal(self, name: str, value: Any, root: Callable[..., Any]) -> str:
        if isinstance(value, re.Pattern):
            self._imports["re"] = "import re"
            return f"re.compile({value.pattern!r}, {int(value.flags)})"
        text = repr(value)
        try:
            if _is_plain(value) and ast.literal_eval(text) == value:
                return text
        except (ValueError, SyntaxError):
            pass
        raise _refused(root.__name__, f"it uses `{name}`, which is {_described(value)}",
                       help="numbers, strings, lists, dicts, modules, functions and classes can be used; compute "
                            "anything else inside the function, or put the function into a separate file")


def _source(value: Any, root: Callable[..., Any]) -> tuple[str, tuple[str, int]]:
    """The text of a definition, and the file and line where it begins."""
    if isinstance(value, FunctionType) and value.__closure__:
        names = ", ".join(f"`{name}`" for name in value.__code__.co_freevars)
        raise _refused(root.__name__, f"`{value.__name__}` uses {names} of the function around it",
                       help="define it at the top level of the module or cell")
    try:
        lines, place = _class_lines(value) if isinstance(value, type) else _lines(value)
        text = textwrap.dedent("".join(lines))
        tree = ast.parse(text)
    except (OSError, TypeError, SyntaxError):
        raise _refused(root.__name__, f"the source text of `{value.__name__}` is not known",
                       help="define it in a file or in a notebook cell") from None
    if len(tree.body) != 1 or getattr(tree.body[0], "name", None) != value.__name__:
        raise _refused(root.__name__, f"the source text of `{value.__name__}` is not known",
                       help="define it in a file or in a notebook cell")
    return text.rstrip("\n"), place


Lines = tuple[list[str], tuple[str, int]]  # of a definition; the file and line where it begins


def _lines(value: Any) -> Lines:
    """Errors: OSError, TypeError if they are not known."""
    lines, first = inspect.getsourcelines(value)
    return lines, (inspect.getsourcefile(value) or "", first)


def _class_lines(value: type) -> Lines:
    """In a notebook Python does not know the file of a class, but those of its methods. Errors: OSError, TypeError if
    the lines are not known."""
    method = next((m for m in vars(value).values() if isinstance(m, FunctionType)
                   and m.__qualname__ == f"{value.__qualname__}.{m.__name__}"), None)
    if value.__module__ != "__main__" or method is None:
        return _lines(value)
    lines = linecache.getlines(method.__code__.co_filename)
    for node in ast.walk(ast.parse("".join(lines))):
        if isinstance(node, ast.ClassDef) and node.name == value.__name__ and \
                node.lineno <= method.__code__.co_firstlineno <= (node.end_lineno or 0):
            first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
            return lines[first - 1 : node.end_lineno], (method.__code__.co_filename, first)
    raise OSError("source code not available")


def _uses(source: str, value: Any, annotations: bool) -> dict[str, Any]:
    """The global names that a definition reads, with their values, sorted. A name that is nowhere is left for the run
    to report. annotations: whether those count, as the types of an environment's tools do; otherwise nobody evaluates
    them."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if annotations:
            break
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            node.returns = None
        elif isinstance(node, ast.arg):
            node.annotation = None
    names = _global_names(symtable(ast.unparse(tree), "<captured>", "exec"))
    scope = value.__globals__ if isinstance(value, FunctionType) else vars(sys.modules[value.__module__])
    return {name: scope[name] for name in sorted(names - {value.__name__})
            if name in scope and not (hasattr(builtins, name) and scope[name] is getattr(builtins, name))}


def _global_names(table: SymbolTable) -> set[str]:
    """Names that code reads from the module around it, in a scope or in any scope inside."""
    at_top = table.get_type() == "module"
    here = {s.get_name() for s in table.get_symbols() if s.is_referenced() and (at_top or s.is_global())}
    return here.union(*map(_global_names, table.get_children()))


def _import(name: str, module: str) -> str:
    """The statement that binds `name` to a module."""
    return f"import {module}" if name == module else f"import {module} as {name}"


def _importable(value: Any) -> tuple[str, str] | None:
    """(module, name) from which a function, class or other object can be imported."""
    module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
    if not isinstance(module, str) or not isinstance(name, str) or module == "__main__" or not name.isidentifier():
        return None
    return (module, name) if getattr(sys.modules.get(module), name, None) is value else None


def _is_plain(value: Any) -> bool:
    """Whether a value consists of Python's own types, whose text is exact."""
    if type(value) in (list, tuple, set, frozenset):
        return all(map(_is_plain, value))
    if type(value) is dict:
        return all(_is_plain(k) and _is_plain(v) for k, v in value.items())
    return type(value) in _CONSTANTS and value == value  # noqa: PLR0124  not NaN, whose text is no literal


def _described(value: object) -> str:
    kind = type(value).__name__
    return f"{'an' if kind[0].lower() in 'aeiou' else 'a'} `{kind}`"


def _refused(name: str, why: str, help: str = "") -> Failure:
    return fail("RL0790", f"the Python function `{name}` cannot be passed", place="rewards", notes=(why,), help=help)
