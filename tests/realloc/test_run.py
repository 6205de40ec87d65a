"""Reallocations carried out by four gloo ranks: bit for bit right, in small buckets, and within two of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from rldsl.diag import InternalError
from rldsl.reshard.in_place import pieces_by_parameter
from rldsl.reshard.rounds import kept_boxes
from rldsl.runtime.comm.reshard import RankReshard, Tensors, local_box, reshard
from rldsl.runtime.comm.side_stream import SideStream
from rldsl.sharding.boxes import cell_of, parameters, pieces_of_rank
from tests.plan_algebra.models import layout, mesh, model
from tests.realloc.cases import Case, wide
from tests.world import run_world

FOUR, LOW, HIGH, ONE, THREE = (mesh((0, 4)), mesh((0, 2)), mesh((2, 4)), mesh((0, 1)), mesh((1, 4)))
CASES = tuple(
    Case(made, a, am, b, bm, devices) for made in (wide("gqa"), model("fused")) for devices in (1, 2, 4)
    for a, am, b, bm in (
        (layout(FOUR, tp=4), FOUR, layout(FOUR, dp=4), FOUR),
        (layout(FOUR, pp=2, tp=2), FOUR, layout(FOUR, dp=2, tp=2), FOUR),
        (layout(LOW, tp=2), LOW, layout(HIGH, pp=2), HIGH),
        (layout(ONE), ONE, layout(THREE, dp=3), THREE),
        (layout(LOW, pp=2), LOW, layout(FOUR, dp=4), FOUR),
        (layout(THREE, tp=3), THREE, layout(FOUR, tp=4), FOUR),
    ))


def tensors(case: Case, side: str, rank: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    at, on = (case.src, case.src_mesh) if side == "src" else (case.dst, case.dst_mesh)
    out = {}
    for i, p in enumerate(parameters(case.model)):
        full = (torch.arange(torch.Size(p.spec.shape).numel()) * 7 % 251 + i).view(p.spec.shape).to(dtype)
        if found := pieces_of_rank(p, case.model.layers, at, on, rank):
            dim = p.spec.split.dim if p.spec.split else 0
            out[p.name] = torch.cat([full[tuple(slice(*x) for x in piece.box)] for piece in found], dim)
    return out


def place(case: Case, side: str, rank: int, held: dict[str, torch.Tensor]) -> Tensors | None:
    on = case.src_mesh if side == "src" else case.dst_mesh
    return held if rank in on.members() else None


def route(case: Case, rank: int, bucket: int) -> RankReshard:
    return RankReshard.plan(case.model, case.src, case.src_mesh, case.dst, case.dst_mesh, case.devices, rank, bucket)


def move_all(rank: int, bucket: int, decay: float, cases: Sequence[Case]) -> list[str]:
    """One after the other; what is wrong."""
    wrong = []
    for number, case in enumerate(cases):
        right = tensors(case, "dst", rank, torch.float32)
        held = {name: torch.full_like(t, 3.0) for name, t in right.items()}
        way = route(case, rank, bucket)
        pending = reshard(way, place(case, "src", rank, tensors(case, "src", rank, torch.float32)),
                          place(case, "dst", rank, held), torch.float32, SideStream(torch.device("cpu")), number * 16,
                          decay)
        pending.finish()
        for name, t in right.items():
            if not torch.equal(held[name], 3.0 * decay + t * (1 - decay) if decay else t):
                wrong.append(f"{case}: {name}")
    return wrong


@pytest.mark.thorough
@pytest.mark.parametrize(("bucket", "decay", "cases"), [
    (1 << 30, 0.0, CASES), (4000, 0.0, CASES[:6] + CASES[24:30]), (4000, 0.75, CASES[12:18] + CASES[30:])],
    ids=["whole", "small", "average"])
def test_numbers_are_right(bucket: int, decay: float, cases: Sequence[Case]) -> None:
    assert run_world(4, move_all, bucket, decay, cases) == [[]] * 4


def room(rank: int, bucket: int) -> list[tuple[int, int]]:
    """The most bytes beyond the parameters that are alive at once, and what a row of each box may add."""
    return [_room(rank, case, bucket, number) for number, case in enumerate(CASES)]


def _room(rank: int, case: Case, bucket: int, number: int) -> tuple[int, int]:
    from torch.utils._python_dispatch import TorchDispatchMode

    class Watch(TorchDispatchMode):
        alive = most = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            if func is torch.ops.aten.empty.memory_format:
                import weakref

                size = out.untyped_storage().nbytes()
                Watch.alive += size
                Watch.most = max(Watch.most, Watch.alive)
                weakref.finalize(out.untyped_storage(), lambda: setattr(Watch, "alive", Watch.alive - size))
            return out

    way = route(case, rank, bucket)
    held = {name: torch.zeros_like(t) for name, t in tensors(case, "dst", rank, torch.float32).items()}
    sides = place(case, "src", rank, tensors(case, "src", rank, torch.float32)), place(case, "dst", rank, held)
    with Watch():
        reshard(way, *sides, torch.float32, SideStream(torch.device("cpu")), number * 16).finish()
    boxes = max((len(m.boxes) for r in way.rounds for m in (*r.sends, *r.receives)), default=0)
    peers = max((len(r.sends) + len(r.receives) for r in way.rounds), default=0)
    return Watch.most, 4 * boxes * peers * 512


def test_two_buckets_are_enough() -> None:
    bucket = 200_000
    for found in run_world(4, room, bucket):
        assert max(most for most, _ in found) > bucket / 2, "something was measured"
        for most, rows in found:
            assert most <= 2.05 * bucket


def test_a_route_that_was_spoiled_is_noticed() -> None:
    """A rank that does not want what comes says so; nothing is written past the parameters."""
    case = CASES[0]
    held = pieces_by_parameter(case.model, case.dst, cell_of(case.dst, case.dst_mesh, 0))
    (name, box), *_ = kept_boxes(case.paths(), 0)
    assert local_box(held, name, box)
    with pytest.raises(StopIteration):
        local_box(held, name, ((0, 999), *box[1:]))
    way = route(case, 0, 1 << 30)
    spoiled = replace(way, copies=((way.copies[0][0], None),))
    sides = (place(case, side, 0, tensors(case, side, 0, torch.float32)) for side in ("src", "dst"))
    with pytest.raises(InternalError, match="does not expect"):
        reshard(spoiled, *sides, torch.float32, SideStream(torch.device("cpu")), 0)
