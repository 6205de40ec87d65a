"""The families that people ask for, at every degree that is offered: equal to transformers in log-probs and gradients,
bitwise as the directory after loading, and generation that agrees with its own log-probs."""

from __future__ import annotations

import pytest
import torch

from rldsl.models.families import describe
from rldsl.plan.events import Sampling
from tests.backend_torch.shards import layout_of as at
from tests.backend_torch.shards import pack, plan_model, shard_of
from tests.backend_torch.steps import difference
from tests.families.checks import ROWS, check, expected, logprobs_of, model_of
from tests.families.table import LIMIT, NAMED, NOISE
from tests.families.tiny_configs import make
from tests.samples import thorough_between
from tests.world import run_world

LAYOUTS = [at(), at(tp=2), at(pp=2), at(dp=2)]


@pytest.mark.thorough
@pytest.mark.parametrize("family", NAMED)
def test_every_degree_that_is_offered(tmp_path, family):
    path = make(tmp_path / "m", family)
    right, found = expected(path), describe(path, "causal_lm")
    layouts = [x for x in LAYOUTS if (x.tp == 1 or not found.tp_problem) and (x.pp == 1 or not found.pp_problem)]
    assert any(x.tp > 1 for x in layouts) or family in ("falcon_h1", "jamba", "granitemoehybrid")
    limit = NOISE.get(family, LIMIT)
    for layout, what, error in sum(run_world(2, check, path, layouts, right), []):
        assert error == 0 if what == "load" else error < limit, f"{family}: {what} under {layout} differs by {error}"


@pytest.mark.parametrize("family", thorough_between(["qwen3_next", "mamba2", "falcon_h1", "jamba"]))
def test_samples_of_a_prompt_that_begin_in_other_batches(tmp_path, family):
    """With fewer slots than samples a later one cannot begin with the state of an earlier one, which has moved on."""
    shard, _ = shard_of(plan_model(str(make(tmp_path / "m", family))), at(), 0)
    rows = pack([(prompt, []) for prompt, _ in ROWS[:3] for _ in range(3)])
    for slots in (1, 2, 4):
        out = shard.generate(rows, Sampling(max_new_tokens=4), seed=3, step=5, max_num_seqs=slots)
        again = shard.infer([out.batch], "logprobs", 1.0)
        assert float((again - out.logprobs).abs().max()) < 5e-5, slots  # with another's state it was above 0.2


def test_weights_are_not_scaled_for_inference(tmp_path):
    """As RWKV's code does in place, where a model has more layers than `rescale_every`: what is computed is what
    transformers computes in training."""
    path = make(tmp_path / "m", "rwkv", rescale_every=1)
    model = model_of(path).train()
    with torch.no_grad():
        right = torch.cat([logprobs_of(model, *row) for row in ROWS])
    shard, _ = shard_of(plan_model(path), at(), 0)
    found = shard.infer([pack(ROWS)], "logprobs", 1.0)
    assert float((found - right).abs().max()) < LIMIT
    assert difference(shard, dict(model.named_parameters())) == 0
