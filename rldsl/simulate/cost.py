"""What calls cost, counted: the shard of a model that a rank holds, and how often each part of it runs.

In: plan records. Out: counts, free of any machine. A pass over a shard is counted by the features that `rlc profile`
measures (`clusters/model.py`): calls, layers, tokens, pairs, outputs.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from math import ceil, log2, prod

from rldsl.plan.events import Generate
from rldsl.plan.model import Layout, Model, ParamSpec
from rldsl.sharding.boxes import itemsize, pieces, volume
from rldsl.sharding.dtypes import storage_dtype
from rldsl.sharding.layout import own_layers
from rldsl.simulate.lengths import Row


@dataclass(frozen=True, slots=True)
class Shard:
    """What one rank holds of a model under a layout, the largest of its tensor-parallel places.

    layers: of its stage. layer: elements of the matrices of one layer, mixed: of its experts among them, active: of
    what works on one token (of all experts, wherever they are, those that it chose); head: of the output embedding, on
    the last stage; elements: of all parameters; trained: of those that an optimizer changes, apart: of experts among
    them that other ranks of dp do not hold, rest: of what belongs to no layer. attention: width of its queries; cache:
    elements of keys and values, for a token and layer. item: bytes of an element as stored."""

    model: Model
    tp: int
    layers: int
    first: bool
    last: bool
    layer: int
    head: int
    elements: int
    trained: int
    attention: int
    cache: int
    item: int
    mixed: int = 0
    active: int = 0
    apart: int = 0
    rest: int = 0

    def read(self, tokens: float) -> float:
        """Elements of the matrices of one layer that are read for so many tokens: an expert without any is not."""
        rest = self.layer - self.mixed
        return rest + min(self.mixed, tokens * (self.active - rest))


@cache
def shard(model: Model, layout: Layout, stage: int) -> Shard:
    """Of a pipeline stage."""
    specs = (*model.params, *model.base)
    here = len(own_layers(model.layers, layout, stage))
    first, last = stage == 0, stage == layout.pp - 1
    sizes = model.sizes
    matrices = [s for s in specs if s.stage == "layer" and len(s.shape) > 1]
    layer = sum(_local(s, layout) for s in matrices)
    mixed = sum(_local(s, layout) for s in matrices if s.experts)
    chosen = sum(_local(s, layout) * layout.ep * sizes.chosen // s.experts for s in matrices if s.experts)
    apart = tuple(s for s in model.params if s.experts and layout.ep > 1)
    heads = ceil((sizes.heads or 1) / layout.tp)
    kv = max(1, ceil((sizes.kv_heads or sizes.heads or 1) / layout.tp))
    vocabulary = max((_local(s, layout) for s in specs if s.style in ("vocab", "head") and len(s.shape) > 1),
                     default=0)
    head = (vocabulary if model.kind == "causal_lm" else sizes.hidden) if last else 0
    outside = tuple(s for s in model.params if s.stage != "layer")

    def held(of: tuple[ParamSpec, ...]) -> int:
        return _held(of, layout, model.layers, stage)

    return Shard(
        model=model, tp=layout.tp, layers=here, first=first, last=last, layer=layer, head=head, elements=held(specs),
        trained=held(model.params), attention=heads * sizes.head_dim, cache=2 * kv * sizes.head_dim,
        item=4 if storage_dtype(model, layout.id) == "float32" else itemsize(model), mixed=mixed,
        active=layer - mixed + chosen,
        apart=held(apart), rest=held(outside))


def _local(spec: ParamSpec, layout: Layout) -> int:
    whole = sum(volume(p.box) for p in pieces(spec, layout.tp, 0)) if spec.split is not None else prod(spec.shape)
    return whole // layout.ep if spec.experts else whole


def _there(spec: ParamSpec, layout: Layout, layers: int, stage: int) -> int:
    """How many parameters of a spec the stage holds."""
    first, last = stage == 0, stage == layout.pp - 1
    return {"first": first, "last": last, "ends": first or last, "all": True,
            "layer": len(own_layers(spec.layers or layers, layout, stage))}[spec.stage]


def _held(specs: tuple[ParamSpec, ...], layout: Layout, layers: int, stage: int) -> int:
    return sum(_there(s, layout, layers, stage) * _local(s, layout) for s in specs)


@dataclass(frozen=True, slots=True)
class Counts:
    """calls: of the model. layers: of all calls. tokens: summed over layers, as are pairs (of a token and one before
    it, itself included, as a full square). outputs: tokens whose logits, value or score is wanted."""

    calls: float
    layers: float
    tokens: float
    pairs: float
    outputs: float

    def of(self, feature: str) -> float:
        return float(getattr(self, f"{feature}s"))


def micro(s: Shard, rows: float, row: Row, responses: float, cp: int = 1) -> Counts:
    """One micro-batch of `rows` sequences of `row.tokens`, divided over `cp` ranks; responses: tokens of each whose
    outputs are wanted."""
    tokens = rows * row.tokens / cp
    return Counts(1, s.layers, s.layers * tokens, s.layers * tokens * row.tokens, rows * responses / cp * s.last)


@dataclass(frozen=True, slots=True)
class Decoding:
    """What `generate` does on a shard: `waves` times `slots` sequences begin, of which `fresh` have a prompt that is
    new, then `steps` tokens of `active` sequences are made with `width` tokens of each in reach. With several lanes,
    those of all together, one after the other. shapes: of a step, that are met one after the other."""

    waves: float
    slots: float
    fresh: float
    steps: float
    active: float
    width: float
    shapes: float


def decoding(event: Generate, rows: float, row: Row, lanes: int = 1) -> Decoding:
    """rows: sequences of the shard. Finished sequences make room for waiting ones; until the last ends, the slab is
    read as far as the longest. The samples of a prompt share its prefill."""
    slots = min(rows, event.mbs or rows)
    if not slots:
        return Decoding(0, 0, 0, 0, 0, 0, 0)
    waves = ceil(rows / slots)
    longest = row.longest
    steps = longest if waves == 1 else max(rows * row.response / slots + (longest - row.response), longest)
    sampled = rows * max(row.response - 1, 0.0)  # the first token comes of the prefill
    steps = max(steps - waves, 0.0)
    each = slots / lanes
    return Decoding(waves * lanes, each, each / max(event.sampling.n, 1), steps * lanes,
                    sampled / (steps * lanes) if steps else 0.0, row.prompt + longest / 2,
                    lanes * widths(row.prompt, row.prompt + longest) if steps else 0.0)


def widths(least: float, most: float) -> float:
    """How many times the slab is read further on: four for each doubling from 64 tokens
    (`backends/torch/generate/scheduler.py`)."""
    return 1 + 4 * max(0.0, log2(max(most, 64.0) / max(least, 64.0)))


def prefill(s: Shard, d: Decoding, row: Row) -> Counts:
    tokens = d.fresh * row.prompt
    return Counts(d.waves, d.waves * s.layers, d.waves * s.layers * tokens, d.waves * s.layers * tokens * row.prompt,
                  d.waves * d.slots * s.last)


def decode(s: Shard, d: Decoding) -> Counts:
    """All steps together."""
    each = d.steps * d.active
    return Counts(d.steps, d.steps * s.layers, each * s.layers, each * s.layers * d.width, each * s.last)
