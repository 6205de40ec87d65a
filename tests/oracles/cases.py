"""The numbers on which the rows of `rows.py` are compared, and what the library makes of them.

In: a row and the name of a batch. Out: a case as the servers read it, and the same case through the compiled language
(`tests/library/harness.py`). Everything is float64 and follows from the names alone.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from tests.library.harness import Batch, Given, run_fn, run_loss
from tests.library.test_algorithms_page import EXPORTS, LOSSES
from tests.oracles.rows import Row

W, L = "pair.chosen", "pair.rejected"
SDFT = ("sdft", "sdft_sampled")
WORD = 3  # the word that every response consists of, as in `trl_trainers.py`
JUMPS = (0.0, 30.0, -30.0, 15.0, -15.0, 1.5, -1.5, 0.1, -0.1, 21.0, -21.0)  # log-ratios of "far"
REWARDS = {  # of sequences; all others are drawn
    "ragged 1": [0.0, 0, 0, 2, 2, 2, 12.5, 0, -3, 0, -11, 1.5],  # two groups without variance, some beyond ±10
    "far": [25.0, -30, 3, 0, 9.75, -10.25],
}
BATCHES: dict[str, Batch] = {
    "ragged 1": Batch({"gen": [3, 9, 1, 4, 4, 7, 2, 8, 5, 6, 1, 9]}, n=3),
    "ragged 2": Batch.random(seed=2, prompts=5, n=3),
    "pairs of answers": Batch.random(seed=3, prompts=5, n=2),
    "alone": Batch.random(seed=4, prompts=6, n=1),
    "far": Batch({"gen": [1, 12, 3, 7, 2, 9]}, n=3),
    "even": Batch({"gen": [5] * 6}, n=3),
    "long": Batch({"gen": [100, 384, 390, 450, 512, 1]}, n=3),
    "eight": Batch.random(seed=5, prompts=4, n=2),
    "pairs 1": Batch.pairs(1, 8), "pairs 2": Batch.pairs(2, 7), "one pair": Batch.pairs(3, 1),
    "seven pairs": Batch.pairs(6, 7),
    "vocabulary": Batch({"gen": [3, 9, 1, 4, 4, 7]}, n=3, width=6),  # at each token values of 6 words, which are all
}
NEAR = {"near 0.1": 0.1, "near 6": 6.0, "near -60": -60.0}  # the mean of old - ref, where adaptive_kl is not clipped
BATCHES |= {name: Batch({"gen": [4, 5, 6, 4, 5, 6, 5, 5]}, n=2) for name in NEAR}
SIZES = (2, 3, 1, 1)  # pairs of each prompt of "seven pairs"
PAIRED = ("chosen", "rejected")
PAIR_BATCHES = {name for name, b in BATCHES.items() if W in b.lens}


@dataclass(frozen=True)
class Numbers:
    """What a side computes: one flat list for each value that the call returns, and gradients by fresh name."""

    values: list[list[float]]
    grads: dict[str, list[float]]


def case_id(row: Row, batch: str) -> str:
    return f"{row.system} | {row.call} | {row.oracle} {sorted(row.options)} | {batch}"


def values_of(row: Row, name: str) -> dict[str, Given | float]:
    """Every name that a call may have, on one batch."""
    b = BATCHES[name]
    given = _pair_values(b) if W in b.lens else _policy_values(b, name)
    if row.oracle in ("clip_cov_loss", "kl_cov_loss"):
        given["chosen"] = _chosen(row, given)
    if row.call.startswith("wpo("):
        weights = run_fn("std.wpo", "wpo_weight(chosen, sw) * wpo_weight(rejected, sl)", b, **given)
        assert isinstance(weights, Tensor)
        given["wt"] = Given("seq", W, weights)
    return given


def _pair_values(b: Batch) -> dict[str, Given | float]:
    given: dict[str, Given | float] = {
        "chosen": b.logprobs(1, W), "rejected": b.logprobs(2, L), "rw": b.logprobs(11, W), "rl": b.logprobs(12, L),
        "m": b.seqs(14), "pairs": float(b.rows)}
    for name, side, policy in (("sw", W, "chosen"), ("sl", L, "rejected")):  # sums of squared probabilities
        given[name] = Given("token", side, torch.exp(2 * given[policy].data) + 0.1 * b.tokens(15, side).data.sigmoid())
    if b.rows == sum(SIZES):
        given["wt"] = b.given("seq", [1 / size for size in SIZES for _ in range(size)])
    return given


def _policy_values(b: Batch, name: str) -> dict[str, Given | float]:
    x = b.logprobs(10)
    token = lambda data: Given("token", "gen", data)  # noqa: E731
    given: dict[str, Given | float] = {"x": x, "beta": 0.1}
    if name == "far":
        at = torch.arange(x.data.numel())
        jumps = torch.tensor(JUMPS, dtype=torch.float64)
        sign = torch.where(at // len(JUMPS) % 2 == 0, 1.0, -1.0).double()
        given |= {"old": token(x.data - jumps[at % len(JUMPS)]),
                  "ref": token(x.data - jumps[(at * 3 + 1) % len(JUMPS)]),
                  "adv": token(sign * (1 + b.tokens(20).data.abs()))}
    else:
        given |= {"old": token(x.data + 0.5 * b.tokens(11).data), "ref": token(x.data + 0.5 * b.tokens(12).data),
                  "adv": b.tokens(20)}
    given["lp"] = token(x.data + 0.2 * b.tokens(13).data)
    if name in NEAR:
        old = given["old"]
        assert isinstance(old, Given)
        given["ref"] = token(old.data - NEAR[name] * (1 + 0.05 * b.tokens(12).data))
    given |= {v: b.tokens(21 + i) for i, v in enumerate(("v", "ret", "rt"))}
    drawn = 3 * b.seqs(30).data
    drawn[0] = 0.0
    given["r"] = b.given("seq", REWARDS.get(name, drawn))
    given["r2"] = b.seqs(31)
    given["index"] = b.given("seq", [float(i % b.n) for i in range(b.rows)])
    given["gen.finished"] = Given("seq", "gen", torch.arange(b.rows) % 2 == 0)
    given["h"] = token(b.tokens(33).data.abs())
    given["sq"] = token(b.tokens(34).data.sigmoid())
    if b.width:  # log-probabilities of student and teacher
        given |= {v: Given("entry", "gen", b.alternatives(40 + i, 2.0).data.view(-1, b.width).log_softmax(-1).flatten())
                  for i, v in enumerate(("z", "d"))}
    return given | {"y": b.logprobs(32), "label": b.given("seq", [float(i % 3 != 1) for i in range(b.rows)])}


def _chosen(row: Row, given: dict[str, Given | float]) -> Given:
    """The tokens that verl's losses pick by the covariance of the fresh log-probability and the advantage."""
    x, old, adv = (given[n].data for n in ("x", "old", "adv"))  # type: ignore[union-attr]
    covariance = (x - x.mean()) * (adv - adv.mean())
    options = row.options["policy_loss"]
    picked = torch.zeros_like(x)
    if row.oracle == "kl_cov_loss":
        picked[covariance.topk(int(len(x) * options["kl_cov_ratio"])).indices] = 1
    else:  # every token between the bounds that is not clipped already
        ratio = (x - old).exp()
        clipped = -adv * ratio.clamp(0.8, 1.2) > -adv * ratio
        picked[(covariance > options["clip_cov_lb"]) & (covariance < options["clip_cov_ub"]) & ~clipped] = 1
    return Given("token", "gen", picked)


