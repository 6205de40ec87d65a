"""`rlc show`: a rank's list, one event with all that touches it, JSON of a fixed form."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from rldsl.cli import main
from rldsl.diag import Failure
from rldsl.inspect.show import show
from rldsl.inspect.view import event_json, plan_json, view
from rldsl.plan.codec import plan_id
from rldsl.plan.events import EVENTS, Event
from rldsl.plan.projection import class_of, event_paths
from tests.plan_views.plans import change, encode, grpo

Golden = Callable[[str, str], None]
SAMPLE = grpo()
DOCS = Path(__file__).parents[2] / "docs/plans.md"
SOURCE = "".join(f"line {n}\n" for n in range(1, 9)) + "  gen = actor.generate(prompt, n=4)\n"


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A plan with its program beside it."""
    monkeypatch.chdir(tmp_path)
    digest = sha256(SOURCE.encode()).hexdigest()
    (tmp_path / "grpo.rlf").write_text(SOURCE)
    (tmp_path / "a.plan").write_bytes(encode(replace(SAMPLE, header=replace(
        SAMPLE.header, sources=(("grpo.rlf", digest),)))))
    return tmp_path


def rlc(*arguments: str) -> Result:
    return CliRunner().invoke(main, arguments)


# -------------------------------------------------------------------------------------------------------- as text


@pytest.mark.parametrize("rank", [3])
def test_a_rank(rank: int, golden: Golden) -> None:
    golden(f"plans/show_rank_{rank}.txt", show(SAMPLE, rank) + "\n")


@pytest.mark.parametrize("rank", range(4))
def test_a_rank_sees_its_own_events_alone(rank: int) -> None:
    listed = [int(n) for n in re.findall(r"^ *e(\d+) ", show(SAMPLE, rank), re.MULTILINE)]
    assert tuple(listed) == class_of(SAMPLE, rank).events and f"rank {rank}  class of ranks" in show(SAMPLE, rank)


@pytest.mark.parametrize("event", [5, 7])
def test_an_event(event: int, golden: Golden) -> None:
    golden(f"plans/show_event_{event}.txt", show(SAMPLE, event=event, source="the line") + "\n")


def test_every_event_is_shown_with_all_its_fields() -> None:
    for event, _ in event_paths(SAMPLE):
        text = show(SAMPLE, event=event.id)
        for name, value in view(SAMPLE, event.id).fields:
            label = {"frame": "sequences", "frames": "sequences"}.get(name, name)
            assert re.search(rf"^  {label} ", text, re.MULTILINE) or value in ("", (), None), (event, name)
        for buffer in (*event.reads, *event.writes, event.because, event.at):
            assert buffer in text


def touched(event: int, buffer: str) -> list[tuple[bool, tuple[int, ...], tuple[int, ...], tuple[int, ...]]]:
    return [(t.write, t.written_by, t.read_by, t.freed_by) for t in view(SAMPLE, event).touches if t.buffer == buffer]


def test_who_else_touches_a_buffer() -> None:
    everyone = ((5,), (6, 7, 9, 11), (16,))
    assert touched(7, "gen.tokens@s1") == [(False, *everyone)] and touched(5, "gen.tokens@s1") == [(True, *everyone)]
    assert touched(14, "actor@L1") == [(False, (0, 14), (4, 14, 17), ()), (True, (0, 14), (4, 14, 17), ())]
    assert touched(16, "adv@s4") == [(False, (10,), (12,), (16,))]


@pytest.mark.parametrize("event, inside, where", [
    (0, [], "mesh(0:2) tp=2"), (17, ["step", "every"], "mesh(0:2) tp=2"),
    (4, ["step"], "mesh(0:2) tp=2 -> mesh(0:4) dp=4"), (7, ["step"], "mesh(0:4) dp=4 -> mesh(2:4) dp=2")])
def test_where_an_event_stands(event: int, inside: list[str], where: str) -> None:
    found = view(SAMPLE, event)
    assert [getattr(p, "id", "every") for p in found.inside] == inside and found.where == where


# ----------------------------------------------------------------------------------------------------- the source


def test_the_line_of_the_program_is_quoted(work: Path) -> None:
    assert "grpo.rlf:9  | gen = actor.generate(prompt, n=4)" in rlc("show", "a.plan", "--event", "5").output
    found = json.loads(rlc("show", "a.plan", "--event", "5", "--json").output)
    assert found["event"]["source"] == SOURCE.splitlines()[8]


