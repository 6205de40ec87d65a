"""`rlc search` as a user types it: what it finds, prints and writes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from rldsl.plan.codec import decode
from rldsl.search.answer_text import call_rows
from rldsl.search.branch_and_bound import branch_and_bound
from rldsl.search.candidates import CandidateTable
from rldsl.search.evaluator import Assignment, Evaluation, Evaluator
from rldsl.search.parallel import fill
from tests.search.commands import PROGRAM, folder, rlc, searched
from tests.search.programs import cluster, describe, instance


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


def test_less_memory_is_kept_to(folder: Path) -> None:
    found = json.loads(searched("--json", "--memory", "30.123456789"))
    assert found["best"][0]["bytes"] <= 30.123456789e9
    assert "memory_gb=30.123456789\n" in (folder / "grpo.place.rlf").read_text()
    done = rlc("compile", "grpo.rlf", "--place", "grpo.place.rlf", "-o", "grpo.plan")
    assert done.exit_code == 0, done.output


def test_what_a_simulation_adds_to_the_gap_is_named(folder: Path) -> None:
    text = searched("--gap", "0")
    gap = float(text.split("gap ")[1].split("%")[0])
    assert gap == 0 or f"which adds {gap:.2f}%" in text


def test_no_listed_alternative_is_faster_without_a_reason(folder: Path) -> None:
    for gap in ("0", "0.3"):
        for line in searched("--gap", gap).splitlines():
            if "estimated" in line:
                assert line.endswith(("slower when simulated", "needs too much memory once compiled")), line


def test_expected_lengths_are_in_the_header(folder: Path) -> None:
    searched("--prompt-tokens", "100", "--response-tokens", "50", "--longest", "200")
    assert "prompts of 100 tokens, responses of 50, longest 200" in (folder / "grpo.place.rlf").read_text()


def test_a_search_may_renew_the_placement_file_that_it_reads(folder: Path) -> None:
    (folder / "grpo.place.rlf").write_text("place actor.train zero=1\n")
    searched("--place", "grpo.place.rlf")
    assert (folder / "grpo.place.rlf").read_text().startswith("# Placement of grpo.rlf")


def test_a_profile_of_other_models_measured_none_of_these(folder: Path) -> None:
    (folder / "two.yaml").write_text("preset: h100x8\ngpus: 2\nmeasured:\n  - {config: abc, head: causal_lm, dtype: "
                                     "float32, tp: 1, threads: 1, forward: "
                                     "{call: 3, layer: 0, token: 1e-3, pair: 0, output: 0}}\n")
    (times,) = (line for line in searched().splitlines() if line.startswith("  times"))
    assert "roofline estimate" in times and all(name in times for name in ("actor", "judge", "ref"))


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
