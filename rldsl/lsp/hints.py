"""Inlay hints: the level of a value after its name, a degree that was inferred.

In: an analysis. Out: (offset, text).
"""

from __future__ import annotations

from rldsl.lsp.analysis import Analysis


def hints(analysis: Analysis) -> list[tuple[int, str]]:
    facts, out = analysis.facts, []
    for o in analysis.index.occurrences:
        if o.binds and o.symbol.kind == "value" and o.symbol.name in facts.levels:
            out.append((o.span.end, f": {facts.levels[o.symbol.name][0]}"))
    for call in facts.calls:
        if call.clause is None or call.clause.file != analysis.source:
            continue
        x = call.placement.layout
        degrees = (("dp", x.dp), ("tp", x.tp), ("pp", x.pp), ("vpp", x.vpp), ("cp", x.cp), ("ep", x.ep))
        missing = [f"{n}={d}" for n, d in degrees if d > 1 and n not in call.given]
        if missing:
            out.append((call.clause.end, " " + " ".join(missing)))
    return sorted(out)
