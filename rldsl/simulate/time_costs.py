"""How long the calls of a backend take: what its description states, and what the torch backend takes.

In: an event, a class of ranks at its pipeline stage, the plan on a cluster. Out: the passes that a call makes, and the
seconds of each. `TimeCosts` counts the torch backend; other backends derive theirs from it (`Description.time`).
`call_ops.py` checks what a backend states, and makes ops of it.
"""

from __future__ import annotations

from rldsl.plan.backends import costs
from rldsl.plan.events import Generate, Infer, Train
from rldsl.simulate.engine import Compute, Op
from rldsl.simulate.generate_time import generate_time
from rldsl.simulate.gradient_reductions import gradient_reductions
from rldsl.simulate.pass_times import infer_passes, train_passes
from rldsl.simulate.stage import DecodeTime, Stage, StagePasses
from rldsl.simulate.world import World


class TimeCosts:
    """How long the calls of one backend take. This class counts the torch backend; derive from it and override what
    differs. Every method is pure. world: the plan on a cluster, with its expected lengths. stage: the class of ranks at
    its stage."""

    def generate(self, world: World, event: Generate, stage: Stage) -> DecodeTime:
        """The whole of a `generate`."""
        return generate_time(world, event, stage)

    def infer(self, world: World, event: Infer, stage: Stage) -> StagePasses:
        """The forward passes of an inference call; backward passes take no time."""
        return infer_passes(world, event, stage)

    def train(self, world: World, event: Train, stage: Stage) -> StagePasses:
        """The passes of one minibatch of training."""
        return train_passes(world, event, stage)

    def update(self, stage: Stage, zero: int) -> list[Op]:
        """What ends a minibatch: the reductions of gradients, then one optimizer step."""
        elements = stage.sharded_elements if zero else stage.shard.trained
        return [*gradient_reductions(stage, zero), Compute(stage.machine.update(stage.shard, elements))]


def time_costs(backend: str) -> TimeCosts:
    """The costs that the description of a backend states. Errors: RL0326."""
    return costs(backend, "time", TimeCosts)
