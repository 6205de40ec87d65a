"""Parameters that are sent from where they lie stay as they are until they have left."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rldsl.plan.events import Free, Offload, Realloc, Train
from rldsl.runtime.comm.reshard import reshard
from rldsl.runtime.comm.side_stream import SideStream
from rldsl.runtime.health.event_ring import EventRing
from rldsl.runtime.interpreter import model_events, train_event, value_events
from rldsl.runtime.state.model_store import ModelStore
from rldsl.runtime.store import Pending
from tests.realloc.test_run import CASES, place, route, tensors
from tests.world import run_world


class Stop(Exception):
    """Where the test has seen enough."""


class Shard:
    """seen: what happens to it, in order."""

    def __init__(self, seen: list[str]):
        self.seen = seen

    def free(self) -> None:
        self.seen.append("given up")

    def offload(self, what: str) -> None:
        self.seen.append("given up")

    def axes(self, layout: None) -> Any:
        """Of its world: where a train call begins."""
        self.seen.append("written")
        raise Stop


class Rank(ModelStore):
    """A shard and, of its context, as much as freeing and writing need."""

    def __init__(self) -> None:
        self.seen: list[str] = []
        shard = Shard(self.seen)
        world = SimpleNamespace(layouts={"L": None}, axes=shard.axes)
        context = SimpleNamespace(models={"actor": None}, spreads={"L": None}, world=world,
                                  aliases={("actor", "L"): "home"})  # two names of one memory
        super().__init__(context, {("actor", "L"): shard})  # type: ignore[arg-type, dict-item]
        self.arriving = {("actor", "L"): Pending(lambda: self.seen.append("came"))}
        self.leaving = {("actor", "home"): {n: Pending(lambda: self.seen.append("left")) for n in (3, 7)}}


@pytest.mark.parametrize("act, event, then", [
    (lambda models, event: value_events.free(models, SimpleNamespace(), event),
     Free(id=1, mesh="m", buffers=("actor@L",)), "given up"),
    (model_events.offload, Offload(id=1, mesh="m", model="actor", layout="L"), "given up"),
    (lambda models, event: train_event.train(models, SimpleNamespace(), event),
     Train(id=1, mesh="m", model="actor", layout="L", spread="L", frames=(), loss="", model_outputs=(), data_inputs=(), outputs=()),
     "written"),
], ids=["free", "offload", "train"])
def test_who_changes_parameters_waits_until_they_have_left(act: Any, event: Any, then: str) -> None:
    rank = Rank()
    try:
        act(rank, event)
    except Stop:
        pass
    assert rank.seen == ["left", "left", "came", then] and not rank.leaving and not rank.arriving


def test_who_reads_them_does_not() -> None:
    rank = Rank()
    rank.shard_to_read("actor", "L")
    assert rank.seen == ["came"] and rank.leaving


class Moving(ModelStore):
    """As much as a reallocation needs, from L1 on ranks 0 and 1 to L2 on ranks 1 and 2."""

    def __init__(self, rank: int, held: torch.dtype):
        self.seen: list[str] = []
        layouts = {x: SimpleNamespace(id=x, mesh=x) for x in ("L1", "L2")}
        world = SimpleNamespace(rank=rank, layouts=layouts, meshes={"L1": _Mesh(0, 1), "L2": _Mesh(1, 2)})
        context = SimpleNamespace(models={"actor": SimpleNamespace(name="actor")}, world=world, aliases={},
                                  device=torch.device("cpu"))
        shards = {("actor", x): SimpleNamespace(state_dict=lambda: {"w": torch.zeros(2, dtype=held)})
                  for x in ("L1", "L2")}
        super().__init__(context, shards, reshards={5: (None,)},  # type: ignore[arg-type, dict-item]
                         leaving={("actor", "L2"): {1: Pending(lambda: self.seen.append("left"))}})


class _Mesh(tuple[int, ...]):
    def __new__(cls, *ranks: int) -> _Mesh:
        return super().__new__(cls, ranks)

    def members(self) -> tuple[int, ...]:
        return self


@pytest.mark.parametrize("held", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_reallocation_says_what_is_on_its_way(rank: int, held: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who only sends waits at once. Who gets something also waits first until what was there has left; and what goes
    out in another dtype is a copy, which nobody can change."""
    state = Moving(rank, held)
    monkeypatch.setattr(model_events, "in_wire_dtypes", lambda *_: (SimpleNamespace(dtype="bfloat16"),))
    monkeypatch.setattr(model_events, "reshard", lambda *_: state.seen.append("posted") or Pending(
        lambda: state.seen.append("here")))
    event = Realloc(id=5, mesh="m", model="actor", src="L1", dst="L2", bytes=0, messages=0, digest="")
    model_events.realloc(state, EventRing(), event)
    assert state.seen == {0: ["posted", "here"], 1: ["left", "posted"], 2: ["left", "posted"]}[rank]
    sent = state.leaving.get(("actor", "L1"), {})
    assert sent.keys() == ({5} if rank == 1 and held == torch.bfloat16 else set())
    assert (("actor", "L2") in state.arriving) == (rank > 0)
    if sent:
        assert sent[5] is state.arriving["actor", "L2"]


def written_at_once(rank: int) -> bool:
    """What is written behind `finish` has not been sent."""
    good = True
    for number, case in enumerate(CASES):
        source = place(case, "src", rank, tensors(case, "src", rank, torch.float32))
        right = tensors(case, "dst", rank, torch.float32)
        held = {name: torch.zeros_like(t) for name, t in right.items()}
        pending = reshard(route(case, rank, 1 << 30), source, place(case, "dst", rank, held), torch.float32,
                          SideStream(torch.device("cpu")), number * 16)
        pending.finish()
        pending.finish()  # the copy's reader and the source's writer both ask
        for t in (source or {}).values():
            t.fill_(-1.0)
        good &= all(torch.equal(held[name], t) for name, t in right.items())
    return good


def test_what_has_left_may_be_written() -> None:
    assert run_world(4, written_at_once) == [True] * 4
