"""What a loop collects: the rows of all iterations, one after the other, each on the rank that has its slot.

In: tables with sound references, a Collect; the items of a plan. Out: diagnostics RL0614 (reads and writes), RL0615
(fields that contradict each other) and RL0519 (a loop does not collect what it says). Rules: what is collected is
divided in the same way in every iteration, so that appending moves nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from rldsl.diag import Diagnostic
from rldsl.plan.events import Collect, Item, Loop, When
from rldsl.plan.model import Spread
from rldsl.plan.spaces import IndexedFrame
from rldsl.verify.derive import check_values
from rldsl.verify.tables import Tables, name, problem


def check_collect(t: Tables, e: Collect) -> Iterator[Diagnostic]:
    yield from check_values(t, e)
    yield from _collect(t, e)


def loops(items: Sequence[Item]) -> Iterator[Diagnostic]:
    """A loop appends once per iteration to each buffer that it collects, and to no other."""
    for item in items:
        if isinstance(item, Loop | When):
            own = [(b, e) for e in item.body if isinstance(e, Collect) for b in e.writes]
            declared = Counter(item.collects if isinstance(item, Loop) else ())
            for buffer in (declared - Counter(b for b, _ in own)) + (Counter(b for b, _ in own) - declared):
                where = f"loop {item.id}" if isinstance(item, Loop) else item.head
                yield problem("RL0519", f"{where} must append to {buffer} exactly once per iteration",
                              *[e for b, e in own if b == buffer])
            yield from loops(item.body)


def _collect(t: Tables, e: Collect) -> Iterator[Diagnostic]:
    f, g, src, dst = t.frames[e.frame], t.frames[e.into], t.spreads[e.src], t.spreads[e.dst]
    shape = (f.tokenizer, f.count * g.iterations, f.per_prompt, g.id)
    if (g.tokenizer, g.count, g.per_prompt, g.present_in) != shape:
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
