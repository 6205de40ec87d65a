"""A class of ranks at its pipeline stage: its groups, its part of the model, and the seconds of their collectives.

In: the plan on a cluster, a call's layout. Out: a `Stage`, from which the costs of calls are counted, and the records
in which a backend states them.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass

from rldsl.sharding.boxes import itemsize
from rldsl.sharding.pipeline_schedule import Message
from rldsl.simulate.classes import Groups
from rldsl.simulate.engine import Isend, Op
from rldsl.simulate.machine import Machine
from rldsl.simulate.work_counts import Shard, build_shard
from rldsl.simulate.world import World, collective


@dataclass(frozen=True, slots=True)
class Stage:
    """A class of ranks at its pipeline stage under the layout of a call."""

    rank_class: int  # number of the class
    groups: Groups  # its groups of ranks, by axis
    shard: Shard  # what a rank of it holds of the model
    machine: Machine  # what its ranks run on
    key: Hashable  # unique per call; part of the keys of its messages
    backend: str = ""  # name

    @property
    def pipeline(self) -> tuple[int, ...]:
        """The classes of its pipeline, by stage."""
        return self.groups.members["pp"]

    def collective_ops(self, axis: str, name: Hashable, seconds: float) -> list[Op]:
        """A collective over one of its groups."""
        parties = self.groups.members.get(axis, ())
        return collective((self.key, axis, parties, name), parties, seconds)

    def all_reduce(self, axis: str, moved: float) -> float:
        """Seconds of an all-reduce of `moved` bytes."""
        return self.machine.all_reduce(moved, self.groups.sizes[axis], self.groups.crosses[axis])

    @property
    def sharded_elements(self) -> float:
        """Elements that an optimizer step of this rank changes under `zero`: experts are divided only over the ranks
        that hold the same ones."""
        s, sizes = self.shard, self.groups.sizes
        return (s.trained - s.local_experts) / sizes["dp"] + s.local_experts / sizes.get("expert_dp", 1)

    def over_dp(self, gather: Callable[[float, int, bool], float], item: int, elements: float,
                experts: float = 0.0) -> float:
        """Seconds of an all-gather or a reduce-scatter of `elements` elements over dp, and of `experts` over the ranks
        that hold the same ones. item: bytes of an element."""
        size, copies, crosses = self.groups.sizes["dp"], self.groups.sizes.get("expert_dp", 1), self.groups.crosses
        return gather(item * elements / size, size, crosses["dp"]) + gather(
            item * experts / copies, copies, crosses.get("expert_dp", False))

    def hidden_bytes(self, tokens: float) -> float:
        """Bytes of hidden states."""
        return tokens * self.shard.model.sizes.hidden * self.machine.hidden_item(self.shard)

    def tensor_parallel(self, tokens: float, outputs: float, layers: float, sequence_parallel: bool = False) -> float:
        """Seconds of the collectives of tensor parallelism in one direction of a pass: after attention and after the
        feed-forward of each layer, after the embedding, and for the normalizer of the log-probabilities. With sequence
        parallelism each all-reduce of a layer is a reduce-scatter and an all-gather of the same bytes (Korthikanti et
        al. 2022)."""
        if self.shard.tp == 1:
            return 0.0
        moved, size, crosses = self.hidden_bytes(tokens), self.groups.sizes["tp"], self.groups.crosses["tp"]
        whole = self.all_reduce("tp", moved)
        each = sum(op(moved / size, size, crosses) for op in (self.machine.all_gather, self.machine.reduce_scatter)
                   ) if sequence_parallel else whole
        ends = 2 * self.all_reduce("tp", outputs * 8) if outputs and self.shard.last else 0.0
        return 2 * layers * each + self.shard.first * whole + ends

    def context_parallel(self, tokens: float, layers: float) -> float:
        """Seconds in which the ranks of a cp group gather keys and values. tokens: of this rank."""
        kept = tokens * self.shard.cache * self.machine.hidden_item(self.shard)
        return layers * self.machine.all_gather(kept, self.groups.sizes["cp"], self.groups.crosses["cp"])

    def expert_parallel(self, tokens: float, layers: float) -> float:
        """Seconds in which tokens travel to the ranks of their experts and back. tokens: of this rank."""
        size, sizes = self.groups.sizes.get("ep", 1), self.shard.model.sizes
        if size == 1 or not self.shard.experts:
            return 0.0
        moved = tokens * max(sizes.experts_per_token, 1) * sizes.hidden * itemsize(self.shard.model)
        return 2 * layers * self.machine.dispatch(moved, size, self.groups.crosses["ep"])

    def links(self, tokens: float, layers: float) -> float:
        """Seconds of all collectives of a forward pass without outputs. tokens: of this rank."""
        return self.tensor_parallel(tokens, 0, layers) + self.expert_parallel(tokens, layers)

    def logits_gather(self, rows: float) -> float:
        """Seconds in which the ranks of a tp group gather the float32 logits of `rows` tokens, on the last stage."""
        s = self.shard
        if not s.last or s.tp == 1:
            return 0.0
        moved = rows * 4 * s.head / max(s.model.sizes.hidden, 1)
        return self.machine.all_gather(moved, s.tp, self.groups.crosses["tp"])

    def message(self, found: Message, receiver: int, moved: float) -> tuple[Op, Hashable]:
        """The op that posts a message of a minibatch, and its key. receiver: the rank along pp that it is for."""
        pair = tuple(sorted((self.pipeline[self.groups.stage], self.pipeline[found.peer])))
        key = (self.key, "pp", pair, receiver, found.for_pass)
        return Isend(key, pair, self.machine.message(moved, self.groups.crosses["pp"]), 1.0), key

    def neighbor_message(self, i: int, side: str, moved: float) -> tuple[Op, Hashable]:
        """The op that posts message number `i` between this stage and the "next" one or the one "before", and its
        key."""
        s = self.groups.stage
        pair = (self.pipeline[s], self.pipeline[s + 1]) if side == "next" else (self.pipeline[s - 1], self.pipeline[s])
        key = (self.key, "pp", pair, i)
        return Isend(key, pair, self.machine.message(moved, self.groups.crosses["pp"]), 1.0), key


@dataclass(frozen=True, slots=True)
class StagePasses:
    """The passes of a stage in a pipeline."""

    count: int  # micro-batches; 0: the call does nothing
    durations: tuple[tuple[float, float], ...]  # (forward, backward) seconds of one micro-batch, per chunk of layers
    message: float  # bytes of a message to a neighboring stage
    leaves: int = 1  # that they belong to, about equally many to each: the pipeline runs dry after a leaf


@dataclass(frozen=True, slots=True)
class DecodeTime:
    """A `generate` as one rank sees it."""

    seconds: float  # until all stages of the shard are done
    share: float = 1.0  # of these seconds, in which this rank's stage computes


def build_stage(world: World, model: str, layout: str, c: int, key: Hashable) -> Stage:
    """A class of ranks under a layout of a call."""
    own, x = world.groups[layout][c], world.layouts[layout]
    return Stage(c, own, build_shard(world.models[model], x, own.stage), world.machine, key, x.backend)
