"""Runs with images: the same on six placements, value and reward models among them; adapters; what is saved is what
transformers computes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from examples.tiny import make_vision_model
from rldsl.diag import Failure
from rldsl.runtime.image_tokens import ids_of
from tests.end_to_end.programs import run_program
from tests.end_to_end.test_invariance import everywhere, placement
from tests.images.checks import inputs_of, model_of, rows_of
from tests.images.models import MAKERS, make
from tests.images.pictures import data_of, make_rows
from tests.samples import thorough_between

HERE = Path(__file__).parent
MODELS = ("actor", "critic", "judge", "ref")
PLACEMENTS = {
    "dp2": everywhere(2, "dp=2", *MODELS), "tp2": everywhere(2, "tp=2", *MODELS), "pp2": everywhere(2, "pp=2", *MODELS),
    "dp2_tp2": everywhere(4, "dp=2 tp=2", *MODELS),
    "apart": placement(4, actor_generate="on mesh(0:2) dp=2", actor_train="on mesh(2:4) tp=2", **{
        "ref_*": "on mesh(0:1) dp=1", "critic_*": "on mesh(2:4) pp=2", "judge_*": "on mesh(0:2) dp=2"}),
    "zero": placement(4, **{"actor_generate": "on mesh(0:4) dp=2 tp=2", "actor_train": "on mesh(0:4) dp=4 zero=3 mbs=1",
                            "critic_train": "on mesh(0:4) dp=2 pp=2 zero=2", "critic_values": "on mesh(0:2) tp=2",
                            "judge_*": "on mesh(0:1) dp=1", "ref_*": "on mesh(0:4) dp=4"}),
}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> Path:
    made = tmp_path_factory.mktemp("tiny")
    make_vision_model(made / "m", num_hidden_layers=2)
    make_rows(made, count=12)
    return made


def sets(tiny: Path) -> dict[str, str]:
    return {"base": str(tiny / "m"), "rows": str(tiny / "rows.jsonl")}


@pytest.fixture(scope="module")
def alone(tiny, tmp_path_factory):
    return run_program(HERE / "grpo_ppo.rlf", sets(tiny), tmp_path_factory.mktemp("alone"), everywhere(1, "dp=1", *MODELS))


def same(found, expected) -> None:
    assert len(found) == len(expected) == 3
    for mine, theirs in zip(found, expected):
        assert {"reward", "score", "value", "gap"} <= theirs.keys()
        assert {k: mine[k] for k in theirs} == pytest.approx(theirs, rel=1e-4, abs=1e-5)


@pytest.mark.thorough
def test_everything_learns(alone):
    assert alone[0]["score"] != 0 and abs(alone[0]["value"]) < 1e-6 < abs(alone[2]["value"])
    assert abs(alone[2]["gap"]) > 1e-3


@pytest.mark.thorough
@pytest.mark.parametrize("name", thorough_between(PLACEMENTS))
def test_placement_changes_no_numbers(tiny, alone, tmp_path, name):
    same(run_program(HERE / "grpo_ppo.rlf", sets(tiny), tmp_path, PLACEMENTS[name], like=alone), alone)


SAVING = """
param base = "m"
data rows = {source}
model actor = causal_lm(base{adapter}) train adamw(lr=1e-2{freeze})
loss nll(logprobs: token;) {{ return -mean(logprobs) }}
flow run(steps=2) {{
  row = rows.next()
  actor.train(row, loss=nll())
  lp = actor.logprobs(row)
  metric logprob = mean(lp)
  save actor
}}
"""


def saved(folder: Path, model: Path, rows: Path, adapter: str = "", freeze: str = "") -> Path:
    source = f'jsonl("{rows}", batch=4, images="images", max_prompt_tokens=120, max_answer_tokens=8, shuffle=false)'
    (folder / "p.rlf").write_text(SAVING.format(source=source, adapter=adapter, freeze=freeze))
    run_program(folder / "p.rlf", {"base": str(model)}, folder / "run", placement(2, **{"actor_*": "on mesh(0:2) dp=1 tp=2"}))
    return folder / "run/out/step-2/actor"


@pytest.mark.thorough
def test_tables_have_the_text_of_prompts_with_images(tiny, tmp_path):
    """On one rank and on two: as samples have it."""
    (tmp_path / "p.rlf").write_text(
        f'data rows = jsonl("{tiny / "rows.jsonl"}", batch=6, images="images", max_prompt_tokens=120, shuffle=false)\n'
        f'model actor = causal_lm("{tiny / "m"}")\n'
        "flow run(steps=2) {\n  prompt = rows.next()\n  gen = actor.generate(prompt, max_new_tokens=4)\n"
        "  metric table shown = gen, count(gen.logprobs by seq)\n}\n")
    for ranks in (1, 2):
        out = tmp_path / str(ranks)
        run_program(tmp_path / "p.rlf", {}, out, placement(ranks, **{"actor_*": f"on mesh(0:{ranks}) dp={ranks}"}))
        lines = [json.loads(line) for line in (out / "out/tables/shown.jsonl").read_text().splitlines()]
        rows = [json.loads(line) for line in (tiny / "rows.jsonl").read_text().splitlines()]
        assert len(lines) == len(rows) == 12
        for line, row in zip(lines, rows, strict=True):
            said = "".join(part.get("text", "") for part in row["prompt"][0]["content"])
            assert line["prompt"] == f"user\n{said}assistant\n" and line["completion"] is not None


def test_what_is_saved_is_read_by_transformers(tiny, tmp_path):
    """With its image processor, and with weights that differ from those before."""
    path = saved(tmp_path, tiny / "m", tiny / "rows.jsonl")
    data = data_of(tiny / "rows.jsonl", path)
    before, after, rows = model_of(str(tiny / "m")), model_of(str(path)), rows_of(data)
    changed = {n for (n, x), (_, y) in zip(before.named_parameters(), after.named_parameters()) if not torch.equal(x, y)}
    assert any("visual.blocks" in n for n in changed) and any("language_model.layers" in n for n in changed)
    row = next(r for r in rows if r.images)
    with torch.no_grad():
        assert after(**inputs_of(row, str(path), ids_of(row.tokens))).logits.isfinite().all()
    assert (path / "preprocessor_config.json").read_bytes() == (tiny / "m/preprocessor_config.json").read_bytes()


def test_a_frozen_tower_does_not_change(tiny, tmp_path):
    path = saved(tmp_path, tiny / "m", tiny / "rows.jsonl", freeze=', freeze="model.visual.*"')
    before, after = (dict(model_of(str(p)).named_parameters()) for p in (tiny / "m", path))
    changed = {n for n, x in before.items() if not torch.equal(x, after[n])}
    assert changed and not any("visual" in n for n in changed)


@pytest.mark.parametrize("family", thorough_between(MAKERS))
def test_adapters_are_on_the_language_model(tiny, tmp_path, family):
    """As PEFT reads them on the model of transformers: its log-probs are ours after the training."""
    from peft import PeftModel

    model = tiny / "m" if family == "qwen2_5_vl" else make(tmp_path / "m", family)
    rows = make_rows(tmp_path / "data", count=4)
    path = saved(tmp_path, model, rows, adapter=", lora(r=4)")
    plain = model_of(str(model))
    adapted, total, count = PeftModel.from_pretrained(model_of(str(model)), str(path)).eval(), 0.0, 0
    for row in rows_of(data_of(rows, model)):
        ids = ids_of(row.tokens)
        with torch.no_grad():
            one, other = (m(**inputs_of(row, str(model), ids)).logits[0].log_softmax(-1)[row.prompt - 1 : -1].gather(
                1, ids[row.prompt :, None]) for m in (adapted, plain))
        assert not torch.allclose(one, other, atol=1e-3)
        total, count = total + float(one.sum()), count + len(one)
    lines = (tmp_path / "run/out/metrics.jsonl").read_text().splitlines()
    assert json.loads(lines[-1])["logprob"] == pytest.approx(total / count, abs=1e-5)


def test_an_adapter_on_the_vision_tower_is_refused(tiny, tmp_path):
    """PEFT makes one of a target that both parts have; to leave its weights out would give other numbers."""
    from peft import LoraConfig, get_peft_model

    get_peft_model(model_of(str(tiny / "m")), LoraConfig(r=4, target_modules=["up_proj"])).save_pretrained(tmp_path / "a")
    with pytest.raises(Failure) as failure:
        saved(tmp_path, tiny / "m", tiny / "rows.jsonl", adapter=f', lora("{tmp_path}/a")')
    (found,) = failure.value.diagnostics
    assert found.code == "RL0342" and "visual.blocks" in found.label


def test_training_continues_from_a_saved_adapter(tiny, tmp_path):
    rows = make_rows(tmp_path / "data", count=4)
    (tmp_path / "one").mkdir()
    first = saved(tmp_path / "one", tiny / "m", rows, adapter=", lora(r=4)")
    saved(tmp_path, tiny / "m", rows, adapter=f', lora("{first}")')
    before, after = (json.loads((p / "run/out/metrics.jsonl").read_text().splitlines()[i])["logprob"]
                     for p, i in ((tmp_path / "one", -1), (tmp_path, -1)))
    assert after > before
