"""A teacher that reads responses behind other prompts has the numbers of transformers for those texts, at the tokens of
the responses; and the placement changes none of them."""

from __future__ import annotations

import json
from math import isfinite
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from tests.end_to_end.programs import Metrics
from tests.other_prompts.programs import folder, run
from tests.samples import thorough_between

HEAT = 0.8
# `lp * gen.logprobs` is right only if the tokens of both are the same ones
NUMBERS = """
  prompt = prompts.next()
  gen    = student.generate(prompt, n=3, max_new_tokens=6, temperature=0.8, stop=["1", "a", "e", "s", "+", "r"])
  asked  = ask(gen)
  lp     = teacher.logprobs(gen, prompt=asked)
  t      = teacher.top(gen, k=5, prompt=asked)
  at     = student.logprobs_at(gen, t.ids)
  back   = teacher.logprobs_at(gen, t.ids, prompt=asked)
  own    = teacher.logprobs(gen)
  far    = teacher.logprobs(gen, prompt=hint(prompt))
  kept   = gen where len(gen) > 2
  part   = teacher.logprobs(kept, prompt=ask(kept))
  metric mean     = mean(lp)
  metric aligned  = mean(lp * gen.logprobs)
  metric lowest   = min(sum(lp by seq))
  metric entropy  = mean(teacher.entropy(gen, prompt=asked))
  metric top      = mean(sum(exp(t.logprobs) * (t.logprobs - at) by token))
  metric differ   = max(abs(back - t.logprobs))
  metric own      = mean(own)
  metric far      = mean(far * gen.logprobs)
  metric some     = mean(part)
  metric over     = mean(over(lp, kept))
  metric score    = mean(judge.score(gen, prompt=asked))
"""
TRAINED = """
  prompt = prompts.next()
  gen    = student.generate(prompt, n=3, max_new_tokens=6, temperature=0.8, stop=["1", "a", "e", "s", "+", "r"])
  asked  = ask(gen)
  d      = teacher.distribution(gen, prompt=asked)
  all    = teacher.top(gen, k=46, prompt=asked)
  s      = student.top(gen, k=7)
  at     = teacher.logprobs_at(gen, s.ids, prompt=asked)
  lp     = teacher.logprobs(gen, prompt=asked)
  kept   = gen where len(gen) > 1
  student.train(gen, loss=sdft(teacher=d, old=gen.logprobs))
  other.train(gen, loss=sdft(teacher=all.logprobs, old=gen.logprobs))
  student.train(gen, loss=sdft(teacher=at, old=gen.logprobs, alpha=1, skip=1))
  student.train(kept, loss=sdft(teacher=d, old=kept.logprobs, alpha=0, others="ignore"), minibatches=2)
  student.train(gen, loss=sdft_sampled(teacher=lp, old=gen.logprobs))
"""
SPREAD_OUT = """
place student.*        on mesh(0:2) dp=2
place teacher.logprobs on mesh(2:4) tp=2
place teacher.*        on mesh(2:4) pp=2 mbs=2
place judge.*          on mesh(0:4) cp=2 dp=2
"""
DIVIDED = """
place student.*        on mesh(0:4) dp=2 tp=2
place student.generate on mesh(1:2)
place teacher.*        on mesh(0:4) dp=4 mbt=128
place teacher.entropy  on mesh(0:2) tp=2
place judge.*          on mesh(0:2) dp=2
"""
ALIKE = """
place student.train        on mesh(0:4) {degrees} mbs=2
place student.*            on mesh(0:1)
place teacher.distribution on mesh(0:4) {degrees}
place teacher.*            on mesh(2:4) dp=2
place other.*              on mesh(2:4) dp=2
"""


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = folder(tmp_path_factory.mktemp("hints"))
    (made / "seen").mkdir()
    return made


def taken(base: Path) -> list[dict[str, Any]]:
    """What `ask` got and returned since the last time, all rows."""
    file = base / "seen/rows.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    file.unlink(missing_ok=True)
    return rows


@pytest.fixture(scope="module")
def alone(base: Path) -> tuple[Metrics, list[dict[str, Any]]]:
    taken(base)
    found = run(base, NUMBERS, "alone")
    return found, taken(base)


@pytest.fixture(scope="module")
def trained(base: Path) -> tuple[Metrics, list[dict[str, Any]]]:
    taken(base)
    found = run(base, TRAINED, "trained", steps=1)
    return found, taken(base)