def test_a_program_beside_the_plan_is_found(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (work / "below").mkdir()
    monkeypatch.chdir(work / "below")
    assert "| gen = actor" in rlc("show", "../a.plan", "--event", "5").output


@pytest.mark.parametrize("text", [SOURCE + "\n", "", "gen = somebody.else()\n" * 9])
def test_a_program_that_changed_is_not_quoted(work: Path, text: str) -> None:
    (work / "grpo.rlf").write_text(text)
    found = rlc("show", "a.plan", "--event", "5")
    assert found.exit_code == 0 and "|" not in found.output and "grpo.rlf:9" in found.output


def test_a_program_that_is_gone_is_not_quoted(work: Path) -> None:
    (work / "grpo.rlf").unlink()
    assert "|" not in rlc("show", "a.plan", "--event", "5").output


@pytest.mark.parametrize("at", [*(f"grpo.rlf{at}" for at in (":0", ":99", ":x", ":", "")), "../../etc/passwd:1", ""])
def test_a_place_that_is_not_there_is_not_quoted(work: Path, at: str) -> None:
    (work / "b.plan").write_bytes(encode(change(SAMPLE, 5, at=at)))
    found = rlc("show", "b.plan", "--event", "5")
    assert found.exit_code == 0 and "|" not in found.output


# --------------------------------------------------------------------------------------------------------- as JSON


def test_golden_json(golden: Golden) -> None:
    golden("plans/show_event_7.json", json.dumps(event_json(SAMPLE, "ID", 7), indent=1) + "\n")


def flat(items: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [x for item in items for x in ([item] if "id" in item and "body" not in item else flat(item["body"]))]


def test_json_has_every_event_in_order() -> None:
    found = json.loads(json.dumps(plan_json(SAMPLE, "ID")))
    shown = flat(found["body"])
    assert [e["id"] for e in shown] == [e.id for e, _ in event_paths(SAMPLE)] and found["rank"] is None
    assert {e["kind"] for e in shown} <= set(EVENTS)
    moved = next(e.bytes for e, _ in event_paths(SAMPLE) if e.id == 4)
    assert [e["bytes"] for e in shown if e["id"] in (4, 7)] == [moved, None]


def test_json_of_a_rank_is_its_list() -> None:
    found = plan_json(SAMPLE, "ID", 1)
    assert tuple(e["id"] for e in flat(found["body"])) == class_of(SAMPLE, 1).events and len(found["classes"]) == 1
    assert {m["id"] for m in found["meshes"]} == {"all", "fit"}


def documented(name: str) -> set[str]:
    """The fields that docs/plans.md lists."""
    text = DOCS.read_text().partition(f"<!-- fields: {name} -->\n")[2].partition("\n\n")[0]
    return {word for row in text.splitlines()[2:] for word in re.findall(r"`(\w+)`", row.split("|")[1])}


def test_json_is_as_documented() -> None:
    whole, one = plan_json(SAMPLE, "ID"), event_json(SAMPLE, "ID", 5)["event"]
    assert documented("plan") == whole.keys() and documented("event") == flat(whole["body"])[0].keys()
    assert documented("one event") == one.keys() - flat(whole["body"])[0].keys()
    assert documented("buffer") == one["buffers"][0].keys()


def test_the_command_gives_json_with_the_id_of_the_plan(work: Path) -> None:
    found = json.loads(rlc("show", "a.plan", "--json").output)
    assert found["plan"] == plan_id((work / "a.plan").read_bytes()) and found["format"] == 2
    assert json.loads(rlc("show", "a.plan", "--rank", "2", "--json").output)["rank"] == 2


# -------------------------------------------------------------------------------------------------------- refused


@pytest.mark.parametrize("option, values", [("--rank", ["4", "99", "-1"]), ("--event", ["18", "-1", "1000000"])])
@pytest.mark.parametrize("as_json", [False, True])
def test_what_is_not_there(work: Path, option: str, values: list[str], as_json: bool) -> None:
    for value in values:
        found = rlc("show", "a.plan", option, value, *(["--json"] if as_json else []))
        assert found.exit_code == 1 and "RL0608" in found.output and "Traceback" not in found.output
        assert ("ranks are 0 to 3" if option == "--rank" else "events are 0 to 17") in found.output


@pytest.mark.parametrize("arguments", [("--rank", "1", "--event", "2"), ("--paths", "--rank", "1"),
                                       ("--paths", "--event", "2"), ("--rank", "one"), ("--event", ""), ("--yaml",)])
def test_usage(work: Path, arguments: tuple[str, ...]) -> None:
    assert rlc("show", "a.plan", *arguments).exit_code == 2


@pytest.mark.parametrize("file, code", [("grpo.rlf", "RL0601"), ("gone.plan", "RL0091"), (".", "RL0092")])
@pytest.mark.parametrize("more", [(), ("--json",), ("--event", "1"), ("--rank", "0")])
def test_what_is_no_plan(work: Path, file: str, code: str, more: tuple[str, ...]) -> None:
    found = rlc("show", file, *more)
    assert found.exit_code == 1 and code in found.output and "Traceback" not in found.output


def test_a_plan_without_events() -> None:
    with pytest.raises(Failure, match="RL0608"):
        view(replace(SAMPLE, body=()), 0)
    assert isinstance(next(iter(event_paths(SAMPLE)))[0], Event)
