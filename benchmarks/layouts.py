"""Models and layout pairs that benchmarks of reallocations share."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from rldsl.plan.model import Layout, Mesh, Model, ParamSpec, Split
from tests.realloc.cases import Case


def llama(hidden: int, layers: int, heads: int, kv_heads: int, intermediate: int, vocab: int) -> Model:
    """The shapes of a Llama model in bfloat16."""
    head = hidden // heads

    def layer(name: str, shape: tuple[int, ...], split: Split | None = None) -> ParamSpec:
        return ParamSpec("model.layers.{}." + name, shape, "layer", layers, split)

    rows, kv, wide = Split(0, ((heads, head),)), Split(0, ((kv_heads, head),)), Split(0, ((intermediate, 1),))
    vocabulary = Split(0, ((vocab, 1),))
    specs = (
        ParamSpec("model.embed_tokens.weight", (vocab, hidden), "first", split=vocabulary, style="vocab"),
        layer("self_attn.q_proj.weight", (hidden, hidden), rows), layer("self_attn.k_proj.weight", (kv_heads * head, hidden), kv),
        layer("self_attn.v_proj.weight", (kv_heads * head, hidden), kv),
        layer("self_attn.o_proj.weight", (hidden, hidden), Split(1, ((heads, head),))),
        layer("mlp.gate_proj.weight", (intermediate, hidden), wide), layer("mlp.up_proj.weight", (intermediate, hidden), wide),
        layer("mlp.down_proj.weight", (hidden, intermediate), Split(1, ((intermediate, 1),))),
        layer("input_layernorm.weight", (hidden,)), layer("post_attention_layernorm.weight", (hidden,)),
        ParamSpec("model.norm.weight", (hidden,), "last"),
        ParamSpec("lm_head.weight", (vocab, hidden), "last", split=vocabulary, style="head"),
    )
    return Model("actor", "causal_lm", "", "bfloat16", specs, layers, "")


LLAMA_70B = llama(8192, 80, 64, 8, 28672, 128256)
TOY = llama(512, 16, 8, 8, 1536, 4096)  # all degrees to 8 divide it, as Megatron's planner wants


def case(model: Model, devices: int, src: tuple[int, int, int, int], dst: tuple[int, int, int, int]) -> Case:
    """src, dst: (first rank, ranks, tp, pp); what is left is dp."""
    made = []
    for name, (first, ranks, tp, pp) in (("src", src), ("dst", dst)):
        made += [Layout(f"{name} tp{tp} pp{pp} dp{ranks // (tp * pp)}", name, dp=ranks // (tp * pp), tp=tp, pp=pp),
                 Mesh(name, ((first, first + ranks),))]
    return Case(model, *made, devices)


def at_scale(ranks: int) -> dict[str, Case]:
    """Changes between training and generation of a 70B model, on nodes of 8."""
    half = ranks // 2
    return {
        "same ranks, tp8 pp4 -> tp8": case(LLAMA_70B, 8, (0, ranks, 8, 4), (0, ranks, 8, 1)),
        "same ranks, tp8 pp4 -> tp4": case(LLAMA_70B, 8, (0, ranks, 8, 4), (0, ranks, 4, 1)),
        "half and half, tp8 pp2 -> tp4": case(LLAMA_70B, 8, (0, half, 8, 2), (half, half, 4, 1)),
        "32 to all others, tp8 pp4 -> tp8": case(LLAMA_70B, 8, (0, 32, 8, 4), (32, ranks - 32, 8, 1)),
    }


def grid(model: Model) -> Iterator[Case]:
    """Same ranks, other ranks, and ranks that overlap; on nodes of 4 and of 8."""
    degrees = tuple(product((1, 2, 4, 8), (1, 2, 4)))
    for (first, ranks), devices in product(((0, 16), (16, 16), (8, 16)), (4, 8)):
        for (tp, pp), (tp2, pp2) in product(degrees, degrees):
            if tp * pp <= 16 and tp2 * pp2 <= 16 and (tp, pp, first) != (tp2, pp2, 0):
                yield case(model, devices, (0, 16, tp, pp), (first, ranks, tp2, pp2))
