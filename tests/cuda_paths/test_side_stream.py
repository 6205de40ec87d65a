"""Reallocs run beside the stream that computes: nothing waits for them but who uses what they bring or changes what
they send. Streams are stand-ins that note who waits for whom."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from rldsl.plan.events import Realloc
from rldsl.runtime.comm import exchange, reshard
from rldsl.runtime.comm.side_stream import SideStream
from rldsl.runtime.health.event_ring import EventRing
from rldsl.runtime.interpreter import model_events
from rldsl.runtime.store import Pending
from tests.realloc.test_leaving import Moving
from tests.realloc.test_run import CASES, place, route, tensors
from tests.world import run_world


BUCKET = 1 << 13  # bytes: several rounds of each reshard
FEW = 6  # cases


class Streams:
    """The current stream of CUDA and the others, and what they did, in order."""

    def __init__(self) -> None:
        self.seen: list[str] = []
        self.current = FakeStream(self, "compute")

    @contextmanager
    def entered(self, stream: FakeStream) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    @contextmanager
    def installed(self) -> Iterator[SideStream]:
        with (mock.patch.object(torch.cuda, "Stream", lambda device: FakeStream(self, "side")),
              mock.patch.object(torch.cuda, "current_stream", lambda device: self.current),
              mock.patch.object(torch.cuda, "stream", self.entered)):
            side = SideStream(torch.device("cuda"))
            side.device = torch.device("cpu")  # where the tensors of the test are
            yield side


class FakeStream:
    def __init__(self, streams: Streams, name: str):
        self.streams, self.name = streams, name

    def wait_stream(self, other: FakeStream) -> None:
        self.streams.seen.append(f"{self.name} waits for {other.name}")

    def record_event(self) -> str:
        self.streams.seen.append(f"mark of {self.name}")
        return self.name

    def wait_event(self, event: str) -> None:
        self.streams.seen.append(f"{self.name} waits for the mark of {event}")


def on_the_side(rank: int) -> list[str]:
    """What happened on a rank that was not what it should be."""
    faults: list[str] = []
    for number, case in enumerate(CASES[:FEW]):
        streams, real_wait, real_empty = Streams(), exchange.PostedMessages.wait, torch.empty

        def wait(self: exchange.PostedMessages) -> None:
            streams.seen.append(f"message on {streams.current.name}")
            real_wait(self)

        def empty(*args: Any, **kwargs: Any) -> torch.Tensor:
            streams.seen.append(f"memory of {streams.current.name}")
            return real_empty(*args, **kwargs)

        source = place(case, "src", rank, tensors(case, "src", rank, torch.float32))
        right = tensors(case, "dst", rank, torch.float32)
        held = {name: torch.zeros_like(t) for name, t in right.items()}
        with (streams.installed() as side, mock.patch.object(exchange.PostedMessages, "wait", wait),
              mock.patch.object(reshard.torch, "empty", empty)):
            pending = reshard.reshard(route(case, rank, BUCKET), source, place(case, "dst", rank, held), torch.float32,
                                      side, number * 16)
            posted, streams.seen = streams.seen, []
            pending.finish()
            pending.finish()
        begins, *middle, marked = posted
        faults += [x for x in (begins, marked, *middle) if x.startswith(("message", "memory")) and "side" not in x]
        faults += [begins] if begins != "side waits for compute" else []
        faults += [marked] if marked != "mark of side" else []
        faults += [x for x in streams.seen if x != "compute waits for the mark of side"] + ["no wait"] * (not streams.seen)
        faults += [name for name, t in right.items() if not torch.equal(held[name], t)]
    return faults


def test_all_rounds_run_on_the_side() -> None:
    """All of them are launched when they are posted; later the current stream waits for their end alone."""
    assert run_world(4, on_the_side) == [[]] * 4


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("held", [torch.bfloat16, torch.float32])
def test_who_sends_waits_when_it_changes_what_it_sends(rank: int, held: torch.dtype,
                                                       monkeypatch: pytest.MonkeyPatch) -> None:
    """Also a rank that only sends, and one whose parameters travel in another dtype: a stream copies them later."""
    state = Moving(rank, held)
    monkeypatch.setattr(model_events, "in_wire_dtypes", lambda *_: (SimpleNamespace(dtype="bfloat16"),))
    monkeypatch.setattr(model_events, "reshard", lambda *_: state.seen.append("posted") or Pending(
        lambda: state.seen.append("here")))
    with Streams().installed() as side:
        state.__dict__["side"] = side
        model_events.realloc(state, EventRing(), Realloc(id=5, mesh="m", model="actor", src="L1", dst="L2", bytes=0,
                                                         messages=0, digest=""))
    assert "here" not in state.seen
    state.shard_to_read("actor", "L1")
    assert "here" not in state.seen
    state.shard_to_write("actor", "L1")
    assert state.seen[-1] == "here" and not state.leaving.get(("actor", "L1"))


def test_the_end_of_a_run_waits_for_what_was_sent() -> None:
    state = Moving(0, torch.float32)
    state.wait_all()
    assert state.seen == ["left"]


def test_on_a_cpu_nothing_is_beside() -> None:
    side = SideStream(torch.device("cpu"))
    with side.entered():
        pass
    side.mark()()
    assert side.stream is None
