"""RAFT with replay against plain Python and torch: which rows are kept, which are drawn, the loss and its gradient."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import torch

from rldsl.runtime.weighted_sample import sample_by_weight
from rldsl.sharding.partition import key_of, mix
from tests.end_to_end import reference
from tests.end_to_end.programs import run_program
from tests.end_to_end.test_reference import OPTIMIZER, assert_same, moved
from tests.tiny import make_all

N, CAPACITY, DRAWN, SEED, STEPS = 3, 5, 4, 3, 3
RECORDER = """
import json

def right(rows):
    numbers = [float(sum(r["completion_ids"]) % 5) for r in rows]
    with open({file!r}, "a") as out:
        out.write(json.dumps([[r["prompt_ids"], r["completion_ids"], x] for r, x in zip(rows, numbers)]) + chr(10))
    return numbers
"""
PROGRAM = """
use std.sft (sft)
use py "recorder.py" (right: gen -> seq)
data prompts = jsonl("{rows}", batch=4, max_prompt_tokens=16)
model actor = causal_lm("{base}") train {optimizer}
buffer good = rows(capacity=5)
flow raft(steps=3, seed=3) {{
  prompt = prompts.next()
  gen    = actor.generate(prompt, n=3, max_new_tokens=6)
  reward = right(gen)
  scored = gen with reward=reward
  best   = pick(scored, reward)
  kept   = best where best.reward > 0
  good.add(kept)
  old = good.sample(4, weight=good.reward)
  save actor to "{folder}/before"
  actor.train(old, loss=sft())
  save actor to "{folder}/after"
  metric old = sum(old.reward)
  metric kept = count(kept)
  metric age = mean(mean(actor.logprobs(old) - old.logprobs by seq))
}}
"""


def test_raft_with_replay(tmp_path: Path) -> None:
    tiny = make_all(tmp_path / "tiny")
    (tmp_path / "recorder.py").write_text(RECORDER.format(file=str(tmp_path / "rows.jsonl")))
    (tmp_path / "raft.rlf").write_text(PROGRAM.format(
        rows=tiny / "data/prompts.jsonl", base=tiny / "models/sft", optimizer=OPTIMIZER, folder=tmp_path))
    steps = run_program(tmp_path / "raft.rlf", {}, tmp_path / "run", place="place *.* on mesh(0:1)")

    buffer: list[tuple[int, reference.Sample]] = []  # a row's number, and the row
    drawn: list[reference.Sample] = []
    added = 0
    batches = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    for step, (batch, found) in enumerate(zip(batches, steps, strict=True)):
        rows = [reference.Sample(*row) for row in batch]
        groups = [rows[i : i + N] for i in range(0, len(rows), N)]
        best = [max(group, key=lambda row: row.reward) for group in groups]  # the first of equals
        kept = [row for row in best if row.reward > 0]
        buffer = [*buffer, *enumerate(kept, added)][-CAPACITY:]
        added += len(kept)
        numbers, weights = np.array([q for q, _ in buffer]), np.array([row.reward for _, row in buffer])
        at = sample_by_weight(weights, DRAWN, mix(SEED, key_of("old"), 0) >> 1, step, numbers)
        drawn = [buffer[i][1] for i in sorted(at.tolist())]
        assert found["kept"] == len(kept) and abs(found["old"] - sum(row.reward for row in drawn)) < 1e-6
    assert added > CAPACITY and len(drawn) == DRAWN, "some rows have left"
    assert any(id(row) not in {id(x) for x in rows} for row in drawn), "some rows are of earlier steps"

    actor = reference.causal_lm(tmp_path / "before")  # of the last step
    loss = -torch.cat([reference.response_logprobs(actor, row) for row in drawn]).mean()
    assert abs(steps[-1]["actor/loss"] - loss.item()) < 1e-5 and steps[-1]["age"] != 0
    assert_same(moved(tmp_path / "before", tmp_path / "after"), reference.gradients(actor, loss))
