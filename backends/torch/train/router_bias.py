"""Router biases that training moves by the load of the experts (DeepSeek-V3, section 2.1.2, arXiv:2412.19437).

In: the passes of a minibatch. Out: each bias moved by `rate`: up where an expert was chosen for fewer tokens than the
mean of its layer, down where for more, not at all where for as many. A load counts each token of the minibatch as often
as whole sequences have it: a prompt that a pass computes once for several responses counts for each, and padding and
the token of a pass without rows do not count. So loads are integers that depend on no placement and no micro-batches,
and are summed exactly.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from rldsl.backends.torch.model.stage import Stage
from rldsl.diag import internal_error
from rldsl.plan.model import Model
from rldsl.plan.router_bias import router_biases
from rldsl.runtime.backend import Axes
from rldsl.runtime.collectives import all_reduce
from rldsl.sharding.boxes import local_slice, slices


class RouterLoads:
    """How many tokens each expert of the layers of a stage was chosen for, in the passes of a minibatch so far."""

    def __init__(self, stage: Stage, model: Model, axes: Axes):
        self.stage, self.axes = stage, axes
        experts = router_biases(model.params)
        held = {name: p for name, (p, _) in stage.held.items() if p.spec.name in experts}
        self.loads = {name: torch.zeros(p.spec.shape, dtype=torch.int64, device=stage.device).view(-1)
                      for name, p in held.items()}  # of each bias
        for name, parameter in held.items():
            module = experts[parameter.spec.name].replace("{}", str(parameter.layer))
            stage.experts[module].register_forward_pre_hook(self._counted(self.loads[name]))

    def clear(self) -> None:
        """Before the passes of a minibatch."""
        for load in self.loads.values():
            load.zero_()

    def _counted(self, load: torch.Tensor) -> Callable[[nn.Module, tuple[Any, ...]], None]:
        return partial(_count, self.stage, load)

    @torch.no_grad()
    def update(self, rate: float) -> None:
        """Move the biases by the loads of all ranks. Ranks of tp see the same tokens."""
        if not self.loads:
            return
        joined = torch.cat([*self.loads.values()])
        for axis in (self.axes.cp, self.axes.dp):
            if axis.size > 1:
                all_reduce(joined, group=axis.group)
        parts = joined.split([load.numel() for load in self.loads.values()])
        for name, load in zip(self.loads, parts, strict=True):
            parameter, pieces = self.stage.held[name]
            direction = (load.sum() - len(load) * load).sign().view(parameter.spec.shape)
            bias = self.stage.parameters[name].data
            for piece in pieces:
                bias[local_slice(piece, piece.box, parameter.dim)] += rate * direction[slices(piece.box)]


def _count(stage: Stage, load: torch.Tensor, _: nn.Module, args: tuple[Any, ...]) -> None:
    """Before the forward of experts, (tokens [T, H], chosen experts [T, K], their weights [T, K]): in the first forward
    of a pass of training, and not where a layer runs again in the backward pass."""
    copies = stage.current.copies
    if copies is not None:
        chosen = args[1]
        if len(chosen) != copies.numel():
            raise internal_error(f"experts chose for {len(chosen)} of {copies.numel()} tokens", place="router biases")
        load.scatter_add_(0, chosen.reshape(-1), copies.reshape(-1).repeat_interleave(chosen.shape[-1]))
