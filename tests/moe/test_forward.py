"""Log-probs and generation of mixture-of-experts models against plain transformers, and the directories they come
from."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from rldsl.diag import Failure
from rldsl.models.families import describe
from rldsl.plan.events import Sampling
from rldsl.plan.model import Layout, Optimizer
from tests.backend_torch.shards import layout_of as at
from tests.backend_torch.shards import pack, plan_model, shard_of
from tests.backend_torch.test_forward import ROWS, reference
from tests.moe.shards import FAMILIES, make
from tests.samples import thorough_between
from tests.world import run_world

LAYOUTS = [at(), at(tp=2), at(dp=4, ep=4), at(dp=4, ep=2), at(dp=2, tp=2, ep=2), at(dp=2, pp=2, ep=2)]


@pytest.fixture(scope="module")
def directories(tmp_path_factory):
    root = tmp_path_factory.mktemp("moe")
    return {name: make(root / name, name) for name in FAMILIES}


def rows_of(dp: int, place: int) -> list[int]:
    """The last shard has none, and shards have different numbers."""
    return [i for i in range(len(ROWS)) if i * i % max(1, dp - 1) == place] if dp > 1 else list(range(len(ROWS)))


def forwards(rank: int, path: str, layouts: list[Layout]) -> list[Any]:
    """(rows, log-probs) of each layout; the last shard passes with what is not its own."""
    found = []
    for x in layouts:
        made = shard_of(plan_model(path), x, rank, False)
        if made is not None:
            rows = rows_of(x.dp, made[1])
            result = made[0].infer([pack([ROWS[r] for r in rows]), pack([])], "logprobs", 0.7)
            found.append((x, rows, result.tolist()))
    return found


@pytest.mark.parametrize("name", thorough_between(FAMILIES))
def test_logprobs_equal_transformers(directories, name):
    expected = reference(directories[name], 0.7).split([len(r) for _, r in ROWS])
    for x, rows, result in (found for rank in run_world(4, forwards, directories[name], LAYOUTS) for found in rank):
        right = torch.cat([expected[r] for r in rows] + [torch.zeros(0)])
        assert torch.allclose(torch.tensor(result), right, atol=1e-5), x


def generations(rank: int, path: str, samplings: list[tuple[Sampling, int]]) -> list[Any]:
    found = []
    for x in LAYOUTS:
        made = shard_of(plan_model(path), x, rank, False)
        for number, (sampling, limit) in enumerate(samplings if made else ()):
            rows = rows_of(x.dp, made[1])
            prompts = pack([(ROWS[r][0], []) for r in rows])
            prompts.rows.copy_(torch.tensor(rows))
            out = made[0].generate(prompts, sampling, seed=3, step=5, max_num_seqs=limit)
            parts = out.batch.tokens.split((out.batch.prompt_lens + out.batch.response_lens).tolist()) if rows else []
            found += [(number, r, t.tolist()) for r, t in zip(rows, parts)]
    return found


@pytest.mark.thorough
def test_generation_equals_transformers_and_does_not_depend_on_the_layout(directories):
    from transformers import AutoModelForCausalLM

    path = directories["qwen3_moe"]
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    greedy = Sampling(max_new_tokens=6, greedy=True)
    drawn = Sampling(max_new_tokens=6, temperature=1.3, top_p=0.95)
    results = [f for rank in run_world(4, generations, path, [(greedy, 0), (drawn, 2)]) for f in rank]
    for row, (prompt, _) in enumerate(ROWS):
        right = model.generate(torch.tensor([prompt]), max_new_tokens=6, do_sample=False)[0].tolist()
        found = [tokens for number, r, tokens in results if number == 0 and r == row]
        assert len(found) >= len(LAYOUTS) and all(tokens == right for tokens in found)
        found = [tokens for number, r, tokens in results if number == 1 and r == row]
        assert len(found) >= len(LAYOUTS) and all(tokens == found[0] for tokens in found)


def halves(rank: int, path: str) -> list[list[float]]:
    found = []
    for x in (at(), at(dp=2, ep=2), at(tp=2)):
        made = shard_of(plan_model(path, dtype="bfloat16"), x, rank, False)
        if made is not None:
            found.append(made[0].infer([pack(ROWS)], "logprobs", 1.0).tolist())
    return found


def test_halves(directories):
    expected = reference(directories["mixtral"], 1.0)
    for found in (f for rank in run_world(2, halves, directories["mixtral"]) for f in rank):
        assert (torch.tensor(found) - expected).abs().median() < 0.05


def copies(rank: int, path: str) -> list[tuple[Layout, bool, bool]]:
    """(layout, whether a copy in bfloat16 gives its home's numbers, whether it has lost some by rounding)"""
    found = []
    model = plan_model(path, "causal_lm", Optimizer(lr=1e-3), dtype="bfloat16")
    for x in (at(), at(dp=2, ep=2), at(tp=2)):
        home = shard_of(model, x, rank, True)
        copy = shard_of(replace(model, train_layout="", optimizer=None), x, rank, False)
        if home is None or copy is None:
            continue
        for name, tensor in home[0].state_dict().items():
            drawn = torch.randn(tensor.shape, generator=torch.Generator().manual_seed(len(name)))
            copy[0].state_dict()[name].copy_(tensor.mul_(1 + 0.05 * drawn))
        mine, theirs = (s[0].infer([pack(ROWS)], "logprobs", 1.0) for s in (home, copy))
        experts = {n: t for n, t in home[0].state_dict().items() if t.dim() == 3}
        rounds = any(not torch.equal(t, copy[0].state_dict()[n].float()) for n, t in experts.items())
        found.append((x, torch.equal(mine, theirs), rounds))
    return found


@pytest.mark.thorough
@pytest.mark.parametrize("width", [24, 12])
def test_a_copy_of_experts_computes_what_its_home_does(tmp_path, width):
    """Bit by bit, with one kernel for all experts and, where it cannot read them, one after the other."""
    path = make(tmp_path / "m", "qwen3_moe", moe_intermediate_size=width)
    for x, equal, rounds in (f for rank in run_world(2, copies, path) for f in rank):
        assert equal and rounds, x


# ------------------------------------------------------------------------------------------------ directories


def built(path: str) -> Any:
    return shard_of(plan_model(path), at(), 0, False)[0].state_dict()


@pytest.fixture
def mixtral(tmp_path):
    return Path(make(tmp_path / "m", "mixtral"))


def rewritten(directory: Path, change: Any) -> None:
    file = directory / "model.safetensors"
    save_file(change(load_file(file)), file, metadata={"format": "pt"})


@pytest.mark.parametrize("name", FAMILIES)
def test_parameters_are_those_that_transformers_reads(directories, name):
    from transformers import AutoModelForCausalLM

    model, mine = AutoModelForCausalLM.from_pretrained(directories[name]), built(directories[name])
    assert mine.keys() == dict(model.named_parameters()).keys()
    assert all(torch.equal(mine[n], p) for n, p in model.named_parameters())


def test_experts_that_are_one_tensor_on_disk(mixtral):
    """As newer releases save some models."""
    right = built(str(mixtral))
    rewritten(mixtral, lambda all: {n: t.clone() for n, t in right.items()})
    assert not any(s.stored for s in describe(str(mixtral), "causal_lm").params)
    assert all(torch.equal(t, right[n]) for n, t in built(str(mixtral)).items())


def test_experts_in_several_files(mixtral):
    right, stored = built(str(mixtral)), load_file(mixtral / "model.safetensors")
    (mixtral / "model.safetensors").unlink()
    parts = {f"part{i}.safetensors": dict(list(stored.items())[i::3]) for i in range(3)}
    for name, tensors in parts.items():
        save_file(tensors, mixtral / name, metadata={"format": "pt"})
    index = {n: file for file, tensors in parts.items() for n in tensors}
    (mixtral / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    assert all(torch.equal(t, right[n]) for n, t in built(str(mixtral)).items())


EXPERT = "model.layers.1.block_sparse_moe.experts.3.w3.weight"


@pytest.mark.parametrize("change, code, word", [
    (lambda all: {n: t for n, t in all.items() if n != EXPERT}, "RL0722", EXPERT),
    (lambda all: all | {EXPERT: torch.zeros(7, 32)}, "RL0723", EXPERT),
    (lambda all: all | {EXPERT: torch.zeros(48, 32, dtype=torch.int8)}, "RL0721", EXPERT),
    (lambda all: {n: t for n, t in all.items() if "experts" not in n}, "RL0722", "gate_up_proj")])
def test_damaged_experts(mixtral, change, code, word):
    rewritten(mixtral, change)
    with pytest.raises(Failure) as raised:
        built(str(mixtral))
    (found,) = raised.value.diagnostics
    assert found.code == code and word in found.title


def test_experts_of_another_form_run_whole(tmp_path):
    """With biases, gate and up projections interleaved."""
    from tests.tiny import make_model

    path = str(make_model(tmp_path / "m", "gpt_oss", num_local_experts=4, num_hidden_layers=1, head_dim=8))
    found = describe(path, "causal_lm")
    assert found.experts == 0 and not any(s.split or s.experts for s in found.params if "experts" in s.name)
    assert found.tp_problem == "" and any(s.split for s in found.params if "self_attn" in s.name)
