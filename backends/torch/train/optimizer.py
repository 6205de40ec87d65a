"""Gradients over all degrees, clipping, and the optimizer step.

Gradients live in one flat float32 buffer that every `parameter.grad` is a view of. After the backward passes: parts of
one gradient on different tp ranks are summed, tied embeddings are summed over the pipeline's ends, and the whole buffer
over cp and dp (a sum: losses carry the global normalisation). Where ranks of dp share experts, the gradient of an
expert has come from all their tokens, and is summed over those alone that hold the same one. Where parameters are
divided over dp, the buffer is of this rank's rows, and holds sums over dp already (`backends/torch/model/zero.py`). The
norm counts each element of the model once.

The learning rate is a function of the update's place among those planned for the run (`plan.Model.updates`), made or
not: a train call that stops early does not stretch the schedule.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist
from rldsl.backends.torch.model.offload import Host
from rldsl.backends.torch.model.stage import Stage

from rldsl.plan.model import Layout, Mesh, Model, Optimizer
from rldsl.runtime.backend import Axes
from rldsl.sharding.boxes import local_slice, pieces_at, replicas, slices, volume

MOMENTS = ("exp_avg", "exp_avg_sq")  # as AdamW calls them


class Trainer:
    """Gradient buffer and AdamW state of one shard. done: updates of the schedule so far, made or skipped."""

    def __init__(self, stage: Stage, model: Model, layout: Layout, mesh: Mesh, axes: Axes):
        assert model.optimizer is not None
        self.stage, self.axes, self.options, self.updates = stage, axes, model.optimizer, model.updates
        self.done = 0
        rank = axes.mesh.ranks[axes.mesh.index]
        named = list(stage.parameters.items())
        self.parameters = [p for _, p in named]
        held = [stage.held[name] for name, _ in named]
        self.alone = [axes.ep.size > 1 and p.spec.experts > 0 for p, _ in held]
        self.common = sum(p.numel() for p, own in zip(self.parameters, self.alone) if not own)  # that all of dp have
        for parameter in self.parameters:
            parameter.requires_grad_(True)
        self._gradients()
        self.shares = [max(1, replicas(p, model.layers, layout, mesh, rank)) for p, _ in held]
        tp = axes.tp.size
        # whole on every tp rank, but each sees only its own heads: their gradients are parts of one sum
        self.partial = [i for i, (p, _) in enumerate(held) if tp > 1 and (
            p.spec.partial or stage.tokens.able and p.layer is not None and p.spec.split is None)]
        self.doubled = [i for i, (p, _) in enumerate(held) if tp > 1 and p.spec.split is not None
                        and any(units < tp for units, _ in p.spec.split.parts)]
        self.tied = [i for i, (p, _) in enumerate(held) if p.spec.stage == "ends"]
        self.tied_size = _tied_size(model, layout, axes)
        self.held = held
        self.adam = torch.optim.AdamW(self.parameters, lr=self.options.lr, betas=self.options.betas,
                                      eps=self.options.eps, weight_decay=self.options.weight_decay, fused=True)

    def _gradients(self) -> None:
        """The buffer, and each parameter's view of it."""
        self.flat = torch.zeros(sum(p.numel() for p in self.parameters), device=self.stage.device)
        at = [0, self.common]
        for parameter, own in zip(self.parameters, self.alone):
            parameter.grad = self.flat[at[own] : at[own] + parameter.numel()].view(parameter.shape)
            at[own] += parameter.numel()

    def away(self, host: Host) -> None:
        """Moments to host memory; gradients, which end with each step, give theirs up."""
        self._place(host.away(self._moments()))
        for parameter in self.parameters:
            parameter.grad = None
        self.flat = self.flat.new_empty(0)

    def back(self, host: Host) -> Callable[[], None]:
        """The result is called before they are used."""
        moments, finish = host.back(self._moments())
        self._place(moments)
        self._gradients()
        return finish

    def _moments(self) -> dict[str, torch.Tensor]:
        """Those that there are: none before the first step."""
        return {f"{kind} {i}": state[kind] for i, p in enumerate(self.parameters)
                if (state := self.adam.state.get(p)) for kind in MOMENTS}

    def _place(self, moments: Mapping[str, torch.Tensor]) -> None:
        for name, tensor in moments.items():
            kind, i = name.split()
            self.adam.state[self.parameters[int(i)]][kind] = tensor

    def clear(self) -> None:
        self.flat.zero_()

    def step(self) -> dict[str, float]:
        """Reduce, clip, update. "grad_norm" is before clipping; where it is not finite nothing is updated."""
        self._reduce()
        norm = self._norm()
        if not math.isfinite(norm):
            return {"grad_norm": norm, "lr": 0.0}
        limit = self.options.clip_grad
        if limit and norm > limit:
            self.flat.mul_(limit / (norm + 1e-6))
        rate = learning_rate(self.options, self.done, self.updates)
        for group in self.adam.param_groups:
            group["lr"] = rate
        self.adam.step()
        self.done += 1
        return {"grad_norm": norm, "lr": rate}

    def skip_updates(self, updates: int) -> float:
        """Pass over planned updates; the learning rate of the last of them."""
        self.done += updates
        return learning_rate(self.options, self.done - 1, self.updates)

    def optimizer_state(self, names: Sequence[str]) -> dict[str, dict[str, torch.Tensor]]:
        """By the optimizer's own names, then by parameter; zeros before the first step."""
        found: dict[str, dict[str, torch.Tensor]] = {kind: {} for kind in MOMENTS}
        for name, parameter in zip(names, self.parameters):
            state = self.adam.state[parameter]
            if not state:
                state |= {"step": torch.zeros((), device=parameter.device),
                          **{kind: torch.zeros_like(parameter) for kind in found}}
            for kind in found:
                found[kind][name] = state[kind]
        return found

    def schedule_state(self) -> dict[str, int]:
        """done: as above; made: steps of the optimizer."""
        made = (int(state["step"]) for state in self.adam.state.values() if state)
        return {"done": self.done, "made": next(made, 0)}

    def load_schedule_state(self, progress: Mapping[str, int]) -> None:
        self.done = progress["done"]
        for state in self.adam.state.values():
            state["step"].fill_(progress["made"])

    def _reduce(self) -> None:
        tp, pp, dp = self.axes.tp, self.axes.pp, self.axes.dp
        if self.stage.sharded:
            self.stage.sharded.end(use=True)
        grads = [p.grad for p in self.parameters]
        if self.partial:
            _sum_in_place([grads[i] for i in self.partial], tp.group)
        for i in self.doubled:
            parameter, pieces = self.held[i]
            whole = grads[i].new_zeros(parameter.spec.shape)
            dim = parameter.spec.split.dim
            for piece in pieces:
                box = slices(piece.box)
                whole[box] = grads[i][local_slice(piece, piece.box, dim)]
            dist.all_reduce(whole, group=tp.group)
            for piece in pieces:
                box = slices(piece.box)
                grads[i][local_slice(piece, piece.box, dim)] = whole[box]
        if self.tied_size and pp.size > 1:  # stages between the ends add nothing
            mine = [grads[i] for i in self.tied] or [self.flat.new_zeros(self.tied_size)]
            _sum_in_place(mine, pp.group)
        if self.axes.cp.size > 1:  # each rank has seen its tokens alone
            dist.all_reduce(self.flat, group=self.axes.cp.group)
        if dp.size > 1 and not self.stage.sharded:
            dist.all_reduce(self.flat[: self.common], group=dp.group)
            if self.axes.ep.size > 1 and self.axes.copies.size > 1:
                dist.all_reduce(self.flat[self.common :], group=self.axes.copies.group)

    def _norm(self) -> float:
        """2-norm over the whole model; each element counts once however many ranks hold it."""
        squares = torch.stack(torch._foreach_norm([p.grad for p in self.parameters])).double() ** 2
        shares = torch.tensor(self.shares, dtype=torch.float64, device=squares.device)
        total = (squares / shares).sum()
        if self.axes.mesh.size > 1:
            dist.all_reduce(total, group=self.axes.mesh.group)
        return math.sqrt(total.item())


