"""The activations of a transformer layer, in bytes per token.

In: a model of the plan, a layout's tensor parallelism, and the kind of attention. Out: `LayerActivations`. The counts
are those of HuggingFace modules under torch autograd, tensor by tensor: what each operation saves for its backward
pass. They were found by counting storages op by op (`tests/memory/`), and hold for pre-norm blocks with RMS or layer
norm, gated or plain MLPs, grouped-query attention and adapters. A token goes through as many experts as it chose; with
`ep`, ranks are assumed to get as many tokens as they send. Full recomputation keeps only a layer's input (Chen et al.
2016).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from math import prod
from typing import NamedTuple

from rldsl.memory.attention import AttentionBytes, Kind, attention_bytes, attention_kind, latent_attention, value_width
from rldsl.plan.adapter_names import module_of
from rldsl.plan.model import ExpertBlock, Layout, Model, ParamSpec, Recurrence

ORDERS = 32  # bytes of what says where the row of a token for one expert is
COMPOSED = ("gelu_new", "gelu_fast", "quick_gelu", "gelu_python")  # activations made of many operations


@dataclass(frozen=True, slots=True)
class LayerActivations:
    """Bytes per token of one layer on one rank."""

    stream: int  # the residual stream between layers
    saved: int  # kept for the backward pass
    forward: int  # peak of a forward pass that saves nothing
    backward: int  # peak of the backward pass, besides what is saved
    final: int  # of the norm after the last layer: kept for the backward pass
    norm: int  # of the norm after the last layer: peak of its backward pass
    hidden: int  # the last hidden states, in the dtype that the head multiplies in
    gathered_kv: int  # keys and values gathered from the cp group, per token of the group; also kept for backward
    repeated: int  # keys and values of a token once more, next to another response to its prompt; also kept
    outputs: int  # of all operations of a forward pass together, which an operator trace holds
    outside: int = 0  # peak of a forward pass besides what a recurrent module needs
    after: int = 0  # of `saved`, what is gone when the backward pass of a recurrent module begins
    # bytes per sequence of modules that carry a state
    row_saved: int = 0  # kept for the backward pass
    row_forward: int = 0  # peak of a forward pass that saves nothing
    row_backward: int = 0  # peak of the backward pass, with what is saved
    state: int = 0  # between decoding steps
    step: int = 0  # peak of a decoding step, with a copy of the state
    row_outputs: int = 0  # as `outputs`, of one decoding step
    caches: bool = True  # whether it has keys and values
    # bytes of a pass, whatever its tokens, that are made of weights
    fixed: int = 0  # kept for the backward pass
    fixed_forward: int = 0  # peak of a forward pass that saves nothing
    fixed_outputs: int = 0  # as `outputs`

    def kept(self, tokens: int, rows: int) -> int:
        """For the backward pass."""
        return tokens * self.saved + rows * self.row_saved + self.fixed

    def forward_peak(self, tokens: int, rows: int) -> int:
        """Of a forward pass that saves nothing."""
        return self.fixed_forward + max(tokens * self.forward, (tokens * self.outside + rows * self.row_forward)
                                        * bool(self.row_forward))

    def backward_peak(self, tokens: int, rows: int) -> int:
        """Of the backward pass, besides what is kept."""
        of_rows = rows * (self.row_backward - self.row_saved) + tokens * (2 * self.stream - self.after)
        return max(tokens * self.backward, of_rows if self.row_saved else 0)

    def decoding(self, sequences: int, masked: int) -> int:
        """Peak of a decoding step. masked: bytes of the mask of each sequence."""
        return sequences * (max(self.forward, self.outside + self.step if self.step else 0) + masked) + \
            self.fixed_forward


@dataclass(frozen=True, slots=True)
class StackActivations:
    """Those of all layers of a model."""

    layers: tuple[LayerActivations, ...]  # one where all layers are alike, else one of each

    def of(self, layers: Sequence[int]) -> tuple[LayerActivations, ...]:
        """Of some layers, by their numbers."""
        return tuple(self.layers[0 if len(self.layers) == 1 else n] for n in layers)

    @property
    def any(self) -> LayerActivations:
        """For what does not differ."""
        return self.layers[0]


class _Kernels(NamedTuple):
    """Which operations of a layer take one kernel in decoding, which makes nothing but its result."""

    gates: bool  # gated products
    norms: bool  # of root mean squares
    rotary: bool  # embeddings of queries and keys

    @staticmethod
    def of(model: Model, compute: int, stream: int, device: str) -> _Kernels:
        there = device == "cpu" and compute == stream == 4 and not model.invariant
        sizes = model.sizes
        return _Kernels(there and sizes.gated_products, there and not sizes.other_norms, there and sizes.rotated_halves)


def gates_are_fused(invariant: bool, compute: int, device: str) -> bool:
    """Whether a kernel computes gated products (`backends/torch/model/fused_layers.py`), which keeps their factors and
    no silu(gate). On CPUs `kernels/cpu_kernels.py` has it; without a C compiler, torch's operators keep more."""
    return not invariant and compute == (2 if device == "cuda" else 4)


