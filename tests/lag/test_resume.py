"""A run with a lag resumes with what was generated ahead: nothing is lost, generated twice or read twice."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest
from safetensors.torch import load_file, save_file

from rldsl.diag import Failure
from rldsl.plan.events import Draw, Loop
from rldsl.runtime.files import digest
from rldsl.runtime.persist.checkpoint_reader import LoadedCheckpoint
from rldsl.runtime.checkpoint_files import MANIFEST, none_there
from rldsl.runtime.persist.manifest import DIGEST, manifest_text
from rldsl.runtime.state import in_flight
from tests.checkpoint.runs import copy_first_steps, held, lines, run, steps
from tests.end_to_end.programs import compile_program
from tests.end_to_end.test_invariance import HERE, everywhere, placement
from tests.lag.programs import PROGRAMS
from tests.samples import thorough_between
from tests.tiny import make_all

LAG = 2
PLACES = {
    "one": "cluster nodes=1 gpus=1\nplace *.* on mesh(0:1)\n",
    "apart": placement(3 + 1, slow_generate="on mesh(0:2) dp=2", actor_generate="on mesh(1:2)",
                       actor_train="on mesh(2:4) dp=2"),
    "together": everywhere(2, "dp=2", "actor", "slow"),
}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with the program; and the program with another lag."""
    folder = tmp_path_factory.mktemp("resumed")
    make_all(folder, tie_word_embeddings=True, num_hidden_layers=2)
    (folder / "rewards_small.py").write_text((HERE / "rewards_small.py").read_text())
    text = PROGRAMS["much"].replace("  metric length", "  checkpoint every 1 keep=9\n  metric length")
    for lag in (0, 1, LAG):
        (folder / f"lag{lag}.rlf").write_text(text.replace("{lag}", str(lag)))
    before = os.getcwd()
    os.chdir(folder)
    yield folder
    os.chdir(before)


def plan(base: Path, place: str, lag: int = LAG, **sets: object) -> bytes:
    folder = base / "plans" / f"{place}{lag}{len(sets)}"
    folder.mkdir(parents=True, exist_ok=True)
    return compile_program(base / f"lag{lag}.rlf", sets, PLACES[place], folder)


@pytest.fixture(scope="module")
def whole(base: Path) -> Path:
    """A run that nothing interrupts, on four ranks."""
    assert set(run(plan(base, "apart"), base / "whole")) == {""}
    assert steps(base / "whole") == [f"step-{i:06}" for i in range(1, 6)]
    return base / "whole"


def assert_same_end(mine: Path, theirs: Path) -> None:
    found, expected = (held(x / "checkpoints/step-000005") for x in (mine, theirs))
    assert found.keys() == expected.keys() and all(found[key].equal(expected[key]) for key in found)


@pytest.fixture(scope="module")
def stopped(base: Path, whole: Path) -> Path:
    """A run that was asked to stop in its last step but one."""
    assert set(run(plan(base, "apart"), base / "stopped", stop_after=4)) == {""}
    assert [line["step"] for line in lines(base / "stopped")] == [1, 2, 3, 4]
    return base / "stopped"


@pytest.fixture(scope="module")
def alike(base: Path, whole: Path) -> Path:
    """A run with the responses of the whole one that was asked to stop in its second step."""
    assert set(run(plan(base, "apart"), base / "alike", stop_after=2, like=whole)) == {""}
    return base / "alike"


@pytest.mark.thorough
@pytest.mark.parametrize("after", [1, 2, 3, 4])
def test_it_goes_on_as_if_nothing_had_happened(after: int, base: Path, whole: Path, stopped: Path) -> None:
    """The last steps of a run generate nothing: a checkpoint holds fewer steps there."""
    stored = {key.split("|")[1] for key in held(whole / f"checkpoints/step-{after:06}") if key.startswith("later step|")}
    assert stored == {str(s) for s in range(after + 1, min(after + LAG, 5) + 1)}
    out = base / f"stopped{after}"
    copy_first_steps(stopped, out, after)
    assert set(run(plan(base, "apart"), out, resume=out)) == {""}
    assert lines(out) == lines(whole)
    assert_same_end(out, whole)


@pytest.mark.thorough
@pytest.mark.parametrize("other", ["one", "together"])
def test_under_another_placement(other: str, base: Path, whole: Path, alike: Path) -> None:
    out = base / f"moved-{other}"
    copy_first_steps(alike, out, 2)
    assert set(run(plan(base, other), out, resume=out, like=whole)) == {""}
    for mine, theirs in zip(lines(out), lines(whole), strict=True):
        assert mine == pytest.approx(theirs, rel=2e-4, abs=2e-5)