def table(model: Any, prompt: list[int], ids: list[int]) -> Tensor:
    """[R, V]: log-probs at the temperature of each token of a response."""
    logits = model(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1]
    return (logits / HEAT).log_softmax(-1)


def test_numbers_are_those_of_transformers(base: Path, alone: tuple[Metrics, list[dict[str, Any]]]) -> None:
    metrics, rows = alone
    student, teacher = (AutoModelForCausalLM.from_pretrained(base / n) for n in ("model", "teacher"))
    judge = AutoModelForSequenceClassification.from_pretrained(base / "judge")
    tokenizer = AutoTokenizer.from_pretrained(base / "teacher")
    # each row of `gen` twice at most: `kept` has some of them again
    steps = [rows_of_step(rows, len(metrics), i) for i in range(len(metrics))]
    for line, (all_rows, kept) in zip(metrics, steps, strict=True):
        assert len(all_rows) == 12 and 0 < len(kept) < 12
        told = [(tokenizer(r["text"]).input_ids, r["prompt"], r["ids"]) for r in all_rows]
        with torch.no_grad():
            full = [table(teacher, other, ids) for other, _, ids in told]
            mine = [table(student, prompt, ids) for _, prompt, ids in told]
            scores = [float(judge(torch.tensor([other + ids])).logits) for other, _, ids in told]
            kept_lp = torch.cat([table(teacher, tokenizer(r["text"]).input_ids, r["ids"]).gather(
                1, torch.tensor(r["ids"])[:, None]) for r in kept])
            plain = torch.cat([table(teacher, p, ids).gather(1, torch.tensor(ids)[:, None]) for _, p, ids in told])
            told_less = [tokenizer("{}? {}".format(r["text"].split()[0], r["text"].split(" so ")[1])).input_ids
                         for r in all_rows]
            hinted = [table(teacher, other, ids).gather(1, torch.tensor(ids)[:, None])[:, 0]
                      for other, (_, _, ids) in zip(told_less, told)]
        each = [torch.tensor(ids)[:, None] for _, _, ids in told]
        lp = [x.gather(1, i)[:, 0] for x, i in zip(full, each)]
        sampled = [x.gather(1, i)[:, 0] for x, i in zip(mine, each)]
        best = [x.topk(5) for x in full]
        forward = torch.cat([(b.values.exp() * (b.values - m.gather(1, b.indices))).sum(-1) for b, m in zip(best, mine)])
        close(line["mean"], torch.cat(lp).mean())
        close(line["aligned"], (torch.cat(lp) * torch.cat(sampled)).mean())
        close(line["lowest"], torch.stack([x.sum() for x in lp]).min())
        close(line["entropy"], -torch.cat([(x.exp() * x).sum(-1) for x in full]).mean())
        close(line["top"], forward.mean())
        close(line["own"], plain.mean())
        close(line["far"], (torch.cat(hinted) * torch.cat(sampled)).mean())
        close(line["some"], kept_lp.mean())
        close(line["over"], kept_lp.mean())
        assert line["score"] == pytest.approx(sum(scores) / len(scores), rel=1e-4, abs=1e-5)
        assert line["differ"] < 1e-5 and abs(line["mean"] - line["own"]) > 0.01


