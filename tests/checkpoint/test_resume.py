"""A run that was interrupted and resumed is the run that was not: every loss, sampled token and weight."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from rldsl.runtime.checkpoint_files import checkpoints
from rldsl.runtime.persist.checkpoint_writer import checkpoint_directory
from rldsl.runtime.persist.manifest import DIGEST, manifest_text, read_manifest
from tests.checkpoint.runs import held, lines, run, steps
from tests.end_to_end.programs import compile_program
from tests.tiny import make_all, make_model

HERE = Path(__file__).parent
ALL = ("actor", "slow", "critic")


def rules(gpus: int, **where: str) -> str:
    return f"cluster nodes=1 gpus={gpus}\n" + "".join(f"place {m}.* on {w}\n" for m, w in where.items())


ONE = rules(1, **{m: "mesh(0:1)" for m in ALL})
TWO = rules(2, actor="mesh(0:2) tp=2", slow="mesh(0:2) dp=2", critic="mesh(1:2)") + (
    "place actor.generate on mesh(0:2) dp=2\n")
FOUR = rules(4, actor="mesh(0:4) dp=2 pp=2", slow="mesh(2:4) tp=2", critic="mesh(0:2) dp=2")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_all(tmp_path_factory.mktemp("tiny"), tie_word_embeddings=True, num_hidden_layers=3)


def plan(tiny: Path, folder: Path, place: str, **sets: object) -> bytes:
    folder.mkdir(parents=True, exist_ok=True)
    given = {"base": str(tiny / "models/sft"), "rows": str(tiny / "data/prompts.jsonl")} | sets
    return compile_program(HERE / "small.rlf", given, place, folder)


@pytest.fixture(scope="module")
def whole(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An undisturbed run on two ranks."""
    out = tmp_path_factory.mktemp("whole")
    assert set(run(plan(tiny, out / "plan", TWO), out)) == {""}
    return out


