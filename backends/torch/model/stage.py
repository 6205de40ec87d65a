"""One pipeline stage of a HuggingFace model, as this rank's tensor-parallel shard.

In: a plan's model, a layout and this rank's place in it. Out: a `Stage` whose forward is the family's own code.
Invariants: parameters are exactly the pieces that `sharding/boxes.py` gives this rank; layers of other chunks are
pass-through modules, so that the family's forward runs unchanged. Under a layout with `zero`, parameters are rows, and
modules compute with tensors that `zero.py` fills from the rows of all shards.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import copy
from dataclasses import dataclass, replace
from typing import Any

import torch
from rldsl.backends.torch.kernels.rms_norms import quicken
from rldsl.backends.torch.model import attention
from rldsl.backends.torch.model.attention import Packing
from rldsl.backends.torch.model.autocast import compute_rounded
from rldsl.backends.torch.model.config import config
from rldsl.backends.torch.model.experts import divide_experts
from rldsl.backends.torch.model.invariant import Invariant
from rldsl.backends.torch.model.load_weights import Held, allot
from rldsl.backends.torch.model.lora import adapters
from rldsl.backends.torch.model.recompute import Recompute
from rldsl.backends.torch.model.sequence_parallel import Tokens, gathered
from rldsl.backends.torch.model.tensor_parallel import Entry, divide
from rldsl.backends.torch.model.zero import Several, Sharded, Unit
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.initialization import no_init_weights
from transformers.pytorch_utils import Conv1D

from rldsl.diag import fail
from rldsl.plan.adapter_names import HEAD, module_of
from rldsl.plan.model import Layout, Mesh, Model
from rldsl.runtime.backend import Axes, Axis, WeightCache
from rldsl.sharding.boxes import Parameter, chunks, expand_specs, local_shape, parameters, pieces_of_rank
from rldsl.sharding.layout import stage_layers


class Elsewhere(nn.Module):
    """A layer of another chunk. The last one before a chunk's own layers lets in what the previous chunk gave, whatever
    the family's forward did to its input before (some scale embeddings)."""

    arriving: torch.Tensor | None = None

    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return hidden_states if self.arriving is None else self.arriving


@dataclass(frozen=True, slots=True)
class Chunk:
    """A run of layers, and the family's model with these alone. entry: where hidden states come in. first, last: of the
    model."""

    body: nn.Module
    entry: Elsewhere
    layers: range
    first: bool
    last: bool

    def own(self) -> Iterator[tuple[int, nn.Module]]:
        """Its layers, by number."""
        for child in self.body.children():
            if isinstance(child, nn.ModuleList):
                yield from ((i, layer) for i, layer in enumerate(child) if not isinstance(layer, Elsewhere))


