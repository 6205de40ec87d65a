"""The time of conversations with environments, against what can be reckoned by hand."""

from __future__ import annotations

from dataclasses import astuple, replace
from math import inf

import pytest

from rldsl.clusters import Cluster, preset
from rldsl.clusters.model import Distribution
from rldsl.simulate.conversations import EnvironmentCosts, PassCosts, ShardConversations, conversation_seconds
from rldsl.simulate.machine import Machine

COSTS = PassCosts(lambda active: 0.01 + 0.001 * active, lambda tokens, _: 0.002 * tokens,
                  lambda tokens: 0.0001 * tokens)
# 4 turns of 20 tokens each, with 5 tokens of the environment before each
TALK = ShardConversations(count=1, slots=1, live=1, waiting="keep", most_turns=4, context_tokens=20.0, own_tokens=80.0, turns=None,
            tool_seconds=None)


def waits(each: Distribution) -> dict[str, Distribution]:
    """The same for the first words and for every answer."""
    return {"tool_seconds": each, "reset_seconds": each}


def test_one_conversation_without_latency() -> None:
    seconds, computed = conversation_seconds(TALK, COSTS)
    assert seconds == computed == pytest.approx(80 * 0.011 + 20 * 0.002)


def test_each_answer_takes_its_time_and_so_does_the_beginning() -> None:
    seconds, computed = conversation_seconds(replace(TALK, **waits(Distribution(2.0))), COSTS)
    assert seconds == pytest.approx(computed + 5 * 2.0) and computed == pytest.approx(80 * 0.011 + 20 * 0.002)


@pytest.mark.parametrize("turns", [1, 2, 4])
def test_answers_and_the_beginning_have_times_of_their_own(turns: int) -> None:
    few = replace(TALK, turns=Distribution(float(turns)))
    plain, _ = conversation_seconds(few, COSTS)
    answers, _ = conversation_seconds(replace(few, tool_seconds=Distribution(2.0)), COSTS)
    begins, _ = conversation_seconds(replace(few, reset_seconds=Distribution(3.0)), COSTS)
    assert answers == pytest.approx(plain + turns * 2.0) and begins == pytest.approx(plain + 3.0)


def test_all_at_once_share_passes() -> None:
    seconds, _ = conversation_seconds(replace(TALK, count=8, slots=8, live=8), COSTS)
    alone, _ = conversation_seconds(TALK, COSTS)
    assert 80 * 0.018 + 8 * 20 * 0.002 == pytest.approx(seconds, rel=0.1) and seconds < 8 * alone


def test_answers_that_arrive_together_are_prefilled_in_one_pass() -> None:
    passes: list[float] = []

    def prefill(tokens: float, of: float) -> float:
        passes.append(of)
        return 1.0

    many = replace(TALK, count=8, slots=8, live=8, **waits(Distribution(0.5)))
    _, computed = conversation_seconds(many, replace(COSTS, prefill=prefill))
    assert passes == [8.0] * 4 and computed == pytest.approx(80 * 0.018 + 4 * 1.0)
    passes.clear()
    apart = replace(many, **waits(Distribution(0.5, 0.4)))
    assert conversation_seconds(apart, replace(COSTS, prefill=prefill))[1] > computed and max(passes) < 8


def test_slots_that_wait_are_idle_unless_they_are_given_away() -> None:
    slow = replace(TALK, count=8, slots=2, live=2, **waits(Distribution(1.0)))
    kept, computed = conversation_seconds(slow, COSTS)
    assert kept == pytest.approx(4 * (5 * 1.0 + 80 * 0.012), rel=0.1)  # four pairs, one after the other
    for waiting in ("offload", "recompute"):
        given, more = conversation_seconds(replace(slow, live=8, waiting=waiting), COSTS)  # type: ignore[arg-type]
        assert given < 0.7 * kept and more >= computed  # copies and prefills are not free
        assert given >= 5 * 1.0 + 80 * 0.011


def test_fast_tools_make_giving_away_a_loss() -> None:
    fast = replace(TALK, count=8, slots=2, live=2, **waits(Distribution(0.001)))
    kept, _ = conversation_seconds(fast, COSTS)
    given, _ = conversation_seconds(replace(fast, live=8, waiting="recompute"), COSTS)
    assert given > kept


def test_turns_vary_and_have_a_limit() -> None:
    few, _ = conversation_seconds(replace(TALK, turns=Distribution(1.0), **waits(Distribution(1.0))), COSTS)
    assert few == pytest.approx(80 * 0.011 + 20 * 0.002 + 2 * 1.0)  # the tokens are those of the program's lengths
    many, _ = conversation_seconds(replace(TALK, turns=Distribution(9.0), **waits(Distribution(1.0))), COSTS)
    assert many == conversation_seconds(replace(TALK, **waits(Distribution(1.0))), COSTS)[0]


def test_many_conversations_are_followed_in_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    many = replace(TALK, count=1000, slots=100, live=100, **waits(Distribution(0.3, 0.2)))
    exact = conversation_seconds(many, COSTS)
    monkeypatch.setattr("rldsl.simulate.conversations.MOST_TURNS", 400)
    assert conversation_seconds(many, COSTS) == pytest.approx(exact, rel=0.1)


@pytest.mark.parametrize("count, slots", [(0, 0), (1, 1), (7, 3)])
def test_nothing_to_do_takes_no_time(count: int, slots: int) -> None:
    free = PassCosts(lambda _: 0.0, lambda _, __: 0.0, lambda _: 0.0)
    assert conversation_seconds(replace(TALK, count=count, slots=slots, live=slots), free) == (0.0, 0.0)


