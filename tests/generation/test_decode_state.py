"""A generation that finds what an earlier one of the same shape recorded: the same numbers as without, other prompts,
other weights; and nothing is held in between."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch

from rldsl.backends.torch.generate.captured_step import CaptureSwitch
from rldsl.backends.torch.generate import engine
from rldsl.backends.torch.generate.decode_state import MAX_KEPT_STATES, DecodeState
from rldsl.backends.torch.generate.kv_cache import KVCache
from rldsl.backends.torch.generate.releasable_storage import ReleasableStorage
from rldsl.plan.events import Sampling
from tests.backend_torch.shards import make_shard, plan_model, ragged
from tests.generation.reference import made, rows_of
from tests.tiny import make_model

DRAWN = Sampling(max_new_tokens=12, temperature=1.3)


def prompts(seed: int) -> list[list[int]]:
    return [p for p, _ in ragged(6, 46, seed=seed) for _ in range(2)]


@pytest.fixture
def shard(tmp_path: Any) -> Any:
    return make_shard(plan_model(str(make_model(tmp_path / "m"))), 0)


def both(shard: Any, states: dict, seed: int, sampling: Sampling = DRAWN, limit: int = 0) -> None:
    found, plain = (rows_of(made(shard, prompts(seed), sampling, limit, **how))
                    for how in ({"states": states}, {"capture": CaptureSwitch(False)}))
    assert found == plain


@pytest.mark.thorough
@pytest.mark.parametrize("limit", [0, 4, 1])
@pytest.mark.parametrize("sampling", [DRAWN, replace(DRAWN, greedy=True), replace(DRAWN, stop=("b", "5"))])
def test_many_calls_share_a_state(shard: Any, sampling: Sampling, limit: int) -> None:
    """Longer and shorter prompts, which want a wider KV cache or less than there is."""
    states: dict = {}
    for seed in (1, 2, 3, 1, 4):
        both(shard, states, seed, sampling, limit)
    assert len(states) == 1


def test_weights_that_change_in_place_are_read_anew(shard: Any) -> None:
    states: dict = {}
    for step in range(4):
        both(shard, states, 1)
        with torch.no_grad():
            for tensor in shard.state_dict().values():
                tensor.mul_(1 + 0.1 * step).add_(0.01)


def test_weights_that_lie_elsewhere_are_found(shard: Any) -> None:
    """As after an offload, a release or another shard's parameters."""
    first = rows_of(shard.generate(_packed(1), DRAWN, seed=3, step=5, max_num_seqs=0))
    assert shard.decode_states
    shard.alias(make_shard(shard.model, 0))
    assert not shard.decode_states
    for tensor in shard.state_dict().values():
        tensor.mul_(1.3)
    second = rows_of(shard.generate(_packed(1), DRAWN, seed=3, step=5, max_num_seqs=0))
    assert second == rows_of(made(shard, prompts(1), DRAWN, capture=CaptureSwitch(False))) != first
    shard.free()
    assert not shard.decode_states


def _packed(seed: int) -> Any:
    from tests.backend_torch.shards import pack

    return pack([(p, []) for p in prompts(seed)])


