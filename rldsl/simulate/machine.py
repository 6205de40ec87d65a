"""The seconds that counted work takes on a cluster.

In: counts and a `Cluster`. Out: seconds. Measurements of the model in the cluster's file are used where there are any;
else the roofline model (Williams et al. 2009): matrix products at their rate or memory at its rate, whichever is
slower, and at least the time in which the host launches the kernels.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, inf, log2
from typing import NamedTuple

from rldsl.clusters import Cluster, Measured
from rldsl.plan.model import Model
from rldsl.simulate.conversations import EnvironmentCosts
from rldsl.simulate.work_counts import Shard, WorkCounts, orthogonalization

# Kernels of an eager transformer in torch, counted in a trace of a Qwen3 layer; families differ little.
LAYER_KERNELS, CALL_KERNELS, SAMPLE_KERNELS = 40, 16, 24
SCORES = 16  # bytes moved per logit: float32, written once, read by the maximum, the sum and the sampling
TILE = 128  # rows and columns of the result that a multiprocessor computes at a time
LOW_TILE = 16  # rows of a tile of a result that has few, at least
SPLIT = 4096  # inner width of a product that a multiprocessor computes in one piece
RAMP = 256  # inner width whose products take as long as filling and draining the pipeline of a multiprocessor
ADAM = 28  # bytes moved per element in a step: parameter, gradient, two moments read; all but the gradient written


class InvariantPrice(NamedTuple):
    """Seconds of an invariant model over those of the same without, as `python -m benchmarks.invariant` measures them
    on a CPU."""

    decode: float
    forward: float
    train: float          # where gradients have no order of sums
    ordered_train: float  # where they have one


INVARIANT_PRICE = {"float32": InvariantPrice(1.2, 1.1, 1.1, 1.3), "bfloat16": InvariantPrice(1.4, 1.1, 1.1, 1.3)}


@dataclass(frozen=True, slots=True)
class Machine:
    """One cluster as its ranks see it."""

    cluster: Cluster  # its rates
    threads: int = 1  # of each rank, where ranks share cores

    @property
    def shared(self) -> bool:
        """Whether ranks share the cores of a processor, instead of having a device each."""
        return self.cluster.cores > 0

    # ------------------------------------------------------------------------------------------- calls

    def measured(self, model: Model, tp: int) -> Measured | None:
        """Measurements of the model in the cluster's file, scaled from the nearest degree of tensor parallelism."""
        known = [m for m in self.cluster.measured if (m.config, m.head, m.dtype, m.threads) ==
                 (model.config_digest, model.head_name, model.dtype, self.threads)]
        nearest = min(known, key=lambda m: (abs(log2(m.tp / tp)), m.tp), default=None)
        return nearest.under(tp, LAYER_KERNELS * self.cluster.kernel_us) if nearest is not None else None

    def why_not_measured(self, model: Model) -> str:
        """In which way the measurements of the cluster's file are not those of the model, the nearest of them; "" where
        there are none, or those of the model."""
        asked = {"config.json": model.config_digest, "head": model.head_name, "dtype": model.dtype,
                 "threads": self.threads}
        each = [[name for name, value, has in zip(asked, asked.values(), (m.config, m.head, m.dtype, m.threads),
                                                  strict=True) if value != has] for m in self.cluster.measured]
        if not each or not all(each):
            return ""
        nearest = min(each, key=len)
        return f"measured with other {' and '.join(nearest)}"

    def forward(self, s: Shard, c: WorkCounts, links: float = 0.0) -> float:
        """Seconds of a forward pass. links: seconds in which it exchanges data with other ranks."""
        found = self.measured(s.model, s.tp)
        price = INVARIANT_PRICE[s.model.dtype].forward - 1 if s.model.invariant else 0.0  # of what it computes itself
        images = self.tower(s, c.images)
        if found and found.forward:
            return (1 + price) * _sum(found.forward, c) + links + images
        return self._pass(s, c, 1, links) + (price * self._pass(s, c, 1, 0.0) if price else 0.0) + images

    def train(self, s: Shard, c: WorkCounts, recompute: bool, links: float = 0.0,
              again_links: float = 0.0) -> tuple[float, float]:
        """(forward, backward) seconds of a micro-batch. links: seconds in which a forward pass exchanges data with
        other ranks, and again a backward pass; again_links: the same of the forward pass that is made again."""
        forward, backward = self._train(s, c, recompute, links, again_links)
        if not s.model.invariant:  # no model that reads images is
            images = self.tower(s, c.images)
            return forward + images, backward + (2 + recompute) * images * s.tower_trained
        prices = INVARIANT_PRICE[s.model.dtype]
        price = prices.ordered_train if s.model.invariant_training else prices.train
        own = self._train(s, c, recompute, 0.0, 0.0)
        return forward + (price - 1) * own[0], backward + (price - 1) * own[1]

    def _train(self, s: Shard, c: WorkCounts, recompute: bool, links: float, again_links: float
               ) -> tuple[float, float]:
        found = self.measured(s.model, s.tp)
        again = _without_outputs(c)
        frozen = s.trained < s.elements / 2  # adapters: a base without gradients halves the backward products
        if found and found.train:
            both = _sum(found.train, c)
            ahead = min(_sum(found.forward, c), both) if found.forward else both / 3
            back = (both - ahead) / (2 if frozen else 1) + links
            return ahead + links, back + (_sum(found.forward, again) + again_links if recompute else 0.0)
        ahead, back = self._pass(s, c, 1, links), self._pass(s, c, 1 if frozen else 2, links)
        return ahead, back + (self._pass(s, again, 1, again_links) if recompute else 0.0)

    def tower(self, s: Shard, images: float) -> float:
        """Seconds of a forward pass of the vision tower over `images` tokens of images."""
        found = self.measured(s.model, s.tp)
        if found and found.tower:
            return _sum(found.tower, WorkCounts(0, 0, 0, 0, 0, images * s.first))
        return self._operations(s, images * s.tower * s.first)

    def decode(self, s: Shard, c: WorkCounts, captured: bool = False) -> float:
        """Seconds of decoding steps. captured: kernels are replayed from a graph."""
        return self._decode(s, c, captured) * (INVARIANT_PRICE[s.model.dtype].decode if s.model.invariant else 1.0)

    def conversation_step(self, s: Shard, c: WorkCounts) -> float:
        """Seconds of a decoding step of conversations, whose passes are of other slots each time and never captured:
        where the model was measured in other calls alone, its layers take the host as long as those of a forward
        pass."""
        found = self.measured(s.model, s.tp)
        if found and found.turn:
            return _sum(found.turn, c) * (INVARIANT_PRICE[s.model.dtype].decode if s.model.invariant else 1.0)
        if not (found and found.decode and found.forward):
            return self.decode(s, c)
        passes = dict(found.forward)
        return _sum(tuple((feature, max(rate, passes.get(feature, 0.0)) if feature in ("call", "layer") else rate)
                          for feature, rate in found.decode), c)

    def conversation_reply(self, s: Shard, c: WorkCounts) -> float:
        """Seconds of a pass over what environments say."""
        found = self.measured(s.model, s.tp)
        if found and found.reply:
            return _sum(found.reply, c) * (INVARIANT_PRICE[s.model.dtype].forward if s.model.invariant else 1.0)
        return self.forward(s, c)

    def _decode(self, s: Shard, c: WorkCounts, captured: bool) -> float:
        found = self.measured(s.model, s.tp)
        if found and found.decode:
            return _sum(found.decode, c)
        each = c.tokens / c.layers if c.layers else 0.0
        held = s.item * (s.layers * s.read(each) + s.head)
        operations = 2 * (c.tokens * s.active / self._fill(s, each) + c.outputs * s.head)
        products = self._roofline(operations, c.calls * held, s)
        cached = self.memory(c.pairs * s.cache * s.item + c.tokens * s.stepped)
        sampled = self.memory(c.outputs * _vocabulary(s) * SCORES)
        kernels = c.layers * LAYER_KERNELS + c.calls * (CALL_KERNELS + SAMPLE_KERNELS * s.last)
        seconds = products + cached + sampled
        return seconds if captured else self._with_launches(kernels, seconds)

    def start(self, s: Shard, shapes: float) -> float:
        """Additional seconds of the first decoding steps of `shapes` shapes, where they were measured."""
        found = self.measured(s.model, s.tp)
        return _sum(found.start, WorkCounts(shapes, shapes * s.layers, 0, 0, 0)) if found else 0.0

    def update(self, s: Shard, elements: float) -> float:
        """Seconds of one optimizer step over `elements` elements: norm, clipping, the update as AdamW's, and clearing
        the gradients. Muon's products come on top, of complete matrices on every rank."""
        found = self.measured(s.model, s.tp)
        if found and found.update:
            rates = dict(found.update)
            return (rates.get("call", 0.0) + rates.get("element", 0.0) * elements) * 1e-6
        products = 2 * orthogonalization(s.model, s.layers) / (self._rate(s) * self.cluster.matmul_efficiency)
        return self._with_launches(32.0, self.memory(elements * (ADAM + 12.0)) + products)

    def _pass(self, s: Shard, c: WorkCounts, work: int, links: float) -> float:
        """links: as of `forward`. work: how often the matrix products of a forward pass are made: twice in a backward
        pass. Autograd launches its kernels from C++, no slower than the forward pass launched its own."""
        each = c.tokens / c.layers if c.layers else 0.0
        held = (c.layers * s.read(each) + (s.head if c.outputs else 0) * c.calls) * s.item
        # What the kernels between the products move: of what is wide a rank of tp has its own columns, and of the rest
        # its own tokens (sequence parallelism).
        dispatched = s.ep > 1 and self.cluster.dispatch_gb_s > 0  # then `dispatch` has the order of experts
        moved = s.moved.between + (0.0 if dispatched else s.moved.ordered)
        between = c.tokens * moved * self.hidden_item(s) / s.tp
        operations = 2 * work * c.tokens * s.active / self._fill(s, each)
        if self.cluster.compute_units:  # kernels run one after the other
            products = self._roofline(operations, work * held, s) + self.memory(work * between)
        else:
            products = self._roofline(operations, work * (held + between), s)
        attention = 4 * work * (c.pairs / 2) * s.attention / (self._rate(s) * self.cluster.attention_efficiency)
        head = self._head(s, c, work)
        experts = c.layers * self.cluster.expert_us * 1e-6 if s.experts else 0.0
        states = work * (self._operations(s, c.tokens * s.scan) + self.memory(2 * c.tokens * s.scanned))
        seconds = products + attention + head + links + states
        return self._with_launches(c.layers * LAYER_KERNELS + c.calls * CALL_KERNELS, seconds, experts)

    def _head(self, s: Shard, c: WorkCounts, work: int) -> float:
        """Seconds of the output product, and of log-probabilities or their gradient: where the cluster file says what
        they move, by separate kernels."""
        operations, entries = 2 * work * c.outputs * s.head, c.outputs * _vocabulary(s)
        if not self.cluster.logit_bytes:
            return self._roofline(operations, work * entries * SCORES, s)
        moved = self.cluster.logit_bytes if work == 1 else work * SCORES
        return self._roofline(operations, 0.0, s) + self.memory(entries * moved)

    def hidden_item(self, s: Shard) -> int:
        """Bytes of an element of the hidden states."""
        return self.cluster.hidden_bytes or s.item

    def _rate(self, s: Shard) -> float:
        c = self.cluster
        return (c.bfloat16_tflops if s.model.dtype == "bfloat16" else c.float32_tflops) * 1e12

    def _roofline(self, operations: float, moved: float, s: Shard) -> float:
        return max(self._operations(s, operations), self.memory(moved))

    def _operations(self, s: Shard, count: float) -> float:
        """Seconds of `count` operations in products of matrices."""
        return count / (self._rate(s) * self.cluster.matmul_efficiency)

    def _fill(self, s: Shard, tokens: float) -> float:
        """Which part of the multiprocessors' work is used by the products of a layer over `tokens` tokens: a result is
        divided into tiles, tiles are computed in waves of one per multiprocessor, and a short inner width does not fill
        the pipeline of one. Of several experts, their tiles together."""
        units = self.cluster.compute_units
        if not units or tokens <= 0:
            return 1.0
        useful = total = 0.0
        for rows, columns, chosen, count in s.products:
            each = tokens * chosen if count == 1 else max(tokens * chosen / count, 1.0)
            worst = each * self.cluster.expert_imbalance if count > 1 and s.ep > 1 else each
            pieces = ceil(columns / SPLIT)
            depth = columns / pieces
            high = TILE if worst > TILE else ceil(worst / LOW_TILE) * LOW_TILE
            waves = ceil(ceil(worst / high) * ceil(rows / TILE) * count * pieces / units)
            work = each * rows * columns * count
            useful += work
            total += max(waves * units * high * TILE * (depth + RAMP), worst / each * work)
        return useful / total if total else 1.0

    def _with_launches(self, kernels: float, seconds: float, other: float = 0.0) -> float:
        """A device works while the host launches kernels; a processor does one after the other. other: further
        seconds of the host."""
        started = kernels * self.cluster.kernel_us * 1e-6 + other
        return started + seconds if self.shared else max(started, seconds)

    def overlapped(self, work: float, moved: float) -> float:
        """Seconds of work and data movement: at the same time on a device, one after the other on a processor."""
        return work + moved if self.shared else max(work, moved)

    # ----------------------------------------------------------------------------------- the runtime

    def memory(self, moved: float) -> float:
        """Seconds of reading or writing `moved` bytes of device memory."""
        return moved / (self.cluster.memory_gb_s * 1e9 * self.cluster.memory_efficiency)

    def call(self) -> float:
        """Seconds around a call of a model in which a driver prepares and moves its data."""
        return self.cluster.call_s

    def event(self) -> float:
        """Seconds of the runtime per event."""
        return self.cluster.event_us * 1e-6 or self.kernels(8)

    def kernels(self, count: float) -> float:
        """Seconds of small tensor operations, one after the other."""
        return count * self.cluster.kernel_us * 1e-6

    def rows(self, count: float) -> float:
        """Seconds of dividing or moving `count` rows."""
        return count * self.cluster.row_us * 1e-6

    def compute(self, operators: int, entries: float) -> float:
        """Seconds of a program of `operators` operators over `entries` entries."""
        return self.kernels(12 * operators) + self.memory(operators * entries * 12)

    def environments(self) -> EnvironmentCosts:
        """What conversations with environments take of the host. Ranks with a device each leave cores enough."""
        c = self.cluster
        cores = (c.cores / self.threads - c.gpus) / c.gpus if self.shared else inf
        return EnvironmentCosts(c.conversation_us * 1e-6, c.turn_us * 1e-6, c.environment_us * 1e-6,
                                c.answer_us * 1e-6, max(cores, 0.0))

    def host(self, moved: float) -> float:
        return moved / (self.cluster.host_gb_s * 1e9) if self.cluster.host_gb_s else 0.0

    def disk(self, moved: float) -> float:
        return moved / (self.cluster.disk_gb_s * 1e9) if self.cluster.disk_gb_s else 0.0

    # ------------------------------------------------------------------------------------------ links

    def latency(self, crosses: bool) -> float:
        return (self.cluster.network_us if crosses else self.cluster.link_us) * 1e-6

    def link(self, moved: float, crosses: bool) -> float:
        """Seconds of sending or receiving `moved` bytes. Infinite if the rate is unknown, which `check_cluster`
        refuses."""
        c = self.cluster
        shared = c.node_network_gb_s / c.gpus if c.node_network_gb_s else c.network_gb_s
        rate = min(c.network_gb_s, shared) if crosses else c.link_gb_s
        if not moved:
            return 0.0
        return moved / (rate * 1e9 * c.link_efficiency) if rate else inf

    def message(self, moved: float, crosses: bool) -> float:
        return self.latency(crosses) + self.link(moved, crosses)

    def all_reduce(self, moved: float, ranks: int, crosses: bool) -> float:
        """Seconds for `moved` bytes on each rank: the bytes of a ring, the latency of a tree (Thakur et al. 2005)."""
        if ranks < 2:
            return 0.0
        return self._rounds(ranks, crosses) + self._collective(2 * (ranks - 1) / ranks * moved, crosses)

    def all_gather(self, moved: float, ranks: int, crosses: bool) -> float:
        """Seconds for `moved` bytes from each rank."""
        if ranks < 2:
            return 0.0
        return self._rounds(ranks, crosses) + self._collective((ranks - 1) * moved, crosses)

    def reduce_scatter(self, moved: float, ranks: int, crosses: bool) -> float:
        """Seconds for a sum of which each rank gets `moved` bytes."""
        if ranks < 2:
            return 0.0
        c = self.cluster
        if crosses or not c.scatter_gb_s:
            return self.all_gather(moved, ranks, crosses)
        rounds = ceil(log2(ranks)) * c.scatter_us * 1e-6
        return rounds + (ranks - 1) * moved / (c.scatter_gb_s * 1e9 * c.link_efficiency)

    def dispatch(self, moved: float, ranks: int, crosses: bool) -> float:
        """Seconds for the tokens of a rank to come to their experts, or back: permuted, and sent to the ranks that hold
        them. The rank whose experts are chosen most is the last to end."""
        c = self.cluster
        moved *= c.expert_imbalance
        sent = self.all_to_all(moved, ranks, crosses)
        return max(sent, moved / (c.dispatch_gb_s * 1e9)) if c.dispatch_gb_s and moved else sent

    def all_to_all(self, moved: float, ranks: int, crosses: bool) -> float:
        """Seconds for `moved` bytes from each rank, spread evenly over all."""
        if ranks < 2:
            return 0.0
        return self._rounds(ranks, crosses) + self._collective((ranks - 1) / ranks * moved, crosses)

    def _collective(self, moved: float, crosses: bool) -> float:
        """Seconds of sending `moved` bytes while receiving as many."""
        rate = self.cluster.reduce_gb_s * 1e9
        return moved / (rate * self.cluster.link_efficiency) if rate and not crosses else self.link(moved, crosses)

    def _rounds(self, ranks: int, crosses: bool) -> float:
        inside = self.cluster.reduce_us * 1e-6 or self.latency(False)
        return ceil(log2(ranks)) * (self.latency(True) if crosses else inside)


def _sum(rates: tuple[tuple[str, float], ...], c: WorkCounts) -> float:
    return sum(rate * c.of(feature) for feature, rate in rates) * 1e-6


def _without_outputs(c: WorkCounts) -> WorkCounts:
    return WorkCounts(c.calls, c.layers, c.tokens, c.pairs, 0.0)


def _vocabulary(s: Shard) -> float:
    return s.head / s.model.sizes.hidden if s.model.sizes.hidden else 0.0
