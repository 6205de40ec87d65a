"""The evaluator against torch written by hand, sequence by sequence, in fp64; and invariance over cuts and ranks."""

from __future__ import annotations

import math
import random

import pytest
import torch
from torch import Tensor

from rldsl.diag import InternalError
from rldsl.plan.expr import Program
from rldsl.plan.operators import OPERATORS, Operator
from rldsl.runtime.interpreter.expression_ops import discount_by, filled, pad
from rldsl.runtime.interpreter.expression_programs import run_compute
from rldsl.runtime.interpreter.minibatch_loss import MinibatchLoss, loss_counts
from tests.runtime.builder import FRAMES, Builder, space, tokens_of, view
from tests.world import run_world

TIGHT = dict(rtol=1e-12, atol=1e-12)
LENS = [3, 0, 5, 1, 4, 2, 9, 1, 0, 7, 2, 6]
GEN = {"gen": FRAMES["gen"]}
PAIR = {f: FRAMES[f] for f in ("won", "lost")}


def draw(n: int, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def compute(program: Program, inputs: dict[str, Tensor], rows: list[int] | None = None, lens: list[int] = LENS,
            call_py=None) -> dict[str, Tensor]:
    rows = list(range(12)) if rows is None else rows
    return run_compute(program, inputs, {"gen": view("gen", rows, lens)}, GEN, None, call_py)


def one(b: Builder, node: int, **inputs: Tensor) -> Tensor:
    return compute(b.program(y=node), inputs)["y"]


def each(x: Tensor, function, lens: list[int] = LENS) -> Tensor:
    """`function` on every sequence on its own."""
    return torch.cat([function(part) for part in x.split(lens)])


# ------------------------------------------------------------------------------------------------- operators

PYTHON = {
    "add": lambda a, b: a + b, "sub": lambda a, b: a - b, "mul": lambda a, b: a * b, "div": lambda a, b: a / b,
    "neg": lambda a: -a, "pow": lambda a, b: abs(a) ** b, "lt": lambda a, b: a < b, "le": lambda a, b: a <= b,
    "gt": lambda a, b: a > b, "ge": lambda a, b: a >= b, "eq": lambda a, b: a == b, "ne": lambda a, b: a != b,
    "exp": math.exp, "log": lambda a: math.log(abs(a)), "sqrt": lambda a: math.sqrt(abs(a)), "abs": abs, "min": min,
    "max": max, "sigmoid": lambda a: 1 / (1 + math.exp(-a)), "stop_gradient": lambda a: a,
    "logsigmoid": lambda a: -math.log1p(math.exp(-a)), "expm1": math.expm1, "log1p": lambda a: math.log1p(abs(a)),
}


@pytest.mark.parametrize("op", sorted(PYTHON))
def test_elementwise_is_what_python_says(op):
    b = Builder()
    x, y = draw(sum(LENS), 1), draw(sum(LENS), 2)
    first = b.input("x", "token")
    first = b("abs", first) if op in ("pow", "log", "log1p", "sqrt") else first
    args = [first, b.input("y", "token")][: OPERATORS[op].arity]
    got = one(b, b(op, *args), x=x, y=y)
    want = [PYTHON[op](*pair[: len(args)]) for pair in zip(x.tolist(), y.tolist())]
    torch.testing.assert_close(got, torch.tensor(want, dtype=got.dtype), **TIGHT)


def test_conditions_are_bool_and_select():
    b = Builder()
    x = b.input("x", "token")
    low, high = b("lt", x, 0.0), b("gt", x, 1.0)
    either, both = b("or", low, high), b("and", b("not", low), b("not", high))
    program = b.program(either=either, both=both, chosen=b("where", either, 0.0, x), n=b.to("sum", either, "batch"))
    got = compute(program, {"x": (v := draw(sum(LENS), 3))})
    assert got["either"].dtype == torch.bool and torch.equal(got["either"], ~got["both"])
    assert torch.equal(got["chosen"], torch.where((v < 0) | (v > 1), 0.0, v))
    assert got["n"] == got["either"].sum()


def test_where_broadcasts_a_coarse_condition():
    b = Builder()
    got = one(b, b("where", b("gt", b.input("s", "seq"), 0.0), b.input("x", "token"), 1.0),
              s=(s := draw(12, 1)), x=(x := draw(sum(LENS), 2)))
    assert torch.equal(got, torch.where(s.repeat_interleave(torch.tensor(LENS)) > 0, x, 1.0))


def shifted(x: Tensor, by: int) -> Tensor:
    zero = x.new_zeros(min(1, x.numel()))
    return torch.cat((x[1:], zero)) if by == 1 else torch.cat((zero, x[:-1]))


def test_next_and_prev_stop_at_the_border():
    b = Builder()
    x = draw(sum(LENS), 4)
    assert torch.equal(one(b, b.seq("next", b.input("x", "token")), x=x), each(x, lambda s: shifted(s, 1)))
    assert torch.equal(one(b, b.seq("prev", b.input("x", "token")), x=x), each(x, lambda s: shifted(s, -1)))


def test_nan_stays_in_its_sequence():
    b = Builder()
    x = draw(sum(LENS), 4)
    x[:3] = torch.nan
    i = b.input("x", "token")
    got = compute(b.program(n=b.seq("next", i), p=b.seq("prev", i), c=b.seq("cumsum", i), l=b.seq("last", i),
                            d=b.seq("discount", i, b.put("const", value=0.9))), {"x": x})
    assert all(not y[3:].isnan().any() for y in got.values())


def test_last_at_end_len_cumsum():
    b = Builder()
    x, s = draw(sum(LENS), 5), draw(12, 6)
    i = b.input("x", "token")
    end = b.at_end(b.input("s", "seq"))
    got = compute(b.program(last=b.seq("last", i), end=end, len=b.len(), sum=b.seq("cumsum", i)), {"x": x, "s": s})
    assert got["last"].tolist() == [p[-1].item() if len(p) else 0.0 for p in x.split(LENS)]
    assert got["len"].tolist() == LENS and got["len"].dtype == torch.float64
    want = torch.cat([torch.tensor([0.0] * (n - 1) + [v] * (n > 0)) for n, v in zip(LENS, s.tolist())])
    torch.testing.assert_close(got["end"], want.double(), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(got["sum"], each(x, lambda p: p.cumsum(0)), **TIGHT)


@pytest.mark.parametrize("g", [0.0, 0.3, 0.95, 1.0, 1.5, -0.5])
def test_discount_is_the_backward_recurrence(g):
    b = Builder()
    x = draw(sum(LENS), 7)

    def recur(s: Tensor) -> Tensor:
        y, carry = torch.zeros_like(s), 0.0
        for t in range(len(s) - 1, -1, -1):
            carry = y[t] = s[t] + g * carry
        return y

    got = one(b, b.seq("discount", b.input("x", "token"), b.put("const", value=g)), x=x)
    torch.testing.assert_close(got, each(x, recur), **TIGHT)


def test_discount_with_a_factor_for_each_token_and_its_gradient():
    """Both arguments have one; a factor of 0 cuts, and none is divided by."""
    x, g = (draw(sum(LENS), seed).requires_grad_() for seed in (7, 8))
    with torch.no_grad():
        g[2] = 0.0

    def recur(pairs: Tensor) -> Tensor:
        carry, out = torch.zeros((), dtype=pairs.dtype), []
        for t in range(len(pairs) - 1, -1, -1):
            carry = pairs[t, 0] + pairs[t, 1] * carry
            out.append(carry)
        return torch.stack(out[::-1]) if out else pairs[:, 0]

    wanted = torch.cat([recur(part) for part in torch.stack((x, g), 1).split(LENS)])
    lens = torch.tensor(LENS)
    found = discount_by(pad(x, lens), pad(g, lens))[filled(lens)]
    torch.testing.assert_close(found, wanted, **TIGHT)
    weights = draw(sum(LENS), 9)
    for mine, theirs in zip(torch.autograd.grad((found * weights).sum(), (x, g)),
                            torch.autograd.grad((wanted * weights).sum(), (x, g))):
        torch.testing.assert_close(mine, theirs, **TIGHT)
    b = Builder()
    got = one(b, b.seq("discount_by", b.input("x", "token"), b.input("g", "token")), x=x.detach(), g=g.detach())
    torch.testing.assert_close(got, wanted.detach(), **TIGHT)


def middle(x: Tensor) -> Tensor:
    """The mean of the two middle elements, or the middle one twice; 0 of none."""
    s = x.sort().values
    return (s[(len(s) - 1) // 2] + s[len(s) // 2]) / 2 if len(s) else x.sum()


BY_HAND = {  # the reductions, of some elements
    "sum": torch.sum, "mean": torch.mean, "amax": torch.max, "amin": torch.min, "count": len,
    "median": middle,
}


@pytest.mark.parametrize("op", [o.name for o in OPERATORS.values() if o.family == "reduction" and o.arity == 1])
@pytest.mark.parametrize("to", ["seq", "prompt", "batch"])
def test_reductions_of_tokens(op, to):
    b = Builder()
    x = draw(sum(LENS), 8)
    parts = list(x.split(LENS))
    groups = {"seq": parts, "prompt": [torch.cat(parts[i : i + 3]) for i in range(0, 12, 3)], "batch": [x]}[to]
    want = torch.tensor([float(BY_HAND[op](p)) if len(p) else 0.0 for p in groups], dtype=torch.float64)
    got = one(b, b.to(op, b.input("x", "token"), to), x=x)
    torch.testing.assert_close(got.reshape(-1), want, **TIGHT)
    assert got.dim() == (0 if to == "batch" else 1)


def test_prompts_of_a_part_come_in_ascending_order():
    b = Builder()
    rows = [9, 10, 11, 3, 4, 5]
    y = b.to("mean", b.input("s", "seq"), "prompt")
    back = b("sub", b.input("s", "seq"), y)
    s = torch.tensor([9.0, 10, 14, 3, 4, 5], dtype=torch.float64)
    got = compute(b.program(y=y, back=back), {"s": s}, rows)
    assert got["y"].tolist() == [4.0, 11.0] and got["back"].tolist() == [-2.0, -1.0, 3.0, -1.0, 0.0, 1.0]


def test_every_operator_of_the_plan_is_tested():
    families = {family: {o.name for o in OPERATORS.values() if o.family == family} for family in
                ("elementwise", "reduction", "sequence")}
    assert families == {"elementwise": set(PYTHON) | {"and", "or", "not", "where"},
                        "reduction": {*BY_HAND, "quantile"},
                        "sequence": {"next", "prev", "last", "at_end", "cumsum", "discount", "discount_by", "len", "index",
                                     "prompt_len"}}


def test_the_index_of_a_row_counts_from_the_first_of_its_prompt():
    b = Builder()
    index = b.put("index", (), "seq", "R", frame="gen")
    assert one(b, index).tolist() == [0.0, 1.0, 2.0] * 4
    assert compute(b.program(i=index), {}, [1, 3, 5, 8])["i"].tolist() == [1.0, 0.0, 2.0, 2.0]


def test_medians_of_even_odd_and_empty_groups():
    b = Builder()
    x = torch.arange(float(sum(LENS)), dtype=torch.float64).flip(0) ** 2
    got = compute(b.program(m=b.to("median", b.input("x", "token"), "seq"), all=b.to("median", b.input("x", "token"),
                                                                                     "batch")), {"x": x})
    assert got["m"].tolist() == [float(middle(p)) for p in x.split(LENS)] and 0 in LENS
    assert got["all"] == middle(x)


def test_wrong_input_shape_and_missing_index_set_are_refused():
    b = Builder()
    program = b.program(y=b.to("mean", b.input("x", "token"), "batch"))
    with pytest.raises(InternalError, match="input x: shape"):
        compute(program, {"x": draw(3, 1)})
    with pytest.raises(KeyError):
        compute(program, {})
    with pytest.raises(InternalError, match="unknown frame"):
        loss_counts(program, PAIR, [0], {"won": LENS, "lost": LENS})


def test_a_reduction_used_for_each_element_is_no_loss():
    b = Builder()
    x = b.input("x", "token")
    centered = b("sub", x, b.to("mean", x, "batch"))
    program = b.program(loss=b.to("mean", b("mul", centered, centered), "batch"))
    with pytest.raises(InternalError, match="for each element"):
        MinibatchLoss(program, loss_counts(program, GEN, range(12), {"gen": LENS}))


@pytest.mark.parametrize("family, make", [
    ("reduction", lambda b, x: b.put("undeclared", (x,), to="batch")),
    ("reduction", lambda b, x: b.put("undeclared", (x,), "seq", space("gen", "seq"), to="seq")),
    ("sequence", lambda b, x: b.put("undeclared", (x,), "token", "gen"))])
@pytest.mark.parametrize("combine", ["sum", "max", "min", "gather"])
def test_an_operator_that_the_interpreter_does_not_know_is_refused(monkeypatch, family, make, combine):
    operator = Operator("undeclared", family, 1, "", combine=combine if family == "reduction" else "")
    monkeypatch.setitem(OPERATORS, "undeclared", operator)
    b = Builder()
    program = b.program(y=make(b, b.input("x", "token")))
    with pytest.raises(InternalError, match="RL0699.*undeclared"):
        compute(program, {"x": draw(sum(LENS), 1)})


def test_a_loss_cannot_reduce_in_a_way_that_is_not_known(monkeypatch):
    monkeypatch.setitem(OPERATORS, "undeclared", Operator("undeclared", "reduction", 1, "", combine=""))
    b = Builder()
    x = b.input("x", "token")
    program = b.program(loss=b.to("mean", x, "batch"), middle=b.put("undeclared", (x,), to="batch"))
    with pytest.raises(InternalError, match="RL0699.*undeclared"):
        MinibatchLoss(program, loss_counts(program, GEN, range(12), {"gen": LENS}))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_outputs_have_the_type_of_the_inputs(dtype):
    b = Builder()
    x = b.input("x", "token")
    outputs = dict(a=b("mul", x, 0.5), m=b.to("mean", x, "batch"), c=b.to("count", x, "seq"), n=b.len())
    got = compute(b.program(**outputs), {"x": draw(sum(LENS), 1, dtype)})
    assert {y.dtype for y in got.values()} == {dtype}


# ------------------------------------------------------------------------------------------------------ flows


def gae_program() -> Program:
    b = Builder()
    r, v = b.input("r", "token"), b.input("v", "token")
    r = b("add", b.at_end(b.py("judge")), r)
    delta = b("sub", b("add", r, b("mul", 0.99, b.seq("next", v))), v)
    adv = b.seq("discount", delta, b.put("const", value=0.99 * 0.95))
    mean, count = b.to("mean", adv, "batch"), b.to("count", adv, "batch")
    centered = b("sub", adv, mean)
    var = b("div", b.to("sum", b("mul", centered, centered), "batch"), b("max", b("sub", count, 1.0), 1.0))
    white = b("div", centered, b("sqrt", b("add", var, 1e-8)))
    s = b.to("sum", r, "seq")
    group = b("sub", s, b.to("mean", s, "prompt"))
    return b.program(white=white, ret=b("add", adv, v), group=group, best=b.to("amax", s, "batch"),
                     worst=b.to("amin", s, "batch"), per=b.to("mean", b.to("sum", s, "prompt"), "batch"))


def gae_by_hand(r: Tensor, v: Tensor, scores: Tensor, lens: list[int]) -> dict[str, Tensor]:
    advs, sums = [], []
    for rs, vs, score in zip(r.split(lens), v.split(lens), scores):
        rs = rs.clone()
        if len(rs):
            rs[-1] += score
        out, carry = torch.zeros_like(rs), 0.0
        for t in range(len(rs) - 1, -1, -1):
            after = vs[t + 1] if t + 1 < len(rs) else 0.0
            carry = out[t] = rs[t] + 0.99 * after - vs[t] + 0.99 * 0.95 * carry
        advs.append(out)
        sums.append(rs.sum())
    adv, s = torch.cat(advs), torch.stack(sums)
    return {"white": (adv - adv.mean()) / (adv.var() + 1e-8).sqrt(), "ret": adv + v, "best": s.max(), "worst": s.min(),
            "group": s - s.view(-1, 3).mean(1).repeat_interleave(3), "per": s.view(-1, 3).sum(1).mean()}


def test_gae_whitening_and_group_advantage_by_hand():
    r, v, scores = draw(sum(LENS), 1), draw(sum(LENS), 2), draw(12, 3)
    got = compute(gae_program(), {"r": r, "v": v}, call_py=lambda node: scores)
    for name, want in gae_by_hand(r, v, scores, LENS).items():
        torch.testing.assert_close(got[name], want, **TIGHT)


def compute_part(rank: int, shares: list[list[int]]) -> dict[str, Tensor]:
    import torch.distributed as dist

    r, v, scores = draw(sum(LENS), 1), draw(sum(LENS), 2), draw(12, 3)
    rows = shares[rank]
    inputs = {"r": tokens_of(r, LENS, rows), "v": tokens_of(v, LENS, rows)}
    out = run_compute(gae_program(), inputs, {"gen": view("gen", rows, LENS)}, GEN, dist.group.WORLD,
                      lambda node: scores[rows])
    return {k: x.tolist() for k, x in out.items()}


@pytest.mark.parametrize("shares", [[[0, 1, 2, 9, 10, 11], [3, 4, 5, 6, 7, 8]], [list(range(12)), []]])
def test_two_ranks_find_the_same(shares):
    r, v, scores = draw(sum(LENS), 1), draw(sum(LENS), 2), draw(12, 3)
    whole = gae_by_hand(r, v, scores, LENS)
    for rank, got in enumerate(run_world(2, compute_part, shares)):
        rows = shares[rank]
        for name in ("best", "worst", "per"):
            assert math.isclose(got[name], float(whole[name]), rel_tol=1e-12)
        for name in ("white", "ret"):
            torch.testing.assert_close(torch.tensor(got[name], dtype=torch.float64),
                                       tokens_of(whole[name], LENS, rows), **TIGHT)
        torch.testing.assert_close(torch.tensor(got["group"], dtype=torch.float64), whole["group"][rows], **TIGHT)


def test_no_rows_and_only_empty_sequences():
    got = compute(gae_program(), {"r": draw(0, 1), "v": draw(0, 1)}, [], call_py=lambda node: draw(0, 1))
    assert got["white"].shape == got["group"].shape == (0,) and got["best"] == got["per"] == 0
    got = compute(gae_program(), {"r": draw(0, 1), "v": draw(0, 1)}, lens=[0] * 12, call_py=lambda node: draw(12, 1))
    assert got["white"].shape == (0,) and torch.equal(got["group"], torch.zeros(12, dtype=torch.float64))


# ----------------------------------------------------------------------------------------------------- losses


def ppo_program() -> Program:
    b = Builder()
    lp, old, adv = b.input("lp", "token"), b.input("old", "token"), b.input("adv", "seq")
    beta = b.input("beta", "batch")
    ratio = b("exp", b("sub", lp, old))
    clipped = b("min", b("max", ratio, 0.8), 1.2)
    minus = b("neg", adv)
    pg = b.to("mean", b.to("mean", b("max", b("mul", minus, ratio), b("mul", minus, clipped)), "seq"), "batch")
    kl = b.to("mean", b("sub", old, lp), "batch")
    loss = b("add", b("sub", pg, b("mul", beta, kl)), 7.0)
    out = b("gt", b("abs", b("sub", ratio, 1.0)), 0.2)
    square = b.to("mean", b("mul", ratio, ratio), "batch")
    return b.program(loss=loss, clip=b.to("mean", out, "batch"), kl=kl, rms=b("sqrt", square),
                     top=b.to("amax", ratio, "batch"), low=b.to("amin", ratio, "batch"), n=b.to("count", lp, "batch"),
                     total=b.to("sum", b.len(), "batch"), middle=b.to("median", ratio, "batch"),
                     most=b.put("quantile", (b.to("sum", lp, "seq"), b("abs", beta)), to="batch"))


def ppo_by_hand(lp: Tensor, old: Tensor, adv: Tensor, beta: float, lens: list[int]) -> dict[str, Tensor]:
    ratio = (lp - old).exp()
    wide = adv.repeat_interleave(torch.tensor(lens))
    pg = torch.max(-wide * ratio, -wide * ratio.clamp(0.8, 1.2))
    per_seq = torch.stack([p.mean() if len(p) else p.sum() for p in pg.split(lens)])
    return {"loss": per_seq.mean() - beta * (old - lp).mean() + 7.0, "clip": ((ratio - 1).abs() > 0.2).double().mean(),
            "kl": (old - lp).mean(), "rms": (ratio**2).mean().sqrt(), "top": ratio.max(), "low": ratio.min(),
            "n": torch.tensor(float(sum(lens))), "total": torch.tensor(float(sum(lens))), "middle": ratio.quantile(0.5),
            "most": torch.stack([p.sum() for p in lp.split(lens)]).quantile(beta)}


def ppo_inputs() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    n = sum(LENS)
    return draw(n, 1) * 0.3, draw(n, 2) * 0.3, draw(12, 3), torch.tensor(0.1, dtype=torch.float64)


def run_cuts(cuts: list[list[int]], rows: list[int]) -> tuple[MinibatchLoss, Tensor, Tensor]:
    """The run, the sum of the shares and the gradient after the micro-batches `cuts` of a minibatch `rows`."""
    lp, old, adv, beta = ppo_inputs()
    lp.requires_grad_()
    program = ppo_program()
    run = MinibatchLoss(program, loss_counts(program, GEN, rows, {"gen": LENS}))
    total = torch.zeros((), dtype=torch.float64)
    for cut in cuts:
        share = run({"lp": tokens_of(lp, LENS, cut), "old": tokens_of(old, LENS, cut), "adv": adv[cut], "beta": beta},
                    {"gen": view("gen", cut, LENS)})
        share.backward()
        total += share.detach()
    return run, total, lp.grad if lp.grad is not None else torch.zeros_like(lp)


def random_cuts(rows: list[int], seed: int) -> list[list[int]]:
    draw_ = random.Random(seed)
    cuts: list[list[int]] = [[] for _ in range(draw_.randint(1, 5))]
    for r in draw_.sample(rows, len(rows)):
        draw_.choice(cuts).append(r)
    return cuts


@pytest.mark.parametrize("seed", range(8))
def test_any_cut_gives_the_loss_its_gradient_and_its_metrics(seed):
    rows = sorted(random.Random(seed).sample(range(12), 12 if seed % 2 else 7))
    run, total, gradient = run_cuts(random_cuts(rows, seed), rows)
    lp, old, adv, beta = ppo_inputs()
    lp.requires_grad_()
    lens = [LENS[r] for r in rows]
    want = ppo_by_hand(tokens_of(lp, LENS, rows), tokens_of(old, LENS, rows), adv[rows], float(beta), lens)
    want["loss"].backward()
    torch.testing.assert_close(gradient, lp.grad, **TIGHT)
    want = {name: float(x.detach()) for name, x in want.items()}
    assert math.isclose(float(total), want["loss"] - 7.0, rel_tol=1e-12)
    got = run.finish(run.partials())
    assert set(got) == set(want)
    for name in want:
        assert math.isclose(got[name], want[name], rel_tol=1e-12), name


def loss_part(rank: int, shares: list[list[list[int]]]) -> tuple[dict[str, float], list[float]]:
    import torch.distributed as dist

    from rldsl.runtime.interpreter.train_event import minibatch_metrics

    run, _, gradient = run_cuts(shares[rank], sorted(r for cuts in shares for cut in cuts for r in cut))
    dist.all_reduce(gradient)
    return minibatch_metrics([run], True, dist.group.WORLD, torch.device("cpu"))[0], gradient.tolist()


def test_minibatches_of_different_sizes_have_their_own_metrics():
    from rldsl.runtime.interpreter.train_event import minibatch_metrics

    each = [[0, 2, 5], [4, 6, 7, 9, 11], [1]]  # the last has no token
    runs = [run_cuts([rows[:1], rows[1:]], rows)[0] for rows in each]
    found = minibatch_metrics(runs, True, None, torch.device("cpu"))
    assert found == [run.finish(run.partials()) for run in runs]
    assert len({m["middle"] for m in found}) == 3 and found[2]["middle"] == 0


@pytest.mark.parametrize("shares", [[[[0, 5], [7, 2, 8]], [[1, 3, 4, 6], [9], [10, 11]]],
                                    [[[r] for r in range(12)], []]])
def test_ranks_add_up_even_one_without_micro_batches(shares):
    rows = list(range(12))
    run, _, gradient = run_cuts([rows], rows)
    want = run.finish(run.partials())
    for got, grad in run_world(2, loss_part, shares):
        assert all(math.isclose(got[k], want[k], rel_tol=1e-12) for k in want)
        torch.testing.assert_close(torch.tensor(grad, dtype=torch.float64), gradient, **TIGHT)


def test_dpo_over_the_two_sides_of_pairs():
    b = Builder()
    sums = [b.to("sum", b("sub", b.input(f, "token", f), b.input(f"ref_{f}", "token", f)), "seq", f) for f in PAIR]
    margin = b("mul", 0.1, b("sub", *sums))
    b.frame = "won"
    program = b.program(loss=b("neg", b.to("mean", b("logsigmoid", margin), "batch")),
                        accuracy=b.to("mean", b("gt", margin, 0.0), "batch"))
    lens = {"won": LENS, "lost": LENS[::-1]}
    data = {n: draw(sum(LENS), i) * 3 for i, n in enumerate(("won", "lost", "ref_won", "ref_lost"))}
    fresh = {f: data[f].requires_grad_() for f in PAIR}
    run = MinibatchLoss(program, loss_counts(program, PAIR, range(12), lens))
    for cut in random_cuts(list(range(12)), 3):
        inputs = {n: tokens_of(x, lens[n.removeprefix("ref_")], cut) for n, x in data.items()}
        run(inputs, {f: view(f, cut, lens[f]) for f in PAIR}).backward()
    got = {f: x.grad.clone() for f, x in fresh.items()}
    for x in fresh.values():
        x.grad = None
    per = {f: torch.stack([p.sum() for p in (data[f] - data[f"ref_{f}"]).split(lens[f])]) for f in PAIR}
    h = 0.1 * (per["won"] - per["lost"])
    loss = -torch.nn.functional.logsigmoid(h).mean()
    loss.backward()
    for f in PAIR:
        torch.testing.assert_close(got[f], fresh[f].grad, **TIGHT)
    done = run.finish(run.partials())
    assert math.isclose(done["loss"], float(loss.detach()), rel_tol=1e-12)
    assert done["accuracy"] == float((h > 0).double().mean())


def test_each_side_of_a_pair_has_its_own_lengths():
    b = Builder()
    last = {f: b.seq("last", b.input(f, "token", f)) for f in PAIR}
    end = {f"end_{f}": b.at_end(last[f], f) for f in PAIR}
    lens = {"won": LENS, "lost": LENS[::-1]}
    data = {f: draw(sum(LENS), i) for i, f in enumerate(PAIR)}
    got = run_compute(b.program(**last, **end, gap=b("sub", last["won"], last["lost"])), data,
                      {f: view(f, list(range(12)), lens[f]) for f in PAIR}, PAIR, None, None)
    for f in PAIR:
        assert got[f].tolist() == [p[-1].item() if len(p) else 0.0 for p in data[f].split(lens[f])]
        assert [p[-1].item() if len(p) else 0.0 for p in got[f"end_{f}"].split(lens[f])] == got[f].tolist()
    assert torch.equal(got["gap"], got["won"] - got["lost"])


def test_gradients_of_sequence_operators():
    b = Builder()
    x = b.input("x", "token")
    parts = [b.seq("next", x), b.seq("prev", x), b.seq("cumsum", x), b.seq("discount", x, b.put("const", value=0.9)),
             b.at_end(b.seq("last", x)), b("mul", b.to("amax", x, "seq"), x), b("mul", b.to("amin", x, "seq"), x)]
    weights = [b.input(f"w{i}", "token") for i in range(len(parts))]
    total = parts[0]
    for part, weight in zip(parts, weights):
        total = b("add", total, b("mul", part, weight))
    program = b.program(loss=b.to("mean", total, "batch"))
    given = {f"w{i}": draw(sum(LENS), i) for i in range(len(parts))}

    def loss(value: Tensor) -> Tensor:
        return MinibatchLoss(program, loss_counts(program, GEN, range(12), {"gen": LENS}))(
            {"x": value, **given}, {"gen": view("gen", list(range(12)), LENS)})

    assert torch.autograd.gradcheck(loss, (draw(sum(LENS), 20).requires_grad_(),))


def test_an_empty_micro_batch_has_a_gradient_of_nothing():
    run, total, gradient = run_cuts([[]], [1, 8])
    assert total == 0 and not gradient.any() and run.finish(run.partials())["n"] == 0


def test_stop_gradient_in_a_loss():
    b = Builder()
    x = b.input("x", "token")
    program = b.program(loss=b.to("mean", b("mul", b("stop_gradient", x), x), "batch"))
    value = draw(sum(LENS), 1).requires_grad_()
    run = MinibatchLoss(program, loss_counts(program, GEN, range(12), {"gen": LENS}))
    run({"x": value}, {"gen": view("gen", list(range(12)), LENS)}).backward()
    torch.testing.assert_close(value.grad, value.detach() / sum(LENS), **TIGHT)
