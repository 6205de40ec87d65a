"""Plans with text that were changed by hand: the verifier refuses each, and the runtime sees none of them."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from rldsl import api
from rldsl.diag import Failure
from rldsl.plan.events import Derive, Generate
from rldsl.plan.model import Plan
from rldsl.plan.projection import event_paths
from rldsl.verify import verify
from tests.texts.programs import SELF_REWARDING, folder, text
from tests.verify.faults import change, codes, row


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Plan:
    base = folder(tmp_path_factory.mktemp("forged"))
    (base / "p.rlf").write_text(text(SELF_REWARDING))
    (base / "place.rlf").write_text("place actor.* on mesh(0:2) dp=2\nplace judge.* on mesh(0:2) tp=2\n")
    before = os.getcwd()
    os.chdir(base)
    try:
        return api.compile("p.rlf", {}, "place.rlf")
    finally:
        os.chdir(before)


def derive(plan: Plan) -> Derive:
    return next(e for e, _ in event_paths(plan) if isinstance(e, Derive))


def derived(plan: Plan, **new: object) -> Plan:
    return change(plan, derive(plan).id, **new)


def frame(plan: Plan, name: str, **new: object) -> Plan:
    at = next(i for i, f in enumerate(plan.frames) if f.id == name)
    return row(plan, "frames", at, **new)


def function(plan: Plan, name: str, **new: object) -> Plan:
    at = next(i for i, f in enumerate(plan.functions) if f.name == name)
    return row(plan, "functions", at, **new)


def grading(plan: Plan, **new: object) -> Plan:
    """Another attribute of the node that calls `grade`."""
    at = next(i for i, p in enumerate(plan.programs) if any(n.op == "py" for n in p.nodes))
    nodes = tuple(replace(n, attrs=tuple((k, new.get(k, v)) for k, v in n.attrs)) if n.op == "py" else n
                  for n in plan.programs[at].nodes)
    return row(plan, "programs", at, nodes=nodes)


FORGED: dict[str, Callable[[Plan], Plan]] = {
    "an unknown function": lambda p: derived(p, function="nobody"),
    "a function of numbers": lambda p: derived(p, function="grade"),
    "no function": lambda p: derived(p, function=""),
    "prompts of a function whose number is read": lambda p: function(p, "grade", returns="prompts"),
    "a function that returns a number": lambda p: function(p, "ask", returns="seq"),
    "a function that returns nothing known": lambda p: function(p, "ask", returns="texts"),
    "rows that may be missing, and are not recorded": lambda p: function(p, "ask", returns="prompts?"),
    "prompts that may be dropped, and are not recorded": lambda p: derived(p, over_long="drop"),
    "another way with long prompts": lambda p: derived(p, over_long="cut"),
    "another operation": lambda p: derived(p, op="where"),
    "no rows given": lambda p: derived(p, given=()),
    "rows of a frame below": lambda p: derived(p, given=(("", "verdict"),)),
    "the first argument under a name": lambda p: derived(p, given=(("gen", "gen"),)),
    "columns that are not read": lambda p: derived(p, also_reads=()),
    "a buffer that is not read": lambda p: derived(p, reads=derive(p).reads[:1]),
    "another source": lambda p: derived(p, source="prompt"),
    "the source as the result": lambda p: derived(p, frame="gen"),
    "other rows": lambda p: frame(p, derive(p).frame, row_space="prompt"),
    "a response": lambda p: frame(p, derive(p).frame, max_response_tokens=4),
    "no room for a prompt": lambda p: frame(p, derive(p).frame, max_prompt_tokens=0),
    "no tokenizer": lambda p: frame(p, derive(p).frame, tokenizer=""),
    "verdicts in another tokenizer": lambda p: frame(p, "verdict", tokenizer="model"),
    "verdicts without a tokenizer": lambda p: frame(p, "verdict", tokenizer=""),
    "prompts of data in another tokenizer": lambda p: frame(p, "prompt", tokenizer="judge"),
    "responses in another tokenizer": lambda p: frame(p, "gen", tokenizer="judge"),
    "a tokenizer among the kernel's files": lambda p: frame(p, derive(p).frame, tokenizer="/proc/self/fd/0"),
    "ranks that share rows": lambda p: derived(p, spread=next(
        e for e, _ in event_paths(p) if isinstance(e, Generate) and e.model == "judge").spread),
    "an argument of other rows": lambda p: grading(p, **{"argument gen": "prompt2"}),
    "an argument below the rows": lambda p: grading(p, frame="gen"),
}


@pytest.mark.parametrize("fault", FORGED)
def test_a_forged_plan_is_refused(plan: Plan, fault: str) -> None:
    forged = FORGED[fault](plan)
    assert forged != plan
    with pytest.raises(Failure) as raised:
        verify(forged)
    assert all(d.code.startswith(("RL05", "RL06")) for d in raised.value.diagnostics), codes(forged)


def test_the_plan_itself_is_accepted(plan: Plan) -> None:
    verify(plan)
