"""Training on concatenated rows against plain torch: which rows there are, their values, loss and gradient."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.end_to_end import reference
from tests.end_to_end.programs import run_program
from tests.end_to_end.test_reference import OPTIMIZER, assert_same, moved
from tests.tiny import make_all

RECORDER = """
import json

def record(kind, rows, numbers):
    with open({file!r}, "a") as out:
        for r, x in zip(rows, numbers):
            out.write(json.dumps([kind, r["prompt_ids"], r["completion_ids"], x]) + chr(10))
    return numbers

def a(rows):
    return record("gen", rows, [float(sum(r["completion_ids"]) % 5) for r in rows])

def b(rows):
    return record("again", rows, [float(sum(r["completion_ids"]) % 3) for r in rows])

def c(rows):
    return record("other", rows, [1.0 + len(r["completion_ids"]) for r in rows])
"""
PROGRAM = """
use py "recorder.py" (a: gen -> seq, b: gen -> seq, c: gen -> seq)
data prompts = jsonl("{rows}", batch=3, max_prompt_tokens=16)
data further = jsonl("{rows}", batch=2, max_prompt_tokens=16)
model actor = causal_lm("{base}") train {optimizer}
loss pg(logprobs: token; old: token, adv: token) {{
  return -mean(sum(exp(logprobs - old) * adv by seq))
}}
flow f(steps=1, seed=3) {{
  prompt = prompts.next()
  second = further.next()
  gen    = actor.generate(prompt, n=3, max_new_tokens=5)
  again  = actor.generate(prompt, n=2, max_new_tokens=4)
  other  = actor.generate(second, n=2, max_new_tokens=6)
  x      = gen with r=a(gen)
  y      = again with r=b(again)
  one    = concat(x, y)
  group  = one with adv=one.r - mean(one.r by prompt)
  r      = c(other)
  z      = other with adv=(r - mean(r by prompt)) * 0.5
  few    = z where r > 2
  mix    = concat(group, few)
  save actor to "before"
  metric rows = count(mix)
  metric adv  = sum(mix.adv)
  metric top  = mean(max(one.r by prompt))
  actor.train(mix, loss=pg(old=mix.logprobs, adv=mix.adv))
  save actor to "after"
}}
"""


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_all(tmp_path_factory.mktemp("tiny"), num_hidden_layers=2)


def groups(rows: list[reference.Sample], n: int) -> list[list[reference.Sample]]:
    return [rows[i : i + n] for i in range(0, len(rows), n)]


def test_rows_and_gradients(tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "recorder.py").write_text(RECORDER.format(file=str(tmp_path / "rows.jsonl")))
    text = PROGRAM.format(rows=tiny / "data/prompts.jsonl", base=tiny / "models/sft", optimizer=OPTIMIZER)
    (tmp_path / "f.rlf").write_text(text.replace('to "', f'to "{tmp_path}/'))
    (step,) = run_program(tmp_path / "f.rlf", {}, tmp_path / "run", place="place *.* on mesh(0:1)")
    lines = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    gen, again, other = ([reference.Sample(p, c, x) for k, p, c, x in lines if k == kind]
                         for kind in ("gen", "again", "other"))

    expected: list[tuple[reference.Sample, float]] = []
    tops = []
    for one, two in zip(groups(gen, 3), groups(again, 2), strict=True):
        assert len({tuple(s.prompt) for s in (*one, *two)}) == 1
        mean = sum(s.reward for s in (*one, *two)) / 5
        expected += [(s, s.reward - mean) for s in (*one, *two)]
        tops.append(max(s.reward for s in (*one, *two)))
    for pair in groups(other, 2):
        mean = sum(s.reward for s in pair) / 2
        expected += [(s, (s.reward - mean) * 0.5) for s in pair if s.reward > 2]
    assert step["rows"] == len(expected) and abs(step["top"] - sum(tops) / 3) < 1e-6
    assert abs(step["adv"] - sum(adv for _, adv in expected)) < 1e-5

    actor = reference.causal_lm(tmp_path / "before")
    losses = []
    for sample, adv in expected:
        new = reference.response_logprobs(actor, sample)
        losses.append(-(torch.exp(new - new.detach()) * adv).sum())
    loss = torch.stack(losses).mean()
    assert abs(step["actor/loss"] - loss.item()) < 1e-5
    assert_same(moved(tmp_path / "before", tmp_path / "after"), reference.gradients(actor, loss))
