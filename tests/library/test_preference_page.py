"""Every call under "Supervised and preference" of docs/algorithms.md is tested, and compiles."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from rldsl import api
from tests.library.test_algorithms_page import EXPORTS, LOSSES, PAGE
from tests.library.test_listwise import CALLS
from tests.library.test_more_preferences import MORE
from tests.library.test_preference import ALONE, CASES, DISTRIBUTIONS, PEERS, ROWS
from tests.samples import thorough_between

SECTION = PAGE.partition("## Supervised and preference")[2].partition("\n## ")[0]
SHOWN = list(dict.fromkeys(re.findall(r"^\| [^|]+ \| `([^`]+)` \|", SECTION, re.M)))
PAIRS = {"dpo", "cdpo", "ipo", "simpo", "orpo", "wpo", "alphapo", "f_dpo", "ld_dpo", "hinge", "robust", "exo", "discopop",
         "nca", "aot", "aot_unpaired", "bco_pair", "sppo_hard", "apo_zero", "apo_down"}


def test_every_call_of_the_page_is_tested() -> None:
    papers = {case.call for case in (*CASES.values(), *MORE.values())} | CALLS
    others = {call for _, _, call in PEERS.values()} | {*ALONE.values()} | ROWS | DISTRIBUTIONS
    assert others <= set(SHOWN) and set(SHOWN) <= papers | others


def program(call: str) -> str:
    """A flow around one call."""
    words = {w for w in re.findall(r"\b(\w+)\(", call) if w in EXPORTS}
    uses = "".join(f"use std.{EXPORTS[w]} ({w})\n" for w in sorted(words))
    head = call.partition("(")[0]
    if head == "reward_model":
        end = f"judge.train(pair.chosen, pair.rejected, loss={call})"
    elif call in CALLS:
        end = f"ref = base.logprobs(ranked)\n  actor.train(ranked, loss={call})"
    elif head in PAIRS:
        end = f"actor.train(pair.chosen, pair.rejected, loss={call})"
    else:
        end = f"actor.train({'row' if 'label' in call or head == 'sft' else 'gen'}, loss={call})"
    return f"""{uses}use py "judge.py" (margin: x, y -> seq)
data rows    = jsonl("r.jsonl", batch=8, kind="answers", numbers=["label"])
data others  = jsonl("o.jsonl", batch=8, kind="answers")
data pairs2  = jsonl("p.jsonl", batch=8, kind="pairs", numbers=["m", "wt"])
data prompts = jsonl("q.jsonl", batch=8)
data lists   = jsonl("l.jsonl", batch=8, answers=3)
state shift  = 0
model actor  = causal_lm("a") train adamw(lr=1e-6)
model judge  = reward_model("a") train adamw(lr=1e-6)
model base   = causal_lm("a")
flow f(steps=1) {{
  pair    = pairs2.next()
  row     = rows.next()
  other   = others.next()
  prompt  = prompts.next()
  gen     = actor.generate(prompt, n=4)
  rw      = base.logprobs(pair.chosen)
  rl      = base.logprobs(pair.rejected)
  m       = pair.m
  wt      = pair.wt
  pairs   = 8
  label   = row.label
  ranked  = lists.next()
  index   = ranked.index
  {"" if call in CALLS else "ref = base.logprobs(row)"}
  y       = base.logprobs(row)
  old     = gen.logprobs
  teacher = base.logprobs(gen)
  t       = base.top(gen, k=4)
  at      = base.logprobs_at(gen, t.ids)
  d       = base.distribution(gen)
  {end}
}}
"""


LOSS_CALLS = [c for c in SHOWN if c.partition("(")[0] in LOSSES and "win_rate" not in c]


@pytest.mark.parametrize("call", thorough_between(LOSS_CALLS))
def test_the_call_compiles(call: str, tmp_path: Path) -> None:
    (tmp_path / "judge.py").write_text("def margin(rows):\n    return [0.0] * len(rows)\n")
    assert [f"{d.code} {d.title}" for d in api.check(program(call), str(tmp_path / "page.rlf"))] == []


@pytest.mark.parametrize(("call", "code"), [
    ("dpo(ref_chosen=rw, ref_rejected=rl, loss_type=1)", "RL0107"),
    ('f_dpo(ref_chosen=rw, ref_rejected=rl, divergence="js_divergence")', "RL0205"),
    ("bco(ref=ref, label=label)", "RL0215")])
def test_a_wrong_call_would_be_seen(call: str, code: str, tmp_path: Path) -> None:
    (tmp_path / "judge.py").write_text("def margin(rows):\n    return [0.0] * len(rows)\n")
    assert any(d.code == code for d in api.check(program(call), str(tmp_path / "page.rlf")))
