"""Linear layers that read the same tensor: numbers and gradients are those of torch, however they are called."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from rldsl.backends.torch.kernels import kernel_library, linear_layers, products
from rldsl.backends.torch.kernels.linear_layers import CpuLinear, SharedInput, outputs
from rldsl.backends.torch.model import fused_layers
from rldsl.plan.model import Optimizer
from tests.backend_torch.shards import make_shard, pack, plan_model
from tests.tiny import make_model

INPUTS, WIDTHS = 40, (56, 24, 24)
close = partial(torch.testing.assert_close, rtol=1e-4, atol=1e-4)
with_panels = pytest.mark.skipif(not kernel_library.available(), reason="there is no compiler")


@pytest.fixture(autouse=True)
def panels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "panels_are_fast", lambda: True)


def layers(bias: bool = False, widths: Sequence[int] = WIDTHS) -> list[CpuLinear]:
    torch.manual_seed(0)
    return [CpuLinear(INPUTS, width, bias=bias) for width in widths]


def gradients(made: Sequence[nn.Linear], x: torch.Tensor, run: Callable[[torch.Tensor], Sequence[torch.Tensor]],
              used: Sequence[int] = (0, 1, 2)) -> list[torch.Tensor | None]:
    """Those of the parameters, of the input and the results themselves, when the results in `used` have one."""
    for layer in made:
        layer.zero_grad()
    leaf = x.detach().clone().requires_grad_()
    found = run(leaf * 1)  # not a leaf itself
    sum(((i + 1) * found[i].square().sum() for i in used), start=torch.zeros(())).backward()
    return [*(out.detach() for out in found), leaf.grad, *(p.grad for layer in made for p in layer.parameters())]


def plainly(made: Sequence[nn.Linear], x: torch.Tensor) -> list[torch.Tensor]:
    return [nn.functional.linear(x, layer.weight, layer.bias) for layer in made]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of layers in each function that was differentiated."""
    found: list[int] = []
    plain = linear_layers._Linears.backward

    def backward(ctx: Any, *grads: Any) -> Any:
        found.append(len(grads))
        return plain(ctx, *grads)

    monkeypatch.setattr(linear_layers._Linears, "backward", staticmethod(backward))
    return found


@with_panels
@pytest.mark.parametrize("held", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(90,), (3, 30), (2,), (1, 300)])
def test_several_layers_are_one_function(shape: tuple[int, ...], bias: bool, held: bool, calls: list[int]) -> None:
    made, x = layers(bias), torch.randn(*shape, INPUTS)
    expected = gradients(made, x, lambda x: plainly(made, x))
    calls.clear()
    if held:
        for layer in made:
            layer.zero_grad = lambda layer=layer: [  # type: ignore[method-assign]
                setattr(p, "grad", torch.zeros_like(p)) for p in layer.parameters()]
    for own, theirs in zip(gradients(made, x, lambda x: outputs(x, made)), expected, strict=True):
        close(own, theirs)
    assert calls == [3]


@with_panels
@pytest.mark.parametrize("used", [(0,), (2,), (0, 2), (1, 2)])
def test_a_result_may_be_of_no_use(used: tuple[int, ...]) -> None:
    made, x = layers(), torch.randn(90, INPUTS)
    expected = gradients(made, x, lambda x: plainly(made, x), used)
    for own, theirs in zip(gradients(made, x, lambda x: outputs(x, made), used), expected, strict=True):
        assert (own is None) == (theirs is None)
        if own is not None:
            close(own, theirs)


@with_panels
def test_rows_may_be_apart(calls: list[int]) -> None:
    made, wide = layers(), torch.randn(90, 2 * INPUTS)
    expected = gradients(made, wide, lambda x: plainly(made, x[:, :INPUTS]))
    calls.clear()
    for own, theirs in zip(gradients(made, wide, lambda x: outputs(x[:, :INPUTS], made)), expected, strict=True):
        close(own, theirs)
    assert calls == [3]


@with_panels
def test_a_frozen_layer_gets_no_gradient() -> None:
    made, x = layers(), torch.randn(90, INPUTS)
    made[1].weight.requires_grad_(False)
    expected = gradients(made, x, lambda x: plainly(made, x))
    for own, theirs in zip(gradients(made, x, lambda x: outputs(x, made)), expected, strict=True):
        assert (own is None) == (theirs is None)
        if own is not None:
            close(own, theirs)


