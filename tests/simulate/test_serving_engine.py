"""A serving engine: lengths, continuous batching, a full cache, and what the cluster file says of it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rldsl.clusters import Cluster, preset
from rldsl.diag import Failure
from rldsl.plan.events import Generate
from rldsl.plan.model import Layout
from rldsl.plan.projection import event_paths
from rldsl.plan.spaces import indexed_frames
from rldsl.simulate import Lengths, simulate
from rldsl.simulate.lengths import Row
from rldsl.simulate.machine import Machine
from rldsl.simulate.serving_engine import packed, response_lengths, serve
from rldsl.simulate.time_costs import engine_room
from rldsl.simulate.work_counts import WorkCounts, build_shard
from tests.simulate.plans import ROUND, plan


def each(count: float, cached: float) -> float:
    """Seconds of a step that costs something by itself, by sequence and by token in the cache."""
    return 1.0 + 0.5 * count + 0.01 * cached


def none(tokens: float) -> float:
    return 0.0


@pytest.mark.parametrize("row", [Row(0, 300, 4000), Row(0, 300, 4000, 1.0), Row(0, 3250, 4000, 0.75), Row(0, 3250, 4000)])
def test_lengths_have_the_mean_and_the_longest(row: Row) -> None:
    found = response_lengths(row, 2048, 256)
    assert sum(found) / 256 == pytest.approx(row.response, rel=1e-6)
    assert max(found) <= row.longest and list(found) == sorted(found)


def test_without_a_stated_deviation_the_longest_is_reached() -> None:
    found = response_lengths(Row(0, 300, 4000), 2048, 2048)
    assert 0.9 * 4000 < max(found) <= 4000


def test_a_wider_distribution_cuts_more() -> None:
    cut = [sum(x >= 4000 for x in response_lengths(Row(0, 2000, 4000, log_std), 2048, 256)) for log_std in (0.3, 0.8, 1.5)]
    assert cut == sorted(cut) and cut[0] < cut[-1]


def test_equal_lengths_take_their_steps() -> None:
    found = serve(Row(10, 100, 100), 8, 8, 1e9, each, none, 1)
    assert found.steps == pytest.approx(100) and not found.again
    assert found.seconds == pytest.approx(100 * (1 + 0.5 * 8) + 0.01 * 8 * (10 * 100 + 100 * 100 / 2), rel=1e-3)


def test_the_longest_decides() -> None:
    even, tail = (serve(Row(10, 100, longest), 8, 64, 1e9, each, none, 1) for longest in (100, 400))
    assert tail.steps >= 400 > even.steps
    # after the others have ended a step costs little more than itself
    assert even.seconds < tail.seconds < even.seconds + 400 * (1 + 0.5 + 0.01 * 410)


def test_a_full_cache_makes_sequences_wait_or_begin_again() -> None:
    row = Row(10, 100, 100)
    free, half = (serve(row, 8, 8, tokens, each, none, 1) for tokens in (8 * 110, 4 * 110))
    assert free.steps == pytest.approx(100) and half.steps >= 150
    least = serve(row, 8, 8, 1.0, each, none, 1)  # one always fits; what began beside it goes on later, computed again
    assert 400 < least.steps <= 800 and least.again > 0


def test_prefills_are_shared_by_the_samples_of_a_prompt() -> None:
    def prefill(tokens: float) -> float:
        return tokens

    alone, four = (serve(Row(10, 5, 5), 8, 8, 1e9, lambda *_: 0.0, prefill, n) for n in (1, 4))
    assert alone.seconds == pytest.approx(80) and four.seconds == pytest.approx(20)


def test_packs() -> None:
    assert packed([60, 60, 60], 100) == 3  # no two fit
    assert packed([60, 40, 60, 40], 100) == 2
    assert packed([150], 100) == 1  # a row longer than the limit has a pack of its own
    assert packed([], 100) == 0


# ---------------------------------------------------------------------------------------------- in a cluster file


ENGINE = replace(ROUND, cache_gb=8.0, decode_us=1000.0)


def test_a_cluster_with_an_engine_generates_with_it() -> None:
    found = plan("together")
    own, engine, slower = (simulate(found, c, Lengths(4, 10)).seconds for c in (
        ROUND, ENGINE, replace(ENGINE, decode_us=5000.0)))
    assert own != engine
    assert slower - engine == pytest.approx(4e-3 * 16, rel=0.2)  # the longest response has 16 tokens


def test_an_engine_needs_memory_for_the_weights_and_one_sequence() -> None:
    found = plan("together")
    (event,) = [e for e, _ in event_paths(found) if isinstance(e, Generate)]
    (layout,) = [x for x in found.layouts if x.id == event.layout]
    (model,) = [m for m in found.models if m.name == event.model]
    s = build_shard(model, layout, 0)
    weights, token = s.elements * s.item, s.layers * s.cache * s.item
    row = Lengths().of(indexed_frames(found)[event.frame])

    def engine(bytes: float) -> Cluster:
        return replace(ENGINE, cache_gb=bytes / 1e9)

    for bytes, room in ((weights / s.layers / 2, 0), (weights - 1, 0), (weights + 3.5 * token, 3),
                        (weights + (row.tokens - 0.5) * token, row.tokens - 1)):
        with pytest.raises(Failure) as caught:
            simulate(found, engine(bytes))
        (said,) = caught.value.diagnostics
        assert said.code == "RL0401" and "cache_gb" in said.title and said.place == ENGINE.name
        assert engine_room(engine(bytes), model, layout) == pytest.approx(max(room, 0), abs=1) or not room
    enough = engine(weights + (row.tokens + 0.5) * token)
    assert simulate(found, enough).seconds > simulate(found, ENGINE).seconds, "one sequence at a time"
    assert simulate(found, engine(weights - 1), durations={event.display_name: 1.0}).seconds, "nothing is predicted of it"


@pytest.mark.parametrize("field, amount, most", [("sync_s", 2.0, 1), ("call_s", 1.0, 8)])
def test_seconds_around_calls(field: str, amount: float, most: int) -> None:
    found = plan("together")
    before, after = (simulate(found, replace(ENGINE, **{field: x}), Lengths(4, 10)).seconds for x in (0.0, amount))
    assert amount * 0.99 <= after - before <= amount * most * 1.01


def test_a_product_that_does_not_fill_the_device_is_slower() -> None:
    found, known_rates = plan("together"), preset("h100x8")
    assert known_rates is not None
    s = build_shard(found.models[0], Layout("x", "x"), 0)
    full, units = Machine(known_rates), Machine(replace(known_rates, compute_units=132))
    few, many = WorkCounts(1, s.layers, s.layers, s.layers, 0), WorkCounts(1, s.layers, s.layers * 1e7, 0, 0)
    assert full._fill(s, 100) == 1.0
    shares = [units._fill(s, tokens) for tokens in (1, 100, 10_000, 1e7)]
    assert shares == sorted(shares) and 0 < shares[0] < 0.1 and shares[-1] <= 1
    assert units.forward(s, few) >= full.forward(s, few) and units.forward(s, many) >= full.forward(s, many)


@pytest.mark.parametrize("change", [{"dispatch_gb_s": 0.01}, {"dispatch_gb_s": 0.01, "expert_imbalance": 1.5}])
def test_tokens_come_to_their_experts_no_faster_than_stated(change: dict[str, float]) -> None:
    plain, stated = Machine(ROUND), Machine(replace(ROUND, **change))
    assert stated.dispatch(2e9, 4, False) == pytest.approx(200 * change.get("expert_imbalance", 1.0))
    assert plain.dispatch(2e9, 4, False) == plain.all_to_all(2e9, 4, False)
    assert stated.dispatch(0.0, 4, False) == plain.all_to_all(0.0, 4, False)