@pytest.mark.thorough
@pytest.mark.parametrize("after", [2, 4])
def test_what_runs_ahead_by_placement_alone_is_computed_again(after: int, base: Path) -> None:
    """A frozen reference on ranks of its own works a step ahead of those that train, with parameters that the host
    holds between calls; under another placement it does not. No checkpoint holds what it makes."""
    text = (HERE / "grpo_small.rlf").read_text().replace("seed=7)", f"seed=7, lag={LAG})").replace(
        "  metric kl ", "  checkpoint every 1 keep=9\n  metric kl ")
    (base / "frozen.rlf").write_text(text)
    places = {"apart": placement(3, actor_generate="on mesh(0:1)", actor_train="on mesh(2:3)",
                                 ref_logprobs="on mesh(1:2) offload=true"),
              "one": PLACES["one"]}
    plans = dict[str, bytes]()
    for name, place in places.items():
        folder = base / f"frozen-{name}{after}"
        folder.mkdir()
        plans[name] = compile_program(base / "frozen.rlf", {"batch": 4}, place, folder)
    whole, out, moved = (base / f"frozen-{name}{after}" for name in ("whole", "stopped", "moved"))
    for folder in (whole, out, moved):
        codes = run(plans["apart"], folder, stop_after=0 if folder == whole else after,
                    like=whole if folder == moved else None)
        assert set(codes) == {""}
    stored = {key.split("|")[2] for key in held(whole / f"checkpoints/step-{after:06}") if key.startswith("later step|")}
    assert not {v for v in stored if "ref" in v}, stored
    assert set(run(plans["apart"], out, resume=out)) == {""}
    assert lines(out) == lines(whole)
    assert_same_end(out, whole)
    assert set(run(plans["one"], moved, resume=moved, like=whole)) == {""}
    for mine, theirs in zip(lines(moved), lines(whole), strict=True):
        assert mine == pytest.approx(theirs, rel=2e-4, abs=2e-5)


@pytest.mark.parametrize("lag", [0, 1])
def test_another_lag_is_refused(lag: int, base: Path, whole: Path) -> None:
    """Its rows would be skipped, or those of other steps."""
    out = base / f"other{lag}"
    codes = run(plan(base, "one", lag), out, resume=whole / "checkpoints/step-000003")
    assert set(codes) == {"RL0762"}


@pytest.mark.parametrize("after", thorough_between([5, 4, 3]))
def test_more_steps_need_an_older_checkpoint(after: int, base: Path, whole: Path) -> None:
    """The last steps of a run generate nothing for the steps that follow."""
    (base / "longer.rlf").write_text((base / f"lag{LAG}.rlf").read_text().replace("steps=5", "steps=7"))
    folder = base / "plans" / f"longer{after}"
    folder.mkdir(parents=True)
    made = compile_program(base / "longer.rlf", {}, PLACES["one"], folder)
    codes = run(made, base / f"longer{after}", resume=whole / f"checkpoints/step-{after:06}")
    assert set(codes) == {"RL0762" if after > 3 else ""}


@dataclass(frozen=True)
class Held:
    """A checkpoint, as far as `in_flight.check` reads it."""

    path: Path
    steps_ahead: set[int]
    others: list[tuple[Path, int, set[int]]]

    def has_rows_of(self, key: str) -> bool:
        return True

    def earlier(self) -> list[tuple[Path, int, set[int]]]:
        return self.others


@pytest.mark.parametrize(("others", "part"), [
    ([(Path("c/step-4"), 4, {5}), (Path("c/step-3"), 3, {4, 5}), (Path("c/step-2"), 2, {3, 4})],
     "resume from c/step-3, which fits, or start"),
    ([(Path("c/step-4"), 4, {5})], "the `lag` and `steps` of the run that wrote it, or start"),
    ([], "the `lag` and `steps` of the run that wrote it, or start")])
def test_the_message_names_the_checkpoint_that_fits(others: list[tuple[Path, int, set[int]]], part: str) -> None:
    header, drawn = SimpleNamespace(lag=2, steps=7), Draw(
        id=1, mesh="m0", data="rows", frame="row", program="p", inputs=(), columns=(), ahead=2,
        writes=("row.row_numbers@s0",))
    plan = SimpleNamespace(header=header, body=(Loop("steps", 7, (drawn,), first=-1),))
    context = SimpleNamespace(plan=plan, changing_models=frozenset())
    with pytest.raises(Failure) as refused:
        in_flight.check(Held(Path("c/step-5"), set(), others), [6, 7], context)  # type: ignore[arg-type]
    assert part in refused.value.diagnostics[0].help


def test_older_checkpoints_of_a_run(whole: Path) -> None:
    last = LoadedCheckpoint(whole / "checkpoints/step-000005", 5, {}, {}, {}, {}, {})
    assert [(p.name, s, ahead) for p, s, ahead in last.earlier()] == [
        (f"step-{s:06}", s, set(range(s + 1, min(s + LAG, 5) + 1))) for s in (4, 3, 2, 1)]


def test_a_directory_that_does_not_exist(whole: Path) -> None:
    found, = none_there(whole / "checkpoints/step-000009").diagnostics
    assert found.code == "RL0760" and "no such directory" in found.title
    assert "step-000001, step-000002" in found.notes[0] and "step-000009" in found.place
    there, = none_there(whole / "samples").diagnostics
    assert not there.notes


def test_damage_is_refused(base: Path, whole: Path, tmp_path: Path) -> None:
    """A checkpoint that somebody signed again, in which a row occurs twice."""
    folder = tmp_path / "checkpoints" / "step-000003"
    folder.mkdir(parents=True)
    source = whole / "checkpoints" / "step-000003"
    manifest = json.loads((source / MANIFEST).read_text())
    changed = 0
    for file in source.glob("*.safetensors"):
        tensors = load_file(file)
        for key, tensor in tensors.items():
            if key.startswith("later step|4|gen.tokens|ids") and tensor.numel() > 1:
                tensor[1] = tensor[0]
                changed += 1
        save_file(tensors, folder / file.name)
        made = folder / file.name
        manifest["files"][file.name] = {"bytes": made.stat().st_size, "sha256": digest(made)}
    manifest.pop(DIGEST)
    (folder / MANIFEST).write_text(manifest_text(manifest))
    assert changed
    codes = run(plan(base, "one"), base / "damaged", resume=folder)
    assert set(codes) == {"RL0761"}
