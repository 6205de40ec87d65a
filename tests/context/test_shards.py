"""Log-probs, values, scores and optimizer steps with the tokens of a sequence on several ranks, against one process."""

from __future__ import annotations

from math import prod

import pytest
import torch

from tests.backend_torch import test_forward as forward
from tests.backend_torch import test_train as train
from tests.tiny import make_model
from tests.world import run_world

# (dp, tp, pp, cp)
FORWARD = [(1, 1, 1, 2), (1, 1, 1, 4), (1, 2, 1, 2), (1, 1, 2, 2)]
TRAIN = [(1, 1, 1, 2), (1, 1, 1, 4), (1, 2, 1, 2), (1, 1, 2, 2), (2, 1, 1, 2)]


@pytest.mark.thorough
@pytest.mark.parametrize("family, overrides", [
    ("qwen3", dict(tie_word_embeddings=True)), ("llama", dict(attention_bias=True)), ("gemma", dict(head_dim=8)),
    ("mistral", dict(sliding_window=3)), ("gpt2", {})], ids=lambda x: x if isinstance(x, str) else "")
def test_logprobs_equal_transformers(tmp_path, family, overrides):
    """Rows of 1 to 13 tokens over 8 chunks: most ranks lack some of them."""
    path = str(make_model(tmp_path / "m", family=family, num_hidden_layers=2, **overrides))
    expected = forward.reference(path, 0.7)
    layouts = [x for x in FORWARD if family != "gpt2" or x[:3] == (1, 1, 1)]
    for found in run_world(4, forward._forwards, path, "causal_lm", "logprobs", layouts, 0.7):
        assert found
        for result in found:
            assert torch.allclose(torch.from_numpy(result), expected, atol=2e-5)


def test_scores_and_entropy_equal_one_rank(tmp_path):
    for kind, what in (("reward_model", "scores"), ("causal_lm", "entropy")):
        path = str(make_model(tmp_path / kind, head=kind, num_hidden_layers=2))
        ((expected,),) = run_world(1, forward._forwards, path, kind, what, [(1, 1, 1)], 0.9)
        for found in run_world(4, forward._forwards, path, kind, what, FORWARD, 0.9):
            for result in found:
                assert torch.allclose(torch.from_numpy(result), torch.from_numpy(expected), atol=2e-5), what


@pytest.mark.thorough
@pytest.mark.parametrize("overrides, kind, what, layouts", [
    (train.TWO | dict(tie_word_embeddings=True), "causal_lm", "logprobs", TRAIN),
    (train.TWO, "value_model", "values", TRAIN[2:])],
    ids=["tied", "values"])
def test_steps_equal_one_process(tmp_path, overrides, kind, what, layouts):
    path = str(make_model(tmp_path / "m", **overrides))
    expected, norms = train.reference(path, what)
    results = run_world(max(map(prod, layouts)), train._steps, path, kind, what, layouts, expected)
    for layout, difference, name, seen, rates in (found for rank in results for found in rank):
        assert difference < 1e-5, f"{layout}: {name} differs by {difference}"
        assert seen == pytest.approx(norms, rel=1e-4), layout
        assert rates == pytest.approx(train.RATES), layout
