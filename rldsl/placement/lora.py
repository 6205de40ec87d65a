"""The parameters of a model with adapters: what is trained, and what stays as it is in the directory.

In: an adapter as declared, and the family of its base. Out: parameter specs of both, and the adapter with its targets
resolved. Each adapter is divided as its module is, so that it needs no collective of its own: where rows of the weight
are divided, B's are, and where columns are, A's; the other factor is whole on every rank and gets a part of its
gradient there. Errors: RL0341 a target that is not there, RL0342 a directory without an adapter that fits.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rldsl.diag import fail
from rldsl.graph.model import Model
from rldsl.placement.families import HEAD, Family, Linear
from rldsl.plan.lora import A, B
from rldsl.plan.model import Lora, ParamSpec
from rldsl.source import Span


@dataclass(frozen=True, slots=True)
class Parts:
    """params: trained, moved and saved. base: read from the model's directory by everybody."""

    params: tuple[ParamSpec, ...]
    base: tuple[ParamSpec, ...] = ()
    lora: Lora | None = None


def parts(model: Model, family: Family, seed: int) -> Parts:
    """seed: of the program, for the adapters' first values."""
    if model.lora is None:
        return Parts(family.params)
    wanted = _stored(model.lora.path, family, model.lora_span) if model.lora.path else model.lora
    chosen = _chosen(wanted.targets, family, model.lora_span)
    weights = {s.name: s for s in family.params}
    heads = tuple(s for s in family.params if s.name == HEAD)  # small, and of this task alone: trained whole
    adapters = tuple(spec for m in chosen for spec in _factors(weights[f"{m.name}.weight"], m, wanted.r))
    targets = wanted.targets or tuple(dict.fromkeys(_last(m.name) for m in chosen))
    return Parts((*adapters, *heads), tuple(s for s in family.params if s not in heads),
                 replace(wanted, targets=targets, seed=seed, transposed=any(m.transposed for m in chosen)))


def _chosen(targets: tuple[str, ...], family: Family, span: Span | None) -> list[Linear]:
    """The modules that `targets` name by the ends of their names; all of them where it is empty."""
    known = tuple(dict.fromkeys(_last(m.name) for m in family.linears))
    if not known:
        raise fail("RL0341", f'"{family.path}" has no module that takes an adapter', span,
                   f"the blocks of {family.name} have no linear layers of their own", help="train it without `lora`")
    for target in targets:
        if not any(_named(m, target) for m in family.linears):
            near = _near(target, known)
            raise fail("RL0341", f'no module of "{family.path}" is called `{target}`', span,
                       f"did you mean `{near}`?" if near else "",
                       help=f"linear layers in the blocks of {family.name}: {', '.join(known)}")
    return [m for m in family.linears if not targets or any(_named(m, t) for t in targets)]


def _near(word: str, known: Iterable[str]) -> str:
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
                  partial=weight.partial or rows is not None)
    b = ParamSpec(f"{module.name}.{B}", (module.outputs, r), weight.stage, weight.layers, rows,
                  partial=weight.partial or columns is not None)
    return a, b


# ------------------------------------------------------------------------------------------------ a stored adapter


def _stored(path: str, family: Family, span: Span | None) -> Lora:
    """What adapter_config.json says; the weights are read by the ranks."""
    file = Path(path) / "adapter_config.json"
    if not file.is_file():
        raise fail("RL0342", f'no adapter in "{path}"', span, "no adapter_config.json here",
                   help="give a directory that `save` or PEFT wrote, relative to the working directory")
    try:
        found: dict[str, Any] = json.loads(file.read_text())
        kind, r, alpha = found["peft_type"], int(found["r"]), float(found["lora_alpha"])
        targets = found["target_modules"]
        if not isinstance(targets, str | list):
            raise TypeError(f"target_modules is {json.dumps(targets)}")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise fail("RL0342", f'the adapter in "{path}" cannot be read', span, f"{type(error).__name__}: {error}",
                   help="adapter_config.json is damaged; copy the directory again") from None
    odd = [k for k in ("use_dora", "use_rslora", "rank_pattern", "alpha_pattern", "layers_to_transform",
                       "layer_replication", "target_parameters") if found.get(k)]
    odd += ["bias"] if found.get("bias", "none") != "none" else []
    odd += [f"modules_to_save={x}" for x in found.get("modules_to_save") or () if x != HEAD.partition(".")[0]]
    odd += [] if kind == "LORA" else [f"peft_type={kind}"]
    odd += [] if r >= 1 and alpha > 0 else ["r, lora_alpha"]
    if odd:
        raise fail("RL0342", f'the adapter in "{path}" is of a kind that is not supported', span, ", ".join(odd),
                   help="supported: LoRA with one rank and alpha for all of its modules, without biases")
    if isinstance(targets, str):
        if targets != "all-linear":
            raise fail("RL0342", f'the adapter in "{path}" is of a kind that is not supported', span,
                       f"target_modules is a pattern: {targets}", help="list the names of its modules")
        targets = []
    return Lora(r, alpha, tuple(sorted(map(str, targets))), path=path)
