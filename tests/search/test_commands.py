"""`rlc search` and `rlc explain-placement` as a user types them."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from rldsl.cli import main
from rldsl.commands import search as work
from rldsl.placement.place import place_graph
from rldsl.plan.codec import decode
from rldsl.progress import listening
from rldsl.search import find_placement
from rldsl.search.answer_text import call_rows
from rldsl.search.branch_and_bound import branch_and_bound
from rldsl.search.candidates import CandidateTable
from rldsl.search.evaluator import Assignment, Evaluation, Evaluator
from rldsl.search.parallel import fill
from rldsl.simulate import Lengths
from tests.samples import thorough_between
from tests.search.programs import GRPO, cluster, describe, instance

EIGHT = "cluster nodes=1 gpus=8\n"
PROGRAM = GRPO.replace("cluster nodes=1 gpus=1\n", EIGHT)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A program of 1B models on a node of eight, without directories."""
    monkeypatch.setattr("rldsl.commands.search.describe", describe("1B"))
    monkeypatch.setattr("rldsl.placement.place.place_graph", partial(place_graph, describe=describe("1B")))
    (tmp_path / "grpo.rlf").write_text(PROGRAM)
    (tmp_path / "two.yaml").write_text("preset: h100x8\ngpus: 2\n")
    (tmp_path / "bare.yaml").write_text("gpus: 8\nmemory_gb: 80\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def rlc(*arguments: str) -> Result:
    return CliRunner().invoke(main, arguments)


def searched(*arguments: str, program: str = "grpo.rlf") -> str:
    said = rlc("search", program, "--cluster", "two.yaml", *arguments)
    assert said.exit_code == 0, said.output
    return said.output


# ---------------------------------------------------------------------------------------------------- search


def test_the_table_says_what_each_call_costs_and_why(folder: Path) -> None:
    text = searched("--gap", "0")
    for word in ("grpo.rlf on two: 2 ranks", "step", "tokens/s", "bound", "gap", "search nodes", "roofline",
                 "actor.generate", "judge.score", "ref.logprobs", "actor.train", "next:", "other placements that were simulated",
                 "wrote grpo.place.rlf; next: rlc compile grpo.rlf --place grpo.place.rlf"):
        assert word in text, word
    header = (folder / "grpo.place.rlf").read_text().split("\ncluster ")[0]
    assert all(line.startswith("#") for line in header.splitlines() if line)
    for word in ("rldsl", "two: 1 node of 2 devices", "predicted", "bound", "gap", "seed"):
        assert word in header, word


def test_what_is_written_compiles_to_the_step_that_is_predicted(folder: Path) -> None:
    found = json.loads(searched("--json", "-o", "best.rlf"))
    done = rlc("compile", "grpo.rlf", "--place", "best.rlf", "-o", "grpo.plan")
    assert done.exit_code == 0, done.output
    told = json.loads(rlc("sim", "grpo.plan", "--cluster", "two.yaml", "--json").output)
    assert told["seconds"] == pytest.approx(found["best"][0]["seconds"], rel=1e-9)
    plan = decode((folder / "grpo.plan").read_bytes(), "grpo.plan")
    assert max(c.peak_bytes for c in plan.classes) == found["best"][0]["bytes"] <= 80e9


def test_json_has_the_certificate() -> None:
    found = json.loads(searched("--json", "--gap", "0"))
    seconds = [one["seconds"] for one in found["best"]]
    assert found["complete"] and seconds == sorted(seconds)
    assert 0 < found["bound"] <= seconds[0] and found["gap"] == pytest.approx(seconds[0] / found["bound"] - 1)
    assert [c["call"] for c in found["best"][0]["calls"]] == ["actor.generate", "judge.score", "ref.logprobs",
                                                              "actor.train"]


def test_the_same_input_gives_the_same_output(folder: Path) -> None:
    texts, files = [], []
    for _ in range(2):
        texts.append(searched("-o", "p.rlf"))
        files.append((folder / "p.rlf").read_bytes())
    assert texts[0] == texts[1] and files[0] == files[1]


def test_more_processes_find_the_same_output(folder: Path) -> None:
    one = searched("--json"), (folder / "grpo.place.rlf").read_bytes()
    (folder / "grpo.place.rlf").unlink()
    assert (searched("--json", "--jobs", "3"), (folder / "grpo.place.rlf").read_bytes()) == one


def test_compiling_with_more_processes_gives_the_same_plan(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rldsl.models.families.describe", describe("1B"))
    used: list[int] = []

    def counted(table: CandidateTable, reserve: int, num_processes: int) -> None:
        used.append(num_processes)
        fill(table, reserve, num_processes)

    monkeypatch.setattr("rldsl.search.answer.fill", counted)
    (folder / "two.rlf").write_text(PROGRAM.replace("gpus=8", "gpus=2"))
    plans = []
    for jobs in ("1", "2"):
        done = rlc("compile", "two.rlf", "--place", "search", "--jobs", jobs, "-o", "two.plan")
        assert done.exit_code == 0, done.output
        plans.append((folder / "two.plan").read_bytes())
    assert plans[0] == plans[1] and used == [1, 2]
    assert rlc("compile", "two.rlf", "--jobs", "0").exit_code == 2


def test_a_lock_keeps_a_call_where_the_program_has_it(folder: Path) -> None:
    (folder / "own.rlf").write_text(PROGRAM + "place ref.* on mesh(1:2) mbs=4\n")
    free = json.loads(searched("--json", program="own.rlf"))
    kept = json.loads(searched("--json", "--lock", "ref.*", program="own.rlf"))
    (ref,) = [c for c in kept["best"][0]["calls"] if c["call"] == "ref.logprobs"]
    assert ref["ranks"] == [1, 2] and ref["how"] == "dp=1 mbs=4" and "as in the program" in ref["why"]
    assert kept["best"][0]["seconds"] >= free["best"][0]["seconds"] * (1 - 1e-9)


def test_a_mesh_on_the_command_line_keeps_a_call(folder: Path) -> None:
    """As when compiling; a rule without a mesh says what may be tried, and a comparison frees all calls."""
    found = json.loads(searched("--json", "--on", "ref.* on mesh(1:2) mbs=4"))
    (ref,) = [c for c in found["best"][0]["calls"] if c["call"] == "ref.logprobs"]
    assert ref["ranks"] == [1, 2] and ref["how"] == "dp=1 mbs=4" and "as in the program" in ref["why"]
    assert "place ref.logprobs" in (folder / "grpo.place.rlf").read_text()
    tried = json.loads(searched("--json", "--on", "ref.* mbs=4"))
    (ref,) = [c for c in tried["best"][0]["calls"] if c["call"] == "ref.logprobs"]
    assert "mbs=4" in ref["how"] and "as in the program" not in ref["why"]
    compared = rlc("explain-placement", "grpo.rlf", "--cluster", "two.yaml", "--on", "ref.* on mesh(1:2) mbs=4", "--json")
    assert compared.exit_code == 0, compared.output


@pytest.mark.parametrize("how", ["rule", "line"])
def test_what_is_kept_is_in_the_file_wherever_it_was_said(folder: Path, how: str) -> None:
    rule = "ref.* on mesh(0:1) mbs=8"
    (folder / "rules.rlf").write_text(f"place {rule}\n")
    more = ("--place", "rules.rlf") if how == "rule" else ("--on", rule)
    found = json.loads(searched("--json", "--lock", "ref.*", "-o", "p.rlf", *more))
    assert "place ref.logprobs" in (folder / "p.rlf").read_text()
    assert (done := rlc("compile", "grpo.rlf", "--place", "p.rlf", "-o", "grpo.plan")).exit_code == 0, done.output
    told = json.loads(rlc("sim", "grpo.plan", "--cluster", "two.yaml", "--json").output)
    assert told["seconds"] == pytest.approx(found["best"][0]["seconds"], rel=1e-9)


def test_a_lock_of_a_call_that_follows_another(folder: Path) -> None:
    """It has no clause of its own: the program places it as the training of its model, which is free."""
    (folder / "own.rlf").write_text(PROGRAM + "place actor.train on mesh(0:1) mbs=2 recompute=full\n")
    found = json.loads(searched("--json", "--lock", "actor.generate", program="own.rlf"))
    (gen,) = [c for c in found["best"][0]["calls"] if c["call"] == "actor.generate"]
    assert gen["ranks"] == [0, 1]


def test_a_lock_with_a_bound_of_tokens(folder: Path) -> None:
    """One micro-batch of all rows would not fit."""
    (folder / "own.rlf").write_text(PROGRAM + "place actor.train on mesh(0:2) dp=2 zero=1 mbt=1536 recompute=full\n")
    found = json.loads(searched("--json", "--lock", "actor.train", "-o", "p.rlf", program="own.rlf"))
    (train,) = [c for c in found["best"][0]["calls"] if c["call"] == "actor.train"]
    assert "mbt=1536" in train["how"] and "mbt=1536" in (folder / "p.rlf").read_text()


def test_less_memory_is_kept_to(folder: Path) -> None:
    found = json.loads(searched("--json", "--memory", "30.123456789"))
    assert found["best"][0]["bytes"] <= 30.123456789e9
    assert "memory_gb=30.123456789\n" in (folder / "grpo.place.rlf").read_text()
    done = rlc("compile", "grpo.rlf", "--place", "grpo.place.rlf", "-o", "grpo.plan")
    assert done.exit_code == 0, done.output


def test_time_ends_a_search_which_says_so(folder: Path) -> None:
    found = json.loads(searched("--json", "--gap", "0", "--seconds", "0.000001"))
    assert not found["complete"] and found["best"] and found["gap"] >= 0
    assert "stopped by --seconds" in (folder / "grpo.place.rlf").read_text()


def test_a_result_has_one_gap_and_says_why_the_search_ended(folder: Path) -> None:
    text = searched("--gap", "0.5")
    assert text.count("gap ") == 2 and "search nodes: within the accepted gap of 50.00%" in text, text
    assert "search nodes: stopped by --seconds\n" in searched("--gap", "0", "--seconds", "0.000001")


def test_what_a_simulation_adds_to_the_gap_is_named(folder: Path) -> None:
    text = searched("--gap", "0")
    gap = float(text.split("gap ")[1].split("%")[0])
    assert gap == 0 or f"which adds {gap:.2f}%" in text


def test_no_listed_alternative_is_faster_without_a_reason(folder: Path) -> None:
    for gap in ("0", "0.3"):
        for line in searched("--gap", gap).splitlines():
            if "estimated" in line:
                assert line.endswith(("slower when simulated", "needs too much memory once compiled")), line


def test_the_gap_is_shown_while_it_searches() -> None:
    said: list[str] = []
    asked = work.SearchRequest("grpo.rlf", "two.yaml", {}, None, (), (), 0.0, 0.0, 0.0, Lengths())
    with listening(lambda stage: said.append(str(stage))):
        work.search(asked, "p.rlf", True)
    gaps = [float(s.rsplit("gap ", 1)[1].rstrip("%")) for s in said if "gap" in s]
    assert gaps and gaps == sorted(gaps, reverse=True), "it only shrinks"
    assert all("best" in s and "bound" in s for s in said if "gap" in s)


def test_a_second_ctrl_c_stops_without_a_file(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def twice(*_: object) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(1.0)

    monkeypatch.setattr("rldsl.commands.search.find_placement", twice)
    done = rlc("search", "grpo.rlf", "--cluster", "two.yaml")
    assert done.exit_code == 130 and "nothing was written" in done.output
    assert not (folder / "grpo.place.rlf").exists()


def test_ctrl_c_writes_the_best_so_far(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = signal.getsignal(signal.SIGINT)

    def interrupted(*arguments: Any) -> object:
        os.kill(os.getpid(), signal.SIGINT)  # before anything is found
        return find_placement(*arguments)

    monkeypatch.setattr("rldsl.commands.search.find_placement", interrupted)
    done = rlc("search", "grpo.rlf", "--cluster", "two.yaml", "--gap", "0")
    assert done.exit_code == 0 and "stopped by Ctrl-C" in done.output
    assert "stopped by Ctrl-C" in (folder / "grpo.place.rlf").read_text()
    assert signal.getsignal(signal.SIGINT) is before


def test_expected_lengths_are_in_the_header(folder: Path) -> None:
    searched("--prompt-tokens", "100", "--response-tokens", "50", "--longest", "200")
    assert "prompts of 100 tokens, responses of 50, longest 200" in (folder / "grpo.place.rlf").read_text()


# -------------------------------------------------------------------------------------------------- explain


def test_why_not_this_one() -> None:
    said = rlc("explain-placement", "grpo.rlf", "--cluster", "two.yaml", "--on", "*.* on mesh(0:2) tp=2 mbs=8")
    assert said.exit_code == 0, said.output
    for word in ("proposed", "best", "bound", "slower than the best", "if only this call were placed as in the best placement", "tp=2",
                 "the call itself"):
        assert word in said.output, word


def test_the_best_beside_itself(folder: Path) -> None:
    searched("-o", "p.rlf")
    said = rlc("explain-placement", "grpo.rlf", "--cluster", "two.yaml", "--place", "p.rlf")
    assert said.exit_code == 0 and "this is the same placement" in said.output, said.output


def test_one_that_does_not_fit_is_told_so() -> None:
    said = rlc("explain-placement", "grpo.rlf", "--cluster", "two.yaml", "--memory", "30", "--json",
               "--on", "*.* on mesh(0:2) dp=2")
    found = json.loads(said.output)
    assert found["bytes"] > 30e9 >= found["best_bytes"] and {c["call"] for c in found["calls"]} >= {"actor.train"}


# ------------------------------------------------------------------------------------------------- mistakes


@pytest.mark.parametrize("args, status, word", thorough_between([
    (("grpo.rlf",), 2, "--cluster"),
    (("none.rlf", "--cluster", "two.yaml"), 1, "RL0091"),
    (("grpo.rlf", "--cluster", "h10x8"), 1, "did you mean `h100x8`"),
    (("grpo.rlf", "--cluster", "none.yaml"), 1, "RL0091"),
    (("grpo.rlf", "--cluster", "bare.yaml"), 1, "RL0215"),
    (("grpo.rlf", "--cluster", "two.yaml", "--place", "none.rlf"), 1, "RL0091"),
    (("grpo.rlf", "--cluster", "two.yaml", "--on", "ref.* on"), 1, "RL00"),
    (("grpo.rlf", "--cluster", "two.yaml", "--on", "critic.* on mesh(0:2)"), 1, "RL0313"),
    (("grpo.rlf", "--cluster", "two.yaml", "--set", "batch=x"), 1, "RL0"),
    (("grpo.rlf", "--cluster", "two.yaml", "--seconds", "0"), 2, "--seconds"),
    (("grpo.rlf", "--cluster", "two.yaml", "--memory", "-1"), 2, "--memory"),
    (("grpo.rlf", "--cluster", "two.yaml", "--gap", "-0.1"), 2, "--gap"),
    (("grpo.rlf", "--cluster", "two.yaml", "--memory", "0.5"), 1, "RL0402"),
    (("grpo.rlf", "--cluster", "two.yaml", "--response-tokens", "0"), 2, "--response-tokens")]))
@pytest.mark.parametrize("command", ["search", "explain-placement"])
def test_mistakes(command: str, args: tuple[str, ...], status: int, word: str) -> None:
    said = rlc(command, *args)
    assert said.exit_code == status and word in said.output and "Traceback" not in said.output, said.output


@pytest.mark.parametrize("args, word", [
    (("--lock", "critic.*"), "calls of the program: actor.generate"), (("--lock", ""), "RL0313"),
    (("-o", "none/p.rlf"), "RL0094"),
    (("--lock", "actor.train", "--on", "actor.train on mesh(0:9)"), "RL0305"),
    (("--lock", "actor.train", "--on", "actor.train on mesh(0:2) tp=3"), "RL0304")])
def test_mistakes_of_a_search(args: tuple[str, ...], word: str) -> None:
    said = rlc("search", "grpo.rlf", "--cluster", "two.yaml", *args)
    assert said.exit_code == 1 and word in said.output and "Traceback" not in said.output, said.output


def test_too_small_a_cluster_says_how_many_nodes_it_would_take() -> None:
    said = rlc("search", "grpo.rlf", "--cluster", "two.yaml", "--memory", "10")
    assert said.exit_code == 1 and "RL0402" in said.output
    assert "2 devices of" in said.output and "the smallest cluster that fits:" in said.output, said.output
    gib = float(re.search(r"With about ([\d.]+) GiB on each device", said.output)[1])  # type: ignore[index]
    for gb, fits in ((gib * 1.0738, True), (gib * 1.0737 / 1.06, False)):
        again = rlc("search", "grpo.rlf", "--cluster", "two.yaml", "--memory", f"{gb:.3f}")
        assert (again.exit_code == 0) == fits and ("RL0402" in again.output) != fits, again.output


def test_what_is_kept_may_be_what_does_not_fit() -> None:
    """More nodes would not help."""
    said = rlc("search", "grpo.rlf", "--cluster", "two.yaml", "--memory", "30", "--lock", "actor.train",
               "--on", "actor.train on mesh(0:1) dp=1")
    assert said.exit_code == 1 and "RL0402" in said.output
    assert "if the search may also place" in said.output and "actor.train" in said.output, said.output


# ---------------------------------------------------------------------------------------------------- what is refused


@pytest.mark.parametrize("option, value", [
    ("--gap", "nan"), ("--gap", "inf"), ("--seconds", "nan"), ("--seconds", "inf"), ("--memory", "nan"),
    ("--memory", "inf"), ("--memory", "1e300"), ("--memory", "1e-300"), ("--memory", "0.9e-9"), ("--memory", "0")])
def test_numbers_that_are_none_are_refused(folder: Path, option: str, value: str) -> None:
    said = rlc("search", "grpo.rlf", "--cluster", "two.yaml", option, value)
    assert said.exit_code == 2 and f"'{option}'" in said.output, said.output
    assert not (folder / "grpo.place.rlf").exists()


@pytest.mark.parametrize("arguments", [
    ("search", "grpo.rlf", "--cluster", "two.yaml", "-o", "grpo.rlf"),
    ("search", "grpo.rlf", "--cluster", "two.yaml", "-o", "two.yaml"),
    ("search", "grpo.rlf", "--cluster", "two.yaml", "-o", "./grpo.rlf"),
    ("search", "grpo.rlf", "--cluster", "two.yaml", "-o", "link.rlf"),
    ("compile", "grpo.rlf", "-o", "grpo.rlf"),
    ("compile", "grpo.rlf", "--place", "two.rlf", "-o", "two.rlf"),
    ("sim", "grpo.rlf", "--cluster", "two.yaml", "--trace", "grpo.rlf"),
    ("sim", "grpo.rlf", "--cluster", "two.yaml", "--trace", "two.yaml"),
    ("profile", "grpo.rlf", "-o", "grpo.rlf")])
def test_no_output_replaces_what_the_command_reads(folder: Path, arguments: tuple[str, ...]) -> None:
    (folder / "two.rlf").write_text("place * on mesh(0:2) dp=2\n")
    (folder / "link.rlf").symlink_to("grpo.rlf")
    before = {file.name: file.read_bytes() for file in folder.iterdir()}
    said = rlc(*arguments)
    assert said.exit_code == 1 and "error[RL0094]" in said.output and "this command reads it" in said.output
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == before


def test_a_search_may_renew_the_placement_file_that_it_reads(folder: Path) -> None:
    (folder / "grpo.place.rlf").write_text("place actor.train zero=1\n")
    searched("--place", "grpo.place.rlf")
    assert (folder / "grpo.place.rlf").read_text().startswith("# Placement of grpo.rlf")


@pytest.mark.parametrize("command", ["search", "explain-placement"])
@pytest.mark.parametrize("mode", ["heuristic", "d2"])
def test_a_mode_is_no_file_of_rules(folder: Path, command: str, mode: str) -> None:
    said = rlc(command, "grpo.rlf", "--cluster", "two.yaml", "--place", mode)
    assert said.exit_code == 2 and f"`{mode}` is a mode" in said.output, said.output
    assert "FILE|MODE" not in rlc(command, "--help").output


@pytest.mark.parametrize("memory", ["1e-12", "1e300", "0"])
def test_a_program_has_at_least_a_byte_of_memory_and_a_finite_number(folder: Path, memory: str) -> None:
    (folder / "grpo.rlf").write_text(PROGRAM.replace(EIGHT, f"cluster nodes=1 gpus=8 memory_gb={memory}\n"))
    said = rlc("compile", "grpo.rlf")
    assert said.exit_code == 1 and "error[RL0205]" in said.output and "`memory_gb`" in said.output, said.output


def test_a_profile_of_other_models_measured_none_of_these(folder: Path) -> None:
    (folder / "two.yaml").write_text("preset: h100x8\ngpus: 2\nmeasured:\n  - {config: abc, head: causal_lm, dtype: "
                                     "float32, tp: 1, threads: 1, forward: "
                                     "{call: 3, layer: 0, token: 1e-3, pair: 0, output: 0}}\n")
    (times,) = (line for line in searched().splitlines() if line.startswith("  times"))
    assert "roofline estimate" in times and all(name in times for name in ("actor", "judge", "ref"))


@pytest.mark.parametrize("options, said", [
    (("--response-tokens", "513"), "no row can have responses of 513 tokens on average"),
    (("--prompt-tokens", "1e9"), "no row can have prompts of 1e+09 tokens on average"),
    (("--longest", "600"), "no row can have a longest response of 600 tokens"),
    (("--response-tokens", "300", "--longest", "200"), "cannot have 200 tokens where the mean is 300")])
@pytest.mark.parametrize("command", ["search", "explain-placement", "sim"])
def test_lengths_that_no_row_can_have(command: str, options: tuple[str, ...], said: str) -> None:
    found = rlc(command, "grpo.rlf", "--cluster", "two.yaml" if command != "sim" else "h100x8",
                *(("--on", "actor.train mbs=16") if command == "sim" else ()), *options)
    assert found.exit_code == 1 and "RL0205" in found.output and said in found.output, found.output


@pytest.mark.parametrize("options", [("--response-tokens", "inf"), ("--longest", "nan"), ("--prompt-tokens", "0")])
def test_lengths_that_are_no_numbers(options: tuple[str, ...]) -> None:
    assert rlc("search", "grpo.rlf", "--cluster", "two.yaml", *options).exit_code == 2


def test_an_engine_without_memory_for_its_weights_is_not_proposed(folder: Path) -> None:
    (folder / "engine.yaml").write_text("preset: h100x8\ngpus: 2\ncache_gb: 2.0\n")  # of 2.5 GB
    said = rlc("search", "grpo.rlf", "--cluster", "engine.yaml", "--json")
    assert said.exit_code == 0, said.output
    best = json.loads(said.output)["best"][0]
    (how,) = [c["how"] for c in best["calls"] if c["call"] == "actor.generate"]
    assert "tp=2" in how or "pp=2" in how
    (folder / "engine.yaml").write_text("preset: h100x8\ngpus: 2\ncache_gb: 0.05\n")
    said = rlc("search", "grpo.rlf", "--cluster", "engine.yaml")
    assert said.exit_code == 1 and "RL0402" in said.output and "cache_gb: 0.05" in said.output, said.output


def test_what_does_not_keep_copies_says_so(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A change that fits only without copies between steps is no change of one call alone. It is said of the answer
    alone, whose neighbors were looked at."""
    plain = json.loads(searched("--json"))
    assert not any("keep" in c["why"] for c in plain["best"][0]["calls"])
    assert not any("why" in c for other in plain["best"][1:] for c in other["calls"])
    evaluate = Evaluator.evaluate
    kept = []

    def changed(self: Evaluator, a: Assignment) -> Evaluation:
        found = evaluate(self, a)
        kept.append(a.candidates)
        return replace(found, keeps_copies=a.candidates == kept[0])

    i = instance("grpo", "1B", cluster(1, 4))
    best = branch_and_bound(i).best[0].assignment
    kept.clear()
    monkeypatch.setattr(Evaluator, "evaluate", changed)
    assert any("with keep=false for every copy, +" in x.reason for x in call_rows(i, best))
