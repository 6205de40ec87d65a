"""A kind of event is declared in one place: a kind that only this file knows goes through the whole system with one
handler in the interpreter. Readers that need code for a kind have it for every kind, or refuse the kind loudly."""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rldsl.clusters.read import find
from rldsl.diag import Failure, InternalError
from rldsl.inspect.event_matching import found
from rldsl.inspect.show import show
from rldsl.memory import curves
from rldsl.memory.lifetimes import RULES as SCRATCH_RULES
from rldsl.pages.dataflow import dataflow
from rldsl.passes import pipeline
from rldsl.passes.node_events import node_events
from rldsl.placement.place import place_graph
from rldsl.plan import trace
from rldsl.plan.codec import decode, encode
from rldsl.plan.events import EVENTS, Event, Loop
from rldsl.plan.model import Plan
from rldsl.plan.naming import PlaceTexts, describe_event
from rldsl.plan.projection import event_paths
from rldsl.plan.references import LayoutId, ModelName, Role, SpreadId, references, renamed, roles
from rldsl.plan.traits import Buffers, Traits, event_kind, rule_for
from rldsl.postmortem.wait_order import WaitOrder
from rldsl.runtime.interpreter import interpreter
from rldsl.runtime.interpreter.emitted_program import Rank
from rldsl.simulate import program
from rldsl.simulate.simulate import simulate
from rldsl.verify import operations, programs, row_division, sizes, verify
from tests.compiler.graphs import family, ppo

ROOT = Path(__file__).parents[2]


@pytest.fixture
def review() -> Iterator[type[Event]]:
    """A kind that looks at the parameters of a model, on all ranks of a layout together."""

    @event_kind(Traits(family="disk", blocking="barrier", participants=("layout",), communicators="mesh",
                       buffers=Buffers(("{model}@{layout}",)), order_cost=5, drawing="value",
                       not_diffed=("model", "layout")))
    @dataclass(frozen=True, slots=True, kw_only=True)
    class Review(Event):
        model: ModelName
        layout: LayoutId
        limit: float = 1.0

        def copies(self) -> tuple[tuple[str, str], ...]:
            return ((self.model, self.layout),)

    Review.__annotations__.update(model=ModelName, layout=LayoutId, limit=float)  # a local class: no names to look up
    yield Review
    del EVENTS["review"]


@pytest.fixture
def plan(review: Any) -> Plan:
    """The program of the design page with a review of what the actor has learned, through all passes."""
    placed = place_graph(ppo(), "", family)
    home = next(m.train_layout for m in placed.models if m.name == "actor")
    draft = node_events(placed)
    event = review(id=0, mesh=draft.layouts[home].mesh, reads=(f"actor@{home}",), at="ppo.rlf:9:3", model="actor",
                  layout=home)
    draft = replace(draft, body=(*draft.body, event))
    for step in pipeline.PASSES[1:]:
        before, draft = draft, step.run(draft)
        pipeline.check_pass(step, before, draft)
    return pipeline.planned(draft, "test")[0]


def the(plan: Plan, kind: str) -> Event:
    return next(e for e, _ in event_paths(plan) if e.kind == kind)


def test_passes_place_number_and_rename_it(plan: Plan) -> None:
    event, every = the(plan, "review"), [e for e, _ in event_paths(plan)]
    assert event.layout in {x.id for x in plan.layouts} and event.mesh in {m.id for m in plan.meshes}
    assert event.reads == (f"actor@{event.layout}",) and event.id == every.index(event)
    train = next(e for e in every if e.kind == "train" and e.model == "actor")
    assert every.index(train) < every.index(event), "it reads the version that the train call makes"
    assert any(g.axis == "mesh" and g.mesh == event.mesh for g in plan.groups)


def test_it_survives_the_file_and_is_proved(plan: Plan) -> None:
    assert decode(encode(plan), "p.plan") == plan
    assert verify(plan).events == len(list(event_paths(plan)))


@pytest.mark.parametrize("change, code", [
    ({"layout": "L99"}, "RL0610"), ({"model": "nobody"}, "RL0610"), ({"reads": ()}, "RL0614"),
    ({"bytes": 8}, "RL0534"), ({"mesh": "m0"}, "RL0613")])
def test_what_is_wrong_with_it_is_found(plan: Plan, change: dict[str, Any], code: str) -> None:
    event = the(plan, "review")
    if "mesh" in change:
        change = {"mesh": next(m.id for m in plan.meshes if m.id != event.mesh)}
    wrong = replace(event, **change)
    *setup, steps = plan.body
    assert isinstance(steps, Loop)
    body = tuple(wrong if e is event else e for e in steps.body)
    with pytest.raises(Failure) as caught:
        verify(replace(plan, body=(*setup, replace(steps, body=body))))
    assert code in {d.code for d in caught.value.diagnostics}


