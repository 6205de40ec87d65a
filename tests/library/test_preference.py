"""The supervised and preference library against straight-line torch from the papers' formulas, and the peers' variants.

The references loop over sequences and share nothing with the system. Everything in float64, to 1e-10.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from rldsl.diag import Failure
from tests.library.harness import Batch, Given, run_fn, run_loss
from tests.samples import thorough_between

TIGHT = dict(rtol=1e-10, atol=1e-10)
W, L = "pair.chosen", "pair.rejected"
Seqs = list[Tensor]  # one tensor for each sequence


def log_sigmoid(x: Tensor) -> Tensor:
    return -torch.logaddexp(torch.zeros_like(x), -x)


def mean(x: Tensor) -> Tensor:
    """0 for an answer without tokens."""
    return x.mean() if len(x) else x.sum()


def averaged(terms: list[Tensor]) -> Tensor:
    return sum(terms, torch.zeros((), dtype=torch.float64)) / len(terms)


# ------------------------------------------------------------------------------------ the papers, sequence by sequence


def dpo(w: Seqs, l: Seqs, rw: Seqs, rl: Seqs, beta=0.1, smoothing=0.0, offset=None, reduce=torch.sum,
        nll=0.0) -> Tensor:
    """Rafailov et al. 2023, equation 7; smoothing: Mitchell 2023, equation 3."""
    terms = []
    for i in range(len(w)):
        h = beta * (reduce(w[i] - rw[i]) - reduce(l[i] - rl[i])) - (0.0 if offset is None else offset[i])
        terms.append(-(1 - smoothing) * log_sigmoid(h) - smoothing * log_sigmoid(-h) - nll * mean(w[i]))
    return averaged(terms)


def wpo(w: Seqs, l: Seqs, rw: Seqs, rl: Seqs, weight: Tensor, beta: float) -> Tensor:
    """Zhou et al. 2024, section 3.2: DPO of each pair times its weight, which has no gradient."""
    return averaged([min(1.0, float(weight[i])) * dpo(w[i : i + 1], l[i : i + 1], rw[i : i + 1], rl[i : i + 1], beta)
                     for i in range(len(w))])


def of_pairs(w: Seqs, l: Seqs, rw: Seqs, rl: Seqs, f: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """f of the two log-ratios of each pair, times 0.3."""
    return averaged([f(0.3 * (w[i] - rw[i]).sum(), 0.3 * (l[i] - rl[i]).sum()) for i in range(len(w))])


PAIR_LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "hinge": lambda a, b: torch.relu(1 - (a - b)),
    "robust": lambda a, b: (0.2 * log_sigmoid(b - a) - 0.8 * log_sigmoid(a - b)) / 0.6,
    "exo": lambda a, b: (torch.sigmoid(a - b) * (log_sigmoid(a - b) - math.log(0.95))
                         + torch.sigmoid(b - a) * (log_sigmoid(b - a) - math.log(0.05))),
    "discopop": lambda a, b: (torch.exp(log_sigmoid((a - b) / 0.05) + b - a)
                              - (1 - torch.sigmoid((a - b) / 0.05)) * log_sigmoid(a - b)),
    "nca": lambda a, b: -log_sigmoid(a) - (log_sigmoid(-a) + log_sigmoid(-b)) / 2,
    "sppo_hard": lambda a, b: ((a - 0.5) ** 2 + (b + 0.5) ** 2) / 0.09,
    "apo_zero": lambda a, b: (1 - torch.sigmoid(a)) + torch.sigmoid(b),
    "apo_down": lambda a, b: torch.sigmoid(a) + 1 - torch.sigmoid(a - b),
}


def ipo(w: Seqs, l: Seqs, rw: Seqs, rl: Seqs, tau=0.1, reduce=torch.sum) -> Tensor:
    """Azar et al. 2023, equation 17."""
    return averaged([(reduce(w[i] - rw[i]) - reduce(l[i] - rl[i]) - 1 / (2 * tau)) ** 2 for i in range(len(w))])


def simpo(w: Seqs, l: Seqs, beta=2.0, gamma=1.0) -> Tensor:
    """Meng et al. 2024, equation 6."""
    return averaged([-log_sigmoid(beta * mean(w[i]) - beta * mean(l[i]) - gamma) for i in range(len(w))])


def orpo(w: Seqs, l: Seqs, lam=0.1) -> Tensor:
    """Hong et al. 2024, equations 3 to 7. An answer without tokens has probability exp(-1e-6)."""
    def odds(x: Tensor) -> Tensor:
        p = torch.exp(mean(x)) if len(x) else torch.exp(mean(x) - 1e-6)
        return torch.log(p / (1 - p))

    return averaged([-mean(w[i]) - lam * log_sigmoid(odds(w[i]) - odds(l[i])) for i in range(len(w))])


def kto(y: Seqs, ref: Seqs, label: Tensor, z0: float, beta=0.1, desirable=1.0, undesirable=1.0) -> Tensor:
    """Ethayarajh et al. 2024, equation 8: lambda_y - v(x, y)."""
    terms = []
    for i in range(len(y)):
        r = (y[i] - ref[i]).sum()
        if label[i] > 0:
            terms.append(desirable - desirable * torch.sigmoid(beta * (r - z0)))
        else:
            terms.append(undesirable - undesirable * torch.sigmoid(beta * (z0 - r)))
    return averaged(terms)


def reward_model(w: Tensor, l: Tensor, margin=None, weight=None, center=0.0) -> Tensor:
    """Ouyang et al. 2022, equation 1; Touvron et al. 2023, equation 2; Eisenstein et al. 2023, equation 2."""
    terms = []
    for i in range(len(w)):
        term = -log_sigmoid(w[i] - l[i] - (0.0 if margin is None else margin[i]))
        terms.append((1.0 if weight is None else weight[i]) * term + center * (w[i] + l[i]) ** 2)
    return averaged(terms)


def distill(y: Seqs, old: Seqs, teacher: Seqs, gamma=0.0) -> Tensor:
    """-mean over tokens of the importance ratio times sum_k gamma^k (log teacher - log student) from the token on."""
    terms = []
    for i in range(len(y)):
        for t in range(len(y[i])):
            adv = sum(gamma ** (k - t) * (teacher[i][k] - old[i][k]) for k in range(t, len(y[i])) if k == t or gamma)
            terms.append(-torch.exp(y[i][t] - old[i][t]) * adv)
    return averaged(terms)


def sppo(y: Seqs, old: Seqs, win: Tensor, eta=1000.0) -> Tensor:
    """Wu et al. 2024, algorithm 1."""
    return averaged([((y[i] - old[i]).sum() - eta * (win[i] - 0.5)) ** 2 for i in range(len(y))])


def sft(y: Seqs) -> Tensor:
    """Ouyang et al. 2022, section 3.5."""
    return -torch.cat(y).sum() / sum(len(x) for x in y)


def dft(y: Seqs) -> Tensor:
    """Wu et al. 2025."""
    return -torch.cat([x.detach().exp() * x for x in y]).sum() / sum(len(x) for x in y)


# ------------------------------------------------------------------------------------------------------------- cases


@dataclass(frozen=True)
class Case:
    """call: as a program writes it. data: name -> value of a batch. reference: of fresh values and data, by name."""

    module: str
    call: str
    reference: Callable[..., Tensor]
    data: Callable[[Batch], dict[str, Given | float]] = field(default=lambda b: {})
    kind: str = "pairs"


def refs(b: Batch) -> dict[str, Given | float]:
    return {"rw": b.logprobs(11, W), "rl": b.logprobs(12, L)}


def labelled(b: Batch) -> dict[str, Given | float]:
    labels = b.given("seq", [float(i % 3 != 1) for i in range(b.rows)])
    return {"ref": b.logprobs(13), "label": labels, "z0": 0.7}


def margins(b: Batch) -> dict[str, Given | float]:
    return {"m": b.seqs(14), "wt": Given("seq", W, b.seqs(15).data.abs())}


CASES = {
    "sft": Case("std.sft", "sft()", lambda y, d: sft(y), kind="gen"),
    "dft": Case("std.sft", "dft()", lambda y, d: dft(y), kind="gen"),
    "dpo": Case("std.dpo", "dpo(ref_chosen=rw, ref_rejected=rl, beta=0.3)",
                lambda c, r, d: dpo(c, r, d["rw"], d["rl"], 0.3), refs),
    "dpo_offset": Case("std.dpo", "dpo(ref_chosen=rw, ref_rejected=rl, offset=m)",
                       lambda c, r, d: dpo(c, r, d["rw"], d["rl"], offset=d["m"]), lambda b: refs(b) | margins(b)),
    "dpo_average": Case("std.dpo", "dpo(ref_chosen=rw, ref_rejected=rl, average=true, smoothing=0.2, nll=0.5)",
                        lambda c, r, d: dpo(c, r, d["rw"], d["rl"], smoothing=0.2, reduce=mean, nll=0.5), refs),
    "cdpo": Case("std.cdpo", "cdpo(ref_chosen=rw, ref_rejected=rl)",
                 lambda c, r, d: dpo(c, r, d["rw"], d["rl"], smoothing=0.1), refs),
    "wpo": Case("std.wpo", "wpo(ref_chosen=rw, ref_rejected=rl, weight=wt, beta=0.3)",
                lambda c, r, d: wpo(c, r, d["rw"], d["rl"], d["wt"], 0.3), lambda b: refs(b) | {"wt": margins(b)["wt"]}),
    **{name: Case(module, call, lambda c, r, d, name=name: of_pairs(c, r, d["rw"], d["rl"], PAIR_LOSSES[name]), refs)
       for name, module, call in (
        ("hinge", "std.pair_losses", "hinge(ref_chosen=rw, ref_rejected=rl, beta=0.3)"),
        ("robust", "std.pair_losses", "robust(ref_chosen=rw, ref_rejected=rl, beta=0.3, smoothing=0.2)"),
        ("exo", "std.pair_losses", "exo(ref_chosen=rw, ref_rejected=rl, beta=0.3, smoothing=0.05)"),
        ("discopop", "std.pair_losses", "discopop(ref_chosen=rw, ref_rejected=rl, beta=0.3)"),
        ("nca", "std.side_losses", "nca(ref_chosen=rw, ref_rejected=rl, beta=0.3)"),
        ("sppo_hard", "std.side_losses", "sppo_hard(ref_chosen=rw, ref_rejected=rl, beta=0.3)"),
        ("apo_zero", "std.side_losses", "apo_zero(ref_chosen=rw, ref_rejected=rl, beta=0.3)"),
        ("apo_down", "std.side_losses", "apo_down(ref_chosen=rw, ref_rejected=rl, beta=0.3)"))},
    "ipo": Case("std.ipo", "ipo(ref_chosen=rw, ref_rejected=rl)", lambda c, r, d: ipo(c, r, d["rw"], d["rl"]), refs),
    "ipo_average": Case("std.ipo", "ipo(ref_chosen=rw, ref_rejected=rl, tau=0.4, average=true)",
                        lambda c, r, d: ipo(c, r, d["rw"], d["rl"], 0.4, mean), refs),
    "simpo": Case("std.simpo", "simpo()", lambda c, r, d: simpo(c, r)),
    "orpo": Case("std.orpo", "orpo(lam=0.3)", lambda c, r, d: orpo(c, r, 0.3)),
    "kto": Case("std.kto", "kto(ref=ref, label=label, z0=z0, desirable=1.3, undesirable=0.8)",
                lambda y, d: kto(y, d["ref"], d["label"], 0.7, 0.1, 1.3, 0.8), labelled, "gen"),
    "sppo": Case("std.sppo", "sppo(old=old, win=win, eta=20)", lambda y, d: sppo(y, d["old"], d["win"], 20.0),
                 lambda b: {"old": b.logprobs(18), "win": Given("seq", "gen", torch.sigmoid(b.seqs(19).data))}, "gen"),
    "reward_model": Case("std.reward_model", "reward_model()", lambda c, r, d: reward_model(c, r), kind="scores"),
    "reward_margin": Case("std.reward_model", "reward_model(margin=m, weight=wt, center=0.01)",
                          lambda c, r, d: reward_model(c, r, d["m"], d["wt"], 0.01), margins, "scores"),
    "distill": Case("std.distill", "distill(old=old, teacher=teacher)", lambda y, d: distill(y, d["old"], d["teacher"]),
                    lambda b: {"old": b.logprobs(16), "teacher": b.logprobs(17)}, "gen"),
    "distill_gamma": Case("std.distill", "distill(old=old, teacher=teacher, gamma=0.9)",
                          lambda y, d: distill(y, d["old"], d["teacher"], 0.9),
                          lambda b: {"old": b.logprobs(16), "teacher": b.logprobs(17)}, "gen"),
}
EDGES = ("", "one_token", "empty", "alone", "one_left")


def batch_of(case: Case, edge: str = "", seed: int = 1) -> Batch:
    pairs = case.kind != "gen"
    if edge == "one_left":  # every answer is empty but one, of one token
        lens = [0, 0, 1, 0]
        return Batch({W: lens, L: [0, 0, 2, 0]}) if pairs else Batch({"gen": lens})
    return Batch.pairs(seed, 9, edge=edge) if pairs else Batch.random(seed, 4, 3, edge=edge)


def fresh_of(case: Case, b: Batch, scale: float = 1.0) -> dict[str, Given]:
    if case.kind == "gen":
        return {"logprobs": b.logprobs(1, scale=scale)}
    if case.kind == "scores":
        return {"chosen": b.seqs(1, scale), "rejected": Given("seq", W, b.seqs(2, scale).data)}
    return {"chosen": b.logprobs(1, W, scale), "rejected": b.logprobs(2, L, scale)}


def parts(b: Batch, value: Given | float, data: Tensor | None = None) -> Seqs | Tensor | float:
    if not isinstance(value, Given):
        return value
    data = value.data if data is None else data
    return list(data.split(b.lens[value.frame])) if value.level == "token" else data


def expected(case: Case, b: Batch, fresh: dict[str, Given],
             data: dict[str, Given | float]) -> tuple[Tensor, dict[str, Tensor]]:
    """The reference's value and gradients."""
    leaves = {n: g.data.clone().requires_grad_(True) for n, g in fresh.items()}
    args = [parts(b, fresh[n], x) for n, x in leaves.items()]
    known = {n: parts(b, v) for n, v in data.items()}
    loss = case.reference(*args, known)
    loss.backward()
    return loss.detach(), {n: torch.zeros_like(x) if x.grad is None else x.grad for n, x in leaves.items()}


