"""What the calls of the backend `plain` cost: one sequence after another, logits of whole sequences at once."""

from __future__ import annotations

from collections.abc import Iterator

from rldsl.memory.call_memory import MemoryCosts
from rldsl.memory.call_parts import Needs
from rldsl.memory.micro_batch_size import largest_micro_batch
from rldsl.memory.parameters import FLOAT, Copy
from rldsl.memory.values import Tables, rows, width
from rldsl.plan.events import Infer, Train
from rldsl.plan.model import Layout
from rldsl.sharding.layout import Coordinate
from rldsl.simulate.stage import Stage, StagePasses
from rldsl.simulate.time_costs import TimeCosts
from rldsl.simulate.engine import Compute, Op
from rldsl.simulate.work_counts import count_micro_batch as counted
from rldsl.simulate.world import World
from rldsl.verify.issue_order import CommOp, IssueOrder

TABLES = 4  # float32 numbers per token and word: logits, the same over the temperature, log-probs, and their product


class PlainMemory(MemoryCosts):
    def infer(self, tables: Tables, event: Infer, copy: Copy, device: str) -> Needs:
        """One sequence: what the torch backend keeps, and the logits."""
        logits = TABLES * FLOAT * width(tables.frames[event.frame]) * copy.model.sizes.vocab
        return {**super().infer(tables, event, copy, device), "logits": logits}

    def train(self, tables: Tables, event: Train, copy: Copy, device: str) -> Needs:
        """All sequences of a micro-batch, whose graphs the loss joins."""
        count = -(-rows(tables.frames[event.frames[0]], tables.spreads[event.spread], tables.layouts, tables.frames)
                  // tables.spreads[event.spread].minibatches)
        tokens = largest_micro_batch(tables, event.frames, count, event.mbs, event.mbt, copy.layout).tokens
        logits = TABLES * FLOAT * tokens * copy.model.sizes.vocab
        return {**super().train(tables, event, copy, device), "logits": logits}


class PlainTime(TimeCosts):
    def infer(self, world: World, event: Infer, stage: Stage) -> StagePasses:
        count = world.rows(world.spreads[event.spread], event.frame)
        row = world.row(event.frame)
        forward = world.machine.forward(stage.shard, counted(stage.shard, 1, row, row.tokens))
        return StagePasses(count, ((forward, 0.0),), 0.0)

    def train(self, world: World, event: Train, stage: Stage) -> StagePasses:
        frames, minibatches = [world.frames[f] for f in event.frames], world.spreads[event.spread].minibatches
        count = -(-frames[0].count // minibatches // world.layouts[event.layout].dp)
        both = [world.machine.train(stage.shard, counted(stage.shard, 1, row, row.tokens), False)
                for row in map(world.row, event.frames)]
        return StagePasses(count, ((sum(f for f, _ in both), sum(b for _, b in both)),), 0.0)

    def update(self, stage: Stage, zero: int) -> list[Op]:
        """One all-reduce and an AdamW of several kernels per parameter."""
        layers = stage.shard.model.layers
        tensors = sum(layers if p.stage == "layer" else 1 for p in stage.shard.model.params)
        reduced = tensors * stage.all_reduce("dp", 4 * stage.shard.trained / tensors)
        step = stage.machine.update(stage.shard, stage.shard.trained) + stage.machine.kernels(14 * tensors)
        return [*stage.collective_ops("dp", "gradients", reduced), Compute(step)]


class PlainOrder(IssueOrder):
    def infer(self, x: Layout, at: Coordinate, count: int) -> Iterator[CommOp]:
        """Ranks do not communicate."""
        return iter(())

    def train(self, x: Layout, at: Coordinate, count: int) -> Iterator[CommOp]:
        """Whether to stop, and gradients; the norm is the same on every rank. At the end the metrics."""
        if x.dp > 1:
            for _ in range(2):
                yield from (CommOp("mesh", 0, 0), CommOp("dp", at.pp, 0))
            yield CommOp("mesh", 0, 0)