def test_a_later_call_runs_no_module_for_what_is_recorded(shard: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    states: dict = {}
    sampling = replace(DRAWN, min_new_tokens=12)  # all end together: one number of rows
    for _ in range(3):  # a width may occur once in a call
        made(shard, prompts(1), sampling, states=states)
    monkeypatch.setattr(engine, "DecodeAttention", lambda *_: pytest.fail("its modules were run"))
    made(shard, prompts(1), sampling, states=states)


def test_a_state_between_calls_has_no_memory(shard: Any) -> None:
    states: dict = {}
    made(shard, prompts(1), DRAWN, states=states)
    (state,) = states.values()
    traces = [t for t in state.decode_steps.captures.values() if not isinstance(t, int)]
    held = [x for pair in state.cache.layers.values() for x in pair] + [state.slots.draws, state.responses.tokens]
    assert traces and not state.decode_steps.with_memory and not any(t.has_memory for t in traces)
    assert all(x.untyped_storage().nbytes() == 0 for x in (*held, *(x for t in traces for x in t.out)))


@pytest.mark.thorough
def test_a_call_without_a_state_leaves_no_kv_cache(shard: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even in what the model knows of its last pass: the next call that runs may be that of another copy."""
    caches: list[weakref.ref[KVCache]] = []
    plain = KVCache.__init__

    def seen(self: KVCache, *args: Any, **kwargs: Any) -> None:
        caches.append(weakref.ref(self))
        plain(self, *args, **kwargs)

    monkeypatch.setattr(KVCache, "__init__", seen)
    gc.disable()
    try:
        made(shard, prompts(1), DRAWN, capture=CaptureSwitch(False))
        assert caches and all(cache() is None for cache in caches)
    finally:
        gc.enable()


def test_parameters_are_never_given_back(shard: Any) -> None:
    before = {n: x.clone() for n, x in shard.state_dict().items()}
    made(shard, prompts(1), DRAWN, states={})
    assert all(torch.equal(x, before[n]) for n, x in shard.state_dict().items())


def test_states_are_few(shard: Any) -> None:
    states: dict[Any, DecodeState] = {}
    for longest in range(3, 7):
        both(shard, states, 1, replace(DRAWN, max_new_tokens=longest))
    assert len(states) == MAX_KEPT_STATES


def test_a_call_that_fails_leaves_no_state(shard: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    states: dict = {}
    made(shard, prompts(1), DRAWN, states=states)
    monkeypatch.setattr("rldsl.backends.torch.generate.generate.run_to_completion", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        made(shard, prompts(1), DRAWN, states=states)
    assert not states


def test_halves_of_float32_are_not_kept(tmp_path: Any) -> None:
    """Autocast multiplies with a copy that the next call would find old."""
    from rldsl.plan.model import Optimizer

    there = str(make_model(tmp_path / "m"))
    trained = make_shard(plan_model(there, optimizer=Optimizer(lr=1.0), dtype="bfloat16"), 0)
    assert not trained._can_keep_captures()
    assert make_shard(plan_model(there, dtype="bfloat16"), 0)._can_keep_captures()


@pytest.mark.parametrize("sampling", [DRAWN, replace(DRAWN, top_k=5)])
@pytest.mark.parametrize("family, kept", [("phi", False), ("gpt2", True)])
def test_a_changed_head_is_read_anew(tmp_path: Any, family: str, kept: bool, sampling: Sampling) -> None:
    """Also one with a bias, which is multiplied with as a copy that has one more column."""
    shard = make_shard(plan_model(str(make_model(tmp_path / "m", family))), 0)
    assert shard._can_keep_captures() is kept is not shard.stage.copies_head
    for _ in range(3):
        found = rows_of(shard.generate(_packed(1), sampling, seed=3, step=5, max_num_seqs=0))
        assert found == rows_of(made(shard, prompts(1), sampling, capture=CaptureSwitch(False)))
        for tensor in shard.state_dict().values():
            tensor.mul_(1.3).add_(0.02)


def test_releasable_storage() -> None:
    whole = torch.ones(4, 3)
    part = whole[1:, :2]
    storage = ReleasableStorage([part, whole])
    storage.release_memory()
    assert whole.untyped_storage().nbytes() == 0 and not storage.has_memory
    storage.allocate_memory()
    whole.fill_(2)
    assert part.tolist() == [[2, 2]] * 3 and storage.has_memory


def test_what_is_read_does_not_depend_on_what_was_there_before(shard: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that goes on from a checkpoint has another history, and must give the same numbers bit by bit."""
    widths: list[int] = []

    class Noted(engine.DecodeAttention):
        def __init__(self, *args: Any) -> None:
            widths.append(args[3].read())
            super().__init__(*args)

    monkeypatch.setattr(engine, "DecodeAttention", Noted)
    states: dict = {}
    short, long = ([[3] * n for _ in range(4)] for n in (6, 40))
    made(shard, long, DRAWN, states=states)
    widths.clear()
    made(shard, short, DRAWN, states=states)
    assert len(states) == 1 and set(widths) == {16, 6 + DRAWN.max_new_tokens}
