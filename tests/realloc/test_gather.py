"""Every parameter whole on its owner, for saving."""

from collections import Counter

import numpy as np
import pytest

from rldsl.reshard.gather import gather, owners
from rldsl.sharding.boxes import parameters, pieces_of_rank
from tests.plan_algebra.models import layout, layouts, mesh, model


def check(made, at, on, chosen, ranks):
    """Both ends say the same; each owner gets what it lacks, once, from ranks that have it."""
    ends = {r: gather(made, at, on, chosen, r) for r in ranks}
    sent = {(r, m.peer): m.boxes for r in ranks for m in ends[r][0]}
    assert sent == {(m.peer, r): m.boxes for r in ranks for m in ends[r][1]}
    for p in parameters(made):
        count = np.zeros(p.spec.shape, int)
        for piece in pieces_of_rank(p, made.layers, at, on, chosen[p.name]):
            count[tuple(slice(*x) for x in piece.box)] += 1
        for (src, dst), boxes in sent.items():
            for name, box in boxes:
                if name == p.name:
                    assert dst == chosen[name] != src
                    assert box in [x.box for x in pieces_of_rank(p, made.layers, at, on, src)]
                    count[tuple(slice(*x) for x in box)] += 1
        assert (count == 1).all(), p.name
    return sent


@pytest.mark.parametrize("kind", ["gqa", "fused"])
def test_gather_makes_each_parameter_whole_on_its_owner(kind):
    made = model(kind)
    for on in (mesh((0, 8)), mesh((4, 6), (0, 3))):
        for at in layouts(on):
            chosen = owners(made, at, on)
            assert list(chosen) == [p.name for p in parameters(made)]
            by_owner = Counter()
            for p in parameters(made):
                assert pieces_of_rank(p, made.layers, at, on, chosen[p.name]), "owners are holders"
                by_owner[chosen[p.name]] += int(np.prod(p.spec.shape))
            sent = check(made, at, on, chosen, on.members())
            assert all(a // at.tp == b // at.tp for a, b in sent) or len(on.ranks) > 1, "inside a tensor-parallel group"
            if at.pp == 1:
                largest = max(int(np.prod(p.spec.shape)) for p in parameters(made))
                assert max(by_owner.values()) <= sum(by_owner.values()) / len(on.members()) + largest


@pytest.mark.parametrize("owner", [0, 3, 9])
def test_gather_to_one_rank(owner):
    """Also one outside the mesh."""
    made, on = model(), mesh((0, 4))
    for at in (layout(on, tp=4), layout(on, pp=2, dp=2)):
        check(made, at, on, {p.name: owner for p in parameters(made)}, range(10))


def test_gather_wants_an_owner_for_every_parameter():
    made, on = model(), mesh((0, 4))
    with pytest.raises(KeyError):
        gather(made, layout(on, tp=4), on, {}, 0)


def test_a_rank_outside_does_nothing():
    made, on = model(), mesh((0, 4))
    at = layout(on, tp=4)
    assert gather(made, at, on, owners(made, at, on), 7) == ((), ())