def test_people_see_it(plan: Plan) -> None:
    event, text = the(plan, "review"), describe_event(the(plan, "review"))
    assert (text.kind, text.title, text.subject, text.line) == ("review", "review actor", "actor", "ppo.rlf:9")
    assert PlaceTexts.of(plan).where(event).startswith("mesh(0:4)")
    assert "review" in show(plan) and "limit" in show(plan, event=event.id)
    assert [f.about for f in found(plan) if f.kind == "review"] == ["actor"]
    assert f"e{event.id}" in {n.id for n in dataflow(plan).nodes}
    span = trace.span(event, 0, 8, 1, 0.0, 1.0)
    assert (span["name"], span["cat"]) == ("review actor", "review")
    json.dumps(span)


def test_memory_and_time_are_estimated_with_it(plan: Plan) -> None:
    assert all(the(plan, "review").id in c.events for c in curves(plan) if 0 in {r for a, b in c.ranks for r in (a,)})
    assert simulate(plan, find("h100x8")).seconds > 0
    assert WaitOrder(plan).group(the(plan, "review"), 0).ranks == (0, 1, 2, 3)


def test_the_interpreter_runs_it_with_one_handler(plan: Plan, review: type[Event], monkeypatch: Any) -> None:
    quiet = SimpleNamespace(begin_event=lambda e: None, end_event=lambda: None, begins=lambda s, e: None,
                            took=lambda s, e, t: None, waited=0.0)
    services = SimpleNamespace(ring=quiet, reporter=quiet, resumed=None)
    state, seen = SimpleNamespace(services=services, step=None), []
    event, walk = the(plan, "review"), interpreter.Interpreter(state, ())  # type: ignore[arg-type]
    with pytest.raises(InternalError, match="interpreter has no rule for events of the kind 'review'"):
        walk.run_event(event)
    monkeypatch.setitem(interpreter.HANDLERS, review, lambda _, e: seen.append(e))
    walk.run_event(event)
    assert seen == [event]


def test_an_emitted_program_runs_it(plan: Plan, review: type[Event], monkeypatch: Any) -> None:
    seen: list[Event] = []
    walk: Any = SimpleNamespace(items=plan.body, run_event=seen.append, state=SimpleNamespace(
        context=SimpleNamespace(rank=0)))
    event, run = the(plan, "review"), Rank(walk)
    run.review(event.id)
    assert seen == [event] and "review" in dir(run)
    with pytest.raises(Failure, match="rank 0 has no review 0 here"):
        run.review(0)
    with pytest.raises(AttributeError, match="no operation 'revue'"):
        run.revue(event.id)


def test_only_a_kind_that_forwards_waits_for_other_receivers(plan: Plan, monkeypatch: Any) -> None:
    realloc, order = the(plan, "realloc"), WaitOrder(plan)
    receivers = {r for m in plan.meshes if m.id == next(x.mesh for x in plan.layouts if x.id == realloc.dst)
                 for r in m.members()}
    rank = max(receivers)
    assert receivers <= set(order.group(realloc, rank).ranks)
    with monkeypatch.context() as patch:
        patch.setattr(type(realloc), "traits", replace(realloc.traits, color="mesh"))
        assert WaitOrder(plan).group(realloc, rank).ranks == order.group(realloc, rank).ranks, "a color is for display"
    monkeypatch.setattr(type(realloc), "traits", replace(realloc.traits, forwards=False))
    assert not receivers <= set(WaitOrder(plan).group(realloc, rank).ranks)


def test_a_kind_that_needs_code_is_refused_without_it(plan: Plan, monkeypatch: Any) -> None:
    event = the(plan, "review")
    for change, act in (({"timed": True}, lambda: simulate(plan, find("h100x8"))),
                        ({"scratch": True}, lambda: curves(plan)),
                        ({"buffers": None}, lambda: verify(plan)), ({"bytes_moved": "planned"}, lambda: verify(plan)),
                        ({"divides_rows": True}, lambda: verify(plan)),
                        ({"backend_communicates": True}, lambda: verify(plan))):
        with monkeypatch.context() as patch:
            patch.setattr(type(event), "traits", replace(event.traits, **change))
            with pytest.raises(InternalError, match="RL0699.*has no rule for events of the kind 'review'"):
                act()


FITTING = {"family": "disk", "blocking": "none", "participants": ("layout",), "divides_rows": False}  # of `Misfit`


@pytest.mark.parametrize("traits, why", [
    ({"participants": ("nothing",)}, "ranks of 'nothing' are not known"), ({"participants": ("text",)}, "'text'"),
    ({"participants": ()}, "which ranks take part"), ({"needs_lengths_of": ("layout",)}, "no field of frames"),
    ({"first_rank_of": ("model",)}, "'model'"), ({"not_diffed": ("gone",)}, "no fields gone"),
    ({"blocking": "async"}, "a layout or spread, a layout or spread"),
    ({"blocking": "dp_rank", "participants": ("layout", "spread")}, "no others: a layout"),
    ({"blocking": "dp_rank", "participants": ("spread",)}, "no others: a layout"),
    ({"blocking": "gather"}, "no others: a rank"), ({"forwards": True}, "only an event that is 'async'"),
    ({"communicators": "layout", "participants": ("spread", "layout")}, "layout of its communicators"),
    ({"communicators": "layout", "participants": (), "all_ranks": True}, "layout of its communicators"),
    ({"divides_rows": None}, "must be True or False for a kind with a field of a spread")])
