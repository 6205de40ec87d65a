"""What a model can do by its head: one table for the compiler, the verifier and the editor."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from rldsl.plan.expr import Level

Head = Literal["causal_lm", "value_model", "reward_model"]
What = Literal["logprobs", "entropy", "values", "scores"]


@dataclass(frozen=True, slots=True)
class Output:
    """An output of a head: the call that computes it, its name in a loss and in the plan, its level."""

    call: str
    what: What
    level: Level


OUTPUTS: Mapping[str, tuple[Output, ...]] = {  # the main one first
    "causal_lm": (Output("logprobs", "logprobs", "token"), Output("entropy", "entropy", "token")),
    "value_model": (Output("values", "values", "token"),),
    "reward_model": (Output("score", "scores", "seq"),),
}
HEAD_OF: Mapping[str, str] = {o.what: head for head, outputs in OUTPUTS.items() for o in outputs}
CALL_OF: Mapping[str, str] = {o.what: o.call for outputs in OUTPUTS.values() for o in outputs}
LEVEL_OF: Mapping[str, Level] = {o.what: o.level for outputs in OUTPUTS.values() for o in outputs}

STOP = "stop"  # the output of a loss's program that tells whether training ends here
SKIPPED = "skipped"  # the metric of a train call that may skip minibatches: how many it skipped
UPDATES = "updates"  # the metric of a train call that may end early: how many optimizer steps it made

CALLS: Mapping[str, tuple[str, ...]] = {
    head: (*(("generate",) if head == "causal_lm" else ()), *(o.call for o in outputs), "train")
    for head, outputs in OUTPUTS.items()
}
