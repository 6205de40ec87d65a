"""Optimizer steps of mixture-of-experts models under every layout against one process with plain transformers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from rldsl.backends.torch.model.experts import _compute
from tests.backend_torch.shards import layout_of as at
from tests.backend_torch.shards import plan_model, shard_of
from tests.backend_torch.steps import check, run
from tests.backend_torch.test_train import OPTIONS, UPDATES, reference
from tests.moe.shards import make
from tests.samples import thorough_between
from tests.world import run_world

MIXTRAL = [at(), at(dp=2), at(tp=2), at(pp=2), at(dp=2, ep=2), at(dp=4, ep=2), at(dp=4, ep=4), at(dp=2, tp=2, ep=2),
           at(dp=2, pp=2, ep=2), at(dp=2, zero=1), at(dp=2, cp=2), at(dp=2, ep=2, zero=1),
           at(dp=4, ep=2, zero=3)]
QWEN = [at(dp=2, tp=2, pp=2, ep=2), at(dp=8, ep=4), at(tp=4), at(dp=2, zero=2),
        at(dp=2, tp=2, pp=2, ep=2, zero=3), at(dp=8, ep=2, zero=2), at(dp=4, pp=2, ep=2, zero=3)]


CASES = [("mixtral", "causal_lm", "logprobs", MIXTRAL), ("qwen3_moe", "causal_lm", "logprobs", QWEN),
         ("shared", "value_model", "values", [at(tp=2), at(dp=2, ep=2)])]


@pytest.mark.thorough
@pytest.mark.parametrize("name, kind, what, every", thorough_between(CASES), ids=[c[0] for c in CASES])
def test_steps_equal_one_process(tmp_path, name, kind, what, every):
    """The last step has one row: all shards but one have none, and still serve its tokens."""
    check(make(tmp_path / "m", name), kind, what, every)


def half_steps(rank: int, path: str) -> list[Any]:
    found = []
    for layout in (at(), at(dp=2, ep=2), at(dp=2, ep=2, zero=3), at(dp=2, zero=3)):
        made = shard_of(plan_model(path, "causal_lm", OPTIONS, UPDATES, "bfloat16"), layout, rank, True)
        if made is not None:
            assert all(t.dtype == torch.float32 for t in made[0].state_dict().values())
            found.append(run(made[0], "logprobs", made[1], layout.dp, 2))
    return found


def test_halves(tmp_path):
    """Experts multiply in half precision, gathered or not, and their gradients are those of float32 parameters."""
    path = make(tmp_path / "m", "mixtral")
    norms = reference(path, "logprobs")[1][:2]
    for seen in (found for rank in run_world(2, half_steps, path) for found in rank):
        assert seen == pytest.approx(norms, rel=0.1)


class Layer(torch.nn.Module):
    def __init__(self, experts: int, hidden: int, width: int):
        super().__init__()
        self.gate_up_proj = torch.nn.Parameter(torch.randn(experts, 2 * width, hidden) * 0.1)
        self.down_proj = torch.nn.Parameter(torch.randn(experts, hidden, width) * 0.1)

    def _apply_gate(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = x.chunk(2, -1)
        return F.silu(gate) * up


@pytest.mark.parametrize("counts", [[3, 0, 5, 2], [0, 0, 0, 7], [0, 0, 0, 0]])
@pytest.mark.parametrize("width", [24, 9])
def test_products_of_all_experts_at_once_and_one_by_one(counts, width):
    """Half precision takes one kernel for all where sizes allow; 9 is none that it can read."""
    torch.manual_seed(0)
    layer, found = Layer(4, 32, width), []
    rows = torch.randn(sum(counts), 32)
    for dtype in (torch.bfloat16, torch.float32):
        layer.zero_grad()
        x = rows.to(dtype).requires_grad_()
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
            out = _compute(layer, x, torch.tensor(counts))
        (out.float() ** 2).sum().backward()
        assert out.dtype == dtype and out.shape == rows.shape
        found.append([out.detach(), x.grad, *(p.grad for p in layer.parameters() if p.grad is not None)])
    for half, full in zip(*found):
        assert (half.float() - full).abs().sum() <= 0.02 * full.abs().sum()
