"""Several tokens of each distribution, its most likely ones, and its sum of squares: in chunks and with the vocabulary
divided over tp, against torch on all logits in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from rldsl.backends.torch.model.logprobs import token_logprobs, top_logprobs

from benchmarks.loss import given as of_size
from rldsl.runtime.backend import SINGLE_RANK, Axis
from tests.memory.accounting import Storages
from tests.world import run_world

TOKENS, WORDS, SIZE, K = 23, 50, 8, 5
Result = tuple[torch.Tensor, ...]


def inputs() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Hidden states, the head, and K tokens for each position, some of them twice."""
    hidden, weight, _ = of_size(TOKENS, WORDS, SIZE, torch.device("cpu"), torch.float64)
    ids = torch.randint(WORDS, (TOKENS, K), generator=torch.Generator().manual_seed(1))
    ids[:, 1] = ids[:, 0]
    return hidden, weight, ids


def divergence(at: torch.Tensor, squares: torch.Tensor, entropy: torch.Tensor) -> torch.Tensor:
    """Something with a gradient through all of them, in which no two elements weigh alike: a generalized Jensen-Shannon
    term over given tokens, and the statistics."""
    teacher = torch.linspace(-4, -1, at.numel(), dtype=at.dtype).view(at.shape)
    mixed = torch.logaddexp(at - 0.7, teacher - 0.7)
    weights = torch.linspace(-1, 2, len(at), dtype=at.dtype)
    return ((at.exp() * (at - mixed)).sum(-1) * weights).sum() + (squares * weights.flip(0)).sum() + (
        entropy * weights.square()).sum()


def wanted(temperature: float) -> Result:
    """From all logits: the divergence, its gradients, the K most likely tokens and their log-probs."""
    hidden, weight, ids = inputs()
    every = (hidden @ weight.T / temperature).log_softmax(-1)
    total = divergence(every.gather(1, ids), every.exp().square().sum(-1), -(every.exp() * every).sum(-1))
    total.backward()
    best = every.detach().topk(K, dim=-1)
    assert hidden.grad is not None and weight.grad is not None
    return total.detach(), hidden.grad, weight.grad, best.indices, best.values


def computed(tp: Axis, temperature: float, chunk: int, uneven: bool = False) -> Result:
    hidden, weight, ids = inputs()
    bounds = [WORDS * i // tp.size for i in range(tp.size + 1)]
    if uneven:  # the first rank has fewer rows than K
        bounds[1] = K - 2
    first, last = bounds[tp.index], bounds[tp.index + 1]
    mine = weight.detach()[first:last].clone().requires_grad_()
    found = token_logprobs(hidden, mine, ids, temperature, tp, first, True, chunk, None, True)
    assert found.sum_squares is not None and found.entropy is not None
    total = divergence(found.logprobs, found.sum_squares, found.entropy)
    total.backward()
    best, values = top_logprobs(hidden.detach(), mine.detach(), K, temperature, tp, first, chunk)
    assert hidden.grad is not None and mine.grad is not None
    whole = torch.zeros_like(weight)
    whole[first:last] = mine.grad
    return total.detach(), hidden.grad, whole, best, values


def near(found: Result, expected: Result) -> None:
    for a, b in zip(found, expected):
        assert a.shape == b.shape and torch.allclose(a.double(), b.double(), rtol=0, atol=1e-10)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("chunk", [1, 7, 1024])
def test_values_and_gradients_are_exact(chunk: int, temperature: float) -> None:
    near(computed(SINGLE_RANK, temperature, chunk), wanted(temperature))


def divided(rank: int, uneven: bool) -> list[list[np.ndarray]]:
    """As arrays: a tensor would be shared by a process that has ended."""
    import torch.distributed as dist

    found = []
    for size in (2, 4):
        group = dist.new_group(list(range(size)))
        if rank < size:
            result = computed(Axis(tuple(range(size)), rank, group), 0.7, 7, uneven)
            dist.all_reduce(result[2], group=group)
            found.append([x.numpy() for x in result])
    return found


@pytest.mark.parametrize("uneven", [False, True])
def test_the_vocabulary_may_be_divided(uneven: bool) -> None:
    expected = wanted(0.7)
    results = run_world(4, divided, uneven)
    assert [len(found) for found in results] == [2, 2, 1, 1]
    for found in sum(results, []):
        near(tuple(map(torch.from_numpy, found)), expected)


def test_of_equal_tokens_the_smaller_id_comes_first() -> None:
    hidden, weight = torch.ones(1, SIZE), torch.ones(6, SIZE)
    weight[4] += 1
    ids, logprobs = top_logprobs(hidden, weight, 6, 1.0, SINGLE_RANK, 0)
    assert ids.tolist() == [[4, 0, 1, 2, 3, 5]] and logprobs.exp().sum().item() == pytest.approx(1)


def test_no_tokens() -> None:
    hidden, weight, ids = inputs()
    found = token_logprobs(hidden[:0], weight, ids[:0], 1.0, SINGLE_RANK, 0)
    assert found.logprobs.shape == (0, K) and found.entropy is None and found.sum_squares is None
    assert [x.shape for x in top_logprobs(hidden[:0], weight, K, 1.0, SINGLE_RANK, 0)] == [(0, K), (0, K)]


def test_another_token_would_be_seen() -> None:
    hidden, weight, ids = inputs()
    right = token_logprobs(hidden, weight, ids, 1.0, SINGLE_RANK, 0).logprobs
    assert not torch.allclose(right, token_logprobs(hidden, weight, (ids + 1) % WORDS, 1.0, SINGLE_RANK, 0).logprobs)


def test_a_whole_table_never_exists() -> None:
    """The log-probs of 16 tokens of each distribution, forward and backward, and the 16 most likely ones: at most 0.05
    of the table in float32."""
    hidden, weight, _ = of_size(8192, 2048, SIZE, torch.device("cpu"), torch.float32)
    table, chunk = 4 * 8192 * 2048, 64
    ids, _ = top_logprobs(hidden, weight, 16, 1.0, SINGLE_RANK, 0, chunk)
    inside = [x.untyped_storage() for x in (hidden, weight, ids)]
    with Storages() as storages:
        for one in inside:
            storages.see(one)
        top_logprobs(hidden, weight, 16, 1.0, SINGLE_RANK, 0, chunk)
        found = token_logprobs(hidden, weight, ids, 1.0, SINGLE_RANK, 0, False, chunk, None, True)
        assert found.sum_squares is not None
        (found.logprobs.square().sum() + found.sum_squares.sum()).backward()
    assert storages.most - sum(x.nbytes() for x in inside) < 0.05 * table
