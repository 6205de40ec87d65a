"""Moves between layouts: right values, exact bytes, nearest and evenly loaded senders."""

from collections import Counter
from functools import cache
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rldsl.plan.boxes import contains, holding, local_shape, local_slice, parameters, volume
from rldsl.plan.movement import (Demand, Move, balance, digest, fill, gather_moves, local_copies, nearest, owners,
                                 rank_moves, realloc_moves, summary)
from tests.plan_algebra.models import layout, layouts, mesh, model

MESHES = [(mesh((0, 4)), mesh((0, 4))), (mesh((0, 4)), mesh((4, 8))), (mesh((0, 6)), mesh((4, 8))),
          (mesh((0, 2), (4, 6)), mesh((0, 8))), (mesh((0, 8)), mesh((2, 3)))]
PAIRS = [(a, am, b, bm) for am, bm in MESHES for a, b in product(layouts(am), layouts(bm))]


def tensors(m):
    return {p.name: 1.0 + i + np.arange(np.prod(p.spec.shape)).reshape(p.spec.shape) / 1000
            for i, p in enumerate(parameters(m))}


def split_dim(p):
    return p.spec.split.dim if p.spec.split else 0


def view(p, found, local, box):
    piece = next(x for x in found if contains(x.box, box))
    return local[local_slice(piece, box, split_dim(p))]


def shard(p, found, full):
    """What a rank with these pieces holds, by plain concatenation."""
    return np.concatenate([full[tuple(slice(*x) for x in piece.box)] for piece in found], split_dim(p))


@cache
def masks(m, at, on):
    """For each parameter, each element's set of holders as a bit mask: an independent account of who has what."""
    out = {}
    for p in parameters(m):
        bits = np.zeros(p.spec.shape, np.int64)
        for r in on.members():
            for piece in holding(p, m.layers, at, on, r):
                bits[tuple(slice(*x) for x in piece.box)] |= 1 << r
        out[p.name] = bits
    return out


