"""The kernel that appends sampled tokens against the operators of torch that it replaces."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rldsl.backends.torch.generate.decode_state import DecodeState, Responses, SlotState
from rldsl.backends.torch.generate.engine import Engine
from rldsl.backends.torch.kernels import kernel_library, sampled_tokens
from rldsl.plan.events import Sampling
from tests.backend_torch.shards import make_shard, pack, plan_model

pytestmark = pytest.mark.skipif(not kernel_library.available(), reason="no C compiler")
CPU = torch.device("cpu")
SLOTS, MOST = 12, 5  # slots, and most new tokens


def states(draw: torch.Generator) -> tuple[SlotState, Responses]:
    """Slots in all states, with sequences in another order."""
    slots, responses = SlotState(SLOTS, MOST, CPU, False), Responses.empty(SLOTS, MOST, CPU)
    slots.seq_id.copy_(torch.randperm(SLOTS, generator=draw))
    slots.num_generated.copy_(torch.randint(MOST, (SLOTS,), generator=draw))
    slots.active.copy_(torch.rand(SLOTS, generator=draw) < 0.7)
    slots.finished.copy_(~slots.active & (torch.rand(SLOTS, generator=draw) < 0.5))
    return slots, responses


def record(way: str, given: tuple[SlotState, Responses], at: slice, tokens: torch.Tensor, logprobs: torch.Tensor,
           ends: torch.Tensor) -> int:
    """How many sequences have stopped."""
    slots, responses = given
    state: Any = SimpleNamespace(slots=slots, responses=responses, eos_ids=ends)
    if way == "torch":
        engine: Any = SimpleNamespace(state=state, max_new_tokens=MOST, stop_strings=None)
        were_active = slots.active[at].clone()
        slots.token[at], slots.logprob[at] = tokens, logprobs
        Engine._append_tokens(engine, at)
        ended = (were_active & ~slots.active[at]).nonzero()[:, 0] + at.start  # as `Engine._poll` does
        responses.lengths[slots.seq_id[ended]] = slots.num_generated[ended]
        responses.finished[slots.seq_id[ended]] = slots.finished[ended]
        return len(ended)
    return DecodeState.appender(state)(at.start, tokens, logprobs)


@pytest.mark.parametrize("ends", [(), (3,), (0, 2, 5)])
@pytest.mark.parametrize("at", [slice(0, SLOTS), slice(4, 9), slice(7, 8)])
@pytest.mark.parametrize("seed", range(8))
def test_what_torch_does(seed: int, at: slice, ends: tuple[int, ...]) -> None:
    found, stopped = [], []
    for way in ("torch", "kernel"):
        draw = torch.Generator().manual_seed(seed)
        slots, responses = states(draw)
        for _ in range(MOST + 1):  # until none is active
            count = at.stop - at.start
            stopped.append(record(way, (slots, responses), at, torch.randint(6, (count,), generator=draw),
                                  -torch.rand(count, generator=draw), torch.tensor(ends, dtype=torch.long)))
            responses.tokens[:, MOST], responses.logprobs[:, MOST] = 0, 0  # what is dropped comes in any order
            found.append([x.clone() for x in (*vars(slots).values(), *vars(responses).values())])
    for mine, torchs in zip(found[MOST + 1 :], found[: MOST + 1], strict=True):
        assert all(map(torch.equal, mine, torchs))
    assert stopped[MOST + 1 :] == stopped[: MOST + 1] and (any(stopped) or at.stop - at.start == 1)


SLOT_TENSORS = [torch.zeros(SLOTS, dtype=dtype) for dtype in sampled_tokens.SLOT_DTYPES]
RESPONSE_TENSORS = [*vars(Responses.empty(SLOTS, MOST, CPU)).values()]
ENDS = torch.tensor([1])


@pytest.mark.parametrize("number, wrong", [
    (2, torch.zeros(SLOTS, dtype=torch.int32)), (4, torch.zeros(SLOTS - 1, dtype=torch.bool)),
    (0, torch.zeros(2 * SLOTS, dtype=torch.long)[::2]), (7, torch.zeros(SLOTS, MOST)),
    (8, torch.zeros(SLOTS - 1, dtype=torch.long)), (9, torch.zeros(SLOTS)), (10, torch.zeros(1))])
def test_other_tensors(number: int, wrong: torch.Tensor) -> None:
    given = [*SLOT_TENSORS, *RESPONSE_TENSORS, ENDS]
    given[number] = wrong
    with pytest.raises(ValueError, match="other dtypes or shapes"):
        sampled_tokens.Appender(given[:6], given[6:10], given[10])


@pytest.mark.parametrize("first, tokens, logprobs", [
    (SLOTS - 3, torch.zeros(4, dtype=torch.long), torch.zeros(4)),
    (-1, torch.zeros(4, dtype=torch.long), torch.zeros(4)),
    (0, torch.zeros(4, dtype=torch.int32), torch.zeros(4)),
    (0, torch.zeros(4, dtype=torch.long), torch.zeros(4, dtype=torch.bfloat16)),
    (0, torch.zeros(4, dtype=torch.long), torch.zeros(3)),
    (0, torch.zeros(8, dtype=torch.long)[::2], torch.zeros(4))])
def test_other_samples(first: int, tokens: torch.Tensor, logprobs: torch.Tensor) -> None:
    append = sampled_tokens.Appender(SLOT_TENSORS, RESPONSE_TENSORS, ENDS)
    append(SLOTS - 4, torch.zeros(4, dtype=torch.long), torch.zeros(4))
    with pytest.raises(ValueError, match="other dtypes or shapes"):
        append(first, tokens, logprobs)


@pytest.mark.parametrize("sampling", [
    Sampling(n=2, max_new_tokens=9), Sampling(n=2, max_new_tokens=9, greedy=True),
    Sampling(n=3, max_new_tokens=12, min_new_tokens=4)])
@pytest.mark.parametrize("slots", [0, 3])
def test_whole_calls(monkeypatch: pytest.MonkeyPatch, tmp_path: Any, sampling: Sampling, slots: int) -> None:
    """With and without the kernel, with as many slots as sequences and with fewer."""
    from tests.tiny import make_model

    path = str(make_model(tmp_path, "llama"))
    prompts = pack([(p, []) for p in ([5, 6, 7], [8, 9], [10, 11, 12, 13]) for _ in range(sampling.n)])
    outputs = []
    for taken in (True, False):
        monkeypatch.setattr(sampled_tokens, "available", lambda taken=taken: taken)
        shard = make_shard(plan_model(path), 0)
        outputs.append([shard.generate(prompts, replace(sampling), seed=3, step=s, max_num_seqs=slots)
                        for s in range(2)])
    for mine, torchs in zip(*outputs, strict=True):
        assert torch.equal(mine.batch.tokens, torchs.batch.tokens) and torch.equal(mine.finished, torchs.finished)
        assert torch.equal(mine.logprobs, torchs.logprobs)
        assert torch.equal(mine.batch.response_lens, torchs.batch.response_lens)