def fresh_of(row: Row) -> tuple[str, ...]:
    """The names of the values that the gradient is taken of: none for a value of the flow."""
    head = row.call.partition("(")[0]
    if head not in LOSSES:
        return ()
    return PAIRED if row.batches[0] in PAIR_BATCHES else ("z",) if head in ("gkd", *SDFT) else ("x",)


def read_by(row: Row, name: str) -> dict[str, Given | float]:
    """The values that the call names, and the fresh ones."""
    arguments = re.sub(r"\b\w+=", "", row.call)  # without the names of options
    words = set(re.findall(r"\bgen\.finished\b|\b\w+\b", arguments)) | set(fresh_of(row))
    found = {n: v for n, v in values_of(row, name).items() if n in words}
    if row.call.startswith("grpo_entropy("):
        found["h"] = values_of(row, name)["h"]
    if row.call.startswith("wpo("):
        found |= {n: v for n, v in values_of(row, name).items() if n in ("sw", "sl")}
    if row.oracle == "sdft":  # the system makes `at` and `teacher` of all log-probabilities
        found = {n: v for n, v in values_of(row, name).items() if n in ("z", "d", "old")}
    if row.call.startswith("reward_model"):  # scores of sequences, not of tokens
        b = BATCHES[name]
        found |= {"chosen": b.seqs(1), "rejected": Given("seq", W, b.seqs(2).data)}
    return found


