"""ZeRO: parameters divided over dp at rest, and complete where a layer computes (Rajbhandari et al. 2020,
arXiv:1910.02054), in the words of PyTorch's FSDP2.

In: this rank's rows of each parameter in float32, and the level. Out: the tensors that modules compute with, unsharded
from all ranks when they are needed, and gradients reduce-scattered over the ranks into those of the rows.

Level 1 unshards everything once per minibatch and reduces gradients at its end; level 2 reduces them in each backward
pass, layer by layer; level 3 also unshards layer by layer, in forward and backward, and prefetches the next layer while
one computes. Experts that ranks of dp divide among themselves are sharded only over the ranks with the same experts.
What belongs to no layer (embedding, last norm, head) stays unsharded during a minibatch.
Invariant: every rank of a dp group makes the same passes.

torch's own `fully_shard` is not used: it gathers all of a layer in one dtype, while here only matrices may be cast
(norms and the residual stream stay as without sharding, so that numbers do), and it unshards parameters only inside the
forward of their module, while heads and adapters are read outside.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from itertools import zip_longest
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from rldsl.backends.torch.model.collectives import tree_all_reduce, tree_reduce_scatter
from rldsl.backends.torch.model.leaf_sums import LeafSums
from rldsl.runtime.backend import Axis
from rldsl.runtime.collectives import start_all_gather, start_reduce_scatter, sum_of_parts


class ParamGroup:
    """Parameters that are unsharded together, and whose gradients are reduced together."""

    def __init__(self, sharded: Sequence[nn.Parameter], unsharded: Sequence[nn.Parameter], dp: Axis,
                 in_leaves: bool = False, rounded: Sequence[bool] = ()):
        """sharded: this rank's rows. unsharded: leaves with the shape that modules see, without memory until `unshard`;
        their dtype is the one in which they are gathered. Rows are padded to those of the first rank, which has the
        most. in_leaves: gradients are summed in one order (`leaf_sums.py`). rounded: whose gradients of a pass are
        bfloat16 numbers, which sums over cp are rounded to."""
        self.sharded, self.unsharded, self.dp = sharded, unsharded, dp
        self.shard_numel = [-(-w.shape[0] // dp.size) * w[0].numel() if w.dim() else 1 for w in unsharded]  # padded
        self.by_dtype: dict[torch.dtype, list[int]] = defaultdict(list)  # one all-gather for each
        for i, w in enumerate(unsharded):
            self.by_dtype[w.dtype].append(i)
        self.is_unsharded = False
        self.is_reduced = False  # its reduce-scatter was started in the backward pass under way
        self._gathers: list[tuple[dist.Work | None, torch.Tensor, list[int]]] = []  # under way
        self._reduction: tuple[dist.Work | None, torch.Tensor] | None = None  # under way: [parts, elements] to add
        self.unsharded_grads: dict[int, torch.Tensor] = {}  # float32, not reduced yet, by parameter
        self.leaf_sums = LeafSums() if in_leaves else None  # of the gradients of all parameters, joined
        self.rounded = rounded
        self.leaf_grads: torch.Tensor | None = None  # joined, of the passes of a leaf so far, where cp divides them
        for i, w in enumerate(unsharded):
            w.untyped_storage().resize_(0)
            w.requires_grad_(True)
            w.register_post_accumulate_grad_hook(partial(self.accumulate_grad, i))

    @torch.no_grad()
    def start_unshard(self) -> None:
        """Start the all-gathers, unless the parameters are unsharded or on their way."""
        if self.is_unsharded or self._gathers:
            return
        for dtype, members in self.by_dtype.items():
            local = torch.zeros(sum(self.shard_numel[i] for i in members), dtype=dtype, device=self.sharded[0].device)
            for i, part in zip(members, local.split([self.shard_numel[i] for i in members]), strict=True):
                part[: self.sharded[i].numel()].copy_(self.sharded[i].reshape(-1))
            work, gathered = start_all_gather(local, self.dp.group) if self.dp.size > 1 else (None, local)
            self._gathers.append((work, gathered, members))

    @torch.no_grad()
    def unshard(self) -> None:
        """Make the parameters complete."""
        self.start_unshard()
        self.allocate_unsharded()
        for work, gathered, members in self._gathers:
            if work is not None:
                work.wait()
            parts = gathered.view(self.dp.size, -1).split([self.shard_numel[i] for i in members], dim=1)
            for i, part in zip(members, parts, strict=True):
                w = self.unsharded[i]
                # through `.data`, whose writes autograd does not count: a backward pass may come after another unshard
                w.data.view(-1).copy_(part.reshape(-1)[: w.numel()])
        self._gathers.clear()
        self.is_unsharded = True

    def allocate_unsharded(self) -> None:
        """Allocate the memory of the unsharded parameters."""
        for w in self.unsharded:
            w.untyped_storage().resize_(w.numel() * w.element_size())

    def reshard(self) -> None:
        """Free the memory of the unsharded parameters."""
        for w in self.unsharded:
            w.untyped_storage().resize_(0)
        self.is_unsharded = False

    def accumulate_grad(self, i: int, w: torch.Tensor) -> None:
        """The hook that autograd calls with parameter i when its gradient is there. A head's may be kept apart."""
        if w.grad is None and self.leaf_sums is not None:
            return
        if w.grad is None:
            raise RuntimeError("autograd called the hook of a parameter without a gradient")
        grad = w.grad.float()
        self.unsharded_grads[i] = self.unsharded_grads[i].add_(grad) if i in self.unsharded_grads else grad
        w.grad = None

    @torch.no_grad()
    def end_leaf(self, has_rows: bool) -> None:
        """Add the gradients to those of the leaves before. has_rows: else they are 0, of a pass that only keeps other
        ranks company."""
        if self.leaf_sums is None:
            raise RuntimeError("gradients without leaves")
        if not has_rows:
            self.unsharded_grads.clear()
            self.leaf_sums.add(None)
        else:
            self.leaf_sums.add([self._join_grads() if self.leaf_grads is None else self.leaf_grads])
        self.leaf_grads = None

    @torch.no_grad()
    def end_pass(self, cp: Axis) -> None:
        """After the backward pass of a leaf: sum its gradients over cp."""
        if not self.unsharded_grads:
            return
        total = tree_all_reduce(self._join_grads(), cp)
        for part, rounded in zip(total.split([w.numel() for w in self.unsharded]), self.rounded, strict=True):
            if rounded:
                part.copy_(part.bfloat16())
        self.leaf_grads = total if self.leaf_grads is None else self.leaf_grads.add_(total)

    def _join_grads(self) -> torch.Tensor:
        """Those of all parameters. -0.0 becomes 0.0, as in a buffer of zeros that gradients are added to."""
        device = self.sharded[0].device
        joined = torch.cat([self.unsharded_grads.pop(i).reshape(-1) if i in self.unsharded_grads else
                            torch.zeros(w.numel(), device=device) for i, w in enumerate(self.unsharded)])
        return joined.add_(0.0)

    @torch.no_grad()
    def reduce_scatter(self) -> None:
        """Start to sum the gradients over dp; those that autograd did not compute are 0."""
        if self.leaf_sums is not None:
            self.unsharded_grads = {}
            for total in self.leaf_sums.take() or ():
                if total is not None:
                    self.unsharded_grads = dict(enumerate(total.split([w.numel() for w in self.unsharded])))
        padded = torch.zeros(self.dp.size, sum(self.shard_numel), device=self.sharded[0].device)
        for i, part in enumerate(padded.split(self.shard_numel, dim=1)):
            if i in self.unsharded_grads:
                _copy_rows(self.unsharded_grads[i].reshape(-1), part)
        self.unsharded_grads.clear()
        if self.dp.size == 1:
            self._reduction = None, padded
        elif self.leaf_sums is not None:
            self._reduction = None, tree_reduce_scatter(padded.view(-1), self.dp)[None]
        else:
            self._reduction = start_reduce_scatter(padded, self.dp.group)
        self.is_reduced = True

    @torch.no_grad()
    def wait_reduce_scatter(self) -> None:
        """Wait for a sum, and add it to the gradients of the rows."""
        if self._reduction is None:
            return
        work, parts = self._reduction
        if work is not None:
            work.wait()
        for row, part in zip(self.sharded, sum_of_parts(parts).split(self.shard_numel), strict=True):
            if not row.requires_grad:
                continue
            if row.grad is None:
                raise RuntimeError("the optimizer's gradient buffer is offloaded")
            row.grad.view(-1).add_(part[: row.numel()])
        self._reduction = None

    def discard_grads(self) -> None:
        """Drop gradients that were not reduced."""
        self.unsharded_grads.clear()
        self.leaf_grads = None
        if self.leaf_sums is not None:
            self.leaf_sums.clear()

    @property
    def has_unreduced_grads(self) -> bool:
        return bool(self.unsharded_grads)