def agree(case: Case, b: Batch, fresh: dict[str, Given], data: dict[str, Given | float], dp: int = 1,
          mbs: int = 0) -> None:
    done = run_loss(case.module, case.call, b, fresh, head="reward_model" if case.kind == "scores" else "causal_lm",
                    dp=dp, mbs=mbs, **data)
    loss, grads = expected(case, b, fresh, data)
    torch.testing.assert_close(torch.tensor(done.loss, dtype=torch.float64), loss, **TIGHT)
    for name, grad in grads.items():
        torch.testing.assert_close(done.grads[name], grad, **TIGHT)


@pytest.mark.parametrize("edge", thorough_between(EDGES))
@pytest.mark.parametrize("name", CASES)
def test_value_and_gradient_are_the_papers(name: str, edge: str) -> None:
    case = CASES[name]
    b = batch_of(case, edge)
    agree(case, b, fresh_of(case, b), case.data(b))


@pytest.mark.parametrize("seed", [2, 3])
@pytest.mark.parametrize("name", CASES)
def test_more_ragged_batches(name: str, seed: int) -> None:
    case = CASES[name]
    b = batch_of(case, seed=seed)
    agree(case, b, fresh_of(case, b), case.data(b))


@pytest.mark.parametrize("dp", [1, 2, 4])
@pytest.mark.parametrize("mbs", [1, 2, 7])
@pytest.mark.parametrize("name", thorough_between(CASES))
def test_shards_and_micro_batches_change_nothing(name: str, dp: int, mbs: int) -> None:
    case = CASES[name]
    b = batch_of(case)
    agree(case, b, fresh_of(case, b), case.data(b), dp, mbs)


