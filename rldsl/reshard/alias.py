"""Whether two layouts can share one copy of a model: every rank holds the same elements under both, in one dtype.

In: a model and two layouts on their meshes. Out: whether nothing has to be copied from one to the other. dp divides
rows and cp divides tokens among ranks that hold the same parameters, so these degrees may differ.
"""

from __future__ import annotations

from rldsl.plan.model import Layout, Mesh, Model
from rldsl.reshard.node_groups import MeshView
from rldsl.sharding.dtypes import storage_dtype


def share_one_copy(model: Model, a: Layout, a_mesh: Mesh, b: Layout, b_mesh: Mesh) -> bool:
    divided = (a.tp, a.pp, a.vpp, a.ep, a.backend) == (b.tp, b.pp, b.vpp, b.ep, b.backend)
    return (divided and not a.zero and not b.zero and storage_dtype(model, a.id) == storage_dtype(model, b.id)
            and MeshView.of(a, a_mesh) == MeshView.of(b, b_mesh))