def _copy_rows(grad: torch.Tensor, rows: torch.Tensor) -> None:
    """Copy a complete gradient [n] to the rows of each rank [ranks, numel], whose end may be longer, without a padded
    copy of it. A parameter of which tp leaves nothing here has no elements."""
    numel = rows.shape[1]
    whole, rest = divmod(grad.numel(), max(numel, 1))
    rows[:whole].copy_(grad[: whole * numel].view(whole, numel))
    if rest:
        rows[whole, :rest].copy_(grad[whole * numel :])


def _padded_rows(grad: torch.Tensor, numel: int, ranks: int) -> torch.Tensor:
    """[ranks, numel]: the rows of each rank of a complete gradient."""
    return F.pad(grad.reshape(-1), (0, ranks * numel - grad.numel())).view(ranks, numel)


def rows_of_tree_sum(grad: torch.Tensor, dp: Axis) -> torch.Tensor:
    """This rank's rows of the tree sum over dp of a complete gradient, flat and padded."""
    padded = _padded_rows(grad, -(-grad.shape[0] // dp.size) * grad[0].numel(), dp.size).reshape(-1)
    return padded if dp.size == 1 else tree_reduce_scatter(padded, dp)


class ParamGroups:
    """Parameter groups that are sharded over different ranks, and are unsharded and reduced at the same times. Its
    methods are those of `ParamGroup`, for all of them."""

    def __init__(self, groups: Sequence[ParamGroup]):
        self.groups, self.is_reduced = groups, False
        self.unsharded = [w for group in groups for w in group.unsharded]

    def start_unshard(self) -> None:
        for group in self.groups:
            group.start_unshard()

    def unshard(self) -> None:
        for group in self.groups:
            group.unshard()

    def reshard(self) -> None:
        for group in self.groups:
            group.reshard()

    def reduce_scatter(self) -> None:
        for group in self.groups:
            group.reduce_scatter()
        self.is_reduced = True

    def wait_reduce_scatter(self) -> None:
        for group in self.groups:
            group.wait_reduce_scatter()

    def end_leaf(self, has_rows: bool) -> None:
        for group in self.groups:
            group.end_leaf(has_rows)

    def end_pass(self, cp: Axis) -> None:
        for group in self.groups:
            group.end_pass(cp)

    def discard_grads(self) -> None:
        for group in self.groups:
            group.discard_grads()

    @property
    def has_unreduced_grads(self) -> bool:
        return any(group.has_unreduced_grads for group in self.groups)


class ZeroSharding:
    """All parameter groups of a rank, and when they are unsharded, resharded and reduced."""

    def __init__(self, level: int, layers: dict[int, ParamGroup | ParamGroups],
                 non_layer: Sequence[ParamGroup | ParamGroups], in_leaves: bool = False):
        """level: 1 to 3. layers: by number, in order. non_layer: groups that belong to no layer. in_leaves: as of their
        groups; then gradients are reduced at the end of a minibatch, whatever the level."""
        self.level, self.layers, self.non_layer, self.in_leaves = level, layers, list(non_layer), in_leaves
        self.groups = [*layers.values(), *non_layer]
        self.stay_unsharded = self.groups if level < 3 else self.non_layer  # during a minibatch
        self._reducing: ParamGroup | ParamGroups | None = None  # whose reduce-scatter is under way

    def begin_minibatch(self) -> None:
        """Before the passes of a minibatch."""
        for group, following in zip_longest(self.stay_unsharded, self.stay_unsharded[1:]):
            group.start_unshard()
            if following is not None:
                following.start_unshard()
            group.unshard()

    def after_backward(self, layers: Collection[int]) -> None:
        """After each backward pass through some layers: reduce what no earlier layer's pass has started."""
        if self.level > 1:
            self._reduce_remaining([group for i, group in self.layers.items() if i in layers] + self.non_layer)

    def end_pass(self, cp: Axis) -> None:
        """After a backward pass of a leaf, where cp divides it."""
        for group in self.groups:
            group.end_pass(cp)

    def end_leaf(self, has_rows: bool) -> None:
        """After the passes of a leaf."""
        for group in self.groups:
            group.end_leaf(has_rows)

    def end_minibatch(self, use_grads: bool) -> None:
        """After the passes of a minibatch. use_grads: False if its gradients are dropped."""
        if use_grads and self.in_leaves:
            for group in self.groups:
                self._start_to_reduce(group)
                group.is_reduced = False
        elif use_grads and self.level == 1:
            self._reduce_remaining(self.groups)
        if self._reducing is not None:
            self._reducing.wait_reduce_scatter()
        if use_grads and any(group.has_unreduced_grads for group in self.groups):
            raise RuntimeError("a gradient came after those of its layer were reduced")
        self._reducing = None
        for group in self.groups:
            group.discard_grads()
            group.reshard()

    def wrap_layer(self, layer: int, plain: Callable[..., Any]) -> Callable[..., Any]:
        """The forward of a layer, which has its parameters unsharded while it runs and again while its gradient is
        computed. When that begins, the backward pass of the next layer is done and its gradients are reduced; so the
        order of collectives over dp does not depend on which gradients exist."""
        group = self.layers.get(layer)
        if group is None or self.level == 1:
            return plain

        def forward(*args: Any, **kwargs: Any) -> Any:
            self._unshard(layer, prefetch=layer + 1)
            out = plain(*args, **kwargs)
            for x in _tensors(out):
                if x.requires_grad:
                    x.register_hook(lambda _: self._before_backward(layer))
            if group not in self.stay_unsharded:
                group.reshard()
            return out

        return forward

    def _unshard(self, layer: int, prefetch: int) -> None:
        self.layers[layer].unshard()
        if prefetch in self.layers:
            self.layers[prefetch].start_unshard()

    def _before_backward(self, layer: int) -> None:
        """The gradient of a layer's output is known."""
        following = self.layers.get(layer + 1)
        if following is not None and not following.is_reduced:
            self._reduce(following)
        self._unshard(layer, prefetch=layer - 1)

    def _reduce(self, group: ParamGroup | ParamGroups) -> None:
        """What comes after the backward pass of a group."""
        if self.in_leaves:
            group.is_reduced = True
        else:
            self._start_to_reduce(group)
        if group not in self.stay_unsharded:
            group.reshard()

    def _start_to_reduce(self, group: ParamGroup | ParamGroups) -> None:
        """One reduce-scatter is under way at a time."""
        group.reduce_scatter()
        if self._reducing is not None:
            self._reducing.wait_reduce_scatter()
        self._reducing = group

    def _reduce_remaining(self, groups: Sequence[ParamGroup | ParamGroups]) -> None:
        for group in groups:
            if not group.is_reduced:
                self._reduce(group)
        for group in groups:  # the next backward pass starts anew
            group.is_reduced = False


def _tensors(x: Any) -> Iterator[torch.Tensor]:
    if isinstance(x, torch.Tensor):
        yield x
    elif isinstance(x, tuple | list):
        for y in x:
            yield from _tensors(y)
