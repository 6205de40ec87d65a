"""What it costs to bring a trained model's new version to a copy under another layout.

In: a model, where and how it is trained, where and how the copy is used. Out: a `Move`. The paths are those that the
plan would have (`reshard/`), the seconds those that the simulator gives them. Blocks count by how they lie to each
other: the same, one inside the other, or apart.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from rldsl.plan.model import Layout, Model
from rldsl.reshard.alias import share_one_copy
from rldsl.reshard.rounds import BUCKET, num_buckets, num_rounds
from rldsl.reshard.routes import plan_routes
from rldsl.search.problem import Problem
from rldsl.search.space import Block, Strategy
from rldsl.sharding.dtypes import in_wire_dtype
from rldsl.simulate.times import Machine
from rldsl.simulate.traffic import Loads

Key = tuple[str, Block, Strategy, Block, Strategy]
ITEM = {"float32": 4, "bfloat16": 2}  # bytes of an element


@dataclass(frozen=True, slots=True)
class ReshardCost:
    """before: seconds of putting together what is sent. seconds: on the way, beside other work. after: of putting what
    has come into its place. bytes: that the busiest rank gets. room: of buffers, until the copy is used.
    copied: whether there is a copy, and the call does not read what is trained."""

    before: float = 0.0
    seconds: float = 0.0
    after: float = 0.0
    bytes: int = 0
    room: int = 0
    copied: bool = False


class ReshardCosts:
    """Of one problem; what has been worked out is kept."""

    def __init__(self, problem: Problem, machine: Machine):
        self.problem, self.machine = problem, machine
        self.known: dict[Key, ReshardCost] = {}

    def seen(self, model: str, src: Block, mine: Strategy, dst: Block, other: Strategy) -> ReshardCost | None:
        """What is known already."""
        return self.known.get(self._key(model, src, mine, dst, other))

    def least(self, model: str, lacks: int, far: int) -> ReshardCost:
        """Where some rank gets at least so many elements, and so many over the network. What comes by both links at
        once takes what both together would."""
        if lacks <= 0:
            return ReshardCost()
        machine, item = self.machine, ITEM[self.problem.models[model].dtype]
        near, network = machine.link(item * lacks, False), machine.link(item * lacks, True)
        both = near * network / (near + network) if near and network else 0.0
        seconds = near if self.problem.cluster.nodes == 1 else max(both, machine.link(item * max(far, 0), True))
        return ReshardCost(seconds=machine.latency(False) + seconds, after=machine.memory(2 * item * lacks),
                    bytes=item * lacks, copied=True)

    def __call__(self, model: str, src: Block, mine: Strategy, dst: Block, other: Strategy) -> ReshardCost:
        """mine, other: strategies of the train call and of the call that uses the copy."""
        key = self._key(model, src, mine, dst, other)
        if key not in self.known:
            _, a, mine, b, other = key
            here, there = mine.layout(a.mesh()), other.layout(b.mesh())
            self.known[key] = self._move(replace(self.problem.models[model], home=here.id), here, a, there, b)
        return self.known[key]

    def _key(self, model: str, src: Block, mine: Strategy, dst: Block, other: Strategy) -> Key:
        """What a movement depends on. With any degree of `zero` parameters lie alike."""
        a, b = canonical_blocks(src, dst, self.problem.cluster.gpus)
        return model, a, _layout_only(mine), b, _layout_only(other)

    def _move(self, model: Model, src: Layout, a: Block, dst: Layout, b: Block) -> ReshardCost:
        machine, gpus = self.machine, self.problem.cluster.gpus
        if src == dst or share_one_copy(model, src, a.mesh(), dst, b.mesh()):
            return ReshardCost()
        travels = in_wire_dtype(model, src.id, model, dst.id, 0.0)
        item = ITEM[travels.dtype]
        way = plan_routes(model, src, a.mesh(), dst, b.mesh(), gpus)
        seen = Loads.of(way).every()
        most = max((t.received for t in seen), default=0)
        if not most:
            return ReshardCost(copied=True)
        parts = num_buckets(way, item)
        longest = max(max(t.receiving(machine, item), t.sending(machine, item)) for t in seen)
        crosses = any(t.crosses for t in seen)
        return ReshardCost(machine.memory(2 * item * max(t.sent for t in seen)),
                    num_rounds(way, parts) * (machine.latency(crosses) + longest / parts),
                    machine.memory(2 * item * most), item * most, min(2 * item * most, BUCKET), True)


def _layout_only(s: Strategy) -> Strategy:
    return Strategy(s.dp, s.tp, s.pp, s.cp, s.ep, min(s.zero, 1), vpp=s.vpp, backend=s.backend)


def canonical_blocks(src: Block, dst: Block, gpus: int) -> tuple[Block, Block]:
    """Two blocks that lie to each other as these, at the beginning of the cluster."""
    if src.holds(dst):
        return Block(0, src.size), Block(0, dst.size)
    if dst.holds(src):
        return Block(0, src.size), Block(0, dst.size)
    if src.meets(dst):
        first = min(src.start, dst.start) // gpus * gpus
        return Block(src.start - first, src.stop - first), Block(dst.start - first, dst.stop - first)
    same = src.start // gpus == dst.start // gpus and src.size < gpus and dst.size < gpus
    at = -(-src.size // dst.size) * dst.size if same else -(-src.size // gpus) * gpus
    return Block(0, src.size), Block(at, at + dst.size)
