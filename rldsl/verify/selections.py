"""Selections and collections: which rows a value has follows from its frame, and every rank knows it.

In: tables with sound references, a Select or Collect. Out: diagnostics RL0614 (reads and writes), RL0615 (fields that
contradict each other) and RL0519 (a loop does not collect what it says). Rules: a selection keeps the row numbers of
the frame that it is taken from, so value and kept value are in one spread; what is collected is divided in the same way
in every iteration, so that appending moves nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from rldsl.diag import Diagnostic
from rldsl.plan.events import Collect, Every, Item, Loop, Select, split_buffer
from rldsl.plan.model import Spread
from rldsl.plan.spaces import IndexedFrame
from rldsl.verify.tables import Tables, name, problem


def check_select(t: Tables, e: Select) -> Iterator[Diagnostic]:
    yield from _pairs(t, e)
    if any(t.values[v].extent in ("columns", "lengths") for v, _ in e.values):
        yield problem("RL0615", f"{name(e)} selects rows of a value that has no rows", e)
    yield from _select(t, e)


def check_collect(t: Tables, e: Collect) -> Iterator[Diagnostic]:
    yield from _pairs(t, e)
    yield from _collect(t, e)


def _pairs(t: Tables, e: Select | Collect) -> Iterator[Diagnostic]:
    pairs = [(t.values[v], t.values[w]) for v, w in e.values]
    if not pairs or len({w for _, w in e.values}) != len(pairs):
        yield problem("RL0614", f"{name(e)} must write at least one value, each only once", e)
    for v, w in pairs:
        if (v.level, v.extent, v.dtype) != (w.level, w.extent, w.dtype) or v.level == "batch":
            yield problem("RL0615", f"{name(e)} derives {w.id} from {v.id}, which is of another kind", e)


def loops(items: Sequence[Item]) -> Iterator[Diagnostic]:
    """A loop appends once per iteration to each buffer that it collects, and to no other."""
    for item in items:
        if isinstance(item, Loop | Every):
            own = [(b, e) for e in item.body if isinstance(e, Collect) for b in e.writes]
            said = Counter(item.collects if isinstance(item, Loop) else ())
            for buffer in (said - Counter(b for b, _ in own)) + (Counter(b for b, _ in own) - said):
                where = f"loop {item.id}" if isinstance(item, Loop) else f"every {item.period}"
                yield problem("RL0519", f"{where} must append to {buffer} exactly once per iteration",
                              *[e for b, e in own if b == buffer])
            yield from loops(item.body)


def _select(t: Tables, e: Select) -> Iterator[Diagnostic]:
    frame, s = t.frames[e.frame], t.spreads[e.spread]
    if not frame.selected_from or frame.present_in != frame.id and e.condition:
        yield problem("RL0615", f"{name(e)}: frame {e.frame} is not a selection, or does not record its rows", e)
        return
    if s.granularity == "all":
        yield problem("RL0615", f"{name(e)} uses spread {e.spread}, which does not divide rows", e)
    above = {f.id for f in _above(t, frame)}
    for v, w in e.values:
        if t.values[w].frame != e.frame or t.values[v].frame not in above:
            yield problem("RL0615", f"{name(e)} derives {w} from {v}, but {e.frame} is not selected from its frame", e)
    if e.condition:
        c, of = t.values[e.condition], t.frames[frame.selected_from]
        if (c.level, c.dtype) != ("seq", "bool") or t.frames[c.frame].row_space != of.row_space:
            yield problem("RL0615", f"{name(e)}: {e.condition} is not a condition per row of {frame.selected_from}", e)
        if f"{e.frame}.tokens" not in [w for _, w in e.values]:
            yield problem("RL0614", f"{name(e)} must write {e.frame}.tokens", e)
    must = {v for v, _ in e.values} | ({e.condition} if e.condition else set())
    read = [split_buffer(b) for b in e.reads]
    if {v for v, _ in read} != must or len(read) != len(must) or any(
            r != e.spread and (r not in t.spreads or t.spreads[r].granularity != "all") for _, r in read):
        yield problem("RL0614", f"{name(e)} must read {', '.join(sorted(must))} on spread {e.spread}", e)
    if {*e.writes} != {f"{w}@{e.spread}" for _, w in e.values} or len(e.writes) != len(e.values):
        yield problem("RL0614", f"{name(e)} must write its values on spread {e.spread}", e)


def _above(t: Tables, frame: IndexedFrame) -> Iterator[IndexedFrame]:
    """Frames whose rows, or prompts, a selection's are among."""
    while frame.selected_from:
        frame = t.frames[frame.selected_from]
        yield from (f for f in t.frames.values()
                   if f.row_space == frame.row_space or f.prompt_space == frame.prompt_space)


def _collect(t: Tables, e: Collect) -> Iterator[Diagnostic]:
    f, g, src, dst = t.frames[e.frame], t.frames[e.into], t.spreads[e.src], t.spreads[e.dst]
    if g.count != f.count * g.iterations or g.per_prompt != f.per_prompt or g.present_in != g.id:
        yield problem("RL0615", f"{name(e)}: frame {e.into} is not {g.iterations} iterations of {e.frame}", e)
    if not (_whole(t, src, dst) or _slots(t, src, f) and _slots(t, dst, g) and src.layout == dst.layout):
        yield problem("RL0615", f"{name(e)}: spreads {e.src} and {e.dst} assign different rows to a rank", e)
    for v, w in e.values:
        if (t.values[v].frame, t.values[w].frame) != (e.frame, e.into):
            yield problem("RL0615", f"{name(e)} collects {v} as {w}, which do not belong to {e.frame} and {e.into}", e)
    writes = {f"{w}@{e.dst}" for _, w in e.values}
    if {*e.reads} != {f"{v}@{e.src}" for v, _ in e.values} | writes or {*e.writes} != writes:
        yield problem("RL0614",
                      f"{name(e)} must read its values and the buffers that it appends to, and write these buffers", e)


def _whole(t: Tables, src: Spread, dst: Spread) -> bool:
    return src.granularity == dst.granularity == "all" and t.ranks[dst.mesh] <= t.ranks[src.mesh]


def _slots(t: Tables, s: Spread, frame: IndexedFrame) -> bool:
    return s.balance_by == "slot" and s.granularity == "prompt" and s.frames == (frame.id,)
