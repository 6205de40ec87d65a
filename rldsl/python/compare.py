"""What changed from one plan to another, as a value.

In: two plans' records, how their reader calls them, and perhaps a cluster to predict times on. Out: `Difference`. Plans
need no proof to be compared, but one to be simulated.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rldsl.clusters import Cluster
from rldsl.inspect.diff import Diff, diff
from rldsl.plan.model import Plan as Record
from rldsl.plan.visible_plan import visible_plan
from rldsl.python.html import terminal
from rldsl.simulate import simulate


@dataclass(frozen=True, slots=True, repr=False)
class Difference:
    """What changed from one plan to another."""

    found: Diff             # the changes, as values
    shown: Diff             # the same with labels for people, control characters escaped
    names: tuple[str, str]  # of the two plans, for people
    ids: tuple[str, str]    # of the two plans

    @property
    def same(self) -> bool:
        """Whether the plans are equal."""
        return self.found.same

    def text(self) -> str:
        """What `rlc diff` prints."""
        from rldsl.inspect.diff_text import text

        (before, after), (one, two) = self.names, self.ids
        return text(self.shown, f"{before} ({one})", f"{after} ({two})")

    def json(self) -> dict[str, Any]:
        """As plain values; docs/plans.md describes them."""
        from rldsl.inspect.diff_text import as_json

        return as_json(self.found, *self.ids)

    def __str__(self) -> str:
        return self.text()

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return terminal(self.text())


def compared(before: Record, after: Record, names: tuple[str, str], ids: tuple[str, str],
             cluster: Cluster | None = None) -> Difference:
    """cluster: None predicts no times; with one, both plans have a proof. Raises Failure where a plan does not fit on
    it."""
    seconds = (simulate(before, cluster).seconds, simulate(after, cluster).seconds) if cluster else None
    shown = diff(visible_plan(before), visible_plan(after), seconds)
    return Difference(diff(before, after, seconds), shown, names, ids)
