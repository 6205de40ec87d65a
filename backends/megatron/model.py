"""A run of layers as Megatron's GPTModel, on the meta device.

In: a HuggingFace config, how many layers, which ends of the model belong to them, and the ranks of tp and ep. Out: the
module, whose parameters have no storage yet. Megatron knows only these two axes: pipeline stages are separate
GPTModels, and attention itself reaches the tokens of other ranks of cp. So its process groups are passed in
(`ProcessGroupCollection`), and its global `parallel_state` stays empty.

Our modules in its layer spec: attention over packed sequences, which the torch backend has already; norms, and the sum
of residual and sublayer, which keep the residual stream in float32 under autocast, as there; and expert dispatch
(`experts.py`). Linear layers are Megatron's, or Transformer Engine's (`kernels.py`).
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
from torch import nn

from rldsl.backends.megatron.experts import experts_class
from rldsl.backends.megatron.kernels import Kernels
from rldsl.backends.torch.model.attention import PackedAttention, Scores
from rldsl.runtime.backend import Axis

ProductAndBias = tuple[torch.Tensor, torch.Tensor | None]  # what a linear layer returns; the bias is still to be added


class SingleRankGroup:
    """A process group of only this rank: Megatron asks groups for their size even if nothing is divided."""

    def size(self) -> int:
        return 1

    def rank(self) -> int:
        return 0


@dataclass
class PackedSequences(PackedSeqParams):  # type: ignore[misc]  # megatron has no type hints
    """Packed sequences as every layer gets them. The fields of Megatron's class stay empty: rotary angles are given for
    each token, and attention uses the PackedAttention."""

    packed_attention: PackedAttention | None = None  # computes attention, instead of Megatron's own


class HeadNorm(nn.RMSNorm):
    """The norm of queries and keys, in float32."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float):
        super().__init__(hidden_size, eps=eps)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.float())


