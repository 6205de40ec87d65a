"""Gradient reduction over all axes, clipping, and the optimizer step.

Gradients are *summed*, not averaged, over cp and dp, unlike in Megatron and DDP: the loss already divides by global
counts. They are in one flat float32 buffer that every `parameter.grad` is a view of. After the backward passes, partial
gradients on different tp ranks are summed, tied embeddings are summed over the pipeline's ends, and the whole buffer is
summed over cp and dp. The gradient of an expert that ep divides comes from the tokens of all ranks along ep already,
and is summed only over the ranks with the same experts. Under `zero` the buffer has this rank's rows only, and holds
sums over dp already (`model/zero.py`). The norm counts each element of the model once.

The learning rate is a function of the update's place among those planned for the run (`plan.Model.planned_updates`),
taken or skipped: a train call that stops early does not stretch the schedule.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist

from rldsl.backends.torch.model.offload import HostMemory
from rldsl.backends.torch.model.stage import Stage
from rldsl.plan.model import Layout, Mesh, Model, Optimizer
from rldsl.runtime.backend import Axes
from rldsl.sharding.boxes import local_slice, pieces_at, slices, volume
from rldsl.sharding.boxes import replicas as num_replicas

MOMENTS = ("exp_avg", "exp_avg_sq")  # AdamW's names


class ShardOptimizer:
    """Gradient buffer and AdamW state of one shard: Megatron's gradient buffer and optimizer in one."""

    grad_buffer: torch.Tensor  # [elements] float32: gradients, those of experts that ep divides at the end
    schedule_step: int         # updates of the schedule so far, taken or skipped

    def __init__(self, stage: Stage, model: Model, layout: Layout, mesh: Mesh, axes: Axes):
        if model.optimizer is None:
            raise ValueError(f"{model.name} has no optimizer")
        self.stage, self.axes, self.options, self.updates = stage, axes, model.optimizer, model.planned_updates
        self.schedule_step = 0
        rank = axes.mesh.ranks[axes.mesh.index]
        named = list(stage.parameters.items())
        self.parameters = [p for _, p in named]
        held = [stage.held[name] for name, _ in named]
        self.is_divided_expert = [axes.ep.size > 1 and p.spec.experts > 0 for p, _ in held]
        # elements of the buffer's first part, which all ranks of dp have
        self.dense_numel = sum(
            p.numel() for p, expert in zip(self.parameters, self.is_divided_expert, strict=True) if not expert)
        for parameter in self.parameters:
            parameter.requires_grad_(True)
        self._allocate_grads()
        # of each parameter: how many ranks of the mesh hold this rank's part of it
        self.num_replicas = [max(1, num_replicas(p, model.layers, layout, mesh, rank)) for p, _ in held]
        tp = axes.tp.size
        # complete on every tp rank, but each sees only its own heads or tokens: their gradients are partial sums
        self.tp_partial_grads = [i for i, (p, _) in enumerate(held) if tp > 1 and (
            p.spec.partial_grad
            or (stage.sequence_parallel.available and p.layer is not None and p.spec.split is None))]
        # fewer units (KV heads, say) than tp ranks, so several ranks hold the same one
        self.tp_replicated_units = [i for i, (p, _) in enumerate(held) if tp > 1 and p.spec.split is not None
                        and any(units < tp for units, _ in p.spec.split.parts)]
        self.tied_embeddings = [i for i, (p, _) in enumerate(held) if p.spec.stage == "ends"]
        self.tied_size = _tied_size(model, layout, axes)
        self.held = held
        self.adam = torch.optim.AdamW(self.parameters, lr=self.options.lr, betas=self.options.betas,
                                      eps=self.options.eps, weight_decay=self.options.weight_decay, fused=True)

    def _allocate_grads(self) -> None:
        """Allocate the buffer, and make each parameter's gradient a view of it."""
        self.grad_buffer = torch.zeros(sum(p.numel() for p in self.parameters), device=self.stage.device)
        at = [0, self.dense_numel]  # the next free element of each part
        for parameter, expert in zip(self.parameters, self.is_divided_expert, strict=True):
            parameter.grad = self.grad_buffer[at[expert] : at[expert] + parameter.numel()].view(parameter.shape)
            at[expert] += parameter.numel()

    def offload(self, host: HostMemory) -> None:
        """Move moments to host memory, and free the gradients, which no step keeps."""
        self._set_moments(host.offload(self._moments()))
        for parameter in self.parameters:
            parameter.grad = None
        self.grad_buffer = self.grad_buffer.new_empty(0)

    def onload(self, host: HostMemory) -> Callable[[], None]:
        """Start the copy back to the device. The returned function must be called before moments are used."""
        moments, finish = host.onload(self._moments())
        self._set_moments(moments)
        self._allocate_grads()
        return finish

    def _moments(self) -> dict[str, torch.Tensor]:
        """"KIND INDEX" -> tensor; none before the first step."""
        return {f"{kind} {i}": state[kind] for i, p in enumerate(self.parameters)
                if (state := self.adam.state.get(p)) for kind in MOMENTS}

    def _set_moments(self, moments: Mapping[str, torch.Tensor]) -> None:
        for name, tensor in moments.items():
            kind, i = name.split()
            self.adam.state[self.parameters[int(i)]][kind] = tensor

    def zero_grad(self) -> None:
        self.grad_buffer.zero_()

    def step(self) -> dict[str, float]:
        """Reduce, clip, update. Returns "grad_norm", before clipping, and "lr". If the norm is not finite, nothing is
        updated and "lr" is 0."""
        self._reduce_grads()
        norm = self._grad_norm()
        if not math.isfinite(norm):
            return {"grad_norm": norm, "lr": 0.0}
        limit = self.options.clip_grad
        if limit and norm > limit:
            self.grad_buffer.mul_(limit / (norm + 1e-6))
        rate = learning_rate(self.options, self.schedule_step, self.updates)
        for group in self.adam.param_groups:
            group["lr"] = rate
        self.adam.step()
        self.schedule_step += 1
        return {"grad_norm": norm, "lr": rate}

    def skip_updates(self, updates: int) -> float:
        """See `Shard.skip_updates`."""
        self.schedule_step += updates
        return learning_rate(self.options, self.schedule_step - 1, self.updates)

    def optimizer_state(self, names: Sequence[str]) -> dict[str, dict[str, torch.Tensor]]:
        """See `Shard.optimizer_state`; zeros before the first step. names: of the parameters."""
        moments: dict[str, dict[str, torch.Tensor]] = {kind: {} for kind in MOMENTS}
        for name, parameter in zip(names, self.parameters, strict=True):
            state = self.adam.state[parameter]
            if not state:
                state |= {"step": torch.zeros((), device=parameter.device),
                          **{kind: torch.zeros_like(parameter) for kind in moments}}
            for kind in moments:
                moments[kind][name] = state[kind]
        return moments

    def schedule_state(self) -> dict[str, int]:
        """done: updates of the schedule, taken or skipped. made: steps that the optimizer took."""
        steps = (int(state["step"]) for state in self.adam.state.values() if state)
        return {"done": self.schedule_step, "made": next(steps, 0)}

    def load_schedule_state(self, counts: Mapping[str, int]) -> None:
        self.schedule_step = counts["done"]
        for state in self.adam.state.values():
            state["step"].fill_(counts["made"])

    def _grads(self) -> list[torch.Tensor]:
        grads = [p.grad for p in self.parameters if p.grad is not None]
        if len(grads) != len(self.parameters):
            raise RuntimeError("the gradient buffer is offloaded")
        return grads

    def _reduce_grads(self) -> None:
        tp, pp, dp, cp, expert_dp = self.axes.tp, self.axes.pp, self.axes.dp, self.axes.cp, self.axes.expert_dp
        if self.stage.zero:
            self.stage.zero.end_minibatch(use_grads=True)
        grads = self._grads()
        if self.tp_partial_grads:
            _all_reduce_joined([grads[i] for i in self.tp_partial_grads], tp.group)
        for i in self.tp_replicated_units:
            self._sum_duplicates(i, grads[i])
        if self.tied_size and pp.size > 1:  # stages between the ends add zeros
            tied = [grads[i] for i in self.tied_embeddings] or [self.grad_buffer.new_zeros(self.tied_size)]
            _all_reduce_joined(tied, pp.group)
        if cp.size > 1:  # each rank has seen only its tokens
            dist.all_reduce(self.grad_buffer, group=cp.group)
        if dp.size > 1 and not self.stage.zero:
            dist.all_reduce(self.grad_buffer[: self.dense_numel], group=dp.group)
            if self.axes.ep.size > 1 and expert_dp.size > 1:
                dist.all_reduce(self.grad_buffer[self.dense_numel :], group=expert_dp.group)

    def _sum_duplicates(self, i: int, grad: torch.Tensor) -> None:
        """Sum the gradient of parameter i over the tp ranks that hold the same units, by way of the whole parameter."""
        parameter, pieces = self.held[i]
        dim = parameter.dim
        complete = grad.new_zeros(parameter.spec.shape)
        for piece in pieces:
            complete[slices(piece.box)] = grad[local_slice(piece, piece.box, dim)]
        dist.all_reduce(complete, group=self.axes.tp.group)
        for piece in pieces:
            grad[local_slice(piece, piece.box, dim)] = complete[slices(piece.box)]

    def _grad_norm(self) -> float:
        """2-norm over the whole model; each element counts once, however many ranks hold it."""
        squares = torch.stack(torch._foreach_norm(self._grads())).double() ** 2
        counts = torch.tensor(self.num_replicas, dtype=torch.float64, device=squares.device)
        total = (squares / counts).sum()
        if self.axes.mesh.size > 1:
            dist.all_reduce(total, group=self.axes.mesh.group)
        return math.sqrt(total.item())


