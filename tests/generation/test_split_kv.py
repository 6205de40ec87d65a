"""The Triton kernel that reads the KV cache, interpreted on the processor. What it takes on a GPU is not seen here:
whether it compiles there, and how fast it is."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from rldsl.backends.torch.kernels.attention_kernels import decode_kernel

ROOT = Path(__file__).parents[2]
needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")


@pytest.fixture(scope="module")
def said() -> dict[str, Any]:
    made = subprocess.run([sys.executable, "-m", "tests.generation.split_kv_check"], cwd=ROOT, capture_output=True,
                          text=True, env=os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}, timeout=120)
    assert made.returncode == 0, made.stderr[-3000:]
    return json.loads(made.stdout.splitlines()[-1])


@pytest.mark.thorough
@needs_triton
def test_it_is_torch_s_attention(said: dict[str, Any]) -> None:
    *full, half, one = said["gaps"]
    assert max(*full, one) < 1e-5 and half < 2e-2, said["gaps"]


@pytest.mark.thorough
@needs_triton
def test_a_step_through_the_cache_is_the_same(said: dict[str, Any]) -> None:
    assert said["decoded"] < 1e-5


@needs_triton
def test_parts_are_as_many_as_a_gpu_wants(said: dict[str, Any]) -> None:
    assert said["parts"] == [[64, 1], [64, 64], [4096, 1], [256, 4], [64, 1]] and said["block"] == 64


def test_a_processor_reads_with_torch() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        assert decode_kernel(torch.ones(1, 1, 1, dtype=dtype)) is None
