"""One rank's part of a model as GPTModels: one for each chunk of layers.

In: a model of the plan, a layout and this rank's place in it. Out: a `MegatronStage`, which pipeline, losses, optimizer
and decoding of the torch backend use like its own `Stage`: they read the same attributes and the same boxes.

With tp, Megatron's linear layers always divide tokens (sequence parallelism), so rows are padded to a multiple of tp,
in decoding too. Hidden states between stages are complete, and so are those that the last norm and the head see.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from rldsl.backends.megatron.blocks import Block, ModuleTensor, build_blocks
from rldsl.backends.megatron.kernels import Kernels, kernels_here
from rldsl.backends.megatron.model import HeadNorm, PackedSequences, gpt
from rldsl.backends.megatron.names import EMBEDDING, ENDS, EXPERT, LAYER, OUTPUT, table_of
from rldsl.backends.megatron.zero import BlockParamGroup
from rldsl.backends.torch.model.attention import PackedAttention
from rldsl.backends.torch.model.autocast import round_parameter, round_to_bfloat16
from rldsl.backends.torch.model.collectives import (
    gather_from_sequence_parallel_region,
    scatter_to_sequence_parallel_region,
)
from rldsl.backends.torch.model.load_weights import HeldPieces, allocate_parameters, load_config
from rldsl.backends.torch.model.recompute import ActivationCheckpointing
from rldsl.backends.torch.model.sequence_parallel import PaddedAttention, SequenceParallel, pad_rows
from rldsl.backends.torch.model.zero import ZeroSharding
from rldsl.plan.heads import SCORE_WEIGHT
from rldsl.plan.model import Layout, Mesh, Model
from rldsl.runtime.backend import Axes, Axis, WeightCache
from rldsl.sharding.boxes import Parameter, parameters, pieces_of_rank
from rldsl.sharding.layout import stage_layers


@dataclass(frozen=True, slots=True)
class Chunk:
    """A run of layers."""

    model: Any     # GPTModel
    layers: range  # numbers of its layers in the whole model
    first: bool    # whether it has the model's first layers
    last: bool     # whether it has the model's last layers


class MegatronStage(ActivationCheckpointing):
    """Has the attributes of the torch backend's `Stage`, which documents them, without adapters."""

    autocast_in_backward = True  # Megatron's linear layers multiply bfloat16 gradients with float32 weights there
    blocks: list[Block]  # all that modules compute with
    kernels: Kernels     # which implementations they use
    # as in the torch backend's `Stage`
    parameters: dict[str, nn.Parameter]
    unsharded: dict[str, nn.Parameter]
    held: HeldPieces
    unsharded_held: HeldPieces
    base_held: HeldPieces
    to_load: HeldPieces
    base_to_load: HeldPieces
    zero: ZeroSharding | None
    head: torch.Tensor | None
    score: torch.Tensor | None
    head_grad: torch.Tensor | None  # None: `invariant=training`, which keeps it apart, is refused
    vision = None  # no family here reads images
    invariant = False  # `invariant=true` is refused
    ordered_heads = ()
    shares_prompts = True  # of sequences in a pass: only attention looks at other tokens, and it is the torch backend's

    def __init__(self, model: Model, layout: Layout, mesh: Mesh, axes: Axes, device: torch.device, dtype: torch.dtype,
                 matmul_dtype: torch.dtype, weight_cache: WeightCache | None = None):
        pp, tp = axes.pp, axes.tp
        self.first, self.last = pp.index == 0, pp.index == pp.size - 1
        self.device, self.matmul_dtype, self.residual_dtype = device, matmul_dtype, torch.float32
        self.config = load_config(model)
        text = self.config.get_text_config()
        self.hidden_size, self.vocab_size = int(text.hidden_size), int(text.vocab_size)
        self.padding = text.pad_token_id
        self.sequence_parallel = SequenceParallel(tp, True)
        self.zero = self.head_grad = None
        self.ordered_gradients = False  # `invariant=training` is refused
        with torch.device(device):
            rotary = LlamaRotaryEmbedding(text)
        self.frequencies = rotary.inv_freq.float()
        self.kernels = kernels_here(device.type, half=matmul_dtype == torch.bfloat16, grads_buffered=not layout.zero,
                                    biases=any(spec.name.endswith(".bias") for spec in model.params))
        self.chunks = [_chunk(text, model.layers, number, pp.size * layout.vpp, tp, axes.ep, rotary.attention_scaling,
                              self.kernels)
                       for number in range(pp.index, pp.size * layout.vpp, pp.size)]

        rank, without_zero = axes.mesh.ranks[axes.mesh.index], replace(layout, zero=0)
        pieces = ((p, pieces_of_rank(p, model.layers, without_zero, mesh, rank)) for p in parameters(model))
        self.unsharded_held = {p.name: (p, found) for p, found in pieces if found}
        read_only = not (model.train_layout or model.updated_from)
        self.tied = OUTPUT not in {spec.name for spec in model.params} and model.head.vocabulary
        self.blocks, to_load = build_blocks(
            table_of(self.config.model_type, bool(self.kernels.linear)), self.unsharded_held, model.path,
            self._dtype_of(dtype, layout.zero), device, weight_cache if read_only else None, self._module_tensors)
        self.unsharded = {n: p for block in self.blocks for n, p in block.hf_parameters.items()}
        self.held, self.parameters = {name: self.unsharded_held[name] for name in self.unsharded}, self.unsharded
        self.to_load = {name: self.held[name] for name in to_load}
        if layout.zero:
            self.held = {name: (p, pieces_of_rank(p, model.layers, layout, mesh, rank))
                         for name, (p, _) in self.held.items()}
            self.parameters, self.to_load = allocate_parameters(model.path, self.held, dtype, device, None)
            self.zero = self._zero_sharding(axes)
        self.base: dict[str, nn.Parameter] = {}
        self.base_held, self.base_to_load = {}, {}
        self._install_ends(model, tp)
        missing = [n for c in self.chunks for n, p in c.model.named_parameters() if p.is_meta]
        if missing:
            raise RuntimeError(f"no parameter of the model is {missing[0]} of GPTModel")
        if matmul_dtype == torch.bfloat16:
            for module in [m for chunk in self.chunks for m in chunk.model.modules()]:
                if isinstance(module, HeadNorm):
                    round_parameter(module, "weight")
                elif module._parameters.get("bias") is not None:  # added outside of the products that autocast casts
                    round_parameter(module, "bias")

    def forward(self, tokens: torch.Tensor, positions: torch.Tensor, packed_attention: PackedAttention,
                hidden: torch.Tensor | None, number: int = 0) -> torch.Tensor:
        """See `Stage.forward`."""
        chunk, count = self.chunks[number], len(tokens)
        rows = self.sequence_parallel.padded_rows(count)
        if rows != count:
            tokens, positions = pad_rows(tokens, rows), pad_rows(positions, rows)
            packed_attention = PaddedAttention(packed_attention, rows)
            hidden = None if hidden is None else pad_rows(hidden, rows)
        x = self._embed(chunk, tokens) if hidden is None else self._own_tokens(hidden)[:, None]
        angles = positions[:, None].float() * self.frequencies
        angles = torch.cat((angles, angles), -1)[:, None, None]
        sequences = PackedSequences(packed_attention=packed_attention)
        for layer in chunk.model.decoder.layers:
            x = self.checkpointed(layer)(hidden_states=x, attention_mask=None, rotary_pos_emb=angles,
                                         packed_seq_params=sequences)[0]
        out, parallel = x[:, 0], self.sequence_parallel
        if parallel.available:
            out = gather_from_sequence_parallel_region(out, parallel.tp, tensor_parallel_output_grad=False)
        if chunk.last:
            out = chunk.model.decoder.final_layernorm(out)
        return out[:count].to(self.matmul_dtype if chunk.last else self.residual_dtype)

    def _embed(self, chunk: Chunk, tokens: torch.Tensor) -> torch.Tensor:
        """[T, 1, H] of this rank's tokens. As in HuggingFace's embedding, the padding token's row gets no gradient."""
        x: torch.Tensor = chunk.model.embedding.word_embeddings(tokens[None])
        x = x if self.sequence_parallel.available else x.transpose(0, 1)
        if self.padding is not None and torch.is_grad_enabled():
            x = torch.where((self._own_tokens(tokens) == self.padding)[:, None, None], x.detach(), x)
        return round_to_bfloat16(x.float()) if self.matmul_dtype == torch.bfloat16 else x

    def _own_tokens(self, x: torch.Tensor) -> torch.Tensor:
        """This rank's tokens of a tensor that is equal on all ranks of tp."""
        parallel = self.sequence_parallel
        return scatter_to_sequence_parallel_region(x, parallel.tp) if parallel.available else x

    def _dtype_of(self, kept: torch.dtype, zero: int) -> Callable[[Parameter], torch.dtype]:
        """The dtype of what modules compute with: under `zero`, matrices are filled as autocast would cast them."""
        def dtype(parameter: Parameter) -> torch.dtype:
            matrix = parameter.layer is not None and len(parameter.spec.shape) > 1
            own = torch.float32 if parameter.spec.float32 else kept
            return self.matmul_dtype if zero and matrix else own

        return dtype

    def _zero_sharding(self, axes: Axes) -> ZeroSharding:
        def group_of(divided_experts: bool) -> BlockParamGroup | None:
            blocks = [b for b in self.blocks for name in list(b.hf_parameters)[:1]
                   if divided_experts == (axes.ep.size > 1 and self.held[name][0].spec.experts > 0)]
            rows = [self.parameters[name] for block in blocks for name in block.hf_parameters]
            return BlockParamGroup(rows, blocks, axes.expert_dp if divided_experts else axes.dp) if blocks else None

        return ZeroSharding(1, {}, [g for g in (group_of(False), group_of(True)) if g is not None])

    def _module_tensors(self, key: str, layer: int | None) -> Sequence[ModuleTensor]:
        """The modules' parameters on this rank for a tensor of the table."""
        tensors: list[ModuleTensor] = []
        for chunk in self.chunks:
            if layer is not None and layer not in chunk.layers:
                continue
            names = [key] if layer is None else [key.replace(LAYER, str(layer - chunk.layers.start), 1)]
            if self.tied and key == _key_of(EMBEDDING):
                names.append(_key_of(OUTPUT))
            for name in names:
                tensors += _lookup(chunk.model, name)
        return tensors

    def _install_ends(self, model: Model, tp: Axis) -> None:
        """The embedding's rows of the vocabulary, and the head."""
        self.head, self.score = None, self.unsharded.get(SCORE_WEIGHT)
        self.vocab_start, self.head_axis = 0, Axis((tp.ranks[tp.index],), 0, None)
        self.vocab_cuts = None  # no model is invariant here
        self.logit_cap, self.head_is_biased, self.is_recurrent = 0.0, False, False  # no family here has any
        if self.first:
            table = self.chunks[0].model.embedding.word_embeddings
            table.vocab_start_index, table.vocab_end_index = self.unsharded_held[EMBEDDING][1][0].box[0]
        if not self.last:
            return
        name = EMBEDDING if self.tied else OUTPUT
        if not model.head.vocabulary:
            self.chunks[-1].model.output_layer = None
            return
        self.head, self.vocab_start = self.unsharded[name], self.unsharded_held[name][1][0].box[0][0]
        if self.unsharded_held[name][0].spec.split is not None:
            self.head_axis = tp


