"""Before a save, every parameter becomes whole on one rank, from ranks that hold the rest of it.

In: tables with sound references. Out: diagnostics RL0527 (an owner does not get its parameters exactly once), RL0533
(what one rank sends is not what the other expects, or it does not hold it) and RL0535 (too many messages at once). The
messages are those of `plan/gather.py`, which every rank works out; all ranks are looked at where they are few, and of
many the first and the last tensor-parallel group, inside which messages travel.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations

from rldsl.diag import Diagnostic
from rldsl.plan.batches import MESSAGES
from rldsl.plan.boxes import Box, Cell, Parameter, contains, held, intersect, parameters, volume
from rldsl.plan.events import Save
from rldsl.plan.gather import gathers, owners
from rldsl.plan.model import Layout, Mesh, Model
from rldsl.plan.realloc.rounds import Message
from rldsl.plan.verify.lanes import Fault, Side
from rldsl.plan.verify.tables import Tables, name, problem

FEW = 16  # ranks that are all looked at

Messages = tuple[Sequence[Message], Sequence[Message]]


def check(t: Tables) -> Iterator[Diagnostic]:
    known: dict[tuple[str, str], Sequence[Fault]] = {}
    for e, _ in t.events:
        if isinstance(e, Save):
            if (e.model, e.layout) not in known:
                x = t.layouts[e.layout]
                known[e.model, e.layout] = examine(t.models[e.model], x, t.meshes[x.mesh])
            for code, what, ranks in known[e.model, e.layout]:
                yield problem(code, f"{name(e)}: {what}", e, ranks=ranks)


def examine(m: Model, x: Layout, mesh: Mesh) -> Sequence[Fault]:
    """What is wrong with the messages of a save."""
    return tuple(_faults(m, x, mesh))


def _faults(m: Model, x: Layout, mesh: Mesh) -> Iterator[Fault]:
    cells = Side.of(x, mesh).cells
    owner = owners(m, x, mesh)
    if m.lora:  # adapters go into one file
        owner = dict.fromkeys(owner, mesh.members()[0])
    looked = _chosen(cells, x)
    known = gathers(m, x, mesh, owner, looked)
    mine: dict[int, list[Parameter]] = defaultdict(list)
    for p in parameters(m):
        if owner.get(p.name) not in cells:
            yield "RL0527", f"{p.name} has no owner on the mesh", ()
        mine[owner.get(p.name, -1)].append(p)
    for rank in looked:
        yield from _rank(m, x, cells, rank, mine[rank], known)


def _chosen(cells: Mapping[int, Cell], x: Layout) -> Sequence[int]:
    ranks, group = list(cells), x.tp
    if len(ranks) <= FEW:
        return ranks
    return list(dict.fromkeys((*ranks[:group], *ranks[-group:])))


def _rank(m: Model, x: Layout, cells: Mapping[int, Cell], rank: int, mine: Sequence[Parameter],
          known: Mapping[int, Messages]) -> Iterator[Fault]:
    sends, receives = known[rank]
    got: dict[str, list[Box]] = defaultdict(list)
    for message in receives:
        for name_, box in message.boxes:
            got[name_].append(box)
    for p in mine:
        own = _held(p, m, x, cells[rank])
        parts = [*own, *got.pop(p.name, ())]
        if sum(map(volume, parts)) != volume(tuple((0, n) for n in p.spec.shape)) or any(
                intersect(a, b) is not None for a, b in combinations(parts, 2)):
            yield "RL0527", f"{p.name} does not become whole on rank {rank}", (rank,)
    if got:
        yield "RL0527", f"rank {rank} gets {', '.join(sorted(got)[:2])}, which it does not write", (rank,)
    by_name = {p.name: p for p in parameters(m)}
    for message in sends:
        for name_, box in message.boxes:
            if not any(contains(h, box) for h in _held(by_name[name_], m, x, cells[rank])):
                yield "RL0533", f"rank {rank} would send {name_} {box}, which it does not hold", (rank,)
    for messages, end in ((sends, 1), (receives, 0)):
        for message in messages:
            if message.peer not in known:
                continue
            if [o.boxes for o in known[message.peer][end] if o.peer == rank] != [message.boxes]:
                yield ("RL0533", f"ranks {rank} and {message.peer} expect different messages of each other",
                       (rank, message.peer))
    if (count := len(sends) + len(receives)) > MESSAGES:
        yield "RL0535", f"rank {rank} posts {count} messages at once, more than {MESSAGES}", (rank,)


def _held(p: Parameter, m: Model, x: Layout, at: Cell) -> tuple[Box, ...]:
    return tuple(piece.box for piece in held(p, m.layers, x, at))
