"""Which attention kernels CUDA gets, and what they are called with."""

from __future__ import annotations

import ast
import inspect
import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from rldsl.backends.torch.kernels import attention_kernels
from rldsl.backends.torch.kernels.attention_kernels import has_varlen_kernel, varlen_attention
from rldsl.backends.torch.kernels.optional_packages import Package

ROOT = Path(__file__).parents[2]
LENGTHS = [5, 1, 9]


class Shape:
    """Queries on a GPU, as far as they are looked at."""

    is_cuda = True
    device = torch.device("cuda")

    def __init__(self, head_dim: int, dtype: torch.dtype = torch.bfloat16):
        self.shape, self.dtype = (7, 4, head_dim), dtype


@pytest.mark.parametrize(("head_dim", "dtype", "capability", "there"), [
    (64, torch.bfloat16, (9, 0), True), (256, torch.float16, (8, 0), True), (80, torch.bfloat16, (8, 6), True),
    (20, torch.bfloat16, (9, 0), False), (264, torch.bfloat16, (9, 0), False), (64, torch.float32, (9, 0), False),
    (64, torch.bfloat16, (7, 5), False)])
def test_heads_and_gpus_that_kernels_take(head_dim: int, dtype: torch.dtype, capability: tuple[int, int], there: bool,
                                          monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    q: Any = Shape(head_dim, dtype)
    assert has_varlen_kernel(q) == there
    assert not has_varlen_kernel(torch.ones(1, 1, head_dim, dtype=dtype))


def old(query: Any, key: Any, value: Any, cu_seq_q: Any, cu_seq_k: Any, max_q: Any, max_k: Any, *,
        return_aux: Any = None, scale: Any = None, window_size: Any = (-1, -1)) -> Any:
    """The signature of torch 2.11."""
    return plain(query, key, value, cu_seq_q, scale, window_size)


def new(query: Any, key: Any, value: Any, cu_seq_q: Any, cu_seq_k: Any, max_q: Any, max_k: Any, *,
        return_aux: Any = None, scale: Any = None, window_size: Any = (-1, -1), enable_gqa: bool = False,
        seqused_k: Any = None, block_table: Any = None, num_splits: Any = None) -> Any:
    """The signature of torch 2.13."""
    assert enable_gqa == (query.shape[1] != key.shape[1])
    repeat = query.shape[1] // key.shape[1]
    return plain(query, *(x.repeat_interleave(repeat, 1) for x in (key, value)), cu_seq_q, scale, window_size)


def plain(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu: torch.Tensor, scale: float, window: Any
          ) -> torch.Tensor:
    assert q.shape == k.shape and cu.dtype == torch.int32 and window[1] == 0
    out = []
    for a, b in zip(cu[:-1].tolist(), cu[1:].tolist()):
        at = torch.arange(b - a)
        gap = at[:, None] - at
        seen = (gap >= 0) & ((gap <= window[0]) | (window[0] < 0))
        out.append(F.scaled_dot_product_attention(*(x[a:b].transpose(0, 1) for x in (q, k, v)), attn_mask=seen,
                                                  scale=scale).transpose(0, 1))
    return torch.cat(out)


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("groups", [2, 4])
@pytest.mark.parametrize("stand_in", [old, new])
def test_torch_s_varlen_attention_of_both_versions(stand_in: Any, groups: int, window: int | None,
                                                   monkeypatch: pytest.MonkeyPatch) -> None:
    """Grouped queries are said where torch knows them, and keys are repeated where it does not; windows are said."""
    from torch.nn.attention import varlen

    from rldsl.backends.torch.model.attention import Scores, VarlenAttention

    lengths = torch.tensor(LENGTHS)
    q, k, v = torch.randn(4, sum(LENGTHS), 8), *torch.randn(2, groups, sum(LENGTHS), 8)
    expected = VarlenAttention(lengths).attend(0, q, k, v, Scores(0.3, window))
    monkeypatch.setattr(varlen, "varlen_attn", stand_in)
    monkeypatch.setattr(attention_kernels, "flash_attn", lambda: Package("flash-attn"))
    cu = F.pad(lengths.cumsum(0), (1, 0)).to(torch.int32)
    found = varlen_attention(*(x.transpose(0, 1) for x in (q, k, v)), (cu, cu), (9, 9), 0.3, window)
    assert torch.allclose(found, expected, atol=1e-6)


def test_the_installed_torch_takes_the_call() -> None:
    from torch.nn.attention.varlen import varlen_attn

    inspect.signature(varlen_attn).bind(0, 1, 2, 3, 4, 5, 6, scale=0.1, window_size=(-1, 0))
    assert set(inspect.signature(new).parameters) >= set(inspect.signature(varlen_attn).parameters)


@pytest.mark.parametrize(("problem", "used"), [("", True), ("no C compiler", False)])
def test_triton_is_tried_before_it_is_used(problem: str, used: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Importing Triton does not say that it can compile here."""
    monkeypatch.setattr(attention_kernels, "flash_attn", lambda: Package("flash-attn"))
    monkeypatch.setattr(attention_kernels, "find_spec", lambda name: object())
    monkeypatch.setattr(attention_kernels, "_triton_problem", lambda device: problem)
    attention_kernels._installed_decode_kernel.cache_clear()
    q: Any = Shape(64)
    try:
        if used:
            assert attention_kernels.decode_kernel(q) is not None
        else:
            with pytest.warns(UserWarning, match="no C compiler"):
                assert attention_kernels.decode_kernel(q) is None
    finally:
        attention_kernels._installed_decode_kernel.cache_clear()


def test_what_a_compiler_says_is_the_reason() -> None:
    """A processor stands for a machine on which Triton cannot launch."""
    assert attention_kernels._triton_problem(torch.device("cpu"))


@pytest.mark.thorough
@pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")
def test_triton_kernels_compile_for_gpus(tmp_path: Path) -> None:
    """Ampere and Hopper, head sizes and groups that models have, products of both dtypes; no GPU is needed to
    compile."""
    made = subprocess.run(
        [sys.executable, "-m", "tests.cuda_paths.compile_triton"], cwd=ROOT, capture_output=True, text=True,
        timeout=300, env=os.environ | {"TRITON_CACHE_DIR": str(tmp_path), "OMP_NUM_THREADS": "1"})
    assert made.returncode == 0, made.stderr[-3000:]
    found = json.loads(made.stdout.splitlines()[-1])
    assert len(found) == 32
    limits = {80: 163 << 10, 90: 227 << 10}  # bytes of shared memory that a program may have
    assert all(size > 0 and shared <= limits[target] for target, size, shared in found), found


def test_all_kernels_are_compiled() -> None:
    """One that nobody compiles for GPUs would be tried on a GPU first."""
    compiled = (ROOT / "tests/cuda_paths/compile_triton.py").read_text()
    lacking = []
    for file in sorted((ROOT / "backends").rglob("*.py")):
        tree = ast.parse(file.read_text())
        kernels = [f for f in tree.body if isinstance(f, ast.FunctionDef)
                   and any(ast.unparse(d).startswith("triton.jit") for d in f.decorator_list)]
        inlined = {c.func.id for f in kernels for c in ast.walk(f) if isinstance(c, ast.Call)
                   and isinstance(c.func, ast.Name)}
        lacking += [f"{file.stem}.{f.name}" for f in kernels
                    if f.name not in inlined and f"{file.stem}.{f.name}" not in compiled]
    assert lacking == []


def kvcache(q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, k: Any = None, v: Any = None,
            rotary_cos: Any = None, rotary_sin: Any = None, cache_seqlens: Any = None, cache_batch_idx: Any = None,
            cache_leftpad: Any = None, block_table: Any = None, softmax_scale: Any = None, causal: bool = False,
            window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0, rotary_interleaved: bool = True,
            alibi_slopes: Any = None, num_splits: int = 0, return_softmax_lse: bool = False) -> torch.Tensor:
    """The signature of flash-attn 2.8's `flash_attn_with_kvcache`, what it checks, and what it computes: query i of n
    is that of place `cache_seqlens` - n + i, and sees `window_size` keys to its left and right."""
    assert cache_seqlens.dtype == torch.int32 and cache_seqlens.shape == (len(q),) and causal
    assert all(x.stride(-1) == 1 and len(x) == len(q) for x in (q, k_cache, v_cache))
    assert k_cache.shape[1] >= int(cache_seqlens.max())
    at = (cache_seqlens.long() - 1)[:, None]
    columns = torch.arange(k_cache.shape[1])
    seen = columns <= at
    if window_size[0] >= 0:
        seen &= columns >= at - window_size[0]
    keys, values = (x.transpose(1, 2) for x in (k_cache, v_cache))
    out: torch.Tensor = torch.nn.functional.scaled_dot_product_attention(
        q.transpose(1, 2), keys, values, seen[:, None, None], scale=softmax_scale, enable_gqa=True)
    return out.transpose(1, 2)


@pytest.mark.parametrize("window", [None, 1, 3, 40])
def test_flash_attention_reads_a_part_of_the_kv_cache(window: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some slots of a cache, as far as the longest of them goes; against attention over each sequence alone."""
    package: Any = ModuleType("flash_attn")
    package.flash_attn_with_kvcache = kvcache
    monkeypatch.setitem(sys.modules, "flash_attn", package)
    keys, values = (torch.randn(6, 32, 2, 16, generator=torch.Generator().manual_seed(i)) for i in range(2))
    q = torch.randn(3, 4, 16, generator=torch.Generator().manual_seed(2))
    positions = torch.tensor([4, 11, 0])
    found = attention_kernels._flash_decode(q, keys, values, 2, positions, 16, 0.3, window)
    for i, place in enumerate(positions.tolist()):
        first = 0 if window is None else max(0, place + 1 - window)
        k, v = (x[2 + i, first:place + 1].transpose(0, 1).repeat_interleave(2, 0) for x in (keys, values))
        expected = ((q[i][:, None] @ k.transpose(1, 2) * 0.3).softmax(-1) @ v)[:, 0]
        torch.testing.assert_close(found[i], expected, rtol=1e-5, atol=1e-6)
