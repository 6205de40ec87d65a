"""Work of calls, counted: the shard of a model that a rank holds, and how often each part of it runs.

In: plan records. Out: counts, independent of any machine. A pass over a shard is counted by the features that `rlc
profile` measures (`clusters/model.py`): calls, layers, tokens, pairs, outputs.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from math import ceil, log2, prod
from typing import Any

from rldsl.memory.activations import Moved, elements_between_products
from rldsl.memory.parameters import without_layouts
from rldsl.plan.model import Layout, Model, ParamSpec
from rldsl.plan.optimizers import param_options
from rldsl.sharding.boxes import itemsize, pieces, volume
from rldsl.sharding.dtypes import SIZES, float32_specs, storage_dtype
from rldsl.sharding.layout import own_layers
from rldsl.simulate.lengths import Row


@dataclass(frozen=True, slots=True)
class Shard:
    """What one rank holds of a model under a layout; of tensor-parallel ranks, the one that holds most."""

    model: Model  # the model, without the layouts that train or average it
    tp: int  # degree of tensor parallelism
    layers: int  # of its stage
    first: bool  # whether it is the first stage
    last: bool  # whether it is the last stage
    layer: float  # elements of the matrices of one layer; of layers that are not alike, on average
    head: int  # elements of the output embedding, on the last stage
    elements: int  # of all parameters
    float32: int  # elements of those that are float32 whatever `item` is
    trained: int  # elements that an optimizer changes
    attention: int  # width of the queries
    cache: int  # elements of keys and values, per token and layer
    item: int  # bytes of an element as stored
    experts: float = 0.0  # elements of `layer` that belong to experts
    active: float = 0.0  # elements of a layer that work on one token: of all experts, on any rank, the chosen ones
    local_experts: int = 0  # elements of `trained` in experts that the other ranks of the ep group do not hold
    outside_layers: int = 0  # elements of `trained` that belong to no layer
    # the products of a layer: (rows and columns of the matrix, how many of its kind work on a token, how many there are
    # here); of experts each is one
    products: tuple[tuple[int, int, float, int], ...] = ()
    moved: Moved = Moved(0.0, 0.0)  # by kernels between the products of a layer
    ep: int = 1  # degree of expert parallelism
    attending: float = 1.0  # the share of its layers that have attention
    # of layers that carry a state from token to token, per token and layer of the stage:
    scan: float = 0.0  # operations besides those of matrices
    scanned: float = 0.0  # bytes that operations of a forward pass write
    stepped: float = 0.0  # bytes of the states and of what operations of a decoding step write
    tower: float = 0.0  # operations of a forward pass of the vision tower, per token of an image, on the first stage
    tower_trained: bool = False  # whether any of its parameters is

    @property
    def weight_bytes(self) -> int:
        """Bytes of all parameters."""
        return self.elements * self.item + self.float32 * (SIZES["float32"] - self.item)

    def read(self, tokens: float) -> float:
        """Elements of the matrices of one layer that are read for `tokens` tokens: an expert without tokens is not. Of
        tokens that choose any experts alike, the expected number."""
        dense = self.layer - self.experts
        if not self.experts:
            return dense
        chosen = min((self.active - dense) / self.experts, 1.0)  # the share of the experts here that work on a token
        return dense + self.experts * (1.0 - float((1.0 - chosen) ** tokens))


def build_shard(model: Model, layout: Layout, stage: int) -> Shard:
    """The shard of a pipeline stage. It does not depend on the ranks, on cp or on `zero`, and on dp only through ep."""
    item = 4 if storage_dtype(model, layout.id) == "float32" else itemsize(model)
    divided = _without_ranks(layout.tp, layout.pp, layout.ep, layout.vpp)
    return _build_shard(without_layouts(model), item, divided, stage)


@cache
def _without_ranks(tp: int, pp: int, ep: int, vpp: int) -> Layout:
    """A layout that says only what shards depend on."""
    return Layout(f"{tp}.{pp}.{ep}.{vpp}", "", dp=ep, tp=tp, pp=pp, ep=ep, vpp=vpp)


@cache
def _build_shard(model: Model, item: int, layout: Layout, stage: int) -> Shard:
    """item: bytes of an element as stored."""
    specs = (*model.params, *model.base)
    here = len(own_layers(model.layers, layout, stage))
    first, last = stage == 0, stage == layout.pp - 1
    sizes = model.sizes
    matrices = [s for s in specs if s.stage == "layer" and len(s.shape) > 1]
    # the part of the layers here that have it: one that is not alike in all layers is there once for each of them
    part = {s.name: _num_parameters(s, layout, model.layers, stage) / here if s.layer >= 0 and here else 1
            for s in matrices}
    layer = sum(part[s.name] * _local_elements(s, layout) for s in matrices)
    experts = sum(part[s.name] * _local_elements(s, layout) for s in matrices if s.experts)
    chosen = sum(part[s.name] * (_local_elements(s, layout) * layout.ep * sizes.experts_per_token // s.experts)
                 for s in matrices if s.experts)
    local_experts = tuple(s for s in model.params if s.experts and layout.ep > 1)
    heads = ceil((sizes.heads or 1) / layout.tp)
    kv = max(1, ceil((sizes.kv_heads or sizes.heads or 1) / layout.tp))
    vocabulary = max((_local_elements(s, layout) for s in specs if s.style in ("vocab", "head") and len(s.shape) > 1),
                     default=0)
    head = (vocabulary if model.head.vocabulary else sizes.hidden) if last else 0
    outside = tuple(s for s in model.params if s.stage != "layer")

    def held(of: tuple[ParamSpec, ...]) -> int:
        return _num_elements(of, layout, model.layers, stage)

    return Shard(
        model=model, tp=layout.tp, layers=here, first=first, last=last, layer=layer, head=head, elements=held(specs),
        float32=held(float32_specs(specs)),
        trained=held(model.params), attention=heads * sizes.head_dim, cache=2 * kv * sizes.head_dim,
        item=item, experts=experts,
        active=layer - experts + chosen, local_experts=held(local_experts), outside_layers=held(outside),
        products=tuple(_product(s, layout, sizes.experts_per_token) for s in matrices if part[s.name]),
        moved=elements_between_products(model), ep=layout.ep, **_states(model, layout, stage), **_tower(model, first))


def _states(model: Model, layout: Layout, stage: int) -> dict[str, Any]:
    """What layers that carry a state add, per layer of a stage. Divided modules have as large a part of the state."""
    own = own_layers(model.layers, layout, stage)
    if not model.sizes.recurrences or not own:
        return {}
    attending, scan, scanned, stepped = len(own), 0.0, 0.0, 0.0
    for r in model.sizes.recurrences:
        if r.itemsize != itemsize(model):
            continue
        count = len(set(r.layers) & set(own))
        attending -= 0 if r.attends else count
        parts = layout.tp if _is_divided(model, r.modules) else 1
        scan += count * r.operations / parts
        scanned += count * r.written / parts
        stepped += count * (r.state + r.outputs) / parts
    return {"attending": attending / len(own), "scan": scan / len(own), "scanned": scanned / len(own),
            "stepped": stepped / len(own)}


def _is_divided(model: Model, modules: tuple[str, ...]) -> bool:
    return any(f".{m}." in s.name for s in (*model.params, *model.base) if s.split is not None for m in modules)


def _tower(model: Model, first: bool) -> dict[str, Any]:
    """Of the vision tower, which every rank of tp has as a whole."""
    found = next((t for t in model.sizes.towers if t.itemsize == itemsize(model)), None)
    if found is None or not first:
        return {}
    names = tuple(f"{m}." for m in found.modules)
    optimizer = model.optimizer
    return {"tower": float(found.operations), "tower_trained": optimizer is not None and any(
        s.name.startswith(names) and not param_options(optimizer, s.name, s).frozen for s in model.params)}


@cache
def orthogonalization(model: Model, layers: int) -> float:
    """Multiplications with which Muon makes the updates of `layers` layers orthogonal; 0 for other optimizers. An
    iteration with an m x n matrix, m <= n, has two products of m * m * n and one of m * m * m."""
    optimizer = model.optimizer
    if optimizer is None or optimizer.kind != "muon":
        return 0
    total = 0.0
    for spec in model.params:
        if spec.stage == "layer" and len(spec.shape) > 1:
            small, large = sorted(spec.shape[-2:])
            work = prod(spec.shape[:-2]) * (2 * small * small * large + small**3)
            total += work if spec.layer < 0 else work / model.layers  # only one layer has it
    return total * optimizer.ns_steps * layers


def _local_elements(spec: ParamSpec, layout: Layout) -> int:
    whole = sum(volume(p.box) for p in pieces(spec, layout.tp, 0)) if spec.split is not None else prod(spec.shape)
    return whole // layout.ep if spec.experts else whole


def _product(spec: ParamSpec, layout: Layout, chosen: int) -> tuple[int, int, float, int]:
    """As `Shard.products` has them. A rank of an ep group computes the tokens of all its ranks with its own experts."""
    elements = _local_elements(spec, layout)
    if not spec.experts:
        columns = spec.shape[1] if spec.split is None or spec.split.dim != 1 else ceil(spec.shape[1] / layout.tp)
        return max(elements // columns, 1), columns, 1.0, 1
    here = max(spec.experts // layout.ep, 1)
    rows, columns = spec.shape[-2:]
    if spec.split is not None and spec.split.dim == 2:
        columns = ceil(columns / layout.tp)
    return max(elements // here // columns, 1), columns, chosen * layout.ep * here / spec.experts, here


def _num_parameters(spec: ParamSpec, layout: Layout, layers: int, stage: int) -> int:
    """How many parameters of a spec a stage holds."""
    first, last = stage == 0, stage == layout.pp - 1
    return {"first": first, "last": last, "ends": first or last, "all": True,
            "layer": (spec.layer in own_layers(layers, layout, stage) if spec.layer >= 0 else
                      len(own_layers(spec.layers or layers, layout, stage)))}[spec.stage]


def _num_elements(specs: tuple[ParamSpec, ...], layout: Layout, layers: int, stage: int) -> int:
    return sum(_num_parameters(s, layout, layers, stage) * _local_elements(s, layout) for s in specs)


@dataclass(frozen=True, slots=True)
class WorkCounts:
    """How often each part of a shard runs."""

    calls: float  # of the model
    layers: float  # of all calls
    tokens: float  # summed over layers
    pairs: float  # (query, key) pairs of attention, counted as a full square and summed over layers that have it
    outputs: float  # tokens whose logits, value or score is needed
    images: float = 0.0  # tokens of images that the vision tower makes
    slots: float = 0.0  # slots of the KV cache that attend on their own, summed over layers

    def of(self, feature: str) -> float:
        return float(getattr(self, f"{feature}s"))


def count_micro_batch(s: Shard, rows: float, row: Row, responses: float, cp: int = 1, prompts: float = 1.0,
                      images: float = 0.0) -> WorkCounts:
    """One micro-batch of `rows` sequences of `row.tokens`, divided over `cp` ranks. responses: tokens of each sequence
    whose outputs are needed. prompts: the share of the sequences that compute their prompt. images: tokens of their
    images."""
    less = (1 - prompts) * row.prompt
    pairs = rows / cp * (row.tokens**2 - less * row.prompt)
    return WorkCounts(1, s.layers, s.layers * rows * (row.tokens - less) / cp,
                      s.layers * pairs * s.attending, rows * responses / cp * s.last, images)


@dataclass(frozen=True, slots=True)
class DecodePlan:
    """What `generate` does on a shard. With several groups of sequences (one per pipeline stage), those of all groups
    together, one after the other."""

    waves: float  # how often new sequences begin
    slots: float  # sequences that begin in a wave
    prefilled: float  # of these, sequences whose prompt is prefilled; the others share it
    steps: float  # decoding steps
    active: float  # sequences that get a token in a step
    width: float  # tokens of a sequence in the KV cache, on average
    shapes: float  # different shapes of a decoding step


def num_cache_widths(least: float, most: float) -> float:
    """How many widths the KV cache is read in while sequences grow from `least` to `most` tokens: four per doubling
    from 64 tokens on (`backends/torch/generate/scheduler.py`)."""
    return 1 + 4 * max(0.0, log2(max(most, 64.0) / max(least, 64.0)))


def count_prefill(s: Shard, d: DecodePlan, row: Row, images: float = 0.0) -> WorkCounts:
    """All prefills together. images: tokens of the images of a prompt."""
    tokens = d.prefilled * row.prompt
    layers = d.waves * s.layers
    return WorkCounts(d.waves, layers, layers * tokens, layers * tokens * row.prompt * s.attending,
                      d.waves * d.slots * s.last, d.waves * d.prefilled * images)


def count_decode(s: Shard, d: DecodePlan) -> WorkCounts:
    """All decoding steps together."""
    each = d.steps * d.active
    return WorkCounts(d.steps, d.steps * s.layers, each * s.layers, each * s.layers * d.width * s.attending,
                      each * s.last)
