"""Kernels on a GPU against references in double or single precision, and against the same shard on the CPU."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from rldsl.backends.torch.generate.captured_step import CapturedSteps
from rldsl.backends.torch.kernels import attention_kernels
from rldsl.backends.torch.model import fuse_modules
from rldsl.backends.torch.model.fused_layers import fuse_layers
from rldsl.plan.events import Sampling
from rldsl.plan.model import Optimizer
from rldsl.runtime.host_memory import HostMemory
from tests.backend_torch import shards
from tests.backend_torch.shards import make_shard, pack, plan_model, ragged
from tests.moe import shards as experts
from tests.tiny import make_model

HEADS = ((1, 1), (4, 2), (8, 1), (12, 2), (14, 2), (32, 8), (7, 7))  # of queries, and of keys
SIZES = (16, 64, 80, 96, 128, 256)
FAMILIES = ("llama", "qwen2", "qwen3", "mistral", "phi3", "gemma")
CPU = torch.device("cpu")


@pytest.fixture(scope="module", autouse=True)
def world() -> Any:
    if torch.cuda.is_available():
        dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1, device_id=torch.device("cuda", 0))
        yield
        dist.destroy_process_group()
    else:
        yield


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Norm of the difference over the norm of what is right."""
    return float((found.double() - expected.double()).norm() / expected.double().norm())


