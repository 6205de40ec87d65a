"""How ranks and layouts are written for a person, the same everywhere."""

from __future__ import annotations

from collections.abc import Sequence

from rldsl.plan.model import Layout, Mesh
from rldsl.plan.project import to_ranges


def ranks_text(ranks: Sequence[int]) -> str:
    """0,1,2,5 -> "0-2,5"."""
    return ",".join(str(a) if b == a + 1 else f"{a}-{b - 1}" for a, b in to_ranges(ranks))


def degrees_text(dp: int = 1, tp: int = 1, pp: int = 1, cp: int = 1, zero: int = 0, ep: int = 1) -> str:
    """"dp=4 pp=2"; "dp=1" when nothing is divided."""
    degrees = (("dp", dp, 1), ("tp", tp, 1), ("pp", pp, 1), ("cp", cp, 1), ("ep", ep, 1), ("zero", zero, 0))
    return " ".join(f"{name}={n}" for name, n, none in degrees if n > none) or "dp=1"


def degrees_of(layout: Layout) -> str:
    return degrees_text(layout.dp, layout.tp, layout.pp, layout.cp, layout.zero, layout.ep)


def layout_text(layout: Layout, mesh: Mesh) -> str:
    """As it is written after `on`: "mesh(0:8) dp=4 pp=2"."""
    return f"mesh({','.join(f'{a}:{b}' for a, b in mesh.ranks)}) {degrees_of(layout)}"
