"""What a layout with `zero` holds: even runs of rows of the tensor-parallel part, and parameters that move to and from
it."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch

from rldsl.plan.model import Layout, Mesh, Model, ParamSpec, Split
from rldsl.reshard.box_classes import box_classes
from rldsl.reshard.gather import gather, owners
from rldsl.reshard.node_groups import MeshView
from rldsl.reshard.planning import plan_reshard
from rldsl.reshard.summary import summary
from rldsl.runtime.comm.reshard import RankReshard, reshard
from rldsl.runtime.comm.side_stream import SideStream
from rldsl.sharding.boxes import (
    Parameter,
    cell_of,
    cut_rows,
    holdings,
    local_shape,
    local_slice,
    parameters,
    pieces,
    pieces_of_rank,
    replicas,
    volume,
)
from rldsl.verify import saves
from rldsl.verify.reshards import examine_reshard
from tests.plan_algebra.models import layout, mesh, model
from tests.world import run_world

# GPT-2 keeps its weights as [in, out]: queries, keys and values side by side along dimension 1
TRANSPOSED = Model("m", "causal_lm", "", "float32", (
    ParamSpec("h.{}.c_attn.weight", (5, 24), "layer", 2, Split(1, ((4, 2), (4, 2), (4, 2)))),
    ParamSpec("h.{}.c_proj.weight", (8, 5), "layer", 2, Split(0, ((4, 2),))),
    ParamSpec("wte.weight", (13, 5), "ends", split=Split(0, ((13, 1),))), ParamSpec("scale", (), "all"),
), 2, "")
MODELS = {"gqa": model("gqa"), "fused": model("fused"), "transposed": TRANSPOSED}
LAYOUTS = [(dp, tp, pp, cp) for dp, tp, pp, cp in product((1, 2, 3, 5), (1, 2, 4), (1, 2), (1, 2)) if dp * tp * pp * cp <= 20]


def sharded(on: Mesh, zero: int, **degrees: int) -> Layout:
    made = layout(on, **degrees)
    return replace(made, id=f"{made.id} zero{zero}", zero=zero)


@pytest.mark.parametrize("kind", MODELS)
def test_rows_are_even_runs_of_the_local_tensor(kind: str) -> None:
    """The same as chunking the joined local tensor, which is how gathering puts it together."""
    made = MODELS[kind]
    for dp, tp, pp, cp in LAYOUTS:
        on = mesh((0, dp * tp * pp * cp))
        plain, at = layout(on, pp, dp, tp, cp), sharded(on, 3, pp=pp, dp=dp, tp=tp, cp=cp)
        side = MeshView.of(at, on)
        for p in parameters(made):
            full = np.arange(volume(tuple((0, n) for n in p.spec.shape))).reshape(p.spec.shape)
            for rank in on.members():
                where = cell_of(at, on, rank)
                assert where == side.cell(rank) and side.rank(where, side.replica(rank)) == rank
                mine, whole = local(p, full, pieces_of_rank(p, made.layers, at, on, rank)), local(
                    p, full, pieces_of_rank(p, made.layers, plain, on, rank))
                if whole is None or not whole.ndim:
                    expected = whole if whole is not None and where.zero_shard == 0 else None
                else:
                    rows = -(-whole.shape[0] // dp)
                    expected = whole[where.zero_shard * rows : (where.zero_shard + 1) * rows]
                    expected = expected if expected.size else None
                assert (mine is None) == (expected is None)
                assert mine is None or np.array_equal(mine, expected)


def local(p: Parameter, full: np.ndarray, found: tuple) -> np.ndarray | None:
    if not found:
        return None
    dim = p.spec.split.dim if p.spec.split else 0
    out = np.full(local_shape(p, found), -1)
    for piece in found:
        out[local_slice(piece, piece.box, dim)] = full[tuple(slice(*x) for x in piece.box)]
    assert (out >= 0).all()
    return out


@pytest.mark.parametrize("kind", MODELS)
def test_shares_are_what_every_rank_says(kind: str) -> None:
    made = MODELS[kind]
    for dp, tp, pp, cp in LAYOUTS:
        on = mesh((0, dp * tp * pp * cp))
        at = sharded(on, 1, pp=pp, dp=dp, tp=tp, cp=cp)
        for p in parameters(made):
            found = {r: s.pieces for s in holdings(p, made.layers, at, on) for r in s.ranks}
            each = {r: pieces_of_rank(p, made.layers, at, on, r) for r in on.members()}
            assert found == {r: x for r, x in each.items() if x}
            count = Counter(each.values())
            assert all(replicas(p, made.layers, at, on, r) == (count[x] if x else 0) for r, x in each.items())


def test_a_shard_may_have_nothing() -> None:
    head = ParamSpec("score.weight", (1, 8), "last")
    whole = pieces(head, 1, 0)
    assert [len(cut_rows(head, whole, 4, i)) for i in range(4)] == [1, 0, 0, 0]
    assert cut_rows(head, whole, 1, 0) == whole and cut_rows(ParamSpec("scale", ()), pieces(ParamSpec("scale", ()), 1, 0), 3, 1) == ()


def test_levels_hold_the_same() -> None:
    on = mesh((0, 4))
    one, three = (sharded(on, z, dp=4) for z in (1, 3))
    for p in parameters(model()):
        assert holdings(p, 3, one, on) == holdings(p, 3, three, on)


FOUR, LOW = mesh((0, 4)), mesh((0, 2))
MOVES = tuple((made, a, am, b, bm, devices) for made in (*MODELS.values(),) for devices in (1, 2, 4) for a, am, b, bm in (
    (sharded(FOUR, 3, dp=4), FOUR, layout(FOUR, dp=4), FOUR),
    (sharded(FOUR, 1, dp=2, tp=2), FOUR, layout(FOUR, tp=4), FOUR),
    (layout(FOUR, dp=2, tp=2), FOUR, sharded(FOUR, 2, dp=4), FOUR),
    (sharded(FOUR, 3, dp=2, pp=2), FOUR, sharded(FOUR, 3, dp=2, tp=2), FOUR),
    (sharded(LOW, 3, dp=2), LOW, sharded(FOUR, 3, dp=4), FOUR),
))


def test_every_move_is_proved_and_moves_no_more_than_is_lacking() -> None:
    for made, a, am, b, bm, devices in MOVES:
        total, faults = examine_reshard(made, a, am, b, bm, devices, 64)
        assert not faults
        lacking = sum(volume(box) - sum(
            overlap(box, piece.box) for piece in pieces_of_rank(p, made.layers, a, am, r))
            for r in bm.members() for p in parameters(made)
            for box in (q.box for q in pieces_of_rank(p, made.layers, b, bm, r)))
        assert total.bytes == 4 * lacking == summary(plan_reshard(made, a, am, b, bm, devices), made).bytes


def overlap(a: tuple, b: tuple) -> int:
    return int(np.prod([max(0, min(q, s) - max(p, r)) for (p, q), (r, s) in zip(a, b)]))


def test_paths_of_different_divisions_have_different_digests() -> None:
    made, dst = model(), layout(FOUR, tp=2, dp=2)
    digests = {summary(plan_reshard(made, a, FOUR, dst, FOUR, 4), made).digest for a in (
        layout(FOUR, dp=4), sharded(FOUR, 1, dp=4), sharded(FOUR, 1, dp=2, tp=2), layout(FOUR, dp=2, tp=2))}
    assert len(digests) == 4


def test_lines_stay_few() -> None:
    """As many as there are places, whatever the layers."""
    on = mesh((0, 64))
    found = [len(box_classes(model(layers=n), sharded(on, 3, dp=16, tp=4), layout(on, dp=64))) for n in (4, 64)]
    assert found[0] == found[1] <= 64


def move_all(rank: int) -> list[str]:
    wrong = []
    for number, (made, a, am, b, bm, devices) in enumerate(MOVES):
        def held(at: Layout, on: Mesh) -> dict[str, torch.Tensor]:
            out = {}
            for i, p in enumerate(parameters(made)):
                full = (torch.arange(torch.Size(p.spec.shape).numel()) * 7 % 251 + i).view(p.spec.shape).float()
                if found := pieces_of_rank(p, made.layers, at, on, rank):
                    out[p.name] = torch.empty(local_shape(p, found))
                    for piece in found:
                        out[p.name][local_slice(piece, piece.box, p.spec.split.dim if p.spec.split else 0)] = full[
                            tuple(slice(*x) for x in piece.box)]
            return out

        right = held(b, bm)
        got = {name: torch.full_like(t, -1) for name, t in right.items()}
        src, dst = (x if rank in on.members() else None for x, on in ((held(a, am), am), (got, bm)))
        reshard(RankReshard.plan(made, a, am, b, bm, devices, rank), src, dst, torch.float32,
                SideStream(torch.device("cpu")), number * 16).finish()
        wrong += [f"{a.id} to {b.id}: {name}" for name, t in right.items() if not torch.equal(got[name], t)]
    return wrong


def test_numbers_arrive_bit_for_bit() -> None:
    assert run_world(4, move_all) == [[]] * 4


@pytest.mark.parametrize("kind", MODELS)
def test_a_save_makes_each_parameter_whole_on_one_rank_and_no_rank_has_all(kind: str) -> None:
    made = MODELS[kind]
    for degrees in (dict(dp=4), dict(dp=2, tp=2), dict(dp=3, pp=2), dict(dp=2, cp=2)):
        on = mesh((0, int(np.prod(list(degrees.values())))))
        at = sharded(on, 3, **degrees)
        assert not saves.examine_save(made, at, on, len(on.members()))
        owner = owners(made, at, on)
        assert len(set(owner.values())) > 1
        for rank in on.members():
            sends, receives = gather(made, at, on, owner, rank)
            mine = {p.name for p in parameters(made) if owner[p.name] == rank}
            assert {name for m in receives for name, _ in m.boxes} <= mine
            assert all(any(volume(box) for _, box in m.boxes) for m in (*sends, *receives))