def case(row: Row, name: str) -> dict[str, Any]:
    """As a server reads it. Numbers that are no values of a batch stand in the options."""
    b = BATCHES[name]
    values = {n: {"level": v.level, "frame": v.frame, "data": v.data.double().tolist()}
              for n, v in read_by(row, name).items() if isinstance(v, Given)}
    return {"id": case_id(row, name), "oracle": row.oracle, "options": row.options, "lens": b.lens, "n": b.n, "width": b.width,
            "values": values, "fresh": list(fresh_of(row))}


def _distilled(row: Row, name: str) -> Numbers:
    """`sdft`: at the student's k most likely words, or at the sampled one, as TRL finds them."""
    b, given = BATCHES[name], read_by(row, name)
    z, d = (g.data.view(-1, b.width) for n in ("z", "d") if isinstance(g := given[n], Given))
    ids = z.topk(row.options.get("distillation_topk", b.width)).indices
    sampled = Given("token", "gen", z[:, WORD])
    leaves = {"logprobs": sampled}
    values: dict[str, Given | float] = {"old": given["old"], "teacher": Given("token", "gen", d[:, WORD])}
    if not row.call.startswith("sdft_sampled("):
        leaves["logprobs_at"] = Given("entry", "gen", z.gather(1, ids).flatten())
        values = {"old": given["old"]} | dict.fromkeys(("d", "at"), Given("entry", "gen", d.gather(1, ids).flatten()))
    words = set(re.findall(r"\w+", row.call))
    done = run_loss("std.sdft", row.call, replace(b, width=ids.shape[1]), leaves,
                    **{n: v for n, v in values.items() if n in words})  # type: ignore[arg-type]
    grad = torch.zeros_like(z)
    grad[:, WORD] += done.grads["logprobs"]
    if "logprobs_at" in leaves:
        grad.scatter_add_(1, ids, done.grads["logprobs_at"].view(len(z), -1))
    return Numbers([[done.loss]], {"z": _of_logits(grad, z).flatten().tolist()})


def ours(row: Row, name: str) -> Numbers:
    """The same case through the library."""
    if row.oracle == "sdft":
        return _distilled(row, name)
    b, given, fresh = BATCHES[name], read_by(row, name), fresh_of(row)
    modules = " ".join(sorted({f"std.{EXPORTS[w]}" for w in EXPORTS if re.search(rf"\b{w}\(", row.call)})) or "std.ppo"
    if not fresh:
        got = run_fn(modules, row.call, b, **given)
        return Numbers([_flat(x) for x in (got if isinstance(got, tuple) else (got,))], {})
    head = {"value_clip": "value_model", "reward_model": "reward_model"}.get(row.call.partition("(")[0], "causal_lm")
    names = {"x": "values" if head == "value_model" else "logprobs", "z": "logprobs_at", "chosen": "chosen", "rejected": "rejected"}
    leaves = {names[n]: given.pop(n) for n in fresh}
    if row.call.startswith("grpo_entropy("):  # an output, too, from which no gradient comes
        leaves["entropy"] = given.pop("h")
    done = run_loss(modules, row.call, b, leaves, head=head, **given)  # type: ignore[arg-type]
    grads = {n: done.grads[names[n]] for n in fresh}
    if "z" in fresh:
        grads["z"] = _of_logits(grads["z"].view(-1, b.width), leaves["logprobs_at"].data.view(-1, b.width)).flatten()
    return Numbers([[done.loss]], {n: grad.tolist() for n, grad in grads.items()})


def _of_logits(grad: Tensor, logprobs: Tensor) -> Tensor:
    """The gradient of logits, from that of their log-softmax."""
    return grad - logprobs.exp() * grad.sum(-1, keepdim=True)


def _flat(x: Tensor) -> list[float]:
    return x.double().reshape(-1).tolist()


def difference(one: list[float], other: list[float]) -> float:
    """The largest, absolute below 1 and relative above it; infinite where one side has more numbers than the other."""
    if len(one) != len(other):
        return float("inf")
    a, b = torch.tensor(one, dtype=torch.float64), torch.tensor(other, dtype=torch.float64)
    if not len(a):
        return 0.0
    found = float(((a - b).abs() / b.abs().clamp(min=1)).max())
    return found if found == found else float("inf")
