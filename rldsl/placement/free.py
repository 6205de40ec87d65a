"""`mesh(8)`: ranks of which the program says only how many there are.

In: calls with their places, and the trained models. Out: the same places, where a call of a trained model that is free
in its ranks stands on those, and in that order, to which fewest bytes move from where the model is trained
(`reshard/device_order.py`): ranks of that mesh if it has so many, else of the whole cluster. Others stay on the first.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from rldsl.graph import model as g
from rldsl.placement.degrees import Cluster
from rldsl.placement.model import Call, Place
from rldsl.plan.model import Mesh, Model
from rldsl.reshard.device_order import reorder_devices


def choose_free_meshes(calls: Iterable[Call], places: Mapping[str, Place], models: Mapping[str, Model],
           cluster: Cluster) -> dict[str, Place]:
    """models: those that are trained, with their homes."""
    calls = tuple(calls)
    homes = {n.model: places[n.id] for n in calls if isinstance(n, g.Train)}
    return {n.id: _nearest(places[n.id], homes[n.model], models[n.model], cluster) if n.model in models
            else places[n.id] for n in calls}


def _nearest(place: Place, home: Place, model: Model, cluster: Cluster) -> Place:
    if place.given is None or place.layout == home.layout:
        return place
    enough = len(home.mesh.members()) >= len(place.mesh.members())
    among = home.mesh.ranks if enough else ((0, cluster.world),)
    found = reorder_devices(model, home.layout, home.mesh, place.layout, among, cluster.gpus)
    mesh = Mesh("+".join(f"{a}:{b}" for a, b in found.ranks), found.ranks)
    layout = replace(place.layout, mesh=mesh.id, id=mesh.id + place.layout.id.removeprefix(place.mesh.id))
    return replace(place, mesh=mesh, layout=layout)
