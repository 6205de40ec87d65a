"""Which color a mesh or a model has, the same in every picture of a page.

In: a plan. Out: a `Hue` for each mesh on which calls or computations run; a style for each model that is called. The
colors themselves are in templates/graph.css: eight that people with any color vision tell apart; a ninth mesh has the
first one, dashed. Color is never alone: what it says is also there as text.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rldsl.plan.events import ModelCall
from rldsl.plan.model import Plan
from rldsl.plan.naming import PlaceTexts
from rldsl.plan.projection import event_paths

COUNT = 8
WORK = ("data", "call", "compute")  # families of events


@dataclass(frozen=True, slots=True)
class Hue:
    """The color of a mesh."""

    mesh: str  # id
    style: str  # classes of CSS
    text: str  # the mesh as a program writes it


def model_styles(plan: Plan) -> Mapping[str, str]:
    """Model -> classes of CSS, for pictures whose rows are ranks already; models in the order of the program."""
    called = {e.model for e, _ in event_paths(plan) if isinstance(e, ModelCall)}
    names = [m.name for m in plan.models if m.name in called]
    return {name: f"hue{i % COUNT}" + (" again" if i >= COUNT else "") for i, name in enumerate(names)}


def hues(plan: Plan) -> Mapping[str, Hue]:
    """Mesh id -> its color; meshes in the order of their ranks, larger ones first."""
    texts = PlaceTexts.of(plan).meshes
    used = {e.mesh for e, _ in event_paths(plan) if e.traits.family in WORK}
    found = sorted((m for m in plan.meshes if m.id in used), key=lambda m: (m.ranks[0][0], -m.ranks[-1][1], m.ranks))
    return {m.id: Hue(m.id, f"hue{i % COUNT}" + (" again" if i >= COUNT else ""), texts[m.id])
            for i, m in enumerate(found)}
