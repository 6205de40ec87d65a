"""RL0331: sequences that a model has no positions for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rldsl import api
from rldsl.diag import Failure
from tests.tiny import make_model
from tests.verify.plans import folder

PROGRAM = """
cluster nodes=1 gpus=1
data prompts = jsonl("data/prompts.jsonl", batch=4, max_prompt_tokens={prompt})
model actor = causal_lm("models/{name}")
flow f(steps=1) {{
  p   = prompts.next()
  gen = actor.generate(p, max_new_tokens={new})
  metric length = mean(len(gen))
}}
"""
MODELS = {
    "plain": ({}, 0),
    "learned": ({"family": "gpt2"}, 48),
    "dynamic": ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}, 48),
    "longrope": ({"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4,
                                      "long_factor": [2.0] * 4, "original_max_position_embeddings": 32}}, 32),
}


def compiled(name: str, prompt: int, new: int) -> list[str]:
    """The messages: title and help."""
    with folder() as here:
        given, _ = MODELS[name]
        make_model(here / "models" / name, **given)
        file = Path(here / "models" / name / "config.json")
        config = json.loads(file.read_text())
        config |= {("n_positions" if "n_positions" in config else "max_position_embeddings"): 48}
        file.write_text(json.dumps(config))
        (here / "p.rlf").write_text(PROGRAM.format(prompt=prompt, new=new, name=name))
        try:
            api.compile("p.rlf")
        except Failure as failure:
            assert [d.code for d in failure.diagnostics] == ["RL0331"]
            return [f"{d.title} {d.help}" for d in failure.diagnostics]
        return []


@pytest.mark.parametrize("name", ["learned", "dynamic", "longrope"])
def test_the_last_position_counts(name: str) -> None:
    _, most = MODELS[name]
    assert not compiled(name, 16, most - 16)
    (said,) = compiled(name, 16, most - 15)
    assert f"up to {most + 1} tokens" in said and f"{most} positions" in said and "max_new_tokens" in said
    assert ("micro-batch" in said) == (name != "learned")


def test_rotary_positions_go_on() -> None:
    assert not compiled("plain", 16, 4096)
