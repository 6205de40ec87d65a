"""Plans with a lag that no compiler would write are refused, with a code; and programs that no lag fits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from rldsl import api
from rldsl.diag import Failure, InternalError
from rldsl.graph import build
from rldsl.graph import model as g
from rldsl.graph.lag import nodes_that_may
from rldsl.plan.events import (
    EVERY_ITERATION,
    Compute,
    Event,
    Fetch,
    Free,
    Generate,
    Infer,
    Item,
    Lengths,
    Loop,
    Realloc,
    Train,
    Transfer,
)
from rldsl.plan.model import Plan, Value
from rldsl.source import SourceFile
from rldsl.verify import verify
from tests.end_to_end.test_invariance import HERE, placement
from tests.tiny import make_all

PLACE = placement(4, actor_generate="on mesh(0:2) dp=2", actor_train="on mesh(2:4) tp=2", **{
    "ref_*": "on mesh(2:4) dp=2"})


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Plan:
    folder = tmp_path_factory.mktemp("forged")
    tiny = make_all(folder / "tiny")
    (folder / "rewards_small.py").write_text((HERE / "rewards_small.py").read_text())
    text = (HERE / "grpo_small.rlf").read_text().replace("seed=7)", "seed=7, lag=2)")
    (folder / "lagged.rlf").write_text(text)
    (folder / "place.rlf").write_text(PLACE)
    return api.compile(str(folder / "lagged.rlf"), {"base": str(tiny / "models/sft"),
                                                    "rows": str(tiny / "data/prompts.jsonl")},
                       str(folder / "place.rlf"))


def loop_of(plan: Plan) -> Loop:
    return next(x for x in plan.body if isinstance(x, Loop))


def with_loop(plan: Plan, loop: Loop) -> Plan:
    return replace(plan, body=tuple(loop if isinstance(x, Loop) else x for x in plan.body))


def changed(kind: type[Event], ahead: int, which: Callable[[Event], bool] = lambda e: True) -> Callable[[Plan], Plan]:
    """The first event of a kind runs that far ahead."""
    def change(plan: Plan) -> Plan:
        loop, done = loop_of(plan), False
        body: list[Item] = []
        for item in loop.body:
            if isinstance(item, kind) and which(item) and not done:
                item, done = replace(item, ahead=ahead), True
            body.append(item)
        assert done
        return with_loop(plan, replace(loop, body=tuple(body)))
    return change


def freed_a_turn_early(plan: Plan) -> Plan:
    """The rows of a later step are freed before its step begins."""
    return changed(Free, 1, lambda e: any(b.startswith("gen.tokens") for b in e.frees))(plan)


FORGED = {
    "the loop begins late": (lambda p: with_loop(p, replace(loop_of(p), first=0)), {"RL0539"}),
    "the loop begins as without a lag": (lambda p: with_loop(p, replace(loop_of(p), first=1)), {"RL0539"}),
    "another lag": (lambda p: replace(p, header=replace(p.header, lag=1)), {"RL0539"}),
    "no lag": (lambda p: replace(p, header=replace(p.header, lag=0)), {"RL0539"}),
    "a negative lag": (lambda p: replace(p, header=replace(p.header, lag=-1)), {"RL0539"}),
    "generates a step too late": (changed(Generate, 1), {"RL0539"}),
    "generates in its own step": (changed(Generate, 0), {"RL0539"}),
    "generates too early": (changed(Generate, 3), {"RL0539"}),
    "generates in every iteration": (changed(Generate, EVERY_ITERATION), {"RL0539"}),
    "trains ahead": (changed(Train, 2), {"RL0539"}),
    "refreshes its copy in its own step only": (changed(Realloc, 0), {"RL0539"}),
    "refreshes its copy ahead": (changed(Realloc, 2), {"RL0539"}),
    "reads the data late": (changed(Fetch, 0), {"RL0513", "RL0515", "RL0516", "RL0518"}),
    "knows lengths before there are rows": (changed(Lengths, 2), {"RL0513"}),
    "moves rows before there are any": (changed(Transfer, 2), {"RL0513", "RL0518"}),
    "frees rows that wait": (lambda p: changed(Free, 2, lambda e: any(b.startswith("gen.tokens") for b in e.frees))(p),
                             {"RL0513", "RL0515", "RL0516", "RL0517"}),
    "frees a turn early": (freed_a_turn_early, {"RL0513"}),
    "computes the reward a turn late": (changed(Compute, 1, lambda e: "reward" in e.result_names),
                                        {"RL0513", "RL0515", "RL0516", "RL0518"}),
}


def test_the_plan_is_right(plan: Plan) -> None:
    verify(plan)
    loop = loop_of(plan)
    assert loop.first == -1 and plan.header.lag == 2
    assert {e.ahead for e in loop.body if isinstance(e, Generate | Fetch)} == {2}
    assert {e.ahead for e in loop.body if isinstance(e, Train | Infer)} == {0}
    ranks = {m.id: m.ranks for m in plan.meshes}
    exchanges = {(ranks[e.mesh], e.ahead) for e in loop.body if isinstance(e, Lengths)}
    assert exchanges == {(((0, 2),), 2), (((0, 4),), 0)}, "that for rewards does not hold those that train"
    reward = next(e for e in loop.body if isinstance(e, Compute) and "reward" in e.result_names)
    assert (ranks[reward.mesh], reward.ahead) == (((0, 2),), 2), "nobody who trains waits for a reward"
    assert {e.ahead for e in loop.body if isinstance(e, Realloc)} == {EVERY_ITERATION}


@pytest.mark.parametrize("name", FORGED)
def test_a_forged_plan_is_refused(name: str, plan: Plan) -> None:
    forge, codes = FORGED[name]
    with pytest.raises(Failure) as refused:
        verify(forge(plan))
    found = {d.code for d in refused.value.diagnostics}
    assert found and found <= codes, found


PROXIMAL = HERE.joinpath("grpo_small.rlf").read_text().replace("seed=7)", "seed=7, lag=1)").replace(
    "ref_lp = ref.logprobs(gen)", "ref_lp = actor.logprobs(gen)")


def test_log_probs_of_a_model_that_changes_run_in_their_own_step(
        tmp_path: Path, plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ahead of it they would be those of an earlier version."""
    base = next(m.path for m in plan.models if m.name == "actor")
    (tmp_path / "rewards_small.py").write_text((HERE / "rewards_small.py").read_text())
    (tmp_path / "lagged.rlf").write_text(PROXIMAL)
    (tmp_path / "place.rlf").write_text(PLACE.replace("ref.*", "actor.logprobs").replace(
        "logprobs on mesh(2:4)", "logprobs on mesh(0:2)"))
    sets = {"base": base, "rows": plan.data[0].path}
    right = api.compile(str(tmp_path / "lagged.rlf"), sets, str(tmp_path / "place.rlf"))
    assert {e.ahead for e in loop_of(right).body if isinstance(e, Infer)} == {0}

    def careless(items: tuple[g.Item, ...], lasting: frozenset[str], ahead: frozenset[str], values: tuple[Value, ...]
                 ) -> frozenset[str]:
        return nodes_that_may(items, lasting, ahead, values) | {n.id for n in g.nodes(items) if isinstance(n, g.Infer)}
    monkeypatch.setattr(build, "nodes_that_may", careless)
    with pytest.raises(InternalError, match="RL0539 .* it reads actor, which changes, and belongs in its own step"):
        api.compile(str(tmp_path / "lagged.rlf"), sets, str(tmp_path / "place.rlf"))


