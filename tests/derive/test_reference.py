"""Online DPO and a reward model on generated pairs against plain torch: which rows are paired, losses, gradients."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import logsigmoid

from tests.end_to_end import reference
from tests.end_to_end.programs import run_program
from tests.end_to_end.test_reference import OPTIMIZER, assert_same, moved
from tests.tiny import make_all

N, PROMPTS, BETA = 4, 6, 0.3
RECORDER = """
import json

def record(kind, rows, numbers):
    with open({file!r}, "a") as out:
        for r, x in zip(rows, numbers):
            out.write(json.dumps([kind, r["prompt_ids"], r["completion_ids"], x]) + chr(10))
    return numbers

def right(rows):  # few different numbers, so that there are ties
    return record("gen", rows, [float(max(0, sum(r["completion_ids"]) % 7 - 4)) for r in rows])

def won(rows):
    return record("chosen", rows, [float(len(r["completion_ids"])) for r in rows])

def lost(rows):
    return record("rejected", rows, [float(len(r["completion_ids"])) for r in rows])
"""
ONLINE = """
use std.dpo (dpo)
use py "recorder.py" (right: gen -> seq, won: gen -> seq, lost: gen -> seq)
data prompts = jsonl("{rows}", batch=6, max_prompt_tokens=16)
model actor = causal_lm("{base}") train {optimizer}
flow online(steps=1, seed=3) {{
  prompt = prompts.next()
  gen    = actor.generate(prompt, n=4, max_new_tokens=6)
  r      = right(gen)
  scored = gen with reward=r, old=actor.logprobs(gen)
  duel   = pair(pick(scored, r), pick(scored, -r))
  save actor to "before"
  metric duels    = count(duel)
  metric chosen   = mean(won(duel.chosen))
  metric rejected = mean(lost(duel.rejected))
  metric gap      = mean(duel.chosen.reward - duel.rejected.reward)
  actor.train(duel.chosen, duel.rejected,
      loss=dpo(ref_chosen=duel.chosen.old, ref_rejected=duel.rejected.old, beta=0.3))
  save actor to "after"
}}
"""


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_all(tmp_path_factory.mktemp("tiny"), num_hidden_layers=2)


def recorded(file: Path) -> dict[str, list[reference.Sample]]:
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    return {kind: [reference.Sample(p, c, x) for k, p, c, x in rows if k == kind]
            for kind in ("gen", "chosen", "rejected")}


def ran(tiny: Path, folder: Path, body: str, **more: Any) -> tuple[dict[str, float], dict[str, list[reference.Sample]]]:
    (folder / "recorder.py").write_text(RECORDER.format(file=str(folder / "rows.jsonl")))
    text = body.format(rows=tiny / "data/prompts.jsonl", base=tiny / "models/sft", optimizer=OPTIMIZER, **more)
    (folder / "online.rlf").write_text(text.replace('to "', f'to "{folder}/'))
    (step,) = run_program(folder / "online.rlf", {}, folder / "run", place="place *.* on mesh(0:1)")
    return step, recorded(folder / "rows.jsonl")


def duels(rows: list[reference.Sample]) -> list[tuple[reference.Sample, reference.Sample]]:
    """The first best and the first worst of each prompt's N rows, where these are two rows."""
    found = []
    for start in range(0, len(rows), N):
        group = rows[start : start + N]
        numbers = [x.reward for x in group]
        best, worst = numbers.index(max(numbers)), numbers.index(min(numbers))
        found += [(group[best], group[worst])] if best != worst else []
    return found


def test_online_dpo(tiny: Path, tmp_path: Path) -> None:
    step, rows = ran(tiny, tmp_path, ONLINE)
    expected = duels(rows["gen"])
    assert len(rows["gen"]) == N * PROMPTS and 0 < len(expected) < PROMPTS, "a prompt whose rows are all equal"
    assert [(x.prompt, x.response) for x in rows["chosen"]] == [(a.prompt, a.response) for a, _ in expected]
    assert [(x.prompt, x.response) for x in rows["rejected"]] == [(b.prompt, b.response) for _, b in expected]
    assert step["duels"] == len(expected)
    gap = sum(a.reward - b.reward for a, b in expected) / len(expected)
    assert abs(step["gap"] - gap) < 1e-6

    actor = reference.causal_lm(tmp_path / "before")
    losses = []
    for a, b in expected:
        new = [reference.response_logprobs(actor, x).sum() for x in (a, b)]
        lead = (new[0] - new[0].detach()) - (new[1] - new[1].detach())
        losses.append(-logsigmoid(BETA * lead))
    loss = torch.stack(losses).mean()
    assert abs(step["actor/loss"] - loss.item()) < 1e-5
    assert_same(moved(tmp_path / "before", tmp_path / "after"), reference.gradients(actor, loss))


REWARD_MODEL = """
use std.reward_model (reward_model)
use py "recorder.py" (right: gen -> seq, won: gen -> seq, lost: gen -> seq)
data prompts = jsonl("{rows}", batch=6, max_prompt_tokens=16)
model actor = causal_lm("{base}")
model judge = reward_model("{judge}") train {optimizer}
flow learned(steps=1, seed=3) {{
  prompt = prompts.next()
  gen    = actor.generate(prompt, n=4, max_new_tokens=6)
  r      = right(gen)
  duel   = pair(pick(gen, r), pick(gen, -r))
  clear  = duel where over(max(r by prompt) - min(r by prompt), duel.chosen) > 1
  save judge to "before"
  metric clear = count(clear)
  metric chosen = mean(won(clear.chosen))
  judge.train(clear.chosen, clear.rejected, loss=reward_model())
  save judge to "after"
}}
"""


def test_a_reward_model_on_clear_pairs(tiny: Path, tmp_path: Path) -> None:
    step, rows = ran(tiny, tmp_path, REWARD_MODEL, judge=tiny / "models/rm")
    expected = [(a, b) for a, b in duels(rows["gen"]) if a.reward - b.reward > 1]
    assert 0 < len(expected) < len(duels(rows["gen"])) and step["clear"] == len(expected)
    assert [x.response for x in rows["chosen"]] == [a.response for a, _ in expected]

    judge = reference.sequence_classifier(tmp_path / "before")
    losses = [-logsigmoid(reference.final_score(judge, a) - reference.final_score(judge, b)) for a, b in expected]
    loss = torch.stack(losses).mean()
    assert abs(step["judge/loss"] - loss.item()) < 1e-5
    assert_same(moved(tmp_path / "before", tmp_path / "after"), reference.gradients(judge, loss))
