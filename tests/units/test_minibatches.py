"""What a loss is with several minibatches, against the whole batch: a total of one never meets one of the other."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from random import Random

import pytest
import torch

from rldsl.diag import Failure
from rldsl.runtime.interpreter.minibatch_loss import MinibatchLoss, loss_counts
from tests.library import harness
from tests.library.harness import Batch, Given, compile_loss

PARTS = 4
BATCH = Batch({"gen": [3] * 16}, 2)  # equal lengths, so that minibatches have equal numbers of tokens
DATA = "n=count(w), t=sum(w), m=mean(w), w=w, u=w / count(w)"  # of the flow, where they cover the whole batch
HEAD = "loss own(logprobs: token; n, t, m, w: seq, u: seq, c = 2) {\n  return %s\n}\n"


def minibatch_losses(text: str, parts: int) -> list[float]:
    """The loss of each of `parts` equal minibatches; its data are computed over the whole batch."""
    draw = torch.Generator().manual_seed(3)
    w = Given("seq", "gen", torch.rand(BATCH.rows, generator=draw, dtype=torch.float64) + 0.5)
    lp = Given("token", "gen", -torch.rand(sum(BATCH.lens["gen"]), generator=draw, dtype=torch.float64))
    code, inputs = compile_loss("", f"own({DATA})", BATCH, "causal_lm", HEAD % text, {"w": w})
    known = inputs | {"logprobs": lp}
    found = []
    for i in range(parts):
        rows = range(i, BATCH.rows, parts)
        run = MinibatchLoss(code, loss_counts(code, BATCH.frames, rows, BATCH.lens))
        run({n: harness._part(BATCH, known[n], rows) for n in code.inputs()}, harness._views(BATCH, rows))
        found.append(run.finish(run.partials())["loss"])
    return found


def refusal(text: str) -> str:
    """The code with which a loss is refused; "" where it passes."""
    try:
        minibatch_losses(text, 1)
    except Failure as failure:
        [code] = {d.code for d in failure.diagnostics}
        return code
    return ""


@pytest.mark.parametrize("text", [
    "sum(logprobs) / n", "sum(logprobs) / t", "sum(logprobs) * n", "n * sum(logprobs)", "sum(logprobs * u)",
    "sum(logprobs / n)", "sum(logprobs * w / t)", "sum(u * sum(logprobs by seq))", "sum(logprobs) * (1 / n)",
    "sum(logprobs) / (n + 1)", "sum(logprobs) / max(t, 1)", "sum(logprobs) / sqrt(n)", "sum(logprobs) / n ** 2",
    "sum(logprobs) / (m + n)", "sum(logprobs) + n", "mean(logprobs) + sum(logprobs) / n",
    "where(m > 1, sum(logprobs), sum(logprobs)) / n", "-sum(logprobs) / clip(n, 1, 100)",
    "stop_gradient(sum(logprobs)) / n + mean(logprobs)", "sum(logprobs) / abs(n)", "sum(logprobs) / exp(n)",
])
def test_totals_of_a_minibatch_and_of_the_whole_batch_do_not_meet(text: str) -> None:
    assert refusal(text) == "RL0218"


@pytest.mark.parametrize("text", [
    "mean(logprobs)", "mean(logprobs * w) / m", "mean(logprobs) * t / n", "mean(logprobs * w / m)", "mean(logprobs) / n",
    "mean(logprobs * u) * n", "mean(sum(logprobs by seq)) * (n / t)", "mean(logprobs / n) * t", "mean(logprobs * u)",
    "where(n > 3 sequences, mean(logprobs), 2 * mean(logprobs))",
])
def test_means_are_the_same_for_any_number_of_minibatches(text: str) -> None:
    assert sum(minibatch_losses(text, PARTS)) / PARTS == pytest.approx(minibatch_losses(text, 1)[0], rel=1e-12)


def test_a_plain_sum_is_the_sum_over_the_minibatch() -> None:
    assert sum(minibatch_losses("sum(logprobs) / c", PARTS)) == pytest.approx(minibatch_losses("sum(logprobs) / c", 1)[0])


def test_the_help_does_not_propose_the_division_that_is_refused() -> None:
    with pytest.raises(Failure) as caught:
        minibatch_losses("sum(logprobs) / t", 1)
    [d] = caught.value.diagnostics
    assert "`mean(x)`" in d.help and "ratio" in d.help
    assert not any(f"{a} / {b}" in d.help for a in ("sum(logprobs)", "x") for b in ("n", "t"))


# ------------------------------------------------------------------------------------------ generated losses


@dataclass(frozen=True)
class Made:
    """One generated term: its text, whether it is a sum, and whether a total of the whole batch enters such a sum."""

    text: str
    total: bool
    meets: bool


def term(draw: Random) -> Made:
    """A reduction of log-probabilities times data, scaled by numbers of the flow from the left to the right."""
    inner, power = "logprobs", 0
    for _ in range(draw.randrange(3)):
        text, p = draw.choice([(" * w", 0), (" * u", -1), (" / n", -1), (" * m", 0), (" / t", -1), (" * n", 1)])
        inner, power = inner + text, power + p
    total = draw.random() < 0.5
    text, meets = f"{'sum' if total else 'mean'}({inner})", total and power != 0
    for _ in range(draw.randrange(4)):
        more, p = draw.choice([(" * n", 1), (" / t", -1), (" * m", 0), (" / c", 0), (" * (n / t)", 0), (" / m", 0)])
        text, power = text + more, power + p
        meets |= total and power != 0
    return Made(text, total, meets)


def losses(count: int) -> Iterator[list[Made]]:
    draw = Random(11)
    for _ in range(count):
        kind = [term(draw) for _ in range(draw.randint(1, 2))]
        if len({m.total for m in kind}) == 1:  # a sum and a mean have no common ratio between 1 and k minibatches
            yield kind


@pytest.mark.thorough
def test_generated_losses_that_pass_have_the_mean_of_their_minibatches() -> None:
    passed = refused = 0
    for terms in losses(300):
        text = " + ".join(t.text for t in terms)
        if any(t.meets for t in terms):
            assert refusal(text) == "RL0218", text
            refused += 1
            continue
        mean, whole = sum(minibatch_losses(text, PARTS)) / PARTS, minibatch_losses(text, 1)[0]
        assert mean * (PARTS if terms[0].total else 1) == pytest.approx(whole, rel=1e-9), text
        passed += 1
    assert passed > 50 and refused > 50
