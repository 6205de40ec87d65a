"""Gradient reduction over all axes, clipping, and the optimizer step.

Gradients are *summed*, not averaged, over cp and dp, unlike in Megatron and DDP: the loss already divides by global
counts. They are in one flat float32 buffer that every `parameter.grad` is a view of. After the backward passes, partial
gradients on different tp ranks are summed, tied embeddings are summed over the pipeline's ends, and the whole buffer is
summed over cp and dp. The gradient of an expert that ep divides comes from the tokens of all ranks along ep already,
and is summed only over the ranks with the same experts. Under `zero` the buffer has this rank's rows only, and holds
sums over dp already (`model/zero.py`). The norm counts each element of the model once.

Of a model with `invariant=training` gradients are summed leaf by leaf (`model/leaf_sums.py`): a rank's leaves, then
those of all ranks of dp, in one tree. That of a tied embedding is kept apart from that of the head, and added last, as
where a pipeline has them on different ranks. tp leaves complete gradients on every rank
(`model/gradient_sums.py`). An expert that ep divides sees the tokens of several dp ranks, which belong to different
leaves: their gradients are kept apart until the leaves are added. cp divides each pass, so the gradients of a pass are
summed before the next one.

The learning rate is a function of the update's place among those planned for the run (`plan.Model.planned_updates`),
taken or skipped: a train call that stops early does not stretch the schedule.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence

import torch
import torch.distributed as dist

from rldsl.backends.torch.model.collectives import tree_all_reduce, tree_of
from rldsl.backends.torch.model.leaf_sums import Leaf, LeafSums, exact_norm
from rldsl.backends.torch.model.stage import Stage
from rldsl.backends.torch.model.zero import rows_of_tree_sum
from rldsl.backends.torch.train.complete_tensors import CompleteTensors
from rldsl.backends.torch.train.updates import Updates
from rldsl.plan.model import Layout, Mesh, Model, Optimizer
from rldsl.plan.optimizers import param_options
from rldsl.runtime.backend import Axes, Axis
from rldsl.runtime.collectives import all_reduce
from rldsl.runtime.host_memory import HostMemory
from rldsl.sharding.boxes import first_holder, local_slice, pieces_at, slices, volume
from rldsl.sharding.boxes import replicas as num_replicas

PART = 1 << 24  # elements that a sum over ranks in one order has at a time, which needs several copies of them


class ShardOptimizer:
    """Gradient buffer and optimizer state of one shard: Megatron's gradient buffer and optimizer in one."""

    grad_buffer: torch.Tensor  # [elements] float32: gradients, those of experts that ep divides at the end
    in_buffer: list[torch.Tensor]  # the view of it for each parameter
    is_clear: bool             # whether all of it is known to be 0, as from an update in one pass to the next minibatch
    schedule_step: int         # updates of the schedule so far, taken or skipped

    def __init__(self, stage: Stage, model: Model, layout: Layout, mesh: Mesh, axes: Axes):
        if model.optimizer is None:
            raise ValueError(f"{model.name} has no optimizer")
        self.stage, self.axes, self.options, self.updates = stage, axes, model.optimizer, model.planned_updates
        self.schedule_step = 0
        rank = axes.mesh.ranks[axes.mesh.index]
        named = {}  # the parameters that are trained
        for name, parameter in stage.parameters.items():
            if param_options(self.options, name, stage.held[name][0].spec).frozen:
                _freeze(stage, name)
            else:
                named[name] = parameter
        self.parameters = list(named.values())
        held = [stage.held[name] for name in named]
        self.is_divided_expert = [axes.ep.size > 1 and p.spec.experts > 0 for p, _ in held]
        # elements of the buffer's first part, which all ranks of dp have
        self.dense_numel = sum(
            p.numel() for p, expert in zip(self.parameters, self.is_divided_expert, strict=True) if not expert)
        for parameter in self.parameters:
            parameter.requires_grad_(True)
        # the gradient of the head of a tied embedding, where it is kept apart
        self.head_sums = LeafSums() if model.invariant_training and _has_tied_head(stage, named) else None
        # the same of the experts that ep divides, by the rank of ep from which their tokens come
        self.divided_experts = [n for n, expert in zip(named, self.is_divided_expert, strict=True) if expert]
        self.source_sums = LeafSums() if model.invariant_training and self.divided_experts else None
        self.source_table: torch.Tensor | None = None
        self.leaf_sums = LeafSums() if model.invariant_training else None
        # what the passes of a leaf have added so far, where cp divides them: of all gradients, and of a tied head
        self.leaf_grads: torch.Tensor | None = None
        self.head_leaf: torch.Tensor | None = None
        self.divided_passes = model.invariant_training and axes.cp.size > 1
        self.rounded = [stage.rounds_grad(name) for name in named] if model.invariant_training else []
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
        self.tied_size = _tied_size(model, self.options, layout, axes)
        self.held = held
        # of this rank's parameters: those that count in the norm of such a model
        self.counted = [i for i, (p, _) in enumerate(held)
                        if model.invariant_training and first_holder(p, model.layers, layout, mesh, rank) == rank]
        self.optimizer = Updates(self.options, named, stage.held, CompleteTensors(layout, axes),
                                 model.invariant_training)

    def _allocate_grads(self) -> None:
        """Allocate the buffer, and make each parameter's gradient a view of it."""
        self.grad_buffer = torch.zeros(sum(p.numel() for p in self.parameters), device=self.stage.device)
        self.is_clear = True
        at = [0, self.dense_numel]  # the next free element of each part
        self.in_buffer = []
        for parameter, expert in zip(self.parameters, self.is_divided_expert, strict=True):
            self.in_buffer.append(self.grad_buffer[at[expert] : at[expert] + parameter.numel()].view(parameter.shape))
            at[expert] += parameter.numel()
        self._use_buffer()
        if self.head_sums is not None:
            self.stage.keep_head_grad()
        if self.source_sums is not None:
            self.source_table = self.stage.keep_source_grads(self.divided_experts)

    def _use_buffer(self) -> None:
        for parameter, grad in zip(self.parameters, self.in_buffer, strict=True):
            parameter.grad = grad

    def offload(self, host: HostMemory) -> None:
        """Move the optimizer state to host memory, and free the gradients, which no step keeps."""
        self.optimizer.replace(host.offload(self.optimizer.allocated()))
        for parameter in self.parameters:
            parameter.grad = None
        self.grad_buffer, self.in_buffer = self.grad_buffer.new_empty(0), []
        self.stage.head_grad = self.source_table = self.leaf_grads = self.head_leaf = None
        self.stage.source_grads = {}

    def onload(self, host: HostMemory) -> Callable[[], None]:
        """Start the copy back to the device. The returned function must be called before the state is used."""
        tensors, finish = host.onload(self.optimizer.allocated())
        self.optimizer.replace(tensors)
        self._allocate_grads()
        return finish

    def zero_grad(self) -> None:
        self._use_buffer()
        if not self.is_clear:
            self.grad_buffer.zero_()
        self.is_clear = False
        if self.stage.head_grad is not None:
            self.stage.head_grad.zero_()
        if self.source_table is not None:
            self.source_table.zero_()
        self.leaf_grads = self.head_leaf = None
        for sums in (self.leaf_sums, self.head_sums, self.source_sums):
            if sums is not None:
                sums.clear()

    def begin_leaf(self) -> None:
        """Before the passes of a leaf, of a model with `invariant=training`. The first leaf with rows adds to the
        buffer, where the sum of all will be; the others get separate tensors."""
        if self.leaf_sums is not None and self.leaf_sums.has_rows and not self.divided_passes:
            for parameter, expert in zip(self.parameters, self.is_divided_expert, strict=True):
                if not expert:
                    parameter.grad = None  # autograd puts its first result here instead of adding it to zeros
        if self.head_sums is not None and self.head_sums.has_rows and not self.divided_passes:
            self.stage.keep_head_grad()
        if self.source_sums is not None and self.source_sums.has_rows:
            self.source_table = self.stage.keep_source_grads(self.divided_experts)

    def end_pass(self) -> None:
        """After a backward pass, of a model with `invariant=training`: sum its gradients over cp."""
        cp = self.axes.cp
        if not self.divided_passes:
            return
        if self.stage.zero:
            self.stage.zero.end_pass(cp)
        else:
            _tree_over_ranks(self.grad_buffer, cp)
            for grad, rounded in zip(self._grads(), self.rounded, strict=True):
                if rounded:
                    grad.copy_(grad.bfloat16())
            self.leaf_grads = _add_or_copy(self.leaf_grads, self.grad_buffer)
            self.grad_buffer.zero_()
        if self.head_sums is not None and self.stage.head_grad is not None:
            head = self.stage.head_grad
            _tree_over_ranks(head.view(-1), cp)
            self.head_leaf = _add_or_copy(self.head_leaf, head)
            head.zero_()

    def end_leaf(self, has_rows: bool, has_passes: bool) -> None:
        """After the passes of a leaf, of a model with `invariant=training`. has_rows: of this rank. has_passes: it may
        have some without rows, in which its experts see the tokens of other ranks."""
        if self.stage.zero:
            self.stage.zero.end_leaf(has_rows)
        elif self.leaf_sums is not None:
            own = [self.leaf_grads] if self.divided_passes else [
                p.grad for p, expert in zip(self.parameters, self.is_divided_expert, strict=True) if not expert]
            self.leaf_sums.add(own if has_rows else None)
        if self.head_sums is not None:
            self.head_sums.add([self.head_leaf if self.divided_passes else self.stage.head_grad] if has_rows else None)
        if self.source_sums is not None:
            self.source_sums.add([self.source_table] if has_passes else None)
        self.leaf_grads = self.head_leaf = None

    def step(self, rate: float | None = None) -> dict[str, float]:
        """Reduce, clip, update. Returns "grad_norm", before clipping, and "lr". If the norm is not finite, nothing is
        updated and "lr" is 0. rate: the learning rate; None: that of the schedule."""
        if self.leaf_sums is None:
            self._reduce_grads()
            norm = self._grad_norm()
        else:
            self._reduce_leaves(self.leaf_sums)
            grads = self._grads()
            norm = exact_norm([grads[i] for i in self.counted], self.axes.mesh.group, self.stage.device)
        if not math.isfinite(norm):
            return {"grad_norm": norm, "lr": 0.0}
        limit = self.options.clip_grad
        factor = limit / (norm + 1e-6) if limit and norm > limit else 1.0
        if rate is None:
            rate = learning_rate(self.options, self.schedule_step, self.updates)
        self._update(rate, factor)
        self.schedule_step += 1
        return {"grad_norm": norm, "lr": rate}

    def _update(self, rate: float, factor: float) -> None:
        """Update with the gradients times `factor`. They are 0 afterwards where one pass does it all; others stay,
        multiplied, until the next minibatch."""
        done = self.optimizer.step_in_one_pass(rate, factor)
        self.is_clear = len(done) == len(self.parameters)
        if not self.is_clear and factor != 1:
            self.grad_buffer.mul_(factor)
        self.optimizer.step(rate, done)

    def skip_updates(self, updates: int) -> float:
        """See `Shard.skip_updates`."""
        self.schedule_step += updates
        return learning_rate(self.options, self.schedule_step - 1, self.updates)

    def optimizer_state(self) -> dict[str, dict[str, torch.Tensor]]:
        """See `Shard.optimizer_state`; zeros before the first step."""
        return self.optimizer.state()

    def schedule_state(self) -> dict[str, int]:
        """done: updates of the schedule, taken or skipped. made: steps that the optimizer took."""
        return {"done": self.schedule_step, "made": self.optimizer.num_updates}

    def load_schedule_state(self, counts: Mapping[str, int]) -> None:
        self.schedule_step = counts["done"]
        self.optimizer.set_num_updates(counts["made"])

    def _grads(self) -> list[torch.Tensor]:
        grads = [p.grad for p in self.parameters if p.grad is not None]
        if len(grads) != len(self.parameters):
            raise RuntimeError("the gradient buffer is offloaded")
        return grads

    def _reduce_grads(self) -> None:
        tp, dp, cp, expert_dp = self.axes.tp, self.axes.dp, self.axes.cp, self.axes.expert_dp
        if self.stage.zero:
            self.stage.zero.end_minibatch(use_grads=True)
        grads = self._grads()
        if self.tp_partial_grads:
            _all_reduce_joined([grads[i] for i in self.tp_partial_grads], tp.group)
        for i in self.tp_replicated_units:
            self._sum_duplicates(i, grads[i])
        self._sum_tied_embeddings(grads)
        if cp.size > 1:  # each rank has seen only its tokens
            all_reduce(self.grad_buffer, group=cp.group)
        if dp.size > 1 and not self.stage.zero:
            all_reduce(self.grad_buffer[: self.dense_numel], group=dp.group)
            if self.axes.ep.size > 1 and expert_dp.size > 1:
                all_reduce(self.grad_buffer[self.dense_numel :], group=expert_dp.group)

    def _reduce_leaves(self, leaf_sums: LeafSums) -> None:
        """As `_reduce_grads`, in one order: over the leaves of all ranks first, the ends of the pipeline last."""
        dp, zero = self.axes.dp, self.stage.zero
        if zero:
            zero.end_minibatch(use_grads=True)
        else:
            own = leaf_sums.take()
            self._use_buffer()  # without cp the sum is there
            if own is not None and self.divided_passes:
                self.grad_buffer.copy_(_only(own))
            _tree_over_ranks(self.grad_buffer[: self.dense_numel], dp)
        grads = self._grads()
        sources = self.source_sums.take() if self.source_sums is not None else None
        if sources is not None:
            self._reduce_sources(tree_of(_only(sources)), grads)
        if self.head_sums is not None and self.stage.head_grad is not None:
            (tied,) = (grads[i] for i in self.tied_embeddings)
            own = self.head_sums.take()
            total = torch.zeros_like(self.stage.head_grad) if own is None else _only(own)
            total = rows_of_tree_sum(total, dp)[: tied.numel()] if zero else \
                _tree_over_ranks(total.view(-1), dp)
            tied.add_(total.view(tied.shape))
        self._sum_tied_embeddings(grads)

    def _reduce_sources(self, total: torch.Tensor, grads: Sequence[torch.Tensor]) -> None:
        """total: [elements], of the experts that ep divides: the sum over the ranks of ep from which tokens came, which
        are neighbors along dp; those with the same experts come next."""
        expert_dp = self.axes.expert_dp
        shapes = [self.stage.unsharded[name].shape for name in self.divided_experts]
        targets = (g for g, expert in zip(grads, self.is_divided_expert, strict=True) if expert)
        for part, shape, target in zip(total.split([s.numel() for s in shapes]), shapes, targets, strict=True):
            if self.stage.zero:
                summed = rows_of_tree_sum(part.view(shape), expert_dp)[: target.numel()]
            else:
                summed = _tree_over_ranks(part, expert_dp)
            target.copy_(summed.view(target.shape))

    def _sum_tied_embeddings(self, grads: Sequence[torch.Tensor]) -> None:
        """Over the ends of the pipeline; stages between them add zeros."""
        pp = self.axes.pp
        if self.tied_size and pp.size > 1:
            tied = [grads[i] for i in self.tied_embeddings] or [self.grad_buffer.new_zeros(self.tied_size)]
            _all_reduce_joined(tied, pp.group)

    def _sum_duplicates(self, i: int, grad: torch.Tensor) -> None:
        """Sum the gradient of parameter i over the tp ranks that hold the same units, by way of the whole parameter."""
        parameter, pieces = self.held[i]
        dim = parameter.dim
        complete = grad.new_zeros(parameter.spec.shape)
        for piece in pieces:
            complete[slices(piece.box)] = grad[local_slice(piece, piece.box, dim)]
        all_reduce(complete, group=self.axes.tp.group)
        for piece in pieces:
            grad[local_slice(piece, piece.box, dim)] = complete[slices(piece.box)]

    def _grad_norm(self) -> float:
        """2-norm over the whole model; each element counts once, however many ranks hold it."""
        grads = self._grads()  # of a stage whose parameters are all frozen: none
        norms = torch.stack(torch._foreach_norm(grads)) if grads else self.grad_buffer.new_zeros(0)
        squares = norms.double() ** 2
        counts = torch.tensor(self.num_replicas, dtype=torch.float64, device=squares.device)
        total = (squares / counts).sum()
        if self.axes.mesh.size > 1:
            all_reduce(total, group=self.axes.mesh.group)
        return math.sqrt(total.item())


