"""The next token: filters, keyed draws and log-probs, against sorted float64 arithmetic."""

from __future__ import annotations

from math import nan

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rldsl.backends.torch.generate.sampling import choose, inverse_cdf, threshold
from rldsl.memory.decode_shapes import SAMPLING_BLOCK as BLOCK
from rldsl.plan.events import Sampling
from rldsl.runtime.draws import BELOW_ONE

PROBABILITIES = torch.tensor([[0.05, 0.40, 0.10, 0.25, 0.20]])
SCORES = PROBABILITIES.log()
NO_ENDS = torch.empty(0, dtype=torch.long)


def kept(scores: torch.Tensor, **options: float) -> list[int]:
    least = threshold(scores, Sampling(**options))
    assert least is not None
    return (scores >= least)[0].nonzero()[:, 0].tolist()


@pytest.mark.parametrize("options, found", [
    ({"top_k": 1}, [1]), ({"top_k": 3}, [1, 3, 4]),
    ({"top_p": 0.3}, [1]), ({"top_p": 0.41}, [1, 3]), ({"top_p": 0.9}, [1, 2, 3, 4]),
    ({"top_p": 0.999}, [0, 1, 2, 3, 4]),
    ({"min_p": 0.2}, [1, 2, 3, 4]), ({"min_p": 0.51}, [1, 3]), ({"min_p": 1.0}, [1]),
    ({"top_k": 3, "top_p": 0.5}, [1, 3]),              # 0.40 / 0.85 < 0.5
    ({"top_k": 2, "top_p": 0.6}, [1]),                 # 0.40 / 0.65 > 0.6
    ({"top_p": 0.8, "min_p": 0.6}, [1, 3]), ({"top_k": 4, "min_p": 0.3}, [1, 3, 4]),
    ({"top_k": 3, "top_p": 0.99, "min_p": 0.1}, [1, 3, 4])])
def test_what_filters_keep(options: dict[str, float], found: list[int]) -> None:
    assert kept(SCORES, **options) == found
    assert kept(SCORES + 7.5, **options) == found  # up to a constant


@pytest.mark.parametrize("options", [{}, {"top_k": 5}, {"top_k": 9}, {"top_p": 1.0}, {"min_p": 0.0}])
def test_no_filter(options: dict[str, float]) -> None:
    assert threshold(SCORES, Sampling(**options)) is None


@pytest.mark.parametrize("options", [{"top_k": 2}, {"top_p": 0.5}, {"min_p": 0.9}])
def test_equal_scores_are_kept_or_left_out_together(options: dict[str, float]) -> None:
    scores = torch.tensor([[0.1, 0.3, 0.3, 0.3]]).log()
    assert kept(scores, **options) == [1, 2, 3]
    assert kept(scores.flip(-1), **options) == [0, 1, 2]


def drawn(scores: torch.Tensor, draw: float, **options: float) -> int:
    draws = torch.tensor([draw], dtype=torch.float64)
    tokens, logprobs = choose(scores.clone(), Sampling(**options), draws, None, NO_ENDS)
    assert torch.allclose(logprobs, (scores / options.get("temperature", 1.0)).log_softmax(-1)[0, tokens], atol=1e-6)
    return int(tokens)


@pytest.mark.parametrize("draw, token", [
    (1e-16, 0), (0.049, 0), (0.051, 1), (0.449, 1), (0.451, 2), (0.549, 2), (0.551, 3), (0.799, 3), (0.801, 4),
    (BELOW_ONE, 4)])
def test_tokens_in_order_of_the_vocabulary(draw: float, token: int) -> None:
    assert drawn(SCORES, draw) == token


@pytest.mark.parametrize("draw, token", [(1e-16, 1), (0.61, 1), (0.62, 3), (BELOW_ONE, 3)])
def test_what_is_filtered_is_never_drawn(draw: float, token: int) -> None:
    assert drawn(SCORES, draw, top_k=2) == token


def test_temperature() -> None:
    assert drawn(SCORES, 0.30, temperature=0.1) == 1  # 0.4 ** 10 is nearly all of it
    assert drawn(SCORES, 0.19, temperature=1e6) == 0


def test_greedy_takes_the_first_of_equals_and_its_own_temperature() -> None:
    logits = torch.tensor([[0.0, 2.0, 2.0, 1.0]])
    tokens, logprobs = choose(logits.clone(), Sampling(greedy=True, temperature=0.5), None, None, NO_ENDS)
    assert int(tokens) == 1 and torch.allclose(logprobs, logits.log_softmax(-1)[0, 1])


@pytest.mark.parametrize("options", [{"greedy": True}, {}, {"top_k": 1}, {"top_p": 0.2}, {"min_p": 0.9}])
def test_an_end_that_is_forbidden_does_not_come(options: dict[str, float]) -> None:
    scores = SCORES.repeat(2, 1)
    tokens, logprobs = choose(scores.clone(), Sampling(**options), torch.tensor([0.3, 0.3], dtype=torch.float64),
                              torch.tensor([True, False]), torch.tensor([1]))
    assert tokens.tolist() == [3, 1]
    assert torch.allclose(logprobs, scores[0, tokens], atol=1e-6)  # of the whole distribution, as in training


def test_a_number_that_is_none_shows() -> None:
    draws = torch.tensor([0.5], dtype=torch.float64)
    _, logprobs = choose(torch.tensor([[0.0, nan]]), Sampling(), draws, None, NO_ENDS)
    assert logprobs.isnan().all()


@settings(max_examples=80, deadline=None)
@given(st.integers(1, 3 * BLOCK + 5), st.integers(0, 10**6), st.floats(0.0, 1.0, exclude_min=True, exclude_max=True),
       st.sampled_from([0.0, 0.5, 0.99]))
def test_blocks_invert_what_one_running_sum_does(vocab: int, seed: int, draw: float, holes: float) -> None:
    g = torch.Generator().manual_seed(seed)
    weights = torch.rand(2, vocab, generator=g) * (torch.rand(2, vocab, generator=g) >= holes)
    weights[:, seed % vocab] += 0.5  # some have weight
    draws = torch.tensor([draw, min(draw, BELOW_ONE)], dtype=torch.float64)
    tokens = inverse_cdf(weights, draws)
    reached = weights.double().cumsum(-1)
    assert (weights.gather(1, tokens[:, None]) > 0).all()
    near = 1e-6 * reached[:, -1]
    at = reached.gather(1, tokens[:, None])[:, 0]
    target = draws * reached[:, -1]
    assert (at > target - near).all() and (at - weights.gather(1, tokens[:, None])[:, 0] <= target + near).all()
