"""Real worlds in which a rank is stopped, killed, raises or does not come back: all end in time, and say where they
were."""

from __future__ import annotations

import json
import shutil
import signal
import time
from pathlib import Path

import pytest
from click.testing import CliRunner

from rldsl.cli import main
from rldsl.postmortem.dumps import RankDump, read_dump, read_last_heartbeats
from tests.end_to_end.programs import compile_program
from tests.postmortem.runs import TIMEOUT, World, world
from tests.tiny import make_model, make_sums, write_jsonl

HERE = Path(__file__).parent
IN_TIME = TIMEOUT + 20  # of which the watcher takes some, and this machine is busy
REWARD = "(compute reward, p.rlf:19:3) of step 2"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("postmortem")
    write_jsonl(folder / "sums.jsonl", make_sums(16))
    make_model(folder / "model", num_hidden_layers=2)
    for name in ("p.rlf", "judge.py"):
        shutil.copy(HERE / name, folder)
    return folder


@pytest.fixture
def place(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    shutil.copytree(source, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def plan(place: Path) -> bytes:
    return compile_program(Path("p.rlf"), {"base": "model", "rows": "sums.jsonl"}, None, place)


def dumps(place: Path) -> dict[int, RankDump]:
    found = (read_dump(p.read_text(), p.name) for p in (place / "out/postmortem").glob("rank-*.json"))
    return {d.rank: d for d in found}


def told(place: Path, *options: str) -> str:
    done = CliRunner().invoke(main, ["postmortem", "out", *options])
    assert done.exit_code == 0, done.output
    return done.output


def failed(run: World, *words: str) -> str:
    """Its one message."""
    text = run.said()
    assert text.count("error[") == 1 and "Traceback" not in text, text
    assert all(word in text for word in words), text
    return text


@pytest.mark.thorough
def test_a_rank_that_is_stopped(place: Path) -> None:
    Path("asked").write_text("1 hold")
    with world(plan(place), 4, place) as run:
        run.until(Path("here").exists)
        run.send(1, signal.SIGSTOP)
        run.ended([0, 2, 3], IN_TIME)
        failed(run, "RL0709", "rank 1 is suspended", "SIGSTOP", "rank 0 waits for rank 1 in event", "rlc postmortem out")
        assert run.ranks[1].is_alive()  # as torchrun finds it, and kills it
        left = dumps(place)
        assert set(left) == {0, 2, 3} and len({d.start for d in left.values()}) == 1
        signs = dict(read_last_heartbeats(Path("out/postmortem/signs.json").read_text(), "signs").signs)
        assert signs[1].process == "stopped" and signs[1].silent > 2 and not signs[0].silent
    text = told(place)
    assert "rank 1 is suspended" in text and "rank 1 was last seen" in text and "its process is suspended" in text
    found = json.loads(told(place, "--json"))
    assert found["culprits"] == [{"rank": 1, "why": "stopped"}]
    assert [r["dump"] for r in found["ranks"]] == [True, False, True, True]
    waits = {tuple(w["ranks"]): w for w in found["waits"]}
    assert waits[0,]["on"] == [1] and waits[2, 3]["on"] == [0, 1] and waits[2, 3]["at"]["call"] == "transfer ref_lp"
    assert waits[2, 3]["at"]["at"] == "p.rlf:21:3" and "actor.train reads ref_lp" in waits[2, 3]["at"]["because"]


def test_a_rank_that_is_killed(place: Path) -> None:
    Path("asked").write_text("1 hold")
    with world(plan(place), 4, place, timeout=600) as run:
        run.until(Path("here").exists)
        run.send(1, signal.SIGKILL)
        run.ended([0, 2, 3], 20)
        failed(run, "RL0709", "rank 1 exited without an error message", "possibly because memory ran out", "all ranks stopped")
    assert set(dumps(place)) == {0, 2, 3}
    assert "its process is gone" in told(place)


@pytest.mark.thorough
def test_a_rank_that_is_slow_to_start(place: Path) -> None:
    judge = Path("judge.py").read_text()
    slow = "import os\nimport time\nif os.environ.get('RANK') == '1':\n    time.sleep(600)\n"
    Path("judge.py").write_text(slow + judge.replace("from __future__ import annotations\n", ""))
    with world(plan(place), 4, place) as run:
        run.ended([0, 1, 2, 3], 60 + IN_TIME)
        failed(run, "RL0709", "rank 1 blocks other ranks", "ranks 0,2-3 wait for rank 1 before the first event",
               "it is at the start, before the first event, loading the Python functions for")


@pytest.mark.thorough
def test_a_rank_that_raises_and_the_next_start(place: Path) -> None:
    Path("asked").write_text("1 raise")
    data = plan(place)
    with world(data, 4, place, timeout=600) as run:
        run.ended([0, 1, 2, 3], 60)
        failed(run, "RL0775", "no answer", "all ranks stopped: rank 1 failed at event", REWARD[:-10])
    left = dumps(place)
    assert set(left) == {0, 1, 2, 3}
    assert [(d.rank, d.code) for d in left.values() if d.first] == [(1, "RL0775")]
    last = left[1].ring[-1]
    assert (last.phase, last.function, last.at) == ("calls", "judge", left[1].position.at)
    text = told(place)
    assert "rank 1 failed: `judge` raised" in text and REWARD in text and "in the Python function `judge`" in text
    Path("asked").write_text("0 nothing")
    with world(data, 4, place, timeout=600) as run:
        Path("go").touch()
        for rank in run.ranks:
            rank.join(60)
        assert [rank.exitcode for rank in run.ranks] == [0] * 4, run.said()
    assert not Path("out/postmortem").exists()
    gone = CliRunner().invoke(main, ["postmortem", "out"])
    assert gone.exit_code == 1 and "RL0795" in gone.output


@pytest.mark.thorough
def test_a_python_function_that_does_not_return(place: Path) -> None:
    Path("asked").write_text("1 hold")
    with world(plan(place), 4, place) as run:
        run.ended([0, 1, 2, 3], 60 + IN_TIME)
        failed(run, "rank 1 blocks other ranks", f"it is in event 12 {REWARD}, in the Python function `judge` for")
    assert set(dumps(place)) == {0, 1, 2, 3}
    assert "judge.py:" in told(place)


@pytest.mark.thorough
def test_the_watcher_is_in_time_where_the_library_is_not(place: Path) -> None:
    """As with NCCL, which ends a process instead of telling it."""
    Path("asked").write_text("1 hold")
    with world(plan(place), 4, place, library=600.0) as run:
        run.ended([0, 1, 2, 3], 60 + IN_TIME)
        failed(run, "rank 1 blocks other ranks")


@pytest.mark.thorough
def test_a_call_that_holds_the_lock_of_python(place: Path) -> None:
    """The rank cannot speak, but its process is there, and the others wait for it."""
    Path("asked").write_text("1 grip")
    with world(plan(place), 4, place) as run:
        run.ended([0, 2, 3], 60 + IN_TIME)
        failed(run, "rank 1 has no heartbeat", "its process is running", "a long call that holds Python's global interpreter lock")
    assert set(dumps(place)) == {0, 2, 3}


@pytest.mark.thorough
def test_a_run_that_is_asked_to_stop_blames_nobody(place: Path) -> None:
    Path("asked").write_text("1 hold")
    with world(plan(place), 4, place, timeout=600) as run:
        run.until(Path("here").exists)
        time.sleep(2)  # until the others wait for rank 1: a rank that is asked to stop begins nothing more
        for rank in range(4):
            run.send(rank, signal.SIGTERM)
        run.ended([0, 1, 2, 3], IN_TIME, status=143)
        text = run.said()
    assert text.count("terminated in step 2 of") == 1 and "error[" not in text and "blocks" not in text, text
    assert set(dumps(place)) == {0, 1, 2, 3}
    assert "rank 1 blocks other ranks" in told(place)  # who wants to know finds it here


@pytest.mark.thorough
def test_a_store_that_is_gone(place: Path) -> None:
    """With the process that held it, which may be a rank."""
    Path("asked").write_text("1 hold")
    with world(plan(place), 4, place) as run:
        run.until(Path("here").exists)
        run.send(-1, signal.SIGKILL)
        run.ended([0, 2, 3], 60 + IN_TIME)
        assert "another rank exited without an error message" in run.said() and "Traceback" not in run.said()
    assert set(dumps(place)) >= {0, 2, 3}


@pytest.mark.thorough
def test_a_store_that_does_not_answer(place: Path) -> None:
    """Every rank must end, though it can neither ask the others nor tell them."""
    Path("asked").write_text("1 hold")
    with world(plan(place), 4, place, last=8.0) as run:
        run.until(Path("here").exists)
        run.send(-1, signal.SIGSTOP)
        run.ended([0, 2, 3], 60 + IN_TIME)
        assert "the rendezvous store, or its disk, does not respond" in run.said()