@pytest.mark.parametrize("name", [n for n in CASES if n not in ("distill", "distill_gamma", "orpo")])
def test_extreme_log_ratios(name: str) -> None:
    """exp of these differences overflows; the losses do not."""
    case = CASES[name]
    b = batch_of(case)
    agree(case, b, fresh_of(case, b, 500.0), case.data(b))


@pytest.mark.parametrize("scale", [1e-3, 1e-5, 30.0])
def test_log_odds_near_certain_and_impossible(scale: float) -> None:
    case = CASES["orpo"]
    b = batch_of(case)
    fresh = {n: Given("token", g.frame, scale * g.data) for n, g in fresh_of(case, b).items()}
    done = run_loss(case.module, case.call, b, fresh)
    leaves = [g.data.clone().requires_grad_(True) for g in fresh.values()]
    seqs = [x.split(b.lens[f]) for x, f in zip(leaves, (W, L))]
    ratios = [torch.stack([m - torch.log(-torch.expm1(m)) for m in map(torch.mean, side)]) for side in seqs]
    loss = torch.stack([-x.mean() for x in seqs[0]]).mean() - 0.3 * log_sigmoid(ratios[0] - ratios[1]).mean()
    loss.backward()
    torch.testing.assert_close(done.loss, loss.item(), **TIGHT)
    torch.testing.assert_close(done.grads["chosen"], leaves[0].grad, **TIGHT)


