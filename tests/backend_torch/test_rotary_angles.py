"""Cosines and sines of rotary position embeddings by a kernel against exact ones, and in the modules of families."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.qwen2_5_vl.configuration_qwen2_5_vl import Qwen2_5_VLTextConfig
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLRotaryEmbedding

from rldsl.backends.torch.kernels import cpu_rotary, kernel_library
from rldsl.backends.torch.model.fused_layers import fuse_layers

pytestmark = pytest.mark.skipif(not kernel_library.available(), reason="no C compiler")
CPU = torch.device("cpu")
SCALINGS: dict[str, dict[str, Any]] = {
    "default": {}, "linear": {"factor": 4.0}, "yarn": {"factor": 4.0, "original_max_position_embeddings": 64},
    "llama3": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}}
CHANGING: dict[str, dict[str, Any]] = {
    "dynamic": {"factor": 2.0},
    "longrope": {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8, "factor": 4.0,
                 "original_max_position_embeddings": 64}}


def exact(positions: torch.Tensor, frequencies: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    angles = (positions[..., None].float() * frequencies).double()
    angles = torch.cat([angles, angles], -1)
    return angles.cos(), angles.sin()


@pytest.mark.parametrize("half", [1, 2, 3, 4, 7, 8, 12, 16, 17, 32, 64])
@pytest.mark.parametrize("most", [1, 100, 1 << 17, 1 << 24])
def test_the_float_closest_to_the_exact_one(half: int, most: int) -> None:
    draw = torch.Generator().manual_seed(half)
    positions = torch.randint(most, (1, 500), generator=draw)
    frequencies = 10000.0 ** -(torch.arange(half) / half)
    for found, expected in zip(cpu_rotary.angles(positions, frequencies, 1.0), exact(positions, frequencies),
                               strict=True):
        assert found.shape == (1, 500, 2 * half) and found.dtype == torch.float32
        assert (found - expected).abs().max() <= 3.1e-8  # half the distance of float32 numbers just below 1
        assert (found != expected.float()).float().mean() < 1e-3


@pytest.mark.parametrize("angle, cosine, sine", [(0.0, 1.0, 0.0), (torch.pi / 2, 0.0, 1.0), (torch.pi, -1.0, 0.0),
                                                 (3 * torch.pi / 2, 0.0, -1.0), (2 * torch.pi, 1.0, 0.0)])
def test_quarters_of_a_turn(angle: float, cosine: float, sine: float) -> None:
    for sign in (1, -1):
        cos, sin = cpu_rotary.angles(torch.ones(1, 1, dtype=torch.long), torch.tensor([sign * angle]), 1.0)
        assert torch.allclose(cos, torch.full((2,), cosine), atol=2e-7)
        assert torch.allclose(sin, torch.full((2,), sign * sine), atol=2e-7)


@pytest.mark.parametrize("half", [5, 16, 32])
def test_a_token_has_the_same_bits_in_every_batch(half: int) -> None:
    positions, frequencies = torch.randint(5000, (1, 700)), torch.rand(half)
    cos, sin = cpu_rotary.angles(positions, frequencies, 0.7)
    for at in (0, 13, 699):
        one = cpu_rotary.angles(positions[:, at : at + 1].clone(), frequencies, 0.7)
        assert torch.equal(one[0], cos[:, at : at + 1]) and torch.equal(one[1], sin[:, at : at + 1])
    few = cpu_rotary.angles(positions, frequencies[: half // 2 + 1].clone(), 0.7)
    assert torch.equal(few[0][..., : half // 2 + 1], cos[..., : half // 2 + 1])


@pytest.mark.parametrize("positions, frequencies", [
    (torch.zeros(1, 3), torch.ones(4)), (torch.zeros(1, 3, dtype=torch.int32), torch.ones(4)),
    (torch.zeros(3, 2, dtype=torch.long).T, torch.ones(4)),
    (torch.zeros(1, 3, dtype=torch.long), torch.ones(4).double()),
    (torch.zeros(1, 3, dtype=torch.long), torch.ones(8)[::2]),
    (torch.zeros(1, 3, dtype=torch.long, device="meta"), torch.ones(4)),
    (torch.zeros(1, 3, dtype=torch.long), torch.ones(4, device="meta"))])
def test_what_the_kernel_does_not_take(positions: torch.Tensor, frequencies: torch.Tensor) -> None:
    assert cpu_rotary.has_angles(torch.zeros(1, 3, dtype=torch.long), torch.ones(4))
    assert not cpu_rotary.has_angles(positions, frequencies)


def embedding(kind: str, options: dict[str, Any]) -> nn.Module:
    config = LlamaConfig(hidden_size=64, num_attention_heads=4, max_position_embeddings=256,
                         rope_parameters={"rope_type": kind, "rope_theta": 10000.0, **options})
    return nn.ModuleDict({"rotary_emb": LlamaRotaryEmbedding(config)})


@pytest.mark.parametrize("kind", SCALINGS)
def test_the_modules_of_families(kind: str) -> None:
    module = embedding(kind, SCALINGS[kind])
    x, positions = torch.zeros(1, 1, 64), torch.tensor([[0, 1, 5, 200, 255]])
    plain = module["rotary_emb"](x, positions)
    assert fuse_layers(module, CPU) == ["rotary_emb"]
    fused = module["rotary_emb"](x, positions)
    assert all(torch.allclose(a, b, atol=2e-7) for a, b in zip(plain, fused, strict=True))
    assert fused[0].abs().max() == pytest.approx(float(module["rotary_emb"].attention_scaling), rel=1e-3)
    half = module["rotary_emb"](x.bfloat16(), positions)  # as before
    assert half[0].dtype == torch.bfloat16 and torch.equal(half[0], plain[0].bfloat16())


@pytest.mark.parametrize("kind", CHANGING)
def test_frequencies_that_depend_on_the_length_are_left_to_the_family(kind: str) -> None:
    module = embedding(kind, CHANGING[kind])
    expected = embedding(kind, CHANGING[kind])
    assert fuse_layers(module, CPU) == []
    for length in (10, 400):
        x, positions = torch.zeros(1, 1, 64), torch.arange(length)[None]
        assert torch.equal(module["rotary_emb"](x, positions)[0], expected["rotary_emb"](x, positions)[0])


def test_positions_in_images() -> None:
    """They have a dimension for time, height and width, of which a family takes sections."""
    config = Qwen2_5_VLTextConfig(hidden_size=64, num_attention_heads=4, rope_parameters={
        "rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]})
    module = nn.ModuleDict({"rotary_emb": Qwen2_5_VLRotaryEmbedding(config)})
    x, positions = torch.zeros(1, 1, 64), torch.randint(100, (3, 1, 9))
    plain = module["rotary_emb"](x, positions)
    fuse_layers(module, CPU)
    assert all(map(torch.equal, plain, module["rotary_emb"](x, positions)))


class Interleaved(LlamaRotaryEmbedding):
    def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        angles = (position_ids[..., None] * self.inv_freq).repeat_interleave(2, -1)
        return angles.cos(), angles.sin()


class Named(LlamaRotaryEmbedding):
    def forward(self, x: torch.Tensor, position_ids: torch.Tensor, layer_type: str) -> tuple[torch.Tensor, ...]:
        return super().forward(x, position_ids)


@pytest.mark.parametrize("kind", [Interleaved, Named])
def test_modules_that_compute_otherwise(kind: type[nn.Module]) -> None:
    module = nn.ModuleDict({"rotary_emb": kind(LlamaConfig(hidden_size=64, num_attention_heads=4))})
    assert fuse_layers(module, CPU) == []
