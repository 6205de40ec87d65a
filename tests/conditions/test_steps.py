"""`first`, `after` and `stop when`: which steps run what, and when a run ends, on every placement and after a resume."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from rldsl import api
from rldsl.diag import Failure
from rldsl.plan.codec import decode
from rldsl.plan.events import Item, Loop
from rldsl.plan.model import Plan
from rldsl.verify import verify
from tests.checkpoint.runs import lines, run, steps
from tests.end_to_end.programs import compile_program
from tests.end_to_end.test_invariance import HERE
from tests.forked import command
from tests.lag.programs import HEAD
from tests.tiny import make_all

PROGRAM = HEAD + """
state seen = 0
state inner = 0
state evals = 0
data held = jsonl(rows, batch=5, max_prompt_tokens=16)
flow run(steps=9, seed=3, lag={lag}) {
  prompt = prompts.next()
  gen    = actor.generate(prompt, n=2, max_new_tokens=4)
  first 2 { metric early = mean(digits(gen)) }
  after 2 {
    metric late = mean(digits(gen))
    every 2 { actor.train(gen, loss=sft()) }
    first 3 { save actor }
  }
  repeat 4 {
    first 3 { after 1 { inner = inner + 1 } }
  }
  every 2 {
    eval held {
      asked  = held.next()
      answer = actor.generate(asked, greedy=true, max_new_tokens=2)
      evals  = evals + max(len(answer)) / max(len(answer))
    }
  }
  seen = seen + 1
  metric evals = evals
  metric inner = inner
  stop when seen >= 5 and evals >= 2
  stop when inner > 100 and mean(gen.logprobs) < 0
  checkpoint every 3 keep=9
}
"""
PLACES = {
    "one": "cluster nodes=1 gpus=1\nplace *.* on mesh(0:1)\n",
    "apart": "cluster nodes=1 gpus=4\nplace actor.generate on mesh(0:2) dp=2\nplace actor.train on mesh(2:3)\n",
}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("conditions")
    make_all(folder, tie_word_embeddings=True, num_hidden_layers=2)
    (folder / "rewards_small.py").write_text((HERE / "rewards_small.py").read_text())
    before = os.getcwd()
    os.chdir(folder)
    yield folder
    os.chdir(before)


def compiled(base: Path, place: str, lag: int = 0) -> bytes:
    (base / "p.rlf").write_text(PROGRAM.replace("{lag}", str(lag)))
    return compile_program(base / "p.rlf", {}, PLACES[place], base)


def run_of(base: Path, place: str, lag: int) -> Path:
    """What a run wrote; the tests of one worker share it, whichever of them is the first."""
    out = base / f"{place}{lag}"
    if not out.exists():
        assert set(run(compiled(base, place, lag), out)) == {""}
    return out


@pytest.mark.thorough
@pytest.mark.parametrize(("place", "lag"), [("one", 0), ("apart", 0), ("apart", 1), ("one", 2)])
def test_steps(place: str, lag: int, base: Path) -> None:
    out = run_of(base, place, lag)
    found = lines(out)
    assert ["early" in x for x in found] == [True, True, False, False, False], "the run ends after step 5"
    assert ["late" in x for x in found] == [False, False, True, True, True]
    assert ["actor/loss" in x for x in found] == [False, False, False, True, False]
    assert [x["evals"] for x in found] == [0, 1, 1, 2, 2], "once over all rows, not for each batch"
    assert [x["inner"] for x in found] == [2, 4, 6, 8, 10], "iterations 2 and 3 of each step"
    assert [x.name for x in sorted(out.glob("step-*"))] == ["step-3"]
    assert steps(out) == ["step-000003", "step-000005"], "one more after the last step"


@pytest.mark.thorough
def test_a_resumed_run_ends_at_the_same_step(base: Path) -> None:
    """Under another placement; and from the last checkpoint it makes one more step before it tests again."""
    out, whole = base / "again", run_of(base, "one", 0)
    assert set(run(compiled(base, "one"), out, resume=whole / "checkpoints/step-000003")) == {""}
    assert [x["step"] for x in lines(out)] == [4, 5] and lines(out) == lines(whole)[3:]
    more = base / "more"
    assert set(run(compiled(base, "apart"), more, resume=whole / "checkpoints/step-000005")) == {""}
    assert [x["step"] for x in lines(more)] == [6]


def test_it_says_why_it_ends(base: Path) -> None:
    (base / "said.plan").write_bytes(compiled(base, "one"))
    done = command("rldsl.cli", "run", "said.plan", "--out", "said")
    assert done.returncode == 0, done.stderr
    assert "ended after step 5: stop when seen >= 5 and evals >= 2 or inner > 100 and mean(gen.logprobs) < 0 (p.rlf:" in done.stderr


# ------------------------------------------------------------------------------------------------------- refused

TOP = 'data prompts = jsonl("p.jsonl", batch=4)\nmodel actor = causal_lm("m")\n'


@pytest.mark.parametrize(("statement", "code", "said"), [
    ("every 2 { stop when step > 3 }", "RL0212", "inside a block"),
    ("first 2 { stop when step > 3 }", "RL0212", "inside a block"),
    ("repeat 2 { stop when step > 3 }", "RL0212", "inside a block"),
    ("stop when gen.logprobs < 0", "RL0201", "single condition per step, not a token value"),
    ("stop when mean(gen.logprobs)", "RL0203", "needs a condition"),
    ("stop when later > 2", "RL0101", "unknown name"),
    ("after 0 { save actor }", "RL0205", "`after` must be an integer of at least 1"),
    ("first -1 { save actor }", "RL0001", ""),
    ("first 1.5 { save actor }", "RL0205", ""),
    ("repeat 3 { after 3 { sync ref from actor } }", "RL0205", "`after 3` never runs"),
    ("first 3 { checkpoint every 2 }", "RL0212", "`checkpoint` inside a block"),
    ("first 2 { x = mean(gen.logprobs) }\n  metric x = x", "RL0101", "unknown name"),
])
def test_refused(statement: str, code: str, said: str) -> None:
    text = TOP + f"flow run(steps=4) {{\n  prompt = prompts.next()\n  gen = actor.generate(prompt)\n  {statement}\n}}\n"
    found = api.check(text, "p.rlf")
    assert code in {d.code for d in found}, found
    assert any(said in d.title for d in found if d.code == code), [d.title for d in found]


def test_names_may_be_called_first_and_after() -> None:
    text = TOP + """flow run(steps=4) {
  first = prompts.next()
  after = actor.generate(first)
  metric after = mean(len(after))
}
"""
    assert not api.check(text, "p.rlf")


def with_step_loop(plan: Plan, **changes: object) -> Plan:
    def changed(item: Item) -> Item:
        return replace(item, **changes) if isinstance(item, Loop) else item
    return replace(plan, body=tuple(map(changed, plan.body)))


@pytest.mark.parametrize(("until", "code"), [("", "RL0529"), ("late@s1", "RL0610"), ("{seen}", "RL0536")])
def test_forged_plans_are_refused(until: str, code: str, base: Path) -> None:
    """The step loop ends on nothing, on something unknown, on a number."""
    plan = decode(compiled(base, "apart"), "p.plan")
    verify(plan)
    seen = next(s for s in plan.states if s.value == "seen")
    with pytest.raises(Failure) as caught:
        verify(with_step_loop(plan, until=until.replace("{seen}", f"{seen.value}@{seen.spread}")))
    assert code in {d.code for d in caught.value.diagnostics}
