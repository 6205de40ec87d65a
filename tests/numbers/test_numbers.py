"""Columns of numbers: values of prompts, answers and pairs, checked when the file is opened."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rldsl.diag import Failure
from rldsl.graph.build import build
from rldsl.runtime.data.jsonl import scan
from rldsl.runtime.data.row_errors import check_row
from rldsl.runtime.data.row_schema import RowNeeds
from rldsl.source import SourceFile
from rldsl.syntax.parse import parse
from tests.end_to_end.programs import run_program
from tests.tiny import make_model

PROGRAM = """
use "helpers.rlf" (pick)
data prompts = jsonl("{root}/p.jsonl", batch=4, max_prompt_tokens=16, shuffle=false, numbers=["level"])
data pairs   = jsonl("{root}/q.jsonl", batch=4, max_prompt_tokens=16, max_answer_tokens=6, shuffle=false,
    numbers=["margin", "sure"])
model actor = causal_lm("{root}/model") train adamw(lr=0.01)
loss l(chosen: token, rejected: token; margin: seq) {{
  return mean(margin * (mean(rejected by seq) - mean(chosen by seq)))
}}
loss n(logprobs: token; level: prompt) {{ return -mean(level * mean(logprobs by seq)) }}
flow f(steps=2) {{
  prompt = prompts.next()
  gen    = actor.generate(prompt, n=2, max_new_tokens=4)
  hard   = gen where prompt.level > 2
  pair   = pairs.next()
  sure   = pair where pair.sure > 0
  metric level  = mean(prompt.level)
  metric hard   = mean(over(prompt.level, hard))
  metric margin = mean(pair.margin)
  metric sure   = mean(sure.margin)
  metric none   = max(sure.sure)
  actor.train(hard, loss=n(level=prompt.level))
  actor.train(sure.chosen, sure.rejected, loss=l(margin=pick(sure.margin)))
}}
"""


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("numbers")
    make_model(root / "model")
    (root / "p.jsonl").write_text("".join(json.dumps({"prompt": f"{i}+1=", "level": i}) + "\n" for i in range(8)))
    (root / "q.jsonl").write_text("".join(json.dumps(
        {"prompt": f"{i}=", "chosen": "ab"[: i % 2 + 1], "rejected": "c", "margin": i / 2, "sure": i % 4 != 0}) + "\n"
        for i in range(8)))
    (root / "helpers.rlf").write_text("fn pick(x: seq) -> seq { return x }\n")
    (root / "main.rlf").write_text(PROGRAM.format(root=root))
    return root


def test_numbers_are_values_of_their_rows(root: Path) -> None:
    one = run_program(root / "main.rlf", {}, root / "one", "place *.* on mesh(0:1)")
    four = run_program(root / "main.rlf", {}, root / "four",
                       "place actor.generate on mesh(0:2) tp=2\nplace actor.train on mesh(2:4)", like=one)
    for steps in (one, four):
        assert [s["level"] for s in steps] == [1.5, 5.5] and [s["hard"] for s in steps] == [3, 5.5]
        assert [s["margin"] for s in steps] == [0.75, 2.75] and [s["sure"] for s in steps] == [1, 3]
        assert all(s["none"] == 1 for s in steps)
    for a, b in zip(one, four, strict=True):
        for key in ("actor/loss", "actor#2/loss", "actor#2/grad_norm"):
            assert a[key] == pytest.approx(b[key], rel=1e-5, abs=1e-4), key  # float32; a gradient norm may be large


def problems(top: str, statement: str = "metric m = mean(prompt.level)") -> list[str]:
    text = f'data d = jsonl("x", batch=4, {top})\nmodel a = causal_lm("m")\nflow f(steps=1) {{\n  prompt = d.next()\n' \
           f"  gen = a.generate(prompt)\n  metric n = mean(len(gen))\n  {statement}\n}}\n"
    try:
        build(parse(SourceFile("t.rlf", text)), {})
    except Failure as failure:
        return [f"{d.code} {d.help}" for d in failure.diagnostics]
    return []


def test_declarations() -> None:
    assert problems('numbers=["level"]') == [] == problems('numbers="level"')
    (told,) = problems("shuffle=true")
    assert told.startswith("RL0112") and 'numbers=["level"]' in told
    (near,) = problems('numbers=["leval"]')
    assert "did you mean `leval`" in near
    for bad in ('["chosen"]', '["two words"]', '["a", "a"]', '["tokens"]'):
        assert problems(f"numbers={bad}", "metric m = mean(len(gen))")[0].startswith("RL0205")
    assert problems("numbers=[3]", "metric m = mean(len(gen))")[0].startswith("RL0205")
    assert problems('numbers=["level"]', "metric m = mean(gen.level)")[0].startswith("RL0112")


@pytest.mark.parametrize("row, code", [
    ('{"prompt": "a"}', "RL0746"), ('{"prompt": "a", "x": "3"}', "RL0747"), ('{"prompt": "a", "x": null}', "RL0747"),
    ('{"prompt": "a", "x": NaN}', "RL0747"), ('{"prompt": "a", "x": 1e39}', "RL0747"),
    ('{"prompt": "a", "x": [1]}', "RL0747"),
])
def test_rows(row: str, code: str) -> None:
    (found,) = check_row(json.loads(row), "f:3", RowNeeds({"prompt": "prompt"}, ("x",)))
    assert found.code == code and found.place == "f:3" and "`x`" in found.title


def test_good_rows(tmp_path: Path) -> None:
    (tmp_path / "d.jsonl").write_text('{"prompt": "a", "x": 1}\n{"prompt": "b", "x": true}\n{"prompt": "c", "x": -0.5}\n')
    assert len(scan(str(tmp_path / "d.jsonl"), RowNeeds({"prompt": "prompt"}, ("x",))).table) == 3
