"""Values and parameters between ranks: one contiguous message for each pair of ranks, posted at once, waited for late.

In: who sends what to whom, which every rank works out by the same pure functions. Out: a `Pending`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from rldsl.plan.boxes import Parameter, Piece, contains, holding, local_slice, parameters
from rldsl.plan.model import Layout, Mesh, Model, Spread, Value
from rldsl.plan.movement import Move, local_copies, rank_moves
from rldsl.plan.partition import row_moves
from rldsl.runtime.rows import StepRows
from rldsl.runtime.store import Column, Pending

DTYPES = {"f32": torch.float32, "i64": torch.int64, "bool": torch.uint8}


@dataclass(frozen=True, slots=True)
class Post:
    """Messages of one event that are on their way. sending keeps the sent tensors alive."""

    works: Sequence[Any]
    sending: Sequence[torch.Tensor]

    def wait(self) -> None:
        for work in self.works:
            work.wait()


def post(sends: Mapping[int, torch.Tensor], receives: Mapping[int, torch.Tensor], tag: int) -> Post:
    """Start every message: peer -> tensor. All ranks post their messages in the order of their peers."""
    operations = [dist.P2POp(dist.isend, t, peer, tag=tag) for peer, t in sorted(sends.items()) if t.numel()]
    operations += [dist.P2POp(dist.irecv, t, peer, tag=tag) for peer, t in sorted(receives.items()) if t.numel()]
    return Post(dist.batch_isend_irecv(operations) if operations else (), tuple(sends.values()))


# ---------------------------------------------------------------------------------------------------- values


def transfer(rows: StepRows, value: Value, src: Spread, dst: Spread, held: Column | None, tag: int) -> Pending:
    """`value` from spread to spread. held: what this rank has under `src`, or None. The result is the Column under
    `dst`, or None on a rank that is not part of it."""
    world = rows.world
    src_ranks, dst_ranks = world.meshes[src.mesh].members(), world.meshes[dst.mesh].members()
    have = {rank: rows.ids(src, value, rank) for rank in src_ranks}
    want = {rank: rows.ids(dst, value, rank) for rank in dst_ranks}
    moves = row_moves(have, want, rows.plan.header.devices_per_node)
    dtype = torch.float64 if value.level == "batch" and value.dtype == "f32" else DTYPES[value.dtype]
    sends, receives, arriving = {}, {}, []
    for move in moves:
        ids = torch.tensor(move.rows, device=world.device)
        if move.src == world.rank:
            assert held is not None
            sends[move.dst] = held.pick(ids).data.to(dtype).contiguous()
        elif move.dst == world.rank:
            sizes = rows.sizes(value, ids)
            receives[move.src] = torch.empty(int(sizes.sum()), dtype=dtype, device=world.device)
            arriving.append((ids, sizes, move.src))
    posted = post(sends, receives, tag)

    def finish() -> Column | None:
        posted.wait()
        if world.rank not in want:
            return None
        parts = [Column(ids, sizes, receives[peer]) for ids, sizes, peer in arriving]
        kept = sorted(set(want[world.rank]).intersection(have.get(world.rank, ())))
        if kept and held is not None:
            parts.append(held.pick(torch.tensor(kept, device=world.device)))
        if not parts:
            parts = [Column.none(dtype, world.device)]
        joined = Column.join(parts)
        return Column(joined.ids, joined.sizes, joined.data.to(torch.bool) if value.dtype == "bool" else joined.data)

    return Pending(finish, sum(t.nbytes for t in (*sends.values(), *receives.values())))


# ------------------------------------------------------------------------------------------------ parameters


@dataclass(frozen=True, slots=True)
class Place:
    """Where the boxes of parameters lie in this rank's local tensors under one layout."""

    held: Mapping[str, tuple[Parameter, tuple[Piece, ...]]]
    tensors: Mapping[str, torch.Tensor]

    @staticmethod
    def of(model: Model, layout: Layout, mesh: Mesh, rank: int, tensors: Mapping[str, torch.Tensor]) -> "Place":
        held = {p.name: (p, holding(p, model.layers, layout, mesh, rank)) for p in parameters(model)}
        return Place(held, tensors)

    def view(self, name: str, box: tuple[tuple[int, int], ...]) -> torch.Tensor:
        parameter, pieces = self.held[name]
        piece = next(p for p in pieces if contains(p.box, box))
        dim = parameter.spec.split.dim if parameter.spec.split else 0
        return self.tensors[name][local_slice(piece, box, dim)]


@dataclass(frozen=True, slots=True)
class Route:
    """A reallocation as one rank takes part in it, worked out once: what it sends, receives and copies."""

    sends: Mapping[int, tuple[Move, ...]]
    receives: Mapping[int, tuple[Move, ...]]
    copies: tuple[tuple[str, Any], ...]

    @staticmethod
    def of(moves: Sequence[Move], rank: int, copies: Sequence[tuple[str, Any]]) -> "Route":
        sends, receives = rank_moves(moves, rank)
        return Route(_by_peer(sends, lambda m: m.dst), _by_peer(receives, lambda m: m.src), tuple(copies))


def _by_peer(moves: Sequence[Move], peer: Callable[[Move], int]) -> dict[int, tuple[Move, ...]]:
    found: dict[int, list[Move]] = {}
    for move in moves:
        found.setdefault(peer(move), []).append(move)
    return {rank: tuple(found[rank]) for rank in sorted(found)}


def copies_of(model: Model, src: Layout, src_mesh: Mesh, dst: Layout, dst_mesh: Mesh, rank: int) -> list:
    """Boxes that stay on this rank; none where it is not part of both layouts."""
    if rank not in src_mesh.members() or rank not in dst_mesh.members():
        return []
    return list(local_copies(model, src, src_mesh, dst, dst_mesh, rank))


@torch.no_grad()
def realloc(route: Route, src: Place | None, dst: Place | None, dtype: torch.dtype, device: torch.device,
            tag: int, decay: float = 0.0) -> Pending:
    """Parameters along a route; local copies at once, the rest when it has arrived. decay: of what was there before, in
    a mean with what comes; one element's arithmetic is the same wherever it lies."""
    def put(target: torch.Tensor, value: torch.Tensor) -> None:
        target.copy_(target.float() * decay + value.float() * (1 - decay) if decay else value)

    sends = {peer: torch.cat([src.view(m.name, m.box).reshape(-1) for m in moves]).to(dtype)
             for peer, moves in route.sends.items()}
    receives = {peer: torch.empty(sum(dst.view(m.name, m.box).numel() for m in moves), dtype=dtype, device=device)
                for peer, moves in route.receives.items()}
    posted = post(sends, receives, tag)
    for name, box in route.copies:
        put(dst.view(name, box), src.view(name, box))

    def finish() -> None:
        posted.wait()
        with torch.no_grad():
            for peer, moves in route.receives.items():
                at = 0
                for move in moves:
                    target = dst.view(move.name, move.box)
                    put(target, receives[peer][at : at + target.numel()].view(target.shape))
                    at += target.numel()

    return Pending(finish)
