"""A run of layers as Megatron's GPTModel, on the meta device.

In: a HuggingFace config, how many layers, which ends of the model belong to them, and the ranks of tp and ep. Out: the
module, whose parameters have no storage yet. Megatron knows these two alone: pipeline stages are GPTModels of their
own, and tokens of other ranks of cp are reached inside attention. So its process groups are given
(`ProcessGroupCollection`), and its global `parallel_state` stays empty.

Modules of ours in its layer spec: attention over packed sequences, which the torch backend has already; norms, and the
sum of residual and sublayer, which keep the residual stream in float32 under autocast, as there; and the way of tokens
to their experts (`experts.py`). Linear layers are Megatron's, or Transformer Engine's (`kernels.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules
from rldsl.backends.megatron.experts import experts_of
from rldsl.backends.megatron.kernels import Kernels
from rldsl.backends.torch.model.attention import Packing
from torch import nn

from rldsl.runtime.backend import Axis

Parts = tuple[torch.Tensor, torch.Tensor | None]  # what a linear layer gives: its product, and the bias to add


class Alone:
    """A process group of this rank alone: Megatron asks groups for their size also where nothing is divided."""

    def size(self) -> int:
        return 1

    def rank(self) -> int:
        return 0


@dataclass
class Sequences(PackedSeqParams):
    """Packed sequences as every layer gets them. The fields of Megatron's own stay empty: rotary angles are given for
    each token, and attention asks the packing."""

    packing: Packing | None = None


class HeadNorm(nn.RMSNorm):
    """Of queries and keys, in float32."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float):
        super().__init__(hidden_size, eps=eps)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.float())


class Norm(HeadNorm):
    """Before a sublayer, whose matrices read halves under autocast: so does what tp gathers, and what is kept."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out, kind = super().forward(x), x.device.type
        return out.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else out


class CoreAttention(nn.Module):
    """Attention that asks the packing. layer: in the model, from 0; window: how many tokens back it sees. Both are set
    when the layer has its place."""

    def __init__(self, config: TransformerConfig, **_: Any):
        super().__init__()
        self.scale = config.kv_channels**-0.5
        self.layer = 0
        self.window: int | None = None

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any,
                packed_seq_params: Sequences, **__: Any) -> torch.Tensor:
        """query: [T, 1, H, D]; key, value: [T, 1, K, D]. Returns [T, 1, H * D]."""
        kind = value.device.type  # a bias of float32 has made them so
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else value.dtype
        q, k, v = (x[:, 0].transpose(0, 1).to(dtype) for x in (query, key, value))
        assert packed_seq_params.packing is not None
        return packed_seq_params.packing.attend(self.layer, q, k, v, self.scale, self.window).flatten(1)[:, None]


class Attention(SelfAttention):
    """Queries, keys and values stand one after the other in `linear_qkv`, as the boxes of its parts do."""

    def get_query_key_value_tensors(self, hidden_states: torch.Tensor, *_: Any, **__: Any
                                    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        mixed, _ = self.linear_qkv(hidden_states)
        heads = mixed.unflatten(-1, (-1, self.hidden_size_per_attention_head))
        kv = self.num_query_groups_per_partition
        q, k, v = heads.split([heads.shape[2] - 2 * kv, kv, kv], 2)
        if self.q_layernorm is not None:
            q, k = self.q_layernorm(q), self.k_layernorm(k)
        return q, k, v


def residual(training: bool, fused: bool) -> Callable[[Parts, torch.Tensor, float], torch.Tensor]:
    """The sum of a sublayer's product and its input; there is no dropout."""
    def add(made: Parts, before: torch.Tensor, _: float) -> torch.Tensor:
        out = before + made[0]
        return out if made[1] is None else out + made[1]

    return add


