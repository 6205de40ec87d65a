"""Records of placement. In: nothing. Out: what `place` returns and the passes read.

Meshes and layouts carry ids made of their content ("0:4+8:12", "0:8 dp=4 pp=2"), so that equal ones are equal without
a table; `passes/emit.py` gives them short ids at the end.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from rldsl.graph.model import Collect, Compute, Generate, Graph, Infer, Node, Select, Train
from rldsl.models.families import Family
from rldsl.plan.heads import OUTPUTS
from rldsl.plan.model import DEFAULT_BACKEND, Layout, Mesh, Model
from rldsl.plan.notation import degrees_text
from rldsl.plan.projection import to_ranges
from rldsl.source import Span

Call = Generate | Infer | Train
Local = Compute | Select | Collect  # what runs on values alone


@dataclass(frozen=True, slots=True)
class Place:
    """Where a node runs. mbs, mbt: most sequences, and most tokens, in a micro-batch (0: all). why: who decided it.
    recompute: as in `plan.Train`. keep: whether a copy of a trained model stays after its last use in a step. given: of
    `mesh(8)`, as many ranks in ascending order, where `free.py` chose others."""

    mesh: Mesh
    layout: Layout
    mbs: int = 0
    offload: bool = False
    span: Span | None = None
    why: str = ""
    recompute: Literal["none", "full"] = "none"
    keep: bool = True
    given: Mesh | None = None
    mbt: int = 0


@dataclass(frozen=True, slots=True)
class Placed:
    """A graph with a place for each call and computation. models: as in the plan, `home` set to a layout id.
    memory: bytes of a device, 0 when unknown. tokenizers: data source -> model directory."""

    graph: Graph
    models: tuple[Model, ...]
    families: tuple[tuple[str, Family], ...]
    places: tuple[tuple[str, Place], ...]
    tokenizers: tuple[tuple[str, str], ...]
    world: int
    devices_per_node: int
    memory: int = 0


def mesh_of(ranks: Iterable[int]) -> Mesh:
    """The mesh of some ranks, in ascending order."""
    ranges = to_ranges(sorted(set(ranks)))
    return Mesh("+".join(f"{a}:{b}" for a, b in ranges), ranges)


def layout_of(mesh: Mesh, dp: int = 1, tp: int = 1, pp: int = 1, cp: int = 1, backend: str = DEFAULT_BACKEND,
              zero: int = 0, ep: int = 1, vpp: int = 1) -> Layout:
    """`zero` divides by dp, so that with dp=1 it is the same as without; so is `vpp` with pp=1."""
    zero, vpp = zero if dp > 1 else 0, vpp if pp > 1 else 1
    degrees = degrees_text(dp, tp, pp, cp, zero, ep, vpp)
    named = "" if backend == DEFAULT_BACKEND else backend
    return Layout(" ".join(filter(None, (mesh.id, degrees, named))), mesh.id, dp=dp, tp=tp, pp=pp, cp=cp, ep=ep,
                  zero=zero, vpp=vpp, backend=backend)


def label(node: Node) -> str:
    """What messages call a node: "actor.generate", "ref.logprobs", or the name of a value."""
    match node:
        case Generate():
            return f"{node.model}.generate"
        case Infer():
            return f"{node.model}.{OUTPUTS[node.what].call}"
        case Train():
            return node.id
        case Compute():
            return node.id if "#" not in node.id else node.outputs[0][1] if node.outputs else node.id
        case _:
            return node.id