@pytest.fixture(scope="module")
def three_steps(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same, which one rank was asked to stop in its third step."""
    out = tmp_path_factory.mktemp("stopped")
    assert set(run(plan(tiny, out / "plan", TWO), out, stop_after=3)) == {""}
    return out


@pytest.fixture
def stopped(three_steps: Path, tmp_path: Path) -> Path:
    """A copy of it for each test."""
    return Path(shutil.copytree(three_steps, tmp_path, dirs_exist_ok=True))


@pytest.mark.thorough
def test_the_last_ones_are_kept(whole: Path) -> None:
    assert steps(whole) == ["step-000004", "step-000005", "step-000006"]


def test_a_run_that_is_asked_to_stop_ends_on_all_ranks_after_the_same_step(stopped: Path) -> None:
    assert [line["step"] for line in lines(stopped)] == [1, 2, 3]
    assert steps(stopped) == ["step-000001", "step-000002", "step-000003"]
    assert json.loads((stopped / "summary.json").read_text())["steps"] == 3


def test_it_goes_on_exactly(tiny: Path, stopped: Path, whole: Path) -> None:
    assert set(run(plan(tiny, stopped / "plan", TWO), stopped, resume=stopped)) == {""}
    assert lines(stopped) == lines(whole)
    mine, theirs = held(stopped / "checkpoints/step-000006"), held(whole / "checkpoints/step-000006")
    assert mine.keys() == theirs.keys() and all(torch.equal(mine[k], theirs[k]) for k in theirs)
    said = [json.loads((o / "checkpoints/step-000006/checkpoint.json").read_text()) for o in (stopped, whole)]
    assert all(said[0][what] == said[1][what] for what in ("step", "files", "states", "data", "models"))


@pytest.mark.thorough
@pytest.mark.parametrize("place", [ONE, FOUR], ids=["one", "four"])
def test_it_goes_on_under_another_placement(tiny: Path, stopped: Path, whole: Path, place: str) -> None:
    assert set(run(plan(tiny, stopped / "plan", place), stopped, resume=stopped, like=whole)) == {""}
    for mine, theirs in zip(lines(stopped), lines(whole), strict=True):
        assert mine == {k: pytest.approx(v, rel=1e-4, abs=1e-5) for k, v in theirs.items()}


def test_a_stop_between_checkpoints_makes_one(tiny: Path, tmp_path: Path) -> None:
    made = plan(tiny, tmp_path / "plan", TWO, every_k=4)
    assert set(run(made, tmp_path, stop_after=2)) == {""}
    assert steps(tmp_path) == ["step-000002"]


@pytest.mark.thorough
def test_lines_after_the_checkpoint_are_not_doubled(tiny: Path, tmp_path: Path, whole: Path) -> None:
    """A crash in step 6 after a checkpoint at step 4: steps 5 and 6 are made, and logged, again."""
    made = plan(tiny, tmp_path / "plan", TWO, every_k=4)
    assert set(run(made, tmp_path)) == {""}
    assert steps(tmp_path) == ["step-000004"] and len(lines(tmp_path)) == 6
    assert set(run(made, tmp_path, again=True)) == {""}
    assert lines(tmp_path) == lines(whole)


# ------------------------------------------------------------------------------------------------ what goes wrong


def damage(checkpoint: Path) -> None:
    file = next(checkpoint.glob("*.safetensors"))
    data = bytearray(file.read_bytes())
    data[-100] ^= 1
    file.write_bytes(bytes(data))


def test_of_a_damaged_checkpoint_the_one_before_is_taken(tiny: Path, stopped: Path, whole: Path) -> None:
    damage(stopped / "checkpoints/step-000003")
    assert set(run(plan(tiny, stopped / "plan", TWO), stopped, resume=stopped)) == {""}
    assert lines(stopped) == lines(whole)


def test_one_that_was_not_finished_does_not_count(tiny: Path, stopped: Path, whole: Path) -> None:
    last = stopped / "checkpoints/step-000003"
    shutil.copytree(last, stopped / "checkpoints/.step-000005.0123.partial")
    (last / "checkpoint.json").unlink()
    assert set(run(plan(tiny, stopped / "plan", TWO), stopped, resume=stopped)) == {""}
    assert lines(stopped) == lines(whole)


@pytest.mark.parametrize("how", ["bytes", "missing", "manifest", "format"])
def test_all_are_damaged(tiny: Path, stopped: Path, how: str) -> None:
    for checkpoint in (stopped / "checkpoints").iterdir():
        if how == "bytes":
            damage(checkpoint)
        elif how == "missing":
            next(checkpoint.glob("*.safetensors")).unlink()
        elif how == "manifest":
            (checkpoint / "checkpoint.json").write_text('{"format": 1, "step":')
        else:
            file = checkpoint / "checkpoint.json"
            file.write_text(manifest_text({k: v for k, v in json.loads(file.read_text()).items() if k != DIGEST}
                                          | {"format": 99}))
    codes = set(run(plan(tiny, stopped / "plan", TWO), stopped, resume=stopped))
    assert "RL0761" in codes and codes <= {"RL0761", "another rank"}


def test_a_rank_opens_what_it_reads(tiny: Path, stopped: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is in the files of other ranks is told, so that going on does not open ranks times files."""
    from rldsl.runtime.persist import checkpoint_reader as module

    opened: list[str] = []
    real = module.safe_open
    monkeypatch.setattr(module, "safe_open", lambda file, **given: (opened.append(Path(file).name), real(file, **given))[1])
    monkeypatch.setattr(module.dist, "get_rank", lambda: 0)
    monkeypatch.setattr(module.dist, "get_world_size", lambda: 2)
    last = max((stopped / "checkpoints").iterdir())
    problem, keys = module._share(last, read_manifest((last / "checkpoint.json").read_bytes()))
    every = sorted(file.name for file in last.glob("*.safetensors"))
    assert problem == "" and opened == every[::2] and {name for name, _ in keys} == set(every[::2])


def test_there_is_none(tiny: Path, tmp_path: Path) -> None:
    assert set(run(plan(tiny, tmp_path / "plan", TWO), tmp_path / "out", resume=tmp_path / "out")) == {"RL0760"}


def test_another_run_is_not_overwritten(tiny: Path, stopped: Path) -> None:
    before = lines(stopped)
    assert set(run(plan(tiny, stopped / "plan", TWO), stopped)) == {"RL0781"}
    assert lines(stopped) == before


def test_a_model_of_another_shape(tiny: Path, stopped: Path) -> None:
    other = make_model(stopped / "other", hidden_size=128)
    made = plan(tiny, stopped / "plan", TWO, base=str(other))
    codes = set(run(made, stopped, resume=stopped))
    assert "RL0762" in codes and codes <= {"RL0762", "another rank"}


@pytest.mark.thorough
def test_a_checkpoint_that_cannot_be_written(tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "checkpoints").write_text("not a directory")
    codes = run(plan(tiny, tmp_path / "plan", TWO), tmp_path)
    assert "RL0706" in codes and set(codes) <= {"RL0706", "another rank"}


def test_a_trained_model_or_a_state_that_the_checkpoint_lacks(tiny: Path, stopped: Path) -> None:
    """It would begin anew in the middle of a run, without a word."""
    text = (HERE / "small.rlf").read_text()
    for old, new in (("critic", "judge"), ("beta", "weight")):
        program = stopped / f"{new}.rlf"
        program.write_text(text.replace(old, new) if old == "critic" else text.replace("state beta", "state weight")
                           .replace("metric beta", "metric weight").replace("2 * beta", "2 * weight")
                           .replace("= beta\n", "= weight\n").replace("beta = 0.9 * beta", "weight = 0.9 * weight"))
        sets = {"base": str(tiny / "models/sft"), "rows": str(tiny / "data/prompts.jsonl")}
        made = compile_program(program, sets, TWO.replace("critic", new) if old == "critic" else TWO, stopped)
        assert set(run(made, stopped, resume=stopped)) == {"RL0762"}


@pytest.mark.thorough
def test_going_on_from_an_older_one_leaves_the_later_ones_behind(tiny: Path, stopped: Path, whole: Path) -> None:
    made = plan(tiny, stopped / "plan", TWO)
    assert set(run(made, stopped, resume=stopped / "checkpoints/step-000001", stop_after=1)) == {""}
    assert steps(stopped) == ["step-000001", "step-000002"] and [x["step"] for x in lines(stopped)] == [1, 2]
    assert set(run(made, stopped, resume=stopped)) == {""}
    assert lines(stopped) == lines(whole)


def test_the_newest_is_that_of_the_last_step(tmp_path: Path) -> None:
    for step in (999_999, 1_000_000, 8):
        folder = checkpoint_directory(tmp_path, step)
        folder.mkdir(parents=True)
        (folder / "checkpoint.json").write_text("{}")
    (tmp_path / "checkpoints/step-other").mkdir()
    assert [p.name for p in checkpoints(tmp_path)] == ["step-000008", "step-999999", "step-1000000"]