@pytest.mark.parametrize("kind", ["hook", "pre-hook", "forward", "other class", "one dimension", "no gradient"])
def test_what_else_a_layer_does_is_done(kind: str, calls: list[int]) -> None:
    made: list[Any] = layers()
    x = torch.randn(INPUTS) if kind == "one dimension" else torch.randn(90, INPUTS)
    if kind == "hook":
        made[1].register_forward_hook(lambda *given: given[-1] * 2)
    elif kind == "pre-hook":
        made[1].register_forward_pre_hook(lambda _, given: (given[0] * 2,))
    elif kind == "forward":
        made[1].forward = lambda x: nn.functional.linear(x, made[1].weight) * 2
    elif kind == "other class":
        made[1] = nn.Sequential(made[1])
        made[1].append(nn.Hardtanh(-1e-3, 1e-3))
    expected = [layer(x) for layer in made]
    with torch.set_grad_enabled(kind != "no gradient"):
        found = outputs(x, made)
    for own, theirs in zip(found, expected, strict=True):
        close(own, theirs)
    if kind != "no gradient":
        sum((out.sum() for out in found), start=torch.zeros(())).backward()
        assert 3 not in calls


# -------------------------------------------------------------------------------- layers that a forward calls in turn


class Attention(nn.Module):
    """Calls its projections with one tensor, or as `kind` says."""

    def __init__(self, kind: str = "") -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = layers(widths=(24, 24, 24))
        self.kind = kind
        self.shared = SharedInput([self.q_proj, self.k_proj, self.v_proj])

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        q = self.q_proj(x)
        if self.kind == "another tensor":
            return [q, self.k_proj(x * 2), self.v_proj(x)]
        if self.kind == "changed":
            x.mul_(2)
        if self.kind == "twice":
            return [q, self.k_proj(x) + self.k_proj(x), self.v_proj(x)]
        if self.kind == "other order":
            v = self.v_proj(x)
            return [q, self.k_proj(x), v]
        if self.kind == "two only":
            return [q, self.k_proj(x), q]
        return [q, self.k_proj(x), self.v_proj(x)]


@with_panels
@pytest.mark.parametrize("kind", ["", "another tensor", "changed", "twice", "other order", "two only"])
def test_a_forward_that_calls_them_in_turn(kind: str, calls: list[int]) -> None:
    model = Attention(kind)
    made, x = [model.q_proj, model.k_proj, model.v_proj], torch.randn(90, INPUTS)

    def alone(x: torch.Tensor) -> list[torch.Tensor]:
        shared, model.shared.enabled = model.shared.enabled, False
        out = model(x)
        model.shared.enabled = shared
        return out

    def run(x: torch.Tensor) -> list[torch.Tensor]:
        return model(x.clone() if kind == "changed" else x)

    # torch refuses to differentiate what was overwritten, whoever multiplies
    if kind == "changed":
        with pytest.raises(RuntimeError, match="inplace"):
            gradients(made, x, run)
        with pytest.raises(RuntimeError, match="inplace"):
            gradients(made, x, alone)
        return
    expected = gradients(made, x, alone)
    calls.clear()
    for _ in range(3):
        for own, theirs in zip(gradients(made, x, run), expected, strict=True):
            assert (own is None) == (theirs is None)
            if own is not None:
                close(own, theirs)
    assert (3 in calls) and model.shared.enabled == (kind in ("", "twice", "other order"))
    if model.shared.enabled:
        assert not model.shared.made and model.shared.input is None


@with_panels
def test_recomputation_and_no_gradient() -> None:
    model, x = Attention(), torch.randn(90, INPUTS)
    made = [model.q_proj, model.k_proj, model.v_proj]
    expected = gradients(made, x, lambda x: plainly(made, x))
    again = gradients(made, x, lambda x: checkpoint(model, x, use_reentrant=False))
    for own, theirs in zip(again, expected, strict=True):
        close(own, theirs)
    with torch.no_grad():
        for own, theirs in zip(model(x), expected, strict=False):
            close(own, theirs)
    assert not model.shared.made


@with_panels
def test_a_model_has_the_gradients_of_separate_layers(tmp_path: Any, monkeypatch: pytest.MonkeyPatch,
                                                      calls: list[int]) -> None:
    path = str(make_model(tmp_path, hidden_size=64, intermediate_size=96, num_hidden_layers=2, vocab_size=64))
    batch = pack([([3, 4, 5, 6], [7, 8, 9] * 30), ([5, 6], [8, 9, 10] * 20)])
    grads = []
    for apart in (False, True):
        if apart:
            monkeypatch.setattr(linear_layers, "_outputs_of_one_function", lambda *_: None)
            monkeypatch.setattr(fused_layers, "outputs", lambda x, layers: tuple(layer(x) for layer in layers))
        shard: Any = make_shard(plan_model(path, optimizer=Optimizer(kind="sgd", lr=1e-3)), 0)
        for _ in range(2):
            calls.clear()
            shard.train([(batch,)], [("logprobs",)], 1.0, lambda _, out: out[0]["logprobs"].mean())
        assert {3, 2} <= {*calls} if not apart else {*calls} == {1}
        grads.append(shard.trainer.grad_buffer.clone())
    torch.testing.assert_close(*grads, rtol=1e-3, atol=1e-6)
