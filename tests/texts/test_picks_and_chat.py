"""Python functions of picked sequences, which write chat messages: what they get, the ids that the template gives, and
the same numbers under every placement."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from tests.end_to_end.programs import Metrics, run_program
from tests.samples import thorough_between
from tests.texts.programs import folder

TEMPLATE = ("{% for m in messages %}{{ m.role[0] }}: {{ m.content }}. {% endfor %}"
            "{% if add_generation_prompt %}a: {% endif %}")
PYTHON = """
import json, os

def debate(rows):
    return [[{"role": "system", "content": "row " + str(r["number"])},
             {"role": "user", "content": r["prompt"] + r["completion"]},
             {"role": "assistant", "content": "no"},
             {"role": "user", "content": r["second"]["completion"]}] for r in rows]

def longer(rows):
    return [len(r["completion"]) - len(r["second"]["completion"]) + r["number"] / 64 for r in rows]

def vowels(rows):
    if os.path.isdir("seen"):
        with open("seen/rows.jsonl", "a") as file:
            file.writelines(json.dumps(row) + chr(10) for row in rows)
    return [float(sum(c in "aeiou" for c in r["completion"])) for r in rows]
"""
PROGRAM = """
use py "debate.py" (debate: first, second -> prompts(max_tokens=64), longer: first, second -> seq,
                    vowels: verdict, first, second -> seq)
data prompts = jsonl("prompts.jsonl", batch=4, max_prompt_tokens=16, shuffle=false)
model actor = causal_lm("model") train adamw(lr=0.01, eps=1e-3)
model judge = causal_lm("judge")
loss pg(logprobs: token; adv: seq) { return -mean(mean(adv * logprobs by seq)) }
flow f(steps=2) {
  prompt  = prompts.next()
  gen     = actor.generate(prompt, n=3, max_new_tokens=5)
  order   = uniform(len(gen))
  first   = pick(gen, order)
  second  = pick(gen, -order)
  verdict = judge.generate(debate(first, second), n=2, max_new_tokens=4)
  more    = actor.generate(first, n=2, max_new_tokens=3)
  won     = mean(vowels(verdict, first, second) by prompt)
  metric again  = mean(abs(actor.logprobs(first) - first.logprobs))
  actor.train(gen, loss=pg(adv=where(order == max(order by prompt), won, 1)))
  metric won    = mean(won)
  metric longer = mean(longer(first, second) + won)
  metric more   = mean(mean(len(more) by prompt) - len(first) + won)
}
"""
PLACES = {
    "dp": "place *.* on mesh(0:2) dp=2",
    "apart": "place @gen on mesh(0:2) dp=2\nplace @more on mesh(2:3)\nplace judge.* on mesh(2:4) tp=2\n"
             "place actor.train on mesh(0:2) pp=2",
}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = folder(tmp_path_factory.mktemp("chat"))
    tokenizer = AutoTokenizer.from_pretrained(base / "judge")
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(base / "judge")
    (base / "debate.py").write_text(PYTHON)
    (base / "f.rlf").write_text(PROGRAM)
    (base / "seen").mkdir()
    return base


def run(base: Path, out: str, place: str = "place *.* on mesh(0:1)", like: Metrics | None = None) -> Metrics:
    before = os.getcwd()
    os.chdir(base)
    try:
        return run_program(base / "f.rlf", {}, base / out, place=place, like=like)
    finally:
        os.chdir(before)


@pytest.fixture(scope="module")
def alone(base: Path) -> Metrics:
    found = run(base, "alone")
    (base / "seen").rename(base / "was seen")
    return found


def rows(base: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (base / "was seen/rows.jsonl").read_text().splitlines()]


def test_the_template_gives_the_ids(base: Path, alone: Metrics) -> None:
    """Of each row the ids are those that transformers makes of its messages, with the prompt of an answer."""
    tokenizer, found = AutoTokenizer.from_pretrained(base / "judge"), rows(base)
    assert len(found) == 2 * 4 * 2
    for row in found:
        one, other = row["first"], row["second"]
        messages = [{"role": "system", "content": f"row {row['number']}"},
                    {"role": "user", "content": one["prompt"] + one["completion"]},
                    {"role": "assistant", "content": "no"}, {"role": "user", "content": other["completion"]}]
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        assert text.startswith("s: row ") and text.endswith("a: ")
        assert row["prompt_ids"] == tokenizer(text, add_special_tokens=False)["input_ids"]
        assert row["prompt"] == text.replace(chr(10), "")


def test_a_function_gets_the_picked_rows(base: Path, alone: Metrics) -> None:
    """Both picks of a row are responses to its own prompt, and two different rows as a rule."""
    found = rows(base)
    assert all(row["first"]["prompt"] == row["second"]["prompt"] for row in found)
    assert sum(row["first"]["completion_ids"] != row["second"]["completion_ids"] for row in found) > len(found) // 2
    assert [row["number"] for row in found] == [i for i in range(8) for _ in range(2)]
    for step, part in zip(alone, (found[:8], found[8:]), strict=True):
        vowels = [sum(c in "aeiou" for c in row["completion"]) for row in part]
        assert step["won"] == pytest.approx(sum(vowels) / len(vowels))
        assert step["again"] < 1e-5


@pytest.mark.thorough
@pytest.mark.parametrize("place", thorough_between(PLACES))
def test_the_placement_changes_no_number(base: Path, alone: Metrics, place: str) -> None:
    found = run(base, place, PLACES[place], like=alone)
    assert len(found) == len(alone) == 2
    for mine, theirs in zip(found, alone, strict=True):
        assert mine == {k: pytest.approx(v, rel=2e-4, abs=2e-5) for k, v in theirs.items()}
