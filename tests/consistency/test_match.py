"""Log-probs of generation are those of training: the same model code, decoded with a cache and packed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks.match import FLOAT_GATE, Gap, gap, prompts
from rldsl.plan.events import Sampling
from tests.backend_torch.shards import make_shard, plan_model
from tests.tiny import make_model
from tests.world import run_world

FAMILIES = {
    "qwen3": {}, "llama": {"attention_bias": True}, "gemma": {"head_dim": 8}, "gpt2": {}, "qwen2": {}, "phi3": {},
    "granite": {"embedding_multiplier": 12.0, "residual_multiplier": 0.5, "attention_multiplier": 0.3},
    "mistral": {"sliding_window": 8},  # decoding must see the same window
}


def _gaps(rank: int, paths: list[str], dtype: str, degrees: dict[str, int]) -> list[Gap]:
    found = []
    for path in paths:
        shard = make_shard(plan_model(path, dtype=dtype), rank, **degrees)
        for temperature, limit in ((1.0, 0), (0.7, 5)):  # all at once, and with slots that are filled again
            asked = Sampling(max_new_tokens=12, temperature=temperature)
            found.append(gap(shard, prompts(46, 12, 9, torch.device("cpu")), asked, limit))
    return found


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("families")
    return {name: str(make_model(root / name, family=name, num_hidden_layers=2, **more)) for name, more in FAMILIES.items()}


@pytest.mark.thorough
def test_they_agree_in_float32_over_families(directories: dict[str, str]) -> None:
    (found,) = run_world(1, _gaps, [*directories.values()], "float32", {})
    for name, got in zip((n for n in directories for _ in range(2)), found):
        assert got.tokens > 50 and got.most <= FLOAT_GATE, f"{name}: {got}"


@pytest.mark.thorough
@pytest.mark.parametrize("degrees", [{"tp": 2}, {"pp": 2}])
def test_they_agree_on_divided_models(directories: dict[str, str], degrees: dict[str, int]) -> None:
    for found in run_world(2, _gaps, [directories["qwen3"], directories["llama"]], "float32", degrees):
        assert all(got.most <= FLOAT_GATE for got in found), found


def test_they_are_near_in_bfloat16(directories: dict[str, str]) -> None:
    """Half products may round differently in other orders; what is far off is another number, not another order."""
    (found,) = run_world(1, _gaps, [directories["qwen3"], directories["llama"]], "bfloat16", {})
    for got in found:
        assert got.tokens > 50 and got.mean < 2e-2 and got.tail < 0.2, got


def test_a_model_in_bfloat16_does_not_compute_in_float32(directories: dict[str, str]) -> None:
    """Rounded parameters alone, of 8 bits, change every log-prob, whatever the processor."""
    for family in ("qwen3", "llama"):
        half, whole = (make_shard(plan_model(directories[family], dtype=dtype), 0) for dtype in ("bfloat16", "float32"))
        given, asked = prompts(46, 12, 9, torch.device("cpu")), Sampling(max_new_tokens=12)
        made = half.generate(given, asked, seed=1, step=0, max_num_seqs=0)
        got = Gap.of(made.logprobs, whole.infer([made.batch], "logprobs", 1.0))
        assert 1e-4 < got.mean < 2e-2, got


def _apart(rank: int, path: str, other: str) -> list[Gap]:
    """Samples of one model judged by another; and at another temperature than they were drawn with."""
    from rldsl.runtime.backend import PackedBatch

    shard, judge = (make_shard(plan_model(p), rank) for p in (path, other))
    given: PackedBatch = prompts(46, 12, 9, torch.device("cpu"))
    made = shard.generate(given, Sampling(max_new_tokens=12), seed=1, step=0, max_num_seqs=0)
    return [Gap.of(made.logprobs, judge.infer([made.batch], "logprobs", 1.0)),
            Gap.of(made.logprobs, shard.infer([made.batch], "logprobs", 0.7))]


def test_what_is_not_the_same_is_seen(directories: dict[str, str], tmp_path: Path) -> None:
    other = str(make_model(tmp_path / "other", family="qwen3", seed=1))
    (found,) = run_world(1, _apart, directories["qwen3"], other)
    assert all(got.mean > 1e-2 for got in found), found


def test_a_gap_counts_every_token() -> None:
    got = Gap.of(torch.zeros(1000), torch.cat([torch.full((999,), 1e-3), torch.ones(1)]))
    assert got.tokens == 1000 and got.most == 1 and got.mean == pytest.approx(0.001999, rel=1e-3)
    assert 1e-3 < got.tail < 1
