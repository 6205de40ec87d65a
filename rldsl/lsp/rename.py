"""Another name for something: whether it may have it.

In: a symbol, the name, the indices of every file that uses it. Out: why not, or "". Cautious: a name that is bound
anywhere it could meet the new one is refused, even where the language would let one hide the other.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from importlib import resources
from pathlib import Path

from rldsl.lsp.builtins import CALLS, CONSTRUCTORS, FUNCTIONS
from rldsl.lsp.index import Index, Symbol
from rldsl.plan.model import FIELD_NAMES
from rldsl.semantics.modules import LIBRARY
from rldsl.source import SourceFile
from rldsl.syntax.parse import parse_recovering

TAKEN = {*FUNCTIONS, *CONSTRUCTORS, "true", "false"} - {*CALLS}


def in_library(symbol: Symbol) -> bool:
    """Whether it is bound in the standard library."""
    return Path(str(resources.files(LIBRARY))).resolve() in Path(symbol.span.file.name).resolve().parents


def refusal(symbol: Symbol, name: str, indices: Iterable[Index]) -> str:
    if in_library(symbol):
        return f"`{symbol.name}` belongs to the standard library"
    if re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name) is None:
        return f"`{name}` is not a valid name: use letters, digits and `_`, not starting with a digit"
    if symbol.kind == "field" and name in FIELD_NAMES:
        return f"`{name}` is a field of all sequences"
    if name in TAKEN or parse_recovering(SourceFile("", f"param {name} = {name}\n"))[1]:
        return f"`{name}` is a keyword or built-in name"
    for index in indices:
        others = _fields(name, index) if symbol.kind == "field" else _named(name, index)
        if index.uses(symbol) and any(_meet(symbol, other) for other in others):
            return f"`{name}` is already defined in {Path(index.file.source.name).name}"
    return ""


def _fields(name: str, index: Index) -> list[Symbol]:
    """The fields of this name, of whatever sequences."""
    return [o.symbol for o in index.occurrences if o.binds and o.symbol.kind == "field" and o.symbol.name == name]


def _named(name: str, index: Index) -> list[Symbol]:
    """What a file binds, imports or always has by this name."""
    found = [s for s in index.symbols if s.name == name and s.kind != "metric"]
    return found + [s for names in (index.names, index.always) for n, s in names.items() if n == name]


def _meet(symbol: Symbol, other: Symbol) -> bool:
    """Whether the two are visible at one place."""
    return other.key != symbol.key and (not symbol.inside or not other.inside or symbol.inside == other.inside)
