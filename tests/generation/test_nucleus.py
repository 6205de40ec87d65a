"""The Triton kernel of nucleus sampling, interpreted on the processor, and when it is used."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from rldsl.backends.torch.generate import sampling as module
from rldsl.backends.torch.generate.sampling import prepare_kernels, threshold
from rldsl.backends.torch.kernels import nucleus_kernel
from rldsl.plan.events import Sampling

ROOT = Path(__file__).parents[2]
CUDA, CPU = torch.device("cuda"), torch.device("cpu")
needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")


@pytest.mark.thorough
@needs_triton
def test_it_is_the_threshold_of_a_sort() -> None:
    """Ties, tokens that may not come, one token, scores far apart; rows do not depend on each other; NaN in a row does
    not reach another."""
    made = subprocess.run([sys.executable, "-m", "tests.generation.nucleus_check"], cwd=ROOT, capture_output=True,
                          text=True, env=os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}, timeout=120)
    assert made.returncode == 0, made.stderr[-3000:]
    assert json.loads(made.stdout.splitlines()[-1]) == {"differ": [], "rows": True, "none": [0, 1], "beside NaN": 3.0}


@pytest.fixture
def fresh() -> Iterator[None]:
    nucleus_kernel._installed.cache_clear()
    yield
    nucleus_kernel._installed.cache_clear()


def test_a_machine_where_it_cannot_run_sorts(fresh: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The processor stands for one: Triton compiles nothing for it."""
    assert nucleus_kernel._problem(CPU)
    monkeypatch.setattr(nucleus_kernel, "find_spec", lambda name: object())
    monkeypatch.setattr(nucleus_kernel, "_problem", lambda device: "no C compiler")
    with pytest.warns(UserWarning, match="no C compiler"):
        assert nucleus_kernel.nucleus_kernel(CUDA) is None


@needs_triton
def test_a_kernel_that_is_wrong_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    from rldsl.backends.torch.kernels import nucleus

    monkeypatch.setattr(nucleus, "nucleus_threshold", lambda scores, mass: scores.amax(-1, keepdim=True))
    assert "differs" in nucleus_kernel._problem(CPU)
    monkeypatch.setattr(nucleus, "nucleus_threshold", lambda scores, mass: threshold(scores, Sampling(top_p=mass)))
    assert nucleus_kernel._problem(CPU) == ""


@pytest.mark.parametrize(("sampling", "used"), [
    (Sampling(top_p=0.9), True), (Sampling(top_p=0.9, min_p=0.05), True), (Sampling(top_p=0.9, top_k=5), False),
    (Sampling(min_p=0.05), False), (Sampling(), False)])
def test_who_uses_it(sampling: Sampling, used: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not after top_k, which sorts a few scores anyway; and with min_p the higher threshold counts, as ever."""
    scores, seen = torch.randn(6, 400) * 2, []
    expected = threshold(scores, sampling)

    def kernel(x: torch.Tensor, mass: float) -> torch.Tensor:
        seen.append(mass)
        return _sorted(x, mass)

    monkeypatch.setattr(module, "nucleus_kernel", lambda device, rows: kernel if rows == 6 else None)
    found = threshold(scores, sampling)
    assert seen == [0.9] * used
    assert found is expected is None or found is not None and expected is not None and torch.equal(found, expected)


def test_few_rows_are_sorted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program for each row leaves most of a GPU idle."""
    monkeypatch.setattr(nucleus_kernel, "_installed", lambda device: _sorted)
    few, many = nucleus_kernel.MIN_ROWS - 1, nucleus_kernel.MIN_ROWS
    assert nucleus_kernel.nucleus_kernel(CUDA, few) is None
    assert nucleus_kernel.nucleus_kernel(CUDA, many) is _sorted is nucleus_kernel.nucleus_kernel(CUDA)
    assert nucleus_kernel.nucleus_kernel(CPU, many) is None


def _sorted(scores: torch.Tensor, mass: float) -> torch.Tensor:
    ordered = scores.sort(-1, descending=True).values
    weights = ordered.softmax(-1, dtype=torch.float64)
    last = ((weights.cumsum(-1) - weights) < mass).sum(-1, keepdim=True) - 1
    return ordered.gather(-1, last)


@pytest.mark.parametrize(("sampling", "device", "tried"), [
    (Sampling(top_p=0.9), CUDA, 1), (Sampling(top_p=0.9, greedy=True), CUDA, 0), (Sampling(top_k=3), CUDA, 0),
    (Sampling(top_p=0.9), CPU, 0)])
def test_it_is_tried_before_the_first_step(sampling: Sampling, device: torch.device, tried: int,
                                           monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[torch.device] = []
    monkeypatch.setattr(nucleus_kernel, "_installed", seen.append)
    prepare_kernels(sampling, device)
    assert len(seen) == tried
