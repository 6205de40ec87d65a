"""Layout pairs for the tests of reallocations: overlapping, disjoint, of other node counts, with uneven stages."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product

from hypothesis import strategies as st

from rldsl.plan.model import Layout, Mesh, Model, Split
from rldsl.reshard.in_place import Held, elements_to_pack
from rldsl.reshard.planning import plan_reshard
from rldsl.reshard.records import ReshardPlan
from rldsl.reshard.rounds import Round
from tests.plan_algebra.models import layout, layouts, mesh, model


@dataclass(frozen=True)
class Case:
    model: Model
    src: Layout
    src_mesh: Mesh
    dst: Layout
    dst_mesh: Mesh
    devices: int

    def paths(self) -> ReshardPlan:
        return plan_reshard(self.model, self.src, self.src_mesh, self.dst, self.dst_mesh, self.devices)

    def ranks(self) -> list[int]:
        return sorted({*self.src_mesh.members(), *self.dst_mesh.members()})

    def __str__(self) -> str:
        return (f"{self.src.id} on {self.src_mesh.ranks} to {self.dst.id} on {self.dst_mesh.ranks}, "
                f"{self.devices} devices a node")


def packed_elements(ops: Round, held: tuple[Held | None, Held | None]) -> tuple[int, int]:
    """Elements of a round that need a buffer, of sends and of receives. held: what the rank holds under the source and
    the destination; None if nothing is sent from, or received into, the parameters themselves."""
    return elements_to_pack(ops.sends, held[0]), elements_to_pack(ops.receives, held[1])


MESHES = (
    (mesh((0, 4)), mesh((0, 4))), (mesh((0, 4)), mesh((4, 8))), (mesh((0, 6)), mesh((4, 8))),
    (mesh((0, 2), (4, 6)), mesh((0, 8))), (mesh((0, 8)), mesh((2, 3))), (mesh((0, 2)), mesh((2, 16))),
    (mesh((4, 8), (0, 4)), mesh((0, 8))),
)


def small(kind: str) -> list[Case]:
    """Every pair of small layouts on every pair of meshes."""
    made = model(kind)
    return [Case(made, a, am, b, bm, devices) for am, bm in MESHES for a, b in product(layouts(am), layouts(bm))
            for devices in (2, 4, 16)]


def wide(kind: str) -> Model:
    """Larger tensors, so that a row is a small part of any message."""
    made = model(kind, layers=6)
    specs = tuple(replace(s, shape=tuple(32 * n if d else n for d, n in enumerate(s.shape)), split=s.split and Split(
        s.split.dim, tuple((u, 32 * z if s.split.dim else z) for u, z in s.split.parts))) for s in made.params)
    return replace(made, params=specs, dtype="bfloat16")


@st.composite
def meshes(draw: st.DrawFn) -> Mesh:
    """One or two runs of ranks, in any order."""
    ends = sorted(draw(st.sets(st.integers(0, 24), min_size=2, max_size=4)))
    runs = list(zip(ends[::2], ends[1::2]))
    return mesh(*draw(st.permutations(runs)))


@st.composite
def layouts_on(draw: st.DrawFn, on: Mesh) -> Layout:
    size = len(on.members())
    pp, tp = draw(st.sampled_from([(p, t) for p, t in product(range(1, 6), range(1, 9)) if size % (p * t) == 0]))
    cp = draw(st.sampled_from([c for c in (1, 2) if size // (pp * tp) % c == 0]))
    return layout(on, pp, size // (pp * tp * cp), tp, cp)


@st.composite
def cases(draw: st.DrawFn, large: bool = False) -> Case:
    made = (wide if large else model)(draw(st.sampled_from(["gqa", "fused"])))
    same = draw(st.booleans())
    am = draw(meshes())
    bm = am if same else draw(meshes())
    return Case(made, draw(layouts_on(am)), am, draw(layouts_on(bm)), bm, draw(st.sampled_from([1, 2, 3, 4, 8, 32])))
