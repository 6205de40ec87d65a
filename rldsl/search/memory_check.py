"""Whether a plan fits its devices.

In: a `PlacedGraph` and the memory curves of its plan. Out: nothing, or RL0401 with the three largest holders and a fix
that was compiled.
"""

from __future__ import annotations

from collections.abc import Iterator

from rldsl.diag import Diagnostic, Failure
from rldsl.memory.curve import Curve, peak
from rldsl.placement.model import PlacedGraph
from rldsl.plan.model import Ranges
from rldsl.plan.notation import human, ranges_text
from rldsl.plan.projection import to_ranges
from rldsl.search.memory_advice import MemoryAdvice, MemoryAdvisor


def check_memory(placed: PlacedGraph, curves: tuple[Curve, ...]) -> None:
    """Raises RL0401 if the memory of a device is known and too small for some rank."""
    if not placed.memory:
        return
    peaks = [(peak(c), c.ranks) for c in curves]
    worst = max((p for p, _ in peaks), key=lambda p: p.bytes)
    if worst.bytes <= placed.memory:
        return
    over = to_ranges(sorted(rank for p, x in peaks if p.bytes > placed.memory for a, b in x for rank in range(a, b)))
    cluster = placed.graph.cluster
    largest = tuple(f"{what}: {human(size)}" for what, size in worst.holders[:3])
    help, notes = memory_advice_text(placed)
    raise Failure([Diagnostic(
        "RL0401", f"a rank needs {human(worst.bytes)}, but a device has {human(placed.memory)}",
        cluster.span if cluster else None, f"{_ranks_text(over)} too much",
        notes=(*largest, *_image_notes(placed), *notes), help=help)])


def _image_notes(placed: PlacedGraph) -> Iterator[str]:
    """Where the estimate takes all tokens of a prompt for those of images."""
    for data in placed.graph.data:
        options = dict(data.options)
        if options.get("images") and not options.get("max_image_tokens"):
            yield (f"each prompt of `{data.name}` counts as one of images alone; with much text, "
                   "`max_image_tokens=` of the data says how many tokens its images have at most")


def memory_advice_text(placed: PlacedGraph) -> tuple[str, tuple[str, ...]]:
    """(help, notes): a fix that fits; or where there is none on this cluster, the smallest device and the number of
    devices that would be enough, with their rules; or where nothing can be tried, what to do."""
    advisor = MemoryAdvisor(placed)
    fix = advisor.best()
    if fix is not None:
        return f"use {_rules_text(fix)}, which needs {human(fix.bytes)}", ()
    least, more = advisor.least(), advisor.larger()
    if least is None:  # the placement itself cannot be written as clauses, so no change of it can be tried
        return "use larger devices, or fewer rows at a time", ()
    help = f"none of the settings that were tried fits; devices with {human(least.bytes)} would be large enough"
    notes = [f"{human(least.bytes)}: {_rules_text(least)}"] if least.rules else []
    if more is not None:
        count = more.nodes * placed.devices_per_node
        help += f", or {count} devices of this size"
        notes.append(f"{count} devices: {_rules_text(more)} needs {human(more.bytes)}")
    return help, tuple(notes)


def _ranks_text(ranks: Ranges) -> str:
    return f"rank {ranges_text(ranks)} needs" if ranks == ((ranks[0][0], ranks[0][0] + 1),) else \
        f"ranks {ranges_text(ranks)} need"


def _rules_text(found: MemoryAdvice) -> str:
    return " ".join(f'--on "{rule}"' for rule in found.rules)