HEAD = '''use std.sft (sft)
data prompts = jsonl("p.jsonl", batch=4)
model actor = causal_lm("m") train adamw(lr=1e-3)
state x = 0.1
'''
MISTAKES = {
    "nothing is generated": ("row = prompts.next()\n actor.train(row, loss=sft())", "no effect"),
    "in a block": ("repeat 2 {\n prompt = prompts.next()\n gen = actor.generate(prompt)\n"
                   " actor.train(gen, loss=sft())\n }", "cannot be in this block"),
    "not a number": ("prompt = prompts.next()\n gen = actor.generate(prompt)", "lag"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_explained(name: str) -> None:
    body, part = MISTAKES[name]
    lag = '"one"' if name == "not a number" else "1"
    found = api.check(f"{HEAD}flow f(steps=4, lag={lag}) {{\n {body}\n}}\n", "x.rlf")
    errors = [d for d in found if d.code in ("RL0223", "RL0203", "RL0205", "RL0206", "RL0201")]
    assert errors and part in " ".join((errors[0].title, errors[0].help)), found


TWO = HEAD + '''flow f(steps=4{flow}) {{
 prompt = prompts.next()
 gen = actor.generate(prompt{first})
 more = actor.generate({source}{second})
 actor.train(gen, loss=sft())
 metric m = mean(len(more))
}}
'''


@pytest.mark.parametrize(("flow", "first", "second", "ahead"), [
    (", lag=2", "", ", lag=0", {"gen"}), ("", ", lag=2", "", {"gen"}), (", lag=1", "", ", lag=1", {"gen", "more"}),
    ("", ", lag=2", ", lag=2", {"gen", "more"}), (", lag=1", ", lag=0", ", lag=0", set())])
def test_a_call_says_whether_it_runs_ahead(flow: str, first: str, second: str, ahead: set[str]) -> None:
    text = TWO.format(flow=flow, first=first, second=second, source="prompt")
    found = api.check(text, "x.rlf")
    assert [d.code for d in found] == ([] if ahead else ["RL0223"]), found
    if ahead:
        made = api.build_graph(SourceFile("x.rlf", text))
        assert ahead | {"prompt"} == made.ahead


@pytest.mark.parametrize(("flow", "first", "second", "source", "code"), [
    (", lag=1", "", ", lag=2", "prompt", "RL0205"), ("", ", lag=1", ", lag=3", "prompt", "RL0205"),
    (", lag=1", ", lag=0", "", "gen", "RL0223"), (", lag=1", ", lag=-1", "", "prompt", "RL0205")])
def test_calls_with_lags_that_do_not_fit(flow: str, first: str, second: str, source: str, code: str) -> None:
    found = api.check(TWO.format(flow=flow, first=first, second=second, source=source), "x.rlf")
    assert code in [d.code for d in found], found
