"""The pipeline's schedule: the one that the backend runs, and its textbook length."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rldsl.backends.torch import pipeline
from rldsl.simulate.calls import one_f_one_b
from rldsl.simulate.engine import Act, Begin, Post, Run, Wait, play
from rldsl.simulate.times import Machine
from tests.simulate.plans import ROUND


class FakeStage:
    """A place in a pipeline, as far as the schedule asks."""

    def __init__(self, stage: int, pp: int, crosses: bool = False):
        self.line = tuple(range(pp))
        self.groups = SimpleNamespace(stage=stage, members={"tp": (stage,)}, sizes={"pp": pp}, crosses={"pp": crosses})
        self.shard = SimpleNamespace(first=stage == 0, last=stage == pp - 1)
        self.machine = Machine(ROUND)
        self.key = "train"

    def together(self, *_: object) -> list[Act]:
        return []

    def over(self, i: int, way: str, moved: float) -> tuple[Act, object]:
        s = self.groups.stage
        pair = (s, s + 1) if way == "next" else (s - 1, s)
        return Post((pair, i), pair, moved), (pair, i)


def acts(pp: int, count: int, ahead: float, back: float, message: float = 0.0) -> list[list[Act]]:
    stages: list[Any] = [FakeStage(s, pp) for s in range(pp)]
    return [[Begin(0, 0, 0), *one_f_one_b(stage, count, ahead, back, message)] for stage in stages]


@pytest.mark.parametrize("pp, count", [(1, 1), (1, 4), (2, 2), (2, 5), (3, 3), (4, 4), (4, 9), (4, 2), (3, 1)])
def test_length_is_that_of_the_textbook(pp: int, count: int) -> None:
    """Narayanan et al. 2021 (Megatron-LM), section 2.2: (pp - 1) times a forward and a backward are lost to filling and
    draining, whatever the number of micro-batches."""
    played = play(acts(pp, count, 1.0, 2.0), [0] * pp)
    assert max(played.ends) == pytest.approx((count + pp - 1) * 3.0)


def test_every_stage_works_as_much_and_messages_make_it_longer() -> None:
    free, slow = (play(acts(4, 8, 1.0, 2.0, m), [0] * 4) for m in (0.0, 0.25))
    assert [sum(p.busy for p in own) for own in free.pieces] == [24.0] * 4
    assert max(slow.ends) > max(free.ends)


class Links:
    """Writes down what the backend's schedule sends and waits for."""

    log: list[tuple] = []

    def __init__(self, pp: object):
        pass

    def exchange(self, *, send=None, to: int = 1, receive=None, of: int = -1):
        Links.log += [("send", to)] if send is not None else []
        Links.log += [("take", of)] if receive is not None else []
        return None if receive is None else torch.zeros_like(receive, requires_grad=False)

    def drain(self) -> None:
        pass


@pytest.mark.parametrize("pp, count", [(1, 3), (2, 1), (2, 4), (3, 5), (4, 2), (4, 6)])
def test_it_is_the_order_of_the_backend(pp: int, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline, "Links", Links)
    for s in range(pp):
        Links.log = []
        weight = torch.ones(1, requires_grad=True)

        def forward(tokens, positions, packing, hidden):
            Links.log.append("ahead")
            out = weight * (torch.ones(1, 1) if hidden is None else hidden)
            out.register_hook(lambda g: Links.log.append("back"))
            return out

        batch: Any = SimpleNamespace(tokens=torch.zeros(1, dtype=torch.long), packing=SimpleNamespace(positions=None))
        stage: Any = SimpleNamespace(first=s == 0, last=s == pp - 1, hidden=1, compute_dtype=torch.float32,
                                device=torch.device("cpu"),
                                forward=forward, sharded=None)
        axis: Any = SimpleNamespace(size=pp, index=s)
        pipeline.forward_backward(stage, axis, [batch] * count, lambda i, out: out.sum())
        fake: Any = FakeStage(s, pp)
        assert told(one_f_one_b(fake, count, 1.0, 2.0, 0.5), s) == Links.log


def told(made: list[Act], s: int) -> list:
    """Acts as the backend would log them; waits aside."""
    found: list = []
    for act in made:
        if isinstance(act, Run):
            found.append("ahead" if act.seconds == 1.0 else "back")
        elif isinstance(act, Post):
            (low, _), number = act.key  # type: ignore[misc]
            partner = 1 if low == s else -1
            sends = (partner == 1) == (number % 2 == 0)  # activations go on, their slopes come back
            found.append(("send" if sends else "take", partner))
    return found


def test_a_receive_is_waited_for_at_once_and_a_send_at_the_end() -> None:
    made = acts(3, 4, 1.0, 2.0)[1]
    takes = {a.key for a, b in zip(made, made[1:]) if isinstance(a, Post) and isinstance(b, Wait) and a.key == b.key}
    posts = [a.key for a in made if isinstance(a, Post)]
    tail = [a.key for a in made[-(len(posts) - len(takes)):] if isinstance(a, Wait)]
    assert takes and sorted(tail) == sorted(k for k in posts if k not in takes)
