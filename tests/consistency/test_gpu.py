"""`benchmarks/gpu.py` where there is no GPU: it says so, and each of its parts runs at tiny shapes on the processor."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from benchmarks import gpu
from tests.world import run_world


def _parts(rank: int) -> list[gpu.Row]:
    return list(gpu.measured(torch.device("cpu"), list(gpu.PARTS)))


def test_every_part_runs_on_a_processor() -> None:
    (rows,) = run_world(1, _parts)
    names = [row.name for row in rows]
    for part in ("copy", "product", "decode tiny B=1", "train tiny", "loss memory", "loss time", "step tiny",
                 "log-probs float32", "log-probs bfloat16, p99.9"):
        assert any(name.startswith(part) for name in names), part
    assert all(math.isfinite(row.value) and row.value >= 0 and row.line() for row in rows)
    assert next(row for row in rows if row.name == "log-probs float32, most").missed is False


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu.main([]) == 2
    assert "needs a CUDA GPU" in capsys.readouterr().err


def test_an_unknown_part_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu.main(["--cpu", "decoed"]) == 2
    assert "decoed" in capsys.readouterr().err


@pytest.mark.parametrize("row, missed", [
    (gpu.Row("x", 0.8, "of bound", 0.7, 0.9), False), (gpu.Row("x", 0.6, "of bound", 0.7, 0.9), True),
    (gpu.Row("x", 0.8, "of logits", 0.7, 0.1, True), True), (gpu.Row("x", 0.6, "of logits", 0.7, 0.1, True), False),
    (gpu.Row("x", 0.6, "TB/s"), False)])
def test_gates(row: gpu.Row, missed: bool) -> None:
    assert row.missed is missed and ("MISSED" in row.line()) is missed


def test_bounds_count_what_a_model_has(tmp_path: Path) -> None:
    """Parameters and cache of a shape against a model of that shape."""
    from transformers import AutoConfig, AutoModelForCausalLM

    s = gpu.Setup(torch.device("cpu"), tmp_path, gpu.TINY, 1.0, 1.0, 1.0)
    record = gpu.model(s, "tiny")
    with torch.device("meta"):
        whole = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(record.path))
    met = sum(p.numel() for n, p in whole.named_parameters() if p.dim() > 1 and "embed" not in n)
    assert gpu.weights(s, "tiny") == met
    hidden, _, layers, heads, groups, _ = gpu.TINY["tiny"]
    assert gpu.cache(s, "tiny") == 2 * 2 * layers * groups * hidden // heads
