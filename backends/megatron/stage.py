"""One rank's part of a model as GPTModels: one for each chunk of layers.

In: a plan's model, a layout and this rank's place in it. Out: a `MegatronStage`, which pipeline, losses, optimizer and
decoding of the torch backend use as they use its own `Stage`: they ask for the same names and the same boxes.

Beside tp Megatron's linear layers always divide tokens (sequence parallelism), so rows are filled up to a multiple of
tp, in decoding too. Hidden states between stages are whole, and so are those that the last norm and the head see.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from rldsl.backends.megatron.blocks import Seat, blocks
from rldsl.backends.megatron.divided import Joined
from rldsl.backends.megatron.kernels import Kernels, here
from rldsl.backends.megatron.model import HeadNorm, Sequences, gpt
from rldsl.backends.megatron.names import EMBEDDING, ENDS, EXPERT, LAYER, OUTPUT, table_of
from rldsl.backends.torch.model.attention import Packing
from rldsl.backends.torch.model.autocast import compute_rounded, rounded
from rldsl.backends.torch.model.collectives import GatherAlike, PartOf
from rldsl.backends.torch.model.config import config
from rldsl.backends.torch.model.load_weights import Held, allot
from rldsl.backends.torch.model.recompute import Recompute
from rldsl.backends.torch.model.sequence_parallel import Filled, Tokens, fill
from rldsl.backends.torch.model.zero import Sharded
from torch import nn
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from rldsl.plan.adapter_names import HEAD
from rldsl.plan.model import Layout, Mesh, Model
from rldsl.runtime.backend import Axes, Axis, WeightCache
from rldsl.sharding.boxes import Parameter, parameters, pieces_of_rank
from rldsl.sharding.layout import stage_layers


@dataclass(frozen=True, slots=True)
class Chunk:
    """A run of layers. first, last: of the model."""

    model: Any
    layers: range
    first: bool
    last: bool


class MegatronStage(Recompute):
    """As `backends/torch/model/stage.py` says of `Stage`, without adapters. blocks: of all that modules compute with.
    kernels: what these modules are."""

    def __init__(self, model: Model, layout: Layout, mesh: Mesh, axes: Axes, device: torch.device, dtype: torch.dtype,
                 head_dtype: torch.dtype, weight_cache: WeightCache | None = None):
        pp, tp = axes.pp, axes.tp
        self.first, self.last = pp.index == 0, pp.index == pp.size - 1
        self.device, self.head_dtype, self.compute_dtype = device, head_dtype, torch.float32
        self.config = config(model)
        text = self.config.get_text_config()
        self.hidden, self.vocab = int(text.hidden_size), int(text.vocab_size)
        self.padding = text.pad_token_id
        self.tokens = Tokens(tp, True)
        self.sharded: Sharded | None = None
        with torch.device(device):
            rotary = LlamaRotaryEmbedding(text)
        self.frequencies = rotary.inv_freq.float()
        self.kernels = here(device.type, half=head_dtype == torch.bfloat16, buffered=not layout.zero,
                            biases=any(spec.name.endswith(".bias") for spec in model.params))
        self.chunks = [_chunk(text, model.layers, number, pp.size * layout.vpp, tp, axes.ep, rotary.attention_scaling,
                              self.kernels)
                       for number in range(pp.index, pp.size * layout.vpp, pp.size)]

        rank, undivided = axes.mesh.ranks[axes.mesh.index], replace(layout, zero=0)
        pieces = ((p, pieces_of_rank(p, model.layers, undivided, mesh, rank)) for p in parameters(model))
        self.whole_held: Held = {p.name: (p, found) for p, found in pieces if found}
        constant = not (model.home or model.sources)
        self.tied = OUTPUT not in {spec.name for spec in model.params} and model.kind == "causal_lm"
        self.blocks, unread = blocks(
            table_of(self.config.model_type, bool(self.kernels.linear)), self.whole_held, model.path,
            self._dtype(dtype, layout.zero), device, weight_cache if constant else None, self._places)
        self.whole: dict[str, nn.Parameter] = {n: p for block in self.blocks for n, p in block.parts.items()}
        self.held, self.parameters = {name: self.whole_held[name] for name in self.whole}, self.whole
        self.unread: Held = {name: self.held[name] for name in unread}
        if layout.zero:
            self.held = {name: (p, pieces_of_rank(p, model.layers, layout, mesh, rank)) for name, (p, _) in self.held.items()}
            self.parameters, self.unread = allot(model.path, self.held, dtype, device, None)
            self.sharded = self._shards(axes)
        self.base: dict[str, nn.Parameter] = {}
        self.base_held, self.unread_base = {}, {}
        self._ends(model, tp)
        lacking = [n for c in self.chunks for n, p in c.model.named_parameters() if p.is_meta]
        assert not lacking, f"nothing stands behind {lacking[0]} of GPTModel"
        if head_dtype == torch.bfloat16:
            for module in [m for chunk in self.chunks for m in chunk.model.modules()]:
                if isinstance(module, HeadNorm):
                    compute_rounded(module, "weight")
                elif module._parameters.get("bias") is not None:  # added outside of products, which autocast halves
                    compute_rounded(module, "bias")

    def forward(self, tokens: torch.Tensor, positions: torch.Tensor, packing: Packing,
                hidden: torch.Tensor | None, number: int = 0) -> torch.Tensor:
        """See `Stage.forward`."""
        chunk, count, rows = self.chunks[number], len(tokens), self.tokens.rows(len(tokens))
        if rows != count:
            tokens, positions, packing = fill(tokens, rows), fill(positions, rows), Filled(packing, rows)
            hidden = None if hidden is None else fill(hidden, rows)
        x = self._embedded(chunk, tokens) if hidden is None else self._mine(hidden)[:, None]
        angles = positions[:, None].float() * self.frequencies
        angles = torch.cat((angles, angles), -1)[:, None, None]
        sequences = Sequences(packing=packing)
        for layer in chunk.model.decoder.layers:
            x = self.perhaps_again(layer)(hidden_states=x, attention_mask=None, rotary_pos_emb=angles,
                                          packed_seq_params=sequences)[0]
        out = GatherAlike.apply(x[:, 0], self.tokens.tp) if self.tokens.able else x[:, 0]
        if chunk.last:
            out = chunk.model.decoder.final_layernorm(out)
        return out[:count].to(self.head_dtype if chunk.last else self.compute_dtype)

    def _embedded(self, chunk: Chunk, tokens: torch.Tensor) -> torch.Tensor:
        """[T, 1, H] of this rank's tokens. HuggingFace gives the padding token's row no gradient here."""
        x = chunk.model.embedding.word_embeddings(tokens[None])
        x = x if self.tokens.able else x.transpose(0, 1)
        if self.padding is not None and torch.is_grad_enabled():
            x = torch.where((self._mine(tokens) == self.padding)[:, None, None], x.detach(), x)
        return rounded(x.float()) if self.head_dtype == torch.bfloat16 else x

    def _mine(self, x: torch.Tensor) -> torch.Tensor:
        """This rank's tokens of what all ranks of tp have alike."""
        return PartOf.apply(x, self.tokens.tp) if self.tokens.able else x

    def _dtype(self, kept: torch.dtype, zero: int) -> Callable[[Parameter], torch.dtype]:
        """Of what modules compute with: what is filled for a minibatch comes as autocast would make it."""
        def found(parameter: Parameter) -> torch.dtype:
            matrix = parameter.layer is not None and len(parameter.spec.shape) > 1
            return self.head_dtype if zero and matrix else kept

        return found

    def _shards(self, axes: Axes) -> Sharded:
        def unit(apart: bool) -> Joined | None:
            mine = [b for b in self.blocks for name in list(b.parts)[:1]
                    if apart == (axes.ep.size > 1 and self.held[name][0].spec.experts > 0)]
            rows = [self.parameters[name] for block in mine for name in block.parts]
            return Joined(rows, mine, axes.copies if apart else axes.dp) if mine else None

        return Sharded(1, {}, [u for u in (unit(False), unit(True)) if u is not None])

    def _places(self, key: str, layer: int | None) -> Sequence[Seat]:
        """Where a tensor of a table stands in the chunks of this rank."""
        found: list[Seat] = []
        for chunk in self.chunks:
            if layer is not None and layer not in chunk.layers:
                continue
            names = [key] if layer is None else [key.replace(LAYER, str(layer - chunk.layers.start), 1)]
            if self.tied and key == _key(EMBEDDING):
                names.append(_key(OUTPUT))
            for name in names:
                found += _seats(chunk.model, name)
        return found

    def _ends(self, model: Model, tp: Axis) -> None:
        """Which rows of the vocabulary are here, and the head: [V_local, H] rows, or [1, H] of values and scores."""
        self.head: torch.Tensor | None = None
        self.score: torch.Tensor | None = self.whole.get(HEAD)
        self.vocab_start, self.head_axis = 0, Axis((tp.ranks[tp.index],), 0, None)
        if self.first:
            table = self.chunks[0].model.embedding.word_embeddings
            table.vocab_start_index, table.vocab_end_index = self.whole_held[EMBEDDING][1][0].box[0]
        if not self.last:
            return
        name = EMBEDDING if self.tied else OUTPUT
        if model.kind != "causal_lm":
            self.chunks[-1].model.output_layer = None
            return
        self.head, self.vocab_start = self.whole[name], self.whole_held[name][1][0].box[0][0]
        if self.whole_held[name][0].spec.split is not None:
            self.head_axis = tp


