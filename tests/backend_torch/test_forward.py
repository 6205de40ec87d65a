"""Log-probs, values, scores and generation of every layout against plain transformers."""

from __future__ import annotations

from math import prod

import pytest
import torch

from rldsl.plan.events import Sampling
from tests.backend_torch.shards import layout_of, make_shard, pack, plan_model, ragged, shard_of
from tests.samples import thorough_between
from tests.tiny import make_model
from tests.world import run_world

LAYOUTS = [(1, 1, 1), (2, 1, 1), (1, 2, 1), (1, 4, 1), (1, 1, 2), (1, 2, 2)]
SOME = [(1, 1, 1), (1, 4, 1), (1, 2, 2)]  # for what the first family has shown on all of them
ROWS = ragged(9, 46)


@pytest.fixture(scope="module")
def directories(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    return {
        "qwen3": str(make_model(root / "qwen3", num_hidden_layers=2)),
        "tied": str(make_model(root / "tied", tie_word_embeddings=True, num_hidden_layers=2)),
        "llama": str(make_model(root / "llama", family="llama", attention_bias=True, num_hidden_layers=2)),
        "gemma": str(make_model(root / "gemma", family="gemma", head_dim=8, num_hidden_layers=2)),
        # scales embeddings and residuals inside its forward
        "granite": str(make_model(root / "granite", family="granite", embedding_multiplier=12.0,
                                  residual_multiplier=0.5, attention_multiplier=0.3, num_hidden_layers=2)),
        "gpt2": str(make_model(root / "gpt2", family="gpt2")),
        "reward": str(make_model(root / "reward", head="reward_model", num_hidden_layers=2)),
    }


def reference(path: str, temperature: float) -> torch.Tensor:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    found = []
    with torch.no_grad():
        for prompt, response in ROWS:
            logits = model(torch.tensor([prompt + response])).logits[0] / temperature
            picked = logits.log_softmax(-1)[len(prompt) - 1 : -1]
            found.append(picked.gather(1, torch.tensor(response, dtype=torch.long)[:, None])[:, 0])
    return torch.cat(found)


def _forwards(rank, path, kind, what, layouts, temperature):
    """Results of each layout in turn: all in one world of four."""
    model, found = plan_model(path, kind), []
    for degrees in layouts:
        shard = (make_shard if prod(degrees) == 4 else _partial)(model, rank, *degrees)
        if shard is not None:
            found.append(shard.infer([pack(ROWS[:4]), pack(ROWS[4:])], what, temperature).numpy())
    return found


def _partial(model, rank, dp, tp, pp, cp=1, trainable=False):
    """A layout smaller than the world: None on ranks that are not in it."""
    made = shard_of(model, layout_of(dp=dp, tp=tp, pp=pp, cp=cp), rank, trainable)
    return made and made[0]


@pytest.mark.parametrize("name", thorough_between(["qwen3", "tied", "llama", "gemma", "granite"]))
def test_logprobs_equal_transformers_on_every_layout(directories, name):
    expected = reference(directories[name], 0.7)
    layouts = LAYOUTS if name == "qwen3" else SOME
    for found in run_world(4, _forwards, directories[name], "causal_lm", "logprobs", layouts, 0.7):
        for result in found:
            assert torch.allclose(torch.from_numpy(result), expected, atol=2e-5), name


def test_a_family_without_a_plan_runs_whole(directories):
    expected = reference(directories["gpt2"], 1.0)
    (found,) = run_world(1, _forwards, directories["gpt2"], "causal_lm", "logprobs", [(1, 1, 1)], 1.0)
    assert torch.allclose(torch.from_numpy(found[0]), expected, atol=2e-5)


def test_scores_equal_transformers(directories):
    from transformers import AutoModelForSequenceClassification

    model = AutoModelForSequenceClassification.from_pretrained(directories["reward"], dtype=torch.float32).eval()
    with torch.no_grad():
        expected = torch.stack([
            model.model(torch.tensor([p + r])).last_hidden_state[0, -1] @ model.score.weight[0] for p, r in ROWS])
    for found in run_world(4, _forwards, directories["reward"], "reward_model", "scores", LAYOUTS, 1.0):
        for result in found:
            assert torch.allclose(torch.from_numpy(result), expected, atol=2e-5)
    # a value model whose directory has a head reads the same place for the value behind the last token
    for result in run_world(1, _forwards, directories["reward"], "value_model", "end_values", [(1, 1, 1)], 1.0)[0]:
        assert torch.allclose(torch.from_numpy(result), expected, atol=2e-5)


def _generations(rank, path, layouts, samplings):
    model, found = plan_model(path), []
    for (dp, tp, pp), (sampling, limit) in ((a, b) for a in layouts for b in samplings):
        shard = _partial(model, rank, dp, tp, pp)
        if shard is None:
            continue
        prompts = pack([(p, []) for p, _ in ROWS])
        made = shard.generate(prompts, sampling, seed=3, step=5, max_num_seqs=limit)
        again = shard.infer([made.batch], "logprobs", sampling.temperature)
        assert torch.allclose(again, made.logprobs, atol=1e-5)
        found.append((made.batch.tokens.tolist(), made.batch.response_lens.tolist(), made.finished.tolist()))
    return found


@pytest.mark.thorough
def test_greedy_generation_equals_transformers(directories):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directories["qwen3"], dtype=torch.float32).eval()
    expected = [model.generate(torch.tensor([p]), max_new_tokens=8, do_sample=False)[0].tolist() for p, _ in ROWS]
    expected = [t for row in expected for t in row]
    sampling = Sampling(max_new_tokens=8, greedy=True)
    for found in run_world(4, _generations, directories["qwen3"], LAYOUTS[2:], [(sampling, 0), (sampling, 4)]):
        assert all(tokens == expected for tokens, _, _ in found)


@pytest.mark.thorough
def test_samples_do_not_depend_on_layout_or_batching(directories):
    sampling = Sampling(max_new_tokens=8, temperature=1.3, top_p=0.95, top_k=30, min_new_tokens=2)
    results = run_world(4, _generations, directories["qwen3"], LAYOUTS, [(sampling, 0), (sampling, 4)])
    every = [found for rank in results for found in rank]
    assert all(found == every[0] for found in every)
    assert min(every[0][1]) >= 2 and len(set(every[0][0])) > 10
