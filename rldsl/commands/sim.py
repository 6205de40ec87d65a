"""`rlc sim`: how long a step of a plan takes on a cluster, and why.

In: a plan or a program, a cluster's file or preset. Out: text, JSON or a trace.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from rldsl.clusters import find
from rldsl.commands import Usage
from rldsl.commands.inputs import ENDING, compiled_program, plan_or_program
from rldsl.commands.other_lag import other_lag
from rldsl.files import keep_inputs, write
from rldsl.plan.expr import Scalar
from rldsl.python.plan import Plan
from rldsl.python.views import Simulation
from rldsl.simulate import Lengths


def sim(file: str, cluster: str, sets: Mapping[str, Scalar], place: str | None, overrides: Sequence[str],
        lengths: Lengths, like: str | None, durations: Mapping[str, float], as_json: bool, trace: str | None) -> str:
    """like: the directory of an earlier run whose lengths to take. durations: known seconds of calls."""
    if like and lengths != Lengths():
        raise Usage("--lengths takes the lengths from a run: omit --prompt-tokens and --response-tokens")
    from rldsl.simulate.trace import chrome

    if trace:
        keep_inputs(trace, (file, cluster, place), "choose another path with --trace")
    machine = find(cluster)  # its mistakes come before those of a program that takes long to compile
    plan = plan_or_program(file, sets, place, overrides)

    def simulated(plan: Plan) -> Simulation:
        return plan.simulate(machine, prompt_tokens=lengths.prompt, response_tokens=lengths.response,
                             longest=lengths.longest, like=like, durations=durations)

    found = simulated(plan)
    if not file.endswith(ENDING):
        found = replace(found, other=other_lag(
            plan, lambda change: compiled_program(file, sets, place, overrides, change),
            lambda other: simulated(other).average))
    if trace:
        write(trace, chrome(found.plan, found.timeline).encode(), "choose another path with --trace")
    return found.json() if as_json else found.text()
