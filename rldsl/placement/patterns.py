"""Whether the patterns of an optimizer name parameters that the model has.

In: a model as declared, and the specs of what is trained. Out: nothing.
Errors: RL0343 a pattern that matches nothing, or `freeze` that leaves nothing to train.
"""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches

from rldsl.diag import fail
from rldsl.graph import model as g
from rldsl.plan.model import ParamSpec
from rldsl.plan.optimizers import matches
from rldsl.sharding.boxes import expand_specs

SHOWN = 8  # names in a message


def check_patterns(model: g.Model, specs: Sequence[ParamSpec], layers: int) -> None:
    """specs: of the parameters that are trained, which with adapters are those of the adapters."""
    if model.optimizer is None or not model.patterns:
        return
    everything = tuple(expand_specs(specs, layers))
    names = [p.name for p in everything if not p.spec.buffer]  # no optimizer changes the others
    for pattern, span in model.patterns:
        if any(matches(name, (pattern,)) for name in names):
            continue
        buffer = next((p.name for p in everything if matches(p.name, (pattern,))), "")
        near = next(iter(get_close_matches(pattern.strip("*"), names, 1)), "")
        raise fail("RL0343", f"no trained parameter of `{model.name}` matches \"{pattern}\"", span,
                   f"{buffer} gets no gradient, so no optimizer changes it" if buffer else
                   f"did you mean \"{near}\"?" if near else "",
                   help="leave the pattern out" if buffer else
                   f"a pattern stands for whole names, and `*` for any text in them; names: {_some(specs)}")
    if all(matches(name, model.optimizer.freeze) for name in names):
        raise fail("RL0343", f"nothing of `{model.name}` is left to train", model.patterns[0][1],
                   "this freezes every parameter", help="freeze fewer parameters, or declare the model without `train`")


def _some(specs: Sequence[ParamSpec]) -> str:
    """Some names, with a `*` for the number of a layer."""
    names = [s.name.replace("{}", "*") for s in specs if not s.buffer]
    return ", ".join(names[:SHOWN]) + (", ..." if len(names) > SHOWN else "")
