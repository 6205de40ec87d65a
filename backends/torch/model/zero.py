"""Parameters divided over dp at rest, whole where a layer computes (ZeRO: Rajbhandari et al. 2020, arXiv:1910.02054).

In: this rank's rows of each parameter in float32, and how far to go. Out: the tensors that modules compute with, filled
from all shards when they are needed, and gradients summed over the shards into those of the rows.

Level 1 gathers everything once a minibatch and sums gradients at its end; 2 sums them in each backward pass, layer by
layer; 3 also gathers layer by layer, in forward and backward, the next layer's while one computes. Every rank of a dp
group must make the same passes. Experts that ranks of dp share are divided over those alone that have the same. What
belongs to no layer (embedding, last norm, head) stays whole during a minibatch.

torch's own `fully_shard` is not used: it gathers all of a layer in one dtype, while here only matrices may be halved
(norms and the residual stream stay as without sharding, so that numbers do), and it knows parameters only inside the
forward of their module, while heads and adapters are read outside.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from rldsl.runtime.backend import Axis

# torch 2.13 renames both
ALL_GATHER = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
REDUCE_SCATTER = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


class Unit:
    """Parameters that are gathered together, and whose gradients are summed together.

    rows: this rank's. whole: leaves of the shape that modules see, without memory until `gather`; their dtype is the
    one in which they travel. A shard's rows are padded to those of the first, which has the most."""

    def __init__(self, rows: Sequence[nn.Parameter], whole: Sequence[nn.Parameter], dp: Axis):
        self.rows, self.whole, self.dp = rows, whole, dp
        self.sizes = [-(-w.shape[0] // dp.size) * w[0].numel() if w.dim() else 1 for w in whole]
        self.kinds: dict[torch.dtype, list[int]] = defaultdict(list)
        for i, w in enumerate(whole):
            self.kinds[w.dtype].append(i)
        self.here = self.summed = False
        self.arriving: list[tuple[dist.Work | None, torch.Tensor, list[int]]] = []
        self.leaving: tuple[dist.Work | None, torch.Tensor] | None = None
        self.slopes: dict[int, torch.Tensor] = {}
        for i, w in enumerate(whole):
            w.untyped_storage().resize_(0)
            w.requires_grad_(True)
            w.register_post_accumulate_grad_hook(partial(self.take, i))

    @torch.no_grad()
    def start(self) -> None:
        """Begin to gather, if it is not done or under way."""
        if self.here or self.arriving:
            return
        for dtype, members in self.kinds.items():
            mine = torch.zeros(sum(self.sizes[i] for i in members), dtype=dtype, device=self.rows[0].device)
            for i, part in zip(members, mine.split([self.sizes[i] for i in members])):
                part[: self.rows[i].numel()].copy_(self.rows[i].reshape(-1))
            every = mine.new_empty(self.dp.size * mine.numel())
            work = ALL_GATHER(every, mine, group=self.dp.group, async_op=True) if self.dp.size > 1 else None
            if work is None:
                every = mine
            self.arriving.append((work, every, members))

    @torch.no_grad()
    def gather(self) -> None:
        """Make the parameters whole."""
        self.start()
        self.room()
        for work, every, members in self.arriving:
            if work is not None:
                work.wait()
            parts = every.view(self.dp.size, -1).split([self.sizes[i] for i in members], dim=1)
            for i, part in zip(members, parts):
                w = self.whole[i]
                # through `.data`, whose writes autograd does not count: a backward pass may come after another gather
                w.data.view(-1).copy_(part.reshape(-1)[: w.numel()])
        self.arriving.clear()
        self.here = True

    def room(self) -> None:
        """Memory for what is to be whole."""
        for w in self.whole:
            w.untyped_storage().resize_(w.numel() * w.element_size())

    def drop(self) -> None:
        for w in self.whole:
            w.untyped_storage().resize_(0)
        self.here = False

    def take(self, i: int, w: torch.Tensor) -> None:
        """The gradient of parameter i has come."""
        assert w.grad is not None
        slope = w.grad.float()
        self.slopes[i] = self.slopes[i].add_(slope) if i in self.slopes else slope
        w.grad = None

    @torch.no_grad()
    def sum(self) -> None:
        """Begin to add up what has come, over dp; what has not is 0."""
        every = torch.zeros(self.dp.size, sum(self.sizes), device=self.rows[0].device)
        for i, part in enumerate(every.split(self.sizes, dim=1)):
            if i in self.slopes:
                slope = self.slopes[i].reshape(-1)
                padded = slope.new_zeros(self.dp.size * self.sizes[i])
                padded[: slope.numel()] = slope
                part.copy_(padded.view(self.dp.size, -1))
        self.slopes.clear()
        if self.dp.size == 1:
            self.leaving = None, every.view(-1)
        else:
            mine = every.new_empty(sum(self.sizes))
            self.leaving = REDUCE_SCATTER(mine, every.view(-1), group=self.dp.group, async_op=True), mine
        self.summed = True

    @torch.no_grad()
    def keep(self) -> None:
        """Wait for a sum, and add it to the gradients of the rows."""
        if self.leaving is None:
            return
        work, mine = self.leaving
        if work is not None:
            work.wait()
        for row, part in zip(self.rows, mine.split(self.sizes)):
            assert row.grad is not None
            row.grad.view(-1).add_(part[: row.numel()])
        self.leaving = None

    def forget(self) -> None:
        """Drop gradients that were not summed."""
        self.slopes.clear()

    @property
    def late(self) -> bool:
        """Whether a gradient has come that was not summed."""
        return bool(self.slopes)


class Several:
    """Units that are divided over different ranks, and are gathered and summed at the same times."""

    def __init__(self, units: Sequence[Unit]):
        self.units, self.summed = units, False
        self.whole = [w for unit in units for w in unit.whole]

    def start(self) -> None:
        for unit in self.units:
            unit.start()

    def gather(self) -> None:
        for unit in self.units:
            unit.gather()

    def drop(self) -> None:
        for unit in self.units:
            unit.drop()

    def sum(self) -> None:
        for unit in self.units:
            unit.sum()
        self.summed = True

    def keep(self) -> None:
        for unit in self.units:
            unit.keep()

    def forget(self) -> None:
        for unit in self.units:
            unit.forget()

    @property
    def late(self) -> bool:
        return any(unit.late for unit in self.units)


class Sharded:
    """The units of a rank. layers: by number, in order. rest: what belongs to no layer."""

    def __init__(self, level: int, layers: dict[int, Unit | Several], rest: Sequence[Unit | Several]):
        self.level, self.layers, self.rest = level, layers, list(rest)
        self.units = [*layers.values(), *rest]
        self.kept = self.units if level < 3 else self.rest
        self.busy: Unit | Several | None = None  # whose sum is under way

    def begin(self) -> None:
        """Before the passes of a minibatch."""
        for unit, following in zip(self.kept, [*self.kept[1:], None]):
            unit.start()
            if following is not None:
                following.start()
            unit.gather()

    def after_backward(self, layers: Collection[int]) -> None:
        """After each backward pass through some layers: sum what the pass of a layer before it has not set off."""
        if self.level > 1:
            self._sum_rest([unit for i, unit in self.layers.items() if i in layers] + self.rest)

    def end(self, use: bool) -> None:
        """After the passes of a minibatch. use: whether its gradients are wanted."""
        if use and self.level == 1:
            self._sum_rest(self.units)
        if self.busy is not None:
            self.busy.keep()
        late = use and any(unit.late for unit in self.units)
        assert not late, "a gradient came after those of its layer were summed"
        self.busy = None
        for unit in self.units:
            unit.forget()
            unit.drop()

    def around(self, layer: int, plain: Callable[..., Any]) -> Callable[..., Any]:
        """A forward of a layer that has its parameters while it runs, and again while its gradient is computed; when
        that begins, the layer behind it is done. So the order of all that dp does never depends on which gradients
        there are."""
        unit = self.layers.get(layer)
        if unit is None or self.level == 1:
            return plain

        def forward(*args: Any, **kwargs: Any) -> Any:
            self._need(layer, layer + 1)
            out = plain(*args, **kwargs)
            for x in _tensors(out):
                if x.requires_grad:
                    x.register_hook(lambda _: self._back(layer))
            if unit not in self.kept:
                unit.drop()
            return out

        return forward

    def _need(self, layer: int, following: int) -> None:
        self.layers[layer].gather()
        if following in self.layers:
            self.layers[following].start()

    def _back(self, layer: int) -> None:
        """The gradient of a layer's output is known."""
        behind = self.layers.get(layer + 1)
        if behind is not None and not behind.summed:
            self._sum(behind)
        self._need(layer, layer - 1)

    def _sum(self, unit: Unit | Several) -> None:
        """One sum is under way at a time."""
        unit.sum()
        if self.busy is not None:
            self.busy.keep()
        self.busy = unit
        if unit not in self.kept:
            unit.drop()

    def _sum_rest(self, units: Sequence[Unit | Several]) -> None:
        for unit in units:
            if not unit.summed:
                self._sum(unit)
        for unit in units:
            unit.summed = False


def _tensors(found: Any) -> Iterator[torch.Tensor]:
    if isinstance(found, torch.Tensor):
        yield found
    elif isinstance(found, tuple | list):
        for x in found:
            yield from _tensors(x)