def _tied_size(model: Model, layout: Layout, axes: Axes) -> int:
    """Elements of the tied embedding that the ends of this rank's pipeline hold; 0 without one."""
    spec = next((s for s in model.params if s.stage == "ends"), None)
    if spec is None:
        return 0
    part = axes.ep.index * layout.tp + axes.tp.index
    held = pieces_at(spec, layout, part, axes.dp.index // layout.ep if layout.zero else 0)
    return sum(volume(piece.box) for piece in held)


def _sum_in_place(tensors: Sequence[torch.Tensor], group: dist.ProcessGroup) -> None:
    joined = torch.cat([t.reshape(-1) for t in tensors])
    dist.all_reduce(joined, group=group)
    for tensor, part in zip(tensors, joined.split([t.numel() for t in tensors])):
        tensor.copy_(part.view(tensor.shape))


def learning_rate(options: Optimizer, done: int, updates: int) -> float:
    """Of the update after `done` others, of `updates` planned in all: linear warm-up, then constant, linear or cosine
    down to min_lr_ratio * lr at the last update."""
    warmup = options.warmup if options.warmup >= 1 else options.warmup * updates
    if done < warmup:
        return options.lr * (done + 1) / math.ceil(warmup)
    if options.schedule == "constant":
        return options.lr
    past = min(1.0, (done - warmup) / max(1.0, updates - 1 - warmup))
    shape = 1 - past if options.schedule == "linear" else 0.5 * (1 + math.cos(math.pi * past))
    return options.lr * (options.min_lr_ratio + (1 - options.min_lr_ratio) * shape)