class Stage(Recompute):
    """chunks: of layers, ascending; one, except under a layout with `vpp`. first, last: place in the pipeline. hidden:
    size H. head: [V_local, H] local rows of the output embedding on the last stage of a causal_lm, from row
    `vocab_start` of `vocab`; head_axis: over which ranks its rows are divided.
    score: [1, H] on the last stage of a value or reward model. compute_dtype: of hidden states between layers and
    stages, float32 whatever the weights are. dtype: in which `parameters` lie; head_dtype: in which matrices multiply,
    the model's. parameters: HF name -> local parameter, of what has
    versions; base: of what has none, besides. unread, unread_base: those of them whose values are not there yet.
    sharded: of a layout with `zero`, what makes parameters whole."""

    def __init__(self, model: Model, layout: Layout, mesh: Mesh, axes: Axes, device: torch.device, dtype: torch.dtype,
                 head_dtype: torch.dtype, weight_cache: WeightCache | None = None):
        attention.register()
        pp, tp = axes.pp, axes.tp
        self.first, self.last = pp.index == 0, pp.index == pp.size - 1
        self.device, self.head_dtype = device, head_dtype
        self.compute_dtype = torch.float32
        self.config = config(model)
        _check_logits(self.config, model)
        whole = _skeleton(self.config)
        body: nn.Module = getattr(whole, whole.base_model_prefix)
        text = self.config.get_text_config()
        self.hidden, self.vocab = int(text.hidden_size), int(text.vocab_size)

        rank = axes.mesh.ranks[axes.mesh.index]

        undivided = replace(layout, zero=0)

        def here(wanted: Iterable[Parameter]) -> Held:
            pieces = ((p, pieces_of_rank(p, model.layers, undivided, mesh, rank)) for p in wanted)
            return {p.name: (p, held) for p, held in pieces if held}

        self.whole_held = here(parameters(model))
        self.held: Held = {name: (p, pieces_of_rank(p, model.layers, layout, mesh, rank))
                           for name, (p, _) in self.whole_held.items()} if layout.zero else self.whole_held
        constant = not (model.home or model.sources or model.base)
        self.parameters, self.unread = allot(model.path, self.held, dtype, device, weight_cache if constant else None)
        self.base_held = here(expand_specs(model.base, model.layers))
        self.base, self.unread_base = allot(model.path, self.base_held, head_dtype, device, weight_cache)
        _check_head(whole, model)
        self.whole: Mapping[str, nn.Parameter] = self.parameters
        self.sharded: Sharded | None = None
        if layout.zero:
            self.whole = {name: self._unfilled(name, whole) for name in self.held}
            self.sharded = self._shards(layout.zero, axes)
        apart = gathered((*model.params, *model.base))
        self.tokens = Tokens(tp, bool(apart))
        quicken(body, device)
        self._install(whole, model, tp, axes.ep)
        for module in body.modules():
            for name, buffer in module.named_buffers(recurse=False):
                setattr(module, name, buffer.to(self.device))
        body.eval()
        self.chunks = [self._chunk(body, s, pp.size * layout.vpp, model)
                       for s in range(pp.index, pp.size * layout.vpp, pp.size)]
        for chunk in self.chunks:
            self.tokens.install([layer for _, layer in chunk.own()], apart)
        self.invariant = model.invariant
        self._recompute_layers()

    def passes(self) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        return nullcontext(), Invariant() if self.invariant else nullcontext()  # torch's backward knows no modes

    def forward(self, tokens: torch.Tensor, positions: torch.Tensor, packing: Packing,
                hidden: torch.Tensor | None, number: int = 0) -> torch.Tensor:
        """Through one of the chunks. tokens, positions: [T] int64. hidden: [T, H] from the chunk before, None for the
        first. Returns [T, H]; of the last one after the final norm and in the dtype in which the head multiplies."""
        chunk = self.chunks[number]
        rest = dict(position_ids=positions[None], use_cache=False, packing=packing)
        if hidden is None:
            given = dict(input_ids=tokens[None])
        else:
            given = dict(inputs_embeds=hidden[None])
            chunk.entry.arriving = hidden[None]
        try:
            out = chunk.body(**given, **rest).last_hidden_state.squeeze(0)
        finally:
            chunk.entry.arriving = None
        return out.to(self.head_dtype if chunk.last else self.compute_dtype)

    def _recompute_layers(self) -> None:
        """Give each layer of this stage a forward that may be run twice."""
        for i, layer in (own for chunk in self.chunks for own in chunk.own()):
            again = self.perhaps_again(layer.forward)
            layer.forward = self.sharded.around(i, again) if self.sharded else again

    def _unfilled(self, name: str, whole: nn.Module) -> nn.Parameter:
        """A tensor for the module to compute with, in its dtype there: autocast halves matrices of layers."""
        parameter, pieces = self.whole_held[name]
        matrix = parameter.layer is not None and len(parameter.spec.shape) > 1 and _multiplied(name, parameter, whole)
        dtype = self.head_dtype if matrix else self.parameters[name].dtype
        return nn.Parameter(torch.empty(local_shape(parameter, pieces), dtype=dtype, device=self.device))

    def _shards(self, level: int, axes: Axes) -> Sharded:
        def part(layer: int | None, apart: bool) -> Unit | None:
            names = [n for n, (p, _) in self.held.items()
                     if p.layer == layer and apart == (axes.ep.size > 1 and p.spec.experts > 0)]
            return Unit([self.parameters[n] for n in names], [self.whole[n] for n in names],
                        axes.copies if apart else axes.dp) if names else None

        def unit(layer: int | None) -> Unit | Several:
            found = [u for apart in (False, True) if (u := part(layer, apart)) is not None]
            return found[0] if len(found) == 1 else Several(found)

        numbers = dict.fromkeys(p.layer for p, _ in self.held.values())
        return Sharded(level, {x: unit(x) for x in sorted(x for x in numbers if x is not None)},
                       [unit(None)] if None in numbers else [])

    def _install(self, whole: nn.Module, model: Model, tp: Axis, ep: Axis) -> None:
        """Put local parameters into the modules, with their collectives."""
        self.head: torch.Tensor | None = None
        self.score: torch.Tensor | None = self.whole.get(HEAD)
        self.vocab_start, self.head_axis = 0, Axis((tp.ranks[tp.index],), 0, None)
        output = whole.get_output_embeddings()
        embedding = whole.get_input_embeddings()
        tied = output is not None and output.weight is embedding.weight
        entry, added = Entry(tp, self.tokens), adapters(model, self.whole)
        local = {**self.base, **self.whole}
        for name, (parameter, held) in {**self.base_held, **self.whole_held}.items():
            if name == HEAD or module_of(name):
                continue
            path, _, attribute = name.rpartition(".")
            module = whole.get_submodule(path)
            setattr(module, attribute, local[name])
            if parameter.spec.experts:
                divide_experts(module, parameter.spec.experts, tp, ep)
                continue
            start = held[0].box[0][0]
            if attribute == "weight":
                divide(module, parameter.spec.style, tp, start, entry, added.get(path))
            if attribute == "weight" and self.last and (module is output or (tied and module is embedding)):
                self.head, self.vocab_start = local[name], start
                if parameter.spec.split is not None:
                    self.head_axis = tp
        if self.head_dtype == torch.bfloat16:
            for name, (parameter, _) in {**self.base_held, **self.whole_held}.items():
                path, _, attribute = name.rpartition(".")
                if not _multiplied(name, parameter, whole):
                    compute_rounded(whole.get_submodule(path), attribute)

    def _chunk(self, whole: nn.Module, number: int, count: int, model: Model) -> Chunk:
        """One of `count` runs of all layers: the same modules in a body of their own, with pass-through modules in
        place of what belongs to others."""
        entry, layers = Elsewhere(), stage_layers(model.layers, count, number)
        local = {**self.base, **self.whole}
        mine = {id(local[name]) for name, (p, _) in {**self.base_held, **self.whole_held}.items()
                if number in chunks(p, model.layers, count)}
        body, embedding = copy(whole), whole.get_input_embeddings()
        body._modules = dict(whole._modules)
        for name, child in whole.named_children():
            if isinstance(child, nn.ModuleList):
                setattr(body, name, nn.ModuleList(
                    layer if i in layers else entry if i == layers.start - 1 else Elsewhere()
                    for i, layer in enumerate(child)))
            elif child is not embedding and any(True for _ in child.parameters()):
                if not any(id(p) in mine for p in child.parameters()):
                    setattr(body, name, nn.Identity())
        return Chunk(body, entry, layers, number == 0, number == count - 1)


