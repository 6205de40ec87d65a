"""gpt-oss' directories with MXFP4 weights: bitwise what transformers unpacks, and saved as plain numbers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from rldsl.backends.torch.model.load_weights import unpacked
from rldsl.diag import Failure
from tests.backend_torch.shards import layout_of as at
from tests.backend_torch.shards import plan_model, shard_of
from tests.backend_torch.steps import difference
from tests.end_to_end.programs import run_program
from tests.families.tiny_configs import make
from tests.tiny import write_jsonl
from tests.world import run_world

SAVING = """
param base = "m"
data rows = jsonl("rows.jsonl", batch=4, kind="answers", max_answer_tokens=8)
model actor = causal_lm(base) train adamw(lr=1e-3)
loss nll(logprobs: token;) { return -mean(logprobs) }
flow run(steps=1) {
  row = rows.next()
  actor.train(row, loss=nll())
  metric m = mean(len(row))
  save actor
}
"""


def packed(directory: Path) -> str:
    """A tiny model as the published ones are stored: experts in blocks of 32 with a scale each."""
    make(directory, "gpt_oss", hidden_size=64, intermediate_size=96, num_hidden_layers=2,
         layer_types=["sliding_attention", "full_attention"])
    file = directory / "model.safetensors"
    draw = torch.Generator().manual_seed(5)
    stored = {}
    for name, x in load_file(file).items():
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            experts, inputs, outputs = x.shape
            stored[f"{name}_blocks"] = torch.randint(0, 256, (experts, outputs, inputs // 32, 16), dtype=torch.uint8,
                                                     generator=draw)
            stored[f"{name}_scales"] = torch.randint(118, 126, (experts, outputs, inputs // 32), dtype=torch.uint8,
                                                     generator=draw)
        else:
            stored[name] = x.bfloat16()
    save_file(stored, file, metadata={"format": "pt"})
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {
        "dtype": "bfloat16", "quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": []}}))
    return str(directory)


def theirs(path: str) -> dict[str, torch.Tensor]:
    """Unpacked by transformers, in bfloat16."""
    from transformers import AutoModelForCausalLM, Mxfp4Config

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16,
                                                 quantization_config=Mxfp4Config(dequantize=True))
    return {n: x.detach() for n, x in model.named_parameters()}


def loaded(rank: int, path: str, dtype: str, right: dict[str, torch.Tensor]) -> list[float]:
    found = []
    for layout in (at(), at(tp=2), at(pp=2), at(dp=2, zero=3)):
        made = shard_of(plan_model(path, dtype=dtype), layout, rank)
        if made is not None:
            found.append(difference(made[0], right))
    return found


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_weights_are_those_that_transformers_unpacks(tmp_path, dtype):
    path = packed(tmp_path / "m")
    right = theirs(path)
    assert float(right["model.layers.0.mlp.experts.down_proj"].float().abs().max()) > 0
    found = run_world(2, loaded, path, dtype, {n: x.to(getattr(torch, dtype)) for n, x in right.items()})
    assert [len(x) for x in found] == [4, 3] and not any(error for errors in found for error in errors)


def test_every_byte_and_scale():
    """Against transformers' function."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    blocks = torch.arange(256, dtype=torch.uint8).reshape(1, 4, 4, 16)
    for scale in (0, 1, 100, 126, 127, 128, 200, 250):
        scales = torch.full((1, 4, 4), scale, dtype=torch.uint8)
        right = convert_moe_packed_tensors(blocks, scales, dtype=torch.bfloat16)
        assert torch.equal(unpacked(blocks, scales).mT.bfloat16(), right), scale


def test_what_is_saved_is_no_longer_packed(tmp_path, monkeypatch):
    """And transformers reads it as it is."""
    from transformers import AutoModelForCausalLM

    monkeypatch.chdir(tmp_path)
    path = packed(tmp_path / "m")
    write_jsonl(tmp_path / "rows.jsonl", [{"prompt": "12+3=", "answer": "15"}] * 8)
    (tmp_path / "p.rlf").write_text(SAVING)
    run_program(tmp_path / "p.rlf", {"base": path}, tmp_path / "run", "place actor.* on mesh(0:1) dp=1\n")
    saved = tmp_path / "run/out/step-1/actor"
    assert "quantization_config" not in json.loads((saved / "config.json").read_text())
    model, unread = AutoModelForCausalLM.from_pretrained(saved, dtype=torch.float32, output_loading_info=True)
    assert not unread["missing_keys"] and not unread["unexpected_keys"]
    right = theirs(path)
    name = "model.layers.1.mlp.experts.gate_up_proj"
    moved = (dict(model.named_parameters())[name].detach() - right[name].float()).abs()
    assert 0 < float(moved.max()) < 2e-3  # one step of AdamW


@pytest.mark.parametrize("change, code", [
    (lambda d: {k: v for k, v in d.items() if not k.endswith("0.mlp.experts.down_proj_scales")}, "RL0722"),
    (lambda d: d | {k: v[:, :, :1].contiguous() for k, v in d.items() if k.endswith("down_proj_blocks")}, "RL0723"),
    (lambda d: d | {k: v.float() for k, v in d.items() if k.endswith("down_proj_scales")}, "RL0721"),
    (lambda d: d | {k: v.fill_(255) for k, v in d.items() if k.endswith("down_proj_scales")}, "RL0729"),
])
def test_damaged_blocks_are_refused(tmp_path, change, code):
    path = packed(tmp_path / "m")
    file = tmp_path / "m/model.safetensors"
    model = plan_model(path, dtype="bfloat16")  # of the sound directory
    save_file(change(load_file(file)), file, metadata={"format": "pt"})
    with pytest.raises(Failure) as failure:
        shard_of(model, at(), 0)
    assert failure.value.diagnostics[0].code == code and failure.value.diagnostics[0].help