def _tied_size(model: Model, layout: Layout, axes: Axes) -> int:
    """Elements of the tied embedding that the ends of this rank's pipeline hold; 0 if there is none."""
    spec = next((s for s in model.params if s.stage == "ends"), None)
    if spec is None:
        return 0
    part = axes.ep.index * layout.tp + axes.tp.index
    held = pieces_at(spec, layout, part, axes.dp.index // layout.ep if layout.zero else 0)
    return sum(volume(piece.box) for piece in held)


def _all_reduce_joined(tensors: Sequence[torch.Tensor], group: dist.ProcessGroup) -> None:
    """Sum some tensors over a group, in place and in one message."""
    joined = torch.cat([t.reshape(-1) for t in tensors])
    dist.all_reduce(joined, group=group)
    for tensor, part in zip(tensors, joined.split([t.numel() for t in tensors]), strict=True):
        tensor.copy_(part.view(tensor.shape))


def learning_rate(options: Optimizer, done: int, updates: int) -> float:
    """The learning rate of the update after `done` others, of `updates` planned in all: linear warm-up, then constant,
    or linear or cosine decay to min_lr_ratio * lr, where the update after the last one would be, so that no planned
    update has a rate of 0. The decay is that of `get_linear_schedule_with_warmup` and
    `get_cosine_schedule_with_warmup` of transformers; the warm-up begins at lr / warmup instead of 0."""
    warmup = options.warmup if options.warmup >= 1 else options.warmup * updates
    if done < warmup:
        return options.lr * (done + 1) / math.ceil(warmup)
    if options.schedule == "constant":
        return options.lr
    past = min(1.0, (done - warmup) / max(1.0, updates - warmup))
    shape = 1 - past if options.schedule == "linear" else 0.5 * (1 + math.cos(math.pi * past))
    return options.lr * (options.min_lr_ratio + (1 - options.min_lr_ratio) * shape)
