"""docs/howto/add-an-event-kind.md and add-a-pass.md on a copy: one record, one handler and one pass, and every command
knows the new kind."""

from __future__ import annotations

import json

import pytest

from tests.howto.copies import PAGES, Copy, product_files, steps
from tests.tiny import make_all

KIND, PASS = "add-an-event-kind.md", "add-a-pass.md"
HAND = """
from dataclasses import replace
from rldsl.diag import Failure
from rldsl.plan.codec import decode, encode
from rldsl.plan.events import Loop
from rldsl.plan.projection import event_paths
from rldsl.verify import verify

plan = decode(open("audited.plan", "rb").read(), "audited.plan")
assert decode(encode(plan), "again") == plan
print("audits:", [(e.kind, e.because) for e, _ in event_paths(plan) if e.kind == "audit"])
*setup, steps = plan.body
for change in ({"layout": "L99"}, {"model": "nobody"}, {"reads": ()}, {"bytes": 8}):
    body = tuple(replace(e, **change) if e.kind == "audit" else e for e in steps.body)
    try:
        verify(replace(plan, body=(*setup, replace(steps, body=body))))
    except Failure as failure:
        print(failure.diagnostics[0].code)
"""


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Copy:
    made = Copy(tmp_path_factory.mktemp("event"), KIND, PASS)
    make_all(made.root)
    made.rlc("compile", "audited.rlf", "-o", "audited.plan")
    text = (made.root / "audited.rlf").read_text()
    (made.root / "one.rlf").write_text(text.replace("gpus=2", "gpus=1").replace("mesh(0:2) dp=2", "mesh(0:1)"))
    made.rlc("compile", "one.rlf", "-o", "one.plan")
    return made


def test_they_take_few_files_of_the_product() -> None:
    assert product_files((PAGES / KIND).read_text()) == [
        "rldsl/plan/events.py", "rldsl/runtime/interpreter/audit.py", "rldsl/runtime/interpreter/interpreter.py"]
    assert product_files((PAGES / PASS).read_text()) == ["rldsl/passes/audits.py", "rldsl/passes/pipeline.py"]


@pytest.mark.thorough
def test_plans_hold_it_and_the_verifier_proves_it(copy: Copy) -> None:
    copy.rlc("verify", "audited.plan")
    said = copy.python("-c", HAND).splitlines()
    assert said[0] == "audits: [('audit', 'actor.train changed the parameters')]"
    assert said[1:] == ["RL0610", "RL0610", "RL0614", "RL0534"]


def test_people_see_it(copy: Copy) -> None:
    shown = copy.rlc("show", "audited.plan")
    assert "audit" in shown and "actor.train changed the parameters" in copy.rlc("show", "audited.plan", "--rank", "1")
    (copy.root / "twice.rlf").write_text((copy.root / "audited.rlf").read_text().replace("seed=1", "seed=2").replace(
        "  actor.train(", "  actor.train(gen, loss=likely()) on mesh(0:2) dp=2\n  actor.train("))
    copy.rlc("compile", "twice.rlf", "-o", "twice.plan")
    assert "audit" in copy.python("-m", "rldsl.cli", "diff", "audited.plan", "twice.plan", fails=None)
    copy.rlc("report", "audited.plan", "-o", "report.html")
    assert "audit actor" in (copy.root / "report.html").read_text(), "in the timeline and the dataflow"


def test_time_is_estimated_with_it(copy: Copy) -> None:
    assert "actor.train" in copy.rlc("sim", "audited.plan", "--cluster", "h100x8")


@pytest.mark.thorough
def test_ranks_run_it(copy: Copy) -> None:
    copy.ranks(2, "audited.plan", "--out", "out", "--trace", "trace.json")
    spans = json.loads((copy.root / "trace.json").read_text())["traceEvents"]
    mine = [(s["name"], s["pid"], s["tid"]) for s in spans if s.get("cat") == "audit"]
    assert {name for name, _, _ in mine} == {"audit actor"} and len(mine) == 2 * 2 and len(set(mine)) == 2
    assert len((copy.root / "out/metrics.jsonl").read_text().splitlines()) == 2


def test_an_emitted_program_runs_it(copy: Copy) -> None:
    copy.rlc("emit", "one.plan", "--rank", "all", "-o", "emitted.py")
    assert ".audit(" in (copy.root / "emitted.py").read_text()
    copy.forked("emitted.py", "--out", "emitted")
    assert len((copy.root / "emitted/metrics.jsonl").read_text().splitlines()) == 2


def test_what_it_looks_for_ends_the_run(copy: Copy) -> None:
    """A learning rate beyond float32 makes parameters that are not finite of a gradient that is."""
    copy.rlc("compile", "one.rlf", "--set", "rate=1e39", "-o", "huge.plan")
    said = copy.run("huge.plan", "--out", "huge", fails=True)
    assert "RL0699" in said and "of actor is not finite" in said


# ---------------------------------------------------------------------------------------------------- the pass


@pytest.mark.thorough
def test_events_are_printed_after_it(copy: Copy) -> None:
    before, after = (copy.rlc("compile", "audited.rlf", "--print-after", name) for name in ("lengths", "audits"))
    assert "audit" in after and "audit" not in before.replace("audited", "")
    assert "a check of the parameters after each train call" in copy.rlc(
        "compile", "audited.rlf", "--print-after", "list")


def test_its_check_is_made(copy: Copy) -> None:
    """A pass that leaves a call out is an internal error that names it."""
    with copy.changed("rldsl/passes/audits.py", "if isinstance(item, Train) else", "if isinstance(item, Audit) else"):
        said = copy.rlc("compile", "audited.rlf", "-o", "x.plan", fails=True)
    assert "RL0699" in said and "actor.train is not audited" in said


def test_a_kind_without_its_handler_does_not_run(copy: Copy) -> None:
    (line,) = [x[1:] for s in steps((PAGES / KIND).read_text()) for x in s.text.splitlines()
               if x.startswith("+    Audit:")]
    with copy.changed("rldsl/runtime/interpreter/interpreter.py", line + "\n", ""):
        said = copy.run("one.plan", "--out", "unhandled", fails=True)
    assert "RL0699" in said and "the interpreter has no rule for events of the kind 'audit'" in said
