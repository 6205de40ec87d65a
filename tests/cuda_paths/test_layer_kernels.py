"""Layers with fewer kernels on a GPU: the kernels in Triton's interpreter, and which modules get them."""

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
from torch import nn

from rldsl.backends.torch.model import fuse_modules, fused_layers
from rldsl.backends.torch.model.fused_layers import fuse_layers
from rldsl.models import rotary
from tests.backend_torch.shards import make_shard, pack, plan_model, ragged
from tests.tiny import make_model

WHOLE = ["self_attn", "mlp", "input_layernorm", "post_attention_layernorm"]
needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")


@pytest.mark.thorough
@needs_triton
def test_kernels_compute_what_torch_does() -> None:
    done = subprocess.run([sys.executable, "-m", "tests.cuda_paths.layer_kernels_check"], capture_output=True, text=True,
                          cwd=Path(__file__).parents[2], env=os.environ | {"TRITON_INTERPRET": "1"}, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    said: dict[str, float] = json.loads(done.stdout)
    assert len(said) == 15
    # the interpreter cuts bfloat16 off where a GPU rounds: one unit in the last place of numbers up to 256
    limits = {name: 0.1 if "norm" in name else 1e-5 if "float32" in name else 2.0 if "gated" in name else 0.04
              for name in said}
    assert not {name: gap for name, gap in said.items() if gap > limits[name]}


def fused(family: str, folder: Path, monkeypatch: pytest.MonkeyPatch, **sizes: Any) -> tuple[list[str], torch.Tensor]:
    """Names of modules in the first layer that get kernels, and log-probs on the CPU, where these fall back."""
    names: list[str] = []
    monkeypatch.setattr(fuse_modules, "fuse_layers", lambda skeleton, _, norms: names.extend(
        fuse_layers(skeleton, torch.device("cuda"), norms)))
    model = plan_model(str(make_model(folder / "m", family, num_hidden_layers=1, **sizes)))
    found = make_shard(model, 0).infer([pack(ragged(5, 46))], "logprobs", 1.0)
    return [name.rpartition(".")[2] for name in names], found


@pytest.mark.parametrize(("family", "expected"), [
    ("llama", WHOLE), ("qwen2", WHOLE), ("qwen3", WHOLE), ("mistral", WHOLE),
    ("gemma", ["self_attn"]),  # whose layers use another function than silu
    ("olmo2", ["self_attn", "mlp"]),  # whose norms come after attention and are added to what is not normalized
    ("phi3", []), ("cohere", ["mlp"]), ("gpt2", []), ("stablelm", ["self_attn", "mlp"])])
@needs_triton
def test_which_modules_get_them(family: str, expected: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the numbers are those without: on the CPU no kernel for GPUs runs, and here none for CPUs, so a forward that
    leaves something out shows."""
    monkeypatch.setattr(fused_layers.cpu_kernels, "takes", lambda *_: False)
    with monkeypatch.context() as only:
        only.setattr(fuse_modules, "fuse_layers", lambda *_: [])
        plain = make_shard(plan_model(str(make_model(tmp_path / "m", family, num_hidden_layers=1))), 0).infer(
            [pack(ragged(5, 46))], "logprobs", 1.0)
    names, found = fused(family, tmp_path, monkeypatch)
    assert names == expected and torch.equal(found, plain)


def test_an_invariant_model_gets_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from dataclasses import replace

    monkeypatch.setattr(fuse_modules, "fuse_layers", lambda *_: pytest.fail("an invariant model was changed"))
    make_shard(replace(plan_model(str(make_model(tmp_path / "m", num_hidden_layers=1))), invariant=True), 0)


def test_nothing_is_changed_on_the_cpu_or_without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not fuse_layers(nn.Linear(2, 2), torch.device("cpu"))
    monkeypatch.setattr(fused_layers, "find_spec", lambda _: None)
    assert not fuse_layers(nn.Linear(2, 2), torch.device("cuda"))


class Mlp(nn.Module):
    """Like a gated product, but not one."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = nn.Linear(4, 6), nn.Linear(4, 6), nn.Linear(6, 4)
        self.act_fn, self.kind = nn.SiLU(), kind

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_proj(x), self.up_proj(x)
        if self.kind == "swapped":
            gate, up = up, gate
        inner = self.act_fn(gate) * (up + 1 if self.kind == "plus one" else up)
        out: torch.Tensor = self.down_proj(inner)
        return out * 2 if self.kind == "scaled" else out


@pytest.mark.parametrize(("kind", "same"), [("plain", True), ("swapped", False), ("plus one", False), ("scaled", False)])
def test_a_layer_that_computes_something_else_is_left(kind: str, same: bool) -> None:
    assert fused_layers._is_gated_product(Mlp(kind)) is same


def interleaved(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> Any:
    def turn(x: torch.Tensor) -> torch.Tensor:
        return x * cos[:, None] + torch.stack([-x[..., 1::2], x[..., ::2]], -1).flatten(-2) * sin[:, None]

    return turn(q), turn(k)


def test_another_rotary_embedding_is_left() -> None:
    scope: dict[str, Any] = {"apply_rotary_pos_emb": interleaved}
    exec("def forward(self, q, k, cos, sin):\n    return apply_rotary_pos_emb(q, k, cos, sin)", scope)
    assert not rotary.forward_rotates_halves(scope["forward"])
    scope = {"apply_rotary_pos_emb": lambda q, k, cos, sin: tuple(
        x * cos[:, None] + torch.cat([-x[..., 4:], x[..., :4]], -1) * sin[:, None] for x in (q, k))}
    exec("def forward(self, q, k, cos, sin):\n    return apply_rotary_pos_emb(q, k, cos, sin)", scope)
    assert rotary.forward_rotates_halves(scope["forward"])
    assert not rotary.forward_rotates_halves(lambda q: q)


class Layer(nn.Module):
    """With the parts of a decoder layer, in some order."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        x = hidden_states
        if self.kind == "post":
            x = x + self.input_layernorm(self.self_attn(x)[0])
            return x + self.post_attention_layernorm(self.mlp(x))
        read = self.input_layernorm(x)
        x = (read if self.kind == "residual of the norm" else x) + self.self_attn(read)[0]
        if self.kind == "parallel":
            return x + self.mlp(read)
        return x + self.mlp(self.post_attention_layernorm(x))


@pytest.mark.parametrize(("kind", "same"), [("pre", True), ("post", False), ("residual of the norm", False),
                                            ("parallel", False)])
def test_norms_that_more_than_products_read_are_left(kind: str, same: bool) -> None:
    assert fused_layers._is_pre_norm(Layer(kind)) is same
