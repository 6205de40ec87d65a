"""What an invariant model computes with on a GPU: on a CPU, with the Triton kernel interpreted, and what is refused."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from rldsl.backends.torch.kernels import fixed_order
from rldsl.backends.torch.model import invariant, invariant_probe
from rldsl.diag import Failure
from tests.backend_torch.shards import plan_model
from tests.tiny import make_model

ROOT = Path(__file__).parents[2]
needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")


@pytest.mark.thorough
@needs_triton
def test_they_are_torch_s_and_depend_on_no_other_row(tmp_path: Path) -> None:
    """Products, reductions, attention and its gradient; a model that generates, infers and trains."""
    made = subprocess.run([sys.executable, "-m", "tests.consistency.fixed_order_check"], cwd=ROOT, capture_output=True,
                          text=True, env=os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}, timeout=900)
    assert made.returncode == 0, made.stderr[-3000:]
    said: dict[str, bool] = json.loads(made.stdout.splitlines()[-1])
    assert len(said) > 30 and not [name for name, good in said.items() if not good]
    assert {"generation is inference", "a row alone", "probe of its gradient"} <= said.keys()


def test_a_gpu_without_triton_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = replace(plan_model(str(make_model(tmp_path / "m", num_hidden_layers=1))), invariant=True)
    monkeypatch.setattr(fixed_order, "find_spec", lambda _: None)
    invariant_probe.check_kernels(model, torch.device("cpu"))
    with pytest.raises(Failure) as raised:
        invariant_probe.check_kernels(model, torch.device("cuda"))
    (found,) = raised.value.diagnostics
    assert found.code == "RL0734" and "Triton" in found.notes[0]


@pytest.mark.parametrize("broken", ["products", "row_sum", "gradient"])
def test_a_gpu_whose_kernels_break_it_is_refused(broken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's own functions in the place of ours, as on a GPU that sums few rows in another order."""
    def of_few_rows(x: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        flipped = x.shape[-2] < 8 if broken == "products" else broken == "gradient" and x.dim() == 3 and len(x) < 3
        return x.flip(-1) @ right.flip(-2) if flipped else x @ right

    def row_sum(x: torch.Tensor, keepdim: bool = False) -> torch.Tensor:
        return x[:, ::2].sum(-1) + x[:, 1::2].sum(-1) if len(x) < 3 else x.sum(-1)

    probes: dict[str, Any] = {
        "products": lambda: invariant_probe._product_varies.__wrapped__(48, 40, 0, torch.float32, "cpu", 1),
        "row_sum": lambda: invariant_probe._sum_varies.__wrapped__("cpu", 1),
        "gradient": lambda: invariant_probe._attention_gradient_varies.__wrapped__(24, "cpu", 1)}
    assert not probes[broken]()
    monkeypatch.setattr(fixed_order, "needed", lambda _: True)
    monkeypatch.setattr(fixed_order, "products", of_few_rows)
    if broken == "row_sum":
        monkeypatch.setitem(fixed_order.REDUCTIONS, torch.Tensor.sum, fixed_order._over_last(row_sum))
    assert probes[broken]()


@pytest.mark.parametrize("call", [
    lambda x: x.sum(), lambda x: x.sum(0), lambda x: x.sum((0, 1)), lambda x: x.long().sum(-1), lambda x: x.amax(-1)])
def test_other_reductions_are_torch_s(call: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fixed_order, "needed", lambda _: True)
    x = torch.randn(7, 9, generator=torch.Generator().manual_seed(0))
    with invariant.Invariant():
        found = call(x)
    assert torch.equal(found, call(x))


def test_a_processor_uses_torch_s(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fixed_order, "products", None)  # would be called
    x = torch.randn(5, 16)
    with invariant.Invariant():
        assert torch.equal(x.sum(-1), x.sum(-1)) and (x @ x.T).shape == (5, 5)
    assert not fixed_order.missing(torch.device("cpu"))
