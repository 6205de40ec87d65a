"""Semantic tokens: the kind of each name, so that an editor can color a model and a value differently.

In: an index. Out: the protocol's flat list, five numbers per token: lines and units since the last, length, type,
flags.
"""

from __future__ import annotations

from rldsl.lsp.index import Index
from rldsl.lsp.text import Lines

TYPES = ("variable", "parameter", "function", "class", "property", "event")
MODIFIERS = ("declaration", "readonly")
OF = {"fn": "function", "loss": "function", "python": "function", "flow": "function", "model": "class", "data": "class",
      "parameter": "parameter", "metric": "event", "state": "property", "buffer": "property",
      "field": "property"}


def encode(index: Index, lines: Lines) -> list[int]:
    out: list[int] = []
    line = column = 0
    seen: set[int] = set()
    for o in sorted(index.occurrences, key=lambda o: o.span.start):
        if o.span.start in seen or o.span.file != index.file.source:
            continue
        seen.add(o.span.start)
        at, unit = lines.position(o.span.start)
        end = lines.position(o.span.end)[1]
        flags = (1 if o.binds else 0) | (2 if o.symbol.kind in ("param", "mesh") else 0)
        kind = TYPES.index(OF.get(o.symbol.kind, "variable"))
        out += [at - line, unit - column if at == line else unit, end - unit, kind, flags]
        line, column = at, unit
    return out
