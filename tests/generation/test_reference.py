"""Generation on one rank against one full forward pass for every token: the same tokens, log-probs and ends, however
sequences share prefills, slots and captured steps, and however seldom the host looks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from rldsl.backends.torch.generate.captured_step import CaptureSwitch
from rldsl.backends.torch.generate import engine
from rldsl.backends.torch.generate.generate import shares_prompt
from rldsl.diag import Failure
from rldsl.plan.events import Sampling
from tests.backend_torch.shards import make_shard, pack, plan_model, ragged
from tests.generation.reference import expected, made, rows_of, same
from tests.samples import thorough_between
from tests.tiny import make_model

PROMPTS = [p for p, _ in ragged(9, 46)]
GROUPS = [p for p in PROMPTS[:4] for _ in range(3)]  # three samples of each prompt
DRAWN = Sampling(max_new_tokens=12, temperature=1.3)
SAMPLINGS = {
    "plain": DRAWN,
    "greedy": Sampling(max_new_tokens=12, greedy=True),
    "top_k": replace(DRAWN, top_k=5),
    "top_p": replace(DRAWN, top_p=0.8),
    "min_p": replace(DRAWN, min_p=0.1),
    "all": replace(DRAWN, top_k=20, top_p=0.9, min_p=0.02, min_new_tokens=3),
    "greedy, longer": Sampling(max_new_tokens=12, min_new_tokens=5, greedy=True),
    "stop": replace(DRAWN, stop=("b", "12", "z+")),
    "stop later": replace(DRAWN, stop=("b", "5"), min_new_tokens=4),
    "one token": replace(DRAWN, max_new_tokens=1),
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"attention_bias": True}, "gpt2": {}, "gemma": {"head_dim": 8},
    "gemma3_text": {"head_dim": 8, "layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 4},
}


@pytest.fixture(scope="module")
def shard(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Its end token is likely enough to come now and then."""
    return make_shard(plan_model(str(make_model(tmp_path_factory.mktemp("m") / "qwen3"))), 0)


def path(shard: Any) -> str:
    return shard.model.path


@pytest.mark.thorough
@pytest.mark.parametrize("name", SAMPLINGS)
def test_every_sampling(shard: Any, name: str) -> None:
    sampling = SAMPLINGS[name]
    right = expected(path(shard), GROUPS, sampling)
    for limit, how in ((0, {}), (5, {"poll_every": 3}), (2, {"capture": False})):
        assert same(rows_of(made(shard, GROUPS, sampling, limit, **how)), right), (limit, how)


@pytest.mark.parametrize("limit", thorough_between([0, 1, 3, 7]))
@pytest.mark.parametrize("every", [1, 5, 100])
def test_slots_and_looks_change_nothing(shard: Any, limit: int, every: int) -> None:
    right = expected(path(shard), PROMPTS, DRAWN)
    assert 0 < sum(end for _, _, end in right) < len(right)  # some end by themselves, some are cut off
    assert same(rows_of(made(shard, PROMPTS, DRAWN, limit, poll_every=every)), right)


@pytest.mark.thorough
@pytest.mark.parametrize("family", FAMILIES)
def test_families(tmp_path: Any, family: str) -> None:
    there = str(make_model(tmp_path / "m", family, **FAMILIES[family]))
    one = make_shard(plan_model(there), 0)
    for sampling in (DRAWN, SAMPLINGS["greedy"]):
        assert same(rows_of(made(one, GROUPS, sampling, 5)), expected(there, GROUPS, sampling)), sampling


def test_a_sequence_belongs_to_its_row(shard: Any) -> None:
    """Another order, other neighbors, a part of the batch: the same completions."""
    right = expected(path(shard), PROMPTS, DRAWN)
    order = [7, 2, 5, 0]
    found = rows_of(made(shard, [PROMPTS[r] for r in order], DRAWN, 2, rows=order))
    assert same(found, [right[r] for r in order])


def test_another_seed_draws_others(shard: Any) -> None:
    found = shard.generate(pack([(p, []) for p in PROMPTS]), DRAWN, seed=4, step=5, max_num_seqs=0)
    assert not same(rows_of(found), expected(path(shard), PROMPTS, DRAWN))