@cache
def stack_activations(model: Model, layout: Layout, compute: int, stream: int, device: str,
                      longest: int) -> StackActivations:
    """compute: bytes of an element inside a layer; stream: of the residual stream, 4 where float32 parameters run under
    autocast. device: "cuda" or "cpu". longest: tokens of the longest sequence."""
    # segments of context parallelism are padded
    kind = attention_kind(model, compute, device, padded=layout.cp > 1)
    fused = model.sizes.gated_products and gates_are_fused(model.invariant, compute, device)
    specs = tuple(p for p in (*model.params, *model.base) if p.stage == "layer")
    if not _layers_differ(model):
        alike = _layer(model, layout, compute, stream, kind, fused, longest, device, specs, None, None)
        return StackActivations((alike,))
    found: dict[object, LayerActivations] = {}
    layers = []
    for number in range(model.layers):
        own = tuple(p for p in specs if p.layer in (-1, number))
        states = next((r for r in model.sizes.recurrences if number in r.layers and r.itemsize == compute), None)
        block = next((b for b in model.sizes.expert_blocks
                      if number in b.layers and b.itemsize == compute and b.trained == (not model.base)), None)
        key = states, block, tuple((p.name.replace(f".{number}.", ".{}.", 1), p.shape) for p in own)
        if key not in found:
            found[key] = _layer(model, layout, compute, stream, kind, fused, longest, device, own, states, block)
        layers.append(found[key])
    return StackActivations(tuple(layers))


def _layers_differ(model: Model) -> bool:
    """Whether what layers need may not be the same in all of them."""
    return bool(model.sizes.recurrences or model.sizes.expert_blocks) or any(
        p.stage == "layer" and p.layer >= 0 for p in (*model.params, *model.base))


