"""What a layout with `ep` holds: runs of experts; and parameters that move to and from it."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import product

import pytest
import torch

from rldsl.diag import InternalError
from rldsl.plan.model import Layout, Mesh, Model, ParamSpec, Split
from rldsl.reshard.gather import gather, owners
from rldsl.reshard.node_groups import MeshView
from rldsl.runtime.comm.reshard import RankReshard, reshard
from rldsl.runtime.comm.side_stream import SideStream
from rldsl.sharding.boxes import (
    cell_of,
    holdings,
    local_shape,
    local_slice,
    parameters,
    pieces_of_rank,
    replicas,
    volume,
)
from rldsl.sharding.layout import axis_ranks
from rldsl.verify import saves
from rldsl.verify.reshards import examine_reshard
from tests.plan_algebra.models import mesh
from tests.realloc.cases import Case
from tests.realloc.test_values import check
from tests.world import run_world

MODEL = Model("m", "causal_lm", "", "float32", (
    ParamSpec("embed.weight", (13, 8), "ends", split=Split(0, ((13, 1),)), style="vocab"),
    ParamSpec("layers.{}.q.weight", (16, 8), "layer", 2, Split(0, ((4, 4),))),
    ParamSpec("layers.{}.gate.weight", (4, 8), "layer", 2),
    ParamSpec("layers.{}.experts.gate_up_proj", (4, 12, 8), "layer", 2, Split(1, ((6, 1), (6, 1))), "experts", experts=4),
    ParamSpec("layers.{}.experts.down_proj", (4, 8, 6), "layer", 2, Split(2, ((6, 1),)), "experts", experts=4),
    ParamSpec("norm.weight", (8,), "last"),
), 2, "")


def at(on: Mesh, dp: int = 1, tp: int = 1, pp: int = 1, ep: int = 1, zero: int = 0) -> Layout:
    return Layout(f"dp{dp}tp{tp}pp{pp}ep{ep}zero{zero}", on.id, dp=dp, tp=tp, pp=pp, ep=ep, zero=zero)


EVERY = [dict(dp=dp, tp=tp, pp=pp, ep=ep, zero=zero) for dp, tp, pp, ep, zero in product(
    (2, 4, 8), (1, 2), (1, 2), (1, 2, 4), (0, 3)) if dp * tp * pp <= 16 and dp % ep == 0]


@pytest.mark.parametrize("zero", [0, 3])
def test_every_element_is_held_as_often_as_it_should_be(zero):
    """On dp / ep ranks where it is an expert's, on dp where it is not; on one of those with zero."""
    for degrees in (d for d in EVERY if d["zero"] == zero):
        on = mesh((0, degrees["dp"] * degrees["tp"] * degrees["pp"]))
        x = at(on, **degrees)
        side = MeshView.of(x, on)
        for rank in on.members():
            assert side.rank(where := cell_of(x, on, rank), side.replica(rank)) == rank and side.cell(rank) == where
        for p in parameters(MODEL):
            seen = torch.zeros(p.spec.shape, dtype=torch.long)
            each = {r: pieces_of_rank(p, 2, x, on, r) for r in on.members()}
            for piece in (piece for found in each.values() for piece in found):
                seen[tuple(slice(*b) for b in piece.box)] += 1
            copies = 1 if zero else x.dp // (x.ep if p.spec.experts else 1)
            copies *= x.tp if p.spec.split is None else 1
            copies *= min(x.pp, 2) if p.spec.stage == "ends" else 1
            assert (seen == copies).all(), (x, p.name)
            assert {r: s.pieces for s in holdings(p, 2, x, on) for r in s.ranks} == {r: f for r, f in each.items() if f}
            count = Counter(each.values())
            assert all(replicas(p, 2, x, on, r) == (count[f] if f else 0) for r, f in each.items())


def test_ranks_that_share_experts_have_all_of_them_once():
    for degrees in (d for d in EVERY if not d["zero"]):
        on = mesh((0, degrees["dp"] * degrees["tp"] * degrees["pp"]))
        x = at(on, **degrees)
        groups, copies = (axis_ranks(x, on, axis) for axis in ("ep", "expert_dp"))
        assert sorted(r for g in groups for r in g) == sorted(r for g in copies for r in g) == list(on.members())
        p = next(p for p in parameters(MODEL) if p.spec.experts)
        for g in groups:
            rows = [f[0].box[0] for r in g if (f := pieces_of_rank(p, 2, x, on, r))]
            assert not rows or [b for a in rows for b in range(*a)] == list(range(4))
        for g in copies:
            assert len({pieces_of_rank(p, 2, x, on, r) for r in g}) == 1