class Norm(HeadNorm):
    """The norm before a sublayer. Under autocast its output is cast to the dtype in which the sublayer's matrices
    multiply, so that what tp gathers and what is saved is half as large."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out, device = super().forward(x), x.device.type
        return out.to(torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else out


class CoreAttention(nn.Module):
    """Attention that uses the PackedAttention."""

    layer: int          # in the model, from 0; set after construction
    window: int | None  # how many tokens a query sees at most; set after construction

    def __init__(self, config: TransformerConfig, **_: Any):
        super().__init__()
        self.scale = config.kv_channels**-0.5
        self.layer = 0
        self.window = None

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any,
                packed_seq_params: PackedSequences, **__: Any) -> torch.Tensor:
        """query: [T, 1, H, D]; key, value: [T, 1, K, D]. Returns [T, 1, H * D]."""
        device = value.device.type
        # a float32 bias makes its sum float32, so under autocast all three are cast
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else value.dtype
        q, k, v = (x[:, 0].transpose(0, 1).to(dtype) for x in (query, key, value))
        packed_attention = packed_seq_params.packed_attention
        if packed_attention is None:
            raise ValueError("attention needs its PackedAttention")
        return packed_attention.attend(self.layer, q, k, v, Scores(self.scale, self.window)).flatten(1)[:, None]


class Attention(SelfAttention):  # type: ignore[misc]  # megatron has no type hints
    """Queries, keys and values are one after another in `linear_qkv`, as the boxes of its parts are."""

    def get_query_key_value_tensors(self, hidden_states: torch.Tensor, *_: Any, **__: Any
                                    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        mixed, _ = self.linear_qkv(hidden_states)
        heads = mixed.unflatten(-1, (-1, self.hidden_size_per_attention_head))
        kv = self.num_query_groups_per_partition
        q, k, v = heads.split([heads.shape[2] - 2 * kv, kv, kv], 2)
        if self.q_layernorm is not None:
            q, k = self.q_layernorm(q), self.k_layernorm(k)
        return q, k, v


def residual(training: bool, fused: bool) -> Callable[[ProductAndBias, torch.Tensor, float], torch.Tensor]:
    """Megatron's bias-dropout-add: the sum of a sublayer's output and its input; there is no dropout."""
    def add(output: ProductAndBias, before: torch.Tensor, _: float) -> torch.Tensor:
        out = before + output[0]
        return out if output[1] is None else out + output[1]

    return add


def gpt(config: Any, layers: int, tp: Axis, ep: Axis, first: bool, last: bool, kernels: Kernels) -> GPTModel:
    """A GPTModel without storage. config: of HuggingFace. layers: how many. first: whether it has the embedding; last:
    whether it has the last norm and the head."""
    fused = bool(kernels.weight_grads) and not kernels.linear  # Megatron's own layers, with Apex
    mcore_config, groups = transformer_config(config, layers, tp.size, ep.size, fused), _groups(tp, ep)
    if parallel_state._GLOBAL_MEMORY_BUFFER is None:  # into which its linear layers gather tokens
        parallel_state._set_global_memory_buffer()
    block = TransformerBlockSubmodules(layer_specs=[_layer(mcore_config, tp, ep, groups, kernels)] * layers,
                                       layer_norm=HeadNorm)
    with torch.device("meta"):
        model = GPTModel(mcore_config, block, _round_up(config.vocab_size, tp.size), config.max_position_embeddings,
                         pre_process=first, post_process=last, position_embedding_type="none",
                         pg_collection=groups)
    for layer in model.decoder.layers:
        layer.bias_dropout_add_exec_handler = nullcontext  # it would enable gradients during inference
    return model.eval()


def transformer_config(config: Any, layers: int, tp: int, ep: int, fused: bool) -> TransformerConfig:
    """A HuggingFace config as Megatron's. Parameters are allocated and filled elsewhere, so nothing is initialized. Of
    Megatron's fusions only that of a weight's gradient with the sum in `main_grad` is used (`fused`)."""
    biases = bool(getattr(config, "mlp_bias", False))
    experts = getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None)
    moe_options = {} if experts is None else {
        "num_moe_experts": experts, "moe_router_topk": config.num_experts_per_tok, "expert_model_parallel_size": ep,
        "moe_ffn_hidden_size": getattr(config, "moe_intermediate_size", None) or config.intermediate_size,
        # a softmax over the chosen experts is the same as one over all, normalized
        "moe_router_pre_softmax": not getattr(config, "norm_topk_prob", True),
        "moe_router_load_balancing_type": "none", "moe_aux_loss_coeff": 0.0}
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
        **moe_options)


def _layer(config: TransformerConfig, tp: Axis, ep: Axis, groups: ProcessGroupCollection, kernels: Kernels
           ) -> ModuleSpec:
    norms = HeadNorm if config.qk_layernorm else None
    column, row = _parallel_linear(kernels)
    mlp = ModuleSpec(MLP, submodules=MLPSubmodules(linear_fc1=column, linear_fc2=row))
    return ModuleSpec(TransformerLayer, submodules=TransformerLayerSubmodules(
        input_layernorm=Norm,
        self_attention=ModuleSpec(Attention, submodules=SelfAttentionSubmodules(
            linear_qkv=column, core_attention=CoreAttention, linear_proj=row,
            q_layernorm=norms, k_layernorm=norms)),
        self_attn_bda=residual,
        pre_mlp_layernorm=Norm,
        mlp=mlp if config.num_moe_experts is None else experts_class(tp, ep, groups, kernels),
        mlp_bda=residual))


def _parallel_linear(kernels: Kernels) -> tuple[type, type]:
    """Column-parallel and row-parallel layers."""
    if not kernels.linear:
        return ColumnParallelLinear, RowParallelLinear
    from rldsl.backends.megatron.te_layers import parallel_linear_classes

    return parallel_linear_classes(bool(kernels.weight_grads))


def _groups(tp: Axis, ep: Axis) -> ProcessGroupCollection:
    groups = ProcessGroupCollection()
    groups.tp = groups.expt_tp = tp.group if tp.size > 1 else SingleRankGroup()
    groups.ep = ep.group if ep.size > 1 else SingleRankGroup()
    groups.cp = groups.pp = groups.tp_cp = groups.tp_dp_cp = groups.expt_dp = SingleRankGroup()
    groups.embd = None
    return groups


def _round_up(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple
