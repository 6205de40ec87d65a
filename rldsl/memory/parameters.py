"""Bytes of a model's parameters at one cell of a layout.

In: parameter specs, layouts, cells. Out: elements or bytes, in closed form: equal layers of a rank are counted, not
listed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from math import prod

from rldsl.plan.model import Layout, Model, Optimizer, ParamSpec
from rldsl.plan.optimizers import CHUNK, NEEDS_COMPLETE, ParamOptions, param_options, state_bytes
from rldsl.sharding.boxes import Box, Cell, itemsize, pieces_at, volume
from rldsl.sharding.dtypes import parameter_size, storage_dtype
from rldsl.sharding.gradient_leaves import LEAVES
from rldsl.sharding.layout import own_layers, stage_layers
from rldsl.sharding.sum_blocks import summed_input

FLOAT = 4  # bytes of float32
# bytes per element of a parameter while Muon or Adafactor updates it: the update in float32 and what it is made from,
# and where the parameter is divided, the gathered parameter, gradient and their buffers
_STEP, _DIVIDED_STEP = 16, 32
_QUANTIZED_STEP = 48  # of a chunk of 8-bit AdamW: two moments, their codes, numbers of blocks, scales and results


@dataclass(frozen=True, slots=True)
class Copy:
    """A model under a layout, at one of its cells."""

    model: Model  # the model
    layout: Layout  # the layout
    cell: Cell  # its place in the layout

    @property
    def trained(self) -> bool:
        """Whether gradients and optimizer state are here; then the parameters are float32."""
        return self.model.train_layout == self.layout.id

    @property
    def compute(self) -> int:
        """Bytes of an element inside a layer."""
        return itemsize(self.model)

    @property
    def stored(self) -> int:
        """Bytes of an element of `model.params`, of those that are not float32 everywhere."""
        return FLOAT if storage_dtype(self.model, self.layout.id) == "float32" else itemsize(self.model)

    @property
    def stream(self) -> int:
        """Bytes of an element of the residual stream."""
        return FLOAT

    @property
    def layers(self) -> int:
        return sum(self.chunks)

    @property
    def chunks(self) -> tuple[int, ...]:
        """Layers of each chunk."""
        pp, count = self.layout.pp, self.layout.pp * self.layout.vpp
        return tuple([len(stage_layers(self.model.layers, count, s)) for s in range(self.cell.pp_rank, count, pp)])

    @property
    def first(self) -> bool:
        return self.cell.pp_rank == 0

    @property
    def last(self) -> bool:
        return self.cell.pp_rank == self.layout.pp - 1

    @property
    def shared(self) -> tuple[ParamSpec, ...]:
        """What nothing writes: ranks have it once, whichever models and layouts use it."""
        m = self.model
        return m.base or (() if m.train_layout or m.updated_from else m.params)


@cache
def without_layouts(model: Model) -> Model:
    """The model as one that no layout trains or averages: equal for models that differ in these alone."""
    return replace(model, train_layout="", ema_layout="")


def elements(specs: Sequence[ParamSpec], copy: Copy) -> int:
    """How many elements of some parameters a rank computes with."""
    return sum(len(held(s, copy)) * _size(s, copy) for s in specs)


def resting(copy: Copy) -> int:
    """How many elements of `model.params` a rank holds between calls. `zero` divides rows; the first
    zero shard has most."""
    return _resting(_at_rest(copy))


@lru_cache(maxsize=65536)
def _at_rest(copy: Copy) -> Copy:
    """The copy under a layout that says only how parameters are divided between calls. Equal for copies that hold the
    same elements then, so what is counted of one of them is counted once for all."""
    x = copy.layout
    dp, zero = (x.dp, 1) if x.zero else (x.ep, 0)
    name = f"{dp}.{x.tp}.{x.pp}.{x.ep}.{x.vpp}"  # which decides the hash
    divided = Layout(name, "", dp=dp, tp=x.tp, pp=x.pp, ep=x.ep, zero=zero, vpp=x.vpp)
    return Copy(without_layouts(copy.model), divided, copy.cell)


@lru_cache(maxsize=65536)
def in_passes(copy: Copy) -> Copy:
    """The copy under a layout that says only how parameters are divided while a call runs. Equal for copies that
    compute with the same elements, so what is counted of one of them is counted once for all."""
    x = copy.layout
    divided = Layout(f"passes {x.tp}.{x.pp}.{x.ep}.{x.vpp}", "", dp=x.ep, tp=x.tp, pp=x.pp, ep=x.ep, vpp=x.vpp)
    return Copy(without_layouts(copy.model), divided, copy.cell)


@cache
def _resting(copy: Copy) -> int:
    return sum(len(held(s, copy)) * box_elements(s, copy.layout, copy.cell.part, rest=True)
               for s in copy.model.params)


@cache
def resting_bytes(copy: Copy) -> int:
    """Bytes of `model.params` that a rank holds between calls."""
    return copy.stored * resting(copy) + sum(
        (FLOAT - copy.stored) * len(held(s, copy)) * box_elements(s, copy.layout, copy.cell.part, rest=True)
        for s in copy.model.params if s.float32)


@cache
def base_bytes(copy: Copy) -> int:
    """Bytes of `model.base` that a rank holds."""
    return sum(parameter_size(s, copy.compute) * elements([s], copy) for s in copy.model.base)


@cache
def trained(copy: Copy) -> int:
    """How many elements with a gradient a rank holds between calls: `resting`, without what is frozen."""
    return sum(count * numel for _, numel, own, count in _trained_parameters(copy) if not own.frozen)


@cache
def any_trained(copy: Copy, modules: tuple[str, ...]) -> bool:
    """Whether a parameter here of some modules is trained. modules: how its name begins."""
    return copy.trained and any(not own.frozen and count for spec, _, own, count in _trained_parameters(copy)
                                if spec.name.startswith(tuple(f"{m}." for m in modules)))


def optimizer_state(copy: Copy) -> int:
    """Bytes of the optimizer state of a rank."""
    return _optimizer_state(_at_rest(copy))


@cache
def _optimizer_state(copy: Copy) -> int:
    optimizer = copy.model.optimizer
    return 0 if optimizer is None else sum(count * state_bytes(optimizer, own.rule, spec.shape, numel)
                                           for spec, numel, own, count in _trained_parameters(copy) if not own.frozen)


@cache
def largest_step(copy: Copy) -> int:
    """The most bytes that an update of one parameter needs besides gradients and state: Muon and Adafactor work on one
    complete parameter after another, 8-bit AdamW on one chunk after another."""
    found = [0]
    for spec, numel, own, _ in _trained_parameters(copy):
        whole = prod(spec.shape)
        if own.rule in NEEDS_COMPLETE and not own.frozen:
            found.append(whole * (_DIVIDED_STEP if numel < whole else _STEP))
        elif own.rule == "adamw_8bit" and not own.frozen:
            found.append(_QUANTIZED_STEP * min(numel, max(CHUNK, whole // spec.shape[0])))
    return max(found)


def _trained_parameters(copy: Copy) -> tuple[tuple[ParamSpec, int, ParamOptions, int], ...]:
    """The parameters that a rank holds between calls: of each spec, the elements of one layer, and in how many layers
    it is trained alike."""
    return _trained_at_rest(_at_rest(copy))


@lru_cache(maxsize=1024)
def _trained_at_rest(copy: Copy) -> tuple[tuple[ParamSpec, int, ParamOptions, int], ...]:
    optimizer, found = copy.model.optimizer, []
    for spec in copy.model.params if optimizer is not None else ():
        numel = box_elements(spec, copy.layout, copy.cell.part, rest=True)
        for own, count in _options_of_layers(optimizer, spec, tuple(held(spec, copy))):
            found.append((spec, numel, own, count))
    return tuple(found)


@lru_cache(maxsize=65536)
def _options_of_layers(optimizer: Optimizer, spec: ParamSpec,
                       layers: tuple[int, ...]) -> tuple[tuple[ParamOptions, int], ...]:
    """How a spec is trained in some layers, and in how many of them."""
    return tuple(Counter(param_options(optimizer, spec.name.replace("{}", str(layer), 1), spec)
                         for layer in layers).items())


def held(spec: ParamSpec, copy: Copy) -> Sequence[int]:
    """The layers of which a rank has a spec; one for what belongs to none."""
    if spec.stage == "layer":
        own = own_layers(copy.model.layers, copy.layout, copy.cell.pp_rank)
        return own if spec.layer < 0 else [spec.layer] * (spec.layer in own)
    there = {"first": copy.first, "last": copy.last, "ends": copy.first or copy.last, "all": True}
    return range(int(there[spec.stage]))


@cache
def boxes(spec: ParamSpec, layout: Layout, part: int, rest: bool = False) -> tuple[Box, ...]:
    """The boxes of a parameter at a part. rest: at rest, where `zero` divides it further; the first zero shard has
    most."""
    return tuple(p.box for p in pieces_at(spec, layout if rest else replace(layout, zero=0), part, 0))


@cache
def box_elements(spec: ParamSpec, layout: Layout, part: int, rest: bool = False) -> int:
    """How many elements the boxes of a parameter at a part have. rest: as of `boxes`."""
    return sum(map(volume, boxes(spec, layout, part, rest)))


def new_bytes(mine: Copy, earlier: Iterable[Copy]) -> int:
    """Bytes of what is shared in `mine` that none of `earlier`, on the same rank, brought already."""
    same = [c for c in earlier if (c.model.path, c.model.dtype, c.layout.backend)
            == (mine.model.path, mine.model.dtype, mine.layout.backend)]
    total = 0
    for spec in mine.shared:
        own, here = boxes(spec, mine.layout, mine.cell.part), set(held(spec, mine))
        for other in same:
            twin = next((s for s in other.shared if s.name == spec.name), None)
            if twin is not None and boxes(twin, other.layout, other.cell.part) == own:
                here.difference_update(held(twin, other))
        total += len(here) * sum(map(volume, own)) * parameter_size(spec, itemsize(mine.model))
    return total


def largest(copy: Copy) -> int:
    """Elements of the largest parameter here."""
    return max((_size(s, copy) for s in (*copy.model.params, *copy.model.base) if held(s, copy)), default=0)


@cache
def largest_weight(copy: Copy) -> int:
    """Elements of the largest trained matrix of a layer, as this rank holds it."""
    return _largest_weight(in_passes(copy))


@cache
def _largest_weight(copy: Copy) -> int:
    return max((_size(s, copy) for s in copy.model.params if s.stage == "layer" and len(s.shape) > 1), default=0)


def _size(spec: ParamSpec, copy: Copy) -> int:
    return box_elements(spec, copy.layout, copy.cell.part)


@cache
def linear_elements(copy: Copy) -> int:
    """Elements of all matrices of the layers here that autocast casts: what it keeps a half-precision copy of."""
    return elements([s for s in copy.model.params if s.stage == "layer" and len(s.shape) > 1 and not s.float32_product],
                    copy)


@cache
def row_parallel_elements(copy: Copy) -> int:
    """Elements of the layers' matrices here whose inputs tp divides, without experts: what an invariant model keeps a
    copy of in blocks."""
    return elements([s for s in _linear_layers(copy) if summed_input(s)], copy)


@cache
def _linear_layers(copy: Copy) -> list[ParamSpec]:
    return [s for s in (*copy.model.params, *copy.model.base)
            if s.stage == "layer" and not s.experts and len(s.shape) > 1]


@cache
def vocabulary(copy: Copy) -> tuple[int, bool]:
    """(rows of the output embedding on this rank, whether ranks have different ones)."""
    size = copy.model.sizes.vocab
    divided = any(s.split is not None and s.style in ("vocab", "head") for s in (*copy.model.params, *copy.model.base))
    return (-(-size // copy.layout.tp), copy.layout.tp > 1) if divided else (size, False)


@cache
def tied_gradient(copy: Copy) -> int:
    """Bytes of the gradient of an output embedding that waits for that of the input embedding, which is the same
    parameter here; 0 where it is kept apart or another rank has the other end."""
    if not (copy.first and copy.last) or copy.model.invariant_training:
        return 0
    return group_bytes([s for s in copy.model.params if s.stage == "ends" and len(s.shape) > 1], copy, FLOAT)


def summed_in_leaves(copy: Copy) -> dict[str, int]:
    """Holder -> bytes of the sums of gradients that a train call keeps of a model with `invariant_training`, besides
    the gradients themselves (`backends/torch/model/leaf_sums.py`). Those under `zero` are in `zero_memory.py`."""
    sums, tied = leaf_sums(copy), [s for s in copy.model.params if s.stage == "ends"] if copy.last else []
    if not sums:
        return {}
    divided = copy.layout.cp > 1  # those of a pass are not those of the leaf
    head = (1 + sums + divided) * group_bytes(tied, copy, FLOAT)
    experts = FLOAT * sum(len(held(s, copy)) * box_elements(s, copy.layout, copy.cell.part)
                          for s in copy.model.params if s.experts) if copy.layout.ep > 1 else 0
    dense = 0 if copy.layout.zero else (sums + divided) * (FLOAT * trained(copy) - experts)
    return {"sums of gradients": head + dense + (1 + sums) * copy.layout.ep * experts}


def leaf_sums(copy: Copy) -> int:
    """The most sums of leaves that exist at a time, besides the gradients of the leaf under way."""
    return max(1, (LEAVES // copy.layout.dp).bit_length() - 1) if copy.model.invariant_training else 0


def group_bytes(specs: Iterable[ParamSpec], copy: Copy, matrix: int) -> int:
    """Bytes of one layer, or of everything outside the layers. matrix: bytes per element of a matrix; vectors are
    float32, and so is what half-precision models multiply in float32."""
    return sum((matrix if len(s.shape) > 1 and not s.float32_product else FLOAT)
               * box_elements(s, copy.layout, copy.cell.part) for s in specs)