def lacks(m, a, am, b, bm, devices_per_node):
    """Elements lacked, by the set of nearest holders."""
    have, want, out = masks(m, a, am), masks(m, b, bm), Counter()
    for name in have:
        both, counts = np.unique(np.stack([have[name].ravel(), want[name].ravel()]), axis=1, return_counts=True)
        for h, w, count in zip(*both.tolist(), counts.tolist()):
            holders = [r for r in am.members() if h >> r & 1]
            for d in bm.members():
                if w >> d & 1 and not h >> d & 1:
                    near = [r for r in holders if r // devices_per_node == d // devices_per_node]
                    out[tuple(near or holders)] += count
    return out


@pytest.mark.parametrize("kind", ["gqa", "fused"])
def test_round_trip_and_exact_bytes_over_every_pair(kind):
    m = model(kind)
    full, by_name = tensors(m), {p.name: p for p in parameters(m)}
    for a, am, b, bm in PAIRS:
        have = {(r, n): (holding(p, m.layers, a, am, r)) for r in am.members() for n, p in by_name.items()}
        want = {(r, n): (holding(p, m.layers, b, bm, r)) for r in bm.members() for n, p in by_name.items()}
        source = {k: shard(by_name[k[1]], f, full[k[1]]) for k, f in have.items() if f}
        target = {k: np.full(local_shape(by_name[k[1]], f), np.nan) for k, f in want.items() if f}

        def write(name, box, src, dst):
            p = by_name[name]
            into = view(p, want[dst, name], target[dst, name], box)
            assert np.isnan(into).all(), "received twice, or had it already"
            into[...] = view(p, have[src, name], source[src, name], box)

        for r in bm.members():
            for name, box in local_copies(m, a, am, b, bm, r):
                write(name, box, r, r)
        moves = realloc_moves(m, a, am, b, bm, 4)
        for x in moves:
            assert x.src != x.dst
            write(x.name, x.box, x.src, x.dst)
        for k, got in target.items():
            np.testing.assert_array_equal(got, shard(by_name[k[1]], want[k], full[k[1]]))
        assert summary(moves, m).bytes == 4 * lacks(m, a, am, b, bm, 4).total()
        assert summary(moves, m).messages == len(moves)


def test_same_layout_moves_nothing():
    on = mesh((0, 8))
    for at in layouts(on):
        assert realloc_moves(model(), at, on, at, on, 8) == ()
        assert summary((), model()).busiest_bytes == 0


def test_sources_are_nearest():
    m = model("fused")
    for a, am, b, bm in PAIRS:
        have = masks(m, a, am)
        for x in realloc_moves(m, a, am, b, bm, 2):
            bits = int(have[x.name][tuple(start for start, _ in x.box)])
            near = [r for r in am.members() if bits >> r & 1 and r // 2 == x.dst // 2]
            assert not near or x.src in near


def optimum(demand):
    """Least possible load of the busiest sender when everybody asks the nearest holders (a linear program)."""
    linprog = pytest.importorskip("scipy.optimize").linprog
    if not demand:
        return 0
    edges = [(c, r) for c in demand for r in c]
    ranks, classes = sorted({r for _, r in edges}), list(demand)
    equal = np.zeros((len(classes), len(edges) + 1))
    below = np.zeros((len(ranks), len(edges) + 1))
    below[:, -1] = -1
    for i, (c, r) in enumerate(edges):
        equal[classes.index(c), i] = 1
        below[ranks.index(r), i] = 1
    cost = np.eye(len(edges) + 1)[-1]
    return linprog(cost, below, np.zeros(len(ranks)), equal, [demand[c] for c in classes]).fun


def wide(kind):
    """The same model with larger tensors, so that rounding to rows does not hide the balance."""
    m = model(kind, layers=6)
    specs = tuple(type(s)(s.name, tuple(32 * n if d else n for d, n in enumerate(s.shape)), s.stage, s.layers,
                          s.split and type(s.split)(s.split.dim, tuple(
                              (u, 32 * z if s.split.dim else z) for u, z in s.split.parts)), s.style) for s in m.params)
    return type(m)(m.name, m.kind, "", "bfloat16", specs, m.layers, "")


WIDE = [(mesh((0, 8)), mesh((0, 8))), (mesh((0, 8)), mesh((8, 16))), (mesh((0, 8)), mesh((4, 10)))]


@pytest.mark.parametrize("devices_per_node", [4, 16])
@pytest.mark.parametrize("kind", ["gqa", "fused"])
def test_busiest_sender_is_within_five_percent_of_the_linear_program(kind, devices_per_node):
    m = wide(kind)
    for am, bm in WIDE:
        for a, b in product(layouts(am, 2), layouts(bm, 2)):
            sent = Counter()
            for x in realloc_moves(m, a, am, b, bm, devices_per_node):
                sent[x.src] += volume(x.box)
            demand = lacks(m, a, am, b, bm, devices_per_node)
            assert sum(sent.values()) == demand.total()
            assert max(sent.values(), default=0) <= 1.05 * optimum(demand), (a, b)


@given(st.lists(st.integers(0, 100), min_size=1, max_size=8), st.integers(0, 300))
def test_fill_levels_the_lowest(loads, amount):
    added = fill(loads, amount)
    after = [x + y for x, y in zip(loads, added)]
    assert sum(added) == amount and min(added) >= 0
    receiving = [x for x, y in zip(after, added) if y]
    assert not receiving or max(receiving) - min(after) <= 1


@given(st.lists(st.tuples(st.sets(st.integers(0, 5), min_size=1), st.integers(1, 10**6)), min_size=1, max_size=6))
@settings(max_examples=40, deadline=None)
def test_balance_reaches_the_optimum(classes):
    """The optimum by its dual: the most that any set of ranks must send alone, evenly."""
    sizes = {Demand(tuple(sorted(h)), (100 + i,)): n for i, (h, n) in enumerate(classes)}
    loads = Counter()
    for demand, amounts in balance(sizes).items():
        assert sum(amounts) == sizes[demand]
        loads.update(dict(zip(demand.holders, amounts)))
    best = max(sum(n for d, n in sizes.items() if all(bits >> r & 1 for r in d.holders)) / bits.bit_count()
               for bits in range(1, 64))
    assert max(loads.values()) <= 1.01 * best + 6


def test_nearest_splits_needers_by_node():
    assert list(nearest((0, 1, 4), (2, 8, 5), 4)) == [
        Demand((0, 1), (2,)), Demand((0, 1, 4), (8,)), Demand((4,), (5,))]


def test_ranks_see_their_own_moves_in_order():
    on = mesh((0, 8))
    moves = realloc_moves(model(), layout(on, pp=2, dp=2, tp=2), on, layout(on, dp=2, tp=4), on, 8)
    sends, receives = zip(*(rank_moves(moves, r) for r in range(8)))
    assert Counter(x for s in sends for x in s) == Counter(x for r in receives for x in r) == Counter(moves)
    assert all(list(s) == [x for x in moves if x.src == r] for r, s in enumerate(sends))
    assert rank_moves(moves, 99) == ((), ())


def test_moves_are_deterministic_and_the_digest_sees_every_change():
    on, m = mesh((0, 8)), model("fused")
    args = (m, layout(on, pp=2, dp=4), on, layout(on, tp=4, dp=2), on, 8)
    moves = realloc_moves(*args)
    assert moves == realloc_moves(*args)
    assert len(set(moves)) == len(moves)
    first = moves[0]
    changed = [moves[1:], (moves[1], moves[0], *moves[2:]),
               (Move(first.name, first.box, first.dst, first.src), *moves[1:]),
               (Move(first.name, ((0, 1),), first.src, first.dst), *moves[1:])]
    assert len({digest(x) for x in (moves, *changed)}) == 5
    assert digest(iter(moves)) == digest(moves)


@pytest.mark.parametrize("kind", ["gqa", "fused"])
def test_gather_makes_each_parameter_whole_on_its_owner(kind):
    m, on = model(kind), mesh((0, 8))
    for at in layouts(on):
        chosen = owners(m, at, on)
        assert list(chosen) == [p.name for p in parameters(m)]
        by_owner = Counter()
        moves = gather_moves(m, at, on, chosen)
        for p in parameters(m):
            mine = holding(p, m.layers, at, on, chosen[p.name])
            assert mine, "owners are holders"
            count = np.zeros(p.spec.shape, int)
            for x in [piece.box for piece in mine] + [x.box for x in moves if x.name == p.name]:
                count[tuple(slice(*y) for y in x)] += 1
            assert (count == 1).all()
            by_owner[chosen[p.name]] += volume(tuple((0, n) for n in p.spec.shape))
        assert all(x.dst == chosen[x.name] for x in moves)
        largest = max(int(np.prod(p.spec.shape)) for p in parameters(m))
        if at.pp == 1:
            assert max(by_owner.values()) <= sum(by_owner.values()) / 8 + largest


def test_gather_to_one_rank_outside_the_mesh():
    m, on = model(), mesh((0, 4))
    moves = gather_moves(m, layout(on, tp=4), on, {p.name: 9 for p in parameters(m)})
    assert {x.dst for x in moves} == {9}
    assert summary(moves, m).bytes == 4 * sum(int(np.prod(p.spec.shape)) for p in parameters(m))


def test_gather_wants_an_owner_for_every_parameter():
    m, on = model(), mesh((0, 4))
    with pytest.raises(KeyError):
        gather_moves(m, layout(on, tp=4), on, {})


def test_a_layout_must_fill_its_mesh():
    m, on = model(), mesh((0, 4))
    with pytest.raises(AssertionError):
        realloc_moves(m, layout(on, tp=2), on, layout(on, tp=4), on, 8)
