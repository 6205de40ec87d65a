"""`rlc report`: what it takes, what it writes, and what it refuses."""

from __future__ import annotations

import json
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from rldsl.cli import main
from rldsl.plan.codec import encode, plan_id
from tests.plan.sample import grpo
from tests.plan_views.plans import change
from tests.report.pages import Outline, trace

SOURCE = "use py\n" * 8 + "  gen = actor.generate(prompt)\n" + "#\n" * 9


def plan_of(source: str) -> bytes:
    """The sample plan, compiled of this source; its positions name the file."""
    header = replace(grpo().header, program="grpo.rlf", sources=(("grpo.rlf", sha256(source.encode()).hexdigest()),))
    return encode(replace(grpo(), header=header))


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.plan").write_bytes(plan_of(SOURCE))
    return tmp_path


def rlc(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["report", *arguments])


def test_beside_the_plan(work: Path) -> None:
    found = rlc("a.plan")
    assert (found.exit_code, found.output) == (0, "wrote a.html\n")
    text = (work / "a.html").read_text()
    assert plan_id((work / "a.plan").read_bytes()) in text
    assert "You passed no cluster, so the report assumes this preset" in Outline.of(text).text


def test_elsewhere_and_again_the_same(work: Path) -> None:
    assert rlc("a.plan", "-o", "x.html").output == "wrote x.html\n"
    first = (work / "x.html").read_bytes()
    assert rlc("a.plan", "-o", "x.html").exit_code == 0 and (work / "x.html").read_bytes() == first


def test_on_a_cluster(work: Path) -> None:
    (work / "ours.yaml").write_text("preset: h100x8\nname: our <b>node</b>\n")
    assert rlc("a.plan", "--cluster", "ours.yaml").exit_code == 0
    text = Outline.of((work / "a.html").read_text()).text
    assert "our <b>node</b>" in text and "You passed no cluster" not in text
    assert rlc("a.plan", "--cluster", "b200x8").exit_code == 0
    assert "Simulated on b200x8" in (work / "a.html").read_text()


def test_with_a_trace(work: Path) -> None:
    (work / "run.json").write_text(json.dumps(trace(grpo(), program="grpo.rlf")))
    assert rlc("a.plan", "--trace", "run.json").exit_code == 0
    assert 'id="recorded"' in (work / "a.html").read_text()


def test_source_lines_are_quoted_while_the_source_is_the_one(work: Path) -> None:
    (work / "grpo.rlf").write_text(SOURCE)
    rlc("a.plan")
    assert "gen = actor.generate(prompt)" in (work / "a.html").read_text()
    (work / "grpo.rlf").write_text(SOURCE + "# changed\n")
    rlc("a.plan")
    text = (work / "a.html").read_text()
    assert "gen = actor.generate(prompt)" not in text and "The source of the program is missing" in text


def test_a_source_that_is_no_text_is_not_quoted(work: Path) -> None:
    data = b"\xff\xfe"
    header = replace(grpo().header, sources=(("grpo.rlf", sha256(data).hexdigest()),))
    (work / "b.plan").write_bytes(encode(replace(grpo(), header=header)))
    (work / "grpo.rlf").write_bytes(data)
    assert rlc("b.plan").exit_code == 0


@pytest.mark.parametrize("arguments, code", [
    (("no.plan",), "RL0091"), ((".",), "RL0783"), (("a.plan", "-o", "no/x.html"), "RL0094"),
    (("a.plan", "--cluster", "h100"), "RL0091"), (("a.plan", "--cluster", "bad.yaml"), "RL0107"),
    (("a.plan", "--cluster", "slow.yaml"), "RL0215"), (("a.plan", "--cluster", "small.yaml"), "RL0096"),
    (("a.plan", "--trace", "no.json"), "RL0091"), (("a.plan", "--trace", "."), "RL0092"),
    (("a.plan", "--trace", "a.plan"), "RL0098"), (("a.plan", "--trace", "bytes"), "RL0098"),
    (("bad.plan",), "RL0610"), (("grpo.rlf",), "RL0601")])
def test_what_it_refuses(work: Path, arguments: tuple[str, ...], code: str) -> None:
    (work / "bad.yaml").write_text("speed: 3\n")
    (work / "slow.yaml").write_text("gpus: 8\n")
    (work / "small.yaml").write_text("preset: h100x8\ngpus: 2\n")
    (work / "bytes").write_bytes(b"\xff\xfe\x00")
    (work / "bad.plan").write_bytes(encode(change(grpo(), 7, mesh="nowhere")))
    (work / "grpo.rlf").write_text(SOURCE)
    found = rlc(*arguments)
    assert found.exit_code == 1 and f"error[{code}]" in found.stderr, found.output
    assert not (work / "a.html").exists() and not (work / "x.html").exists()


def test_a_page_is_not_lost_when_the_next_cannot_be_made(work: Path) -> None:
    (work / "a.html").write_text("mine")
    assert rlc("a.plan", "--trace", "no.json").exit_code == 1
    assert (work / "a.html").read_text() == "mine"


def test_without_a_plan() -> None:
    assert rlc().exit_code == 2