def test_traits_that_do_not_fit_the_fields_are_refused(traits: dict[str, Any], why: str) -> None:
    with pytest.raises(TypeError, match=why):
        event_kind(Traits(**(FITTING | traits)))(Misfit)
    assert "misfit" not in EVENTS


@dataclass(frozen=True, slots=True, kw_only=True)
class Misfit(Event):
    model: ModelName
    layout: LayoutId
    spread: SpreadId
    text: str


# ---------------------------------------------------------------------------------------------- every real kind


def having(**traits: Any) -> set[type[Event]]:
    return {e for e in EVENTS.values() if all(getattr(e.traits, k) == v for k, v in traits.items())}


def test_every_reader_has_a_rule_for_every_kind_that_needs_one() -> None:
    assert set(interpreter.HANDLERS) == set(EVENTS.values())
    assert set(program.RULES) == having(timed=True)
    assert set(SCRATCH_RULES) == having(scratch=True)
    assert set(sizes.RULES) == having(bytes_moved="planned")
    assert set(operations.RULES) >= having(buffers=None)
    assert set(row_division.RULES) == having(divides_rows=True)
    assert set(programs.RULES) == {e for e in EVENTS.values() if any(Role.PROGRAM in r for r in roles(e).values())}


def test_a_missing_rule_is_an_internal_error() -> None:
    event = EVENTS["free"](id=3, mesh="m0", buffers=())  # type: ignore[call-arg]
    with pytest.raises(InternalError, match="the simulator has no rule for events of the kind 'free'"):
        rule_for({}, event, "the simulator")


def test_references_are_found_and_renamed_however_deep() -> None:
    event = EVENTS["log"](id=0, mesh="m0", metrics=(("kl", "kl@s1"), ("loss", "loss@s2")))  # type: ignore[call-arg]
    assert [(r.field, r.role, r.id) for r in references(event)] == [
        ("mesh", Role.MESH, "m0"), ("metrics", Role.BUFFER, "kl@s1"), ("metrics", Role.BUFFER, "loss@s2"),
        ("to", Role.RANK, 0)]
    assert renamed(event, {Role.BUFFER: str.upper}) == {
        "reads": (), "writes": (), "metrics": (("kl", "KL@S1"), ("loss", "LOSS@S2"))}
    load = EVENTS["load"](id=0, mesh="m0", model="a", layout="L0")  # type: ignore[call-arg]
    assert "alias_of" not in {r.field for r in references(load)}, "a reference that is left out names nothing"


# ------------------------------------------------------------------------------------- how much else knows a kind

KINDS = {cls.__name__ for cls in EVENTS.values()}


def trees() -> Iterator[tuple[Path, ast.Module, set[str]]]:
    """Every file of ours with the kinds of events that it imports, by the names that it gives them."""
    for top in ("rldsl", "backends"):
        for path in sorted((ROOT / top).rglob("*.py")):
            tree = ast.parse(path.read_text())
            mine = {a.asname or a.name for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)
                    and node.module == "rldsl.plan.events" for a in node.names if a.name in KINDS}
            yield path, tree, mine


def open_matches(tree: ast.Module, kinds: set[str]) -> Iterator[int]:
    """Lines of `match`es over kinds of events that let the others pass: without `assert_never` in a last `case _`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Match):
            patterns = [p for c in node.cases for p in ast.walk(c.pattern)]
            named = {ast.unparse(p.cls) for p in patterns if isinstance(p, ast.MatchClass)}
            last = node.cases[-1]
            closed = isinstance(last.pattern, ast.MatchAs) and "assert_never" in ast.unparse(last.body[0])
            if named & kinds and not closed:
                yield node.lineno


@pytest.mark.thorough
def test_no_match_over_kinds_of_events_is_open() -> None:
    assert {f"{path.relative_to(ROOT)}:{line}" for path, tree, kinds in trees() for line in open_matches(tree, kinds)
            } == set()


def test_an_open_match_is_seen() -> None:
    text = "match e:\n    case Load():\n        pass\n    case {}\n"
    assert list(open_matches(ast.parse(text.format("_:\n        pass")), {"Load"})) == [1]
    assert list(open_matches(ast.parse(text.format("Free():\n        pass")), {"Load"})) == [1]
    assert list(open_matches(ast.parse(text.format("_:\n        assert_never(e)")), {"Load"})) == []


def test_few_files_know_a_kind_of_event() -> None:
    """79 did before kinds had traits. A file that needs one of a kind may name it; a new reader should ask traits."""
    assert sum(bool(kinds) for _, _, kinds in trees()) <= MOST_FILES


MOST_FILES = 65