def test_a_certain_answer_has_finite_log_odds() -> None:
    b = Batch({W: [2, 1], L: [1, 3]})
    done = run_loss("std.orpo", "orpo()", b, {"chosen": b.given("token", [0.0] * 3, W), "rejected": b.logprobs(2, L)})
    assert abs(done.loss) < 1 and all(g.isfinite().all() for g in done.grads.values())


def test_the_weight_of_wpo_is_that_of_its_side() -> None:
    """From all probabilities; an answer as likely as a sampled one has the weight 1."""
    b = Batch({W: [3, 1, 4], L: [2, 2, 1]})
    every = torch.randn(8, 6, generator=torch.Generator().manual_seed(3), dtype=torch.float64).log_softmax(-1)
    drawn, squares = every[:, 0], every.exp().square().sum(-1)
    want = [float((x - y.log()).mean().exp()) for x, y in zip(drawn.split(b.lens[W]), squares.split(b.lens[W]))]
    got = run_fn("std.wpo", "wpo_weight(x, y)", b, x=Given("token", W, drawn), y=Given("token", W, squares))
    torch.testing.assert_close(got, torch.tensor(want, dtype=torch.float64), **TIGHT)
    one = run_fn("std.wpo", "wpo_weight(x, y)", b, x=Given("token", W, squares.log()), y=Given("token", W, squares))
    assert isinstance(one, Tensor) and one.tolist() == pytest.approx([1.0] * 3)


