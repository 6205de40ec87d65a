"""Objectives and advantages of `more_systems.py` in shards and micro-batches, at the ends of their ranges, and where
groups or responses are as small as they can be."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from tests.library.harness import Batch, Given, run_fn, run_loss
from tests.library.more_systems import MORE
from tests.library.systems import BATCH, data, table
from tests.library.test_algorithms_page import LOSSES
from tests.library.test_page_calls import modules, outputs
from tests.samples import thorough_between

TIGHT = dict(rtol=1e-10, atol=1e-10)
OBJECTIVES = [c for c in MORE if c.partition("(")[0] in LOSSES]
ADVANTAGES = [c for c in MORE if c not in OBJECTIVES]


@pytest.mark.parametrize("dp", [1, 2, 4])
@pytest.mark.parametrize("mbs", [1, 2, 7])
@pytest.mark.parametrize("call", thorough_between(OBJECTIVES))
def test_shards_and_micro_batches_change_nothing(call: str, mbs: int, dp: int) -> None:
    given = data(BATCH)
    x = given["x"].data.clone().requires_grad_(True)  # type: ignore[union-attr]
    want = MORE[call](table(BATCH, given, x))
    assert isinstance(want, torch.Tensor)
    (grad,) = torch.autograd.grad(want, x)
    done = run_loss(modules(call), call, BATCH, outputs(call, given), dp=dp, mbs=mbs, **given)
    torch.testing.assert_close(done.loss, float(want.detach()), **TIGHT)
    torch.testing.assert_close(done.grads["logprobs"], grad, **TIGHT)


@pytest.mark.parametrize("call", ADVANTAGES)
def test_four_shards_have_the_same_advantages(call: str) -> None:
    given = data(BATCH)
    one, four = (run_fn(modules(call), call, BATCH, dp=dp, **given) for dp in (1, 4))
    assert isinstance(one, torch.Tensor) and torch.equal(one, four)


@pytest.mark.parametrize("call", OBJECTIVES)
def test_responses_without_tokens_change_no_gradient_into_a_nan(call: str) -> None:
    b = Batch.random(2, 4, 3, edge="empty")
    done = run_loss(modules(call), call, b, outputs(call, data(b)), **data(b))
    assert math.isfinite(done.loss) and bool(done.grads["logprobs"].isfinite().all())


def likely() -> dict[str, Given | float]:
    """Log-probabilities, all below 0, of about 1/2, so that a probability can move far."""
    given = data(BATCH)
    for name, far in (("x", 0.0), ("old", 0.6), ("ref", 0.5), ("lp", 0.2)):
        noise = BATCH.tokens(77 + len(name)).data
        given[name] = Given("token", "gen", -(0.5 + 0.3 * BATCH.tokens(76).data + far * noise).abs() - 1e-3)
    return given


@pytest.mark.parametrize(("one", "other"), [
    ("luspo(old=old, adv=r, low=0.2, high=0.3)", 'gspo(old=old, adv=r, low=0.2, high=0.3, agg="seq-mean-token-sum")'),
    ("opsm(old=old, adv=r, sampled=old, most_kl=1e30)", "ppo_clip(old=old, adv=r)"),
    ("dppo_tv(old=old, adv=adv, low=1e30, high=1e30, most=4)", "cispo(old=old, adv=adv, low=1, high=3, bound=20)"),
    ("dppo_kl(old=old, adv=adv, low=1e30, high=1e30, most=4)", "cispo(old=old, adv=adv, low=1, high=3, bound=20)"),
    ("grpo_entropy(old=old, adv=adv, share=1)", "ppo_clip(old=old, adv=adv)"),
    ("vapo(old=old, adv=adv, good=of_right(r, old), nll=0)", "dapo(old=old, adv=adv)"),
    ("dro(ref=ref, adv=r, beta=0)", "reinforce(adv=r)"), ("dro_token(ref=ref, adv=adv, beta=0)", "reinforce_token(adv=adv)"),
    ("vapo(old=old, adv=0 * old, good=of_right(1 + 0 * r, old), nll=1)", "sft()")])
def test_at_an_end_of_a_range_they_are_what_is_known(one: str, other: str) -> None:
    given = likely()
    mine, theirs = (run_loss(modules(call), call, BATCH, outputs(call, given), **given)
                    for call in (one, other))
    torch.testing.assert_close(mine.loss, theirs.loss, **TIGHT)
    torch.testing.assert_close(mine.grads["logprobs"], theirs.grads["logprobs"], **TIGHT)


@pytest.mark.parametrize(("one", "other"), [
    ("opsm(old=old, adv=r, sampled=old, most_kl=0.05)", "ppo_clip(old=old, adv=r)"),
    ("dppo_tv(old=old, adv=adv)", "dppo_tv(old=old, adv=adv, low=1e30, high=1e30)"),
    ("dppo_kl(old=old, adv=adv)", "dppo_kl(old=old, adv=adv, low=1e30, high=1e30)"),
    ("dppo_tv(old=old, adv=adv)", "dppo_tv(old=old, adv=adv, low=0.05, high=0.05)"),
    ("dppo_tv(old=old, adv=adv)", "dppo_tv(old=old, adv=adv, most=1)"),
    ("vespo(old=old, adv=r)", "vespo(old=old, adv=r, k_neg=2, lambda_neg=3)"),
    ('grpo_free(old=old, adv=adv * high_entropy(h), agg="token-mean")', "ppo_clip(old=old, adv=adv)"),
    ("grpo_entropy(old=old, adv=adv)", "grpo_entropy(old=old, adv=adv, share=0.5)")])
def test_what_sets_them_apart_matters_on_these_data(one: str, other: str) -> None:
    given = likely()
    mine, theirs = (run_loss(modules(call), call, BATCH, outputs(call, given), **given)
                    for call in (one, other))
    assert mine.loss != pytest.approx(theirs.loss, rel=1e-6)


@pytest.mark.parametrize("log_w", [0.0, 0.5, -0.5, 3.0, -30.0, 500.0])
def test_the_weight_of_vespo(log_w: float) -> None:
    """1 where the policies agree, less on both sides, never infinite."""
    one = Batch({"gen": [1]})
    w = run_fn("std.off_policy", "gamma_weight(x, 2, 3)", one, x=one.given("seq", [log_w]))
    kept = min(max(log_w, math.log(1e-8)), 20)
    assert float(w) == pytest.approx(math.exp(3 + 2 * kept - 3 * math.exp(kept)), rel=1e-12)  # type: ignore[arg-type]


def groups(r: list[float], call: str, n: int = 4) -> list[float]:
    b = Batch({"gen": [1] * len(r)}, n=n)
    found = run_fn("std.pass_k std.grpo", call, b, r=b.given("seq", r))
    assert isinstance(found, torch.Tensor)
    return found.tolist()


@pytest.mark.parametrize(("r", "want"), [
    ([1.0, 3, 2, 0], [0, 1, 0, 0]), ([3.0, 3, 2, 0], [0, 0, 0, 0]), ([1.0, 1, 1, 1], [0, 0, 0, 0]),
    ([-5.0, -2, -9, -4], [0, 2, 0, 0])])
def test_only_a_single_best_response_adds_anything(r: list[float], want: list[float]) -> None:
    assert groups(r, "best_of_group(r, by_std=false)") == want


def test_a_group_of_one_has_no_second_best() -> None:
    assert groups([2.0, -1.0], "best_of_group(r)", 1) == [0, 0]


def test_pass_at_one_is_the_normalized_advantage() -> None:
    r = [1.0, 0, 0, 1, 0, 0, 0, 1]
    assert groups(r, "pass_at_k(r, 1)") == pytest.approx(groups(r, "group_norm(r, eps=0, unbiased=false)"))


@pytest.mark.parametrize("r", [[1.0, 1, 1, 0], [0.0, 0, 0, 0], [1.0, 1, 1, 1]])
def test_where_every_set_passes_or_none_does_nothing_is_learned(r: list[float]) -> None:
    assert groups(r, "pass_at_k(r, 2)") == [0, 0, 0, 0]


@pytest.mark.parametrize("r", [[1.0, 0, 0, 0], [0.0, 0, 0, 0], [1.0, 1, 1, 1]])
def test_sets_larger_than_the_group_have_no_advantage(r: list[float]) -> None:
    """0 would train on nothing without a word."""
    assert all(math.isnan(x) for x in groups(r, "pass_at_k(r, 5)"))


@pytest.mark.parametrize("share", [0.1, 0.5, 1.0])
def test_the_share_of_high_entropy(share: float) -> None:
    h = data(BATCH)["h"]
    kept = run_fn("std.entropy_mask", f"high_entropy(h, share={share})", BATCH, dp=2, h=h)
    assert isinstance(kept, torch.Tensor) and isinstance(h, Given)
    assert abs(float(kept.mean()) - share) <= 1 / len(h.data)
    assert share == 1 or float(h.data[kept > 0].min()) > float(h.data[kept == 0].max())


def test_no_right_response_has_no_likelihood() -> None:
    given = data(BATCH)
    given["r"] = replace(given["r"], data=-torch.ones(BATCH.rows, dtype=torch.float64))  # type: ignore[type-var]
    calls = ("vapo(old=old, adv=adv, good=of_right(r, old))", "dapo(old=old, adv=adv)")
    mine, theirs = (run_loss(modules(c), c, BATCH, {"logprobs": given["x"]}, **given) for c in calls)  # type: ignore[dict-item]
    assert mine.loss == pytest.approx(theirs.loss, rel=1e-12)
