"""A lag, and responses that continue, with experts and with adapters: the same on several ranks as on one."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.end_to_end.programs import Metrics, run_program
from tests.end_to_end.test_invariance import HERE, compare, placement
from tests.moe.shards import make
from tests.tiny import make_all

APART = {"actor_generate": "on mesh(0:2) tp=2", "ref_*": "on mesh(2:3)"}


def run(base: Path, model: Path, folder: Path, text: str, place: str, like: Metrics | None = None) -> Metrics:
    folder.mkdir()
    (folder / "rewards_small.py").write_text((HERE / "rewards_small.py").read_text())
    (folder / "p.rlf").write_text(text)
    return run_program(folder / "p.rlf", {"base": str(model), "rows": str(base / "data/prompts.jsonl"), "eps": 1e-3,
                                          "batch": 4, "samples": 2}, folder, place, like=like)


@pytest.mark.thorough
@pytest.mark.parametrize("per_step", ["", ", per_step=4"])
@pytest.mark.parametrize("kind", ["experts", "adapters"])
def test_a_step_is_that_of_one_rank(kind: str, per_step: str, tmp_path: Path) -> None:
    base = make_all(tmp_path / "tiny", tie_word_embeddings=True, num_hidden_layers=2)
    text = (HERE / "grpo_small.rlf").read_text().replace("seed=7)", "seed=7, lag=1)")
    text = text.replace("temperature=0.9)", f"temperature=0.9{per_step})").replace(
        "  metric length", "  metric age = max(gen.version)\n  metric length")
    if kind == "experts":
        model, train = tmp_path / "moe", "on mesh(2:4) dp=2 ep=2"
        make(model, "qwen3_moe")
    else:
        model, train = base / "models/sft", "on mesh(2:4) dp=2"
        text = text.replace("causal_lm(base) train", 'causal_lm(base, lora(r=4, targets=["q_proj"])) train')
    one = run(base, model, tmp_path / "one", text, "cluster nodes=1 gpus=1\nplace *.* on mesh(0:1)\n")
    assert one[-1]["age"] == (2 if per_step else 1)
    compare(run(base, model, tmp_path / "apart", text, placement(4, actor_train=train, **APART), one), one)