@pytest.mark.parametrize("name", ["dpo", "cdpo", "ipo", "simpo", "orpo", "reward_model"])
def test_equal_sides_have_no_margin(name: str) -> None:
    case = CASES[name]
    b = Batch({W: [3, 1, 4], L: [3, 1, 4]})
    left = fresh_of(case, b)["chosen"]
    data = {"rw": b.logprobs(5, W), "rl": Given("token", L, b.logprobs(5, W).data)} if case.data is refs else {}
    fresh = {"chosen": left, "rejected": left if left.level == "seq" else Given("token", L, left.data)}
    agree(case, b, fresh, data)
    head = "reward_model" if left.level == "seq" else "causal_lm"
    done = run_loss(case.module, case.call, b, fresh, head=head, **data)
    assert done.metrics["accuracy"] == 0.5 and abs(done.metrics.get("margin", 0)) < 1e-12


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", ["dpo", "dpo_average", "cdpo", "ipo", "simpo", "orpo", "reward_model", *PAIR_LOSSES])
def test_rounding_errors_do_not_decide_an_accuracy(name: str, seed: int) -> None:
    """A policy that equals its reference, or two sides that are equal, but for float32's errors, whatever their signs."""
    case = CASES[name]
    b = Batch({W: [3, 1, 4], L: [3, 1, 4]})
    left = fresh_of(case, b)["chosen"]
    noise = 1e-6 * torch.randn(2, len(left.data), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    fresh = {n: Given(left.level, f, left.data + x) for n, f, x in zip(("chosen", "rejected"), (W, L), noise, strict=True)}
    data = {"rw": left, "rl": Given("token", L, left.data)} if case.data is refs else case.data(b)
    head = "reward_model" if left.level == "seq" else "causal_lm"
    assert run_loss(case.module, case.call, b, fresh, head=head, **data).metrics["accuracy"] == 0.5


@pytest.mark.parametrize("lead, accuracy", [(2e-4, 1), (-2e-4, 0), (5e-5, 0.5), (-5e-5, 0.5), (0, 0.5)])
@pytest.mark.parametrize("name", ["dpo", "cdpo", "ipo", "simpo", "orpo", "reward_model"])
def test_what_is_no_rounding_error_decides_it(name: str, lead: float, accuracy: float) -> None:
    """Of every pair the chosen side leads by as much, before any scale; of probabilities 1/2, the log-odds by twice it."""
    case = CASES[name]
    b = Batch({W: [1, 1], L: [1, 1]})
    level, lead = fresh_of(case, b)["chosen"].level, lead / 2 if name == "orpo" else lead
    fresh = {"chosen": Given(level, W, torch.full((2,), math.log(0.5) + lead, dtype=torch.float64)),
             "rejected": Given(level, L, torch.full((2,), math.log(0.5), dtype=torch.float64))}
    data = {"rw": Given("token", W, torch.zeros(2)), "rl": Given("token", L, torch.zeros(2))} if case.data is refs else {}
    head = "reward_model" if level == "seq" else "causal_lm"
    assert run_loss(case.module, case.call, b, fresh, head=head, **data).metrics["accuracy"] == accuracy


def test_a_margin_of_zero_is_none() -> None:
    b = Batch.pairs(1)
    fresh = fresh_of(CASES["reward_model"], b)
    zero = b.given("seq", [0.0] * b.rows)
    plain = run_loss("std.reward_model", "reward_model()", b, fresh, head="reward_model")
    done = run_loss("std.reward_model", "reward_model(margin=m)", b, fresh, head="reward_model", m=zero)
    assert done.loss == plain.loss


# ------------------------------------------------------------------------------------------------ functions of the flow


@pytest.mark.parametrize("dp", [1, 2, 4])
@pytest.mark.parametrize("shift", [0.5, -0.5])
def test_the_baseline_of_kto_is_never_negative(dp: int, shift: float) -> None:
    b = Batch.random(3)
    x, ref = b.tokens(1, shift=shift), b.tokens(2)
    got = run_fn("std.kto", "kto_baseline(x, ref)", b, dp=dp, x=x, ref=ref)
    want = max(0.0, sum((s - r).sum().item() for s, r in zip(b.split(x), b.split(ref))) / b.rows)
    assert abs(got.item() - want) < 1e-12 and (want > 0) == (shift > 0)


def test_the_baseline_is_data() -> None:
    """z0 gets no gradient: that of the loss is the one with z0 as a number."""
    b = Batch.random(2)
    fresh = {"logprobs": b.logprobs(1)}
    data = labelled(b) | {"z0": 0.0, "y": b.logprobs(4)}
    del data["z0"]
    made = run_loss("std.kto", "kto(ref=ref, label=label, z0=kto_baseline(y, ref))", b, fresh, **data)
    z0 = run_fn("std.kto", "kto_baseline(y, ref)", b, y=data["y"], ref=data["ref"]).item()
    given = {"ref": data["ref"], "label": data["label"], "z0": z0}
    same = run_loss("std.kto", "kto(ref=ref, label=label, z0=z0)", b, fresh, **given)
    assert torch.equal(made.grads["logprobs"], same.grads["logprobs"]) and made.loss == same.loss


@pytest.mark.parametrize("dp", [1, 2, 4])
def test_the_best_of_each_prompt(dp: int) -> None:
    b = Batch.random(1, 4, 3)
    r = b.given("seq", [0.1, 0.9, 0.9, -1, -2, -3, 5, 4, 3, 0, 0, 0])
    got = run_fn("std.best_of_n", "best(r)", b, dp=dp, r=r)
    assert got.tolist() == [False, True, True, True, False, False, True, False, False, True, True, True]
    least = run_fn("std.best_of_n", "best_above(r, 0.5)", b, dp=dp, r=r)
    assert least.tolist() == [False, True, True, False, False, False, True, False, False, False, False, False]
    assert run_fn("std.best_of_n", "above(r, 0.5)", b, dp=dp, r=r).tolist() == [x >= 0.5 for x in r.data.tolist()]


@pytest.mark.parametrize("dp", [1, 2, 4])
def test_a_win_rate_counts_the_response_itself_as_half_a_win(dp: int) -> None:
    b = Batch.random(1, 4, 3)  # the 3 others of 4 responses to one prompt
    won = b.given("seq", [0, 0, 0, 1, 1, 1, 0.5, 0, 1, 0.25, 0.5, 1])
    got = run_fn("std.sppo", "win_rate(won, 4)", b, dp=dp, won=won)
    assert got.tolist() == pytest.approx([0.125, 0.875, 0.5, 0.5625])


@pytest.mark.parametrize("dp", [1, 2, 4])
def test_filters_keep_as_many_of_each_prompt_whatever_equals(dp: int) -> None:
    """The best of each prompt; the best and another; the best and the worst. Equals are drawn."""
    b = Batch.random(1, 4, 3)
    r = b.given("seq", [0.1, 0.9, 0.9, -1, -2, -3, 0, 0, 0, 5, 4, 4])
    kept = {name: run_fn("std.filtration", f"{name}(r)", b, dp=dp, r=r).view(4, 3).tolist()
            for name in ("best_only", "best_random", "best_worst")}
    for i, row in enumerate(r.data.view(4, 3).tolist()):
        only, other, worst = (kept[name][i] for name in kept)
        assert sum(only) == 1 and row[only.index(True)] == max(row)
        for both in (other, worst):
            assert sum(both) == 2 and max(x for x, k in zip(row, both) if k) == max(row)
        assert min(x for x, k in zip(row, worst) if k) == min(row)


def test_the_other_response_is_drawn_evenly() -> None:
    """Of 600 prompts with three responses each, about half keep either of the two that are not the best."""
    b = Batch({"gen": [1] * 1800}, 3)
    r = b.given("seq", [3.0, 2.0, 1.0] * 600)
    kept = run_fn("std.filtration", "best_random(r)", b, r=r).view(600, 3)
    assert kept[:, 0].all() and (kept[:, 1] != kept[:, 2]).all()
    assert 250 < int(kept[:, 1].sum()) < 350  # four standard deviations


# ------------------------------------------------------------------------ other systems, over padded tables with masks


def table(b: Batch, value: Given) -> tuple[Tensor, Tensor]:
    """[rows, longest] with zeros behind, and the mask."""
    seqs = b.split(value)
    padded = torch.nn.utils.rnn.pad_sequence(seqs, batch_first=True)
    return padded, torch.arange(padded.shape[1]) < torch.tensor([[len(s)] for s in seqs])


def sums(b: Batch, value: Given) -> Tensor:
    x, mask = table(b, value)
    return (x * mask).sum(-1)


def means(b: Batch, value: Given) -> Tensor:
    x, mask = table(b, value)
    return (x * mask).sum(-1) / mask.sum(-1)


def pair_of(seed: int = 4) -> tuple[Batch, dict[str, Given], dict[str, Given | float]]:
    b = Batch.pairs(seed, 8)
    return b, {"chosen": b.logprobs(1, W), "rejected": b.logprobs(2, L)}, refs(b)


def openrlhf_smoothed(b, f, d):  # DPOLoss(label_smoothing)
    logits = (sums(b, f["chosen"]) - sums(b, d["rw"])) - (sums(b, f["rejected"]) - sums(b, d["rl"]))
    ls = torch.nn.functional.logsigmoid
    return (-ls(0.3 * logits) * (1 - 0.2) - ls(-0.3 * logits) * 0.2).mean()


def trl_ipo(b, f, d):  # loss_type="ipo": log-probs divided by length
    logits = (means(b, f["chosen"]) - means(b, f["rejected"])) - (means(b, d["rw"]) - means(b, d["rl"]))
    return ((logits - 1 / (2 * 0.3)) ** 2).mean()


def openrlhf_ipo(b, f, d):  # DPOLoss(ipo=True): summed log-probs
    logits = (sums(b, f["chosen"]) - sums(b, f["rejected"])) - (sums(b, d["rw"]) - sums(b, d["rl"]))
    return ((logits - 1 / (2 * 0.3)) ** 2).mean()


def openrlhf_dpo(b, f, d):  # with nll_loss_coef: the mean over pairs of mean log-probs
    logits = (sums(b, f["chosen"]) - sums(b, f["rejected"])) - (sums(b, d["rw"]) - sums(b, d["rl"]))
    return -torch.nn.functional.logsigmoid(0.3 * logits).mean() - 0.7 * means(b, f["chosen"]).mean()


def real_dpo(b, f, d):  # (pi_w - pi_l) - (ref_w - ref_l), pairs side by side
    pi = torch.stack([sums(b, f["chosen"]), sums(b, f["rejected"])], 1)
    ref = torch.stack([sums(b, d["rw"]), sums(b, d["rl"])], 1)
    return -torch.nn.functional.logsigmoid(0.3 * ((pi[:, 0] - pi[:, 1]) - (ref[:, 0] - ref[:, 1]))).mean()


def trl_cpo_simpo(b, f, d):  # CPOTrainer, loss_type="simpo", beta, simpo_gamma, label_smoothing, cpo_alpha
    beta, gamma = 2.5, 1.4
    logits = means(b, f["chosen"]) - means(b, f["rejected"]) - gamma / beta
    ls = torch.nn.functional.logsigmoid
    x, mask = table(b, f["chosen"])
    return (-ls(beta * logits) * 0.9 - ls(-beta * logits) * 0.1).mean() - 0.6 * (x * mask).sum() / mask.sum()


def simpo_repository(b, f, d):  # gamma_beta_ratio
    return -torch.nn.functional.logsigmoid(2.0 * (means(b, f["chosen"]) - means(b, f["rejected"]) - 0.25)).mean()


def trl_orpo(b, f, d):  # beta * log-odds term, likelihood over the tokens of the chosen answers
    w, l = means(b, f["chosen"]), means(b, f["rejected"])
    odds = (w - l) - (torch.log1p(-torch.exp(w)) - torch.log1p(-torch.exp(l)))
    x, mask = table(b, f["chosen"])
    return -(x * mask).sum() / mask.sum() - (0.1 * torch.nn.functional.logsigmoid(odds)).mean()


PEERS = {
    "OpenRLHF smoothed": (openrlhf_smoothed, "std.dpo", "dpo(ref_chosen=rw, ref_rejected=rl, beta=0.3, smoothing=0.2)"),
    "TRL ipo": (trl_ipo, "std.ipo", "ipo(ref_chosen=rw, ref_rejected=rl, tau=0.3, average=true)"),
    "OpenRLHF ipo": (openrlhf_ipo, "std.ipo", "ipo(ref_chosen=rw, ref_rejected=rl, tau=0.3)"),
    "OpenRLHF dpo": (openrlhf_dpo, "std.dpo", "dpo(ref_chosen=rw, ref_rejected=rl, beta=0.3, nll=0.7)"),
    "ReaL dpo": (real_dpo, "std.dpo", "dpo(ref_chosen=rw, ref_rejected=rl, beta=0.3)"),
    "TRL simpo": (trl_cpo_simpo, "std.simpo", "simpo(beta=2.5, gamma=1.4, smoothing=0.1, nll=0.6)"),
    "SimPO repository": (simpo_repository, "std.simpo", "simpo(beta=2.0, gamma=2.0 * 0.25)"),
    "TRL orpo": (trl_orpo, "std.orpo", "orpo(lam=0.1, by_token=true)"),
}


ALONE = {  # calls that have a test of their own
    "TRL kto": "kto(ref=ref, label=label, z0=kto_baseline(y, ref), desirable=1.2, undesirable=0.9)",
    "TRL reward": "reward_model(margin=m, center=0.01)", "OpenRLHF reward": "reward_model()",
    "ReaL reward": "reward_model(weight=pairs * wt)",
}
ROWS = {  # calls that choose rows of responses: tests/papers and below
    "best_only(r)", "best_random(r)", "best_worst(r)", "log(uniform(r)) / w", "sppo(old=old, win=win_rate(won, 5))",
}

DISTRIBUTIONS = {  # tests/distributions/test_gkd.py, and those of SDFT in test_sdft.py and tests/oracles
    *(f"sdft(teacher=d, old=old{alpha})" for alpha in ("", ", alpha=0", ", alpha=1")),
    *(f"sdft(teacher=at, old=old{way})" for way in ("", ', others="rest"', ", skip=2")), "sdft_sampled(teacher=teacher, old=old)",
    "gkd(teacher=t.logprobs, beta=0)", "gkd(teacher=t.logprobs, beta=0.5)", "gkd(teacher=at, beta=1)",
    *(f'gkd(teacher=t.logprobs, beta=0, others="{way}")' for way in ("rest", "renormalize")),
    "minillm(teacher=t.logprobs, old=old, sampled=teacher)", "gkd(teacher=d, beta=0)", "gkd(teacher=d, beta=1)", "gkd(teacher=d)",
}


@pytest.mark.parametrize("name", PEERS)
def test_a_call_gives_the_numbers_of_another_system(name: str) -> None:
    theirs, module, call = PEERS[name]
    b, fresh, data = pair_of()
    torch.testing.assert_close(run_loss(module, call, b, fresh, **data).loss, theirs(b, fresh, data).item(), **TIGHT)


def test_trl_kto() -> None:
    """KTOTrainer: both kinds apart, kl clamped at 0, nan-mean of all."""
    b = Batch.random(5)
    data = labelled(b) | {"y": b.logprobs(8)}
    fresh = {"logprobs": b.logprobs(1)}
    kl = (sums(b, data["y"]) - sums(b, data["ref"])).mean().clamp(min=0)
    ratio, good = sums(b, fresh["logprobs"]) - sums(b, data["ref"]), data["label"].data > 0
    theirs = torch.cat([1.2 * (1 - torch.sigmoid(0.1 * (ratio[good] - kl))),
                        0.9 * (1 - torch.sigmoid(0.1 * (kl - ratio[~good])))]).nanmean()
    del data["z0"]
    torch.testing.assert_close(run_loss("std.kto", ALONE["TRL kto"], b, fresh, **data).loss, theirs.item(), **TIGHT)


def scores(b: Batch) -> tuple[dict[str, Given], Tensor, Tensor]:
    fresh = fresh_of(CASES["reward_model"], b)
    return fresh, fresh["chosen"].data, fresh["rejected"].data


def test_trl_reward_trainer() -> None:
    b = Batch.pairs(6)
    fresh, w, l = scores(b)
    m = b.seqs(3)
    theirs = -torch.nn.functional.logsigmoid(w - l - m.data).mean() + 0.01 * torch.mean((w + l) ** 2)
    done = run_loss("std.reward_model", ALONE["TRL reward"], b, fresh, head="reward_model", m=m)
    torch.testing.assert_close(done.loss, theirs.item(), **TIGHT)


def test_openrlhf_logexp_is_the_same_loss() -> None:
    b = Batch.pairs(6)
    fresh, w, l = scores(b)
    done = run_loss("std.reward_model", ALONE["OpenRLHF reward"], b, fresh, head="reward_model")
    torch.testing.assert_close(done.loss, torch.log(1 + torch.exp(l - w)).mean().item(), **TIGHT)


def test_real_reward_modelling() -> None:
    """A sum over pairs, each divided by the number of pairs of its prompt."""
    b = Batch.pairs(6, 7)
    fresh, w, l = scores(b)
    groups = [0, 2, 5, 6, 7]  # where the pairs of a prompt begin
    size = torch.cat([torch.full((stop - start,), float(stop - start)) for start, stop in pairwise(groups)]).double()
    theirs = -(torch.nn.functional.logsigmoid(w - l) / size).sum()
    done = run_loss("std.reward_model", ALONE["ReaL reward"], b, fresh, head="reward_model",
                    wt=b.given("seq", 1 / size), pairs=7.0)
    torch.testing.assert_close(done.loss, theirs.item(), **TIGHT)


# ----------------------------------------------------------------------------------------------------- wrong calls


@pytest.mark.parametrize(("module", "call", "code"), [
    ("std.dpo", "dpo(ref_chosen=rw)", "RL0215"), ("std.dpo", "dpo(ref_chosen=rw, ref_rejected=rl, gamma=1)", "RL0107"),
    ("std.dpo", "dpo(ref_chosen=rl, ref_rejected=rw)", "RL0202"),
    ("std.dpo", "dpo(ref_chosen=rw, ref_rejected=0)", "RL0201"),
    ("std.dpo", "dpo(ref_chosen=rw, ref_rejected=rl, offset=rw)", "RL0201"),
    ("std.dpo", "dpo(ref_chosen=rw, ref_rejected=rl, beta=m)", "RL0201"),
    ("std.simpo", "simpo(average=true)", "RL0107"),
    ("std.reward_model", "reward_model()", "RL0201"), ("std.kto", "kto(ref=rw, label=m, z0=0)", "RL0204"),
])
def test_a_wrong_call_is_told(module: str, call: str, code: str) -> None:
    b, fresh, data = pair_of()
    with pytest.raises(Failure) as failure:
        run_loss(module, call, b, fresh, m=b.seqs(3), **data)
    assert code in {d.code for d in failure.value.diagnostics}
