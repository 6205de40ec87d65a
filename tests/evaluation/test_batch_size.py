"""What an evaluation samples does not depend on how many rows a batch of its source has."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.end_to_end.programs import run_program
from tests.tiny import make_all

PROGRAM = """
data heldout = jsonl("data/heldout.jsonl", batch={batch}, max_prompt_tokens=16)
model actor = causal_lm("models/sft")
flow f(steps=2, seed=3) {{
  eval heldout {{
    q = heldout.next()
    a = actor.generate(q, n=2, max_new_tokens=6)
    coin = uniform(len(a))
    toss = uniform(mean(len(a) by prompt))
    flip = uniform(a.logprobs)
    metric length = mean(len(a))
    metric score  = mean(a.logprobs)
    metric coin   = mean(coin * len(a))
    metric toss   = mean(toss)
    metric flip   = mean(flip)
  }}
}}
"""


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    make_all(folder, num_hidden_layers=2)
    rows = [{"prompt": f"{11 * i}+{7 * i}="} for i in range(1, 8)]
    (folder / "data/heldout.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    return folder


def test_any_batch_size_gives_the_same_numbers(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tiny)
    found = []
    for batch in (7, 3, 1):
        path = tiny / f"b{batch}.rlf"
        path.write_text(PROGRAM.format(batch=batch))
        lines = run_program(path, {}, tiny / f"run-{batch}")
        found.append([[line[n] for n in ("length", "score", "coin", "toss", "flip")] for line in lines])
    assert found[0][0] != found[0][1], "every step draws anew"
    for other in found[1:]:
        for mine, theirs in zip(found[0], other, strict=True):
            assert mine == pytest.approx(theirs, rel=1e-4)
