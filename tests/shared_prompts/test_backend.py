"""Sequences with the same prompt, computed with it once, against the same sequences computed one by one, and against
plain transformers: in float32, under every degree."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from rldsl.backends.torch.model.model_inputs import pack_inputs
from rldsl.backends.torch.model.sequence_parallel import SequenceParallel
from rldsl.backends.torch.model.shared_prompts import SharedPromptAttention
from rldsl.models.families import describe, sizes_of
from rldsl.plan.model import Lora
from rldsl.plan.prompt_sources import shares_prompts
from rldsl.runtime.backend import Axis
from tests.backend_torch.shards import layout_of, plan_model, shard_of
from tests.families.checks import logprobs_of, model_of
from tests.families.tiny_configs import make
from tests.lora.adapted import adapted, make_adapter
from tests.samples import thorough_between
from tests.shared_prompts.rows import ROWS, SGD, Row, computed, gap, gaps, packed, rows_of
from tests.tiny import make_model
from tests.world import run_world

LIMIT = 1e-5  # relative to the largest number of a tensor
CPU, ALONE = torch.device("cpu"), Axis((0,), 0, None)
# grouped heads that 2 does not divide alike, windows, caps, sinks, chunks, latent attention, learned positions, experts
FAMILIES = ("qwen3", "gemma2", "gemma3_text", "gpt_oss", "llama4_text", "deepseek_v3", "gpt2", "mixtral", "mistral")


def inputs_of(*frames, **options):
    return pack_inputs(frames, CPU, ALONE, SequenceParallel(ALONE, False), share=True, **options)


def shared(inputs) -> bool:
    return isinstance(inputs.attention, SharedPromptAttention)


@pytest.fixture
def tokens(monkeypatch):
    """How many tokens the model computed in each pass, filled as passes are packed."""
    found: list[int] = []

    def counted(*args, **options):
        inputs = pack_inputs(*args, **options)
        found.append(len(inputs.tokens))
        return inputs

    for module in ("shard", "train.minibatch"):
        monkeypatch.setattr(f"rldsl.backends.torch.{module}.pack_inputs", counted)
    return found


@pytest.mark.parametrize("family", thorough_between(FAMILIES))
def test_a_family_computes_the_same(tmp_path, family, tokens):
    path = make(tmp_path / "m", family)
    once, each = computed(0, path, [(layout_of(), True), (layout_of(), False)], ROWS)
    responses = sum(len(r.response) for r in ROWS)
    prompts = sum(len(p) for p in {tuple(r.prompt) for r in ROWS})
    assert tokens == 2 * [prompts + responses] + 2 * [sum(len(r.prompt) for r in ROWS) + responses]
    for name, error in gap(once, each).items():
        assert error < LIMIT, f"{name} differs by {error}"


@pytest.mark.parametrize("heads, kv_heads", [(6, 2), (3, 1), (4, 4)])
def test_heads_of_any_number(tmp_path, heads, kv_heads):
    path = str(make_model(tmp_path / "m", num_attention_heads=heads, num_key_value_heads=kv_heads))
    once, each = computed(0, path, [(layout_of(), True), (layout_of(), False)], ROWS)
    assert max(gap(once, each).values()) < LIMIT


def test_log_probs_are_those_of_transformers(tmp_path):
    path = make(tmp_path / "m", "gemma3_text")
    (once,) = computed(0, path, [(layout_of(), True)], ROWS, temperature=1.0)
    model = model_of(path)
    expected = torch.cat([logprobs_of(model, r.prompt, r.response) for r in ROWS]).detach()
    assert float((once["inferred"] - expected).abs().max()) < LIMIT


@pytest.mark.thorough
@pytest.mark.parametrize("layouts", [
    [layout_of(tp=2)], [layout_of(pp=2)], [layout_of(dp=2)], [layout_of(dp=2, zero=1), layout_of(dp=2, zero=3)],
], ids=["tp", "pp", "dp", "zero"])
def test_every_degree_computes_what_one_rank_does(tmp_path, layouts):
    path, rows = str(make_model(tmp_path / "m", num_attention_heads=6, num_key_value_heads=2)), [*ROWS, ROWS[0]]
    for errors in sum(run_world(2, gaps, path, layouts, rows), []):
        for name, error in errors.items():
            assert error < LIMIT, f"{name} differs by {error}"


def test_chunks_of_a_pipeline_rank_and_recomputation(tmp_path):
    path = str(make_model(tmp_path / "m", num_hidden_layers=4))
    for errors in sum(run_world(2, gaps, path, [layout_of(pp=2, vpp=2)], ROWS, "full", "logprobs", (4, 9)), []):
        assert max(errors.values()) < LIMIT


def test_recomputation_changes_no_bit(tmp_path):
    path = make(tmp_path / "m", "gemma2")
    (kept,), (again,) = (computed(0, path, [(layout_of(), True)], ROWS, how) for how in ("none", "full"))
    assert all(torch.equal(x, again[n]) for n, x in kept.items())


def test_adapters(tmp_path):
    base = str(make_model(tmp_path / "m"))
    lora = Lora(4, 8.0, ("q_proj", "v_proj", "o_proj", "mlp.up_proj", "down_proj"))
    make_adapter(tmp_path / "a", base, lora)
    model = adapted(base, Lora(0, 0.0, (), path=str(tmp_path / "a")), "causal_lm", SGD)
    once, each = computed(0, model, [(layout_of(), True), (layout_of(), False)], ROWS)
    assert max(gap(once, each).values()) < LIMIT


def test_values(tmp_path):
    path = str(make_model(tmp_path / "m"))
    once, each = computed(0, path, [(layout_of(), True), (layout_of(), False)], ROWS, what="values")
    assert max(gap(once, each).values()) < LIMIT


def test_groups_that_micro_batches_cut(tmp_path):
    path = str(make_model(tmp_path / "m"))
    once, each = computed(0, path, [(layout_of(), True), (layout_of(), False)], ROWS, cut=(2, 5, 6, 10))
    assert max(gap(once, each).values()) < LIMIT


@pytest.mark.parametrize("family", ["qwen3_next", "minimax"])
def test_models_that_need_complete_sequences_compute_each(tmp_path, family):
    path = make(tmp_path / "m", family)
    once, each = computed(0, path, [(layout_of(), True), (layout_of(), False)], ROWS)
    assert all(torch.equal(x, each[n]) for n, x in once.items())


@pytest.mark.parametrize("family", [*FAMILIES, "qwen3_next", "minimax"])
def test_the_memory_estimate_and_the_backend_agree_on_what_is_shared(tmp_path, family):
    path, layout = make(tmp_path / "m", family), layout_of()
    model = replace(plan_model(path, "causal_lm", SGD), sizes=sizes_of(describe(path, "causal_lm")))
    shard, _ = shard_of(model, layout, 0, True)
    assert shard.stage.shares_prompts == shares_prompts(model, layout) == (family in FAMILIES)


def test_a_row_with_each_prompt_once():
    inputs = inputs_of(packed(ROWS, True))
    assert shared(inputs)
    prompts = {r.group: r.prompt for r in ROWS}
    assert inputs.tokens.tolist() == [*sum(prompts.values(), []), *sum((r.response for r in ROWS), [])]
    assert inputs.targets.tolist() == sum((r.response for r in ROWS), [])
    ends = [n - 1 for n in torch.tensor([len(p) for p in prompts.values()]).cumsum(0).tolist()]
    at, last = iter(inputs.predict_at.tolist()), inputs.last_at.tolist()
    start = ends[-1] + 1
    for i, r in enumerate(ROWS):
        for j in range(len(r.response)):
            assert next(at) == (ends[r.group] if j == 0 else start + j - 1)
        assert last[i] == (start + len(r.response) - 1 if r.response else ends[r.group])
        assert inputs.attention.positions[start : start + len(r.response)].tolist() == list(
            range(len(r.prompt), len(r.prompt) + len(r.response)))
        start += len(r.response)


def test_the_two_sides_of_a_pair_share_their_prompt(tmp_path):
    sides = [rows_of([(12, (4,)), (9, (8,)), (20, (1,))], seed=s) for s in (0, 1)]
    sides[1] = [replace(b, prompt=a.prompt) for a, b in zip(*sides, strict=True)]
    inputs = inputs_of(*(packed(side, True) for side in sides))
    assert shared(inputs) and inputs.sequences == (3, 3) and inputs.responses == (13, 13)
    assert len(inputs.tokens) == 12 + 9 + 20 + 26


def unshared() -> dict[str, tuple]:
    rows, alone = ROWS, rows_of([(9, (4,)), (9, (5,)), (3, (2,))])
    batch = packed(rows, True)
    return {
        "each prompt is there once": (packed(alone, True),),
        "the caller knows none": (packed(rows, False),),
        "the host knows no lengths": (replace(batch, on_host=None),),
        "they save too little": (packed(rows_of([(1, (60, 70))]), True),),
        "conversations": (replace(batch, own=torch.cat([torch.arange(len(r.prompt + r.response)) >= len(r.prompt)
                                                        for r in rows])),),
        "equal names, other lengths": (replace(packed(alone[1:], True), prompts=["p", "p"]),),
    }


@pytest.mark.parametrize("why", unshared())
def test_a_row_of_whole_sequences(why):
    frames = unshared()[why]
    inputs, plain = inputs_of(*frames), inputs_of(*(replace(f, prompts=None) for f in frames))
    assert not shared(inputs)
    assert all(torch.equal(getattr(inputs, x), getattr(plain, x)) for x in ("tokens", "predict_at", "last_at"))


def test_nothing_is_shared_in_groups_of_tokens():
    assert not shared(inputs_of(packed(ROWS, True), in_groups=True))


def test_a_frame_without_names_shares_nothing():
    other = rows_of([(6, (3, 4))], seed=3)
    inputs = inputs_of(packed(ROWS, True), packed(other, False))
    assert shared(inputs) and len(inputs.tokens) == 13 + 3 + 21 + 9 + 16 + 76 + 2 * 6 + 7


def test_responses_that_are_all_empty(tmp_path):
    rows = [Row(0, [3, 4, 5], []), Row(0, [3, 4, 5], []), Row(1, [6], [])]
    inputs = inputs_of(packed(rows, True))
    assert shared(inputs) and inputs.tokens.tolist() == [3, 4, 5, 6] and inputs.last_at.tolist() == [2, 2, 3]
    path = str(make_model(Path(tmp_path) / "m"))
    once, each = computed(0, path, [(layout_of(), True), (layout_of(), False)], [*rows, Row(2, [7, 8], [9])])
    assert max(gap(once, each).values()) < LIMIT
