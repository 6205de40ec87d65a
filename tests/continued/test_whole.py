"""`whole(more)`: all model tokens of a chain of continuations as one response. Against plain torch, over placements, and
what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from rldsl.diag import Diagnostic, Failure
from rldsl.graph.build import build
from rldsl.source import SourceFile
from rldsl.syntax.parse import parse
from tests.derive.test_placements import PLACES
from tests.derive.test_reference import ran
from tests.end_to_end import reference
from tests.end_to_end.test_reference import assert_same, moved
from tests.selection.programs import folder, under
from tests.selection.test_selection import close
from tests.tiny import make_all

BODY = """
  prompt = prompts.next()
  gen    = actor.generate(prompt, n=2, max_new_tokens=5)
  kept   = gen where parity(gen) + spread(gen) > 0.3
  more   = actor.generate(kept, n=2, max_new_tokens=4)
  tail   = actor.generate(more, max_new_tokens=3)
  r      = spread(tail)
  scored = tail with reward=r
  full   = whole(scored)
  best   = full where r >= mean(r by prompt)
  metric same   = mean(abs(full.reward - r))
  metric lens   = sum(abs(len(full) - len(tail) - len(more) - over(len(gen), kept)))
  metric fresh  = mean(abs(actor.logprobs(full) - full.logprobs))
  metric joined = mean(abs(sum(full.logprobs by seq) - sum(tail.logprobs by seq) - sum(more.logprobs by seq)
                           - over(sum(gen.logprobs by seq), kept)))
  metric number = mean(len(full)) + mean(column(full)) + mean(len(best))
  actor.train(full, loss=pg(adv=r, weight=full.reward), minibatches=2)
  metric after  = mean(mean(actor.logprobs(best) by seq))
"""


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return folder(tmp_path_factory.mktemp("whole"))


@pytest.mark.thorough
def test_placements_agree(base: Path) -> None:
    first, *others = under(base, BODY, list(PLACES.values()), steps=2)
    for step in first:
        assert step["same"] < 1e-6 and step["lens"] == 0 and step["fresh"] < 1e-4 and step["joined"] < 1e-4
    for other in others:
        close(other, first)


PROGRAM = """
use py "recorder.py" (right: gen -> seq, won: gen -> seq, lost: gen -> seq)
data prompts = jsonl("{rows}", batch=6, max_prompt_tokens=16)
model actor = causal_lm("{base}") train {optimizer}
loss pg(logprobs: token; old: token, r: seq) {{
  return -mean(r * sum(exp(logprobs - old) by seq))
}}
flow f(steps=1, seed=3) {{
  prompt = prompts.next()
  gen    = actor.generate(prompt, n=2, max_new_tokens=6)
  more   = actor.generate(gen, n=2, max_new_tokens=4)
  full   = whole(more)
  r      = right(full)
  metric first = mean(won(gen))
  metric end   = mean(lost(more))
  save actor to "before"
  actor.train(full, loss=pg(old=full.logprobs, r=r))
  save actor to "after"
}}
"""


def test_loss_and_gradient(tmp_path_factory: pytest.TempPathFactory) -> None:
    tmp = tmp_path_factory.mktemp("run")
    step, rows = ran(make_all(tmp_path_factory.mktemp("tiny"), num_hidden_layers=2), tmp, PROGRAM)
    full, first, end = rows["gen"], rows["chosen"], rows["rejected"]
    assert len(full) == len(end) == 24 and len(first) == 12
    for i, x in enumerate(full):
        assert x.prompt == first[i // 2].prompt and x.response == first[i // 2].response + end[i].response
    assert any(len(x.response) > 6 for x in full), "a continuation"

    actor = reference.causal_lm(tmp / "before")
    losses = []
    for x in full:
        new = reference.response_logprobs(actor, x)
        losses.append(x.reward * (new - new.detach()).exp().sum())
    loss = -torch.stack(losses).mean()
    assert abs(step["actor/loss"] - loss.item()) < 1e-4
    assert_same(moved(tmp / "before", tmp / "after"), reference.gradients(actor, loss))


HEAD = """
use py "r.py" (size: gen -> seq, ask: gen -> prompts(max_tokens=64))
data prompts = jsonl("p.jsonl", batch=8)
data answers = jsonl("a.jsonl", batch=8, kind="answers")
model actor = causal_lm("m") train adamw(lr=1e-6)
loss nll(logprobs: token;) { return -mean(logprobs) }
flow f(steps=1) {
  prompt = prompts.next()
  row    = answers.next()
  gen    = actor.generate(prompt, n=4)
  more   = actor.generate(gen, n=2)
  cold   = actor.generate(gen, temperature=0.5)
  judged = actor.generate(ask(gen), n=2)
"""
MISTAKES = [
    ("x = whole()", "RL0204", "whole"),
    ("x = whole(gen, more)", "RL0204", "whole"),
    ("x = whole(n=more)", "RL0107", "n"),
    ("x = whole(size(more))", "RL0203", "size(more)"),
    ("x = whole(prompt)", "RL0213", "prompt"),
    ("x = whole(row)", "RL0213", "row"),
    ("x = whole(gen)", "RL0213", "gen"),
    ("x = whole(judged)", "RL0213", "judged"),
    ("x = whole(cold)", "RL0205", "cold"),
    ("x = whole(whole(more))", "RL0213", "whole(more)"),
    ("x = whole(more)\nmetric m = mean(x.logprobs - more.logprobs)", "RL0202", None),
    ("a = more with a=more.logprobs\nx = whole(a)\nmetric m = mean(x.a)", "RL0112", "a"),
]


def failed(text: str) -> tuple[Diagnostic, ...]:
    python = "def size(rows):\n    return rows\n\ndef ask(rows):\n    return rows\n"
    with pytest.raises(Failure) as caught:
        build(parse(SourceFile("f.rlf", text)), {}, read=lambda path: python)
    return tuple(caught.value.diagnostics)


@pytest.mark.parametrize("text, code, words", MISTAKES, ids=[m[0] for m in MISTAKES])
def test_a_mistake_is_named(text: str, code: str, words: str | None) -> None:
    (first, *_) = failed(f"{HEAD}{text}\n}}\n")
    assert first.code == code, first
    assert words is None or first.span is not None and first.span.text == words, first


def test_text_in_between_has_a_way_out() -> None:
    (found,) = failed(f"{HEAD}x = whole(judged)\n}}\n")
    assert "text" in found.label and "train on `judged`" in found.help


@pytest.mark.parametrize("text, label, advice", [
    ("tail = actor.generate(prefixes(gen, every=8))\nx = whole(tail)",
     "its prompts are beginnings of the responses of `gen`", "train on `tail`"),
    ("repeat {\np = prompts.next()\na = actor.generate(p)\nb = actor.generate(a)\n} until count(b) > 9 max 2\n"
     "x = whole(b)", "`b` has the sequences of all iterations", "inside the block"),
])
def test_what_else_is_no_chain(text: str, label: str, advice: str) -> None:
    (found,) = failed(f"{HEAD}{text}\n}}\n")
    assert found.code == "RL0213" and found.label == label and advice in found.help
