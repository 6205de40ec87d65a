"""The kernel that appends sampled tokens against the operators of torch that it replaces."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rldsl.backends.torch.generate.decode_state import Responses, SlotState
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
           ends: torch.Tensor) -> None:
    slots, responses = given
    engine: Any = SimpleNamespace(state=SimpleNamespace(slots=slots, responses=responses, eos_ids=ends),
                                  max_new_tokens=MOST, stop_strings=None)
    if way == "torch":
        slots.token[at], slots.logprob[at] = tokens, logprobs
        Engine._append_tokens(engine, at)
    else:
        Engine._append_in_one_call(engine, at.start, tokens, logprobs)


@pytest.mark.parametrize("ends", [(), (3,), (0, 2, 5)])
@pytest.mark.parametrize("at", [slice(0, SLOTS), slice(4, 9), slice(7, 8)])
@pytest.mark.parametrize("seed", range(8))
def test_what_torch_does(seed: int, at: slice, ends: tuple[int, ...]) -> None:
    found = []
    for way in ("torch", "kernel"):
        draw = torch.Generator().manual_seed(seed)
        slots, responses = states(draw)
        for _ in range(MOST + 1):  # until none is active
            count = at.stop - at.start
            record(way, (slots, responses), at, torch.randint(6, (count,), generator=draw),
                   -torch.rand(count, generator=draw), torch.tensor(ends, dtype=torch.long))
            responses.tokens[:, MOST], responses.logprobs[:, MOST] = 0, 0  # what is dropped comes in any order
            found.append([x.clone() for x in (*vars(slots).values(), *vars(responses).values())])
    for mine, torchs in zip(found[MOST + 1 :], found[: MOST + 1], strict=True):
        assert all(map(torch.equal, mine, torchs))


def test_log_probs_of_another_dtype() -> None:
    """As where a slot is assigned to."""
    slots, responses = states(torch.Generator().manual_seed(0))
    tokens, logprobs = torch.full((SLOTS, 2), 1)[:, 0], torch.full((SLOTS,), -0.5, dtype=torch.bfloat16)
    record("kernel", (slots, responses), slice(0, SLOTS), tokens, logprobs, torch.tensor([9]))
    assert slots.logprob.eq(-0.5).all() and slots.token.eq(1).all()


@pytest.mark.parametrize("number, wrong", [
    (2, torch.zeros(SLOTS, dtype=torch.int32)), (4, torch.zeros(SLOTS - 1, dtype=torch.bool)),
    (0, torch.zeros(2 * SLOTS, dtype=torch.long)[::2])])
def test_other_tensors(number: int, wrong: torch.Tensor) -> None:
    given = [torch.zeros(SLOTS, dtype=dtype) for dtype in sampled_tokens.SLOT_DTYPES]
    responses = Responses.empty(SLOTS, MOST, CPU)

    def append(first: int) -> None:
        sampled_tokens.append(given, first, torch.zeros(4, dtype=torch.long), torch.zeros(4), torch.tensor([1]),
                              responses.tokens, responses.logprobs)

    append(SLOTS - 4)
    with pytest.raises(ValueError, match="other dtypes or shapes"):
        append(SLOTS - 3)
    given[number] = wrong
    with pytest.raises(ValueError, match="other dtypes or shapes"):
        append(0)


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
