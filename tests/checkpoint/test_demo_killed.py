"""The demo's GRPO program on four ranks, of which random ones are killed thirty times at random moments: what comes out
is the undisturbed run, bit for bit."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.checkpoint.runs import attempt, held, lines, newest, run
from tests.end_to_end.programs import compile_program
from tests.tiny import make_model, make_sums, write_jsonl

EXAMPLES = Path(__file__).parents[2] / "examples"
KILLS, STEPS = 30, 18
LAST = f"checkpoints/step-{STEPS:06d}"
SAVE = '  every steps { save actor to "runs/arithmetic/grpo" }'


def demo(folder: Path) -> bytes:
    """The program as it stands, with a checkpoint after each step, fewer rows of each, and a model of two layers."""
    text = (EXAMPLES / "arithmetic_grpo.rlf").read_text()
    assert text.count(SAVE) == text.count("batch=128") == 1
    (folder / "demo.rlf").write_text(text.replace(SAVE, f"  checkpoint every 1\n{SAVE}")
                                     .replace("batch=128", "batch=4"))
    shutil.copy(EXAMPLES / "rewards.py", folder)
    base = make_model(folder / "base", tie_word_embeddings=True, num_hidden_layers=2)
    rows = write_jsonl(folder / "train.jsonl", make_sums(50))
    return compile_program(folder / "demo.rlf", {"base": str(base), "rows": str(rows), "steps": STEPS}, None, folder)


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Of all safetensors files in a directory."""
    return {key: t for file in sorted(folder.glob("*.safetensors")) for key, t in load_file(file).items()}


@pytest.mark.thorough
@pytest.mark.many
def test_the_demo_survives_thirty_kills(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    data, whole, out, saved = demo(tmp_path), tmp_path / "whole", tmp_path / "out", Path("runs/arithmetic/grpo")
    assert set(run(data, whole)) == {""}
    expected = tensors(saved)

    draw, kills = random.Random(3), dict.fromkeys(range(4), 0)
    while sum(kills.values()) < KILLS:
        steps, victim = draw.choice([0, 0, 0, 1]) if newest(out) < STEPS - 3 else 0, draw.randrange(4)
        if attempt(data, out, steps, draw.uniform(0, 0.8), victim):
            kills[victim] += 1
        else:  # it was quicker than this
            same(out, whole)
            shutil.rmtree(out)
    reached = newest(out)
    assert set(run(data, out, again=True)) == {""}

    same(out, whole)
    again = tensors(saved)
    assert again.keys() == expected.keys() and all(torch.equal(again[k], expected[k]) for k in expected)
    print(f"kills of each rank: {kills}, up to step {reached} of {STEPS}; then equal bit for bit: "
          f"{len(held(out / LAST))} tensors of the checkpoint, {len(again)} of the saved model, {STEPS} lines of "
          "metrics")


def same(out: Path, whole: Path) -> None:
    assert lines(out) == lines(whole) and len(lines(out)) == STEPS
    mine, theirs = held(out / LAST), held(whole / LAST)
    assert mine.keys() == theirs.keys() and all(torch.equal(mine[k], theirs[k]) for k in theirs)
