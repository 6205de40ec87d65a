"""What torch's optimizers do with the parameters of one shard, and what they keep about them.

In: the parameters with their gradients, the optimizer's record. Out: updated parameters, and the state by name.
A parameter that this rank has completely, or whose elements are updated each on its own (AdamW, SGD), is updated by an
optimizer of torch over all such parameters; `quantized_adamw` updates what has 8-bit state. What AdamW
updates on a CPU, a kernel also clips before and clears after (`step_in_one_pass`). Muon orthogonalizes
matrices, and Adafactor keeps means over rows and columns: what tp, ep or `zero` divides is gathered for them, one
parameter at a time, torch's optimizer updates the complete tensor, and each rank keeps its part. So the numbers are
those of one process, given equal gradients.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping
from functools import cache, partial
from typing import Any

import torch
from torch import nn

from rldsl.backends.torch.kernels import adamw
from rldsl.backends.torch.kernels.adamw import AdamWStep, Coefficients
from rldsl.backends.torch.train.complete_tensors import CompleteTensors
from rldsl.backends.torch.train.ordered_adamw import OrderedAdamW
from rldsl.backends.torch.train.quantized_adamw import QuantizedAdamW
from rldsl.plan.model import Optimizer, OptimizerKind
from rldsl.plan.optimizers import NEEDS_COMPLETE, ParamOptions, is_quantized, param_options, state_shapes
from rldsl.sharding.boxes import Parameter, Piece

LR_SCALE = "lr_scale"  # in the parameter groups of torch's optimizers
STEP = "step"  # the count of updates that AdamW and Adafactor keep for each parameter
State = dict[str, torch.Tensor]


class Updates:
    """The optimizers of one shard."""

    def __init__(self, options: Optimizer, parameters: Mapping[str, nn.Parameter],
                 held: Mapping[str, tuple[Parameter, tuple[Piece, ...]]], complete: CompleteTensors,
                 invariant: bool = False):
        """parameters: that are trained, by name. held: this rank's pieces of them. invariant: an element's update does
        not depend on how many a rank has, to the last bit."""
        self.options, self.parameters, self.held, self.complete = options, parameters, held, complete
        self.param_options = {name: param_options(options, name, held[name][0].spec) for name in parameters}
        self.num_updates = 0  # made so far
        self.fused = not invariant  # whether torch may use one kernel for several tensors
        self.gathered: dict[str, State] = {}  # name -> state, of parameters that are updated as complete tensors
        self.quantized: dict[str, State] = {}  # name -> state, of parameters whose moments have 8 bits
        by_rule: dict[OptimizerKind, dict[tuple[float, float], list[nn.Parameter]]] = defaultdict(
            lambda: defaultdict(list))
        for name, parameter in parameters.items():
            own, spec = self.param_options[name], held[name][0].spec
            if own.rule in NEEDS_COMPLETE and (complete.is_divided(spec)
                                               or own.rule == "muon" and len(spec.shape) != 2):
                self.gathered[name] = {}
            elif own.rule == "adamw_8bit":
                self.quantized[name] = {}
            else:
                by_rule[own.rule][own.lr_scale, own.weight_decay].append(parameter)
        self.optimizers = {rule: make_optimizer(options, rule, [
            {"params": members, LR_SCALE: scale, "weight_decay": decay} for (scale, decay), members in groups.items()],
            self.fused)
            for rule, groups in by_rule.items()}

    @torch.no_grad()
    def step(self, rate: float, done: Collection[str] = ()) -> None:
        """Update all parameters. rate: learning rate of the schedule. done: what `step_in_one_pass` has updated."""
        for optimizer in (x for rule, x in self.optimizers.items() if not (done and rule == "adamw")):
            for group in optimizer.param_groups:
                group["lr"] = rate * group[LR_SCALE]
            optimizer.step()
        for name in self.gathered:
            own = self.param_options[name]
            self.state_of(name)  # is there from now on
            if own.rule == "muon":
                self._step_muon(name, own, rate * own.lr_scale)
            else:
                self._step_adafactor(name, own, rate * own.lr_scale)
        quantized = QuantizedAdamW(self.options, self.complete)
        for name in self.quantized:
            own = self.param_options[name]
            quantized.step(self.held[name], self.parameters[name].data, self._grad(name), self.state_of(name), own,
                           rate * own.lr_scale, self.num_updates + 1)
        self.num_updates += 1

    @torch.no_grad()
    def step_in_one_pass(self, rate: float, factor: float) -> frozenset[str]:
        """Update the parameters of AdamW with their gradients times `factor`, and set these to 0, if its kernel takes
        them all: on a CPU with a compiler. Returns their names; none where it has done nothing. `step` does the rest.
        rate: as of `step`."""
        names = [name for name, own in self.param_options.items() if own.rule == "adamw"]
        parameters, grads = [self.parameters[name] for name in names], [self._grad(name) for name in names]
        if not names or not adamw.takes([*parameters, *grads]):
            return frozenset()
        states = [self.state_of(name) for name in names]
        if not adamw.takes([state[kind] for state in states for kind in ("exp_avg", "exp_avg_sq")]):
            return frozenset()
        coefficients = cache(partial(self._coefficients, rate, factor))
        for name, parameter, grad, state in zip(names, parameters, grads, states, strict=True):
            own = self.param_options[name]
            adamw.update(parameter, grad, state["exp_avg"], state["exp_avg_sq"],
                         coefficients(own.lr_scale, own.weight_decay))
            state[STEP].fill_(self.num_updates + 1)  # as torch's optimizer counts
        return frozenset(names)

    def _coefficients(self, rate: float, factor: float, lr_scale: float, weight_decay: float) -> Coefficients:
        """Of the next update."""
        return adamw.coefficients(AdamWStep(rate * lr_scale, self.options.betas, self.options.eps, weight_decay,
                                            self.num_updates + 1), factor)

    def state(self) -> dict[str, dict[str, torch.Tensor]]:
        """Kind of state ("exp_avg") -> parameter -> tensor; zeros before the first update."""
        found: dict[str, dict[str, torch.Tensor]] = defaultdict(dict)
        for name in self.parameters:
            for kind, tensor in self.state_of(name).items():
                if kind != STEP:
                    found[kind][name] = tensor
        return found

    def state_of(self, name: str) -> State:
        """What is kept about a parameter, allocated if it is not there yet."""
        parameter, (record, _) = self.parameters[name], self.held[name]
        rule = self.param_options[name].rule
        state = self._kept(name)
        if not state:
            shapes = state_shapes(self.options, rule, record.spec.shape, tuple(parameter.shape))
            if rule in ("adamw", "adafactor"):  # the fused AdamW counts on the device, Adafactor on the host
                state[STEP] = torch.zeros((), device=parameter.device if rule == "adamw" else "cpu")
            state |= {kind: torch.zeros(shape, device=parameter.device,
                                        dtype=torch.uint8 if is_quantized(kind) else torch.float32)
                      for kind, shape in shapes.items()}
        return state

    def allocated(self) -> dict[str, torch.Tensor]:
        """"KIND PARAMETER" -> tensor, of the state that is there; nothing before the first update."""
        return {f"{kind} {name}": tensor for name, state in self._states().items()
                for kind, tensor in state.items() if kind != STEP and tensor is not None}

    def replace(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """The same tensors as `allocated`, elsewhere."""
        states = self._states()
        for key, tensor in tensors.items():
            kind, _, name = key.partition(" ")
            states[name][kind] = tensor

    def set_num_updates(self, count: int) -> None:
        """Resume after `count` updates."""
        self.num_updates = count
        for state in self._states().values():
            if STEP in state:
                state[STEP].fill_(count)

    def _states(self) -> dict[str, State]:
        return {name: self._kept(name) for name in self.parameters}

    def _kept(self, name: str) -> State:
        """The dictionary in which a parameter's optimizer keeps its state."""
        kept = self.gathered.get(name, self.quantized.get(name))
        if kept is None:
            kept = self.optimizers[self.param_options[name].rule].state[self.parameters[name]]
        return kept

    def _grad(self, name: str) -> torch.Tensor:
        grad = self.parameters[name].grad
        if grad is None:
            raise RuntimeError("the gradient buffer is offloaded")
        return grad

    def _step_muon(self, name: str, own: ParamOptions, rate: float) -> None:
        """The momentum of each element is updated where the element is; torch's Muon then gets the complete result in
        place of a gradient, and keeps no momentum. A tensor of experts is a matrix for each."""
        parameter, (record, pieces) = self.parameters[name], self.held[name]
        grad, momentum = self._grad(name), self.options.momentum
        buffer = self.gathered[name]["momentum_buffer"].lerp_(grad, 1 - momentum)
        direction = grad.lerp(buffer, momentum) if self.options.nesterov else buffer
        direction = self.complete.gather(record, pieces, direction)
        updated = torch.zeros_like(direction)  # other ranks' parts are not needed
        self.complete.write_part(record, pieces, parameter, updated)
        shape = record.spec.shape
        matrices = [nn.Parameter(matrix) for matrix in updated.view(-1, *shape[-2:])]
        for matrix, its_direction in zip(matrices, direction.view(-1, *shape[-2:]), strict=True):
            matrix.grad = its_direction
        make_optimizer(self.options, "muon", [{"params": matrices, "weight_decay": own.weight_decay, "lr": rate,
                                               "momentum": 0.0, "nesterov": False}]).step()
        self.complete.read_part(record, pieces, updated, parameter)

    def _step_adafactor(self, name: str, own: ParamOptions, rate: float) -> None:
        parameter, (record, pieces) = self.parameters[name], self.held[name]
        stand_in = nn.Parameter(self.complete.gather(record, pieces, parameter))
        stand_in.grad = self.complete.gather(record, pieces, self._grad(name))
        optimizer = make_optimizer(self.options, "adafactor", [{"params": [stand_in], "lr": rate,
                                                                "weight_decay": own.weight_decay}])
        optimizer.state[stand_in] = self.gathered[name]
        optimizer.step()
        self.complete.read_part(record, pieces, stand_in, parameter)


def make_optimizer(options: Optimizer, rule: OptimizerKind, groups: list[dict[str, Any]],
                   fused: bool = True) -> torch.optim.Optimizer:
    """torch's optimizer over some groups of parameters. fused: in one kernel, which on CPUs rounds the last elements of
    a tensor otherwise than the rest; else an element has the same bits wherever it is."""
    match rule:
        case "adamw_8bit":
            raise AssertionError("updated by `QuantizedAdamW`")
        case "adamw":
            kind = torch.optim.AdamW if fused else OrderedAdamW
            return kind(groups, lr=options.lr, betas=options.betas, eps=options.eps, fused=True)
        case "sgd":
            return torch.optim.SGD(groups, lr=options.lr, momentum=options.momentum, nesterov=options.nesterov,
                                   fused=fused)
        case "muon":
            return torch.optim.Muon(groups, lr=options.lr, momentum=options.momentum, nesterov=options.nesterov,
                                    ns_steps=options.ns_steps, adjust_lr_fn=options.adjust_lr)
        case "adafactor":
            return torch.optim.Adafactor(groups, lr=options.lr, beta2_decay=options.beta2_decay,
                                         eps=(None, options.eps), d=options.clip_threshold, foreach=False)
