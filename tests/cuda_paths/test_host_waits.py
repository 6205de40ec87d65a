"""Values leave and arrive without a wait for the device, shown without one: a tensor without memory stands for one of a
GPU. Nobody can read a number of it, and no operation has a result whose size only the numbers tell."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rldsl.backends.torch.model.model_inputs import pack_inputs
from rldsl.backends.torch.model.sequence_parallel import SequenceParallel
from rldsl.diag import Failure
from rldsl.plan.model import Spread, Value
from rldsl.runtime.backend import Axis, PackedBatch
from rldsl.runtime.comm import exchange
from rldsl.runtime.comm.row_assignment import RowLengths, StepRows
from rldsl.runtime.host_numbers import on_device
from rldsl.runtime.store import RaggedRows, offsets_within

CUDA, GPU = torch.device("cuda"), torch.device("meta")
PROMPTS, RESPONSES = [3, 2, 4, 1], [5, 0, 2, 7]
SRC, DST = "on 0 and 1", "on 1 and 2"
# of each rank, the rows that it has before and after
HAVE, WANT = {0: (0, 1), 1: (2, 3)}, {1: (0, 2), 2: (1, 3)}


class Rows(StepRows):
    def ids(self, spread: Any, value: Value) -> dict[int, tuple[int, ...]]:
        return HAVE if spread.id == SRC else WANT


@pytest.fixture
def nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """Messages go to nobody."""
    monkeypatch.setattr(exchange, "post", lambda *_: exchange.PostedMessages((), ()))


def rows(rank: int, known: bool) -> Rows:
    lens = RowLengths(*torch.zeros(2, 4, dtype=torch.int64, device=GPU))
    lens.on_host = (PROMPTS, RESPONSES) if known else None
    world = SimpleNamespace(rank=rank, device=GPU)
    plan = SimpleNamespace(header=SimpleNamespace(devices_per_node=4))
    return Rows(plan, world, 0, {}, {"gen": lens})  # type: ignore[arg-type]


def move(rank: int, extent: str, known: bool) -> RaggedRows | None:
    value = Value("gen.x", "gen", "token" if extent in ("tokens", "response") else "seq", extent, "f32")
    here = rows(rank, known)
    held = None
    if rank in HAVE:
        ids = torch.zeros(2, dtype=torch.int64, device=GPU)
        size = sum(rows(rank, True).amounts(value, HAVE[rank]))
        held = RaggedRows(ids, here.sizes(value, ids), torch.zeros(size, device=GPU))
    spreads = (Spread(x, x, "", (), "row") for x in (SRC, DST))
    found: RaggedRows | None = exchange.transfer(here, value, *spreads, held, 0).finish()
    return found


@pytest.mark.parametrize("extent", ["tokens", "response", "row"])
@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_transfer_waits_for_nothing(rank: int, extent: str, nobody: None) -> None:
    found = move(rank, extent, True)
    if rank == 0:
        assert found is None
        return
    each = {"tokens": [p + r for p, r in zip(PROMPTS, RESPONSES)], "response": RESPONSES, "row": [1] * 4}[extent]
    assert found is not None and len(found.data) == sum(each[i] for i in WANT[rank])
    assert found.data.device == GPU


def test_lengths_that_the_host_does_not_know_are_read(nobody: None) -> None:
    with pytest.raises((NotImplementedError, RuntimeError)):
        move(0, "tokens", False)


def test_sizes_that_nobody_says_are_read() -> None:
    sizes = torch.zeros(2, dtype=torch.int64, device=GPU)
    with pytest.raises((NotImplementedError, RuntimeError)):
        offsets_within(sizes)
    assert len(offsets_within(sizes, 5)) == 5


@pytest.mark.parametrize("extent", ["tokens", "response", "hidden", "row", "prompt"])
def test_numbers_of_the_host_are_those_of_the_device(extent: str) -> None:
    asked = RowLengths(torch.tensor(PROMPTS), torch.tensor(RESPONSES))
    for lens in (asked, RowLengths.of_host(PROMPTS, RESPONSES, torch.device("cpu"))):
        assert lens.to_list(extent) == lens.of(extent).tolist()
    assert asked.on_host == (PROMPTS, RESPONSES)


def test_numbers_go_to_the_device_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy from other memory would be waited for."""
    seen: list[dict[str, Any]] = []

    class Pinned:
        def to(self, device: torch.device, non_blocking: bool) -> str:
            assert device == CUDA and non_blocking
            return "there"

    monkeypatch.setattr(torch, "tensor", lambda numbers, **options: seen.append(options) or Pinned())
    assert on_device([1, 2], CUDA) == "there"  # type: ignore[comparison-overlap]
    assert [x["pin_memory"] for x in seen] == [True]


def batch(prompts: list[int], responses: list[int], device: torch.device, known: bool) -> PackedBatch:
    lens = [torch.tensor(x, dtype=torch.int64).to(device) for x in (prompts, responses)]
    tokens = torch.arange(sum(prompts) + sum(responses), device=device)
    return PackedBatch(torch.arange(len(prompts), device=device), *lens, tokens,
                       on_host=(prompts, responses) if known else None)


ALONE = Axis((0,), 0, None)
SHAPES = [[([3, 1], [2, 0])], [([3, 1], [2, 0]), ([4], [5])], [([], [])]]


@pytest.mark.parametrize("frames", SHAPES)
def test_inputs_of_a_pass_are_made_without_a_wait(frames: list[tuple[list[int], list[int]]]) -> None:
    """And are those that the device's lengths give."""
    made = [pack_inputs([batch(*f, where, known) for f in frames], where, ALONE, SequenceParallel(ALONE, False))
            for where, known in ((GPU, True), (torch.device("cpu"), True), (torch.device("cpu"), False))]
    assert made[0].tokens.device == GPU
    for name in ("tokens", "positions", "predict_at", "targets", "last_at"):
        far, near, right = (getattr(x, name) for x in made)
        assert far.shape == near.shape and torch.equal(near, right), name
    assert made[1].responses == made[2].responses and made[1].attention.max_seqlen == made[2].attention.max_seqlen
    buckets, right = (x.attention.buckets for x in made[1:])
    assert buckets.shapes == right.shapes and torch.equal(buckets.token_of_cell, right.token_of_cell)


def test_inputs_of_lengths_that_the_host_does_not_know_are_read() -> None:
    with pytest.raises((NotImplementedError, RuntimeError)):
        pack_inputs([batch([3], [2], GPU, False)], GPU, ALONE, SequenceParallel(ALONE, False))


@pytest.mark.parametrize("known", [True, False])
def test_an_empty_prompt_is_an_error(known: bool) -> None:
    with pytest.raises(Failure, match="RL0732"):
        pack_inputs([batch([3, 0], [2, 1], torch.device("cpu"), known)], torch.device("cpu"), ALONE,
                    SequenceParallel(ALONE, False))