def rows_of_step(rows: list[dict[str, Any]], steps: int, i: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """What `ask` got of `gen` and of `kept` in step i: a rank asks for them one after the other."""
    found: list[tuple[list[dict[str, Any]], list[dict[str, Any]]]] = []
    left = list(rows)
    for _ in range(steps):
        every, left = left[:12], left[12:]
        n = sum(len(r["ids"]) > 2 for r in every)
        found.append((every, left[:n]))
        left = left[n:]
    assert not left
    return found[i]


def close(got: float, want: Tensor) -> None:
    assert got == pytest.approx(float(want.detach()), rel=1e-4, abs=1e-5)


def test_the_loss_and_its_gradient_are_those_of_torch(base: Path, trained: tuple[Metrics, list[dict[str, Any]]]) -> None:
    (line,), rows = trained
    student, teacher = (AutoModelForCausalLM.from_pretrained(base / n) for n in ("model", "teacher"))
    tokenizer = AutoTokenizer.from_pretrained(base / "teacher")
    means = []
    for r in rows:
        with torch.no_grad():
            t = table(teacher, tokenizer(r["text"]).input_ids, r["ids"])
        s = table(student, r["prompt"], r["ids"])
        m = (0.5 * t.exp() + 0.5 * s.exp()).log()
        means.append((0.5 * (t.exp() * (t - m)).sum(-1) + 0.5 * (s.exp() * (s - m)).sum(-1)).mean())
    loss = torch.stack(means).mean()
    loss.backward()
    norm = torch.stack([p.grad.norm() for p in student.parameters() if p.grad is not None]).norm()
    assert len(rows) == 12
    for model in ("student", "other"):
        close(line[f"{model}/loss"], loss)
        assert line[f"{model}/grad_norm"] == pytest.approx(float(norm), rel=1e-4)
    assert all(line[f"student#{i}/grad_norm"] > 1e-3 for i in (2, 3, 4))


@pytest.mark.thorough
@pytest.mark.parametrize("place", [SPREAD_OUT, DIVIDED])
def test_a_placement_changes_no_number(base: Path, alone: tuple[Metrics, list[dict[str, Any]]], place: str,
                                       tmp_path: Path) -> None:
    there = run(base, NUMBERS, f"placed{len(place)}", place=place, like=alone[0])
    for a, b in zip(alone[0], there, strict=True):
        assert a == pytest.approx(b, rel=2e-4, abs=2e-5)


@pytest.mark.thorough
@pytest.mark.parametrize("degrees", ["dp=2 tp=2", "pp=2 dp=2"])
def test_a_placement_changes_no_training(base: Path, trained: tuple[Metrics, list[dict[str, Any]]], degrees: str) -> None:
    name = "trained-" + degrees.replace(" ", "-").replace("=", "")
    there = run(base, TRAINED, name, place=ALIKE.format(degrees=degrees), like=trained[0], steps=1)
    for a, b in zip(trained[0], there, strict=True):
        assert a == pytest.approx(b, rel=2e-4, abs=2e-5)


BLOCKS = {
    "average": """
  s  = student.top(gen, k=5)
  at = teacher.logprobs_at(gen, s.ids, prompt=ask(gen))
  student.train(gen, loss=sdft(teacher=at, old=gen.logprobs))
  ema teacher from student 0.95
  checkpoint every 1
""", "itself": """
  s  = student.top(gen, k=5)
  at = student.logprobs_at(gen, s.ids, prompt=ask(gen))
  student.train(gen, loss=sdft(teacher=at, old=gen.logprobs))
""", "collected": """
  repeat {
    more = prompts.next()
    many = student.generate(more, n=2, max_new_tokens=4)
    lp   = teacher.logprobs(many, prompt=ask(many))
    kept = many where mean(lp by seq) > -9
  } until count(kept) > 3 max 2
  student.train(kept, loss=sdft_sampled(teacher=lp, old=kept.logprobs))
  metric later = mean(abs(teacher.logprobs(kept, prompt=ask(kept)) - over(lp, kept)))
""", "evaluation": """
  every 1 {
    eval prompts {
      question = prompts.next()
      answer   = student.generate(question, n=2, max_new_tokens=4)
      far      = teacher.logprobs(answer, prompt=hint(question))
      metric asked  = mean(teacher.logprobs(answer, prompt=ask(answer)))
      metric hinted = mean(far)
    }
  }
""", "continued": """
  more = student.generate(gen, n=2, max_new_tokens=4)
  metric more  = mean(teacher.logprobs(more, prompt=ask(gen)))
  metric whole = mean(teacher.logprobs(whole(more), prompt=hint(prompt)))
""", "lag": """
  d = teacher.distribution(gen, prompt=ask(gen))
  student.train(gen, loss=sdft(teacher=d, old=gen.logprobs))
  checkpoint every 1
"""}


@pytest.mark.parametrize("name", thorough_between(BLOCKS))
def test_it_runs_wherever_calls_may_be(base: Path, name: str) -> None:
    body = "  prompt = prompts.next()\n  gen = student.generate(prompt, n=2, max_new_tokens=4)\n" + BLOCKS[name]
    found = run(base, body, name, lag=1 if name == "lag" else 0)
    assert len(found) == 2 and all(isfinite(x) for line in found for x in line.values())
    if name == "collected":
        assert all(line["later"] < 1e-5 for line in found)
