"""Calls that come one after another wherever they are lengthen the bound, and never above a long run of steps."""

from __future__ import annotations

import random
from statistics import mean

import pytest

from rldsl.search import step_time
from rldsl.search.branch_and_bound import branch_and_bound
from rldsl.search.evaluator import Evaluator
from rldsl.search.lower_bound import LowerBound
from rldsl.search.space import Block
from rldsl.simulate import Lengths
from tests.search.programs import PPO, PROGRAMS, cluster, instance
from tests.search.test_reshard_bounds import draw

LINE = "  critic.train(gen, loss=value_clip(old=v, ret=ret), minibatches=4)\n"
WHITENED = "adv=whiten(adv)), minibatches=4)\n"
TEXTS = {"ppo": PPO, "late critic": PPO.replace(LINE, "").replace(WHITENED, WHITENED + LINE),
         "grpo": PROGRAMS["grpo"], "remax": PROGRAMS["remax"]}
LENGTHS = Lengths(0.0, 200.0)


def of(name: str, nodes: int = 2, gpus: int = 4) -> Evaluator:
    return instance("ppo", "1B", cluster(nodes, gpus, 80), LENGTHS, batch=64, text=TEXTS[name])


def inside(a: Block, b: Block) -> bool:
    return b.start <= a.start and a.stop <= b.stop


@pytest.mark.parametrize("name", sorted(TEXTS))
def test_the_order_is_the_same_on_any_ranks(name: str) -> None:
    i, r = of(name), random.Random(name)
    seen = set()
    for _ in range(300):
        blocks = [r.choice(i.tree.all_blocks) for _ in i.calls]
        order = i.schedule(blocks).jobs
        for a, b in i.bound.ordered_calls:
            if inside(blocks[a], blocks[b]):
                assert order.index(i.calls[a].number) < order.index(i.calls[b].number), blocks
                seen.add((a, b))
    assert seen == {*i.bound.ordered_calls}


def names(i: Evaluator) -> set[tuple[str, str]]:
    return {(i.calls[a].name, i.calls[b].name) for a, b in i.bound.ordered_calls}


def test_which_calls_have_an_order() -> None:
    assert ("critic.train", "actor.train") in names(of("ppo"))
    assert ("judge.score", "ref.logprobs") in names(of("grpo"))


def test_what_waits_for_more_has_no_order_with_what_follows() -> None:
    """The actor's training waits for whitened advantages, the critic's does not: either may start first."""
    assert not {("critic.train", "actor.train"), ("actor.train", "critic.train")} & names(of("late critic"))


def test_calls_that_may_run_ahead_have_no_order() -> None:
    lagging = instance("ppo", "1B", cluster(2, 4, 80), LENGTHS, text=PPO.replace("seed=1", "seed=1, lag=1"))
    assert lagging.bound.ordered_calls == ()


@pytest.mark.parametrize("name", sorted(TEXTS))
def test_no_long_run_is_faster_than_the_bound(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    i, r, longer = of(name), random.Random(name), 0
    for a in [draw(i, r) for _ in range(40)]:
        every, known = dict(enumerate(a.blocks)), {c: e.seconds for c, e in enumerate(a.candidates)}
        bound = i.bound.step_seconds(every, known)
        candidates = i.resolve_copies(a.blocks, a.candidates)
        reshards = i.reshards_of_copies(a.blocks, candidates)
        steps = []
        for n in range(12, 24):
            monkeypatch.setattr(step_time, "NUM_STEPS", n)
            steps.append(i.seconds(a.blocks, candidates, reshards))
        assert bound <= mean(steps) * (1 + 1e-9)
        longer += bound > without_order(i, every, known)
    assert longer


def without_order(i: Evaluator, blocks: dict[int, Block], known: dict[int, float]) -> float:
    plain = LowerBound(i.problem, i.table, i.reshard_bounds)
    plain.__dict__["ordered_calls"] = ()
    return plain.step_seconds(blocks, known)


@pytest.mark.parametrize("name", ["ppo", "late critic"])
def test_it_proves_more_with_as_many_nodes(name: str) -> None:
    i, plain = of(name), of(name)
    plain.bound.__dict__["ordered_calls"] = ()
    ours, others = (branch_and_bound(x, gap=0.0, max_nodes=3000) for x in (i, plain))
    assert others.bound <= ours.bound <= ours.best[0].seconds <= others.best[0].seconds
    assert ours.num_nodes <= others.num_nodes
