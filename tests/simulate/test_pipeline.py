"""The pipeline's schedule: the one that the backend runs, and its textbook length."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rldsl.backends.torch.train import pipeline
from rldsl.sharding.pipeline_schedule import Exchange, Message, MicroBatchPass
from rldsl.simulate.call_ops import pipeline_ops
from rldsl.simulate.engine import Compute, EventBegin, Isend, Op, Wait, run_programs


class FakeStage:
    """A place in a pipeline, as far as the schedule asks."""

    def __init__(self, stage: int, pp: int):
        self.pipeline = tuple(range(pp))
        self.groups = SimpleNamespace(stage=stage)

    def collective_ops(self, *_: object) -> list[Op]:
        return []

    def message(self, found: Message, wanting: int, moved: float) -> tuple[Op, object]:
        pair = tuple(sorted((self.groups.stage, found.peer)))
        return Isend((pair, wanting, found.for_pass), pair, moved), (pair, wanting, found.for_pass)


def ops(pp: int, count: int, ahead: float, back: float, message: float = 0.0, vpp: int = 1) -> list[list[Op]]:
    stages: list[Any] = [FakeStage(s, pp) for s in range(pp)]
    return [[EventBegin(0, 0, 0), *pipeline_ops(stage, count, [(ahead / vpp, back / vpp)] * vpp, message)]
            for stage in stages]


@pytest.mark.parametrize("vpp", [1, 2, 3])
@pytest.mark.parametrize("pp, count", [(2, 2), (2, 5), (3, 3), (3, 7), (4, 4), (4, 9), (4, 11)])
def test_length_is_that_of_the_textbook(pp: int, count: int, vpp: int) -> None:
    """Narayanan et al. 2021 (Megatron-LM), section 2.2: (pp - 1) / vpp times a forward and a backward are lost to
    filling and draining, whatever the number of micro-batches."""
    played = run_programs(ops(pp, count, 1.0, 2.0, vpp=vpp), [0] * pp)
    assert max(played.ends) == pytest.approx((count + (pp - 1) / vpp) * 3.0)


@pytest.mark.parametrize("pp, count", [(1, 1), (1, 4), (4, 2), (3, 1)])
def test_length_with_few_micro_batches_or_ranks(pp: int, count: int) -> None:
    assert max(run_programs(ops(pp, count, 1.0, 2.0), [0] * pp).ends) == pytest.approx((count + pp - 1) * 3.0)


@pytest.mark.parametrize("vpp", [1, 2])
def test_every_stage_works_as_much_and_messages_make_it_longer(vpp: int) -> None:
    free, slow = (run_programs(ops(4, 8, 1.0, 2.0, m, vpp), [0] * 4) for m in (0.0, 0.25))
    assert [sum(p.busy for p in own) for own in free.intervals] == pytest.approx([24.0] * 4)
    assert max(slow.ends) > max(free.ends)


class P2PCommunicator:
    """Writes down what the backend's schedule sends and waits for."""

    log: list[tuple] = []

    def __init__(self, pp: object):
        self.there: set[MicroBatchPass] = set()

    def exchange(self, now: Exchange, output: torch.Tensor | None, recv_buffer: Callable[[int], torch.Tensor]) -> None:
        assert (output is not None) or not now.sends
        P2PCommunicator.log += [("send", *m) for m in now.sends] + [("take", *m) for m in now.receives]
        self.there |= {m.for_pass for m in now.receives}

    def wait_receive(self, wanted: MicroBatchPass) -> torch.Tensor | None:
        if wanted not in self.there:
            return None
        P2PCommunicator.log.append(("wait", wanted))
        return torch.ones(1, 1)

    def finish(self) -> None:
        pass


@pytest.mark.parametrize("pp, count, vpp", [(1, 3, 1), (2, 1, 1), (2, 4, 1), (3, 5, 1), (4, 2, 1), (4, 6, 1), (2, 5, 2),
                                            (3, 4, 2), (4, 9, 3)])
def test_it_is_the_order_of_the_backend(pp: int, count: int, vpp: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline, "P2PCommunicator", P2PCommunicator)
    for s in range(pp):
        P2PCommunicator.log = []
        weight = torch.ones(1, requires_grad=True)

        def forward(tokens, positions, attention, hidden, chunk):
            P2PCommunicator.log.append(("ahead", chunk))
            out = weight * (torch.ones(1, 1) if hidden is None else hidden)
            out.register_hook(lambda g: P2PCommunicator.log.append(("back", chunk)))
            return out

        batch: Any = SimpleNamespace(tokens=torch.zeros(1, dtype=torch.long), positions=None, attention=None,
                                     copies=None)
        chunks = [SimpleNamespace(last=c * pp + s == pp * vpp - 1) for c in range(vpp)]
        stage: Any = SimpleNamespace(forward=forward, zero=None, chunks=chunks, autocast_in_backward=True)
        axis: Any = SimpleNamespace(size=pp, index=s)
        pipeline.pipeline_forward_backward(stage, axis, [batch] * count, lambda i, out: out.sum(), lambda: None)
        fake: Any = FakeStage(s, pp)
        assert told(pipeline_ops(fake, count, [(1.0 + c, -1.0 - c) for c in range(vpp)], 0.5), s) == P2PCommunicator.log


def told(made: list[Op], s: int) -> list:
    """Acts as the backend would log them; waits for what was sent aside."""
    found: list = []
    for op in made:
        if isinstance(op, Compute):
            found.append(("ahead" if op.seconds > 0 else "back", int(abs(op.seconds)) - 1))
        elif isinstance(op, Isend):
            pair, wanting, wanted = op.key  # type: ignore[misc]
            found.append(("take" if wanting == s else "send", wanted, sum(pair) - s))
        elif isinstance(op, Wait) and op.key[1] == s:  # type: ignore[index]
            found.append(("wait", op.key[2]))  # type: ignore[index]
    return found


def test_what_comes_is_waited_for_by_its_pass_and_what_goes_before_the_next_exchange() -> None:
    made = ops(3, 4, 1.0, 2.0)[1]
    posts = [a.key for a in made if isinstance(a, Isend)]
    waits = [a.key for a in made if isinstance(a, Wait)]
    assert sorted(posts) == sorted(waits)
    for a, b in zip(made, made[1:]):
        if isinstance(a, Wait) and a.key[1] == 1:  # type: ignore[index]
            assert isinstance(b, Compute)