# ----------------------------------------------------------------------------------- what environments take


def test_the_rank_starts_processes_one_after_the_other_and_takes_answers() -> None:
    host = EnvironmentCosts(start=0.5, turn=0.25)
    seconds, computed = conversation_seconds(replace(TALK, environments=host), COSTS)
    assert seconds == computed == pytest.approx(80 * 0.011 + 20 * 0.002 + 0.5 + 5 * 0.25)
    many = replace(TALK, count=8, slots=8, live=8)
    without, _ = conversation_seconds(many, COSTS)
    assert conversation_seconds(replace(many, environments=host), COSTS)[0] == pytest.approx(
        without + 8 * (0.5 + 5 * 0.25), rel=0.05)


@pytest.mark.parametrize("cores, beyond", [
    (0.0, 8 * 5 * 0.1), (1.0, 5 * 8 * 0.1), (2.0, 5 * 4 * 0.1), (0.5, 5 * 8 * 0.2)])
def test_processes_compute_on_cores_that_are_free(cores: float, beyond: float) -> None:
    """All answers of a turn come one after the other on each core, before the last of them is prefilled."""
    free = PassCosts(lambda _: 0.0, lambda _, __: 0.0, lambda _: 0.0)
    many = replace(TALK, count=8, slots=8, live=8, environments=EnvironmentCosts(answer=0.1, cores=cores))
    seconds, computed = conversation_seconds(many, free)
    assert seconds == pytest.approx(beyond, rel=0.2)
    assert computed == pytest.approx(seconds if cores == 0 else 0.0)


def test_hosts_of_devices_have_cores_enough() -> None:
    host = EnvironmentCosts(process=9.0, answer=9.0)
    assert conversation_seconds(replace(TALK, environments=host), COSTS) == conversation_seconds(TALK, COSTS)


def test_a_process_ends_after_its_conversation() -> None:
    """Nobody waits for it on a core of its own; on the rank's core it takes the rank's time."""
    alone, _ = conversation_seconds(TALK, COSTS)
    for cores, more in ((1.0, 0.0), (0.0, 0.7)):
        host = EnvironmentCosts(process=0.7, cores=cores)
        assert conversation_seconds(replace(TALK, environments=host), COSTS)[0] == pytest.approx(alone + more)


def test_turns_of_different_lengths_make_more_and_smaller_passes() -> None:
    passes: list[float] = []

    def prefill(tokens: float, of: float) -> float:
        passes.append(of)
        return 0.01

    many = replace(TALK, count=8, slots=8, live=8)
    equal, _ = conversation_seconds(many, replace(COSTS, prefill=prefill))
    assert passes == [8.0] * 4
    passes.clear()
    varied = replace(many, turn_tokens=Distribution(20.0, values=(5.0, 15.0, 25.0, 35.0)), most_own=40.0)
    seconds, _ = conversation_seconds(varied, replace(COSTS, prefill=prefill))
    assert len(passes) > 8 and sum(passes) == 8 * 4 and seconds > 0.8 * equal
    capped = replace(many, turn_tokens=Distribution(90.0), most_own=20.0)
    assert conversation_seconds(capped, COSTS) == conversation_seconds(many, COSTS)


@pytest.mark.parametrize("cores", [0.0, 1.0, inf])
def test_terms_of_the_host_only_make_a_call_longer(cores: float) -> None:
    """As the bounds of `rlc search` need it."""
    talk = replace(TALK, count=6, slots=3, live=3, **waits(Distribution(0.05, 0.03)))
    before = conversation_seconds(talk, COSTS)[0]
    for more in (EnvironmentCosts(start=0.01, cores=cores), EnvironmentCosts(start=0.01, turn=0.01, cores=cores),
                 EnvironmentCosts(start=0.01, turn=0.01, answer=0.01, process=0.01, cores=cores)):
        seconds = conversation_seconds(replace(talk, environments=more), COSTS)[0]
        assert seconds > before
        before = seconds if cores < inf else before


def test_conversations_in_groups_take_as_much_of_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    many = replace(TALK, count=400, slots=100, live=100, environments=EnvironmentCosts(0.002, 0.001, 0.001, 0.001, 1.0))
    exact = conversation_seconds(many, COSTS)
    monkeypatch.setattr("rldsl.simulate.conversations.MOST_TURNS", 400)
    assert conversation_seconds(many, COSTS) == pytest.approx(exact, rel=0.1)


SHARED = Cluster(gpus=2, cores=4, conversation_us=2000.0, turn_us=300.0, environment_us=1000.0, answer_us=100.0)


@pytest.mark.parametrize("cluster, threads, cores", [
    (SHARED, 1, 1.0), (SHARED, 2, 0.0), (replace(SHARED, gpus=8), 1, 0.0), (replace(SHARED, cores=3), 1, 0.5),
    (replace(SHARED, cores=0), 1, inf)])
def test_the_cluster_says_what_environments_take(cluster: Cluster, threads: int, cores: float) -> None:
    found = astuple(Machine(cluster, threads).environments())
    assert found == pytest.approx((0.002, 0.0003, 0.001, 0.0001, cores))


def test_built_in_node_types_count_none() -> None:
    known = preset("h100x8")
    assert known is not None and Machine(known).environments() == EnvironmentCosts()
