"""Blocks in blocks: how often things run, what is logged, what was saved, and how long a schedule is."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rldsl.plan.codec import decode
from rldsl.plan.events import When, Loop
from rldsl.plan.projection import last_step, times
from tests.end_to_end.programs import compile_program, run_program
from tests.tiny import make_model, make_sums, write_jsonl

PROGRAM = """
data rows = jsonl("{root}/rows.jsonl", batch=4, max_prompt_tokens=16, max_answer_tokens=6)
model actor = causal_lm("{root}/model") train adamw(lr=0.01, schedule=linear)
loss nll(logprobs: token; scale) {{ return -scale * mean(logprobs) }}
state zero = 0
flow f(steps={steps}) {{
  row = rows.next()
  {body}
}}
"""


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("blocks")
    make_model(root / "model", num_hidden_layers=2)
    write_jsonl(root / "rows.jsonl", make_sums(32))
    return root


def program(root: Path, body: str, steps: int) -> Path:
    (root / "p.rlf").write_text(PROGRAM.format(root=root, body=body, steps=steps))
    return root / "p.rlf"


TRAIN = "actor.train(row, loss=nll(scale=1))"


@pytest.mark.parametrize("body, steps, updates", [
    (TRAIN, 3, 3), (f"every 2 {{ every 2 {{ {TRAIN} }} }}", 4, 2), (f"repeat 3 {{ every 2 {{ {TRAIN} }} }}", 2, 2),
    (f"every 2 {{ repeat 3 {{ {TRAIN} }} }}", 5, 6), (f"every 2 {{ every 3 {{ {TRAIN} }} }}", 13, 2),
])
def test_a_schedule_is_as_long_as_the_run(root: Path, body: str, steps: int, updates: int) -> None:
    plan = decode(compile_program(program(root, body, steps), {}, None, root), "p")
    assert plan.models[0].planned_updates == updates
    metrics = run_program(root / "p.rlf", {}, root / "run")
    rates = [m["actor/lr"] for m in metrics if "actor/lr" in m]
    assert rates[-1] > 0  # linear: a share of 1 / updates is left for the last (or the mean of a step's)
    assert len(rates) < updates or rates[-1] == pytest.approx(rates[0] / updates)
    assert len({m["step"] for m in metrics}) == len(metrics)


def test_one_line_a_step_and_the_paths_that_were_written(root: Path) -> None:
    body = f"{TRAIN}\n  every 2 {{ {TRAIN} }}\n  metric n = mean(len(row))\n  repeat 2 {{ save actor }}"
    metrics = run_program(program(root, body, 3), {}, root / "lines")
    assert [m["step"] for m in metrics] == [1, 2, 3]
    assert ["actor#2/loss" in m for m in metrics] == [False, True, False] and all("n" in m for m in metrics)
    summary = json.loads((root / "lines/out/summary.json").read_text())
    assert [Path(p).parent.name for p in summary["saved"]] == ["step-3"]
    assert all((root / f"lines/out/step-{n}/actor/config.json").is_file() for n in (1, 2, 3))


def test_a_gradient_that_is_not_finite_ends_the_run(root: Path) -> None:
    with pytest.raises(AssertionError) as caught:
        run_program(program(root, "actor.train(row, loss=nll(scale=1 / zero))\n  save actor", 2), {}, root / "nan")
    assert "RL0733" in str(caught.value)
    assert not (root / "nan/out/step-1").exists()


@pytest.mark.parametrize("path, last, often", [
    ((Loop("s", 10, ()),), 10, 10), ((Loop("s", 10, ()), When(4, ())), 8, 2),
    ((Loop("s", 10, ()), When(4, ()), When(6, ())), 0, 0), ((Loop("s", 13, ()), When(4, ()), When(6, ())), 12, 1),
    ((Loop("s", 3, ()), Loop("r", 2, ())), 3, 6), ((Loop("s", 3, ()), Loop("r", 2, ()), When(2, ())), 3, 3),
    ((Loop("s", 3, ()), Loop("r", 2, ()), When(3, ())), 0, 0), ((Loop("s", 5, ()), When(2, ()), Loop("r", 2, ())), 4, 4),
])
def test_counting_turns(path: tuple, last: int, often: int) -> None:
    assert last_step(path) == last and times(path) == often
