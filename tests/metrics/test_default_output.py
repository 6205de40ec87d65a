"""`rlc run` without `--out`: a directory of its own for each run, and the newest one to resume."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from rldsl.commands import run as running
from rldsl.runtime.metrics.default_output import free_output, newest_output
from rldsl.runtime.metrics.run_lock import LOCK
from tests.metrics.program import plan
from tests.metrics.test_commands import checkpoint, made, refused, rlc

Launched = list[tuple[str, list[str]]]


@pytest.fixture
def launched(place: Path, monkeypatch: pytest.MonkeyPatch) -> Launched:
    """Directory and options of each start, instead of starting ranks."""
    (place / "p.plan").write_bytes(plan(place))
    found: Launched = []

    def launch(path: str, world: int, out: str, options: Sequence[str], quiet: bool, messages: Path) -> int:
        assert options[0] == "--command" and options[1].startswith("rlc ")
        found.append((out, [*options[2:]]))
        return 0

    monkeypatch.setattr(running, "launch", launch)
    monkeypatch.setattr("sys.argv", ["rlc", "run", "p.plan"])  # a worker of xdist may have no arguments
    return found


def test_each_run_has_a_directory(place: Path, launched: Launched) -> None:
    for name in ("p", "p-2", "p-3"):
        status, text = rlc("run", "p.plan")
        assert (status, launched.pop()) == (0, (f"runs/{name}", [])) and f"output directory: runs/{name}\n" in text
        made(place / "runs" / name)


@pytest.mark.parametrize("state", ["running", "finished", "failed", "stopped"])
def test_a_run_is_kept_whatever_came_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, state: str) -> None:
    monkeypatch.chdir(tmp_path)
    made(Path("runs/p"), state)
    assert free_output("a/p.rlf") == Path("runs/p-2")


def test_what_takes_a_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Checkpoints without a record, a start that has just begun, a file; not the log of a start that was refused."""
    monkeypatch.chdir(tmp_path)
    checkpoint(Path("runs/p"), 3)
    Path("runs/p-2").mkdir()
    (Path("runs/p-2") / LOCK).write_text("{}")
    Path("runs/p-3").write_text("mine")
    Path("runs/p-4").symlink_to("nowhere")
    Path("runs/p-5/log").mkdir(parents=True)
    assert free_output("p.rlf") == Path("runs/p-5") and newest_output("p.rlf") is None


def test_the_newest_is_resumed(place: Path, launched: Launched) -> None:
    checkpoint(made(Path("runs/p"), started="2026-01-01T00:00:00+00:00", resumed=["2026-01-04T00:00:00+00:00"]), 2)
    made(Path("runs/p-2"), started="2026-01-03T00:00:00+00:00")
    made(Path("runs/p-x"), started="2026-01-09T00:00:00+00:00")
    made(Path("runs/p-7"), program="other/p-7.rlf", started="2026-01-09T00:00:00+00:00")
    _, text = rlc("run", "p.plan", "--resume")
    assert launched.pop() == ("runs/p", ["--resume=runs/p"]) and "newest run of p.plan: runs/p\n" in text
    checkpoint(made(Path("runs/p-10"), started="2026-01-04T00:00:00+00:00"), 2)
    rlc("run", "p.plan", "--resume")
    assert launched.pop() == ("runs/p-10", ["--resume=runs/p-10"])
    _, text = rlc("run", "p.plan", "--overwrite")
    assert launched.pop() == ("runs/p-10", ["--overwrite"]) and "newest run of p.plan: runs/p-10\n" in text


def test_a_run_that_is_named_resumes_in_its_own_directory(place: Path, launched: Launched) -> None:
    for name in ("p", "p-2", "other"):
        checkpoint(made(Path("runs") / name), 2)
    for resume in ("runs/p", "runs/p/checkpoints/step-000002"):
        rlc("run", "p.plan", "--resume", resume)
        assert launched.pop() == ("runs/p", [f"--resume={resume}"])
    rlc("run", "p.plan", "--resume", "runs/other")
    assert launched.pop() == ("runs/p-3", ["--resume=runs/other"])


def test_out_is_taken_as_it_is(place: Path, launched: Launched) -> None:
    made(Path("runs/p"))
    refused("RL0781", "run", "p.plan", "--out", "runs/p")
    status, text = rlc("run", "p.plan", "--out", "mine")
    assert status == 0 and launched.pop()[0] == "mine" and "output directory" not in text


def test_nothing_to_resume(place: Path, launched: Launched) -> None:
    """It is said before a rank starts, and nothing is made."""
    text = refused("RL0760", "run", "p.plan", "--resume")
    assert "there is no such directory" in text and "--> runs/p\n" in text and not Path("runs").exists()
    made(Path("runs/p"), "failed")
    (Path("runs/p") / "checkpoints/.step-000002.partial").mkdir(parents=True)  # unfinished
    (Path("runs/p") / "checkpoints/step-000001").mkdir()  # without its manifest, which is written last
    for resume in ((), ("runs/p",)):
        text = refused("RL0760", "run", "p.plan", "--resume", *resume)
        assert "no checkpoint to resume from" in text and "without `--resume`" in text
    assert launched == []


def test_a_checkpoint_that_is_not_there_is_answered_with_those_that_are(place: Path, launched: Launched) -> None:
    checkpoint(made(Path("runs/other")), 2)
    text = refused("RL0760", "run", "p.plan", "--resume", "runs/other/checkpoints/step-000009", "--out", "mine")
    assert "checkpoints of this run: step-000002" in text and launched == [] and not Path("mine").exists()


def test_what_keeps_a_run_from_its_directory_is_said_first(place: Path, launched: Launched) -> None:
    made(Path("runs/p"))
    refused("RL0781", "run", "p.plan", "--out", "runs/p", "--resume", "runs/nothing")
    assert launched == []


def test_a_contradiction_is_still_one(place: Path, launched: Launched) -> None:
    made(Path("runs/p"))
    status, _ = rlc("run", "p.plan", "--resume", "--overwrite")
    assert status == 2 and launched == []
