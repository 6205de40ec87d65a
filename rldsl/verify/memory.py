"""Memory: what the classes claim to hold at most is what their ranks hold, and a device has room for it.

In: tables of a plan that is right otherwise. Out: diagnostics RL0544. A plan that does not say what a device has
claims nothing. The estimate is the compiler's own (`memory/`), found again from the plan alone; that it is true
is shown by measuring runs (`benchmarks/memory.py`).
"""

from __future__ import annotations

from collections.abc import Iterator

from rldsl.diag import Diagnostic, Failure
from rldsl.memory import curves
from rldsl.memory.curve import peak
from rldsl.plan.notation import human
from rldsl.sharding.rank_sets import Ranks
from rldsl.verify.tables import Tables, class_ranks, problem


def check_memory(t: Tables) -> Iterator[Diagnostic]:
    memory = t.plan.header.memory
    if not memory:
        return
    try:
        found = [(Ranks(c.ranks), peak(c)) for c in curves(t.plan)]
    except Failure as failure:  # a cost that is no number of bytes: the plan's records, or the backend, are nonsense
        for d in failure.diagnostics:
            yield problem("RL0544", f"the memory of this plan cannot be estimated: {d.label or d.title}",
                          notes=(d.help,))
        return
    for c in t.plan.classes:
        ranks = class_ranks(c, t.plan.header.world)
        wrong = [(here & ranks, p) for here, p in found if here & ranks and p.bytes != c.peak_bytes]
        for here, p in wrong[:1]:
            title = f"a rank class records a peak of {c.peak_bytes} bytes, but its ranks hold {p.bytes}"
            yield problem("RL0544", title, ranks=here)
    for here, p in found:
        if p.bytes > memory:
            yield problem("RL0544", f"ranks hold {human(p.bytes)}, but a device has {human(memory)}", ranks=here,
                          notes=tuple(f"{what}: {human(size)}" for what, size in p.holders[:3]))
