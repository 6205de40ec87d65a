"""What programs say about environments, before anything runs, and what the verifier refuses in plans."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rldsl import api
from rldsl.diag import Failure
from rldsl.plan.codec import decode, encode
from rldsl.plan.events import Generate
from rldsl.plan.model import Plan
from rldsl.verify import verify
from rldsl.verify.issue_order import IssueOrder
from tests.environments.programs import TALK, folder, source
from tests.verify.test_issue import crossed, unequal


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return folder(tmp_path_factory.mktemp("language"))


def said(base: Path, body: str, monkeypatch: pytest.MonkeyPatch, old: str = "", new: str = "") -> list[tuple[str, str]]:
    """(code, underlined text) of what checking says. old, new: a change of the program."""
    monkeypatch.chdir(base)
    return [(d.code, d.span.text if d.span else "") for d in api.check(source(body).replace(old, new), "page.rlf")
            if d.severity == "error"]


TALKED = f"prompt = prompts.next()\n{TALK}\n"
TRAIN = "actor.train(gen, loss=pg(adv=per_token(gen.reward, gen.logprobs)))\n"


@pytest.mark.parametrize("body", [
    TRAIN,
    "kept = gen where std(gen.reward by prompt) > 0 and gen.stopped == 0\nmetric x = mean(kept.reward + kept.turns)",
    "best = pick(gen, gen.reward)\nmetric x = mean(best.reward - max(gen.reward by prompt))",
    "metric x = mean(next(gen.logprobs) + at_end(gen.reward, gen))",
    "more = actor.generate(prompt, env=Guess, max_turns=3, max_tokens=80)\nboth = concat(gen, more)\nmetric x = mean(both.reward)\n"
    "metric y = mean(both.turn_reward)",
    "r = discount(gen.turn_reward, 0.9)\nmetric x = mean(r * gen.logprobs + mean(gen.logprobs by turn))",
    "actor.train(gen, loss=pg(adv=cumsum(gen.turn_reward)))",
    "metric x = mean(where(uniform(gen.turn_reward) > 0.5, 1, 0))",
    "metric x = mean(sum(gen.turn_reward by seq) + max(gen.turn_reward by prompt))",
    "metric own = mean(len(gen))\nmetric lp = mean(actor.logprobs(gen))\nmetric fin = mean(where(gen.finished, 1, 0))",
])
def test_fine(base: Path, body: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert said(base, TALKED + body, monkeypatch) == []


@pytest.mark.parametrize("body, expected", [
    ("more = actor.generate(gen)", [("RL0213", "gen")]),
    ("cuts = prefixes(gen, every=2)", [("RL0213", "gen")]),
    ("one = actor.generate(prompt)\nboth = concat(gen, one)", [("RL0213", "one")]),
    ("g = actor.generate(prompt, max_turns=3)", [("RL0107", "max_turns")]),
    ("g = actor.generate(prompt, max_tokens=99)", [("RL0107", "max_tokens")]),
    ("g = actor.generate(prompt, env=Guess)", [("RL0215", "actor.generate(prompt, env=Guess)")]),
    ("g = actor.generate(prompt, env=Guess, max_tokens=16)", [("RL0205", "16")]),
    ("g = actor.generate(prompt, env=actor, max_tokens=99)", [("RL0203", "actor")]),
    ("g = actor.generate(prompt, env=Gues, max_tokens=99)", [("RL0101", "Gues")]),
    ("g = actor.generate(prompt, env=Guess, max_tokens=99, max_turns=0)", [("RL0205", "0")]),
    ("g = actor.generate(prompt, env=Guess, max_tokens=99, on_error=go)", [("RL0101", "go")]),
    ("g = actor.generate(prompt, env=Guess, max_tokens=99, turn_timeout=0)", [("RL0205", "0")]),
    ("one = actor.generate(prompt)\nmetric x = mean(one.reward)", [("RL0112", "reward")]),
    ("x = Guess(gen)", [("RL0203", "Guess")]),
    ("g = actor.generate(prompt, env=[Guess, actor], max_tokens=99)", [("RL0203", "actor")]),
    ("g = actor.generate(prompt, env=[Guess, Guess], max_tokens=99)", [("RL0205", "Guess")]),
    ("g = actor.generate(prompt, env=[], max_tokens=99)", [("RL0205", "[]")]),
    ("one = actor.generate(prompt)\nmetric x = mean(mean(one.logprobs by turn))", [("RL0201", "one.logprobs")]),
    ("metric x = mean(last(gen.turn_reward))", [("RL0201", "gen.turn_reward")]),
    ("metric x = mean(discount(gen.turn_reward, gen.reward))", [("RL0201", "gen.reward")]),
    ("metric x = mean(sum(gen.reward by turn))", [("RL0208", "gen.reward")]),
    ("more = actor.generate(prompt, env=Guess, max_tokens=80)\nboth = concat(gen, more)", [("RL0213", "more")]),
    ("more = actor.generate(prompt, env=Guess, max_tokens=80)\nmetric x = mean(gen.turn_reward + more.turn_reward)",
     [("RL0202", "gen.turn_reward + more.turn_reward")]),
])
def test_mistakes(base: Path, body: str, expected: list[tuple[str, str]], monkeypatch: pytest.MonkeyPatch) -> None:
    assert said(base, TALKED + body, monkeypatch) == expected


@pytest.mark.parametrize("options, code, help_", [
    ("env=Guess, max_tokens=80, on_eror=end", "RL0107", "did you mean `on_error`?"),
    ("env=Guess, max_tokens=80, max_turn=2", "RL0107", "did you mean `max_turns`?"),
    ("env=Guess, max_token=80", "RL0107", "did you mean `max_tokens`?"),
    ("envs=Guess", "RL0107", "did you mean `env`?"),
    ("env=Guess, max_tokens=80, xyzzy=2", "RL0107", "options: n, max_new_tokens, "),
    ("env=Guess, max_tokens=80, xyzzy=2", "RL0107", ", env, max_turns, max_tokens, turn_timeout, on_error"),
    ("env=Guess, max_tokens=80, waiting=offload", "RL0107", "it is an option of the placement"),
    ("env=Guess, max_tokens=80, keep=false", "RL0107", "it is an option of the placement"),
    ("env=Guess, max_tokens=80, vpp=2", "RL0107", "it is an option of the placement"),
    ("env=Guess, max_tokens=80, on_error=skip", "RL0101", "one of: stop, end"),
    ('env=Guess, max_tokens=80, on_error="skip"', "RL0205", "one of: stop, end"),
])
def test_misspelt_options(base: Path, options: str, code: str, help_: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(base)
    found = api.check(source(f"prompt = prompts.next()\ngen = actor.generate(prompt, {options})\n"), "page.rlf")
    assert found[0].code == code and help_ in found[0].help, found


def test_a_buffer_keeps_no_conversations(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert said(base, TALKED + "good.add(gen)", monkeypatch, "model actor", "buffer good = rows(capacity=9)\nmodel actor"
                )[0] == ("RL0213", "gen")


@pytest.mark.parametrize("declared, code", [
    ("Gess: env", "RL0110"), ("Guess: gen -> seq", "RL0110"), ("Guess: gen -> env", "RL0201"),
])
def test_declarations(base: Path, declared: str, code: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert said(base, TALKED, monkeypatch, "Guess: env", declared)[0][0] == code


def test_a_function_may_make_the_environment(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (base / "made.py").write_text("def make():\n    return object()\n")
    text = source(TALKED).replace(source(TALKED).partition('use py "')[2].partition('"')[0], "made.py")
    monkeypatch.chdir(base)
    assert not api.check(text.replace("Guess", "make"), "page.rlf")


@pytest.fixture(scope="module")
def plan(base: Path) -> Plan:
    (base / "p.rlf").write_text(source(TALKED + TRAIN))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(base)
        return api.compile("p.rlf")


def test_a_turn_may_be_allowed_more_than_a_conversation(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever limit comes first ends it."""
    monkeypatch.chdir(base)
    (base / "long.rlf").write_text(source(TALKED + TRAIN).replace("max_new_tokens=4", "max_new_tokens=500"))
    (event,) = [e for e in _events(api.compile("long.rlf")) if isinstance(e, Generate)]
    assert event.sampling.max_new_tokens == 500 and event.conversation and event.conversation.max_tokens == 64


