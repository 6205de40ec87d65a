"""`rlc diff`: what changed between two plans, as text or JSON, and whether anything did.

In: two paths, and a cluster to predict times for. Out: text, and whether the plans are the same. Only plans with a
proof are simulated. Errors: those of reading a plan or a cluster, RL0096 for a plan that the cluster is not for, and
RL05xx and RL06xx for one that no rank can follow.
"""

from __future__ import annotations

from dataclasses import replace

from rldsl.diag import Failure
from rldsl.files import read_bytes
from rldsl.plan.codec import decode, plan_id
from rldsl.plan.json_output import json_output
from rldsl.plan.model import Plan
from rldsl.python.compare import compared
from rldsl.python.machines import machine_of
from rldsl.verify import verify


def diff(before: str, after: str, cluster: str | None = None, for_programs: bool = False) -> tuple[str, bool]:
    """cluster: the file or the preset of the machines that a step is simulated on."""
    one, two = read_bytes(before), read_bytes(after)
    plans = decode(one, before), decode(two, after)
    if cluster:
        for plan, name in zip(plans, (before, after), strict=True):
            _proved(plan, name)
    found = compared(*plans, (before, after), (plan_id(one), plan_id(two)), machine_of(cluster) if cluster else None)
    return json_output(found.json()) if for_programs else found.text(), found.same


def _proved(plan: Plan, name: str) -> None:
    """Faults name their file: there are two."""
    try:
        verify(plan)
    except Failure as failure:
        raise Failure(replace(d, place=f"{name}, {d.place}") for d in failure.diagnostics) from None
