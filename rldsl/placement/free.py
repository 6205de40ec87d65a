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
from rldsl.placement.model import Call, Placement
from rldsl.plan.model import Mesh, Model
from rldsl.reshard.device_order import reorder_devices


def choose_free_meshes(calls: Iterable[Call], placements: Mapping[str, Placement], models: Mapping[str, Model],
                       cluster: Cluster) -> dict[str, Placement]:
    """models: those that are trained, with their training layouts."""
    calls = tuple(calls)
    training = {n.model: placements[n.id] for n in calls if isinstance(n, g.Train)}
    return {n.id: _nearest(placements[n.id], training[n.model], models[n.model], cluster) if n.model in models
            else placements[n.id] for n in calls}


def _nearest(placement: Placement, training: Placement, model: Model, cluster: Cluster) -> Placement:
    """`placement` on the ranks that are nearest to `training`, the placement of the model's train call."""
    if placement.given is None or placement.layout == training.layout:
        return placement
    enough = training.mesh.size >= placement.mesh.size
    among = training.mesh.ranks if enough else ((0, cluster.world),)
    found = reorder_devices(model, training.layout, training.mesh, placement.layout, among, cluster.gpus)
    mesh = Mesh("+".join(f"{a}:{b}" for a, b in found.ranks), found.ranks)
    layout = replace(placement.layout, mesh=mesh.id, id=mesh.id + placement.layout.id.removeprefix(placement.mesh.id))
    return replace(placement, mesh=mesh, layout=layout)