def test_the_plan_names_the_environment(plan: Plan) -> None:
    (function,) = plan.functions
    assert (function.returns, function.name, function.columns) == ("env", "Guess", ("number",))
    (event,) = [e for e in _events(plan) if isinstance(e, Generate)]
    assert event.conversation is not None and event.conversation.max_tokens == 64
    assert {b.split("@")[0] for b in event.writes} >= {"gen.reward", "gen.turns", "gen.stopped"}
    assert decode(encode(plan), "p") == plan


def _events(plan: Plan) -> list[Any]:
    from rldsl.verify.tables import tables

    return [e for e, _ in tables(plan).events]


def _mutated(plan: Plan, change: Callable[[Generate], Generate]) -> Plan:
    from rldsl.plan.events import Loop

    def each(items: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(replace(i, body=each(i.body)) if isinstance(i, Loop) else change(i) if isinstance(i, Generate)
                     else i for i in items)
    return replace(plan, body=each(plan.body))


@pytest.mark.parametrize("change", [
    lambda e: replace(e, conversation=None),
    lambda e: replace(e, conversation=replace(e.conversation, environments=("other",))),
    lambda e: replace(e, conversation=replace(e.conversation, environments=())),
    lambda e: replace(e, conversation=replace(e.conversation, environments=2 * e.conversation.environments)),
    lambda e: replace(e, conversation=replace(e.conversation, max_turns=4)),
    lambda e: replace(e, conversation=replace(e.conversation, max_tokens=65)),
    lambda e: replace(e, conversation=replace(e.conversation, turn_timeout=0.0)),
    lambda e: replace(e, conversation=replace(e.conversation, branches=2)),
    lambda e: replace(e, conversation=replace(e.conversation, branches=0)),
    lambda e: replace(e, reads=tuple(b for b in e.reads if ".columns" not in b)),
    lambda e: replace(e, writes=tuple(b for b in e.writes if ".reward" not in b)),
])
def test_forged_plans(plan: Plan, change: Callable[[Generate], Generate]) -> None:
    with pytest.raises(Failure) as caught:
        verify(_mutated(plan, change))
    assert {d.code for d in caught.value.diagnostics} <= {"RL0614", "RL0615", "RL0501", "RL0503", "RL0502"}


def test_forged_frames(plan: Plan) -> None:
    frames = tuple(replace(f, max_turns=0 if f.max_turns else 2) for f in plan.frames)
    with pytest.raises(Failure) as caught:
        verify(replace(plan, frames=frames))
    assert {d.code for d in caught.value.diagnostics} == {"RL0615"}


@pytest.mark.parametrize("degrees, code", [
    ("backend=megatron", "RL0327"), ("tp=2", ""), ("pp=2", ""), ("cp=2", "RL0318"), ("tp=2 backend=megatron", "RL0327"),
])
def test_where_conversations_can_be(base: Path, degrees: str, code: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(base)
    (base / "p.rlf").write_text(source(TALKED + TRAIN))
    (base / "rules.rlf").write_text(f"place actor.generate on mesh(0:2) {degrees}\nplace actor.train on mesh(0:2)")
    found = []
    try:
        api.compile("p.rlf", {}, "rules.rlf")
    except Failure as failure:
        found = [d.code for d in failure.diagnostics]
    assert found == ([code] if code else [])


@pytest.mark.parametrize("wrong", ["crossed", "unequal"])
def test_the_issue_order_of_conversations_is_proved(base: Path, wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(base)
    (base / "p.rlf").write_text(source(TALKED + TRAIN))
    (base / "rules.rlf").write_text("place actor.generate on mesh(0:2) tp=2\nplace actor.train on mesh(0:1)")
    plan = api.compile("p.rlf", {}, "rules.rlf")
    protocol = {"crossed": crossed, "unequal": unequal}[wrong]
    monkeypatch.setattr(IssueOrder, "converse", lambda self, x, at, count: protocol(x, at, count))
    with pytest.raises(Failure) as caught:
        verify(plan)
    assert {d.code for d in caught.value.diagnostics} == {"RL0537"}
