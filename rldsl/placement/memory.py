"""How much memory each rank needs, estimated from above.

In: a `Placed`. Out: for each rank its peak bytes and what holds them. Kept all the time: parameters under every layout,
gradients and Adam's two fp32 moments at the home; slices of a directory that nothing writes count once. Added for the
largest call: the key-value cache of `generate`, or activations and one chunk of logits (Korthikanti et al. 2022 give 34
bytes for each token, hidden unit and layer of a half-precision transformer without recomputation).
Error: RL0401 when a device is smaller.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

from rldsl.diag import Diagnostic, Failure
from rldsl.graph import model as g
from rldsl.placement.families import Family
from rldsl.placement.model import Call, Place, Placed, label
from rldsl.placement.sync import only_synced
from rldsl.plan.boxes import itemsize, pieces, volume
from rldsl.plan.layout import coordinate, stage_layers
from rldsl.plan.model import Frame, Layout, Model, ParamSpec
from rldsl.plan.project import to_ranges
from rldsl.plan.show import human

CHUNK = 2048  # tokens whose logits exist at once
ACTIVATION = 17  # elements of activations kept for each token, hidden unit and layer in training


@dataclass(frozen=True, slots=True)
class Peak:
    """bytes: estimate. holders: (what, bytes), the largest first."""

    bytes: int
    holders: tuple[tuple[str, int], ...]


def peaks(placed: Placed) -> dict[int, Peak]:
    """The peak of every rank of the world."""
    every = [n for n in g.nodes(placed.graph.items) if isinstance(n, Call)]
    places, models = dict(placed.places), {m.name: m for m in placed.models}
    families, frames = dict(placed.families), {f.id: f for f in placed.graph.frames}
    kept: dict[int, dict[str, int]] = defaultdict(dict)
    spare: dict[int, tuple[int, str]] = defaultdict(lambda: (0, ""))
    layouts = {(n.model, places[n.id].layout.id): places[n.id] for n in every}
    homes = {m.name: m.home for m in placed.models}
    layouts |= {(name, place.layout.id): place for name, place in only_synced(placed.graph, places, homes)}
    shared: dict[int, tuple[Holding, ...]] = defaultdict(tuple)
    # models with a base first: what others share with them is counted as theirs
    for (name, _), place in sorted(layouts.items(), key=lambda x: not models[x[0][0]].base):
        model = models[name]
        constant = model.base or (() if model.home or model.sources else model.params)
        for rank, (stage, tp) in _coordinates(place).items():
            copy = f"{name} ({place.layout.id})"
            size = params_bytes(model, place.layout, stage, tp, model.params)
            if constant and not place.offload:  # read once, whoever else on this rank uses the same slices
                mine = Holding((model.path, model.dtype), constant, model.layers, place.layout.pp, place.layout.tp,
                               stage, tp)
                alone = _new_elements(shared[rank], mine) * itemsize(model)
                shared[rank] += () if mine in shared[rank] else (mine,)
                if model.base:
                    kept[rank][f"base of {copy}"] = alone
                else:
                    size = alone
            if not place.offload:
                kept[rank][f"parameters of {copy}"] = size
            if model.home == place.layout.id:  # trained parameters are float32 whatever the model's dtype
                whole = 4 * size // itemsize(model)
                kept[rank][f"parameters of {copy}"] = whole
                kept[rank][f"gradients of {name}"] = whole
                kept[rank][f"optimizer state of {name}"] = 2 * whole
    for n in every:
        place = places[n.id]
        need = _transient(n, place, models[n.model], families[n.model], frames)
        for rank, (stage, tp) in _coordinates(place).items():
            model = models[n.model]
            extra = need + (params_bytes(model, place.layout, stage, tp, (*model.params, *model.base)) if place.offload
                            else 0)
            spare[rank] = max(spare[rank], (extra, label(n)))
    return {rank: _peak(kept[rank], spare[rank]) for rank in range(placed.world)}


def _peak(kept: Mapping[str, int], spare: tuple[int, str]) -> Peak:
    kind = "key-value cache" if spare[1].endswith(".generate") else "activations and logits"
    holders = [*kept.items(), *([(f"{kind} of {spare[1]}", spare[0])] if spare[0] else [])]
    return Peak(sum(kept.values()) + spare[0], tuple(sorted(holders, key=lambda h: -h[1])))


def check(placed: Placed, found: Mapping[int, Peak]) -> None:
    """RL0401 when a device's memory is known and too small, for the ranks that need most."""
    if not placed.memory:
        return
    worst = max(found.values(), key=lambda p: p.bytes)
    if worst.bytes <= placed.memory:
        return
    over = [r for r, p in found.items() if p.bytes > placed.memory]
    cluster = placed.graph.cluster
    three = tuple(f"{what}: {human(size)}" for what, size in worst.holders[:3])
    ranks = ", ".join(f"{a}:{b}" for a, b in to_ranges(over))
    raise Failure([Diagnostic(
        "RL0401", f"a rank needs {human(worst.bytes)}, but a device has {human(placed.memory)}",
        cluster.span if cluster else None, f"ranks {ranks} need too much", notes=three,
        help="divide the largest over more ranks (tp, pp), offload frozen models (offload=true), or bound "
             "micro-batches (mbs=...)")])


