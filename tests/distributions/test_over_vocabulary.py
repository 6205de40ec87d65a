"""Losses over the whole vocabulary: library code through the compiler, split at the head, in chunks, with the vocabulary
divided over tp and the rows over dp and micro-batches; against torch on all logits, in float64 to 1e-10."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from rldsl.backends.torch.model.over_vocabulary import Readout, over_vocabulary
from torch import Tensor

from rldsl.memory.logits import vocabulary_rows_at_once
from rldsl.plan.entries import EntrySpace
from rldsl.plan.expr import Program
from rldsl.runtime.backend import SINGLE_RANK, Axis
from rldsl.runtime.interpreter.ragged_index import RaggedIndex
from rldsl.runtime.interpreter.minibatch_loss import MinibatchLoss, loss_counts
from rldsl.runtime.interpreter.vocabulary import split
from tests.distributions.test_gkd import jsd
from tests.library.harness import Batch, Given, _part, _shards, _views
from tests.library.over_vocabulary import SPACE, vocabulary_loss
from tests.memory.accounting import Storages
from tests.world import run_world
from rldsl.sharding.micro_batches import micro_batches

WORDS, SIZE, OTHER = 37, 6, 5
BATCH = Batch.random(1, 4, 3)
TOKENS = sum(BATCH.lens["gen"])
# several results of a table, one of them read again by the table; a number of each token, with a gradient and without
TEXT = """
loss several(logprobs_at: entry, entropy: token; teacher: entry, w: token, s: seq, c = 0.3) {
  near  = where(logprobs_at > max(logprobs_at by token) - 1, 1, 0)
  inner = sum(near * exp(logprobs_at) * (logprobs_at * w - teacher * c) by token)
  far   = logsumexp(logprobs_at * entropy + s by token) - mean(teacher by token)
  metric kept = mean(sum(near by token) / count(teacher by token))
  return mean(inner * w) + mean(far) + 0.1 * mean(std(logprobs_at by token) + min(teacher * logprobs_at by token))
}
"""
CALLS = {f"gkd {beta} {others}": f'gkd(teacher=teacher, beta={beta}, others="{others}")'
         for beta, others in ((0, "ignore"), (1, "ignore"), (0.3, "ignore"), (0.5, "renormalize"))} | {
    "several": "several(teacher=teacher, w=w, s=s)"}


def random(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def leaves() -> dict[str, Tensor]:
    return {"hidden": random(1, TOKENS, SIZE).requires_grad_(), "weight": random(2, WORDS, SIZE).requires_grad_(),
            "entropy": random(3, TOKENS).abs().requires_grad_()}


def teacher() -> tuple[Tensor, Tensor]:
    return random(4, TOKENS, OTHER), random(5, WORDS, OTHER)


W, S = BATCH.tokens(6), BATCH.seqs(7)


def logprobs(hidden: Tensor, weight: Tensor, temperature: float) -> Tensor:
    return (hidden @ weight.T / temperature).log_softmax(-1)


def wanted(name: str, temperature: float) -> tuple[Tensor, dict[str, Tensor]]:
    found = leaves()
    mine = logprobs(found["hidden"], found["weight"], temperature)
    theirs = logprobs(*teacher(), temperature)
    if name == "several":
        row = torch.arange(BATCH.rows).repeat_interleave(torch.tensor(BATCH.lens["gen"]))
        near = (mine > mine.amax(-1, keepdim=True) - 1).double()
        inner = (near * mine.exp() * (mine * W.data[:, None] - theirs * 0.3)).sum(-1)
        far = (mine * found["entropy"][:, None] + S.data[row][:, None]).logsumexp(-1) - theirs.mean(-1)
        loss = (inner * W.data).mean() + far.mean() + 0.1 * (mine.std(-1) + (theirs * mine).amin(-1)).mean()
    else:
        _, beta, _ = name.split()
        loss = torch.stack([jsd(s, t, float(beta)) for s, t in zip(mine, theirs)]).mean()
    loss.backward()
    return loss.detach(), {n: torch.zeros_like(x) if x.grad is None else x.grad for n, x in found.items()}


def compiled(call: str) -> tuple[Program, dict[str, Given | float]]:
    data: dict[str, Given | float] = {"w": W, "s": S}
    return vocabulary_loss("std.gkd", call, data, TEXT), data


def computed(name: str, temperature: float = 1.0, tp: Axis = SINGLE_RANK, chunk: int = 7, dp: int = 1, mbs: int = 0
             ) -> tuple[float, dict[str, Tensor]]:
    """The loss and gradients, of this tp rank's words."""
    program, data = compiled(CALLS[name])
    part = split(program, SPACE)
    assert part is not None
    found = leaves()
    bounds = [WORDS * i // tp.size for i in range(tp.size + 1)]
    mine = slice(bounds[tp.index], bounds[tp.index + 1])
    weight = found["weight"].detach()[mine].clone().requires_grad_()
    their_hidden, their_weight = teacher()
    tokens = torch.arange(TOKENS).split(BATCH.lens["gen"])
    entries = {"gen.vocabulary": EntrySpace("gen", 0)}
    total = 0.0
    vectors = []
    new = lambda: MinibatchLoss(part.rest, loss_counts(  # noqa: E731
        part.rest, BATCH.frames, range(BATCH.rows), BATCH.lens, entries))
    for rows in _shards(BATCH, dp, "row"):
        run = new()
        for chosen in micro_batches(rows, BATCH.lens["gen"], mbs, 1, 0):
            at = torch.cat([tokens[r] for r in chosen]) if chosen else torch.zeros(0, dtype=torch.int64)

            def over(terms: object, given: Sequence[Tensor], at: Tensor = at) -> tuple[Tensor, ...]:
                return over_vocabulary(Readout(found["hidden"][at], weight),
                                       [Readout(their_hidden[at], their_weight[mine])], terms, given,  # type: ignore[arg-type]
                                       temperature, tp, chunk)

            views = _views(BATCH, chosen)
            read = {n: _part(BATCH, v, chosen) for n, v in data.items()} | {"entropy": found["entropy"][at]}
            read = {n: x for n, x in read.items() if n in program.inputs()}
            made = part.inputs(over, "logprobs_at", ["teacher"], read, RaggedIndex(views, BATCH.frames, entries))
            share = run(read | made, views)
            total += float(share.detach())
            share.backward()
        vectors.append(run.partials())
    grads = {n: torch.zeros_like(x) if x.grad is None else x.grad for n, x in found.items()}
    grads["weight"] = torch.zeros_like(grads["weight"])
    if weight.grad is not None:
        grads["weight"][mine] = weight.grad
    return total, grads


def near(found: tuple[float, dict[str, Tensor]], expected: tuple[Tensor, dict[str, Tensor]]) -> None:
    torch.testing.assert_close(torch.tensor(found[0], dtype=torch.float64), expected[0], rtol=1e-10, atol=1e-10)
    for name, grad in expected[1].items():
        torch.testing.assert_close(found[1][name], grad, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("chunk", [1, 7, 1024])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("name", CALLS)
def test_value_and_gradient_are_exact(name: str, temperature: float, chunk: int) -> None:
    near(computed(name, temperature, chunk=chunk), wanted(name, temperature))


@pytest.mark.parametrize("dp", [1, 2, 4])
@pytest.mark.parametrize("mbs", [1, 2, 7])
@pytest.mark.parametrize("name", ["gkd 0.3 ignore", "several"])
def test_shards_and_micro_batches_change_nothing(name: str, dp: int, mbs: int) -> None:
    near(computed(name, 0.7, dp=dp, mbs=mbs), wanted(name, 0.7))


def divided(rank: int) -> list[tuple[float, dict[str, np.ndarray]]]:
    """As arrays: a tensor would be shared by a process that has ended."""
    import torch.distributed as dist

    found = []
    for size in (2, 4):
        group = dist.new_group(list(range(size)))
        for name in CALLS if rank < size else ():
            loss, grads = computed(name, 0.7, Axis(tuple(range(size)), rank, group))
            dist.all_reduce(grads["weight"], group=group)
            found.append((loss, {n: x.numpy() for n, x in grads.items()}))
    return found


@pytest.mark.thorough
def test_the_vocabulary_may_be_divided() -> None:
    results = run_world(4, divided)
    assert [len(found) for found in results] == [2 * len(CALLS)] * 2 + [len(CALLS)] * 2
    for found in results:
        for (loss, grads), name in zip(found, [*CALLS] * 2):
            near((loss, {n: torch.from_numpy(x) for n, x in grads.items()}), wanted(name, 0.7))


def test_another_teacher_would_be_seen() -> None:
    right, _ = computed("gkd 0.3 ignore")
    assert abs(right - float(wanted("gkd 0.3 ignore", 0.7)[0])) > 1e-3


def test_a_whole_table_never_exists() -> None:
    """The generalized JSD, forward and backward: at most 0.05 of one table of log-probs in float32."""
    count, words, size = 8192, 2048, 8
    hidden, weight = (random(i, n, size).float().requires_grad_() for i, n in ((1, count), (2, words)))
    theirs = Readout(random(3, count, size).float(), random(4, words, size).float())
    program, _ = compiled(CALLS["gkd 0.3 ignore"])
    part = split(program, SPACE)
    assert part is not None
    lens = torch.tensor([count])
    from rldsl.runtime.interpreter.ragged_index import FrameRows
    views = {"gen": FrameRows(torch.tensor([0]), torch.tensor([0]), lens)}
    chunk = vocabulary_rows_at_once(words, count, "cpu")
    kept = [x.untyped_storage() for x in (hidden, weight, *theirs) if isinstance(x, torch.Tensor)]
    with Storages() as storages:
        for one in kept:
            storages.see(one)
        made = part.inputs(lambda terms, given: over_vocabulary(
            Readout(hidden, weight), [theirs], terms, given, 1.0, SINGLE_RANK, chunk), "logprobs_at", ["teacher"], {},
            RaggedIndex(views, BATCH.frames, {"gen.vocabulary": EntrySpace("gen", 0)}))
        sum(x.sum() for x in made.values()).backward()
    assert storages.most - sum(x.nbytes() for x in kept) < 0.05 * 4 * count * words
