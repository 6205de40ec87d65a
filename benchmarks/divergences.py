"""Divergences between whole distributions, forward and backward: memory and time next to full tables.

    python -m benchmarks.divergences [--large]      # --large: more words, which takes some gigabytes

Ours: the loss `gkd` of `std.gkd`, compiled, and evaluated as a `train` call does, in chunks at the output embeddings of
student and teacher (`backends/torch/model/over_vocabulary.py`). Theirs: as trainers on transformers write it: the
logits of both models for all tokens, `log_softmax`, and `kl_div` of the complete tables, twice with a mixture for the
generalized Jensen-Shannon divergence. memory: the most bytes that exist at once beyond what goes in and what comes out
(gradients of the student's hidden states and weight), every storage that torch makes counted while it lives, over one
table of all tokens in float32 (gate 0.05). time: CPU seconds of ours over theirs, the least of two turns each, taken
alternately (no gate; the logits of both models are made twice, so there are 6 products for 4 of theirs, a ratio of 1.5
where products decide). Values and gradients are compared, too.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from rldsl.backends.torch.model.over_vocabulary import Readout, over_vocabulary
from rldsl.memory.logits import vocabulary_rows_at_once
from rldsl.plan.entries import EntrySpace
from rldsl.runtime.backend import SINGLE_RANK
from rldsl.runtime.interpreter.minibatch_loss import MinibatchLoss, loss_counts
from rldsl.runtime.interpreter.ragged_index import FrameRows, RaggedIndex
from rldsl.runtime.interpreter.vocabulary import split
from tests.frames import frame
from tests.library.over_vocabulary import SPACE, vocabulary_loss
from tests.memory.accounting import Storages

# (tokens, words, size of hidden states)
CASES = ((4096, 8192, 64), (4096, 16384, 32))
LARGE = ((8192, 50304, 64),)
BETAS = {0.0: "forward KL", 1.0: "reverse KL", 0.5: "JSD"}
GATE = 0.05


class Given(NamedTuple):
    """Hidden states and output embeddings of two models; those of the student have a gradient."""

    hidden: Tensor  # [tokens, size]
    weight: Tensor  # [words, size]
    their_hidden: Tensor  # [tokens, size]
    their_weight: Tensor  # [words, size]


Loss = Callable[[Given], Tensor]


def ours(beta: float) -> Loss:
    program = vocabulary_loss("std.gkd", f"gkd(teacher=teacher, beta={beta})")
    part = split(program, SPACE)
    if part is None:
        raise ValueError("the loss is not about whole distributions")

    def loss(x: Given) -> Tensor:
        count, words = len(x.hidden), len(x.weight)
        frames = {"gen": frame("gen", "gen", "prompt", 1, 1, "d", 8, count)}
        entries = {"gen.vocabulary": EntrySpace("gen", 0)}
        rows = {"gen": FrameRows(torch.tensor([0]), torch.tensor([0]), torch.tensor([count]))}
        chunk = vocabulary_rows_at_once(words, count, "cpu")
        made = part.inputs(
            lambda terms, given: over_vocabulary(
                Readout(x.hidden, x.weight), [Readout(x.their_hidden, x.their_weight)], terms, given, 1.0, SINGLE_RANK,
                chunk), "logprobs_at", ["teacher"], {}, RaggedIndex(rows, frames, entries))
        return MinibatchLoss(part.rest, loss_counts(part.rest, frames, [0], {"gen": [count]}, entries))(made, rows)

    return loss


def theirs(beta: float) -> Loss:
    def loss(x: Given) -> Tensor:
        student = (x.hidden @ x.weight.T).float().log_softmax(-1)
        with torch.no_grad():
            teacher = (x.their_hidden @ x.their_weight.T).float().log_softmax(-1)
        if beta in (0.0, 1.0):
            pair = (student, teacher) if beta == 0 else (teacher, student)
            return F.kl_div(*pair, reduction="sum", log_target=True) / len(student)
        mixture = torch.logaddexp(student + torch.tensor(1 - beta).log(), teacher + torch.tensor(beta).log())
        both = (beta * F.kl_div(mixture, teacher, reduction="sum", log_target=True)
                + (1 - beta) * F.kl_div(mixture, student, reduction="sum", log_target=True))
        return both / len(student)

    return loss


def given(tokens: int, words: int, size: int) -> Given:
    draw = torch.Generator().manual_seed(0)
    made = [torch.randn(n, size, generator=draw) for n in (tokens, words, tokens, words)]
    made = [x / size**0.5 if len(x) == words else x for x in made]
    return Given(*(x.requires_grad_(i < 2) for i, x in enumerate(made)))


def peak(loss: Loss, x: Given) -> int:
    """Bytes beyond what goes in and comes out."""
    x.hidden.grad = x.weight.grad = None
    held = [t.untyped_storage() for t in x]
    with Storages() as storages:
        for one in held:
            storages.see(one)
        loss(x).backward()
    return storages.most - sum(s.nbytes() for s in held) - x.hidden.nbytes - x.weight.nbytes


def spent(loss: Loss, x: Given) -> tuple[float, float, Tensor]:
    """CPU seconds, value, gradient of the weight."""
    x.hidden.grad = x.weight.grad = None
    begin = time.process_time()
    value = loss(x)
    value.backward()
    seconds = time.process_time() - begin
    if x.weight.grad is None:
        raise ValueError("the loss has no gradient")
    return seconds, float(value.detach()), x.weight.grad.clone()


def main(arguments: list[str]) -> int:
    """The number of gates that are missed."""
    torch.set_num_threads(1)
    missed = 0
    print(f"{'tokens':>8}{'words':>8}  {'divergence':<12}{'MiB':>8}{'/ table':>9}{'theirs':>8}{'time':>7}"
          f"{'differ':>10}", flush=True)
    for case in CASES + (LARGE if "--large" in arguments else ()):
        x, table = given(*case), 4 * case[0] * case[1]
        for beta, name in BETAS.items():
            mine, other = ours(beta), theirs(beta)
            memory, full = (peak(loss, x) / table for loss in (mine, other))
            turns = [(spent(mine, x), spent(other, x)) for _ in range(2)]
            (_, a, grad), (_, b, expected) = turns[0]
            differ = max(abs(a - b) / abs(b), float((grad - expected).norm() / expected.norm()))
            ratio = min(own[0] for own, _ in turns) / min(its[0] for _, its in turns)
            wrong = memory > GATE or differ > 1e-4
            missed += wrong
            print(f"{case[0]:8}{case[1]:8}  {name:<12}{memory * table / 2**20:8.1f}{memory:9.3f}{full:8.2f}{ratio:7.2f}"
                  f"{differ:10.1e}{'  MISSED' if wrong else ''}", flush=True)
    print(f"memory: gate {GATE} of one table in float32; {missed} missed")
    return missed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]) > 0)
