"""What runs ahead and reads a state: a resumed run has the numbers that were read, not those of a later step."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from rldsl import api
from rldsl.plan.events import Compute, Generate, Lookup, Loop
from rldsl.plan.projection import event_paths
from tests.checkpoint.runs import copy_first_steps, held, lines, run
from tests.end_to_end.programs import compile_program
from tests.end_to_end.test_invariance import HERE, placement
from tests.tiny import make_all, make_sums, write_jsonl

HEAD = '''
use std.sft (sft)
use std.grpo (group_norm, grpo_free)
use py "rewards_small.py" (digits: gen -> seq)
data prompts = jsonl("few.jsonl", batch=4, max_prompt_tokens=16)
data others  = jsonl("data/prompts.jsonl", batch=2, max_prompt_tokens=16)
model actor = causal_lm("models/sft") train adamw(lr=2e-3, eps=1e-4)
state rate of prompts = 0.5
state goal = 5
state heat = 0.3
'''
# a state of rows selects the prompts, one of the run the responses that are continued; both change below
SELECTED = HEAD + '''
flow selected(steps=6, seed=3, lag={lag}) {{
  prompt = prompts.next()
  asked  = prompt where prompt.rate >= heat
  gen    = actor.generate(asked, n=2, max_new_tokens=4)
  r      = digits(gen)
  some   = gen where r + uniform(r) > heat
  more   = actor.generate(some, n=2, max_new_tokens=3)
  actor.train(gen, loss=grpo_free(old=gen.logprobs, adv=group_norm(r)))
  prompt.rate = 0.4 * prompt.rate
  heat = 0.5 * heat + 0.1 * mean(digits(more))
  metric asked = count(asked)
  metric more  = mean(more.logprobs)
  metric found = count(more)
  {last}
}}
'''
# how often a repeat runs depends on a state, and so does what each iteration asks
COUNTED = HEAD + '''
flow counted(steps=6, seed=3, lag={lag}) {{
  repeat {{
    o    = others.next()
    gen  = actor.generate(o, n=2, max_new_tokens=4)
    r    = digits(gen)
    hot  = r + heat
    kept = gen where hot > 0.4
  }} until count(kept) >= goal max 4
  actor.train(kept, loss=sft())
  goal = where(goal > 8, 2, goal + 3)
  heat = 0.5 * heat + 0.1 * mean(r)
  metric asked = count(gen)
  metric hot   = mean(hot)
  every 2 {{
    prompt = prompts.next()
    best   = prompt where prompt.rate > 0.4
    again  = actor.generate(best, max_new_tokens=3)
    metric again = count(again)
    prompt.rate = 0.3
  }}
  {last}
}}
'''
PROGRAMS = {"selected": (SELECTED, 2), "counted": (COUNTED, 2), "counted1": (COUNTED, 1)}
ONE = "cluster nodes=1 gpus=1\nplace *.* on mesh(0:1)\n"
APART = placement(4, actor_generate="on mesh(0:2) dp=2", actor_train="on mesh(2:4) tp=2")
TOGETHER = "cluster nodes=1 gpus=2\nplace *.* on mesh(0:2) dp=2\n"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = make_all(tmp_path_factory.mktemp("states"), tie_word_embeddings=True, num_hidden_layers=2)
    write_jsonl(folder / "few.jsonl", make_sums(6))  # each row several times in a run
    (folder / "rewards_small.py").write_text((HERE / "rewards_small.py").read_text())
    before = os.getcwd()
    os.chdir(folder)
    yield folder
    os.chdir(before)


def plan(base: Path, name: str, place: str, called: str) -> bytes:
    text, lag = PROGRAMS[name]
    (base / f"{name}.rlf").write_text(text.format(lag=lag, last="checkpoint every 1 keep=9"))
    folder = base / f"{name}-{called}"
    folder.mkdir(exist_ok=True)
    return compile_program(base / f"{name}.rlf", {}, place, folder)


def whole_run(base: Path, name: str) -> Path:
    """What a run without a stop wrote; the tests of one worker share it, whichever of them is the first."""
    whole = base / f"{name}-whole"
    if not whole.exists():
        assert set(run(plan(base, name, TOGETHER, "two"), whole)) == {""}
    return whole


@pytest.mark.thorough
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_stopped_run_resumes(name: str, base: Path) -> None:
    """After each step, as if nothing had happened; from another placement, to the same numbers."""
    whole = whole_run(base, name)
    two, one, four = (plan(base, name, place, called)
                      for place, called in ((TOGETHER, "two"), (ONE, "one"), (APART, "four")))
    counts = {line["asked"] for line in lines(whole)}
    assert len(counts) > 1, "the states change what is generated"
    stopped = base / f"{name}-stopped"
    assert set(run(two, stopped, stop_after=4)) == {""} and len(lines(stopped)) == 4
    for after in (1, 2, 4):
        out = base / f"{name}-{after}"
        copy_first_steps(stopped, out, after)
        assert set(run(two, out, resume=out)) == {""}
        assert lines(out) == lines(whole), after
        found, expected = (held(x / "checkpoints/step-000006") for x in (out, whole))
        assert found.keys() == expected.keys() and all(found[k].equal(expected[k]) for k in found), after
    for start, end, called in ((two, four, "spread"), (four, one, "joined")):
        moved = base / f"{name}-{called}"
        assert set(run(start, moved, stop_after=2, like=whole)) == {""}
        assert set(run(end, moved, resume=moved, like=whole)) == {""}
        for mine, theirs in zip(lines(moved), lines(whole), strict=True):
            assert mine == pytest.approx(theirs, rel=2e-4, abs=2e-5), called


def test_what_reads_a_state_is_stored(base: Path) -> None:
    """And nothing else that is computed: that is done again."""
    whole = whole_run(base, "counted")
    stored = {key.split("|")[2] for key in held(whole / "checkpoints/step-000003") if key.startswith("later step|")}
    made = api.compile(str(base / "counted.rlf"), {})
    states = set(made.lasting)
    for event, path in event_paths(made):
        loops = [x.until.split("@")[0] for x in path[1:] if isinstance(x, Loop)]
        if event.ahead > 0 and isinstance(event, Compute | Lookup):
            read = bool(states.intersection(event.reads))
            names = {b.split("@")[0] for b in event.writes}
            assert names <= stored if read else names.isdisjoint(stored - {*loops}), event
    assert any(e.ahead > 0 and isinstance(e, Generate) for e, _ in event_paths(made))
