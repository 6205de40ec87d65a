"""Matrices that a directory divides into several, of unequal heights: read whole, and saved as they were divided."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from rldsl.diag import Failure
from tests.backend_torch.shards import layout_of as at
from tests.backend_torch.shards import plan_model, shard_of
from tests.backend_torch.steps import difference
from tests.end_to_end.programs import run_program
from tests.families.checks import model_of
from tests.families.test_packed_weights import SAVING
from tests.families.tiny_configs import make
from tests.tiny import write_jsonl
from tests.world import run_world

PARTS = ("q", "k", "v")
Tensors = dict[str, torch.Tensor]
CASES = [("olmo_hybrid", (16, 16, 32)), ("olmo_hybrid", (22, 22, 20)), ("kimi_linear", (8, 8, 8))]
SMALL = {"kimi_linear": {"linear_attn_config": dict(kda_layers=[1, 2, 3], full_attn_layers=[4], num_heads=2, head_dim=4,
                                                    short_conv_kernel_size=4)}}


def divided(directory: Path, family: str, heights: tuple[int, ...]) -> Path:
    """A tiny model whose convolutions are stored with these numbers of channels."""
    make(directory, family, **SMALL.get(family, {}))
    file = directory / "model.safetensors"
    tensors = load_file(file)
    for name in [n for n in tensors if n.endswith("q_conv1d.weight")]:
        names = [name.replace("q_conv1d", f"{part}_conv1d") for part in PARTS]
        whole = torch.cat([tensors[n] for n in names])
        tensors |= {n: x.contiguous() for n, x in zip(names, whole.split(heights), strict=True)}
    save_file(tensors, file, metadata={"format": "pt"})
    return directory


def loaded(rank: int, path: str, right: Tensors) -> list[float]:
    made = [shard_of(plan_model(path), layout, rank) for layout in (at(), at(tp=2), at(pp=2), at(dp=2, zero=3))]
    return [difference(shard[0], right) for shard in made if shard is not None]


@pytest.mark.thorough
@pytest.mark.parametrize("family, heights", CASES)
def test_parts_of_any_heights_are_read(tmp_path: Path, family: str, heights: tuple[int, ...]) -> None:
    path = str(divided(tmp_path / "m", family, heights))
    right = dict(model_of(path).state_dict())
    assert [x for errors in run_world(2, loaded, path, right) for x in errors] == [0] * 7


@pytest.mark.thorough
@pytest.mark.parametrize("family, heights", CASES)
def test_they_are_saved_as_they_were(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str,
                                     heights: tuple[int, ...]) -> None:
    """And transformers reads them."""
    from transformers import AutoModelForCausalLM

    monkeypatch.chdir(tmp_path)
    path = divided(tmp_path / "m", family, heights)
    write_jsonl(tmp_path / "rows.jsonl", [{"prompt": "12+3=", "answer": "15"}] * 8)
    (tmp_path / "p.rlf").write_text(SAVING.replace("answer_tokens=8", "answer_tokens=8, max_prompt_tokens=16"))
    run_program(tmp_path / "p.rlf", {"base": str(path)}, tmp_path / "run", "place actor.* on mesh(0:2) tp=2\n")
    saved = tmp_path / "run/out/step-1/actor"
    before, after = load_file(path / "model.safetensors"), {}
    for file in saved.glob("*.safetensors"):
        after |= load_file(file)
    assert {n: x.shape for n, x in before.items()} == {n: x.shape for n, x in after.items()}
    moved = [float((after[n] - x).abs().max()) for n, x in before.items() if "conv1d" in n]
    assert len(moved) > 2 and max(moved) < 2e-3 and min(moved) > 0  # one step of AdamW
    model, unread = AutoModelForCausalLM.from_pretrained(saved, dtype=torch.float32, output_loading_info=True)
    assert not unread["missing_keys"] and not unread["unexpected_keys"] and not unread["mismatched_keys"]
    name = next(n for n in after if n.endswith("0.linear_attn.q_conv1d.weight") or n.endswith("0.self_attn.q_conv1d.weight"))
    whole = torch.cat([after[name.replace("q_conv1d", f"{part}_conv1d")] for part in PARTS])
    assert torch.equal(model.state_dict()[name.replace("q_conv1d", "conv1d")], whole)


def without(tensors: Tensors, end: str) -> Tensors:
    return {n: x for n, x in tensors.items() if not n.endswith(end)}


def shorter(tensors: Tensors) -> Tensors:
    return {n: x[:-1].contiguous() if n.endswith("0.linear_attn.v_conv1d.weight") else x for n, x in tensors.items()}


def flat(tensors: Tensors) -> Tensors:
    return {n: x.flatten() if n.endswith("0.linear_attn.k_conv1d.weight") else x for n, x in tensors.items()}


@pytest.mark.parametrize("change, code, said", [
    (shorter, "RL0723", "have the shapes (16, 1, 4), (16, 1, 4), (31, 1, 4), but together they must have (64, 1, 4)"),
    (flat, "RL0723", "but together they must have (64, 1, 4)"),
    (lambda d: without(d, "0.linear_attn.k_conv1d.weight"), "RL0722", "0.linear_attn.k_conv1d.weight is missing"),
])
def test_wrong_parts_are_refused(tmp_path: Path, change: Callable[[Tensors], Tensors], code: str, said: str) -> None:
    path = divided(tmp_path / "m", "olmo_hybrid", (16, 16, 32))
    model = plan_model(str(path))  # of the sound directory
    file = path / "model.safetensors"
    save_file(change(load_file(file)), file, metadata={"format": "pt"})
    with pytest.raises(Failure) as failure:
        shard_of(model, at(), 0)
    first = failure.value.diagnostics[0]
    assert first.code == code and said in first.title and first.help
