"""Every advantage, reward and weight of the policy-gradient library against loops over sequences and tokens, written
from the papers, in float64; the same under one, two and four shards. Then `quantile` and `uniform`."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from rldsl.diag import Failure
from tests.library.harness import Batch, Given, run_fn

TIGHT = dict(rtol=1e-10, atol=1e-10)
RAGGED = Batch.random(seed=1, prompts=5, n=3)
EMPTY = Batch.random(seed=3, prompts=4, n=3, edge="empty")
ALONE = Batch.random(seed=4, edge="alone")
ONE = Batch.random(seed=2, prompts=4, n=1)
SHORT = Batch.random(seed=5, edge="one_token")
ANY = [RAGGED, EMPTY, ALONE, ONE, SHORT]
GROUPS = [RAGGED, EMPTY, SHORT]
Floats = list[float]
Ragged = list[Floats]


def rows(b: Batch, x: Given) -> Ragged:
    return [t.tolist() for t in b.split(x)]


def flat(x: Ragged) -> Floats:
    return [v for row in x for v in row]


def mean(x: Floats) -> float:
    return math.fsum(x) / len(x)


def var(x: Floats, unbiased: bool = True) -> float:
    m = mean(x)
    return math.fsum((v - m) ** 2 for v in x) / max(len(x) - (1 if unbiased else 0), 1)


def by_group(b: Batch, r: Floats, f: Callable[[Floats], Floats]) -> Floats:
    out: Floats = []
    for i in range(0, len(r), b.n):
        out += f(r[i : i + b.n])
    return out


def normalized(r: Floats, eps: float, unbiased: bool = True) -> Floats:
    return [(x - mean(r)) / (math.sqrt(var(r, unbiased)) + eps) for x in r]


def check(module: str, call: str, b: Batch, want: Any, **data: Given | float) -> None:
    """The same numbers on every number of shards. want: one flat list, or several."""
    wanted = want if isinstance(want, tuple) else (want,)
    for dp in (1, 2, 4):
        got = run_fn(module, call, b, dp=dp, **data)
        got = got if isinstance(got, tuple) else (got,)
        assert len(got) == len(wanted)
        for g, w in zip(got, wanted):
            torch.testing.assert_close(g.double().reshape(-1), torch.tensor(w, dtype=torch.float64).reshape(-1), **TIGHT)


# --------------------------------------------------------------------------------------------------- rewards


@pytest.mark.parametrize("b", ANY)
def test_kl_rewards(b: Batch) -> None:
    """r_t = -beta (log pi - log ref), plus the clipped score at the last token; with finished, only if it ended."""
    lp, ref, s = b.logprobs(1), b.logprobs(2), b.seqs(3, scale=4)
    ended = Given("seq", "gen", torch.arange(b.rows) % 2 == 0)
    plain, cut = [], []
    for i, (x, y) in enumerate(zip(rows(b, lp), rows(b, ref))):
        kl = [-0.2 * (u - v) for u, v in zip(x, y)]
        score = min(max((float(s.data[i]) - 0.5) * 2, -3), 3)
        plain.append([k + (score if t == len(kl) - 1 else 0) for t, k in enumerate(kl)])
        cut.append([k + ((score if i % 2 == 0 else -1) if t == len(kl) - 1 else 0) for t, k in enumerate(kl)])
    options = "coef=0.2, bias=0.5, scale=2, most=3"
    check("std.ppo", f"kl_rewards(s, lp, ref, {options})", b, flat(plain), s=s, lp=lp, ref=ref)
    check("std.ppo", f"finished_rewards(s, ended, lp, ref, cut=-1, {options})", b, flat(cut), s=s, ended=ended, lp=lp,
          ref=ref)


@pytest.mark.parametrize(("kl", "n", "horizon"), [(50.0, 1, 10), (0.0, 1, 10), (6.6, 256, 10_000), (6.0, 1, 10)])
def test_adaptive_kl(kl: float, n: float, horizon: float) -> None:
    """Ziegler 2019, 2.2: e = clip((KL - target) / target, -0.2, 0.2); beta (1 + K e)."""
    want = 0.1 * (1 + n / horizon * min(max((kl - 6) / 6, -0.2), 0.2))
    check("std.ppo", f"adaptive_kl(0.1, kl, n={n}, horizon={horizon})", RAGGED, [want], kl=kl)
    assert (want > 0.1) == (kl > 6) and (want < 0.1) == (kl < 6)


@pytest.mark.parametrize("length", [0, 10, 16, 17, 20, 25])
def test_overlong(length: int) -> None:
    """DAPO, equation 13, with a limit of 20 and a buffer of 4."""
    b = Batch({"gen": [length, 1]}, n=1)
    want = 0.0 if length <= 16 else (16 - length) / 4 if length <= 20 else -1.0
    check("std.dapo", "overlong(len(gen), most=20, buffer=4)", b, [want, 0.0])


# ------------------------------------------------------------------------------------------------ advantages


@pytest.mark.parametrize("b", ANY)
@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 0.95), (0.9, 0.5), (1.0, 1.0), (1.0, 0.0)])
def test_gae(b: Batch, gamma: float, lam: float) -> None:
    """A_t = delta_t + gamma lam A_{t+1}; no value after the last token; return A + V."""
    r, v = b.tokens(1), b.tokens(2)
    adv, ret = [], []
    for x, y in zip(rows(b, r), rows(b, v)):
        a, carry = [0.0] * len(x), 0.0
        for t in reversed(range(len(x))):
            after = y[t + 1] if t + 1 < len(x) else 0.0
            a[t] = carry = x[t] + gamma * after - y[t] + gamma * lam * carry
        adv.append(a)
        ret.append([p + q for p, q in zip(a, y)])
    check("std.ppo", f"gae(r, v, gamma={gamma}, lam={lam})", b, (flat(adv), flat(ret)), r=r, v=v)


def discounted(x: Floats, g: Floats) -> Floats:
    """y_t = x_t + g_t y_{t+1}."""
    out, carry = [0.0] * len(x), 0.0
    for t in reversed(range(len(x))):
        out[t] = carry = x[t] + g[t] * carry
    return out


@pytest.mark.parametrize("b", ANY)
def test_discount_with_a_factor_of_its_own(b: Batch) -> None:
    """For each token, sequence and prompt; one number that the batch computes is as a constant."""
    r, g, s = b.tokens(1), b.tokens(2), b.seqs(3)
    of_rows, ends = s.data.tolist(), rows(b, r)
    by_prompt = [x for i in range(0, len(of_rows), b.n) for x in [mean(of_rows[i : i + b.n])] * b.n]
    check("std.ppo", "discount(r, g)", b, flat([discounted(x, y) for x, y in zip(ends, rows(b, g))]), r=r, g=g)
    for factor, each in (("s", of_rows), ("mean(s by prompt)", by_prompt), ("mean(s)", [mean(of_rows)] * len(ends))):
        want = flat([discounted(x, [y] * len(x)) for x, y in zip(ends, each)])
        check("std.ppo", f"discount(r, {factor})", b, want, r=r, s=s)


@pytest.mark.parametrize("b", ANY)
@pytest.mark.parametrize("gamma", [1.0, 0.9])
def test_gae_of_vapo_and_of_cut_responses(b: Batch, gamma: float) -> None:
    r, v, end = b.tokens(1), b.tokens(2), b.seqs(3)
    finished = replace(end, data=(end.data > 0).double())
    for call, lams, more, given in (
            (f"vapo_gae(r, v, len(gen), alpha=0.4, gamma={gamma})",
             [max(0.0, 1 - 1 / (0.4 * max(n, 1))) for n in b.lens["gen"]], [0.0] * len(end.data), {}),
            (f"gae_cut(r, v, end, finished, gamma={gamma}, lam=0.7)", [0.7] * len(end.data),
             [0.0 if x > 0 else x for x in end.data.tolist()], {"end": end, "finished": finished})):
        adv, ret = [], []
        for x, y, lam, after in zip(rows(b, r), rows(b, v), lams, more):
            delta = [a + gamma * n - c for a, c, n in zip(x, y, [*y[1:], after])]
            adv.append(discounted(delta, [gamma * lam] * len(x)))
            ret.append([p + q for p, q in zip(adv[-1], y)])
        check("std.gae", call, b, (flat(adv), flat(ret)), r=r, v=v, **given)


@pytest.mark.parametrize("b", ANY)
@pytest.mark.parametrize(("call", "eps", "unbiased"), [
    ("group_norm(r)", 1e-4, True), ("group_norm(r, eps=1e-6)", 1e-6, True), ("group_norm(r, eps=1e-9)", 1e-9, True),
    ("group_norm(r, eps=1e-5)", 1e-5, True), ("group_norm(r, unbiased=false)", 1e-4, False)])
def test_group_norm(b: Batch, call: str, eps: float, unbiased: bool) -> None:
    """(r - mean) / (std + eps): TRL (and the paper's code) 1e-4, verl 1e-6, OpenRLHF 1e-9, ReaL 1e-5."""
    r = b.seqs(1)
    check("std.grpo", call, b, by_group(b, r.data.tolist(), lambda g: normalized(g, eps, unbiased)), r=r)


def test_group_norm_without_variance_or_company() -> None:
    r = RAGGED.given("seq", [1.0, 1, 1, 0, 0, 1] + [0.0] * 9)
    want = by_group(RAGGED, r.data.tolist(), lambda g: normalized(g, 1e-4))
    assert want[:3] == [0.0] * 3 and all(math.isfinite(x) for x in want)
    check("std.grpo", "group_norm(r)", RAGGED, want, r=r)
    check("std.grpo", "group_norm(r)", ONE, [0.0] * 4, r=ONE.seqs(1))
    check("std.grpo", "group_norm(r, eps=1e-6, alone=true)", ONE, [x / (1 + 1e-6) for x in ONE.seqs(1).data.tolist()],
          r=ONE.seqs(1))  # verl: mean 0, std 1
    check("std.grpo", "group_norm(r, alone=true)", RAGGED, want, r=r)


@pytest.mark.parametrize("b", ANY)
def test_dr_grpo_advantage(b: Batch) -> None:
    r = b.seqs(1)
    check("std.grpo", "group_norm(r, by_std=false)", b, by_group(b, r.data.tolist(), lambda g: [x - mean(g) for x in g]),
          r=r)


@pytest.mark.parametrize("b", GROUPS)
def test_gdpo_norm(b: Batch) -> None:
    """Each reward normalized in its group, the weighted sum over the batch."""
    x, y = b.seqs(1), b.seqs(2, scale=30)
    one, two = (by_group(b, r.data.tolist(), lambda g: normalized(g, 1e-4)) for r in (x, y))
    want = normalized([0.5 * p + 2 * q for p, q in zip(one, two)], 1e-4)
    check("std.grpo", "gdpo_norm(x, y, wa=0.5, wb=2)", b, want, x=x, y=y)
    third = by_group(b, b.seqs(3).data.tolist(), lambda g: normalized(g, 1e-4))
    want = normalized([p + q + 3 * r for p, q, r in zip(one, two, third)], 1e-4)
    check("std.grpo", "gdpo_norm(x, y, z, wc=3)", b, want, x=x, y=y, z=b.seqs(3))


def test_rewards_without_variance() -> None:
    """All alike: every advantage is 0, and none is not a number."""
    r, none = RAGGED.given("seq", [2.0] * 15), [0.0] * 15
    for module, call in (("std.grpo", "group_norm(r)"), ("std.grpo", "gdpo_norm(r, r)"), ("std.ppo", "whiten(r)"),
                         ("std.rloo", "leave_one_out(r)"), ("std.opo", "optimal_baseline(r, len(gen))"),
                         ("std.gpg", "gpg_norm(r)")):
        check(module, call, RAGGED, none, r=r)
    tokens = RAGGED.given("token", [2.0] * sum(RAGGED.lens["gen"]))
    check("std.reinforce_pp", "reinforce_pp_baseline(r, t)", RAGGED, [0.0] * len(tokens.data), r=r, t=tokens)
    check("std.ppo", "whiten(t, eps=0, unbiased=false, plus=1e-5)", RAGGED, [0.0] * len(tokens.data), t=tokens)


@pytest.mark.parametrize("b", ANY)
def test_leave_one_out(b: Batch) -> None:
    """The only answer to a prompt keeps its reward, as in verl."""
    r = b.seqs(1)
    want = by_group(b, r.data.tolist(), lambda g: [x - (math.fsum(g) - x) / max(len(g) - 1, 1) for x in g])
    check("std.rloo", "leave_one_out(r)", b, want, r=r)


@pytest.mark.parametrize("b", [*ANY, Batch.random(seed=6, prompts=4, n=2), Batch.random(seed=7, prompts=3, n=5)])
def test_leave_one_out_over_the_deviation_of_the_others(b: Batch) -> None:
    """NeMo-RL: divided where the others differ; with fewer than two others there is no deviation."""
    r = b.seqs(1)
    want: Floats = []
    for i in range(b.rows):
        others = [float(r.data[j]) for j in range(i // b.n * b.n, i // b.n * b.n + b.n) if j != i]
        centered = float(r.data[i]) - (mean(others) if others else 0.0)
        want.append(centered / (math.sqrt(var(others)) + 1e-6) if len(others) > 1 else centered)
    check("std.rloo", "leave_one_out(r, by_std=true)", b, want, r=r)


@pytest.mark.parametrize("level", [0.1, 0.0, 100.0, 0.3])
def test_others_that_are_equal_have_no_deviation(level: float) -> None:
    """Whatever rounding makes of their variance."""
    b = Batch({"gen": [1] * 8}, 4)
    r = b.given("seq", [level, level, level, level + 1, level, level, level, level])
    third = 1 / 3
    near = -third / (math.sqrt(third) + 1e-6)
    check("std.rloo", "leave_one_out(r, by_std=true)", b, [near, near, near, 1.0, 0, 0, 0, 0], r=r)


@pytest.mark.parametrize(("module", "call"), [
    ("std.opo", "optimal_baseline(r, len(gen), alone=true)"), ("std.gpg", "gpg_norm(r, nonzero=true, alone=true)")])
def test_an_answer_alone_keeps_its_reward(module: str, call: str) -> None:
    r = ONE.seqs(1)
    check(module, call, ONE, r.data.tolist(), r=r)
    check(module, call.replace(", alone=true", ""), ONE, [0.0] * ONE.rows, r=r)
    grouped = call.replace(", alone=true", "")
    want = run_fn(module, grouped, RAGGED, r=RAGGED.seqs(1)).tolist()
    check(module, call, RAGGED, want, r=RAGGED.seqs(1))


def test_an_answer_alone_keeps_its_reward_before_it_is_normalized() -> None:
    r, t = ONE.seqs(1), ONE.tokens(2)
    each = [x for x, row in zip(r.data.tolist(), rows(ONE, t)) for _ in row]
    white = [(x - mean(each)) / math.sqrt(var(each) + 1e-8) for x in each]
    check("std.reinforce_pp", "reinforce_pp_baseline(r, t, alone=true)", ONE, white, r=r, t=t)


@pytest.mark.parametrize("b", ANY)
@pytest.mark.parametrize(("options", "unbiased"), [("", True), (", eps=0, unbiased=false, least=1e-8", False)])
def test_reinforce_pp(b: Batch, options: str, unbiased: bool) -> None:
    """Discounted returns, whitened: verl unbiased with + 1e-8, OpenRLHF biased and bounded by 1e-8."""
    r, s = b.tokens(1), b.seqs(2)
    returns = []
    for x in rows(b, r):
        returns.append([math.fsum(0.9 ** (k - t) * x[k] for k in range(t, len(x))) for t in range(len(x))])

    def white(x: Floats) -> Floats:
        v = var(x, unbiased)
        return [(y - mean(x)) / math.sqrt(v + 1e-8 if unbiased else max(v, 1e-8)) for y in x]

    check("std.reinforce_pp", f"reinforce_pp(r, gamma=0.9{options})", b, white(flat(returns)), r=r)
    centered = by_group(b, s.data.tolist(), lambda g: [x - mean(g) for x in g])
    each = [x for x, row in zip(centered, rows(b, r)) for _ in row]  # at every token
    check("std.reinforce_pp", f"reinforce_pp_baseline(s, r{options})", b, white(each), s=s, r=r)


@pytest.mark.parametrize("b", GROUPS)
def test_remax(b: Batch) -> None:
    """The reward of the greedy response is one a prompt."""
    r, g = b.seqs(1), b.of_prompts(2)
    want = [x - float(g.data[i // b.n]) for i, x in enumerate(r.data.tolist())]
    check("std.remax", "r - g", b, want, r=r, g=g)
    s = b.seqs(3)
    greedy = by_group(b, s.data.tolist(), lambda x: [mean(x)] * len(x))
    check("std.remax", "over_greedy(r, s)", b, [x - y for x, y in zip(r.data.tolist(), greedy)], r=r, s=s)


@pytest.mark.parametrize("b", [*ANY, Batch({"gen": [0, 0, 0, 2, 5, 0]}, n=3)])
def test_optimal_baseline(b: Batch) -> None:
    r, lens = b.seqs(1).data.tolist(), b.lens["gen"]
    want: Floats = []
    for i in range(0, len(r), b.n):
        base = math.fsum(r[j] * lens[j] for j in range(i, i + b.n)) / max(sum(lens[i : i + b.n]), 1)
        want += [r[j] - base for j in range(i, i + b.n)]
    check("std.opo", "optimal_baseline(r, len(gen))", b, want, r=b.seqs(1))


def test_gpg_norm() -> None:
    """alpha = sequences / sequences of mixed groups (the paper), or / sequences with a reward (verl)."""
    r = [1.0, 0, 1, 1, 1, 1, 0, 0, 0, 0, 1, 0, 2, 2, 2]  # 6 sequences of mixed groups, 9 with a reward
    centered = by_group(RAGGED, r, lambda g: [x - mean(g) for x in g])
    given = RAGGED.given("seq", r)
    check("std.gpg", "gpg_norm(r)", RAGGED, [15 / 6 * x for x in centered], r=given)
    check("std.gpg", "gpg_norm(r, f_norm=2, nonzero=true)", RAGGED, [15 / 9 * x / 2 for x in centered], r=given)
    none = RAGGED.given("seq", [1.0] * 15)
    check("std.gpg", "gpg_norm(r)", RAGGED, [0.0] * 15, r=none)


@pytest.mark.parametrize("b", ANY)
def test_whiten(b: Batch) -> None:
    x = b.tokens(1, scale=3, shift=1)
    v, m = flat(rows(b, x)), mean(flat(rows(b, x)))
    check("std.ppo", "whiten(x)", b, [(y - m) / math.sqrt(var(v) + 1e-8) for y in v], x=x)  # verl, TRL
    check("std.ppo", "whiten(x, eps=0, unbiased=false, least=1e-8)", b,
          [(y - m) / math.sqrt(max(var(v, False), 1e-8)) for y in v], x=x)  # OpenRLHF
    check("std.ppo", "whiten(x, eps=0, unbiased=false, plus=1e-5)", b,
          [(y - m) / (math.sqrt(var(v, False)) + 1e-5) for y in v], x=x)  # ReaL


def test_running_moments() -> None:
    """Three steps of the debiased exponential average."""
    m = s = w = 0.0
    xs = [RAGGED.tokens(i, scale=2, shift=5) for i in range(3)]
    for x in xs:
        v = x.data.tolist()
        got = run_fn("std.moments", "moments(x, m, s, w, decay=0.9)", RAGGED, dp=2, x=x, m=m, s=s, w=w)
        m, s, w = (float(g) for g in got)
    weights = [0.1 * 0.9**2, 0.1 * 0.9, 0.1]
    first = sum(k * mean(x.data.tolist()) for k, x in zip(weights, xs)) / sum(weights)
    second = sum(k * mean([y * y for y in x.data.tolist()]) for k, x in zip(weights, xs)) / sum(weights)
    assert (m / w, s / w) == pytest.approx((first, second), rel=1e-12)
    want = [(y - first) / math.sqrt(second - first**2) for y in v]
    check("std.moments", "normal(x, m, s, w)", RAGGED, want, x=xs[-1], m=m, s=s, w=w)
    check("std.moments", "denormal(normal(x, m, s, w), m, s, w)", RAGGED, v, x=xs[-1], m=m, s=s, w=w)
    check("std.moments", "denormal(x, 0, 0, 0)", RAGGED, v, x=xs[-1])


@pytest.mark.parametrize("b", ANY)
def test_corrections(b: Batch) -> None:
    x, y = b.logprobs(1), b.logprobs(2)
    w = [[math.exp(p - q) for p, q in zip(u, v)] for u, v in zip(rows(b, x), rows(b, y))]
    s = [math.prod(row) for row in w]
    check("std.correction", "truncated(x, y)", b, [min(v, 2) for v in flat(w)], x=x, y=y)
    bounded = [min(max(v, 0.5), 5) for v in flat(w)]
    check("std.correction", "truncated(x, y, most=5, least=0.5)", b, bounded, x=x, y=y)
    check("std.correction", "truncated_seq(x, y)", b, [min(v, 2) for v in s], x=x, y=y)
    check("std.correction", "banded(x, y)", b, [v if 0.5 <= v <= 5 else 0 for v in flat(w)], x=x, y=y)
    check("std.correction", "banded_seq(x, y)", b, [v if v <= 3 else 0 for v in s], x=x, y=y)


# ------------------------------------------------------------------------- covariance, quantile, random numbers


def covariances(b: Batch, lp: Given, adv: Given) -> Floats:
    x, a = flat(rows(b, lp)), flat(rows(b, adv))
    return [(p - mean(x)) * (q - mean(a)) for p, q in zip(x, a)]


def test_kl_cov_takes_the_largest() -> None:
    lp, adv = RAGGED.logprobs(1), RAGGED.tokens(2)
    c = covariances(RAGGED, lp, adv)
    k = math.floor(0.2 * (len(c) - 1)) + 1
    least = sorted(c)[-k]
    check("std.covariance", "kl_cov_tokens(lp, adv, share=0.2)", RAGGED, [float(v >= least) for v in c], lp=lp, adv=adv)


def test_clip_cov_takes_a_share_within_the_bounds() -> None:
    lp, adv = RAGGED.logprobs(1), RAGGED.tokens(2)
    c = covariances(RAGGED, lp, adv)
    call = "clip_cov_tokens(lp, adv, share=0.1, low=0.1, high=2)"
    got = [run_fn("std.covariance", call, RAGGED, dp=dp, lp=lp, adv=adv) for dp in (1, 2, 4)]
    assert all(torch.equal(g, got[0]) for g in got)
    chosen = [v for v, g in zip(c, got[0].tolist()) if g]
    assert len(chosen) == math.ceil(0.1 * len(c)) and all(0.1 < v < 2 for v in chosen)
    every = run_fn("std.covariance", call.replace("share=0.1", "share=1"), RAGGED, lp=lp, adv=adv)
    assert every.tolist() == [float(0.1 < v < 2) for v in c]
    none = run_fn("std.covariance", call.replace("low=0.1, high=2", "low=90, high=99"), RAGGED, lp=lp, adv=adv)
    assert none.sum() == 0


@pytest.mark.parametrize("q", [0.0, 0.3, 0.5, 0.977, 1.0])
@pytest.mark.parametrize("b", ANY)
def test_quantile(b: Batch, q: float) -> None:
    x, s = b.tokens(1), b.seqs(2)
    for given in (x, s):
        check("std.ppo", f"quantile(x, {q})", b, [float(given.data.quantile(q))], x=given)


def half_way(x: torch.Tensor) -> float:
    ordered = sorted(x.tolist())
    return (ordered[(len(ordered) - 1) // 2] + ordered[len(ordered) // 2]) / 2 if ordered else 0.0


@pytest.mark.parametrize("b", ANY)
def test_median(b: Batch) -> None:
    x, s = b.tokens(1), b.seqs(2)
    for given in (x, s):
        check("std.ppo", "median(x)", b, [half_way(given.data)], x=given)
    check("std.ppo", "median(x by seq)", b, [half_way(part) for part in x.data.split(b.lens["gen"])], x=x)


def test_uniform_belongs_to_the_element() -> None:
    x = RAGGED.tokens(1)
    for call, data in (("uniform(x)", x), ("uniform(x)", RAGGED.seqs(1)), ("uniform(x)", RAGGED.of_prompts(1))):
        got = [run_fn("std.ppo", call, RAGGED, dp=dp, x=data) for dp in (1, 2, 4)]
        assert all(torch.equal(g, got[0]) for g in got) and len(set(got[0].tolist())) == got[0].numel()
        assert float(got[0].min()) > 0 and float(got[0].max()) < 1
    two = run_fn("std.ppo", "uniform(x) - uniform(x)", RAGGED, x=x)
    assert float(two.abs().min()) > 0, "each call has numbers of its own"
    many = run_fn("std.ppo", "uniform(x)", Batch({"gen": [100] * 100}), x=Given("token", "gen", torch.zeros(10_000)))
    assert abs(float(many.mean()) - 0.5) < 0.01 and abs(float(many.var()) - 1 / 12) < 0.003


@pytest.mark.parametrize(("call", "code"), [
    ("quantile(0.5, 0.5)", "RL0208"), ("quantile(x, 1.5)", "RL0205"), ("quantile(x, x)", "RL0201"),
    ("uniform(1)", "RL0201"), ("quantile(x)", "RL0204"), ("uniform(gen)", "RL0203"), ("median(1)", "RL0208"),
    ("median(x, 2)", "RL0204"), ("median(x by token)", "RL0208"), ("median(gen)", "RL0203")])
def test_mistakes(call: str, code: str) -> None:
    with pytest.raises(Failure) as failure:
        run_fn("std.ppo", call, RAGGED, x=RAGGED.tokens(1))
    assert [d.code for d in failure.value.diagnostics] == [code]


@pytest.mark.parametrize(("word", "code"), [
    ("quantile(logprobs, 1.5)", "RL0205"), ("mean(uniform(logprobs) * logprobs)", "RL0210")])
def test_a_loss_cannot_return_them(word: str, code: str) -> None:
    from tests.library.harness import run_loss
    text = f"loss mine(logprobs: token;) {{\n  return mean(logprobs) + {word}\n}}"
    with pytest.raises(Failure) as failure:
        run_loss("std.ppo", "mine()", RAGGED, dict(logprobs=RAGGED.logprobs(1)), text=text)
    assert [d.code for d in failure.value.diagnostics] == [code]