def _chunk(text: Any, layers: int, number: int, count: int, tp: Axis, ep: Axis, scaling: float, kernels: Kernels
           ) -> Chunk:
    """scaling: of rotary embeddings; both queries and keys would carry it."""
    run, first, last = stage_layers(layers, count, number), number == 0, number == count - 1
    model = gpt(text, len(run), tp, ep, first, last, kernels)
    for i, layer in zip(run, model.decoder.layers):
        core = layer.self_attention.core_attention
        core.layer, core.window = i, _window(text, i)
        core.scale *= scaling**2
    return Chunk(model, run, first, last)


def _window(text: Any, layer: int) -> int | None:
    """How many tokens a layer sees back, itself included; None for all. Families either say it of each layer or of
    all."""
    kinds = getattr(text, "layer_types", None)
    return getattr(text, "sliding_window", None) if kinds is None or kinds[layer] == "sliding_attention" else None


def _seats(model: nn.Module, name: str) -> list[Seat]:
    if EXPERT not in name:
        return _seat(model, name, None)
    found: list[Seat] = []
    while seat := _seat(model, name.replace(EXPERT, str(len(found))), len(found)):
        found += seat
    return found


def _seat(model: nn.Module, name: str, at: int | None) -> list[Seat]:
    """Empty where this chunk has not that end of the model, or a rank no further expert."""
    path, _, attribute = name.rpartition(".")
    try:
        module = model.get_submodule(path)
    except AttributeError:
        return []
    return [Seat(module, attribute, at)] if at is None or hasattr(module, attribute) else []


def _key(name: str) -> str:
    """The tensor of GPTModel behind which an end of the model stands."""
    return next(key for key, parts in ENDS.items() if name in parts)
