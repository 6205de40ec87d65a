"""The time of conversations with environments, against what can be reckoned by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rldsl.clusters.model import Distribution
from rldsl.simulate.conversations import PassCosts, ShardConversations, conversation_seconds

COSTS = PassCosts(lambda active: 0.01 + 0.001 * active, lambda tokens, _: 0.002 * tokens,
                  lambda tokens: 0.0001 * tokens)
# 4 turns of 20 tokens each, with 5 tokens of the environment before each
TALK = ShardConversations(count=1, slots=1, live=1, waiting="keep", most_turns=4, context_tokens=20.0, own_tokens=80.0, turns=None,
            tool_seconds=None)


def test_one_conversation_without_latency() -> None:
    seconds, computed = conversation_seconds(TALK, COSTS)
    assert seconds == computed == pytest.approx(80 * 0.011 + 20 * 0.002)


def test_each_answer_takes_its_time_and_so_does_the_beginning() -> None:
    seconds, computed = conversation_seconds(replace(TALK, tool_seconds=Distribution(2.0)), COSTS)
    assert seconds == pytest.approx(computed + 5 * 2.0) and computed == pytest.approx(80 * 0.011 + 20 * 0.002)


def test_all_at_once_share_passes() -> None:
    seconds, _ = conversation_seconds(replace(TALK, count=8, slots=8, live=8), COSTS)
    alone, _ = conversation_seconds(TALK, COSTS)
    assert 80 * 0.018 + 8 * 20 * 0.002 == pytest.approx(seconds, rel=0.1) and seconds < 8 * alone


def test_answers_that_arrive_together_are_prefilled_in_one_pass() -> None:
    passes: list[float] = []

    def prefill(tokens: float, of: float) -> float:
        passes.append(of)
        return 1.0

    many = replace(TALK, count=8, slots=8, live=8, tool_seconds=Distribution(0.5))
    _, computed = conversation_seconds(many, replace(COSTS, prefill=prefill))
    assert passes == [8.0] * 4 and computed == pytest.approx(80 * 0.018 + 4 * 1.0)
    passes.clear()
    apart = replace(many, tool_seconds=Distribution(0.5, 0.4))
    assert conversation_seconds(apart, replace(COSTS, prefill=prefill))[1] > computed and max(passes) < 8


def test_slots_that_wait_are_idle_unless_they_are_given_away() -> None:
    slow = replace(TALK, count=8, slots=2, live=2, tool_seconds=Distribution(1.0))
    kept, computed = conversation_seconds(slow, COSTS)
    assert kept == pytest.approx(4 * (5 * 1.0 + 80 * 0.012), rel=0.1)  # four pairs, one after the other
    for waiting in ("offload", "recompute"):
        given, more = conversation_seconds(replace(slow, live=8, waiting=waiting), COSTS)  # type: ignore[arg-type]
        assert given < 0.7 * kept and more >= computed  # copies and prefills are not free
        assert given >= 5 * 1.0 + 80 * 0.011


def test_fast_tools_make_giving_away_a_loss() -> None:
    fast = replace(TALK, count=8, slots=2, live=2, tool_seconds=Distribution(0.001))
    kept, _ = conversation_seconds(fast, COSTS)
    given, _ = conversation_seconds(replace(fast, live=8, waiting="recompute"), COSTS)
    assert given > kept


def test_turns_vary_and_have_a_limit() -> None:
    few, _ = conversation_seconds(replace(TALK, turns=Distribution(1.0), tool_seconds=Distribution(1.0)), COSTS)
    assert few == pytest.approx(80 * 0.011 + 20 * 0.002 + 2 * 1.0)  # the tokens are those of the program's lengths
    many, _ = conversation_seconds(replace(TALK, turns=Distribution(9.0), tool_seconds=Distribution(1.0)), COSTS)
    assert many == conversation_seconds(replace(TALK, tool_seconds=Distribution(1.0)), COSTS)[0]


def test_many_conversations_are_followed_in_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    many = replace(TALK, count=1000, slots=100, live=100, tool_seconds=Distribution(0.3, 0.2))
    exact = conversation_seconds(many, COSTS)
    monkeypatch.setattr("rldsl.simulate.conversations.MOST_TURNS", 400)
    assert conversation_seconds(many, COSTS) == pytest.approx(exact, rel=0.1)


@pytest.mark.parametrize("count, slots", [(0, 0), (1, 1), (7, 3)])
def test_nothing_to_do_takes_no_time(count: int, slots: int) -> None:
    free = PassCosts(lambda _: 0.0, lambda _, __: 0.0, lambda _: 0.0)
    assert conversation_seconds(replace(TALK, count=count, slots=slots, live=slots), free) == (0.0, 0.0)