def _layer(model: Model, layout: Layout, compute: int, stream: int, kind: Kind, fused: bool, longest: int, device: str,
           specs: tuple[ParamSpec, ...], states: Recurrence | None, block: ExpertBlock | None) -> LayerActivations:
    """kind: of its attention. fused: whether a kernel computes the gated products of its MLP. specs: of the parameters
    of the layer. states: of its modules that carry a state. block: of experts in another form."""
    s, tp = model.sizes, layout.tp
    trained = not model.base
    h = s.hidden
    attends = states is None or states.attends
    # those of no module that carries a state
    outer = tuple(p for p in specs if states is None or not any(f".{m}." in p.name for m in states.modules))
    ways, inner, shared = _mlp_widths(model, outer, tp) if block is None else (0, 0, 0)
    gated = _gated(outer)
    heads, groups = -(-s.heads // tp), -(-s.kv_heads // tp)
    q, kv = (heads * s.head_dim, groups * s.head_dim) if attends else (0, 0)
    both = compute * groups * (s.head_dim + value_width(model)) * attends  # keys and values
    layer_norm = any(_is_norm(p, h) and p.name.endswith("bias") for p in specs)
    norms = sum(_is_norm(p, h) and p.name.endswith("weight") for p in specs) or 2
    routers = [p for p in outer if p.float32_product]  # which read what the norm before gives, in float32
    first, second = (_norm(h, compute, stream, n, layer_norm, trained) for n in _readers(
        model, outer, attends, gated, ways, shared, block is not None))
    second += stream * h if routers and trained and compute != stream else 0
    # a frozen weight does not ask for what it multiplies
    if more := 4 * h * (s.other_norms and trained):
        first, second = first + more, second + more
    # of families that also norm what a sublayer gives
    after = more + _norm(h, compute, stream, 0, layer_norm, trained)
    head_norms = _head_norm(q + kv, compute, stream, trained) if _has(specs, "q_norm") and attends else 0
    attention = attention_bytes(model, tp, compute, kind, longest, trained) if attends else AttentionBytes()
    if block is None:
        mlp = _mlp(model, layout, compute, stream, fused, outer, gated)
    else:  # counted as a whole; what tp does not divide sees a part of the tokens
        part = 1 if _divides_experts(specs) else tp
        mlp = _Mlp(block.saved // part, block.forward // part - stream * h, (block.backward - block.saved) // part,
                   block.outputs // part)
    if block is None and not inner:
        second, norms = 0, max(norms, 2)  # without an MLP there is one sublayer
    saved = (first + second + (norms - 2) * after + head_norms + attention.saved + mlp.saved
             + _adapters(model, layout, compute))
    held = stream * h * 4  # the input of the stage and of the layer, the stream, and what the sublayer reads
    attended_back = attention.backward
    if kind in ("composed", "math"):  # what the MLP keeps is gone then
        attended_back = max(attended_back, attended_back + attention.probabilities - second - mlp.saved)
    forward = held + max(mlp.forward, attention.forward)
    backward = max(mlp.backward, attended_back) + stream * h
    # half-precision models make a float32 copy of such a matrix in every pass
    wide = 4 * sum(prod(p.shape) for p in routers) if compute != stream else 0
    rounded = wide if any(not p.float32 for p in routers) else 0
    row: dict[str, int] = {}
    if states is not None:
        row = {"outside": held, "after": second + mlp.saved + (norms - 2) * after,
               "row_saved": states.saved.bytes(longest), "row_forward": states.forward.bytes(longest),
               "row_backward": states.backward.bytes(longest), "state": states.state,
               "step": states.step + states.state, "row_outputs": states.outputs + states.state}
    final = (stream + 4 if stream == 4 else 6) * h if not layer_norm else 4 * h
    return LayerActivations(stream * h, saved, forward, backward, final, 16 * h, compute * h,
                            both if layout.cp > 1 else 0, both * (kind != "packed"),
                            _outputs(specs, h, shared if ways else inner, q, kv, norms, layer_norm, s.activation,
                                     compute, stream, _Kernels.of(model, compute, stream, device)) + mlp.outputs,
                            **row, caches=attends, fixed=block.fixed if block is not None else rounded,
                            fixed_forward=block.fixed_forward if block is not None else rounded,
                            fixed_outputs=block.fixed_outputs if block is not None else
                            _router_copies(outer) if compute != stream else 0)


class _Mlp(NamedTuple):
    """Bytes per token of the MLP, or the experts, of a layer on one rank."""

    saved: int  # kept for the backward pass
    forward: int  # peak of a forward pass, besides the stream
    backward: int  # peak of the backward pass, besides what is saved
    outputs: int = 0  # of all operations of a forward pass, where `_outputs` does not count them


def _mlp(model: Model, layout: Layout, compute: int, stream: int, fused: bool, specs: tuple[ParamSpec, ...],
         gated: bool) -> _Mlp:
    """Of layers in the usual form. specs: of the parameters outside modules that carry a state. The rest as of
    `_layer`."""
    h, activation = model.sizes.hidden, model.sizes.activation
    ways, inner, shared = _mlp_widths(model, specs, layout.tp)
    each = 4 if gated else 5 if activation in COMPOSED else 2
    of_module = 3 if gated and fused else each  # of a token in an MLP that is no expert
    inside = 4 if model.lora is not None or activation in COMPOSED else 3
    if not ways:
        return _Mlp(compute * inner * of_module, inside * compute * inner, 2 * compute * inner)
    # the choice among all in float32, orders of rows, and what each expert reads, has inside and gives; frozen ones
    # keep no inputs of products
    own = inner * (each - 1) + h if model.base else inner * each + 2 * h
    saved = 4 * max(p.experts for p in specs) + ways * (ORDERS + compute * own) + compute * shared * of_module
    forward = max(_routed_forward(h, inner * inside, ways, compute, stream, layout.ep > 1), inside * compute * shared)
    outputs = _routed_outputs(h, max(p.experts for p in specs), ways, compute, stream, shared > 0)
    return _Mlp(saved, forward, _routed_backward(h, inner, ways, compute, stream, layout.ep > 1), outputs)


def _mlp_widths(model: Model, specs: tuple[ParamSpec, ...], tp: int) -> tuple[int, int, int]:
    """(to how many experts a token goes, width of an MLP or of an expert, width of what all tokens go through besides
    experts), on one rank, from the parameters of a layer outside modules that carry a state."""
    if any(p.experts for p in specs):
        return model.sizes.experts_per_token, -(-model.sizes.intermediate // tp), -(-_mlp_width(specs) // tp)
    bare = bool(model.sizes.recurrences or model.sizes.expert_blocks)  # whether layers may have no MLP
    return 0, -(-(_mlp_width(specs) or (0 if bare else model.sizes.intermediate)) // tp), 0


def _readers(model: Model, specs: tuple[ParamSpec, ...], attends: bool, gated: bool, ways: int, shared: int,
             block: bool) -> tuple[int, int]:
    """How many linear layers read the stream, each through its own cast, in attention and in the MLP. specs: outside
    modules that carry a state. block: whether experts have another form, which counts what they read."""
    latent = latent_attention(model) if attends else None
    attention = 2 * latent.count if latent is not None else 3 * attends
    if _fused_inputs(specs) and attends and latent is None:
        return 1, 0 if block else 1
    if block:
        return attention, 0
    if not ways:
        return attention, 2 if gated else 1
    router = not (model.base or any(p.float32_product for p in specs))  # a frozen one keeps no input
    return attention, router + (2 if gated else 1) * (shared > 0) + _has(specs, "shared_expert_gate")


def _routed_forward(h: int, inside: int, ways: int, compute: int, stream: int, divided: bool) -> int:
    """Peak of a forward pass through experts: what a token's experts read, with what is inside them, or weighed, and
    put in order, in the dtype of the router's weights. inside: width. divided: over ranks, to which rows are sent."""
    found = max(ways * compute * (h + inside), ways * h * (compute + 2 * stream) + stream * h)
    return max(found, ways * compute * (inside + 4 * h)) if divided else found


def _routed_backward(h: int, inner: int, ways: int, compute: int, stream: int, divided: bool) -> int:
    """Peak of the backward pass through experts, as `_routed_forward`: first of the order of rows."""
    found = max(3 * ways * stream * h, 2 * ways * compute * (inner + h))
    return max(found, ways * compute * (2 * inner + 4 * h)) if divided else found


def _routed_outputs(h: int, experts: int, ways: int, compute: int, stream: int, shares: bool) -> int:
    """Of the operations around experts: the router's logits, their float32 copy and probabilities, what is chosen of
    them with its numbers, and what experts give, which `_outputs` counts as the output of an MLP. An operator trace
    holds nothing of what is inside experts. shares: whether there is something that all tokens go through besides,
    which is weighed and added."""
    return (experts * (compute + 8) + ways * ORDERS) + (3 * stream if shares else stream - compute) * h


def _router_copies(specs: tuple[ParamSpec, ...]) -> int:
    """Of routers that are no linear layers, in a model of half precision: each step rounds their matrix to float32, and
    autocast casts that. specs: of a layer."""
    experts = max((p.experts for p in specs), default=0)
    routers = [p for p in specs if experts and len(p.shape) == 2 and p.shape[0] == experts and not p.experts]
    return sum((4 * (not p.float32) + 2 * (not p.float32_product)) * prod(p.shape) for p in routers)


def _divides_experts(specs: tuple[ParamSpec, ...]) -> bool:
    """Whether tp divides anything of the block with the experts of a layer."""
    block = {p.name.partition(".experts.")[0] for p in specs if ".experts." in p.name}
    return any(p.split is not None for p in specs if any(p.name.startswith(b + ".") for b in block))


class Moved(NamedTuple):
    """Elements that kernels between the matrix products of a layer read and write for a token in a forward pass, on
    average over the layers, of all ranks of tp together."""

    between: float  # of all but `ordered`
    ordered: float  # by putting rows in the order of their experts, and back


def elements_between_products(model: Model) -> Moved:
    """Each kernel reads what it needs and writes its result once: norms, two sums of the residual stream, rotary
    embeddings, attention besides its scores, the activation of the MLP, and the order of experts. Modules that carry a
    state are not among them."""
    specs = tuple(p for p in (*model.params, *model.base) if p.stage == "layer")
    if all(p.layer < 0 for p in specs) and not model.sizes.recurrences:
        return _between_products(model, specs)
    attending = {n: r.attends for r in model.sizes.recurrences for n in r.layers}
    each = [_between_products(model, tuple(p for p in specs if p.layer in (-1, n)), attending.get(n, True))
            for n in range(model.layers)]
    return Moved(sum(x.between for x in each) / len(each), sum(x.ordered for x in each) / len(each))


def _between_products(model: Model, specs: tuple[ParamSpec, ...], attends: bool = True) -> Moved:
    """specs: of one layer."""
    s = model.sizes
    h, q, kv = s.hidden, s.heads * s.head_dim * attends, s.kv_heads * s.head_dim * attends
    norms = sum(_is_norm(p, h) and p.name.endswith("weight") for p in specs) or 2
    rotary = not (_fused_inputs(specs) and any(_is_norm(p, h) and p.name.endswith("bias") for p in specs))
    ways = s.experts_per_token if any(p.experts for p in specs) else 0
    dense = _mlp_width(specs) or (0 if ways else s.intermediate)  # with experts what all tokens go through besides
    activated = (3 if _gated(specs) else 2) * (ways * s.intermediate + dense)
    return Moved(2 * norms * h + 6 * h + 2 * (rotary + _has(specs, "q_norm")) * (q + kv) + 2 * q + 2 * kv + activated,
                 4 * ways * h)


def _outputs(specs: tuple[ParamSpec, ...], h: int, inner: int, q: int, kv: int, norms: int, layer_norm: bool,
             activation: str, compute: int, stream: int, kernels: _Kernels) -> int:
    """A norm of the stream or of heads makes a square and two products. A rotary embedding makes the negated half, the
    rotated input, two products and their sum. Then come the linear layers, the activations and two residual sums. In
    half precision, the input of each linear layer is cast. A kernel makes one result."""
    norm = 1 if kernels.norms else 3
    normed = norms * (1 if layer_norm else norm) * h + 2 * h + (norm * (q + kv) if _has(specs, "q_norm") else 0)
    rotary = 0 if layer_norm and _fused_inputs(specs) else q + kv if kernels.rotary else 9 * (q + kv) // 2
    gated = 3 if kernels.gates else 4
    products = 2 * q + 2 * kv + 2 * h + inner * (gated if _gated(specs) else 10 if activation in COMPOSED else 2)
    cast = 0 if compute == stream else 5 * h + q + kv
    return stream * (normed + rotary) + compute * (products + cast)


def _norm(h: int, compute: int, stream: int, reads: int, layer_norm: bool, trained: bool) -> int:
    """Its input, the normed numbers, and its output once for each linear layer that reads it through a cast of its
    own; a norm whose weight stays does not keep the normed numbers. In float32 an RMS norm has its own gradient,
    which needs the normed numbers alone."""
    out = compute * h * (min(reads, 1) if compute == stream else reads)
    if layer_norm or stream == 4:
        return 4 * h + out
    return (4 + (stream if trained else 0)) * h + out


def _head_norm(width: int, compute: int, stream: int, trained: bool) -> int:
    """Of queries and keys, head by head (Qwen 3); input in float32 and the normed numbers, or in float32 these
    alone."""
    return 4 * width if compute == 4 else (4 + (compute if trained else 0)) * width


def _adapters(model: Model, layout: Layout, compute: int) -> int:
    """What adapters keep between their two factors."""
    if model.lora is None:
        return 0
    return compute * model.lora.r * sum(1 for p in model.params if p.stage == "layer" and module_of(p.name)) // 2


def _is_norm(p: ParamSpec, hidden: int) -> bool:
    module = p.name.split(".")[-2] if "." in p.name else ""
    of_heads = module.startswith(("q_", "k_"))
    return p.shape == (hidden,) and ("norm" in module or module.startswith("ln")) and not of_heads


def _mlp_width(specs: tuple[ParamSpec, ...]) -> int:
    """Of the first products of all MLPs together, or of the shared experts; 0: the layer has none."""
    matrices = [(p.name.split(".")[-2], p) for p in specs if len(p.shape) == 2 and not p.experts]
    widths = {p.name.rpartition(f".{module}.")[0]: p.shape[0] for module, p in matrices
              if module in ("gate_proj", "up_proj", "w1", "w3", "fc1")}
    return sum(widths.values()) or max((p.shape[0] // 2 for module, p in matrices
                                        if module in ("input_linear", "gate_up_proj")), default=0)


def _has(specs: tuple[ParamSpec, ...], module: str) -> bool:
    return any(f".{module}." in p.name for p in specs)


def _gated(specs: tuple[ParamSpec, ...]) -> bool:
    return any("gate" in p.name for p in specs)


def _fused_inputs(specs: tuple[ParamSpec, ...]) -> bool:
    """Whether one linear layer makes queries, keys and values."""
    return not _has(specs, "q_proj")
