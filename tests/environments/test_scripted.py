"""The scripted environments that tests of decoding use keep the protocol that the real ones keep."""

from __future__ import annotations

import pytest

from rldsl.diag import InternalError
from rldsl.runtime.environments.conversations import Arrival, Conversations
from tests.environments.scripted import Reply, Scripted


def scripted(**more: object) -> Scripted:
    def answer(row: int, turn: int, ids: tuple[int, ...], cut: bool) -> Reply:
        return Reply(stopped="done", turn_reward=1.0) if turn == 1 or cut else Reply((7, row), turn_reward=0.5)

    return Scripted(lambda row, columns, messages, seed: [1, row, seed], answer,
                    reward=lambda row, turns: float(sum(map(len, turns))), **more)  # type: ignore[arg-type]


def test_a_conversation_of_two_turns() -> None:
    script = scripted()
    talk: Conversations = script
    talk.begin(3, {}, "hello", 11)
    assert talk.arrivals(wait=True) == [Arrival(3, (1, 3, 11), False, None, None, None)]
    talk.said(3, [4, 5], False)
    assert talk.arrivals(wait=False) == [Arrival(3, (7, 3), False, None, None, 0.5)]
    talk.said(3, [6], False)
    assert talk.arrivals(wait=True) == [Arrival(3, (), True, "done", 3.0, 1.0)]
    talk.begin(3, {}, "again", 12)  # the row is free


def test_the_order_of_arrival_is_chosen() -> None:
    talk = scripted(looks=lambda row, turn: {0: 2, 1: 0, 2: 1}[row])
    for row in range(3):
        talk.begin(row, {}, "", 0)
    assert [[a.row for a in talk.arrivals(wait=False)] for _ in range(4)] == [[1], [2], [0], []]
    talk.said(0, [5], False)
    assert [a.row for a in talk.arrivals(wait=True)] == [0]  # nothing else to wait for


def test_finish_brings_the_reward() -> None:
    talk = scripted()
    talk.begin(0, {}, "", 0)
    talk.arrivals(wait=True)
    talk.finish(0, "max_tokens")
    assert talk.arrivals(wait=True) == [Arrival(0, (), True, "max_tokens", 0.0, None)]


def test_calls_at_the_wrong_time_are_refused() -> None:
    talk = scripted()
    with pytest.raises(InternalError, match="`said` of row 0"):
        talk.said(0, [1], False)  # has not begun
    with pytest.raises(InternalError, match="no conversation waits"):
        talk.arrivals(wait=True)
    talk.begin(0, {}, "", 0)
    with pytest.raises(InternalError, match="`said` of row 0"):
        talk.said(0, [1], False)  # its first context has not arrived
    with pytest.raises(InternalError, match="`begin` of row 0"):
        talk.begin(0, {}, "", 0)
    talk.close()
    with pytest.raises(InternalError, match="`begin` of row 1"):
        talk.begin(1, {}, "", 0)