EIGHT, FOUR, HIGH = mesh((0, 8)), mesh((0, 4)), mesh((4, 8))
MOVES = [Case(MODEL, a, am, b, bm, devices) for devices in (2, 4, 8) for a, am, b, bm in (
    (at(EIGHT, dp=8, ep=4), EIGHT, at(EIGHT, dp=2, tp=4), EIGHT),
    (at(EIGHT, dp=4, tp=2, ep=2), EIGHT, at(EIGHT, dp=8, ep=2), EIGHT),
    (at(EIGHT, dp=2, tp=2, pp=2, ep=2), EIGHT, at(FOUR, dp=4, ep=4), FOUR),
    (at(FOUR, tp=4), FOUR, at(HIGH, dp=4, ep=4), HIGH),
    (at(FOUR, dp=4, ep=2, zero=3), FOUR, at(FOUR, dp=2, tp=2, ep=2), FOUR),
    (at(EIGHT, dp=8, ep=4, zero=1), EIGHT, at(EIGHT, dp=8), EIGHT),
    (at(HIGH, dp=2, pp=2, ep=2), HIGH, at(EIGHT, dp=4, pp=2, ep=4, zero=2), EIGHT),
)]


@pytest.mark.parametrize("number", range(len(MOVES)))
def test_moves_are_proved_and_bring_what_is_lacking_once(number):
    case = MOVES[number]
    check(case, 1 + number % 3)
    total, faults = examine_reshard(MODEL, case.src, case.src_mesh, case.dst, case.dst_mesh, case.devices, 64)
    assert not faults and total.bytes > 0


def test_the_same_experts_elsewhere_move_nothing_else():
    """From ep to more of it: what is not an expert's stays where it is."""
    a, b = at(FOUR, dp=4, ep=2), at(FOUR, dp=4, ep=4)
    assert examine_reshard(MODEL, b, FOUR, b, FOUR, 4, 4)[0].bytes == 0
    assert examine_reshard(MODEL, a, FOUR, b, FOUR, 4, 4)[0].bytes < examine_reshard(MODEL, b, FOUR, a, FOUR, 4, 4)[0].bytes
    dense = replace(MODEL, params=tuple(p for p in MODEL.params if not p.experts))
    assert examine_reshard(dense, b, FOUR, a, FOUR, 4, 4)[0].bytes == 0


def held(case: Case, side: str, rank: int) -> dict[str, torch.Tensor]:
    x, on = (case.src, case.src_mesh) if side == "src" else (case.dst, case.dst_mesh)
    out = {}
    for i, p in enumerate(parameters(MODEL)):
        full = (torch.arange(torch.Size(p.spec.shape).numel()) * 7 % 251 + i).view(p.spec.shape).float()
        if found := pieces_of_rank(p, 2, x, on, rank):
            out[p.name] = torch.full(local_shape(p, found), torch.nan)
            for piece in found:
                dim = p.spec.split.dim if p.spec.split else 0
                out[p.name][local_slice(piece, piece.box, dim)] = full[tuple(slice(*b) for b in piece.box)]
    return out


def move_all(rank: int) -> list[str]:
    wrong = []
    for number, case in enumerate(MOVES[:7]):
        right = held(case, "dst", rank)
        got = {name: torch.full_like(t, -1) for name, t in right.items()}
        src, dst = (tensors if rank in on.members() else None for on, tensors in (
            (case.src_mesh, held(case, "src", rank)), (case.dst_mesh, got)))
        route = RankReshard.plan(MODEL, case.src, case.src_mesh, case.dst, case.dst_mesh, case.devices, rank, 400)
        reshard(route, src, dst, torch.float32, SideStream(torch.device("cpu")), number * 16).finish()
        wrong += [f"{case}: {name}" for name, t in right.items() if not torch.equal(got[name], t)]
    return wrong


def test_numbers_arrive_bit_for_bit():
    assert run_world(8, move_all) == [[]] * 8


@pytest.mark.parametrize("degrees", [dict(dp=4, ep=4), dict(dp=4, ep=2, zero=3), dict(dp=2, tp=2, pp=2, ep=2)])
def test_a_save_makes_each_parameter_whole_on_one_rank(degrees):
    on = mesh((0, degrees["dp"] * degrees.get("tp", 1) * degrees.get("pp", 1)))
    x = at(on, **degrees)
    assert not saves.examine_save(MODEL, x, on, len(on.members()))
    owner = owners(MODEL, x, on)
    for p in parameters(MODEL):
        mine = pieces_of_rank(p, 2, x, on, owner[p.name])
        came = [box for m in gather(MODEL, x, on, owner, owner[p.name])[1] for name, box in m.boxes if name == p.name]
        assert sum(map(volume, (*came, *(q.box for q in mine)))) == torch.Size(p.spec.shape).numel()


@pytest.mark.parametrize("wrong", [dict(dp=4, ep=3), dict(dp=8, ep=8)])
def test_what_does_not_divide_has_no_boxes(wrong):
    """Three of four experts' ranks; more ranks than experts."""
    on = mesh((0, wrong["dp"]))
    x, p = at(on, **wrong), next(p for p in parameters(MODEL) if p.spec.experts)
    with pytest.raises(InternalError):
        pieces_of_rank(p, 2, x, on, on.members()[0])
