"""`rlc` from the outside: exit status, where messages go, and what is imported."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
from click.testing import CliRunner, Result

from rldsl import api
from rldsl.cli import main
from rldsl.diag import Failure
from tests.tiny import make_model

PROGRAM = """# Greedy generation.
param base = "models/sft"
data prompts = jsonl("data/prompts.jsonl", batch=4, max_prompt_tokens=8)
model actor = causal_lm(base)
flow generate(steps=2, seed=1) {
  prompt = prompts.next()
  gen    = actor.generate(prompt, max_new_tokens=4) on mesh(0:4) dp=2 tp=2
  metric logprob = mean(gen.logprobs)
}
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("cli") / "sft")


@pytest.fixture
def work(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models").mkdir()
    (tmp_path / "models/sft").symlink_to(model)
    (tmp_path / "p.rlf").write_text(PROGRAM)
    return tmp_path


def rlc(*arguments: str) -> Result:
    return CliRunner().invoke(main, arguments)


def bad(result: Result, code: int = 1) -> str:
    assert result.exit_code == code, result.output
    assert "Traceback" not in result.output
    return result.output


def test_compile_show_verify(work: Path) -> None:
    result = rlc("compile", "p.rlf")
    assert result.exit_code == 0, result.output
    assert "actor.generate dp=2 tp=2" in result.output and (work / "p.plan").exists()
    assert not list(work.glob("*.part"))
    first = (work / "p.plan").read_bytes()
    assert rlc("compile", "p.rlf", "-o", "q.plan").exit_code == 0
    assert (work / "q.plan").read_bytes() == first  # the same program gives the same bytes
    assert "ok p.plan" in rlc("verify", "p.plan").output
    assert "generate" in rlc("show", "p.plan", "--rank", "3").output
    assert rlc("show", "p.plan", "--event", "1").exit_code == 0
    assert "RL0608" in bad(rlc("show", "p.plan", "--rank", "9"))


@pytest.mark.parametrize("stage", ["graph", "events", "plan"])
def test_emit(work: Path, stage: str) -> None:
    result = rlc("compile", "p.rlf", "--emit", stage)
    assert result.exit_code == 0 and "gen" in result.output and not (work / "p.plan").exists()


def test_placement_from_elsewhere(work: Path) -> None:
    (work / "fast.rlf").write_text("place actor.* on mesh(0:2) dp=2\n")
    assert "actor.generate dp=2" in rlc("compile", "p.rlf", "--place", "fast.rlf").output
    result = rlc("compile", "p.rlf", "--place", "fast.rlf", "--on", "@gen on mesh(0:1)")
    assert "actor.generate dp=1" in result.output, result.output
    assert api.compile("p.rlf", overrides=["actor.generate on mesh(0:8) dp=8"]).header.world == 8
    assert "RL0313" in bad(rlc("compile", "p.rlf", "--on", "actr.generate on mesh(0:1)"))
    assert "RL00" in bad(rlc("compile", "p.rlf", "--on", "actor.generate on mesh("))


@pytest.mark.parametrize("form, word", [("mermaid", "graph"), ("dot", "digraph")])
def test_graph(work: Path, form: str, word: str) -> None:
    result = rlc("graph", "p.rlf", "--format", form)
    assert result.exit_code == 0 and (word in result.output or "flowchart" in result.output)


def test_a_picture_without_graphviz(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One document that a browser shows, with a box for every node and a link for every value."""
    monkeypatch.setenv("PATH", "")
    root = ElementTree.fromstring(rlc("graph", "p.rlf", "--format", "svg").output)
    texts = [t.text for t in root.iter("{http://www.w3.org/2000/svg}text")]
    assert "actor.generate" in str(texts) and "prompts.next" in str(texts)
    drawn = rlc("graph", "p.rlf").output
    assert sum("node" in str(e.get("class")).split() for e in root.iter()) == sum(
        '"' in line and "-->" not in line and "-.->" not in line for line in drawn.splitlines())
    assert sum("link" in str(e.get("class")).split() for e in root.iter()) > 0


@pytest.mark.parametrize("name, begins", [("g.svg", "<svg"), ("g.dot", "digraph"), ("g.gv", "digraph"),
                                          ("g.mmd", "flowchart")])
def test_the_ending_names_the_form(work: Path, name: str, begins: str) -> None:
    assert rlc("graph", "p.rlf", "-o", name).output == f"wrote {name}\n"
    assert (work / name).read_text().startswith(begins)


def test_an_ending_that_names_no_form(work: Path) -> None:
    found = rlc("graph", "p.rlf", "-o", "g.png")
    assert found.exit_code == 2 and ".svg" in found.output and not (work / "g.png").exists()


def test_labels_are_the_calls_of_the_language_and_not_repeated(work: Path) -> None:
    from rldsl.graph.picture import label_lines, labels_of
    from tests.compiler.graphs import ppo
    from rldsl.graph.model import nodes

    graph = ppo()
    labelled = [label_lines(node, labels_of(graph)) for node in nodes(graph.items)]
    assert all(len({*lines}) == len(lines) for lines in labelled)
    assert "reward.scores" not in str(labelled)


def test_check(work: Path) -> None:
    assert rlc("check", "p.rlf").exit_code == 0
    (work / "models/sft").unlink()
    assert rlc("check", "p.rlf").exit_code == 0  # needs no model
    assert "RL0301" in bad(rlc("compile", "p.rlf"))


@pytest.mark.parametrize("old, new, code", [
    ("dp=2 tp=2", "dp=4 tp=4", "RL0304"), ("dp=2 tp=2", "dp=2 tq=2", "RL0310"), ("mean(gen", "mean(gem", "RL01"),
    ("steps=2", "steps=", "RL00"), ("model actor", "cluster gpus=2\nmodel actor", "RL0305")])
def test_check_finds(work: Path, old: str, new: str, code: str) -> None:
    (work / "p.rlf").write_text(PROGRAM.replace(old, new))
    text = bad(rlc("check", "p.rlf"))
    assert code in text and "p.rlf:" in text
    assert code in bad(rlc("compile", "p.rlf"))


def test_machine_output(work: Path) -> None:
    (work / "p.rlf").write_text(PROGRAM.replace("dp=2 tp=2", "dp=4 tp=4"))
    found = json.loads(bad(rlc("--output-format", "json", "check", "p.rlf")))
    assert found["diagnostics"][0]["code"] == "RL0304" and found["diagnostics"][0]["span"]["line"] == 7
    assert bad(rlc("--output-format", "github", "check", "p.rlf")).startswith("::error file=p.rlf,line=7,")
    (work / "p.rlf").write_text(PROGRAM)
    assert json.loads(rlc("--output-format", "json", "check", "p.rlf").output)["diagnostics"] == []


def test_files_that_are_no_programs(work: Path) -> None:
    assert "did you mean p.rlf" in bad(rlc("check", "pp.rlf"))
    assert "p.rlf" in bad(rlc("check", "."))
    (work / "latin.rlf").write_bytes("# caf\u00e9".encode("latin-1"))
    assert "UTF-8" in bad(rlc("compile", "latin.rlf"))
    assert "RL0091" in bad(rlc("verify", "none.plan"))
    assert "RL0092" in bad(rlc("show", "."))
    assert "RL0094" in bad(rlc("compile", "p.rlf", "-o", "nowhere/p.plan"))


def test_edited_plan(work: Path) -> None:
    rlc("compile", "p.rlf")
    plan = work / "p.plan"
    plan.write_text(plan.read_text().replace('"seed":1', '"seed":2'))
    for command in (["verify"], ["show"], ["run"]):
        assert "RL0602" in bad(rlc(*command, "p.plan"))


@pytest.mark.parametrize("arguments", [
    ["--set", "base", "check", "p.rlf"], ["check", "p.rlf", "--set", "base"], ["nonsense"], ["check"],
    ["graph", "p.rlf", "--format", "gif"], ["run", "p.rlf", "--nproc", "0"]])
def test_usage(work: Path, arguments: list[str]) -> None:
    bad(rlc(*arguments), 2)


def test_unknown_set(work: Path) -> None:
    assert "RL0106" in bad(rlc("check", "p.rlf", "--set", "bse=x"))


def test_run_with_the_wrong_number_of_processes(work: Path) -> None:
    assert "RL0096" in bad(rlc("run", "p.rlf", "--nproc", "3"))


def test_internal_error(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> None:
        raise AssertionError("an invariant")

    monkeypatch.setattr(api, "examine", broken)
    text = bad(rlc("check", "p.rlf"), 3)
    assert "report" in text and "an invariant" in text
    assert "Traceback" in rlc("-v", "check", "p.rlf").output


def test_api(work: Path) -> None:
    assert api.check(PROGRAM, "p.rlf") == ()
    assert [d.code for d in api.check(PROGRAM.replace("dp=2 tp=2", "dp=3"), "p.rlf")] == ["RL0304"]
    with pytest.raises(Failure):
        api.compile("none.rlf")


CHECK = """
import sys
calls = 0
def count(frame, event, arg):
    global calls
    calls += event in ("call", "c_call")
sys.setprofile(count)
from click.testing import CliRunner
from rldsl.cli import main
result = CliRunner().invoke(main, sys.argv[1:])
heavy = {"torch", "transformers", "numpy", "safetensors"} & sys.modules.keys()
print(result.exit_code, sorted(heavy), calls)
"""


@pytest.mark.parametrize("arguments, most", [(["--help"], 150_000), (["check", "p.rlf"], 5_000_000)])
def test_quick_commands_import_no_torch(work: Path, arguments: list[str], most: int) -> None:
    done = subprocess.run([sys.executable, "-c", CHECK, *arguments], capture_output=True, text=True, check=True)
    code, heavy, calls = done.stdout.split(" ", 1)[0], "[]" in done.stdout, int(done.stdout.split()[-1])
    assert code == "0" and heavy and calls < most, done.stdout


def test_imports_are_passed_over_until_the_process_ends() -> None:
    """What is imported is frozen; at the end it is freed as ever, or triton's library prints what was not."""
    code = """
import atexit, gc
atexit.register(lambda: print(gc.get_freeze_count()))
from rldsl import garbage_collection
usual = gc.get_threshold()
try:
    with garbage_collection.importing():
        import csv
        print(gc.get_threshold() == garbage_collection.RARELY)
        raise ImportError
except ImportError:
    print(gc.get_freeze_count() > 1000, gc.get_threshold() == usual)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True", "True", "True", "0"] and not done.stderr
