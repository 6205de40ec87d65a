"""A pass before each minibatch with other arithmetic: bfloat16, adapters, experts, and equal bits on any placement."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.end_to_end.programs import run_program
from tests.moe.shards import make
from tests.tiny import make_model

PROGRAM = """data rows = jsonl("{rows}", batch=6, kind="answers")
model once  = causal_lm("{base}"{options}) train adamw(lr=1e-3)
model twice = causal_lm("{base}"{options}) train adamw(lr=1e-3)
loss plain(logprobs: token; w: seq) {{ return mean(-w * logprobs) }}
loss seen(logprobs: token; w: seq) {{ return -log(exp(mean(w * logprobs))) }}
flow both(steps=2, seed=1) {{
  row = rows.next()
  w = len(row) - 2
  once.train(row, loss=plain(w=w), minibatches=2)
  twice.train(row, loss=seen(w=w), minibatches=2)
}}
"""


def program(folder: Path, base: Path, options: str) -> Path:
    rows = [{"prompt": "a b c"[: 1 + 2 * (i % 3)], "answer": "d e f g"[: 1 + 2 * (i % 4)]} for i in range(12)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    path = folder / "both.rlf"
    path.write_text(PROGRAM.format(rows=folder / "rows.jsonl", base=base, options=options))
    return path


@pytest.mark.thorough
@pytest.mark.parametrize(("options", "place", "rel"), [
    (', dtype="bfloat16"', "place *.train on mesh(0:2) dp=2 zero=2 mbs=1", 2e-2),
    (", lora(r=2)", "place *.train on mesh(0:2) tp=2 mbs=2", 1e-4),
])
def test_other_arithmetic(tmp_path: Path, options: str, place: str, rel: float) -> None:
    path = program(tmp_path, make_model(tmp_path / "m"), options)
    alone = run_program(path, {}, tmp_path / "alone")
    there = run_program(path, {}, tmp_path / "there", place)
    for a, b in zip(alone, there, strict=True):
        for run in (a, b):
            for name in ("loss", "grad_norm"):
                assert run[f"twice/{name}"] == pytest.approx(run[f"once/{name}"], rel=rel)
        assert a == pytest.approx(b, rel=rel)


@pytest.mark.thorough
@pytest.mark.parametrize("degrees", ["pp=2 vpp=2", "dp=2 zero=1"])
def test_megatron(tmp_path: Path, degrees: str) -> None:
    pytest.importorskip("megatron.core")
    path = program(tmp_path, make_model(tmp_path / "m", num_hidden_layers=4), "")
    alone = run_program(path, {}, tmp_path / "alone")
    there = run_program(path, {}, tmp_path / "there", f"place *.train on mesh(0:2) {degrees} mbs=1 backend=megatron")
    for a, b in zip(alone, there, strict=True):
        assert b["twice/grad_norm"] == pytest.approx(b["once/grad_norm"], rel=1e-4)
        assert a == pytest.approx(b, rel=1e-3)


def test_experts(tmp_path: Path) -> None:
    path = program(tmp_path, make(tmp_path / "m", "qwen3_moe"), "")
    alone = run_program(path, {}, tmp_path / "alone")
    there = run_program(path, {}, tmp_path / "there", "place *.train on mesh(0:4) dp=4 ep=2 mbs=1")
    for a, b in zip(alone, there, strict=True):
        assert a["twice/grad_norm"] == pytest.approx(a["once/grad_norm"], rel=1e-4)
        assert a == pytest.approx(b, rel=1e-4)


@pytest.mark.thorough
def test_equal_bits_on_any_placement(tmp_path: Path) -> None:
    path = program(tmp_path, make_model(tmp_path / "m"), ", invariant=training")
    alone = run_program(path, {}, tmp_path / "alone")
    for place in ("dp=4 zero=1", "dp=2 pp=2"):
        there = run_program(path, {}, tmp_path / place.replace(" ", ""), f"place *.train on mesh(0:4) {place}")
        assert there == alone
