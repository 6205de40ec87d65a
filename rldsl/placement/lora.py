"""The parameters of a model with adapters: what is trained, and what stays as it is in the directory.

In: an adapter as declared, and the family of its base. Out: parameter specs of both, and the adapter with its targets
resolved. Each adapter is divided as its module is, so that it needs no other collective: where rows of the weight
are divided, B's are, and where columns are, A's; the other factor is whole on every rank and gets a part of its
gradient there. Errors: RL0341 a target that is not there.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from rldsl.diag import fail
from rldsl.graph.model import Model
from rldsl.models.families import Family, Linear
from rldsl.placement.peft import check_text_adapter, check_weights, read_adapter, trained_on
from rldsl.plan.adapter_names import A, B
from rldsl.plan.heads import SCORE_WEIGHT
from rldsl.plan.model import Lora, ParamSpec
from rldsl.sharding.boxes import expand_specs
from rldsl.source import Span


@dataclass(frozen=True, slots=True)
class AdapterParameters:
    """The parameters of a model with or without adapters."""

    params: tuple[ParamSpec, ...]  # trained, resharded and saved
    base: tuple[ParamSpec, ...] = ()  # frozen; every rank reads its slices from the model's directory
    lora: Lora | None = None  # None: no adapters


def split_adapter_parameters(model: Model, family: Family, seed: int) -> AdapterParameters:
    """seed: of the program, for the adapters' first values."""
    if model.lora is None:
        return AdapterParameters(family.params)
    wanted = read_adapter(model.lora.path, model.lora_span) if model.lora.path else model.lora
    if wanted.path and family.reads_images:
        check_text_adapter(wanted.path, model.lora_span)
    chosen = _target_modules(wanted, family, model.lora_span)
    weights = {s.name: s for s in family.params}
    heads = tuple(s for s in family.params if s.name == SCORE_WEIGHT)  # small, and of this task alone: trained whole
    adapters = tuple(spec for m in chosen for spec in _factors(weights[f"{m.name}.weight"], m, wanted.r))
    if wanted.path:
        check_weights(wanted.path, {p.name: p.spec.shape for p in expand_specs((*adapters, *heads), family.layers)},
                      model.path, model.lora_span)
    targets = wanted.targets or tuple(dict.fromkeys(_last(m.name) for m in chosen))
    return AdapterParameters((*adapters, *heads), tuple(s for s in family.params if s not in heads),
                 replace(wanted, targets=targets, seed=seed, transposed=any(m.transposed for m in chosen)))


def _target_modules(lora: Lora, family: Family, span: Span | None) -> list[Linear]:
    """The modules that `targets` name by the ends of their names; all of them where it is empty."""
    known = tuple(dict.fromkeys(_last(m.name) for m in family.linears))
    if not known:
        raise fail("RL0341", f"\"{family.path}\" has no module that an adapter can target", span,
                   f"the blocks of {family.name} contain no linear layers", help="train it without `lora`")
    for target in lora.targets:
        if not any(_named(m, target) for m in family.linears):
            near = _close_matches(target, known)
            raise fail("RL0341", f"\"{family.path}\" has no module named `{target}`", span,
                       f"did you mean `{near}`?" if near and not lora.path else "",
                       notes=tuple(filter(None, [lora.path and trained_on(lora.path, family.path, span)])),
                       help=f"linear layers in the blocks of {family.name}: {', '.join(known)}")
    return [m for m in family.linears if not lora.targets or any(_named(m, t) for t in lora.targets)]


def _close_matches(word: str, known: Iterable[str]) -> str:
    from difflib import get_close_matches

    return next(iter(get_close_matches(word, list(known), 1)), "")


def _named(module: Linear, target: str) -> bool:
    return f".{module.name}".endswith(f".{target}")


def _last(name: str) -> str:
    return name.rpartition(".")[2]


def _factors(weight: ParamSpec, module: Linear, r: int) -> tuple[ParamSpec, ParamSpec]:
    """A [r, in] and B [out, r] of one module, divided as its weight [out, in] is."""
    split, rows, columns = weight.split, None, None  # of the weight; those of B; those of A
    if split is not None:
        outputs = split.dim == (1 if module.transposed else 0)
        rows, columns = (replace(split, dim=0), None) if outputs else (None, replace(split, dim=1))
    a = ParamSpec(f"{module.name}.{A}", (r, module.inputs), weight.stage, weight.layers, columns,
                  partial_grad=weight.partial_grad or rows is not None, layer=weight.layer)
    b = ParamSpec(f"{module.name}.{B}", (module.outputs, r), weight.stage, weight.layers, rows,
                  partial_grad=weight.partial_grad or columns is not None, layer=weight.layer)
    return a, b
