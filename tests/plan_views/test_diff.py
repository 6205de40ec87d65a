"""`rlc diff`: everything that changed is told, in words of the program, and nothing that did not."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from rldsl.cli import main
from rldsl.inspect.diff import Diff, diff
from rldsl.inspect.diff_text import as_json, text
from rldsl.plan.events import Event, Item, Sampling
from rldsl.plan.expr import Node
from rldsl.plan.model import Layout, Plan
from tests.plan_views.plans import change, drop, edit, encode, grpo, insert, renumbered

Golden = Callable[[str, str], None]


def events_of(plan: Plan) -> dict[int, Event]:
    found: dict[int, Event] = {}

    def keep(item: Any) -> Iterator[Any]:
        if isinstance(item, Event):
            found[item.id] = item
        yield item

    edit(plan.body, keep)
    return found


SAMPLE = grpo()
EVENTS = events_of(SAMPLE)


def placed() -> Plan:
    """The reference moved to all ranks, generation to dp=2 tp=2, with more tokens, bytes and memory."""
    plan = replace(SAMPLE, layouts=(SAMPLE.layouts[0], Layout("L2", "all", dp=2, tp=2), Layout("L3", "all", dp=4)))
    plan = change(plan, 8, mesh="all", mbs=4)
    plan = change(plan, 5, sampling=Sampling(n=4, max_new_tokens=32, temperature=0.7))
    plan = change(plan, 4, bytes=4096)
    return replace(plan, classes=tuple(replace(c, peak_bytes=6000) for c in plan.classes))


def rewritten() -> Plan:
    """Another program: no reference, the entropy of the actor instead, a save every 5th step, another learning rate."""
    plan = drop(SAMPLE, 2, 7, 8, 13)
    asked = replace(EVENTS[8], id=18, reads=("actor@L1", "gen.tokens@s5"), writes=("ent@s5",), at="grpo.rlf:11",
                    **dict(model="actor", layout="L1", spread="s5", output_name="entropy", value="ent", mesh="fit"))
    plan = insert(plan, 11, asked)
    plan = replace(plan, header=replace(plan.header, params=(("lr", 1e-5), ("n", 4)), sources=(("grpo.rlf", "cd"),)),
                   models=tuple(m for m in plan.models if m.name != "ref"))
    actor = replace(plan.models[0], optimizer=replace(plan.models[0].optimizer, lr=1e-5))  # type: ignore[type-var]
    body = edit(plan.body, lambda i: iter([replace(i, period=5) if hasattr(i, "period") else i]))
    logged = replace(EVENTS[15], metrics=(("reward", "reward@s4"), ("entropy", "ent@s5")))  # type: ignore[call-arg]
    body = edit(body, lambda i: iter([logged if isinstance(i, Event) and i.id == 15 else i]))
    return replace(plan, models=(actor,), body=body)


# ------------------------------------------------------------------------------------------------------- the same


def test_a_plan_is_the_same_as_itself() -> None:
    found = diff(SAMPLE, grpo())
    assert found.same and not found.others
    assert text(found, "a", "b").splitlines() == ["a -> b", "no differences"]


def test_predicted_time_is_no_difference_of_plans() -> None:
    found = diff(SAMPLE, SAMPLE, (1.5, 1.2))
    assert found.same and "1.50 s -> 1.20 s  (-20%)" in text(found, "a", "b")


def test_ids_of_events_explain_nothing() -> None:
    """Other numbers alone: no section tells of them, and yet the files are not equal."""
    found = diff(SAMPLE, renumbered(SAMPLE, 100))
    assert not found.calls and not found.inserted and not found.same and "class" in found.others


def test_ids_do_not_disturb_what_did_change() -> None:
    moved = placed()
    assert as_json(diff(SAMPLE, moved), "", "") == as_json(diff(SAMPLE, renumbered(moved, 7)), "", "")


# ------------------------------------------------------------------------------------------------ what is told


@pytest.mark.parametrize("name, after", [("placed", placed()), ("rewritten", rewritten())])
def test_golden(name: str, after: Plan, golden: Golden) -> None:
    golden(f"plans/diff_{name}.txt", text(diff(SAMPLE, after), "a.plan", "b.plan") + "\n")
    golden(f"plans/diff_{name}.json", json.dumps(as_json(diff(SAMPLE, after), "A", "B"), indent=1) + "\n")


@pytest.mark.parametrize("after", [placed(), rewritten()])
def test_backwards_is_the_reverse(after: Plan) -> None:
    there, back = diff(SAMPLE, after), diff(after, SAMPLE)
    assert {(c.what, c.name, c.field, c.before, c.after) for c in (*there.program, *there.tables)} == {
        (c.what, c.name, c.field, c.after, c.before) for c in (*back.program, *back.tables)}
    sides = lambda d: {(c.before is None, c.after is None, c.now.about) for c in (*d.calls, *d.inserted)}  # noqa: E731
    assert {(b, a, about) for a, b, about in sides(there)} == sides(back)
    assert {(m.kind, m.before, m.after) for m in there.moved} == {(m.kind, m.after, m.before) for m in back.moved}


def fields_of(found: Diff, about: str) -> dict[str, tuple[str | None, str | None]]:
    return {c.field: (c.before, c.after) for e in (*found.calls, *found.inserted) if e.now.about == about
            for c in e.changes}


def test_a_call_that_moved() -> None:
    found = diff(SAMPLE, placed())
    assert fields_of(found, "ref_lp = ref.logprobs") == {
        "where": ("mesh(2:4) dp=2", "mesh(0:4) dp=4"), "mbs": ("0", "4")}
    assert [e.now.about for e in found.calls if e.moved] == ["gen = actor.generate", "ref_lp = ref.logprobs"]


@pytest.mark.parametrize("id, changed, field, values", [
    (5, {"sampling": Sampling(n=4, max_new_tokens=8, top_p=0.9)}, "top_p", ("1.0", "0.9")),
    (5, {"sampling": Sampling(n=4, max_new_tokens=8, min_p=0.1)}, "min_p", ("0.0", "0.1")),
    (14, {"nonfinite": "skip"}, "nonfinite", ("stop", "skip")),
    (14, {"data_inputs": (("old", "gen.logprobs"), ("adv", "adv"), ("ref", "gen.logprobs"))}, "data_inputs",
     ("old=gen.logprobs, adv, ref=ref_lp", "old=gen.logprobs, adv, ref=gen.logprobs")),
    (17, {"path": "elsewhere"}, "path", ("{out}/{step}", "elsewhere")),
    (4, {"bytes": 1}, "bytes", None), (4, {"decay": 0.5}, "decay", ("", "0.5")),
    (14, {"spread": "s4"}, "minibatches", ("2 x 1 shuffled", "1 x 1")),
    (8, {"value": "rlp"}, "result", ("ref_lp", "rlp")),
    (8, {"output_name": "entropy"}, "call", ("ref.logprobs", "ref.entropy")),
])
def test_options(id: int, changed: dict[str, Any], field: str, values: tuple[str, str] | None) -> None:
    found = diff(SAMPLE, change(SAMPLE, id, **changed))
    told = [c for e in (*found.calls, *found.inserted) for c in e.changes if c.field == field]
    assert len(told) == 1 and (values is None or (told[0].before, told[0].after) == values)


def test_a_computation_that_computes_something_else() -> None:
    first, *others = SAMPLE.programs
    nodes = list(first.nodes)
    nodes[2] = Node("div", (0, 1), "seq", "gen")
    found = diff(SAMPLE, replace(SAMPLE, programs=(replace(first, nodes=tuple(nodes)), *others)))
    assert [(e.now.about, [c.field for c in e.changes]) for e in found.calls] == [("adv, reward", ["operations"])]


def test_a_device_with_other_memory_is_told() -> None:
    other = replace(SAMPLE, header=replace(SAMPLE.header, memory=123, seed=9))
    found = diff(SAMPLE, other)
    assert [(c.name, c.after) for c in found.program] == [("memory", "123"), ("seed", "9")] and not found.others


def test_what_no_section_tells_is_named_beside_what_they_tell() -> None:
    """A communicator less and another seed: both are said."""
    other = replace(SAMPLE, header=replace(SAMPLE.header, seed=9), groups=SAMPLE.groups[:-1])
    found = diff(SAMPLE, other)
    assert [c.name for c in found.program] == ["seed"] and found.others == ("group",)
    assert "the group records differ in ways not listed above" in text(found, "a", "b")


def test_lines_that_shift_are_no_difference_of_events() -> None:
    """A comment above a program: other sources and positions, nothing else."""
    def lower(items: tuple[Item, ...]) -> tuple[Item, ...]:
        return tuple(replace(i, body=lower(i.body)) if not isinstance(i, Event) else
                     replace(i, at=f"{i.at.split(':')[0]}:99:1") for i in items)

    other = replace(SAMPLE, header=replace(SAMPLE.header, sources=(("a.rlf", "0" * 64),)), body=lower(SAMPLE.body))
    found = diff(SAMPLE, other)
    assert found.program and not found.others and not found.calls and not found.inserted


def test_a_renamed_result_is_one_change() -> None:
    """The transfer that brings it and the train call that reads it are the same as before."""
    def renamed(plan: Plan) -> Plan:
        return _replaced(plan, "ref_lp", "rlp")

    found = diff(SAMPLE, renamed(SAMPLE))
    assert [(e.now.about, [(c.before, c.after) for c in e.changes]) for e in (*found.calls, *found.inserted)
            if "rlp" in e.now.about] == [("rlp = ref.logprobs", [("ref_lp", "rlp")])]
    assert not any(e.before is None or e.after is None for e in (*found.calls, *found.inserted))


def _replaced(value: Any, old: str, new: str) -> Any:
    """In every text of a record."""
    if isinstance(value, str):
        return value.replace(old, new)
    if isinstance(value, tuple):
        return tuple(_replaced(v, old, new) for v in value)
    if is_dataclass(value):
        made = {f.name: _replaced(getattr(value, f.name), old, new) for f in fields(value)}
        return replace(value, **made)  # type: ignore[type-var]
    return value


def test_numbers_of_nameless_results_are_not_told() -> None:
    one, two = (_replaced(SAMPLE, "adv", f"expr#{n}") for n in (1, 2))
    found = diff(one, two)
    assert not found.calls and not found.inserted


@pytest.mark.parametrize("id, section", [(7, "inserted"), (4, "inserted"), (8, "calls"), (17, "calls"), (10, "calls")])
def test_events_that_came_and_went(id: int, section: str) -> None:
    less = drop(SAMPLE, id)
    gone, came = getattr(diff(SAMPLE, less), section), getattr(diff(less, SAMPLE), section)
    assert [(e.before is None, e.after is None) for e in gone if e.now.kind == type(EVENTS[id]).__name__.lower()] == [
        (False, True)]
    assert [(e.before is None, e.after is None) for e in came if e.now.kind == type(EVENTS[id]).__name__.lower()] == [
        (True, False)]
    assert came[-1].now.because == EVENTS[id].because


def test_an_event_in_another_block() -> None:
    saved = EVENTS[17]
    found = diff(SAMPLE, insert(drop(SAMPLE, 17), 16, saved))
    assert fields_of(found, "actor") == {"inside": ("step > when", "step")}


def test_bytes_are_of_a_step() -> None:
    """A transfer of 100 bytes every second step is 50 bytes a step."""
    found = diff(change(SAMPLE, 17, bytes=0), change(SAMPLE, 17, bytes=100))
    assert [(m.kind, m.before, m.after) for m in found.moved] == [("save", 0, 50)]


def test_memory_of_ranks_alike_is_told_once() -> None:
    classes = tuple(replace(c, peak_bytes=1 << 20) if c.ranks == ((0, 2),) else c for c in SAMPLE.classes)
    assert [(p.ranks, p.before, p.after) for p in diff(SAMPLE, replace(SAMPLE, classes=classes)).peaks] == [
        ("0-1", 4096, 1 << 20)]


def test_ranks_that_are_new_had_no_memory() -> None:
    classes = (*SAMPLE.classes, replace(SAMPLE.classes[-1], ranks=((4, 6),)))
    found = diff(SAMPLE, replace(SAMPLE, classes=classes))
    assert [(p.ranks, p.before, p.after) for p in found.peaks] == [("4-5", None, 4096)]
    assert "none -> 4.0 KiB" in text(found, "a", "b")


# ------------------------------------------------------------------------------------ nothing is overlooked


def mutants(value: Any) -> Iterator[Any]:
    """A value with one thing in it changed, for each thing in it."""
    if is_dataclass(value) and not isinstance(value, type):
        for f in fields(value):
            for made in mutants(getattr(value, f.name)):
                yield replace(value, **{f.name: made})  # type: ignore[type-var]
    elif isinstance(value, tuple):
        if value and (is_dataclass(value[0]) or isinstance(value[0], tuple)):
            yield value[:-1]
        for i, item in enumerate(value):
            yield from ((*value[:i], made, *value[i + 1 :]) for made in mutants(item))
    elif isinstance(value, bool):
        yield not value
    elif isinstance(value, int | float):
        yield value + 1
    elif isinstance(value, str):
        yield value + "x"


@pytest.mark.thorough
def test_no_change_of_a_plan_is_overlooked() -> None:
    count = 0
    for mutant in mutants(SAMPLE):
        if encode(mutant) != encode(SAMPLE):
            count += 1
            found = diff(SAMPLE, mutant)
            assert not found.same and text(found, "a", "b") and as_json(found, "a", "b")
    assert count > 500


@pytest.mark.parametrize("name", ["world", "steps", "seed", "flow", "program", "compiler", "devices_per_node"])
def test_the_header(name: str) -> None:
    old = getattr(SAMPLE.header, name)
    new = old + 1 if isinstance(old, int) else f"{old}2"
    found = diff(SAMPLE, replace(SAMPLE, header=replace(SAMPLE.header, **{name: new})))
    assert [(c.name, c.before, c.after) for c in found.program] == [(name, str(old), str(new))]


# ------------------------------------------------------------------------------------------------ the command


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name, plan in (("a", SAMPLE), ("same", SAMPLE), ("b", placed())):
        (tmp_path / f"{name}.plan").write_bytes(encode(plan))
    (tmp_path / "a.rlf").write_text("flow a {}\n")
    (tmp_path / "cut.plan").write_bytes(encode(SAMPLE)[:-100])
    (tmp_path / "edited.plan").write_bytes(encode(SAMPLE).replace(b'"seed":1', b'"seed":2'))
    (tmp_path / "binary.plan").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "empty.plan").write_bytes(b"")
    return tmp_path


def rlc(*arguments: str) -> Result:
    return CliRunner().invoke(main, arguments)


def test_exit_status_is_that_of_diff(work: Path) -> None:
    same, other = rlc("diff", "a.plan", "same.plan"), rlc("diff", "a.plan", "b.plan")
    assert (same.exit_code, other.exit_code) == (0, 1)
    assert "no differences" in same.output and "gen = actor.generate" in other.output
    assert "Exit status" in rlc("diff", "--help").output


def test_json(work: Path) -> None:
    found = rlc("diff", "a.plan", "b.plan", "--json")
    assert found.exit_code == 1 and json.loads(found.output)["same"] is False
    assert json.loads(rlc("diff", "a.plan", "same.plan", "--json").output)["same"] is True


@pytest.mark.parametrize("file, code", [("a.rlf", "RL0601"), ("cut.plan", "RL0602"), ("edited.plan", "RL0602"),
                                        ("binary.plan", "RL0601"), ("empty.plan", "RL0601"), ("gone.plan", "RL0091"),
                                        (".", "RL0092")])
@pytest.mark.parametrize("swap", [False, True])
def test_what_is_no_plan(work: Path, file: str, code: str, swap: bool) -> None:
    found = rlc("diff", *((file, "a.plan") if swap else ("a.plan", file)))
    assert found.exit_code == 2 and code in found.output and "Traceback" not in found.output


@pytest.mark.parametrize("arguments", [(), ("a.plan",), ("a.plan", "b.plan", "c.plan"), ("a.plan", "b.plan", "--yaml")])
def test_usage(work: Path, arguments: tuple[str, ...]) -> None:
    assert rlc("diff", *arguments).exit_code == 2
