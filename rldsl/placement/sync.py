"""Models that follow others (`sync`, `ema`): whether the two agree, and where the target's new version is made.

In: a graph, families, and the places of its calls. Out: diagnostics RL0321 and RL0319, and for each model that a sync
names one place. A new version is made there; copies under other layouts get it from there.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from rldsl.diag import Diagnostic, Failure, Label, fail
from rldsl.graph import model as g
from rldsl.models.families import Family
from rldsl.placement.model import Call, Placement
from rldsl.plan.model import Model


def syncs(graph: g.Graph) -> tuple[g.Sync, ...]:
    return tuple(n for n in g.nodes(graph.items) if isinstance(n, g.Sync))


def sync_sources(graph: g.Graph, model: str) -> tuple[str, ...]:
    """The models that `model` follows, one for each statement, in program order."""
    return tuple(n.source for n in syncs(graph) if n.model == model)


def ema_layouts(graph: g.Graph, placements: Mapping[str, Placement],
                train_layouts: Mapping[str, str]) -> dict[str, str]:
    """Model that an `ema` writes -> the id of the layout under which it does."""
    return {n.model: sync_placements(graph, placements, train_layouts)[n.model].layout.id
            for n in syncs(graph) if n.decay}


def check_sync_parameters(graph: g.Graph, families: Mapping[str, Family]) -> None:
    """RL0321 where the parameters of target and source, or the configs that say what they mean, differ."""
    models = {m.name: m for m in graph.models}
    problems: list[Diagnostic] = []
    for n in syncs(graph):
        mine, other = families[n.model], families[n.source]
        why = _difference(n.model, mine, n.source, other)
        if why:
            problems.append(Diagnostic(
                "RL0321", f"`{n.model}` and `{n.source}` are different models", n.span, why,
                (Label(models[n.model].span, f'"{mine.path}"'), Label(models[n.source].span, f'"{other.path}"')),
                help="`sync` and `ema` need models of the same architecture and size"))
    if problems:
        raise Failure(dict.fromkeys(problems))


def check_adapters(graph: g.Graph, models: Iterable[Model]) -> None:
    """RL0321 where a model with adapters and one without, or with others, follow each other: only adapters move."""
    known = {m.name: m for m in models}
    for n in syncs(graph):
        mine, other = known[n.model], known[n.source]
        if (mine.params, mine.base) == (other.params, other.base) and (mine.lora is None or (
                (mine.path, mine.lora.alpha) == (other.path, other.lora.alpha if other.lora else 0))):
            continue
        spans = {m.name: m.span for m in graph.models}
        raise Failure([Diagnostic(
            "RL0321", f"`{n.model}` and `{n.source}` have different adapters", n.span,
            "`sync` and `ema` need the same adapters on the same base, or none",
            (Label(spans[n.model], _adapter(mine)), Label(spans[n.source], _adapter(other))),
            help="declare both with the same `lora(...)`")])


def _adapter(model: Model) -> str:
    if model.lora is None:
        return "no adapters"
    return f'rank {model.lora.r}, alpha {model.lora.alpha:g} on {", ".join(model.lora.targets)} of "{model.path}"'


def _difference(model: str, mine: Family, source: str, other: Family) -> str:
    """What differs first, or ""."""
    def difference(what: str, a: object, b: object) -> str:
        return f"{what}: {a} in `{model}`, {b} in `{source}`"

    for what, a, b in (("family", mine.name, other.name), ("layers", mine.layers, other.layers)):
        if a != b:
            return difference(what, a, b)
    shapes = [{p.name: " × ".join(map(str, p.shape)) for p in f.params} for f in (mine, other)]
    for name in dict.fromkeys([*shapes[0], *shapes[1]]):
        if shapes[0].get(name) != shapes[1].get(name):
            return difference(name, *(s.get(name, "missing") for s in shapes))
    if mine.params != other.params:
        return "tensor or pipeline parallelism shards them differently"
    config, of_source = dict(mine.config), dict(other.config)
    key = next((k for k in sorted(config.keys() | of_source.keys()) if config.get(k) != of_source.get(k)), "")
    return difference(f"{key} in config.json", config.get(key, "not set"), of_source.get(key, "not set")) if key else ""


def sync_placements(graph: g.Graph, placements: Mapping[str, Placement],
                    train_layouts: Mapping[str, str]) -> dict[str, Placement]:
    """Model -> where a sync reads or writes it. A trained model: under its training layout. A target: under the layout
    of its source, if it is used under that one, else under that of its first call, else (it is only saved) where its
    source is."""
    used: dict[str, list[Placement]] = {}
    for n in g.nodes(graph.items):
        if isinstance(n, Call):
            used.setdefault(n.model, []).append(placements[n.id])
    found = {m: next(p for p in used[m] if p.layout.id == layout) for m, layout in train_layouts.items()
             if layout and m in used}
    waiting = syncs(graph)
    named = {x for n in waiting for x in (n.model, n.source)}
    while waiting:
        later = tuple(n for n in waiting if not _place_sync(n, used, found))
        if len(later) == len(waiting):
            n = later[0]
            raise fail("RL0319", f"`{n.model}` is updated from `{n.source}`, but no call uses either", n.span,
                       "no rank loads these models", help="remove the statement, or use the models")
        waiting = later
    return {m: placement for m, placement in found.items() if m in named}


def _place_sync(n: g.Sync, used: Mapping[str, list[Placement]], found: dict[str, Placement]) -> bool:
    """Find the places of both models; False where neither is known yet."""
    own, others = used.get(n.model, []), used.get(n.source, [])
    source = found.get(n.source) or next(iter(others), None)
    same = [p for p in own if source is not None and p.layout == source.layout]
    target = found.get(n.model) or next(iter([*same, *own]), source and replace(source, offload=False))
    if target is None:
        return False
    found.setdefault(n.model, target)
    found.setdefault(n.source, source or replace(target, offload=False))
    return True
