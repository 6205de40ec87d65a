"""Optimizer steps under `zero` against one process with plain transformers, autograd and torch's AdamW."""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np
import pytest
import torch

from rldsl.plan.model import Layout
from tests.backend_torch.shards import layout_of as at
from tests.backend_torch.shards import pack, plan_model, shard_of
from tests.backend_torch.steps import check, run
from tests.backend_torch.test_train import OPTIONS, ROWS, TWO, UPDATES
from tests.samples import thorough_between
from tests.tiny import make_model
from tests.world import run_world

EVERY = [at(dp=2, zero=1), at(dp=4, zero=2), at(dp=4, zero=3), at(dp=2, tp=2, zero=1), at(dp=2, tp=2, zero=3),
         at(dp=2, pp=2, zero=2), at(dp=2, pp=2, zero=3)]


def make(path: str, rank: int, layout: Layout, dtype: str = "float32") -> tuple[Any, int]:
    """The shard of this rank, and its place in dp."""
    made = shard_of(plan_model(path, "causal_lm", OPTIONS, UPDATES, dtype), layout, rank, True)
    assert made is not None
    return made


CASES = [("qwen3", dict(num_hidden_layers=3), "causal_lm", "logprobs", EVERY),
         ("qwen3", TWO | dict(tie_word_embeddings=True), "causal_lm", "logprobs",
          [at(dp=2, pp=2, zero=1), at(dp=2, tp=2, pp=2, zero=3)]),
         ("llama", TWO | dict(attention_bias=True, mlp_bias=True), "causal_lm", "logprobs", [at(dp=2, tp=4, zero=3)]),
         ("qwen3", TWO, "value_model", "values", [at(dp=4, zero=2), at(dp=2, pp=2, zero=3)])]


@pytest.mark.thorough
@pytest.mark.parametrize("family, overrides, kind, what, every", thorough_between(CASES), ids=["qwen3", "tied", "llama", "values"])
def test_steps_equal_one_process(tmp_path, family, overrides, kind, what, every):
    """The last step has one row: all shards but one have none."""
    check(str(make_model(tmp_path / "m", family=family, **overrides)), kind, what, every)


def gathered(shard: Any) -> set[int]:
    """Layers that are whole now."""
    return {i for i, group in shard.stage.zero.layers.items()
            if any(w.untyped_storage().nbytes() for w in group.unsharded)}


def watched(rank: int, path: str) -> dict[int, Any]:
    """By level: how many layers are whole at once in a forward pass, and what is left after a step."""
    found = {}
    for zero in (1, 2, 3):
        shard, mine = make(path, rank, at(dp=2, zero=zero))
        seen: list[set[int]] = []
        for layer in shard.stage.chunks[0].body.layers:
            layer.mlp.register_forward_pre_hook(lambda *_: seen.append(gathered(shard)))
        run(shard, "logprobs", mine, 2, 1)
        numbers = sum(t.numel() for t in shard.state_dict().values())
        found[zero] = (max(map(len, seen)), gathered(shard), numbers, shard.trainer.grad_buffer.numel(),
                       sum(t.numel() for kind in shard.optimizer_state().values() for t in kind.values()),
                       all(p.grad is None for u in shard.stage.zero.groups for p in u.unsharded))
    return found


def test_memory_is_divided(tmp_path):
    path = str(make_model(tmp_path / "m", num_hidden_layers=4))
    total = sum(prod(p.shape) * (4 if "{}" in p.name else 1) for p in plan_model(path).params)
    for found in run_world(2, watched, path):
        for zero, (most, after, numbers, flat, moments, clean) in found.items():
            assert most == (1 if zero == 3 else 4) and after == set() and clean
            assert numbers == flat == moments // 2 and abs(numbers - total / 2) < 64


def halves(rank: int, path: str) -> list[tuple[list[float], dict[str, np.ndarray]]]:
    """bf16, without and with every level. As arrays: a tensor would be shared by a process that has ended."""
    out = []
    for zero in (0, 1, 2, 3):
        shard, mine = make(path, rank, at(dp=2, zero=zero), "bfloat16")
        norms = run(shard, "logprobs", mine, 2)
        assert all(t.dtype == torch.float32 for t in shard.state_dict().values())
        rows = {n: t if zero else t[: (len(t) + 1) // 2] for n, t in shard.state_dict().items()}
        out.append((norms, {n: t.numpy(force=True) for n, t in rows.items()}))
    return out


@pytest.mark.thorough
def test_halves_are_as_without(tmp_path):
    """Only matrices travel in bfloat16, so that the numbers are those of a run that gathers nothing."""
    (norms, plain), *others = run_world(2, halves, str(make_model(tmp_path / "m")))[0]
    for seen, tensors in others:
        assert seen == pytest.approx(norms, rel=1e-5)
        assert all(np.allclose(tensors[n], plain[n], rtol=0, atol=2e-6) for n in plain)


def stopping(rank: int, path: str) -> bool:
    """A step that a loss stops changes nothing, and leaves nothing behind for the next."""
    shard, mine = make(path, rank, at(dp=2, zero=3))
    before = {n: t.clone() for n, t in shard.state_dict().items()}
    batch = [(pack(ROWS[mine : mine + 3]),)]
    none = shard.train(batch, [("logprobs",)], 1.0, lambda _, fresh: fresh[0]["logprobs"].sum(), lambda: True)
    same = none is None and all(torch.equal(before[n], t) for n, t in shard.state_dict().items())
    norm = shard.train(batch, [("logprobs",)], 1.0, lambda _, fresh: fresh[0]["logprobs"].sum())["grad_norm"]
    other, _ = make(path, rank, at(dp=2, zero=2))
    right = other.train(batch, [("logprobs",)], 1.0, lambda _, fresh: fresh[0]["logprobs"].sum())["grad_norm"]
    return same and norm == pytest.approx(right, rel=1e-5) and not gathered(shard)


def test_a_minibatch_without_a_step(tmp_path):
    assert run_world(2, stopping, str(make_model(tmp_path / "m"))) == [True, True]


def infinite(rank: int, path: str) -> bool:
    shard, mine = make(path, rank, at(dp=2, zero=2))
    before = {n: t.clone() for n, t in shard.state_dict().items()}
    norm = shard.train([(pack(ROWS[:2]),)], [("logprobs",)], 1.0,
                       lambda _, fresh: fresh[0]["logprobs"].sum() * (torch.inf if mine else 1.0))["grad_norm"]
    return norm != norm or norm == torch.inf and all(torch.equal(before[n], t) for n, t in shard.state_dict().items())


def test_a_gradient_that_is_not_finite_on_one_shard_stops_all(tmp_path):
    assert run_world(2, infinite, str(make_model(tmp_path / "m"))) == [True, True]


@pytest.mark.parametrize("rows, ranks", [(8, 4), (7, 4), (1, 4), (5, 2), (0, 2)])
def test_rows_are_copied_as_padded_ones_would_be(rows: int, ranks: int) -> None:
    from rldsl.backends.torch.model.zero import _copy_rows, _padded_rows

    grad, numel = torch.arange(1.0, 3 * rows + 1).view(rows, 3), -(-rows // ranks) * 3
    found = torch.zeros(ranks, numel + 2)[:, 1 : numel + 1]  # a slice of a wider table
    _copy_rows(grad.reshape(-1), found)
    assert found.equal(_padded_rows(grad, numel, ranks))
