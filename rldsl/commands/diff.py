"""`rlc diff`: what changed between two plans, as text or JSON, and whether anything did.

In: two paths, and a cluster to predict times for. Out: text, and whether the plans are the same. Errors: those of reading
a plan or a cluster, and RL0096 for a plan that the cluster is not for.
"""

from __future__ import annotations

import json

from rldsl import api
from rldsl.plan.codec import decode, plan_id
from rldsl.python.compare import compared
from rldsl.python.machines import machine_of


def diff(before: str, after: str, cluster: str | None = None, for_programs: bool = False) -> tuple[str, bool]:
    """cluster: the file or the preset of the machines that a step is simulated on."""
    one, two = api.read_bytes(before), api.read_bytes(after)
    found = compared(decode(one, before), decode(two, after), (before, after), (plan_id(one), plan_id(two)),
                     machine_of(cluster) if cluster else None)
    return json.dumps(found.json(), indent=1, ensure_ascii=False) if for_programs else found.text(), found.same
