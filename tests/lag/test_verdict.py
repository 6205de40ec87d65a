"""`rlc sim` says what a lag gains, before anything is run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from rldsl.cli import main
from rldsl.graph.lag import with_lag
from rldsl.source import SourceFile
from rldsl.syntax import ast
from rldsl.syntax.parse import parse
from tests.end_to_end.test_invariance import HERE, placement
from tests.samples import thorough_between
from tests.tiny import make_all

APART = placement(2, actor_generate="on mesh(0:1)", actor_train="on mesh(1:2)", ref_logprobs="on mesh(1:2)")
TOGETHER = placement(2, **{"actor_*": "on mesh(0:2) dp=2", "ref_*": "on mesh(0:2) dp=2"})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("verdict")
    make_all(folder)
    (folder / "rewards_small.py").write_text((HERE / "rewards_small.py").read_text())
    (folder / "apart.rlf").write_text(APART)
    (folder / "together.rlf").write_text(TOGETHER)
    return folder


def sim(folder: Path, place: str, option: str, *more: str, text: str = "", command: str = "sim") -> str:
    (folder / "p.rlf").write_text((text or (HERE / "grpo_small.rlf").read_text()).replace("seed=7)", f"seed=7{option})"))
    done = CliRunner().invoke(main, [command, str(folder / "p.rlf"), "--cluster", "h100x8", "--place",
                                     str(folder / f"{place}.rlf"), "--set", f"base={folder}/models/sft", "--set",
                                     f"rows={folder}/data/prompts.jsonl", *more])
    assert done.exit_code == 0, done.output
    return done.output


@pytest.mark.thorough
def test_on_disjoint_ranks(folder: Path) -> None:
    plain, late = (json.loads(sim(folder, "apart", option, "--json")) for option in ("", ", lag=1"))
    assert (plain["lag"], late["lag"]) == (0, 1) and late["seconds"] < plain["seconds"]
    assert plain["other_lag"] | {"peak_bytes": 0} == {"lag": 1, "seconds": late["average_seconds"], "peak_bytes": 0}
    assert late["other_lag"] | {"peak_bytes": 0} == {"lag": 0, "seconds": plain["average_seconds"], "peak_bytes": 0}
    assert "with lag=1 a step would be" in sim(folder, "apart", "") and "shorter" in sim(folder, "apart", "")
    assert "shorter than without it" in sim(folder, "apart", ", lag=2")


@pytest.mark.thorough
def test_on_the_same_ranks(folder: Path) -> None:
    """Nothing is suggested that cannot help; a lag that was asked for is judged."""
    assert "lag=" not in sim(folder, "together", "") and json.loads(
        sim(folder, "together", "", "--json"))["other_lag"] is None
    said = sim(folder, "together", ", lag=1")
    assert "as long as without it" in said or "longer than without it" in said


def test_where_no_lag_is_allowed(folder: Path) -> None:
    text = (HERE / "grpo_small.rlf").read_text()
    head, _, body = text.partition("  prompt = prompts.next()")
    text = f"{head}  repeat 2 {{\n  prompt = prompts.next(){body.rstrip().removesuffix('}')}\n  }}\n}}\n".replace(
        "  every every_step { save actor }\n", "")
    assert "lag" not in sim(folder, "apart", "", text=text).replace("p.rlf", "").partition("critical path")[0]


@pytest.mark.thorough
def test_the_compiler_says_it_in_a_line(folder: Path) -> None:
    late = json.loads(sim(folder, "apart", ", lag=1", "--json"))
    said = sim(folder, "apart", ", lag=1", command="compile").splitlines()[-1]
    assert said.startswith("  step ") and "on h100x8; lag 1: a step is" in said and "shorter than without it" in said
    found = json.loads(sim(folder, "apart", ", lag=1", "--json", command="compile"))
    assert (found["step_seconds"], found["lag"], found["other_lag"]) == (late["seconds"], 1, late["other_lag"])
    plain = json.loads(sim(folder, "apart", "", "--json", command="compile"))
    assert plain["other_lag"]["peak_bytes"] == found["peak_bytes"] > 0
    assert found["other_lag"]["peak_bytes"] == plain["peak_bytes"]
    together = sim(folder, "together", "", command="compile").splitlines()[-1]
    assert together.startswith("  step ") and "lag" not in together


@pytest.mark.parametrize("option", ["--emit=plan", "--print-after=list"])
def test_a_stage_has_no_prediction(option: str, folder: Path) -> None:
    (folder / "p.rlf").write_text((HERE / "grpo_small.rlf").read_text())
    done = CliRunner().invoke(main, ["compile", str(folder / "p.rlf"), option, "--cluster", "h100x8"])
    assert done.exit_code == 2 and "omit --cluster" in done.output


def test_the_lag_of_a_call(folder: Path) -> None:
    """Without a lag means without those of calls."""
    text = (HERE / "grpo_small.rlf").read_text()
    late = text.replace("temperature=0.9)", "temperature=0.9, lag=1)")
    plain, of_call = (json.loads(sim(folder, "apart", "", "--json", text=x)) for x in (text, late))
    assert of_call["lag"] == 1 and of_call["seconds"] < plain["seconds"]
    assert (of_call["other_lag"]["lag"], of_call["other_lag"]["seconds"]) == (0, plain["average_seconds"])


def test_only_generation_loses_its_lag() -> None:
    """A function of the program may have a parameter of this name."""
    program = ('fn older(x: seq, lag = 2) -> seq { return x + lag }\nflow run(steps=8) {\n  p = prompts.next()\n'
               '  gen = actor.generate(p, n=2, lag=3)\n  metric m = mean(older(len(gen), lag=1))\n}\n')
    calls = [c for c in ast.walk(with_lag(parse(SourceFile("p.rlf", program)), 0).items) if isinstance(c, ast.Call)]
    lags = [a.value for c in calls for a in c.args if a.name is not None and a.name.name == "lag"]
    assert [x.value for x in lags if isinstance(x, ast.Number)] == [1]


@pytest.mark.parametrize("generate, train", thorough_between([(100.0, 40.0), (40.0, 100.0), (70.0, 70.0)]))
def test_with_known_durations_only_the_schedule_is_left(folder: Path, generate: float, train: float) -> None:
    """With a lag a step takes as long as the longer side, without as long as both: whatever the calls take, as
    measured, is not predicted again."""
    given = ("--duration", f"actor.generate={generate}", "--duration", f"actor.train={train}", "--duration",
             "ref.logprobs=20", "--json")
    plain, late = (json.loads(sim(folder, "apart", option, *given)) for option in ("", ", lag=1"))
    assert plain["seconds"] == pytest.approx(generate + train + 20, rel=0.01)
    assert late["seconds"] == pytest.approx(max(generate, train + 20), rel=0.01)
    assert late["other_lag"]["seconds"] == pytest.approx(plain["seconds"])


SELDOM = '''
use std.sft (sft)
param base = "models/sft"
param rows = "data/prompts.jsonl"
cluster nodes=1 gpus=2
data prompts = jsonl(rows, batch=4, max_prompt_tokens=16)
data others  = jsonl(rows, batch=4, max_prompt_tokens=16)
model actor  = causal_lm(base) train adamw(lr=1e-3)
model second = causal_lm(base) train adamw(lr=1e-3)
flow run(steps=20, seed=7) {
  prompt = prompts.next()
  gen    = actor.generate(prompt, max_new_tokens=4)
  actor.train(gen, loss=sft())
  every PERIOD {
    other = others.next()
    more  = second.generate(other, max_new_tokens=4)
    second.train(more, loss=sft())
  }
}
'''
BLOCKS = placement(2, **{"*_generate": "on mesh(0:1)", "*_train": "on mesh(1:2)"})


@pytest.mark.thorough
@pytest.mark.parametrize(("period", "lag", "seconds"), [
    (4, 0, 20 + (100 + 60) / 4),  # one after the other
    (4, 1, 10 + (100 + 60) / 4),  # in consecutive turns, each beside an ordinary step
    (2, 1, 10 + (100 + 60) / 2),
    (2, 4, 10 + 100 / 2),  # beside the training of an earlier one
])
def test_the_parts_of_a_block_run_in_turns_of_their_own(folder: Path, period: int, lag: int, seconds: float) -> None:
    """On average; the steady step is without it."""
    (folder / "blocks.rlf").write_text(BLOCKS)
    text = SELDOM.replace("PERIOD", str(period))
    given = [x for name, n in (("actor.generate", 10), ("actor.train", 10), ("second.generate", 100),
                               ("second.train", 60)) for x in ("--duration", f"{name}={n}")]
    option = f", lag={lag}" if lag else ""
    found = json.loads(sim(folder, "blocks", option, "--json", *given, text=text))
    assert found["seconds"] == pytest.approx(10 if lag else 20, rel=0.01)
    assert found["average_seconds"] == pytest.approx(seconds, rel=0.01)
    if lag != 1:  # the second simulation has a lag of 0 or 1
        assert found["other_lag"]["seconds"] == pytest.approx(20 + 160 / period if lag else 10 + 160 / period, rel=0.01)
    assert f"every {period} steps" in (said := sim(folder, "blocks", option, *given, text=text)) and "average" in said


@pytest.mark.thorough
@pytest.mark.parametrize(("block", "left_out"), [("every 4", True), ("after 1", False)])
def test_the_charts_of_a_report_name_what_they_leave_out(block: str, left_out: bool, folder: Path) -> None:
    (folder / "blocks.rlf").write_text(BLOCKS)
    text = SELDOM.replace("every PERIOD", block)
    sim(folder, "blocks", ", lag=1", "-o", str(folder / "p.plan"), text=text, command="compile")
    done = CliRunner().invoke(main, ["report", str(folder / "p.plan"), "-o", str(folder / "p.html")])
    assert done.exit_code == 0, done.output
    page = (folder / "p.html").read_text()
    for title in ("Simulated on h100x8", "the step that it belongs to"):
        assert title in page and (f"{title}, without what runs every 4 steps" in page) == left_out
