"""The cost of bringing a trained model's new version to a copy under another layout.

In: a model, the block and strategy of its training, those of the call that uses the copy. Out: a `ReshardCost`. The
routes are those of the plan (`reshard/`), the seconds those of the simulator. Of the blocks only their relative
position counts: the same, nested, overlapping or disjoint."""

from __future__ import annotations

from dataclasses import dataclass, replace

from rldsl.plan.model import Layout, Model
from rldsl.reshard.alias import share_one_copy
from rldsl.reshard.planning import plan_reshard
from rldsl.reshard.rounds import BUCKET, num_buckets, num_rounds
from rldsl.search.problem import Problem
from rldsl.search.space import Block, Strategy
from rldsl.sharding.boxes import itemsize
from rldsl.sharding.dtypes import SIZES, in_wire_dtypes
from rldsl.simulate.machine import Machine
from rldsl.simulate.traffic import Loads

Key = tuple[str, Block, Strategy, Block, Strategy]


@dataclass(frozen=True, slots=True)
class ReshardCost:
    """One reshard, on its busiest rank."""

    pack_seconds: float = 0.0  # copying slices into send buffers
    transfer_seconds: float = 0.0  # on the wire, overlapping with other work
    unpack_seconds: float = 0.0  # copying received slices to their places
    received_bytes: int = 0  # per rank
    buffer_bytes: int = 0  # receive buffers, until the copy is used
    has_copy: bool = False  # false: the call reads the trained parameters themselves


class ReshardCosts:
    """The reshards of one problem, cached."""

    def __init__(self, problem: Problem, machine: Machine):
        self.problem, self.machine = problem, machine
        self._costs: dict[Key, ReshardCost] = {}

    def cached(self, model: str, src: Block, trained: Strategy, dst: Block, used: Strategy) -> ReshardCost | None:
        """The cost, if it has been computed."""
        return self._costs.get(self._key(model, src, trained, dst, used))

    def lower_bound(self, model: str, received: int, over_network: int) -> ReshardCost:
        """A lower bound, where some rank receives at least `received` elements, `over_network` of them from other
        nodes. Elements that arrive over both links at the same time take as long as their combined bandwidth needs."""
        if received <= 0:
            return ReshardCost()
        machine, item_size = self.machine, SIZES[self.problem.models[model].dtype]
        size = item_size * received
        local, network = machine.link(size, False), machine.link(size, True)
        both = local * network / (local + network) if local and network else 0.0
        seconds = local if self.problem.cluster.nodes == 1 else max(
            both, machine.link(item_size * max(over_network, 0), True))
        return ReshardCost(transfer_seconds=machine.latency(False) + seconds, unpack_seconds=machine.memory(2 * size),
                           received_bytes=size, has_copy=True)

    def cost(self, model: str, src: Block, trained: Strategy, dst: Block, used: Strategy) -> ReshardCost:
        """trained, used: the strategies of the train call on `src`, and of the call on `dst` that uses the copy."""
        key = self._key(model, src, trained, dst, used)
        if key not in self._costs:
            _, a, trained, b, used = key
            source, target = trained.layout(a.mesh()), used.layout(b.mesh())
            trained_model = replace(self.problem.models[model], train_layout=source.id)
            self._costs[key] = self._compute(trained_model, source, a, target, b)
        return self._costs[key]

    def _key(self, model: str, src: Block, trained: Strategy, dst: Block, used: Strategy) -> Key:
        """What the cost depends on. All levels of `zero` above 0 shard the parameters in the same way."""
        a, b = canonical_blocks(src, dst, self.problem.cluster.gpus)
        return model, a, _layout_only(trained), b, _layout_only(used)

    def _compute(self, model: Model, src: Layout, a: Block, dst: Layout, b: Block) -> ReshardCost:
        machine, gpus = self.machine, self.problem.cluster.gpus
        if src == dst or share_one_copy(model, src, a.mesh(), dst, b.mesh()):
            return ReshardCost()
        found = ReshardCost()
        for part in in_wire_dtypes(model, src.id, model, dst.id, 0.0):
            item_size, routes = itemsize(part), plan_reshard(part, src, a.mesh(), dst, b.mesh(), gpus)
            loads = Loads.of(routes).distinct_loads()
            received = item_size * max((t.received for t in loads), default=0)
            found = replace(found, has_copy=True)
            if not received:
                continue
            buckets = num_buckets(routes, item_size)
            longest = max(max(t.receiving(machine, item_size), t.sending(machine, item_size)) for t in loads)
            crosses = any(t.crosses for t in loads)
            transfer = num_rounds(routes, buckets) * (machine.latency(crosses) + longest / buckets)
            found = ReshardCost(found.pack_seconds + machine.memory(2 * item_size * max(t.sent for t in loads)),
                                found.transfer_seconds + transfer, found.unpack_seconds + machine.memory(2 * received),
                                found.received_bytes + received, found.buffer_bytes + min(2 * received, BUCKET), True)
        return found


def _layout_only(s: Strategy) -> Strategy:
    return Strategy(s.dp, s.tp, s.pp, s.cp, s.ep, min(s.zero, 1), vpp=s.vpp, backend=s.backend)


def canonical_blocks(src: Block, dst: Block, gpus: int) -> tuple[Block, Block]:
    """Two blocks of the same relative position, at the beginning of the cluster."""
    if src.contains(dst) or dst.contains(src):
        return Block(0, src.size), Block(0, dst.size)
    if src.overlaps(dst):
        first = min(src.start, dst.start) // gpus * gpus
        return Block(src.start - first, src.stop - first), Block(dst.start - first, dst.stop - first)
    same = src.start // gpus == dst.start // gpus and src.size < gpus and dst.size < gpus
    at = -(-src.size // dst.size) * dst.size if same else -(-src.size // gpus) * gpus
    return Block(0, src.size), Block(at, at + dst.size)