@pytest.mark.thorough
def test_long_responses_cross_every_width(tmp_path: Any) -> None:
    """The KV cache is read wider and wider, by fewer and fewer rows, and captured steps of each width are replayed."""
    there = str(make_model(tmp_path / "m", num_hidden_layers=1, scale=0.3))
    one = make_shard(plan_model(there), 0)
    sampling = Sampling(max_new_tokens=140, temperature=1.5, min_new_tokens=2)
    found, plain = (rows_of(made(one, PROMPTS[:6], sampling, 4, capture=CaptureSwitch(x))) for x in (True, False))
    assert found == plain
    assert same(found, expected(there, PROMPTS[:6], sampling), near=5e-5)
    assert max(len(t) for t, _, _ in found) > 70


def test_logprobs_are_those_of_training(shard: Any) -> None:
    sampling = replace(DRAWN, top_p=0.9)
    found = made(shard, GROUPS, sampling, 5)
    again = shard.infer([found.batch], "logprobs", sampling.temperature)
    assert torch.allclose(again, found.logprobs, rtol=0, atol=1e-5)


@pytest.mark.thorough
def test_halves_replay_what_they_compute(tmp_path: Any) -> None:
    there = str(make_model(tmp_path / "m"))
    one = make_shard(plan_model(there, dtype="bfloat16"), 0)
    found, plain = (made(one, GROUPS, DRAWN, 5, capture=CaptureSwitch(x)) for x in (True, False))
    assert torch.equal(found.batch.tokens, plain.batch.tokens) and torch.equal(found.logprobs, plain.logprobs)


def test_nothing_to_generate(shard: Any) -> None:
    found = made(shard, [], DRAWN)
    assert len(found.batch) == 0 and found.logprobs.numel() == 0 and found.finished.numel() == 0


@pytest.mark.parametrize("prompts", [[[]], [[3], []], [[], [3, 4]]])
def test_an_empty_prompt_is_refused(shard: Any, prompts: list[list[int]]) -> None:
    with pytest.raises(Failure) as raised:
        made(shard, prompts, DRAWN)
    assert raised.value.diagnostics[0].code == "RL0732"


# ------------------------------------------------------------------------------------------------ sharing


@pytest.mark.parametrize("prompts, found", [
    ([[1, 2], [1, 2], [1, 2]], [False, True, True]),
    ([[1, 2], [1, 3], [1, 3]], [False, False, True]),
    ([[1, 2], [1], [1, 2]], [False, False, False]),         # the start of one before
    ([[1, 1], [1], [1, 1]], [False, False, False]),
    ([[5], [5], [6], [5]], [False, True, False, False]),    # only neighbors
    ([[1, 2, 3], [4, 2, 3]], [False, False]),
    ([], [])])
def test_which_prompts_are_repeated(prompts: list[list[int]], found: list[bool]) -> None:
    assert shares_prompt(pack([(p, []) for p in prompts])) == found


@pytest.mark.parametrize("limit", [0, 3, 2, 1])
def test_a_prompt_is_run_once(shard: Any, monkeypatch: pytest.MonkeyPatch, limit: int) -> None:
    """However many samples it has, and whenever they begin."""
    run: list[int] = []
    plain = engine.PrefillAttention

    def counted(cache: Any, lengths: torch.Tensor, *rest: Any) -> Any:
        run.append(int(lengths.sum()))
        return plain(cache, lengths, *rest)

    monkeypatch.setattr(engine, "PrefillAttention", counted)
    made(shard, GROUPS, DRAWN, limit)
    assert sum(run) == sum(map(len, PROMPTS[:4]))


def test_most_steps_are_replayed(shard: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python goes through the modules for the first steps of a shape alone."""
    asked = {True: 0, False: 0}
    plain = engine.DecodeAttention
    for capture in asked:

        def counted(*given: Any, capture: bool = capture) -> Any:
            asked[capture] += 1
            return plain(*given)

        monkeypatch.setattr(engine, "DecodeAttention", counted)
        made(shard, PROMPTS, Sampling(max_new_tokens=30, min_new_tokens=30, temperature=1.3),
             capture=CaptureSwitch(capture))
    assert asked == {False: 29, True: 7}  # plain and recorded at each of three widths; compared once