@cache
def _coordinates(place: Place) -> dict[int, tuple[int, int]]:
    """Rank -> (pipeline stage, tp index)."""
    found = {}
    for rank in place.mesh.members():
        at = coordinate(place.layout, place.mesh, rank)
        found[rank] = (at.pp, at.tp)
    return found


def params_bytes(model: Model, layout: Layout, stage: int, tp: int, specs: tuple[ParamSpec, ...]) -> int:
    """Bytes of some of the parameters at one coordinate of a layout."""
    return _elements(specs, model.layers, layout.pp, layout.tp, stage, tp) * itemsize(model)


@dataclass(frozen=True, slots=True)
class Holding:
    """What one rank has of specs that nothing writes. of: the directory and dtype that they are read from and in."""

    of: tuple[str, str]
    specs: tuple[ParamSpec, ...]
    layers: int
    pp: int
    tp: int
    stage: int
    index: int


@cache
def _new_elements(earlier: tuple[Holding, ...], mine: Holding) -> int:
    """Elements of `mine` that the same rank does not have already."""
    same = [h for h in earlier if h.of == mine.of]
    total = 0
    for spec in mine.specs:
        boxes = tuple(p.box for p in pieces(spec, mine.tp, mine.index))
        here = _held(spec, mine)
        for other in same:
            twin = next((s for s in other.specs if s.name == spec.name), None)
            if twin is not None and tuple(p.box for p in pieces(twin, other.tp, other.index)) == boxes:
                here -= _held(twin, other)
        total += len(here) * sum(map(volume, boxes))
    return total


def _held(spec: ParamSpec, of: Holding) -> set[int]:
    """The layers of which a rank has a spec; {0} for one that belongs to none."""
    if spec.stage == "layer":
        return set(stage_layers(of.layers, of.pp, of.stage))
    there = {"first": of.stage == 0, "last": of.stage == of.pp - 1, "ends": of.stage in (0, of.pp - 1), "all": True}
    return {0} if there[spec.stage] else set()


@cache
def _elements(params: tuple, layers: int, pp: int, width: int, stage: int, tp: int) -> int:
    total = 0
    for spec in params:
        here = {"first": stage == 0, "last": stage == pp - 1, "ends": stage in (0, pp - 1), "all": True,
                "layer": len(stage_layers(layers, pp, stage))}[spec.stage]
        total += int(here) * sum(volume(p.box) for p in pieces(spec, width, tp))
    return total


def _transient(n: Call, place: Place, model: Model, family: Family, frames: Mapping[str, Frame]) -> int:
    """Bytes that one rank needs while the call runs."""
    layout, size = place.layout, itemsize(model)
    names = n.frames if isinstance(n, g.Train) else (n.frame,)
    frame = frames[names[0]]
    rows = -(-frame.count // layout.dp)
    if isinstance(n, g.Train):
        rows = -(-rows // n.minibatches)
    rows = min(rows, place.mbs) if place.mbs else rows
    tokens = rows * (frame.max_prompt_tokens + frame.max_response_tokens) * len(names)
    layers = -(-family.layers // layout.pp)
    if isinstance(n, g.Generate):
        heads = max(1, -(-family.kv_heads // layout.tp))
        return 2 * tokens * heads * family.head_dim * layers * size
    logits = min(tokens, CHUNK) * -(-family.vocab // layout.tp) * 4 * 2 if model.kind == "causal_lm" else 0
    width = family.hidden + family.intermediate // layout.tp
    kept = ACTIVATION * tokens * family.hidden * layers if isinstance(n, g.Train) else 4 * tokens * width
    return kept * size + logits
