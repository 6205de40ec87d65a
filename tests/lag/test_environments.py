"""Conversations of later steps: under any placement and order of answers the same bits, also after a resume."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.checkpoint.runs import copy_first_steps, held, lines
from tests.checkpoint.runs import run as run_plan
from tests.end_to_end.programs import compile_program
from tests.end_to_end.test_invariance import placement
from tests.environments import kills
from tests.environments.programs import TALK, folder, run

BODY = f"""
  prompt = prompts.next()
  {TALK}
  adv = group_norm(gen.reward)
  now = actor.logprobs(gen)
  actor.train(gen, loss=pg(adv=per_token(adv, gen.logprobs) + discount(gen.turn_reward, 0.5)))
  metric age    = max(gen.version)
  metric reward = mean(gen.reward)
  metric turns  = mean(gen.turns)
  metric lp     = mean(gen.logprobs)
  metric late   = mean(abs(now - gen.logprobs))
"""
PLACES = {
    "colocated": (placement(2, actor_generate="on mesh(0:2) dp=2", actor_train="on mesh(0:2) pp=2",
                            actor_logprobs="on mesh(0:1)"), 1),
    "rank 0 converses": (placement(4, actor_generate="on mesh(0:1)", actor_train="on mesh(2:4) dp=2",
                                   actor_logprobs="on mesh(1:2)"), 2),
    "rank 0 trains": (placement(4, actor_generate="on mesh(2:4) tp=2", actor_train="on mesh(0:2) dp=2 zero=2",
                                actor_logprobs="on mesh(0:2) dp=2"), 3),
}
ONE = "cluster nodes=1 gpus=1\nplace *.* on mesh(0:1)\n"


def computed(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Without what depends on the clock or on the machine."""
    return [{name: line[name] for name in ("step", "age", "reward", "turns", "lp", "late", "actor/loss",
                                           "actor/grad_norm")} for line in found]


@pytest.mark.thorough
@pytest.mark.parametrize("lag", [1, 2])
def test_every_placement_and_order_of_answers_gives_the_same_bits(lag: int, tmp_path: Path) -> None:
    base, options = folder(tmp_path), ", invariant=training"
    steps = f"{2 + lag}, lag={lag}"  # the last converses with what the first has trained
    one = computed(run(base, BODY, steps=steps, place=ONE, options=options))
    assert [line["age"] for line in one] == [lag] * (2 + lag)
    assert one[0]["late"] == 0 and all(line["late"] for line in one[1:]), "the policy has not moved"
    for place, delays in PLACES.values():
        assert computed(run(base, BODY, steps=steps, place=place, delays=delays, options=options)) == one


RESUMED = {"apart": placement(2, actor_generate="on mesh(0:1)", actor_train="on mesh(1:2)"),
           "together": "cluster nodes=1 gpus=2\nplace *.* on mesh(0:2) dp=2\n"}


@pytest.mark.thorough
@pytest.mark.parametrize("after", [1, 2])
def test_a_resumed_run_has_the_conversations_that_there_were(after: int, tmp_path: Path,
                                                            monkeypatch: pytest.MonkeyPatch) -> None:
    """With real processes of environments; and under another placement."""
    base = kills.prepared(tmp_path)
    file = base / "p.rlf"
    file.write_text(file.read_text().replace("steps=3)", "steps=4, lag=2)").replace("invariant=true", "invariant=training"))
    monkeypatch.chdir(base)
    plans = {name: compile_program(file, {}, place, base) for name, place in RESUMED.items()}
    assert set(run_plan(plans["apart"], base / "whole")) == {""}
    assert set(run_plan(plans["apart"], base / "stopped", stop_after=after)) == {""}
    for then in RESUMED:
        out = base / f"resumed-{then}"
        copy_first_steps(base / "stopped", out, after)
        assert set(run_plan(plans[then], out, resume=out)) == {""}
        assert lines(out) == lines(base / "whole"), then
    mine, theirs = (held(base / x / "checkpoints/step-000004") for x in ("resumed-apart", "whole"))
    assert mine.keys() == theirs.keys() and all(mine[key].equal(theirs[key]) for key in mine)