# ------------------------------------------------------------------------------------------------------- attention


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_decode_attention(size: int, dtype: torch.dtype, cuda: torch.device) -> None:
    """The Triton kernel, with garbage in places that it must not read."""
    from rldsl.backends.torch.kernels.split_kv import split_kv_attention

    for (heads, groups), (slots, width), window in itertools.product(HEADS, ((1, 3000), (5, 200), (130, 70)), (None, 33)):
        torch.manual_seed(size + heads + width)
        keys, values = torch.randn(2, slots + 3, width + 5, groups, size, device=cuda).to(dtype)
        values[:, width:] = float("nan")
        q = torch.randn(slots, heads, size, device=cuda).to(dtype)
        positions = torch.randint(0, width, (slots,), device=cuda)
        positions[0] = width - 1
        found = split_kv_attention(q, keys, values, 2, positions, width, 0.3, window)
        k, v = (x[2 : 2 + slots, :width].transpose(1, 2).repeat_interleave(heads // groups, 1).double()
                for x in (keys, values))
        at = torch.arange(width, device=cuda)
        seen = (at <= positions[:, None]) & (at > positions[:, None] - (window or 10**6))
        expected = F.scaled_dot_product_attention(q[:, :, None].double(), k, v, attn_mask=seen[:, None, None],
                                                  scale=0.3)[:, :, 0]
        assert relative(found, expected) < 1e-2, (heads, groups, slots, width, window)


def test_the_triton_kernel_is_the_one_that_decodes(cuda: torch.device) -> None:
    assert attention_kernels._triton_problem(cuda) == ""
    kernel = attention_kernels.decode_kernel(torch.zeros(1, 1, 64, device=cuda, dtype=torch.bfloat16))
    assert kernel is not None


@pytest.mark.parametrize("size", [16, 64, 80, 128, 256])
@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize(("heads", "groups"), [(4, 4), (14, 2)])
def test_packed_attention(size: int, window: int | None, heads: int, groups: int, cuda: torch.device) -> None:
    """Forward and backward, sequence by sequence in double precision."""
    lens, draw = [1, 5, 130, 77, 300], torch.Generator(cuda).manual_seed(size)
    total = sum(lens)
    q, k, v, grad = (torch.randn(total, n, size, device=cuda, generator=draw).bfloat16()
                     for n in (heads, groups, groups, heads))
    assert attention_kernels.has_varlen_kernel(q)
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    offsets = torch.tensor([0, *itertools.accumulate(lens)], dtype=torch.int32, device=cuda)
    out = attention_kernels.varlen_attention(q, k, v, (offsets, offsets), (max(lens), max(lens)), 0.2, window)
    found = [out, *torch.autograd.grad(out, (q, k, v), grad)]
    wide = [x.detach().double().requires_grad_() for x in (q, k, v)]
    parts = []
    for a, b, c in zip(*(x.split(lens) for x in wide), strict=True):
        n = len(a)
        at = torch.arange(n, device=cuda)
        seen = (at <= at[:, None]) & (at > at[:, None] - (window or 10**6))
        b, c = (x.transpose(0, 1).repeat_interleave(heads // groups, 0) for x in (b, c))
        parts.append(F.scaled_dot_product_attention(a.transpose(0, 1), b, c, attn_mask=seen, scale=0.2).transpose(0, 1))
    right = torch.cat(parts)
    expected = [right, *torch.autograd.grad(right, wide, grad.double())]
    assert [relative(a, b) < 2e-2 for a, b in zip(found, expected, strict=True)] == [True] * 4


def test_heads_that_no_kernel_takes(cuda: torch.device) -> None:
    assert not attention_kernels.has_varlen_kernel(torch.zeros(1, 1, 20, device=cuda, dtype=torch.bfloat16))
    assert not attention_kernels.has_varlen_kernel(torch.zeros(1, 1, 512, device=cuda, dtype=torch.bfloat16))
    assert not attention_kernels.has_varlen_kernel(torch.zeros(1, 1, 64, device=cuda))


# --------------------------------------------------------------------------------------------------- whole models


def on(device: torch.device, monkeypatch: pytest.MonkeyPatch, record: Any) -> Any:
    monkeypatch.setattr(shards, "DEVICE", device)
    return make_shard(record, 0)


def trained(device: torch.device, monkeypatch: pytest.MonkeyPatch, record: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs, and by how much two updates changed all parameters, on the CPU."""
    shard = on(device, monkeypatch, record)
    rows = ragged(9, 46, longest=20)
    found = shard.infer([pack(rows)], "logprobs", 1.0)
    before = [x.detach().clone() for x in shard.stage.parameters.values()]
    for _ in range(2):
        shard.train([(pack(rows),)], [("logprobs",)], 1.0, lambda _, fresh: -fresh[0]["logprobs"].mean())
    changes = [(x.detach() - y).flatten() for x, y in zip(shard.stage.parameters.values(), before, strict=True)]
    return found.detach().cpu().float(), torch.cat(changes).cpu().float()


@pytest.mark.parametrize("family", [*FAMILIES, "qwen3_moe"])
@pytest.mark.parametrize(("dtype", "limit"), [("float32", 1e-4), ("bfloat16", 5e-2)])
def test_a_model_computes_what_it_computes_on_the_cpu(family: str, dtype: str, limit: float, tmp_path: Path,
                                                      monkeypatch: pytest.MonkeyPatch, cuda: torch.device) -> None:
    path = experts.make(tmp_path / "m", family) if family == "qwen3_moe" else str(make_model(tmp_path / "m", family))
    # updates that are nearly proportional to gradients: AdamW would make as much of those that are all rounding
    record = plan_model(path, optimizer=Optimizer(lr=1.0, eps=1.0), dtype=dtype)
    cpu = trained(CPU, monkeypatch, replace(record, dtype="float32"))
    gpu = trained(cuda, monkeypatch, record)
    gaps = [relative(a, b) for a, b in zip(gpu, cpu, strict=True)]
    if family == "qwen3_moe" and dtype == "bfloat16":
        limit *= 4  # rounding sends a few tokens to other experts
    assert max(gaps) < limit, gaps


@pytest.mark.parametrize("family", [*FAMILIES, "qwen3_moe"])
def test_greedy_tokens_are_those_of_the_cpu(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                            cuda: torch.device) -> None:
    path = experts.make(tmp_path / "m", family) if family == "qwen3_moe" else str(make_model(tmp_path / "m", family))
    prompts = [(p, []) for p, _ in ragged(20, 46, longest=30)]
    asked, made = Sampling(max_new_tokens=24, greedy=True), []
    for device in (CPU, cuda):
        shard = on(device, monkeypatch, plan_model(path))
        made.append(shard.generate(pack(prompts), asked, seed=1, step=0, max_num_seqs=7))
    assert torch.equal(made[0].batch.tokens, made[1].batch.tokens.cpu())
    assert torch.allclose(made[0].logprobs, made[1].logprobs.cpu(), atol=1e-4)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("sampling", [
    Sampling(max_new_tokens=40), Sampling(max_new_tokens=40, temperature=0.7, top_p=0.9),
    Sampling(max_new_tokens=40, top_k=5, min_p=0.05), Sampling(max_new_tokens=40, greedy=True)])
@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_captured_steps_change_nothing(family: str, dtype: str, sampling: Sampling, tmp_path: Path,
                                       monkeypatch: pytest.MonkeyPatch, cuda: torch.device) -> None:
    path = experts.make(tmp_path / "m", family) if family == "qwen3_moe" else str(make_model(tmp_path / "m", family))
    shard = on(cuda, monkeypatch, plan_model(path, dtype=dtype))
    prompts = pack([(p, []) for p, _ in ragged(40, 46, longest=30)])
    graphs: list[Any] = []
    real = CapturedSteps._capture_graph
    monkeypatch.setattr(CapturedSteps, "_capture_graph",
                        lambda self, *args: (graphs.append(self), real(self, *args))[1])
    captured = [shard.generate(prompts, sampling, seed=3, step=1, max_num_seqs=16) for _ in range(2)]
    expected = not (family == "qwen3_moe" and dtype == "float32")  # which reads how many rows each expert has
    assert any(g.repeatable for g in graphs) == expected and all(g.enabled and g.switch.enabled for g in graphs)
    monkeypatch.setattr(CapturedSteps, "__call__", lambda self, key, function, *_: function())
    plain = on(cuda, monkeypatch, plan_model(path, dtype=dtype)).generate(prompts, sampling, seed=3, step=1,
                                                                         max_num_seqs=16)
    for made in captured:
        same = made.batch.tokens.shape == plain.batch.tokens.shape and torch.equal(made.batch.tokens, plain.batch.tokens)
        assert same and torch.allclose(made.logprobs, plain.logprobs, atol=1e-4 if dtype == "float32" else 0.05)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral", "gemma", "phi3", "stablelm"])
def test_layers_with_fewer_kernels(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cuda: torch.device
                                   ) -> None:
    """bfloat16, with and without them: log-probs, updates and generated tokens."""
    record = plan_model(str(make_model(tmp_path / "m", family)), optimizer=Optimizer(lr=1.0, eps=1.0), dtype="bfloat16")
    asked, prompts = Sampling(max_new_tokens=30, greedy=True), [(p, []) for p, _ in ragged(20, 46, longest=30)]
    found, names = [], []
    for fuses in (True, False):
        monkeypatch.setattr(fuse_modules, "fuse_layers", (lambda *given: names.extend(fuse_layers(*given))) if fuses else
                            lambda *_: None)
        made = on(cuda, monkeypatch, record).generate(pack(prompts), asked, seed=1, step=0, max_num_seqs=0)
        found.append((*trained(cuda, monkeypatch, record), made.batch.tokens.cpu()))
    assert bool(names) == (family != "phi3")
    (logprobs, changes, tokens), (right, expected, others) = found
    assert relative(logprobs, right) < 5e-3 and relative(changes, expected) < 2e-2
    same = len(tokens) == len(others) and float((tokens == others).float().mean())
    assert same > 0.9  # a tie of bfloat16 logits may end otherwise, and the rest of its sequence with it


def test_generation_agrees_with_inference(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cuda: torch.device) -> None:
    for dtype, limit in (("float32", 1e-4), ("bfloat16", 0.1)):
        shard = on(cuda, monkeypatch, plan_model(str(make_model(tmp_path / dtype, "llama")), dtype=dtype))
        made = shard.generate(pack([(p, []) for p, _ in ragged(64, 46, longest=90)]), Sampling(max_new_tokens=70),
                              seed=1, step=0, max_num_seqs=0)
        again = shard.infer([made.batch], "logprobs", 1.0)
        assert float((made.logprobs - again).abs().max()) < limit


# ---------------------------------------------------------------------------------------------- memory, and the rest


def test_offload_and_onload(cuda: torch.device) -> None:
    host = HostMemory(cuda)
    tensors = {f"{dtype}{i}": torch.randn(1000 + i, 300, device=cuda).to(dtype)
               for dtype in (torch.float32, torch.bfloat16, torch.int64) for i in range(3)}
    kept = {name: x.clone() for name, x in tensors.items()}
    for _ in range(3):
        away = host.offload(tensors)
        assert all(x.device.type == "cpu" and x.is_pinned() for x in away.values())
        for x in tensors.values():
            x.zero_()
        tensors, finish = host.onload(away)
        finish()
        assert all(torch.equal(x, kept[name]) for name, x in tensors.items())


def test_small_tensors_share_no_page(cuda: torch.device) -> None:
    """CUDA registers a page once."""
    hosts = [HostMemory(cuda) for _ in range(40)]
    for i, host in enumerate(hosts):
        away = host.offload({str(dtype): torch.full((3,), i, device=cuda).to(dtype)
                             for dtype in (torch.float32, torch.bfloat16, torch.int64)})
        assert all(x.is_pinned() and x.tolist() == [i] * 3 for x in away.values())


def test_memory_is_free_after_an_offload(cuda: torch.device) -> None:
    """Of the device at once, and of the host when nobody holds it: its addresses can be registered again."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated(cuda)
    for _ in range(30):
        host, tensor = HostMemory(cuda), torch.randn(1 << 20, device=cuda)
        away = host.offload({"x": tensor})
        del tensor
        assert torch.cuda.memory_allocated(cuda) == before
        back, finish = host.onload(away)
        finish()
        assert back["x"].is_cuda and torch.equal(back["x"].cpu(), away["x"])
        del back, finish


def test_products_in_one_order() -> None:
    """What an invariant model computes with, on the GPU itself."""
    if not torch.cuda.is_available():
        pytest.skip("no CUDA GPU")
    made = subprocess.run([sys.executable, "-m", "tests.consistency.fixed_order_check"],
                          cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=300,
                          env=os.environ | {"RLDSL_TEST_DEVICE": "cuda"})
    assert made.returncode == 0, made.stderr[-3000:]
    import json

    said: dict[str, bool] = json.loads(made.stdout.splitlines()[-1])
    assert len(said) > 30 and not [name for name, good in said.items() if not good]