def _chunk(text: Any, layers: int, number: int, count: int, tp: Axis, ep: Axis, scaling: float, kernels: Kernels
           ) -> Chunk:
    """scaling: of rotary embeddings. Both queries and keys would be multiplied by it; the scores are, twice,
    instead."""
    run, first, last = stage_layers(layers, count, number), number == 0, number == count - 1
    model = gpt(text, len(run), tp, ep, first, last, kernels)
    for i, layer in zip(run, model.decoder.layers, strict=True):
        core = layer.self_attention.core_attention
        core.layer, core.window = i, _window(text, i)
        core.scale *= scaling**2
    return Chunk(model, run, first, last)


def _window(text: Any, layer: int) -> int | None:
    """How many tokens a query of the layer sees, itself included; None: all. Configs state it for each layer or for
    all."""
    kinds = getattr(text, "layer_types", None)
    return getattr(text, "sliding_window", None) if kinds is None or kinds[layer] == "sliding_attention" else None


def _lookup(model: nn.Module, name: str) -> list[ModuleTensor]:
    """The parameters of GPTModel with a name of the table: one, or one for each expert."""
    if EXPERT not in name:
        return _lookup_one(model, name, None)
    tensors: list[ModuleTensor] = []
    while expert := _lookup_one(model, name.replace(EXPERT, str(len(tensors))), len(tensors)):
        tensors += expert
    return tensors


def _lookup_one(model: nn.Module, name: str, index: int | None) -> list[ModuleTensor]:
    """Empty if this chunk does not have that end of the model, or the rank no further expert."""
    path, _, attribute = name.rpartition(".")
    try:
        module = model.get_submodule(path)
    except AttributeError:
        return []
    return [ModuleTensor(module, attribute, index)] if index is None or hasattr(module, attribute) else []


def _key_of(name: str) -> str:
    """The tensor of GPTModel for a parameter at an end of the model."""
    return next(key for key, parts in ENDS.items() if name in parts)
