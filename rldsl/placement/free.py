"""`mesh(8)`: ranks of which the program says only how many there are.

In: calls with their places, and the trained models. Out: the same places, except that a call of a trained model whose
ranks are free gets those ranks, in that order, to which fewest bytes move from the model's training layout
(`reshard/device_order.py`): ranks of the training mesh if that has enough, else of the whole cluster. Other calls stay
on the first ranks.
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
    """models: those that are trained, with their training layouts."""
    calls = tuple(calls)
    training = {n.model: places[n.id] for n in calls if isinstance(n, g.Train)}
    return {n.id: _nearest(places[n.id], training[n.model], models[n.model], cluster) if n.model in models
            else places[n.id] for n in calls}


def _nearest(place: Place, training: Place, model: Model, cluster: Cluster) -> Place:
    """`place` on the ranks that are nearest to `training`, the place of the model's train call."""
    if place.given is None or place.layout == training.layout:
        return place
    enough = training.mesh.size >= place.mesh.size
    among = training.mesh.ranks if enough else ((0, cluster.world),)
    found = reorder_devices(model, training.layout, training.mesh, place.layout, among, cluster.gpus)
    mesh = Mesh("+".join(f"{a}:{b}" for a, b in found.ranks), found.ranks)
    layout = replace(place.layout, mesh=mesh.id, id=mesh.id + place.layout.id.removeprefix(place.mesh.id))
    return replace(place, mesh=mesh, layout=layout)
