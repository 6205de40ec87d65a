"""A tiny config for every causal language model that the installed transformers has, and directories made of them."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

from tests.tiny import make_tokenizer

# what the sizes of a family may be called; a config gets those that it has
SIZES: dict[str, Any] = dict(
    hidden_size=32, n_embd=32, d_model=32, embedding_size=32, emb_dim=32, dim_model=32, embed_dim=32,
    intermediate_size=48, n_inner=48, d_ff=48, ffn_dim=48, dff=48, dim_ff=48, mlp_hidden_size=48,
    decoder_ffn_dim=48, encoder_ffn_dim=48, ffn_hidden_size=48,
    num_hidden_layers=4, n_layer=4, num_layers=4, n_layers=4, decoder_layers=4, encoder_layers=1,
    num_attention_heads=4, n_head=4, num_heads=4, n_heads=4, decoder_attention_heads=4, encoder_attention_heads=4,
    num_key_value_heads=2, head_dim=8, dim_head=8, vocab_size=46, num_mem_blocks=1,
    max_position_embeddings=256, n_positions=256, n_ctx=256, max_sequence_length=256, max_target_positions=256,
    num_experts=4, num_local_experts=4, n_routed_experts=4, moe_num_experts=4, num_experts_per_tok=2,
    num_experts_per_token=2, moe_intermediate_size=24, shared_expert_intermediate_size=16,
    moe_shared_expert_intermediate_size=16, shared_intermediate_size=16, n_shared_experts=1, num_shared_experts=1,
    moe_num_shared_experts=1, n_group=1, topk_group=1, first_k_dense_replace=1, moe_k=2, moe_topk=2, top_k_experts=2,
    intermediate_size_mlp=48, expert_ffn_hidden_size=24, zero_expert_num=2,
    kv_lora_rank=16, q_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=8, qk_head_dim=16,
    linear_num_value_heads=4, linear_num_key_heads=2, linear_key_head_dim=8, linear_value_head_dim=8,
    mamba_n_heads=4, mamba_d_head=16, mamba_d_state=8, mamba_n_groups=1, mamba_expand=2, mamba_num_heads=4,
    mamba_head_dim=16, mamba_d_ssm=64, ssm_state_size=8, state_size=8, n_groups=1, conv_kernel=4, mamba_dt_rank=4,
    time_step_rank=4, lru_width=32, attention_window_size=8, index_n_heads=2, index_head_dim=16, index_topk=64,
    sliding_window=8, attention_chunk_size=8, rotary_dim=4, hidden_size_per_layer_input=8,
    vocab_size_per_layer_input=46, max_2d_position_embeddings=16, conv_dim=32, block_dim=32,
    pad_token_id=0, eos_token_id=1, bos_token_id=None, decoder_start_token_id=1)
# what some families need besides
EXTRA: dict[str, dict[str, Any]] = {
    "bamba": dict(attn_layer_indices=[1, 3]),
    "cohere_compass_text": dict(layer_types=["full_attention", "sliding_attention"] * 2,
                                rope_parameters={kind: {"rope_type": "default", "rope_theta": 10000.0}
                                                 for kind in ("full_attention", "sliding_attention")}),
    "cwm": dict(bos_token_id=1),
    "dots3_note_text": dict(num_key_value_heads=4),
    "gemma3n_text": dict(layer_types=["sliding_attention", "full_attention"] * 2, num_kv_shared_layers=0),
    "gpt_neo": dict(num_layers=4, attention_types=[[["global", "local"], 2]]),
    "lfm2": dict(layer_types=["conv", "full_attention"] * 2),
    "lfm2_moe": dict(layer_types=["conv", "full_attention"] * 2, num_dense_layers=1),
    "mamba2": dict(expand=2, num_heads=4, head_dim=16),
    "modernbert-decoder": dict(bos_token_id=1),
    "zamba2": dict(layers_block_type=["mamba", "hybrid"] * 2),
    "zaya": dict(num_experts_per_tok=1),
    "granitemoehybrid": dict(layer_types=["mamba", "attention"] * 2),
}
ENCODERS = ("bert", "bert-generation", "big_bird", "camembert", "data2vec-text", "electra", "ernie", "megatron-bert",
            "rembert", "roberta", "roberta-prelayernorm", "roc_bert", "roformer", "xlm-roberta", "xlm-roberta-xl",
            "xmod")


def tiny_config(family: str, **more: Any) -> Any:
    """The config of a tiny model of `family`: a decoder where the family can be an encoder, too."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    kind = CONFIG_MAPPING[family]
    own = own_keys(kind)
    keys = own | set(getattr(kind, "attribute_map", {}))
    sizes = {k: v for k, v in SIZES.items() if k in keys} | EXTRA.get(family, {}) | more
    mapped = set(getattr(kind, "attribute_map", {})) - own
    sizes = {k: v for k, v in sizes.items() if k not in mapped or k in EXTRA.get(family, {}) | more}
    if "layer_types" in keys - mapped and "layer_types" not in sizes:
        kinds = list(dict.fromkeys(getattr(kind(), "layer_types", None) or ()))
        sizes |= {"layer_types": (kinds * 4)[:4]} if kinds else {}
    if "kv_lora_rank" in sizes:  # every head has keys and values of its own
        sizes["num_key_value_heads"] = 4
    if family in ENCODERS:
        sizes["is_decoder"] = True
    return kind(**sizes)


def own_keys(kind: Any) -> set[str]:
    """The settings of a config class."""
    return {f.name for base in kind.__mro__ if is_dataclass(base) for f in fields(base)}


def make(directory: Path, family: str, **more: Any) -> str:
    """A directory with a tiny model of `family`, with matrices wide enough to make differences visible, and small
    vectors that are not what they begin with."""
    import torch
    from transformers import AutoModelForCausalLM

    make_tokenizer(directory)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(tiny_config(family, **more), dtype=torch.float32)
    draw = torch.Generator().manual_seed(1)
    with torch.no_grad():
        kept = model.state_dict()
        biases = (b for n, b in model.named_buffers() if n in kept and "bias" in n)
        for x in (*model.parameters(), *biases):
            if x.is_floating_point():
                wide = 0.15 if x.dim() > 1 else 0.1
                x.copy_(torch.randn(x.shape, generator=draw) * wide + (0 if x.dim() > 1 else x))
    model.save_pretrained(str(directory))
    return str(directory)
