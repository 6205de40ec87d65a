"""What the compiler says of data with images and of the models that read it."""

from __future__ import annotations

import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from examples.tiny import make_model, make_vision_model
from rldsl import api
from rldsl.diag import Failure
from rldsl.models.vision import FAMILIES
from rldsl.runtime.data.image_processor import PROCESSOR_OF
from tests.images.models import qwen3_vl
from tests.verify.faults import faults

PROGRAM = """
data rows = jsonl("rows.jsonl", batch=4, images="images", max_prompt_tokens=64{data})
model actor = causal_lm("{actor}"{model}) train adamw(lr=1e-3)
model other = causal_lm("{other}")
flow f(steps=1, seed=1) {{
  p = rows.next()
  gen = actor.generate(p, max_new_tokens=4){place}
  lp = other.logprobs(gen){placed}
  metric m = mean(lp)
}}
"""


MIXED = {"patches": {"patch_size": 8}, "frames": {"temporal_patch_size": 4}, "merged": {"merge_size": 1}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    made = tmp_path_factory.mktemp("models")
    make_vision_model(made / "vl")
    make_model(made / "text")
    qwen3_vl(made / "deep")
    for name in ("bare", "other"):
        shutil.copytree(made / "vl", made / name)
    (made / "bare" / "preprocessor_config.json").unlink()
    settings = json.loads((made / "other" / "preprocessor_config.json").read_text())
    (made / "other" / "preprocessor_config.json").write_text(json.dumps(settings | {"max_pixels": 3136}))
    for name, change in MIXED.items():
        shutil.copytree(made / "vl", made / name)
        (made / name / "preprocessor_config.json").write_text(json.dumps(settings | change))
    shutil.copytree(made / "vl", made / "newer")  # the settings inside the file of the whole processor
    (made / "newer" / "preprocessor_config.json").unlink()
    (made / "newer" / "processor_config.json").write_text(json.dumps({"image_processor": settings | {"patch_size": 8}}))
    shutil.copytree(made / "vl", made / "unknown")
    config = json.loads((made / "unknown" / "config.json").read_text())
    (made / "unknown" / "config.json").write_text(json.dumps({"model_type": "idefics3", "architectures": [
        "Idefics3ForConditionalGeneration"]} | {k: v for k, v in config.items() if k.endswith("_token_id")}))
    return made


def refused(folder: Path, monkeypatch: pytest.MonkeyPatch, **changes: str):
    monkeypatch.chdir(folder)
    given = dict(actor="vl", other="vl", data="", model="", place="", placed="") | changes
    (folder / "p.rlf").write_text(PROGRAM.format(**given))
    with pytest.raises(Failure) as failure:
        api.compile("p.rlf")
    return failure.value.diagnostics[0]


WRONG = [  # what differs from the program, the code, and what is said
    (dict(actor="text", other="text"), "RL0333", "`actor` cannot read the images of `rows`", "qwen3 models read text alone"),
    (dict(other="text"), "RL0333", "`other` cannot read the images of `rows`", "qwen3 models read text alone"),
    (dict(actor="bare", other="bare"), "RL0333", "`actor` cannot read the images of `rows`", "preprocessor_config.json"),
    (dict(other="other"), "RL0333", "read the same images with different image processors", 'of "other"'),
    (dict(actor="unknown", other="unknown"), "RL0303", 'the family idefics3 of "unknown" is not supported',
     "it reads images in a form that is not known here"),
    (dict(placed=" on mesh(0:2) cp=2"), "RL0318", "do not support context parallelism", "an image belongs to one rank"),
    (dict(model=", invariant=true"), "RL0330", "cannot be invariant", "its vision tower computes all images"),
    (dict(data=', over_long="truncate"'), "RL0205", "rows with images cannot be truncated", "part of an image"),
    (dict(place=" on mesh(0:2) backend=megatron"), "RL0327", "cannot run on the backend `megatron`", "qwen2_5_vl"),
    (dict(actor="deep", other="deep", place=" on mesh(0:4) pp=4"), "RL0308", "too many pipeline stages", "the first 1 layers"),
]


@pytest.mark.parametrize("name, said", [
    ("patches", "patch_size=8, and the vision tower in config.json has patch_size=4"),
    ("frames", "temporal_patch_size=4, and the vision tower"), ("merged", "has spatial_merge_size=2"),
    ("newer", "processor_config.json has patch_size=8")])
def test_a_processor_of_another_model_is_refused(folder, monkeypatch, name, said):
    """Before anything runs: the tower would fail on the first image, or read another one than there is."""
    found = refused(folder, monkeypatch, actor=name, other=name)
    assert found.code == "RL0333" and said in found.notes[0] and "is not that of its model" in found.label


@pytest.mark.parametrize("changes, code, title, label", WRONG)
def test_what_cannot_be_is_refused(folder, monkeypatch, changes, code, title, label):
    found = refused(folder, monkeypatch, **changes)
    assert found.code == code and title in found.title and label in found.label and found.help


def test_a_backend_that_does_not_say_that_it_reads_images_is_refused(folder, monkeypatch):
    from rldsl.placement import backends

    real = backends.described
    monkeypatch.setattr(backends, "described", lambda name: replace(real(name), images=False))
    found = refused(folder, monkeypatch)
    assert found.code == "RL0327" and found.label == "it does not read images"


def test_the_plan_names_the_column(folder, monkeypatch):
    monkeypatch.chdir(folder)
    (folder / "p.rlf").write_text(PROGRAM.format(actor="vl", other="vl", data="", model="", place="", placed=""))
    plan = api.compile("p.rlf")
    (data,) = plan.data
    assert (data.images, data.over_long) == ("images", "error")
    tower = [p for p in plan.models[0].params if p.name.startswith("model.visual.")]
    assert tower and all(p.stage == "first" and p.split is None for p in tower)


LIMITS = [  # options of the data, and what is said
    (", max_image_tokens=65", "images of up to 65 tokens do not fit into a prompt of up to 64", "raise that"),
    (', max_image_tokens=8, images=""', "rows without images have no `max_image_tokens`", "images="),
    (", max_image_tokens=0", "max_image_tokens", ""),
]


@pytest.mark.parametrize("data, said, help_", LIMITS)
def test_limits_of_image_tokens_that_cannot_hold(folder, monkeypatch, data, said, help_):
    if "images=" in data:
        monkeypatch.setattr(sys.modules[__name__], "PROGRAM", PROGRAM.replace('images="images", ', ""))
    found = refused(folder, monkeypatch, data=data)
    assert found.code == "RL0205" and said in found.title and help_ in (found.help or "")


def test_the_plan_has_the_limit_of_image_tokens(folder, monkeypatch):
    monkeypatch.chdir(folder)
    text = PROGRAM.format(actor="vl", other="vl", data=", max_image_tokens=64", model="", place="", placed="")
    (folder / "p.rlf").write_text(text)
    plan = api.compile("p.rlf")
    assert plan.data[0].max_image_tokens == 64 and not faults(plan)
    for wrong in (dict(max_image_tokens=65), dict(images=""), dict(over_long="truncate"), dict(max_image_tokens=-1)):
        assert "images of up to" in faults(replace(plan, data=(replace(plan.data[0], **wrong),)))[0].title


def test_every_family_with_images_has_an_image_processor() -> None:
    assert PROCESSOR_OF.keys() == FAMILIES.keys()


@pytest.mark.parametrize("data, noted", [("", True), (", max_image_tokens=20", False)])
def test_the_refused_memory_says_how_images_were_counted(folder, monkeypatch, data, noted):
    text = PROGRAM.format(actor="vl", other="vl", data=data, model="", place="", placed="")
    (folder / "p.rlf").write_text("cluster nodes=1 gpus=1 memory_gb=0.0001\n" + text)
    monkeypatch.chdir(folder)
    with pytest.raises(Failure) as failure:
        api.compile("p.rlf")
    (found,) = failure.value.diagnostics
    assert found.code == "RL0401"
    assert any("each prompt of `rows` counts as one of images alone" in note for note in found.notes) == noted
