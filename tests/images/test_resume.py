"""The numbers of images outlast a step: in what runs ahead, in selections, in buffers, and in a checkpoint."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from PIL import Image

from examples.tiny import make_vision_model, write_jsonl
from rldsl.runtime.data.read_positions import SourceReading, compare_images
from rldsl.runtime.data.source import open_source
from tests.images.pictures import data_of, make_rows, picture

HERE = Path(__file__).parent
PROGRAM = """
use py "rewards_images.py" (count_a: gen -> seq)
use std.grpo (group_norm, grpo_free)
data prompts = jsonl("rows.jsonl", batch=4, images="images", max_prompt_tokens=120)
model actor = causal_lm("m") train adamw(lr=1e-3)
buffer old = rows(capacity=16)
flow f(steps=4, seed=1, lag=1) {
  p = prompts.next()
  gen = actor.generate(p, n=2, max_new_tokens=5)
  r = count_a(gen)
  kept = gen where r > 0
  actor.train(kept, loss=grpo_free(old=kept.logprobs, adv=group_norm(r)))
  old.add(gen)
  again = old.sample(4)
  lp = actor.logprobs(again)
  metric reward = mean(r)
  metric lp = mean(lp)
  checkpoint every 2
}
"""


def lines(folder: Path, *options: str) -> list[dict[str, float]]:
    subprocess.run([sys.executable, "-m", "rldsl.cli", "run", "p.rlf", "--out", "out", *options], cwd=folder, check=True,
                   capture_output=True, timeout=240)
    names = ("step", "reward", "lp", "actor/loss", "actor/grad_norm")
    return [{k: line[k] for k in names} for line in map(json.loads, (folder / "out/metrics.jsonl").read_text().splitlines())]


@pytest.mark.thorough
def test_a_run_with_lag_and_a_buffer_resumes_exactly(tmp_path):
    make_vision_model(tmp_path / "m", num_hidden_layers=2)
    make_rows(tmp_path, count=12)
    shutil.copy(HERE / "rewards_images.py", tmp_path)
    (tmp_path / "p.rlf").write_text(PROGRAM)
    complete = lines(tmp_path)
    assert len(complete) == 4 and len({line["lp"] for line in complete}) == 4
    shutil.rmtree(tmp_path / "out/checkpoints/step-000004")
    assert lines(tmp_path, "--resume") == complete

    picture(8, 8, 1234).save(tmp_path / "pictures/4_0.png")
    shutil.rmtree(tmp_path / "out/checkpoints/step-000004")
    with pytest.raises(subprocess.CalledProcessError) as refused:
        lines(tmp_path, "--resume")
    said = refused.value.stderr.decode()
    assert "error[RL0764]: an image of `prompts` changed since the checkpoint" in said, said
    assert "rows.jsonl:5" in said and "pictures/4_0.png" in said and "Traceback" not in said


# ---------------------------------------------------------------------------------------------------- alone


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return make_vision_model(tmp_path_factory.mktemp("model") / "m", num_hidden_layers=2)


def reading(path: Path, model: Path) -> tuple[SourceReading, object]:
    source = open_source(data_of(path, model), 1)
    return SourceReading.of(source), source


def same_size_pixel(file: Path) -> None:
    """Another pixel, the same size in bytes, and the same time."""
    before = file.stat()
    image = Image.open(file).convert("RGB")
    for value in range(256):  # a BMP is not compressed
        if image.getpixel((0, 0)) != (value,) * 3:
            image.putpixel((0, 0), (value,) * 3)
            break
    image.save(file)
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert file.stat().st_size == before.st_size


@pytest.mark.parametrize("change, place", [
    (lambda d: None, None),
    (lambda d: d.joinpath("b.bmp").touch(), None),
    (lambda d: same_size_pixel(d / "b.bmp"), 2),
    (lambda d: same_size_pixel(d / "a.bmp"), 1),
    (lambda d: picture(40, 8, 5).save(d / "c.bmp"), 2),
    (lambda d: shutil.copy(d / "a.bmp", d / "b.bmp"), 2),
])
def test_which_image_is_another_one(tmp_path, model, change, place):
    """A file that two rows name is found at the first of them; one that is only written again is the same."""
    for name, seed in (("a", 1), ("b", 2), ("c", 3)):
        picture(8, 8, seed).save(tmp_path / f"{name}.bmp")
    prompt = [{"role": "user", "content": "what?"}]
    path = write_jsonl(tmp_path / "rows.jsonl", [{"prompt": prompt, "answer": "a", "images": names}
                                                 for names in (["a.bmp"], ["b.bmp", "c.bmp"], [], ["b.bmp"])])
    then, _ = reading(path, model)
    change(tmp_path)
    now, source = reading(path, model)
    found, warned = (compare_images(source, then, now, begun) for begun in (True, False))
    if place is None:
        assert found is warned is None
    else:
        assert (found.code, found.severity, found.place) == ("RL0764", "error", f"{path}:{place}")
        assert (warned.code, warned.severity, warned.place) == ("RL0765", "warning", f"{path}:{place}")
    assert compare_images(source, replace(then, images="", image_marks=""), now, True) is None  # an earlier version
    assert compare_images(source, replace(then, sha256="0"), now, True) is None  # other rows: RL0765 says so
    assert SourceReading.read({k: v for k, v in asdict(then).items() if not k.startswith("image")}).images == ""


def test_rows_with_bytes_have_no_files(tmp_path, model):
    pa, pq = (pytest.importorskip(name) for name in ("pyarrow", "pyarrow.parquet"))
    picture(8, 8, 0).save(tmp_path / "a.png")
    content = (tmp_path / "a.png").read_bytes()
    pq.write_table(pa.table({"prompt": ["<|image_pad|>?"] * 4, "answer": ["a"] * 4, "images": [content] * 4}),
                   tmp_path / "rows.parquet")
    found = SourceReading.of(open_source(data_of(tmp_path / "rows.parquet", model, format="parquet"), 1))
    assert (found.images, found.image_marks) == ("", "")
