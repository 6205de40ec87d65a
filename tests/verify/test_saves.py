"""The messages of a save are looked at on every rank, however many there are."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest

from rldsl.plan.model import Layout, Mesh, Model, ParamSpec, Split
from rldsl.reshard.gather import gather_messages, owners
from rldsl.reshard.rounds import Message
from rldsl.verify import saves

Known = dict[int, tuple[tuple[Message, ...], tuple[Message, ...]]]

MODEL = Model("a", "causal_lm", "", "float32", tuple(
    ParamSpec(f"{i}.{{}}.weight", (64, 64), "layer", 32, Split(0, ((64, 1),))) for i in range(4)), 32, "")
LAYOUTS = [dict(dp=16, tp=2), dict(dp=8, tp=2, pp=2), dict(dp=16, tp=2, zero=1), dict(dp=32, tp=4)]


def placed(dp: int, tp: int = 1, pp: int = 1, zero: int = 0) -> tuple[Layout, Mesh]:
    return Layout("L", "m", dp=dp, tp=tp, pp=pp, zero=zero), Mesh("m", ((0, dp * tp * pp),))


def found(monkeypatch: pytest.MonkeyPatch, degrees: Mapping[str, int], change: Callable[[Known], Known]) -> set[str]:
    x, mesh = placed(**degrees)

    def changed(*given: Any) -> Known:
        return change(dict(gather_messages(*given)))

    monkeypatch.setattr(saves, "gather_messages", changed)
    return {code for code, _, _ in saves.examine_save(MODEL, x, mesh, len(mesh.members()))}


@pytest.mark.parametrize("degrees", LAYOUTS, ids=str)
def test_right_messages_have_no_fault(monkeypatch, degrees):
    assert not found(monkeypatch, degrees, lambda known: known)


def busy(known: Known, side: int) -> int:
    """A rank in the middle that sends (0) or receives (1)."""
    return sorted(r for r, both in known.items() if both[side])[len(known) // 4]


def silent(known: Known) -> Known:
    """In the middle nobody sends and nobody receives."""
    return {r: both if r in (0, 1) or r >= len(known) - 2 else ((), ()) for r, both in known.items()}


def unsent(known: Known) -> Known:
    rank = busy(known, 0)
    return known | {rank: (known[rank][0][1:], known[rank][1])}


def unasked(known: Known) -> Known:
    """The first box of a message does not come, at both of its ends."""
    rank = busy(known, 1)
    first, *rest = known[rank][1]
    short = replace(first, boxes=first.boxes[1:])
    sends, receives = known[first.peer]
    return known | {rank: (known[rank][0], (short, *rest)),
                    first.peer: (tuple(replace(m, boxes=m.boxes[1:]) if m.peer == rank else m for m in sends), receives)}


def twice(known: Known) -> Known:
    rank = busy(known, 1)
    sends, receives = known[rank]
    return known | {rank: (sends, (*receives, receives[0]))}


def foreign(known: Known) -> Known:
    """A rank sends, and another gets, a box that neither has to do with."""
    rank = busy(known, 1)
    name, box = known[rank][1][0].boxes[0]
    a, b = (r for r in sorted(known)[len(known) // 3:][:2])
    return known | {a: ((*known[a][0], Message(b, ((name, box),))), known[a][1]),
                    b: (known[b][0], (*known[b][1], Message(a, ((name, box),))))}


@pytest.mark.parametrize("degrees", LAYOUTS, ids=str)
@pytest.mark.parametrize("change, code", [(silent, "RL0527"), (unsent, "RL0533"), (unasked, "RL0527"),
                                          (twice, "RL0527"), (foreign, "RL0527")],
                         ids=lambda x: getattr(x, "__name__", x))
def test_a_mistake_in_the_middle_is_found(monkeypatch, degrees, change, code):
    """Where no rank at either end of the mesh has anything to do with it."""
    assert code in found(monkeypatch, degrees, change)


def test_more_ranks_than_messages_at_once_are_fine():
    """Each of 256 shards gets its parameters from all others; messages are posted batch by batch."""
    x, mesh = placed(dp=256, zero=3)
    model = replace(MODEL, params=tuple(replace(p, shape=(512, 2), split=None) for p in MODEL.params), layers=64)
    assert max(len(sends) + len(receives) for sends, receives in
               gather_messages(model, x, mesh, owners(model, x, mesh), mesh.members()).values()) > saves.MAX_MESSAGES
    assert not saves.examine_save(model, x, mesh, 256)


def test_a_rank_has_a_bounded_number_of_messages_in_a_batch(monkeypatch):
    def many(known: Known) -> Known:
        rank = busy(known, 1)
        return known | {rank: (known[rank][0], known[rank][1] * (saves.MAX_MESSAGES + 1))}

    assert "RL0535" in found(monkeypatch, dict(dp=32, tp=2), many)