def gpt(config: Any, layers: int, tp: Axis, ep: Axis, first: bool, last: bool, kernels: Kernels) -> GPTModel:
    """Without storage. first, last: whether it has the embedding, and the last norm and the head."""
    fused = bool(kernels.gradients) and not kernels.linear  # Megatron's own layers, with Apex
    mine, groups = transformer_config(config, layers, tp.size, ep.size, fused), _groups(tp, ep)
    if parallel_state._GLOBAL_MEMORY_BUFFER is None:  # where its linear layers gather tokens to
        parallel_state._set_global_memory_buffer()
    block = TransformerBlockSubmodules(layer_specs=[_layer(mine, tp, ep, groups, kernels)] * layers,
                                       layer_norm=HeadNorm)
    with torch.device("meta"):
        model = GPTModel(mine, block, _divisible(config.vocab_size, tp.size), config.max_position_embeddings,
                         pre_process=first, post_process=last, position_embedding_type="none",
                         pg_collection=groups)
    for layer in model.decoder.layers:
        layer.bias_dropout_add_exec_handler = nullcontext  # it would turn gradients on in inference
    return model.eval()


def transformer_config(config: Any, layers: int, tp: int, ep: int, fused: bool) -> TransformerConfig:
    """A HuggingFace config in Megatron's words. Everything is allotted and filled elsewhere, so nothing is initialised;
    of its fusions one is here, of a weight's gradient with the sum in `main_grad`."""
    biases = bool(getattr(config, "mlp_bias", False))
    experts = getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None)
    mixed = {} if experts is None else dict(
        num_moe_experts=experts, moe_router_topk=config.num_experts_per_tok, expert_model_parallel_size=ep,
        moe_ffn_hidden_size=getattr(config, "moe_intermediate_size", None) or config.intermediate_size,
        # softmax over the chosen alone is the same as over all, normalised
        moe_router_pre_softmax=not getattr(config, "norm_topk_prob", True),
        moe_router_load_balancing_type="none", moe_aux_loss_coeff=0.0)
    return TransformerConfig(
        num_layers=layers, hidden_size=config.hidden_size, num_attention_heads=config.num_attention_heads,
        num_query_groups=config.num_key_value_heads,
        kv_channels=getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
        ffn_hidden_size=config.intermediate_size, normalization="RMSNorm", layernorm_epsilon=config.rms_norm_eps,
        gated_linear_unit=True, activation_func=F.silu, add_bias_linear=biases,
        add_qkv_bias=config.model_type == "qwen2", qk_layernorm=config.model_type in ("qwen3", "qwen3_moe"),
        hidden_dropout=0.0, attention_dropout=0.0, tensor_model_parallel_size=tp, sequence_parallel=tp > 1,
        use_cpu_initialization=True, perform_initialization=False, gradient_accumulation_fusion=fused,
        bias_activation_fusion=False, bias_dropout_fusion=False, masked_softmax_fusion=False, apply_rope_fusion=False,
        **mixed)


def _layer(config: TransformerConfig, tp: Axis, ep: Axis, groups: ProcessGroupCollection, kernels: Kernels
           ) -> ModuleSpec:
    norms = HeadNorm if config.qk_layernorm else None
    column, row = _linear(kernels)
    mlp = ModuleSpec(MLP, submodules=MLPSubmodules(linear_fc1=column, linear_fc2=row))
    return ModuleSpec(TransformerLayer, submodules=TransformerLayerSubmodules(
        input_layernorm=Norm,
        self_attention=ModuleSpec(Attention, submodules=SelfAttentionSubmodules(
            linear_qkv=column, core_attention=CoreAttention, linear_proj=row,
            q_layernorm=norms, k_layernorm=norms)),
        self_attn_bda=residual,
        pre_mlp_layernorm=Norm,
        mlp=mlp if config.num_moe_experts is None else experts_of(tp, ep, groups, kernels),
        mlp_bda=residual))


def _linear(kernels: Kernels) -> tuple[type, type]:
    """Column-parallel and row-parallel layers."""
    if not kernels.linear:
        return ColumnParallelLinear, RowParallelLinear
    from rldsl.backends.megatron.engine import linear

    return linear(bool(kernels.gradients))


def _groups(tp: Axis, ep: Axis) -> ProcessGroupCollection:
    found = ProcessGroupCollection()
    found.tp = found.expt_tp = tp.group if tp.size > 1 else Alone()
    found.ep = ep.group if ep.size > 1 else Alone()
    found.cp = found.pp = found.tp_cp = found.tp_dp_cp = found.expt_dp = Alone()
    found.embd = None
    return found


def _divisible(count: int, by: int) -> int:
    return -(-count // by) * by