def _multiplied(name: str, parameter: Parameter, whole: nn.Module) -> bool:
    """Whether only products see a parameter, which autocast halves: of experts, factors, linear layers, the head."""
    return parameter.spec.experts > 0 or module_of(name) != "" or name == HEAD or isinstance(
        whole.get_submodule(name.rpartition(".")[0]), nn.Linear | Conv1D)


def _check_head(whole: nn.Module, model: Model) -> None:
    """RL0725 for an output embedding with a bias: log-probs are taken from its weight alone."""
    output = whole.get_output_embeddings()
    if model.kind == "causal_lm" and getattr(output, "bias", None) is not None:
        raise fail("RL0725", "the output embedding of this family has a bias", place=model.path,
                   help="this is not supported yet; families without one (Llama, Qwen, Mistral, Gemma, ...) are")


def _check_logits(config: Any, model: Model) -> None:
    """RL0725: families whose forward changes the logits after the head; log-probs would silently be others."""
    text = config.get_text_config()
    changed = [n for n in ("final_logit_softcapping", "logits_scaling", "logit_scale") if getattr(text, n, None) not in
               (None, 1)]
    if changed and model.kind == "causal_lm":
        raise fail("RL0725", f"the family {config.model_type} changes its logits after the head", place=model.path,
                   label=f"{changed[0]}={getattr(text, changed[0])}", help="such heads are not supported yet")


def _skeleton(config: Any) -> nn.Module:
    """The model with parameters on the meta device but real buffers (rotary frequencies are computed, not stored)."""
    with _parameters_on_meta(), no_init_weights():
        made = AutoModelForCausalLM.from_config(config, attn_implementation=attention.NAME, trust_remote_code=False)
    made.tie_weights()  # else a part of the initialisation
    return made


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    register = nn.Module.register_parameter

    def on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and not parameter.is_meta:
            parameter = nn.Parameter(parameter.to("meta"), requires_grad=parameter.requires_grad)
        register(module, name, parameter)

    nn.Module.register_parameter = on_meta
    try:
        yield
    finally:
        nn.Module.register_parameter = register
