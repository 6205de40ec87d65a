"""`tests/responses.py`: rounding at the end of an interval is followed, other probabilities are not."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from rldsl.backends.torch.generate import sampling

from rldsl.plan.events import Sampling
from tests.backend_torch.shards import make_shard, plan_model
from tests.consistency.test_match import prompts
from tests.responses import NEAR, followed, recorded
from tests.tiny import make_model

WEIGHTS = torch.tensor([[0.1, 0.2, 0.3, 0.4]] * 4)
EDGES = torch.tensor([0.1, 0.3, 0.6, 0.05], dtype=torch.float64)  # three where two intervals meet, and one inside


def written(file: Path, draws: torch.Tensor, tokens: list[int]) -> Path:
    torch.save([draws, torch.tensor(tokens)], f"{file}.0")
    return file


@pytest.mark.parametrize("tokens", [[0, 1, 2, 0], [1, 2, 3, 0]])
@pytest.mark.parametrize("error", [0.0, 1e-6, -1e-6])
def test_either_side_of_an_edge_is_followed(tmp_path: Path, tokens: list[int], error: float) -> None:
    weights = WEIGHTS * (1 + error * torch.tensor([1.0, -2.0, 3.0, -1.0]))
    with followed(written(tmp_path / "r", EDGES, tokens)):
        assert sampling.inverse_cdf(weights, EDGES).tolist() == tokens


def test_what_is_no_rounding_is_not_followed(tmp_path: Path) -> None:
    """A token whose interval lies elsewhere, by a little or by much; one without any weight, too."""
    inside = EDGES + torch.tensor([2 * NEAR, -2 * NEAR, 0.1, 0.0])
    own = sampling.inverse_cdf(WEIGHTS, inside).tolist()
    with followed(written(tmp_path / "r", inside, [0, 2, 1, 3])):
        assert sampling.inverse_cdf(WEIGHTS, inside).tolist() == own == [1, 1, 3, 0]
    weights = torch.tensor([[0.0, 0.0, 0.5, 0.5]])
    with followed(written(tmp_path / "s", EDGES[2:3], [0])):
        assert sampling.inverse_cdf(weights, EDGES[2:3]).tolist() == [3]


def test_other_numbers_take_their_own(tmp_path: Path) -> None:
    with followed(written(tmp_path / "r", EDGES, [0, 1, 2, 1])):
        assert sampling.inverse_cdf(WEIGHTS, EDGES + 0.1 * NEAR).tolist() == [1, 2, 3, 0]


def test_what_a_shard_samples_is_recorded_and_no_other_model_follows_it(tmp_path: Path) -> None:
    given, asked = prompts(46, 12, 9, torch.device("cpu")), Sampling(max_new_tokens=24)
    one, other = (make_shard(plan_model(str(make_model(tmp_path / f"m{i}", seed=i))), 0) for i in range(2))
    with recorded(tmp_path / "r"):
        expected = one.generate(given, asked, seed=1, step=0, max_num_seqs=0)
    [file] = tmp_path.glob("r.*")
    draws, tokens = torch.load(file)
    assert len(draws) == len(tokens) == int(expected.batch.response_lens.sum()) == len(draws.unique())
    with followed(tmp_path / "r"):
        again = one.generate(given, asked, seed=1, step=0, max_num_seqs=5)
        apart = other.generate(given, asked, seed=1, step=0, max_num_seqs=0)
    assert torch.equal(again.batch.tokens, expected.batch.tokens)
    assert not torch.equal(apart.batch.tokens, expected.batch.tokens)


def test_nothing_is_followed_where_nothing_was_written(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="no run has written"), followed(tmp_path / "r"):
        pass
