"""`rlc sim`: how long a step of a plan takes on a cluster, and why.

In: a plan or a program, a cluster's file or preset. Out: text, JSON or a trace.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from rldsl import api
from rldsl.clusters import find
from rldsl.commands import Usage
from rldsl.commands.files import write
from rldsl.plan.expr import Scalar
from rldsl.simulate import Lengths, observed, simulate
from rldsl.simulate.summary import text, to_json
from rldsl.simulate.trace import chrome


def sim(file: str, cluster: str, sets: Mapping[str, Scalar], place: str | None, overrides: Sequence[str],
        lengths: Lengths, like: str | None, as_json: bool, trace: str | None) -> str:
    """like: the directory of an earlier run whose lengths to take."""
    if like and lengths != Lengths():
        raise Usage("--lengths takes them from a run: leave --prompt-tokens and --response-tokens out")
    if file.endswith(".plan"):
        if sets or place or overrides:
            raise Usage("a plan is fixed: give --set, --place and --on when compiling it")
        plan = api.read_plan(file)
    else:
        plan = api.compile(file, sets, place, overrides)
    machine = find(cluster)
    expected = observed(plan, like) if like else lengths
    timeline = simulate(plan, machine, expected)
    if trace:
        write(trace, chrome(plan, timeline).encode(), "choose another place with --trace")
    return to_json(plan, timeline, machine) if as_json else text(plan, timeline, machine, expected, Path(file).name)
