"""Every one-line call under "Policy gradient" of docs/algorithms.md against our transcription of the system that it
names (`systems.py`; tests/oracles compares with the systems themselves). Value and gradient, float64, 1e-10, whole and
in micro-batches of two rows on two shards."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.library.harness import Batch, Given, run_fn, run_loss
from tests.library.more_systems import SYSTEMS
from tests.library.systems import BATCH, LONG, Table, data, means, sums, table
from tests.library.test_algorithms_page import CALLS, EXPORTS, LOSSES
from tests.samples import thorough_between

TIGHT = dict(rtol=1e-10, atol=1e-10)
DRAWN = "clip_cov_tokens(old, adv, share=2e-4, low=1, high=5)"  # by chance: a test of its own


def test_every_call_of_the_page_has_the_formula_of_its_system() -> None:
    assert {*SYSTEMS, DRAWN} == set(CALLS)


def modules(call: str) -> str:
    return " ".join(sorted({f"std.{EXPORTS[w]}" for w in EXPORTS if f"{w}(" in call})) or "std.ppo"


@pytest.mark.parametrize("call", thorough_between(SYSTEMS))
def test_the_call_gives_the_number_of_the_system(call: str) -> None:
    b = LONG if "overlong" in call else BATCH
    given = data(b)
    x = given["x"].data.clone().requires_grad_(True)
    want = SYSTEMS[call](table(b, given, x))
    if call.partition("(")[0] not in LOSSES:
        for dp in (1, 2):
            got = run_fn(modules(call), call, b, dp=dp, **given)
            agree(b, got if isinstance(got, tuple) else (got,), want if isinstance(want, tuple) else (want,))
        return
    (grad,) = torch.autograd.grad(want + 0 * x.sum(), x)
    head, fresh = ("value_model", "values") if "value_clip" in call else ("causal_lm", "logprobs")
    for dp, mbs in ((1, 0), (2, 2)):
        done = run_loss(modules(call), call, b, outputs(call, given, fresh), head=head, dp=dp, mbs=mbs, **given)
        torch.testing.assert_close(torch.tensor(done.loss, dtype=torch.float64), want.detach(), **TIGHT)
        torch.testing.assert_close(done.grads[fresh], grad, **TIGHT)


def outputs(call: str, given: dict[str, Given | float], fresh: str = "logprobs") -> dict[str, Given]:
    """Of the model in training, by the names of the loss."""
    found = {fresh: given["x"]} | ({"entropy": given["h"]} if call.startswith("grpo_entropy(") else {})
    return {name: value for name, value in found.items() if isinstance(value, Given)}


def agree(b: Batch, got: tuple[Tensor, ...], want: tuple[Tensor, ...]) -> None:
    assert len(got) == len(want)
    for mine, theirs in zip(got, want):
        flat = torch.cat([row[:n] for row, n in zip(theirs, b.lens["gen"])]) if theirs.dim() == 2 else theirs
        torch.testing.assert_close(mine.double().reshape(-1), flat.detach().reshape(-1), **TIGHT)


def test_the_choice_of_clip_cov() -> None:
    given = data(BATCH)
    old, adv = (given[n].data for n in ("old", "adv"))
    cov = (old - old.mean()) * (adv - adv.mean())
    got = run_fn(modules(DRAWN), DRAWN, BATCH, dp=2, **given).bool()
    assert got.sum() == 1 and bool((cov[got] > 1).all() and (cov[got] < 5).all())


@pytest.mark.parametrize(("one", "other"), [
    ("gpg(adv=gpg_norm(r))", "gpg(adv=gpg_norm(r, nonzero=true, alone=true))"),
    ("whiten(adv)", "whiten(adv, eps=0, unbiased=false, plus=1e-5)"),
    ("leave_one_out(r)", "leave_one_out(r, by_std=true)"), ("leave_one_out(r)", "clip(leave_one_out(r), -10, 10)"),
    ("reinforce(adv=r)", "reinforce_token(adv=adv)"), ("dapo(old=old, adv=adv)", "ppo_clip(old=old, adv=adv)"),
])
def test_these_data_tell_variants_apart(one: str, other: str) -> None:
    """A test whose data make two systems equal would prove nothing."""
    given = data(BATCH)
    found = [SYSTEMS[c](table(BATCH, given, given["x"].data)) for c in (one, other)]
    assert not torch.allclose(found[0], found[1], rtol=1e-6)


@pytest.mark.parametrize(("kl", "of"), [("mean(sum(old - ref by seq))", sums), ("mean(mean(old - ref by seq))", means)])
def test_adaptive_kl_near_its_target(kl: str, of: Callable[[Table, Tensor], Tensor]) -> None:
    """Where the error is not clipped, so that it matters whether a sequence's divergence is a sum or a mean."""
    given = data(BATCH)
    given["ref"] = replace(given["ref"], data=given["old"].data - 0.3)
    t = table(BATCH, given, given["x"].data)
    found = float(of(t, t.old - t.ref).mean())
    call = f"adaptive_kl(beta, {kl}, n=8, target={1.1 * found}, horizon=10)"
    got = run_fn("std.ppo", call, BATCH, dp=2, **given)
    assert float(got) == pytest.approx(0.1 * (1 + (1 / 1.1 - 1) * 8 / 10), rel=1e-10)
