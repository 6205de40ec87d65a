"""A warning for a block that no step of the run reaches.

In: a graph, and its program. Out: RL0911 for each outermost `every`, `first` or `after` that runs in none of the steps,
given the blocks around it. Where the number of steps is a parameter, a trial may set it to a few: then only blocks are
meant that run in no number of steps. That a block counts more iterations than the `repeat` around it has is an error
(`graph/flow.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from math import lcm

from rldsl.diag import Diagnostic, counted
from rldsl.graph import model as g
from rldsl.syntax import ast

MANY = 10**15  # more steps than any run has


def unreached(graph: g.Graph, files: Iterable[ast.File]) -> Iterator[Diagnostic]:
    written = any(isinstance(option.value, ast.Number) for file in files for item in file.items
                  if isinstance(item, ast.Flow) for option in item.options if option.name.name == "steps")
    steps = graph.steps if written else MANY
    return _among(graph.items, steps, (1, 0, steps))


def _among(items: Iterable[g.Item], steps: int, steps_around: tuple[int, int, int]) -> Iterator[Diagnostic]:
    """steps_around: the blocks around run in the steps that the first number divides, after the second, up to the
    third."""
    for item in items:
        if not isinstance(item, g.When):
            continue  # what is inside a `repeat` counts its iterations
        period, after, last = steps_around
        period, after, last = lcm(period, item.period), max(after, item.after), min(last, item.first or last)
        if (after // period + 1) * period <= last:
            yield from _among(item.body, steps, (period, after, last))
            continue
        alone = (item.after // item.period + 1) * item.period > min(steps, item.first or steps)
        yield Diagnostic(
            "RL0911", f"`{item.head}` never runs", item.span,
            f"the flow has {counted(steps, 'step')}" if alone else "the blocks around it run in other steps",
            help=f"{_most(item, steps)}, more `steps`, or remove it" if alone else
            "move it out of the blocks around it",
            severity="warning")


def _most(item: g.When, steps: int) -> str:
    """What would run."""
    if not item.after:
        return f"use `every {steps}` or less"
    return f"use `after {steps - 1}` or less" if steps > 1 else "use no `after`"
