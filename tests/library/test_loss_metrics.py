"""What the metrics of a loss may reduce: deviations and data, over micro-batches and ranks as over the minibatch."""

from __future__ import annotations

import pytest
import torch

from rldsl.diag import Failure
from tests.library.harness import Done, Given, run_loss
from tests.library.test_advantages import RAGGED

NUM_TOKENS = sum(RAGGED.lens["gen"])
CUTS = [(1, 0), (1, 1), (2, 1), (3, 2)]  # ranks, most rows of a micro-batch


def draw(size: int, seed: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def measured(metric: str, lp: torch.Tensor, dp: int = 1, mbs: int = 0, value: str = "mean(logprobs)",
             **data: Given | float) -> Done:
    names = "".join(f", {n}: {g.level}" if isinstance(g, Given) else f", {n} = 0" for n, g in data.items())
    text = f"loss mine(logprobs: token;{names[1:]}) {{\n  metric m = {metric}\n  return {value}\n}}"
    call = f"mine({', '.join(f'{n}={n}' for n in data)})"
    return run_loss("", call, RAGGED, {"logprobs": Given("token", "gen", lp)}, dp=dp, mbs=mbs, text=text, **data)


@pytest.mark.parametrize(("dp", "mbs"), CUTS)
@pytest.mark.parametrize(("metric", "unbiased", "root"), [
    ("var(logprobs)", True, False), ("std(logprobs)", True, True),
    ("var(logprobs, unbiased=false)", False, False), ("std(logprobs, unbiased=false)", False, True)])
def test_a_deviation_is_that_of_the_whole_minibatch(metric: str, unbiased: bool, root: bool, dp: int,
                                                    mbs: int) -> None:
    lp = draw(NUM_TOKENS, 1)
    expected = lp.var(unbiased=unbiased)
    found = measured(metric, lp, dp, mbs)
    assert found.metrics["m"] == pytest.approx(float(expected.sqrt() if root else expected), rel=1e-12)
    assert torch.equal(found.grads["logprobs"], measured("mean(logprobs)", lp, dp, mbs).grads["logprobs"])


def test_deviations_of_conditions_and_combinations() -> None:
    lp = draw(NUM_TOKENS, 2)
    assert measured("std(logprobs > 0)", lp, 2, 1).metrics["m"] == pytest.approx(float((lp > 0).double().std()))
    assert measured("std(logprobs) / abs(mean(logprobs))", lp, 2, 1).metrics["m"] == pytest.approx(
        float(lp.std() / lp.mean().abs()))


@pytest.mark.parametrize("scale", [1e-2, 1e-4, 1e-6])
def test_a_small_deviation_of_ratios_near_one_survives_float32(scale: float) -> None:
    lp = (1 + scale * draw(NUM_TOKENS, 3)).float()
    found = measured("std(logprobs)", lp, 2, 1).metrics["m"]
    assert found == pytest.approx(float(lp.double().std()), rel=1e-3)


def test_equal_values_have_no_deviation_and_never_a_nan() -> None:
    lp = torch.full((NUM_TOKENS,), 0.1, dtype=torch.float32)
    assert measured("std(logprobs)", lp, 3, 1).metrics["m"] == pytest.approx(0, abs=1e-7)


@pytest.mark.parametrize(("dp", "mbs"), CUTS)
def test_a_metric_reduces_data_over_the_minibatch(dp: int, mbs: int) -> None:
    lp, adv, w = draw(NUM_TOKENS, 4), draw(NUM_TOKENS, 5), draw(RAGGED.rows, 6)
    data = {"adv": Given("token", "gen", adv), "w": Given("seq", "gen", w)}
    for metric, expected in (("mean(adv)", adv.mean()), ("std(w)", w.std()), ("max(w) - min(w)", w.max() - w.min()),
                             ("mean(adv * logprobs) / mean(abs(adv))", (adv * lp).mean() / adv.abs().mean())):
        found = measured(metric, lp, dp, mbs, **data)
        assert found.metrics["m"] == pytest.approx(float(expected), rel=1e-12), metric


@pytest.mark.parametrize(("dp", "mbs"), CUTS)
def test_a_median_is_that_of_the_whole_minibatch(dp: int, mbs: int) -> None:
    lp, adv, w = draw(NUM_TOKENS, 10), draw(NUM_TOKENS, 11), draw(RAGGED.rows, 12)
    data = {"adv": Given("token", "gen", adv), "w": Given("seq", "gen", w)}
    per_seq = torch.stack([x.sum() for x in lp.split(list(RAGGED.lens["gen"]))])
    for metric, expected in (
            ("median(logprobs)", lp.quantile(0.5)), ("quantile(logprobs, 0.9)", lp.quantile(0.9)),
            ("quantile(logprobs * adv, 0.1) - min(adv)", (lp * adv).quantile(0.1) - adv.min()),
            ("median(w)", w.quantile(0.5)), ("median(sum(logprobs by seq))", per_seq.quantile(0.5)),
            ("quantile(logprobs, clip(abs(mean(w)), 0, 1))", lp.quantile(w.mean().abs().clamp(0, 1))),
            ("median(logprobs > 0)", (lp > 0).double().quantile(0.5))):
        found = measured(metric, lp, dp, mbs, **data)
        assert found.metrics["m"] == pytest.approx(float(expected), rel=1e-12), metric
        assert torch.equal(found.grads["logprobs"], measured("mean(logprobs)", lp, dp, mbs).grads["logprobs"])


def test_the_fraction_of_a_quantile_may_be_an_argument() -> None:
    lp = draw(NUM_TOKENS, 13)
    assert measured("quantile(logprobs, q)", lp, 2, 1, q=0.25).metrics["m"] == pytest.approx(float(lp.quantile(0.25)))


def test_medians_do_not_depend_on_the_cuts_bit_for_bit() -> None:
    lp = draw(NUM_TOKENS, 14, torch.float32)
    assert len({measured("median(logprobs)", lp, dp, mbs).metrics["m"] for dp, mbs in CUTS}) == 1



@pytest.mark.parametrize(("dp", "mbs"), CUTS)
def test_a_loss_may_return_medians_of_its_sequences(dp: int, mbs: int) -> None:
    lp = draw(NUM_TOKENS, 15)
    x = lp.clone().requires_grad_()
    expected = torch.stack([row.quantile(0.5) for row in x.split(list(RAGGED.lens["gen"])) if len(row)])
    (expected.sum() / RAGGED.rows).backward()
    found = measured("mean(logprobs)", lp, dp, mbs, value="mean(median(logprobs by seq))")
    assert found.loss == pytest.approx(float(expected.detach().sum() / RAGGED.rows), rel=1e-12)
    assert torch.allclose(found.grads["logprobs"], x.grad, rtol=1e-12, atol=0)
