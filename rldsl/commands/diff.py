"""`rlc diff`: what changed between two plans, as text or JSON, and whether anything did.

In: two paths, and a cluster to predict times for. Out: text, and whether the plans are the same. Errors: those of reading
a plan or a cluster, and RL0096 for a plan that the cluster is not for.
"""

from __future__ import annotations

import json

from rldsl import api
from rldsl.clusters import find
from rldsl.plan.codec import decode, plan_id
from rldsl.plan.diff import diff as compare
from rldsl.plan.diff_text import as_json, text
from rldsl.simulate import simulate


def diff(before: str, after: str, cluster: str | None = None, for_programs: bool = False) -> tuple[str, bool]:
    """cluster: the file or the preset of the machines that a step is simulated on."""
    data = api.read_bytes(before), api.read_bytes(after)
    one, two = decode(data[0], before), decode(data[1], after)
    machine = find(cluster) if cluster else None
    seconds = (simulate(one, machine).seconds, simulate(two, machine).seconds) if machine else None
    found = compare(one, two, seconds)
    ids = plan_id(data[0]), plan_id(data[1])
    if for_programs:
        return json.dumps(as_json(found, *ids), indent=1, ensure_ascii=False), found.same
    return text(found, f"{before} ({ids[0]})", f"{after} ({ids[1]})"), found.same
