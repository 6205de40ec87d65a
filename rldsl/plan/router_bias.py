"""Router biases: numbers that a router adds to its scores to choose experts, and to nothing else (DeepSeek-V3, section
2.1.2, arXiv:2412.19437). No gradient reaches them; a train call may move them by the load of the experts instead.

In: the parameters of a model. Out: its biases, each with the experts that are chosen by it. A family's other numbers,
and biases of experts in a special form (`models/experts.py`), are none.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import prod

from rldsl.plan.model import Model, ParamSpec

NAMES = ("e_score_correction_bias", "expert_bias")  # as transformers calls them
EXPERTS = ".experts."


def router_biases(params: Iterable[ParamSpec]) -> Mapping[str, str]:
    """Name of a bias -> the module of its experts, both as of a `ParamSpec`: the experts stand next to the router, or
    next to the bias."""
    params = tuple(params)
    experts = {p.name.rpartition(EXPERTS)[0]: p.experts for p in params if p.experts and EXPERTS in p.name}
    found = {}
    for p in params:
        if p.buffer and p.name.endswith(NAMES):
            block = next((b for b in experts if p.name.startswith(b + ".")), "")
            if block and prod(p.shape) == experts[block]:
                found[p.name] = block + EXPERTS.rstrip(".")
    return found


def why_none(model_name: str, params: Iterable[ParamSpec], adapters: bool) -> str:
    """Why a model has no router biases that its training can update; "": it has some. params: with those below
    adapters."""
    params = tuple(params)
    if not router_biases(params):
        named = next((p.name.replace("{}", "0") for p in params if p.name.endswith(NAMES)), "")
        if named:
            return f"the experts next to its {named} have a special form"
        return f"the routers of {model_name} have no bias" if any(p.experts for p in params) else \
            f"{model_name} have no experts with routers"
    return "under adapters the parameters of the directory stay as they are" if adapters else ""


def updatable(model: Model) -> bool:
    """Whether training can update router biases of a model of a plan."""
    return not why_none("", (*model.params, *model.base), model.lora is not None)
