"""The parameter tables of a plan are those of the models that it names, and not only consistent with each other.

In: a plan, and a description of each model directory by `rldsl/models`. Out: diagnostics RL0619 (a record contradicts
the description) and RL0724 (config.json is not the one that the plan was compiled for), and which models could not be
compared. Proved for each model that was compared: names, order, shapes, divisions, stages and layers of its parameters,
which tensors of the directory make them up, the modules that its adapters adapt, its number of layers and its sizes;
and that its own tokenizer makes the same tokens as that of each batch that it reads, where both can be read.
This is the one check that needs more than the plan file, so it is not part of `verify`: a run makes it on every rank
for the models that the rank holds, before any weight is read; `rlc verify` makes it where the directories are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache
from itertools import product
from pathlib import Path

from rldsl.diag import Diagnostic, Failure
from rldsl.models.directory import tensor_names, tokenizer
from rldsl.models.families import Family, describe_architecture, sizes_of
from rldsl.plan.events import Event
from rldsl.plan.heads import SCORE_WEIGHT
from rldsl.plan.model import Model, ParamSpec, Plan
from rldsl.plan.projection import event_paths
from rldsl.plan.references import Role, references
from rldsl.verify.adapters import A
from rldsl.verify.tables import name as event_name
from rldsl.verify.tables import problem

Describe = Callable[[str, str, frozenset[str]], Family]  # path, kind, names of the tensors of the directory


@dataclass(frozen=True, slots=True)
class ModelCheck:
    """What became of the comparison of some models."""

    faults: tuple[Diagnostic, ...]  # differences
    compared: tuple[str, ...]  # names of models
    unreadable: tuple[tuple[str, str], ...]  # (name of a model, its directory) where there was nothing to compare with


def check_model_tables(plan: Plan, only: Iterable[str] | None = None,
                       describe: Describe = describe_architecture) -> ModelCheck:
    """only: names of models (default: all). Errors: RL0303 a config.json that transformers cannot use here."""
    wanted = set(only) if only is not None else {m.name for m in plan.models}
    faults: list[Diagnostic] = []
    compared: list[str] = []
    unreadable: list[tuple[str, str]] = []
    found: dict[tuple[str, str], tuple[Family, bool]] = {}
    for m in plan.models:
        if m.name not in wanted:
            continue
        key = (m.path, m.head_name)
        if key not in found:
            names = _tensor_names(m.path)
            if names is None:
                unreadable.append((m.name, m.path))
                continue
            found[key] = describe(m.path, m.head_name, names), bool(names)
        faults += model_faults(m, *found[key])
        compared.append(m.name)
    faults += _tokenizer_faults(plan, compared)
    return ModelCheck(tuple(faults), tuple(compared), tuple(unreadable))


def _tokenizer_faults(plan: Plan, compared: Sequence[str]) -> Iterator[Diagnostic]:
    """Batches with the ids of another tokenizer than that of a model that reads them. compared: names of models."""
    digest = cache(lambda path: tokenizer(Path(path)) if (Path(path) / "tokenizer.json").is_file() else "")
    paths, of_data = {m.name: m.path for m in plan.models}, {d.name: d.tokenizer for d in plan.data}
    makes = {f.id: f.tokenizer or of_data[f.data] for f in plan.frames}
    read: dict[tuple[str, str], Event] = {}
    for e, _ in event_paths(plan):
        named = {role: {r.id for r in references(e) if r.role is role} for role in (Role.MODEL, Role.FRAME)}
        read |= dict.fromkeys(product(named[Role.MODEL].intersection(compared), named[Role.FRAME]), e)
    for (model, frame), e in sorted(read.items(), key=lambda x: x[0]):
        mine, theirs = digest(paths[model]), digest(makes[frame])
        if mine and theirs and mine != theirs:
            yield problem("RL0619", f"{event_name(e)}: {model} reads {frame}, whose tokens another tokenizer makes", e,
                          notes=(f"model directory: {paths[model]}", f"tokenizer of {frame}: {makes[frame]}"))


def _tensor_names(path: str) -> frozenset[str] | None:
    """None without a config.json or with damaged weights; empty without weights, which a checkpoint may hold."""
    try:
        return tensor_names(Path(path), path) if (Path(path) / "config.json").is_file() else None
    except (Failure, OSError, ValueError):  # a loader that needs the directory says what is wrong with it
        return None


def model_faults(m: Model, family: Family, has_weights: bool = True) -> Iterator[Diagnostic]:
    """What of a record contradicts the description of its directory. has_weights: whether the directory has tensors,
    whose names the record then must follow."""
    if m.config_digest != family.config_digest:
        yield problem("RL0724", f"the config of model {m.name} changed since compilation",
                      notes=(f"model directory: {m.path}",))
        return
    if m.layers != family.layers:
        yield _fault(m, f"{m.layers} layers", f"{family.layers}")
    if m.sizes != (sizes := sizes_of(family)):
        name = next(f.name for f in fields(sizes) if getattr(m.sizes, f.name) != getattr(sizes, f.name))
        yield _fault(m, f"the size {name}={getattr(m.sizes, name)}", f"{getattr(sizes, name)}")
    linears = {x.name: x for x in family.linears}
    recorded, described = tuple(m.base), family.params
    if m.lora is None:
        recorded = m.params
    else:
        described = tuple(p for p in described if p.name != SCORE_WEIGHT)
        adapted = [p.name.removesuffix(A) for p in m.params if p.name.endswith(A)]
        for name in (x for x in adapted if x not in linears):
            yield _fault(m, f"an adapter on {name}", "no such linear layer")
        if m.lora.transposed != any(linears[x].transposed for x in adapted if x in linears):
            yield _fault(m, f"transposed={m.lora.transposed} in its adapters", f"{not m.lora.transposed}")
        yield from _table(m, [p for p in m.params if p.name == SCORE_WEIGHT],
                          [p for p in family.params if p.name == SCORE_WEIGHT], has_weights)
    yield from _table(m, recorded, described, has_weights)


def _table(m: Model, recorded: Sequence[ParamSpec], described: Sequence[ParamSpec],
           has_weights: bool) -> Iterator[Diagnostic]:
    """The parameters of a record against those of the directory."""
    if not has_weights:
        recorded, described = ([replace(p, stored=()) for p in specs] for specs in (recorded, described))
    if (*recorded,) == (*described,):
        return
    ours, theirs = ({p.name: p for p in specs} for specs in (recorded, described))
    for name in [x for x in ours if x not in theirs][:3]:
        yield _fault(m, f"the parameter {name}", "no such parameter")
    for name in [x for x in theirs if x not in ours][:3]:
        yield _fault(m, f"no parameter {name}", f"one of shape {theirs[name].shape}")
    for name in [x for x in ours if x in theirs and ours[x] != theirs[x]][:3]:
        a, b = ours[name], theirs[name]
        field = next(f.name for f in fields(a) if getattr(a, f.name) != getattr(b, f.name))
        yield _fault(m, f"{field} {_shown(getattr(a, field))} of {name}", _shown(getattr(b, field)))
    if ours == theirs:
        yield _fault(m, "its parameters in another order", "the order of its modules")


def _shown(value: object) -> str:
    parts = getattr(value, "parts", None)  # of a split
    return f"dimension {getattr(value, 'dim', 0)} in parts {parts}" if parts else str(value)


def _fault(m: Model, recorded: str, described: str) -> Diagnostic:
    return problem("RL0619", f"model {m.name} records {recorded}; its config.json describes {described}",
                   notes=(f"model directory: {m.path}",))
