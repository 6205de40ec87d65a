"""A run goes on in its data where it stopped: the same rows, or the user is told why not."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rldsl.plan.function import Function
from rldsl.runtime.data.read_positions import SourceReading, compare_readings
from rldsl.runtime.persist.manifest import DIGEST, manifest_text
from rldsl.runtime.persist.run_identity import program_changes, program_identity
from tests.checkpoint.runs import lines, run
from tests.end_to_end.programs import compile_program
from tests.plan import sample
from tests.tiny import make_model, make_sums, write_jsonl
from tests.world import run_world

PROGRAM = """
param base: text
param rows: text
param kept: text
param batch = 4
param steps = 4
param lr = 1e-3
data sums = {format}(rows, batch=batch, answer="answer"{more})
data held = jsonl(kept, batch=4, answer="answer")
model actor = causal_lm(base) train adamw(lr=lr)
flow f(steps=steps, seed={seed}) {{
  it = sums.next()
  actor.train(it, loss=fit())
  eval held {{
    seen = held.next()
    lp   = actor.logprobs(seen)
    metric known = mean(lp)
  }}
  checkpoint every 1
}}
loss fit(logprobs: token) {{ return -mean(logprobs) }}
"""


class Place:
    """A directory in which one run stopped after its second step."""

    def __init__(self, folder: Path, base: Path):
        self.folder, self.base = folder, base

    def plan(self, seed: int = 3, format: str = "jsonl", more: str = "", name: str = "sums", **sets: Any) -> bytes:
        text = PROGRAM.format(seed=seed, format=format, more=more)
        (self.folder / "p.rlf").write_text(text.replace("sums", name))
        files = {"base": self.base, "rows": self.folder / "rows.jsonl", "kept": self.folder / "held.jsonl"}
        given: dict[str, Any] = files | sets
        texts = {k: str(v) if isinstance(v, Path) else v for k, v in given.items()}
        return compile_program(self.folder / "p.rlf", texts, "cluster nodes=1 gpus=1\nplace *.* on mesh(0:1)\n",
                               self.folder)

    def go_on(self, data: bytes) -> str:
        """What the run said that went on in a copy of the directory."""
        out = self.folder / "again"
        shutil.rmtree(out, ignore_errors=True)
        shutil.copytree(self.folder / "out", out)
        [said] = run_world(1, _rank, data, str(out))
        assert "Traceback" not in said
        return said


def _rank(rank: int, data: bytes, out: str) -> str:
    import io
    import sys

    from rldsl.diag import Failure
    from rldsl.report import render
    from rldsl.runtime.interpreter.interpreter import execute
    from rldsl.runtime.interpreter.options import Options
    from rldsl.runtime.plan_file import PlanFile

    before, sys.stderr = sys.stderr, io.StringIO()
    try:
        execute(PlanFile.from_bytes(data, "p.plan"), out, options=Options(resume=Path(out), continues=True))
        return sys.stderr.getvalue()
    except Failure as failure:
        return sys.stderr.getvalue() + render(failure.diagnostics)
    finally:
        sys.stderr = before


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Place:
    folder = tmp_path_factory.mktemp("positions")
    place = Place(folder, make_model(tmp_path_factory.mktemp("base") / "base"))
    write_jsonl(folder / "rows.jsonl", [*make_sums(20), {"prompt": "1+1=" * 9, "answer": "2"}])
    write_jsonl(folder / "held.jsonl", make_sums(6))
    assert run(place.plan(), folder / "out", stop_after=2) == [""]
    return place


@pytest.fixture
def place(made: Place, tmp_path: Path) -> Place:
    shutil.copytree(made.folder, tmp_path, dirs_exist_ok=True)
    for file in (tmp_path / "out/checkpoints").rglob("checkpoint.json"):  # it lies elsewhere now
        held = json.loads(file.read_text().replace(str(made.folder), str(tmp_path)))
        del held[DIGEST]
        file.write_text(manifest_text(held))
    return Place(tmp_path, made.base)


def test_a_checkpoint_says_what_its_positions_mean(place: Place) -> None:
    held = json.loads((place.folder / "out/checkpoints/step-000002/checkpoint.json").read_text())
    assert held["data"] == {"sums": 1}  # batches 0 and 1; an evaluation has no position
    rows = place.folder / "rows.jsonl"
    assert held["readings"].keys() == {"sums", "held"} and held["readings"]["sums"] == {
        "format": "jsonl", "path": str(rows), "kind": "answers", "batch": 4, "shuffle": True, "rows": 21,
        "bytes": rows.stat().st_size, "sha256": held["readings"]["sums"]["sha256"],
        "images": "", "image_marks": ""}


def test_a_position_without_its_meaning_is_refused(place: Place) -> None:
    """A forged checkpoint: nothing could be compared, so nothing would be refused."""
    file = place.folder / "out/checkpoints/step-000002/checkpoint.json"
    held = json.loads(file.read_text()) | {"readings": {}}
    del held[DIGEST]
    file.write_text(manifest_text(held))
    said = place.go_on(place.plan())
    assert "error[RL0764]: the checkpoint does not say which rows its position in `sums` counts" in said, said


def test_a_position_that_is_not_used_keeps_its_meaning(place: Place) -> None:
    """The program drops a source, and has it again after the next checkpoint."""
    out = place.folder / "out"
    for name, step in (("other", 3), ("sums", 4)):
        [said] = run_world(1, _rank, place.plan(name=name, steps=step), str(out))
        assert "error" not in said and f"after step {step - 1}" in said, said
        held = json.loads((out / f"checkpoints/step-{step:06d}/checkpoint.json").read_text())
        assert held["data"].keys() <= held["readings"].keys() and {"sums", "held"} <= held["readings"].keys()


def test_nothing_changed(place: Place) -> None:
    said = place.go_on(place.plan())
    assert "resuming from" in said and "after step 2" in said
    assert not any(word in said for word in ("note:", "warning", "error")), said


def test_what_changed_is_told_with_both_values(place: Place) -> None:
    said = place.go_on(place.plan(lr=5e-4, seed=4, steps=5))
    assert "param lr: 0.001 -> 0.0005" in said and "param steps: 4 -> 5" in said and "param batch" not in said
    assert "seed: 3 -> 4; the rest of a shuffled epoch" in said and "p.rlf: " in said
    assert len(lines(place.folder / "again")) == 5


@pytest.mark.parametrize("changed, told", [
    ({"batch": 5}, "batch: 4 -> 5"),
    ({"more": ", shuffle=false"}, "shuffle: true -> false"),
    ({"more": ", max_prompt_tokens=20, over_long=drop"}, "rows: 21 -> "),
])
def test_a_position_that_means_other_rows_is_refused(place: Place, changed: dict[str, Any], told: str) -> None:
    said = place.go_on(place.plan(**changed))
    assert "error[RL0764]: the position in `sums` is no longer valid" in said and told in said
    assert [line["step"] for line in lines(place.folder / "again")] == [1, 2]
    assert (place.folder / "again/checkpoints/step-000002").is_dir()


def test_another_file_is_refused_and_the_same_under_another_name_is_not(place: Place) -> None:
    other = place.folder / "other.jsonl"
    write_jsonl(other, make_sums(21, seed=9))
    said = place.go_on(place.plan(rows=other))
    assert "RL0764" in said and f"path: {place.folder / 'rows.jsonl'} -> {other}" in said
    shutil.copy(place.folder / "rows.jsonl", other)
    said = place.go_on(place.plan(rows=other))
    assert "param rows" in said and "RL076" not in said and len(lines(place.folder / "again")) == 4


def test_another_format_with_other_bytes_is_refused(place: Place) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = [json.loads(line) for line in (place.folder / "rows.jsonl").read_text().splitlines()]
    pq.write_table(pa.Table.from_pylist(rows), place.folder / "rows.parquet")
    said = place.go_on(place.plan(format="parquet", rows=place.folder / "rows.parquet"))
    assert "RL0764" in said and "format: jsonl -> parquet" in said


@pytest.mark.parametrize("file, epoch", [("rows.jsonl", True), ("held.jsonl", False)])
def test_an_edited_file_is_warned_of(place: Place, file: str, epoch: bool) -> None:
    write_jsonl(place.folder / file, make_sums(24, seed=5))
    said = place.go_on(place.plan())
    assert "warning[RL0765]" in said and str(place.folder / file) in said and "rows: " in said and "bytes: " in said
    assert ("of this epoch" in said) == epoch and "error" not in said
    assert len(lines(place.folder / "again")) == 4


def test_a_source_of_another_name_is_told(place: Place) -> None:
    said = place.go_on(place.plan(name="pairs"))
    assert "warning[RL0765]: `pairs` is not in the checkpoint: reading starts at its first row" in said


def test_a_checkpoint_of_an_earlier_version_is_refused(place: Place) -> None:
    for file in (place.folder / "out/checkpoints").rglob("checkpoint.json"):
        held = json.loads(file.read_text())
        del held[DIGEST]
        file.write_text(json.dumps(held | {"format": 1}))
    said = place.go_on(place.plan())
    assert "error[RL0761]" in said and "written by an earlier version, without a digest of its contents" in said


def test_nothing_is_dropped_before_the_run_is_sound(place: Place) -> None:
    """Going on from an older one of the same run drops the later ones; not so when it is refused."""
    data = place.plan(batch=5)
    said = run_world(1, _rank_from, data, str(place.folder / "out"), "step-000001")
    assert "RL0764" in said[0] and (place.folder / "out/checkpoints/step-000002").is_dir()


def _rank_from(rank: int, data: bytes, out: str, name: str) -> str:
    from rldsl.diag import Failure
    from rldsl.runtime.interpreter.interpreter import execute
    from rldsl.runtime.interpreter.options import Options
    from rldsl.runtime.plan_file import PlanFile

    os.chdir(Path(out).parent)
    try:
        execute(PlanFile.from_bytes(data, "p.plan"), out,
                options=Options(resume=Path(out) / "checkpoints" / name, continues=True))
    except Failure as failure:
        return str(failure)
    return ""


# ---------------------------------------------------------------------------------------------------- alone

READING = SourceReading("jsonl", "a.jsonl", "prompts", 4, True, 20, 1000, "0" * 64)


@pytest.mark.parametrize("now, code", [
    ({}, None), ({"path": "b.jsonl"}, None), ({"kind": "answers"}, None),
    ({"sha256": "1"}, "RL0765"), ({"sha256": "1", "rows": 30, "bytes": 1}, "RL0765"),
    ({"batch": 8}, "RL0764"), ({"shuffle": False}, "RL0764"), ({"rows": 19}, "RL0764"),
    ({"path": "b.jsonl", "sha256": "1"}, "RL0764"), ({"format": "hf", "sha256": "1"}, "RL0764"),
    ({"kind": "pairs", "sha256": "1"}, "RL0764"), ({"batch": 8, "sha256": "1"}, "RL0764"),
])
def test_compare(now: dict[str, Any], code: str | None) -> None:
    found = compare_readings("x", READING, replace(READING, **now), begun=True)
    assert (found and found.code) == code
    before = compare_readings("x", READING, replace(READING, **now), begun=False)  # nothing was read, so nothing can be lost
    assert (before and before.code) == ("RL0765" if "sha256" in now else None)
    assert all(d is None or (d.severity == "error") == (d.code == "RL0764") for d in (found, before))


WHOLE = {"format": "jsonl", "path": "a", "kind": "prompts", "batch": 4, "shuffle": True, "rows": 2, "bytes": 3,
         "sha256": "0"}


@pytest.mark.parametrize("held", [None, [], "x", {}, {"format": "jsonl"}, *(WHOLE | x for x in (
    {"batch": "4"}, {"rows": True}, {"shuffle": 1}, {"sha256": None}, {"more": 1}))])
def test_readings_that_are_none(held: Any) -> None:
    assert SourceReading.read(WHOLE) == SourceReading("jsonl", "a", "prompts", 4, True, 2, 3, "0")
    with pytest.raises((TypeError, ValueError)):
        SourceReading.read(held)


def test_changes() -> None:
    then = {"params": {"a": 1, "b": 2}, "seed": 1, "sources": {"p.rlf": "1" * 64, "q.rlf": "2" * 64},
            "functions": {"r.py": "3" * 64}}
    assert list(program_changes(then, then)) == []
    assert list(program_changes(then, {**then, "sources": {"./p.rlf": "1" * 64, "q.rlf": "2" * 64}})) == []
    assert list(program_changes(then, {**then, "params": {"a": 1.5, "c": [1]}})) == [
        "param a: 1 -> 1.5", "param c: none -> [1]", "param b: 2 -> none"]
    assert list(program_changes(then, {**then, "functions": {"r.py": "4" * 64}, "sources": {"p.rlf": "5" * 64}})) == [
        "p.rlf: 11111111 -> 55555555", "q.rlf: 22222222 -> missing", "r.py: 33333333 -> 44444444"]
    assert list(program_changes(then, {**then, "sources": then["sources"] | {"<command line>": "4" * 64}})) == [
        "`--on` rules: missing -> 44444444"]
    old = {k: v for k, v in then.items() if k != "functions"}
    assert list(program_changes(old, then)) == []


def test_a_module_that_a_function_imports_has_changed() -> None:
    """Editing it changes what the function computes as much as editing the function's own file."""
    def identity(digest: str) -> dict[str, Any]:
        function = Function("r.py:f", "r.py", "f", "3" * 64, modules=(("helper", "helper.py", digest * 64),))
        return program_identity(replace(sample.grpo(), functions=(function,)))

    assert list(program_changes(identity("1"), identity("1"))) == []
    assert list(program_changes(identity("1"), identity("2"))) == ["helper.py: 11111111 -> 22222222"]
