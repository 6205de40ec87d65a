"""Mixture-of-experts layers, as transformers writes them: the weights of all experts of a layer in one tensor.

In: a model on the meta device and the styles of its config's plan. Out: which parameters count experts along dimension
0, how tensor parallelism divides them, and the tensors that make one up in directories that have one for each expert.
The form that is known: gate and up projections joined, [experts, 2 * width, hidden], and down, [experts, hidden,
width], without biases. Other forms run whole on every rank.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence, Set
from typing import Any

from rldsl.plan.model import PACKED, Split

FORM = {"is_concatenated": True, "is_transposed": False, "has_bias": False, "has_gate": True,
        "has_post_expert_norm": False}
JOINED = (("MergeModulelist",), ("MergeModulelist", "Concatenate"))  # of experts, and of what each has


def counts(skeleton: Any) -> dict[str, int]:
    """Parameter -> how many experts it is of."""
    found: dict[str, int] = {}
    for path, module in skeleton.named_modules():
        if all(getattr(module, name, None) is value for name, value in FORM.items()):
            shapes = {n: tuple(p.shape) for n, p in module.named_parameters(recurse=False)}
            up, down = (shapes.get(n, ()) for n in ("gate_up_proj", "down_proj"))
            known = len(shapes) == 2 and len(up) == len(down) == 3
            if known and (up[0], up[1], up[2]) == (down[0], 2 * down[2], down[1]):
                found |= {f"{path}.{name}": up[0] for name in shapes}
    return found


def other_form(skeleton: Any) -> str:
    """The name of the first module of experts in another form; "": there is none."""
    return next(other_forms(skeleton), "")


def other_forms(skeleton: Any) -> Iterator[str]:
    """The names of the modules of experts in another form."""
    known = {name.rpartition(".")[0] for name in counts(skeleton)}
    yield from (path for path, module in skeleton.named_modules() if path not in known and path.endswith("experts")
                and any(p.dim() == 3 for p in module.parameters(recurse=False)))


def division(name: str, shape: tuple[int, ...], style: str) -> tuple[Split | None, str]:
    """(split, problem) of an expert parameter under a style of the config's plan."""
    match name.rpartition(".")[2], style:
        case "gate_up_proj", "packed_colwise":
            width = shape[1] // 2
            return Split(1, ((width, 1), (width, 1))), ""
        case "down_proj", "rowwise":
            return Split(2, ((shape[2], 1),)), ""
    return None, f"its plan has the style {style!r} for {name}, which is not supported yet"


def stored(name: str, transforms: Sequence[Any], there: Set[str]) -> tuple[str, ...]:
    """Templates of the tensors that make up a parameter in a directory with tensors `there`, as `ParamSpec.stored`; ()
    where it is there by its own name, or transformers knows no other. transforms: of `transforms`."""
    if _among([name], there):
        return ()
    return next((found for found in _candidates(name, transforms) if _among(found, there)), ())


def _among(templates: Iterable[str], there: Set[str]) -> bool:
    real = [t.replace("{}", "0", 1).replace("{expert}", "0") for t in templates]
    return all(name in there for name in real) or all(name.partition(".")[2] in there for name in real)


def _candidates(name: str, transforms: Sequence[Any]) -> Iterable[tuple[str, ...]]:
    """What a parameter may be called in a directory: made of the tensors of its experts, renamed, or both."""
    made: list[tuple[str, ...]] = [(name,), tuple(name + end for end in PACKED)]
    for t in transforms:
        kinds = tuple(type(op).__name__ for op in getattr(t, "operations", ()))
        if (kinds in JOINED and len(t.target_patterns) == 1 and t.target_patterns[0] in name
                and [getattr(op, "dim", None) for op in t.operations] == [0, 1][: len(kinds)]):
            made.append(tuple(name.replace(t.target_patterns[0], _plain(s).replace("*", "{expert}"))
                              for s in t.source_patterns))
        elif (kinds == ("Concatenate",) and len(t.target_patterns) == 1 and t.target_patterns[0] in name
                and t.operations[0].dim == 0):
            made.append(tuple(name.replace(t.target_patterns[0], s) for s in t.source_patterns))
    for found in made:
        yield found
        yield tuple(_renamed(x, transforms) for x in found)
        yield tuple(_renamed(x, transforms[::-1], 1) for x in found)


def _renamed(name: str, transforms: Sequence[Any], most: int = -1) -> str:
    """The earlier name. Some families' names need the last renaming undone first, and each at one place. most: how
    often one is undone in a name; -1: wherever it applies."""
    for t in transforms:
        if not getattr(t, "operations", ()) and len(t.target_patterns) == len(t.source_patterns) == 1:
            name = name.replace(_plain(t.target_patterns[0]), _plain(t.source_patterns[0]), most)
    return name


def _plain(pattern: str) -> str:
    """A pattern that is a name, written as a regular expression. Others give names that no directory has."""
    return re.sub(r"\\(.)", r"\1", pattern.removeprefix("^"))


def transforms(skeleton: Any) -> list[Any]:
    """How transformers turns the tensors of a directory into parameters."""
    from transformers.conversion_mapping import get_model_conversion_mapping

    return list(get_model_conversion_mapping(skeleton, add_legacy=False))


def chosen(config: Any) -> int:
    """How many experts work on a token."""
    return int(getattr(config, "num_experts_per_tok", 0) or 0)
