"""Which models of a plan hold conversations with environments: of these `rlc profile` measures more."""

from __future__ import annotations

from rldsl.plan.events import ModelCall
from rldsl.plan.model import Model, Plan
from rldsl.plan.projection import event_paths


def conversing_models(plan: Plan) -> tuple[Model, ...]:
    """The models that talk with an environment, in the order of the plan."""
    names = {e.model for e, _ in event_paths(plan) if isinstance(e, ModelCall) and e.is_conversing}
    return tuple(m for m in plan.models if m.name in names)


def is_conversing(plan: Plan, model: Model) -> bool:
    """Whether measurements of a model stand for one that talks: they are known by its config."""
    return any((m.config_digest, m.head_name, m.dtype) == (model.config_digest, model.head_name, model.dtype)
               for m in conversing_models(plan))