def _has_tied_head(stage: Stage, trained: Collection[str]) -> bool:
    """Whether the head of this stage is a trained embedding."""
    return any(stage.held[name][0].spec.stage == "ends" for name in trained) and stage.head is not None


def _freeze(stage: Stage, name: str) -> None:
    """Let a parameter, and what modules compute with in its place under `zero`, have no gradient."""
    stage.parameters[name].requires_grad_(False)
    if stage.zero:
        stage.unsharded[name].requires_grad_(False)


def _tied_size(model: Model, options: Optimizer, layout: Layout, axes: Axes) -> int:
    """Elements of the tied embedding that the ends of this rank's pipeline hold; 0 if there is none, or it is
    frozen."""
    spec = next((s for s in model.params if s.stage == "ends"), None)
    if spec is None or param_options(options, spec.name, spec).frozen:
        return 0
    part = axes.ep.index * layout.tp + axes.tp.index
    held = pieces_at(spec, layout, part, axes.dp.index // layout.ep if layout.zero else 0)
    return sum(volume(piece.box) for piece in held)


def _tree_over_ranks(total: torch.Tensor, axis: Axis) -> torch.Tensor:
    """The tree sum over the ranks of an axis, in place. total: flat."""
    for part in total.split(PART) if axis.size > 1 else ():
        part.copy_(tree_all_reduce(part, axis))
    return total


def _add_or_copy(total: torch.Tensor | None, x: torch.Tensor) -> torch.Tensor:
    """total + x, in the memory of `total`. Zeros of the first x become 0.0."""
    return x + 0.0 if total is None else total.add_(x)


def _only(leaf: Leaf) -> torch.Tensor:
    (joined,) = leaf
    if joined is None:
        raise RuntimeError("a leaf with rows has no gradients")
    return joined


def _all_reduce_joined(tensors: Sequence[torch.Tensor], group: dist.ProcessGroup) -> None:
    """Sum some tensors over a group, in place and in one message."""
    joined = torch.cat([t.reshape(-1) for t in tensors])
    all_reduce(joined, group=group)
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
