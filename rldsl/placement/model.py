"""Records of placement. In: nothing. Out: what `place_graph` returns and the passes read.

Meshes and layouts carry ids made of their content ("0:4+8:12", "0:8 dp=4 pp=2"), so that equal ones are equal without
a table; `passes/emit.py` gives them short ids at the end.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from rldsl.graph.model import Collect, Compute, Derive, Generate, Graph, Infer, Node, Train
from rldsl.models.families import Family
from rldsl.plan.heads import OUTPUTS
from rldsl.plan.model import DEFAULT_BACKEND, Layout, Mesh, Model
from rldsl.plan.notation import degrees_text
from rldsl.plan.payloads import Waiting
from rldsl.plan.projection import to_ranges
from rldsl.sharding.rank_sets import Ranks
from rldsl.source import Span

Call = Generate | Infer | Train
Computation = Compute | Derive | Collect  # nodes that read and write values, and call no model


@dataclass(frozen=True, slots=True)
class Placement:
    """Where and how a node runs."""

    mesh: Mesh  # its ranks
    layout: Layout  # on the mesh
    mbs: int = 0  # sequences per micro-batch; 0: all
    offload: bool = False  # parameters and optimizer state are in host memory between calls
    span: Span | None = None  # of the clause that decided it
    why: str = ""  # what decided it
    recompute: Literal["none", "full"] = "none"  # as in `plan.events.Train`
    keep: bool = True  # whether a copy of a trained model stays after its last use in a step
    given: Mesh | None = None  # with `mesh(8)`: the first 8 ranks, where `free.py` chose others; else None
    reuse: bool = False  # a continuation starts from the KV cache of what it continues
    mbt: int = 0  # tokens per micro-batch; 0: no limit
    waiting: Waiting = "keep"  # as in `plan.events.Generate`


@dataclass(frozen=True, slots=True)
class PlacedGraph:
    """A graph with a placement for each call and computation."""

    graph: Graph  # the graph
    models: tuple[Model, ...]  # as in the plan; `train_layout` is a layout id of this graph
    families: tuple[tuple[str, Family], ...]  # (model, family)
    placements: tuple[tuple[str, Placement], ...]  # (node id, placement)
    tokenizers: tuple[tuple[str, str], ...]  # (data source, model directory)
    world: int  # ranks
    devices_per_node: int  # ranks per node
    memory: int = 0  # bytes per device; 0: unknown


def mesh_of(ranks: Iterable[int]) -> Mesh:
    """The mesh of some ranks, in ascending order."""
    return mesh_of_set(Ranks(to_ranges(sorted(set(ranks)))))


def mesh_of_range(world: int) -> Mesh:
    """The mesh of the ranks 0 to world - 1."""
    return mesh_of_set(Ranks(((0, world),)))


def mesh_of_set(ranks: Ranks) -> Mesh:
    """The same of ranks that are ranges already."""
    ranges = ranks.ranges
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
            return f"{node.model}.{OUTPUTS[node.output_name].call}"
        case Train():
            return node.id
        case Compute():
            return node.label or node.id
        case _:
            return node.id
