"""This rank's parameters in the modules of the whole model, with the collectives that their division needs.

In: the model without numbers, local parameters by HuggingFace name, and their pieces. Out: `Installed`: modules compute
with the parameters, and the output embedding, which the loss reads itself, is set apart. Modules of other stages get
placeholders.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from rldsl.backends.torch.model.autocast import round_parameter
from rldsl.backends.torch.model.experts import OrderedExperts, SourceGrads, parallelize_experts
from rldsl.backends.torch.model.gradient_sums import Leaves
from rldsl.backends.torch.model.load_weights import HeldPieces
from rldsl.backends.torch.model.lora import LoraAdapter
from rldsl.backends.torch.model.row_groups import RowGroups
from rldsl.backends.torch.model.skeleton import aliases_of, rope_width
from rldsl.backends.torch.model.tensor_parallel import ColumnParallelInput, parallelize
from rldsl.backends.torch.model.weight_copies import WeightCopies
from rldsl.models.execution import body_name
from rldsl.plan.adapter_names import module_of
from rldsl.plan.heads import SCORE_WEIGHT
from rldsl.plan.model import Model
from rldsl.runtime.backend import Axis
from rldsl.sharding.boxes import Parameter, expand_specs
from rldsl.sharding.sum_blocks import column_leaves, local_cuts, summed_input, summed_output


@dataclass(slots=True)
class OutputHead:
    """This rank's rows of the output embedding."""

    axis: Axis                      # over which ranks the rows are divided
    cuts: tuple[int, ...] | None    # of the rows, for sums of an invariant model (`tree_sums.py`)
    is_biased: bool                 # whether the output embedding has a bias
    start: int = 0                  # the first of these rows
    weight: torch.Tensor | None = None  # [V_local, H]; None on other stages than the last
    bias: torch.Tensor | None = None    # [V_local]


@dataclass(slots=True)
class Installed:
    """What installing has found out."""

    head: OutputHead
    experts: dict[str, nn.Module] = field(default_factory=dict)  # of each layer here that has some, by module name
    reads_once: bool = True  # whether every parameter is read by one module only


