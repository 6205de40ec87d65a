"""Two layouts that are one copy: every rank holds the same elements of a model under both, in one dtype.

In: a model and two layouts on their meshes. Out: whether nothing need be copied from one to the other. Rows of dp and
tokens of cp are divided over ranks that hold the same parameters, so degrees may differ in these.
"""

from __future__ import annotations

from rldsl.plan.model import Layout, Mesh, Model
from rldsl.reshard.node_groups import Side
from rldsl.sharding.dtypes import stored


def coincide(model: Model, a: Layout, a_mesh: Mesh, b: Layout, b_mesh: Mesh) -> bool:
    divided = (a.tp, a.pp, a.vpp, a.ep, a.backend) == (b.tp, b.pp, b.vpp, b.ep, b.backend)
    return (divided and not a.zero and not b.zero and stored(model, a.id) == stored(model, b.id)
            and Side.of(a, a_mesh) == Side.of(b, b_mesh))
