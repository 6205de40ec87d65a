"""What the attention of a layer needs in memory, in bytes per token, apart from what reads the residual stream.

In: a model of the plan, the parameters of a layer, a layout's tensor parallelism, and the kind of attention. Out:
`AttentionBytes`. Latent attention (DeepSeek-AI 2024, arXiv:2405.04434) makes queries, keys and values of all heads from
narrow latent vectors; its keys end in a part that all heads have, and its values may be narrower than its keys.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from typing import Literal

from rldsl.plan.model import Model, ParamSpec, Sizes

# fused: variable-length attention; packed: the same with keys and values that several query heads share, and prompts
# that several responses share; grid: torch's attention over a padded grid of sequences; plain: the same where torch has
# no kernel that leaves out the probabilities; math: the same by products in float32; composed: products of ours, and
# probabilities of float32
Kind = Literal["fused", "packed", "grid", "plain", "math", "composed"]


@dataclass(frozen=True, slots=True)
class AttentionBytes:
    """Bytes per token of the attention of one layer on one rank."""

    saved: int = 0  # kept for the backward pass
    forward: int = 0  # peak of a forward pass that saves nothing, with queries, keys and values
    backward: int = 0  # peak of the backward pass, besides what is saved
    # of these peaks, what there is only where probabilities are stored
    probabilities: int = 0


@dataclass(frozen=True, slots=True)
class Latent:
    """Latent attention: widths of its vectors."""

    queries: int  # of the latent vector of queries; 0: queries are made from hidden states
    keys: int  # of the latent vector of keys and values
    rotary: int  # of the part of a key that all heads have
    values: int  # of a head's values
    count: int  # how often a layer has it


@cache
def latent_attention(model: Model) -> Latent | None:
    """That of the layers of a model; None: it has another. All layers that have it are alike."""
    return _latent((*model.params, *model.base), model.sizes)


def value_width(model: Model) -> int:
    """Of the values of a head."""
    latent = latent_attention(model)
    return model.sizes.head_dim if latent is None else latent.values


def _latent(specs: Iterable[ParamSpec], sizes: Sizes) -> Latent | None:
    """By the names that all families give its matrices."""
    matrices = [(p, p.name.split(".")[-2]) for p in specs if p.stage == "layer" and len(p.shape) == 2]
    shapes = {module: p.shape for p, module in matrices}
    layers = [p.layer for p, module in matrices if module == "kv_b_proj"]
    up, down = shapes.get("kv_b_proj"), shapes.get("kv_a_proj_with_mqa")
    if up is None or down is None or not sizes.heads:
        return None
    rotary = down[0] - up[1]
    return Latent(shapes.get("q_a_proj", (0,))[0], up[1], rotary, up[0] // sizes.heads - (sizes.head_dim - rotary),
                  layers.count(layers[0]))


def attention_kind(model: Model, compute: int, device: str, padded: bool = False) -> Kind:
    """Which attention `backends/torch/model/attention.py` uses. compute: bytes of an element. device: "cuda" or "cpu".
    padded: whether sequences are a grid in any case. CUDA's kernels for float32 need as many key-value heads as heads.
    On CPUs `kernels/cpu_attention.py` has one for float32; without a C compiler, torch's operators keep more. torch's
    kernel for CPUs takes no values that are narrower than keys."""
    if model.sizes.composed_scores:
        return "composed"
    narrow = value_width(model) != model.sizes.head_dim
    if device == "cpu" and compute == 4 and not model.invariant and not padded:
        return "packed"
    if device == "cuda" and compute == 2 and not narrow and fused_kernels_take(model.sizes.head_dim):
        return "fused"
    if device == "cpu" and narrow:
        return "math"
    return "plain" if device == "cuda" and model.sizes.heads != model.sizes.kv_heads else "grid"


def fused_kernels_take(head_dim: int) -> bool:
    """Whether kernels for packed sequences take heads of this size (flash-attn's and torch's alike)."""
    return head_dim % 8 == 0 and head_dim <= 256


def attention_bytes(model: Model, tp: int, compute: int, kind: Kind, longest: int, trained: bool) -> AttentionBytes:
    """Of a layer that attends. compute: bytes of an element inside a layer. longest: tokens of the longest sequence.
    trained: whether its norms have gradients."""
    s, latent = model.sizes, latent_attention(model)
    heads, groups = -(-s.heads // tp), -(-s.kv_heads // tp)
    q, kv = heads * s.head_dim, groups * s.head_dim
    stored = 3 * 4 * heads * longest if kind in ("plain", "composed", "math") else 0  # scores, masked, their softmax
    if latent is not None:
        return _of_latent(latent, s, heads, compute, kind, longest, stored, trained)
    kept = _kept(q, kv, heads, compute, kind, longest)
    # with what padding, or kernels that need all heads, copy
    given = kept if kind == "packed" else compute * (4 * q + 4 * kv) + 4 * heads
    return AttentionBytes(kept, given + compute * q + stored, 3 * compute * q, stored)


def _kept(q: int, kv: int, heads: int, compute: int, kind: Kind, longest: int) -> int:
    """Queries, keys and values, what comes out, and one number a head for the backward pass. On a grid what comes out
    is there twice; without one, keys and values are repeated for each query head. Plainly, so they are on the grid, and
    each token has a probability for every token of the longest sequence; and so it is composed, where keys and values
    are repeated once."""
    match kind:
        case "fused":
            return 4 * compute * q + 4 * heads
        case "packed":
            return compute * (2 * q + 2 * kv) + 4 * heads
        case "grid":
            return compute * (3 * q + 2 * kv) + 4 * heads
        case "composed":  # the softmax, and in half precision what is multiplied
            return compute * 4 * q + (4 + compute * (compute != 4)) * heads * longest
    return compute * (6 * q + 2 * kv) + compute * heads * longest


def _of_latent(latent: Latent, s: Sizes, heads: int, compute: int, kind: Kind, longest: int, stored: int,
               trained: bool) -> AttentionBytes:
    """Keys are made for each head as values are, by one product, of which values are a part. Where attention is a
    kernel that reads them as they are, the whole product is kept."""
    q, out = heads * s.head_dim, heads * latent.values
    up = heads * (s.head_dim - latent.rotary) + out  # what the product makes of a latent vector
    # the norms of latent vectors: in half precision their inputs in float32, besides the normed numbers and the output
    normed = (8 if trained else 4 + compute * (compute != 4)) * (latent.queries + latent.keys)
    # queries as products and put together, the latent vector before and after its norm, rotated parts, the product and
    # keys; in half precision what was rotated is float32, and cast
    made = (compute * (q + latent.keys + latent.rotary + up + q) + 4 * latent.keys
            + 4 * (heads + 1) * latent.rotary + 4 * q + compute * q * (compute != 4))
    on_grid = compute * (2 * q + out)
    match kind:
        case "packed":
            kept, used, back = compute * (2 * q + up + out) + 4 * heads, compute * out + 4 * heads, compute * 3 * q
        case "math":  # all in float32; queries and keys are scaled, and copied so that their products read them
            kept = 4 * (2 * q + out) + 4 * heads * longest + compute * out
            used = on_grid * (compute != 4) + 4 * (2 * q + out) + 4 * 4 * q + 4 * heads * longest
            back = 4 * (2 * q + out)
        case "composed":
            kept = compute * (2 * q + 2 * out) + (4 + compute * (compute != 4)) * heads * longest
            used, back = on_grid + compute * out + stored, compute * 3 * q
        case _:
            kept = compute * (2 * q + 3 * out) + 4 * heads
            used, back = on_grid + 2 * compute * out + 4 * heads, compute * 3 * q
    n = latent.count
    return AttentionBytes(n * (normed + kept), made + used, back, stored)