@dataclass(frozen=True, slots=True)
class Installer:
    """Puts parameters into the modules of a model."""

    skeleton: Any                         # the whole model
    model: Model                          # of the plan
    text: Any                             # the config of its language model
    last: bool                            # whether this is the last stage
    device: torch.device
    tp: Axis
    ep: Axis
    column_input: ColumnParallelInput
    ordered: bool                         # gradients have one order of sums (`invariant=training`)
    row_groups: Callable[[], RowGroups]   # those of the pass under way, of such a model
    source_grads: Callable[[str], Callable[[], SourceGrads | None]]  # of the module of experts of this name
    copies: WeightCopies                  # of an invariant model

    def install(self, local: Mapping[str, nn.Parameter], held: HeldPieces,
                adapters: Mapping[str, LoraAdapter]) -> Installed:
        """Put `local` parameters, whose pieces are `held`, into their modules. adapters: by the name of the module."""
        output, embedding = self.skeleton.get_output_embeddings(), self.skeleton.get_input_embeddings()
        aliases = aliases_of(self.skeleton, output, body_name(self.skeleton))
        bias = next((n for n, p in self.skeleton.named_parameters() if p is getattr(output, "bias", None)), "")
        read_as_head = {id(output)} | ({id(embedding)} if output is not None and output.weight is embedding.weight
                                       else set())
        found = Installed(self._undivided_head(output))
        up_leaves: Leaves | None = None  # of the up projections of experts, which come before the down projections
        for name, (parameter, pieces) in held.items():
            if name == SCORE_WEIGHT or module_of(name):
                continue
            path, _, attribute = name.rpartition(".")
            module = self.skeleton.get_submodule(path)
            for other, same in aliases[name]:
                setattr(other, same, local[name])
            found.reads_once = found.reads_once and len(aliases[name]) < 2
            if name == bias:
                found.head.bias = local[name] if self.last else None
            elif parameter.spec.experts:
                found.experts[path] = module
                if attribute == "gate_up_proj":
                    up_leaves = self._leaves(parameter)
                self._parallelize_experts(path, attribute, parameter, up_leaves)
            elif attribute == "weight":
                start = pieces[0].box[0][0] if pieces[0].box else 0
                self._parallelize(module, parameter, start, adapters.get(path))
                if self.last and id(module) in read_as_head:
                    self._set_head(found.head, local[name], parameter, start)
        self._fill_absent(local, aliases)
        return found

    def _undivided_head(self, output: Any) -> OutputHead:
        """The output embedding before its rows are known."""
        biased = getattr(output, "bias", None) is not None and self.model.head.vocabulary
        cuts = local_cuts(int(self.text.vocab_size), 1, 1, 0) if self.model.invariant else None
        return OutputHead(Axis((self.tp.ranks[self.tp.index],), 0, None), cuts, biased)

    def _set_head(self, head: OutputHead, weight: nn.Parameter, parameter: Parameter, start: int) -> None:
        head.weight, head.start = weight, start
        if parameter.spec.split is not None:
            head.axis = self.tp
            if self.model.invariant:
                head.cuts = local_cuts(int(self.text.vocab_size), 1, self.tp.size, self.tp.index)

    def _cuts(self, parameter: Parameter) -> tuple[int, ...] | None:
        """Of the inputs of a row-parallel matrix of an invariant model."""
        summed = summed_input(parameter.spec) if self.model.invariant else None
        return local_cuts(*summed, self.tp.size, self.tp.index) if summed else None

    def _leaves(self, parameter: Parameter) -> Leaves | None:
        """Of the outputs of a column-parallel matrix whose gradients have one order."""
        parts = summed_output(parameter.spec) if self.ordered else None
        return column_leaves(parts, self.tp.size, self.tp.index) if parts else None

    def _parallelize(self, module: nn.Module, parameter: Parameter, start: int, adapter: LoraAdapter | None) -> None:
        """Give a module the collectives of its weight. start: the weight's first row here."""
        spec = parameter.spec
        layer = spec.layer if parameter.layer is None else parameter.layer
        parallelize(module, spec.style, self.tp, start, self.column_input, adapter, self._cuts(parameter),
                    self._leaves(parameter), self.row_groups if self.ordered else None, spec.shape[0],
                    rope_width(self.text, layer), self.copies)

    def _parallelize_experts(self, path: str, attribute: str, parameter: Parameter, up_leaves: Leaves | None) -> None:
        """Give a module of experts its collectives; one with sums in order once it has both matrices."""
        cuts = self._cuts(parameter)
        if attribute == "down_proj" or cuts is None:
            ordered = OrderedExperts(up_leaves, self.row_groups, self.source_grads(path)) if up_leaves else None
            parallelize_experts(self.skeleton.get_submodule(path), parameter.spec.experts, self.tp, self.ep, cuts,
                                ordered, self.copies)

    def _fill_absent(self, local: Iterable[str], aliases: Mapping[str, list[tuple[nn.Module, str]]]) -> None:
        """Placeholders that take no memory for parameters of other stages, whose modules still run, in vain. NaN, so
        that it cannot pass unnoticed if a layer of this stage reads them, too."""
        here = frozenset(local)
        specs = expand_specs((*self.model.params, *self.model.base), self.model.layers)
        for name in [p.name for p in specs if p.name not in here]:
            for module, attribute in aliases.get(name, ()):
                tensor = getattr(module, attribute)
                nothing = torch.full((), torch.nan, dtype=tensor.dtype, device=self.device).expand(tensor.shape)
                setattr(module, attribute, nn.Parameter(nothing, requires_grad=False))


def round_parameters(skeleton: nn.Module, names: Iterable[str]) -> None:
    """Let modules read these float32 parameters as bfloat16 numbers, as those that autocast casts."""
    for name in names:
        path, _, attribute = name.rpartition(".")
        round_parameter(skeleton.get_submodule(path), attribute)
