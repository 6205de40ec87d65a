"""What slots do that wait for their environments: the option `waiting` of a placement."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rldsl.clusters.read import read
from rldsl.diag import Failure
from rldsl.memory import curves
from rldsl.plan.codec import decode
from rldsl.plan.events import Generate
from rldsl.plan.model import Plan
from rldsl.plan.projection import walk
from rldsl.simulate.simulate import simulate
from tests.end_to_end.programs import compile_program
from tests.environments.programs import TALK, folder, run, source
from tests.verify.faults import change, codes

TRAIN = "actor.train(gen, loss=pg(adv=per_token(gen.reward, gen.logprobs)))"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return folder(tmp_path_factory.mktemp("waiting"))


def compiled(base: Path, place: str, talk: str = TALK) -> Plan:
    (base / "p.rlf").write_text(source(f"prompt = prompts.next()\n{talk}\nadv = gen.logprobs * 0\n"
                                       "actor.train(gen, loss=pg(adv=adv))\nmetric n = mean(len(gen))"))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(base)
        return decode(compile_program(base / "p.rlf", {}, place, base), "p.plan")


def generates(plan: Plan) -> list[Generate]:
    return [e for e, _ in walk(plan.body) if isinstance(e, Generate)]


@pytest.mark.parametrize("option, waiting", [("", "keep"), (" waiting=keep", "keep"), (" waiting=offload", "offload"),
                                             (" waiting=recompute", "recompute")])
def test_the_plan_says_it(base: Path, option: str, waiting: str) -> None:
    (event,) = generates(compiled(base, f"place actor.generate on mesh(0:1) mbs=2{option}"))
    assert event.waiting == waiting


@pytest.mark.parametrize("place, talk, code, said", [
    ("place actor.generate on mesh(0:1) waiting=drop", TALK, "RL0311", "keep, offload or recompute"),
    ("place actor.generate on mesh(0:1) waiting=true", TALK, "RL0311", "keep, offload or recompute"),
    ("place actor.train on mesh(0:1) waiting=offload", TALK, "RL0320", "cannot use `waiting`"),
    ("place actor.generate on mesh(0:1) waiting=offload", "gen = actor.generate(prompt, max_new_tokens=4)", "RL0320",
     "cannot use `waiting`"),
    ("place @adv on mesh(0:1) waiting=recompute", TALK, "RL0311", "does not apply to a computation"),
    ("place actor.generate on mesh(0:1) waitng=true", TALK, "RL0310", "unknown placement option"),
])
def test_what_it_cannot_be(base: Path, place: str, talk: str, code: str, said: str) -> None:
    with pytest.raises(Failure) as caught:
        compiled(base, place, talk)
    (found,) = caught.value.diagnostics
    assert found.code == code and said in found.title
    assert found.span is not None and "wait" in found.span.text


def test_the_verifier_refuses_it_without_an_environment(base: Path) -> None:
    plan = compiled(base, "place *.* on mesh(0:1)", "gen = actor.generate(prompt, max_new_tokens=4)")
    assert not codes(plan)
    (event,) = generates(plan)
    assert codes(change(plan, event.id, waiting="offload")) == {"RL0615"}


def test_memory_of_what_was_offloaded(base: Path) -> None:
    """8 conversations of at most 64 tokens and 2 slots: 6 may be away, and no more than 3 for each slot."""
    kept, offloaded, dropped = (
        holders(base, f"place *.* on mesh(0:1)\nplace actor.generate on mesh(0:1) mbs={mbs} waiting={waiting}")
        for mbs, waiting in ((2, "keep"), (2, "offload"), (2, "recompute")))
    name = "KV cache of waiting conversations of actor.generate"
    assert name not in kept and name not in dropped
    assert offloaded[name] == 3 * kept["KV cache of actor.generate"] == 3 * dropped["KV cache of actor.generate"]
    one = holders(base, "place *.* on mesh(0:1)\nplace actor.generate on mesh(0:1) mbs=1 waiting=offload")
    assert one[name] == 3 * one["KV cache of actor.generate"]
    assert name not in holders(base, "place *.* on mesh(0:1)\nplace actor.generate on mesh(0:1) waiting=offload")


def holders(base: Path, place: str) -> dict[str, int]:
    """Holder -> the most bytes of it on rank 0."""
    (curve,) = curves(compiled(base, place))
    return {h.what: h.bytes for h in curve.holdings}


def test_slots_are_given_away_in_a_run_and_counted(base: Path) -> None:
    def lines(place: str) -> list[dict[str, Any]]:
        return run(base, f"prompt = prompts.next()\n{TALK}\n{TRAIN}\nmetric lp = mean(gen.logprobs)", delays=3,
                   options=", invariant=true", place=f"place actor.generate on mesh(0:1) {place}")

    kept = lines("mbs=2")
    assert all(line["conversation/slots_given_away"] == 0 for line in kept)
    for waiting in ("offload", "recompute"):
        found = lines(f"mbs=2 waiting={waiting}")
        assert all(line["conversation/slots_given_away"] > 0 for line in found)
        assert [(x["lp"], x["actor/loss"]) for x in found] == [(x["lp"], x["actor/loss"]) for x in kept]


def test_rlc_sim_knows_how_conversations_go(base: Path) -> None:
    """Slow tools make a step longer, and less so if slots are given away."""
    def seconds(waiting: str, file: str) -> float:
        (base / "c.yaml").write_text(f"preset: a100x8\nnodes: 1\n{file}")
        plan = compiled(base, f"place *.* on mesh(0:1)\nplace actor.generate on mesh(0:1) mbs=2 waiting={waiting}")
        return simulate(plan, read(str(base / "c.yaml"))).seconds

    fast = seconds("keep", "")
    slow = seconds("keep", "tool_seconds: 2\n")
    assert slow == pytest.approx(fast + 4 * 3 * 2)  # four pairs of conversations of three turns, one after the other
    assert seconds("keep", "reset_seconds: 2\n") == pytest.approx(fast + 4 * 2)
    assert 3 * 2 < seconds("offload", "tool_seconds: 2\n") < slow / 2
    assert seconds("keep", "tool_seconds: 2\nturns: 1\n") < slow / 1.5
