"""One run owns a directory at a time, however many start at once, and a lock without an owner holds nobody up."""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
import subprocess
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from rldsl.diag import Diagnostic, Failure
from rldsl.runtime.metrics import run_lock
from rldsl.runtime.metrics.run_lock import LOCK, STALE, Owner, acquire, refuse_owned

STARTS = 20


def owner(**more: Any) -> Owner:
    return replace(Owner.this_process("other.rlf"), **more)


def locked(out: Path, whose: Owner | str, age: float = 0.0) -> Path:
    """A lock as another process would leave it."""
    out.mkdir(parents=True, exist_ok=True)
    file = out / LOCK
    file.write_text(whose if isinstance(whose, str) else json.dumps(asdict(whose)))
    then = time.time() - age
    os.utime(file, (then, then))
    return file


def gone() -> int:
    """The number of a process that has ended."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def clean(out: Path) -> bool:
    return not any(LOCK in name for name in os.listdir(out))


def test_it_is_held_and_released(tmp_path: Path) -> None:
    out = tmp_path / "deep/out"
    with acquire(out, "p.rlf") as lock:
        assert [path.name for path in out.iterdir()] == [LOCK]
        with pytest.raises(Failure) as caught:
            acquire(out)
        said = caught.value.diagnostics[0]
        assert said.code == "RL0780" and f"process {os.getpid()} on {lock.owner.host}" in said.title
        assert "(p.rlf)" in said.title
        with pytest.raises(Failure, match="RL0780"):
            refuse_owned(out)
        assert [path.name for path in out.iterdir()] == [LOCK]
    assert clean(out)
    refuse_owned(out)
    acquire(out).release()


# many starts

def _start(out: str, together: Any, over: Any, results: Any) -> None:
    """Whoever gets the directory holds it until all others have tried."""
    together.wait()
    try:
        with acquire(Path(out), "p.rlf"):
            over.wait()
        results.put("")
    except Failure as failure:
        results.put(f"{failure.diagnostics[0].code} {failure.diagnostics[0].title}")


@pytest.mark.parametrize("stale", [False, True])
def test_of_many_simultaneous_starts_one_owns_the_directory(tmp_path: Path, stale: bool) -> None:
    if stale:
        locked(tmp_path / "out", owner(pid=gone()))
    context = multiprocessing.get_context("forkserver")  # this process has threads, whose locks a fork would copy
    results = context.Queue()
    together, over = context.Barrier(STARTS), context.Event()
    processes = [context.Process(target=_start, args=(str(tmp_path / "out"), together, over, results))
                 for _ in range(STARTS)]
    for process in processes:
        process.start()
    found = [results.get(timeout=120) for _ in processes[1:]]
    over.set()
    found.append(results.get(timeout=60))
    for process in processes:
        process.join()
    assert found.count("") == 1
    refused = [text for text in found if text]
    assert all(text.startswith("RL0780 another run owns this directory: process ") for text in refused)
    assert len(set(refused)) == 1, "all name the same owner"
    assert clean(tmp_path / "out")


# whose it is

@pytest.mark.parametrize("whose", [
    lambda: owner(pid=gone()),
    lambda: owner(born="1"),  # the number belongs to another process now
])
def test_a_lock_of_a_process_that_is_gone_is_taken_at_once(tmp_path: Path, whose: Any) -> None:
    locked(tmp_path, whose())
    refuse_owned(tmp_path)
    acquire(tmp_path).release()
    assert clean(tmp_path)


def test_a_process_that_only_waits_for_its_parent_is_gone(tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", ""])
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    locked(tmp_path, owner(pid=process.pid, born=run_lock.born(process.pid)))
    acquire(tmp_path).release()
    process.wait()


@pytest.mark.parametrize("found", [lambda: owner(pid=gone()), lambda: owner(host="another"), lambda: "damaged"])
def test_a_lock_that_replaces_a_stale_one_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, found: Any) -> None:
    """Another start is quicker, between finding that the lock is stale and removing it."""
    file = locked(tmp_path, found(), age=2 * STALE)
    winner: list[run_lock.RunLock] = []
    remove = run_lock._remove_stale

    def late(file: Path, stale: str) -> None:
        if not winner:
            remove(file, stale)
            winner.append(acquire(tmp_path, "winner.rlf"))
        remove(file, stale)

    monkeypatch.setattr(run_lock, "_remove_stale", late)
    with pytest.raises(Failure, match="winner"):
        acquire(tmp_path, "late.rlf")
    assert winner[0].beat() and json.loads(file.read_text())["program"] == "winner.rlf"
    winner[0].release()
    assert clean(tmp_path)


ELSEWHERE = [{"host": "another"}, {"boot": "another"}, {"namespace": "pid:[1]"}]


@pytest.mark.parametrize("where", ELSEWHERE)
def test_elsewhere_an_old_heartbeat_counts(tmp_path: Path, where: dict[str, str]) -> None:
    """The process number says nothing: there may be one here that has it."""
    locked(tmp_path, owner(**where), age=STALE + 5)
    acquire(tmp_path).release()
    locked(tmp_path, owner(pid=gone(), **where))
    refuse_owned(tmp_path)


def test_elsewhere_a_heartbeat_that_moves_is_a_live_owner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = locked(tmp_path, owner(host="another", pid=gone()), age=50)
    looks: list[float] = []

    def look(seconds: float) -> None:
        looks.append(seconds)
        if len(looks) == 3:
            os.utime(file)

    monkeypatch.setattr(run_lock.time, "sleep", look)
    with pytest.raises(Failure, match=r"RL0780 .* on another"):
        acquire(tmp_path)
    assert len(looks) == 3 and file.exists()


def test_elsewhere_a_heartbeat_that_stands_still_is_a_dead_owner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch
                                                                 ) -> None:
    """Whatever the clocks of the hosts say: it may even lie in the future."""
    locked(tmp_path, owner(host="another"), age=-3600)
    now = [0.0]
    monkeypatch.setattr(run_lock.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(run_lock.time, "sleep", lambda seconds: now.__setitem__(0, now[0] + seconds))
    acquire(tmp_path).release()
    assert now[0] >= STALE


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"pid": 1}', "\x00", json.dumps(asdict(owner(pid=[])))])
def test_a_damaged_lock_counts_by_its_age(tmp_path: Path, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    locked(tmp_path, text, age=STALE + 5)
    acquire(tmp_path).release()
    assert clean(tmp_path)
    file = locked(tmp_path, text)
    monkeypatch.setattr(run_lock.time, "sleep", lambda _: os.utime(file))
    with pytest.raises(Failure, match="RL0780 .*unknown process"):
        acquire(tmp_path)


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "precious").write_text("kept")
    (tmp_path / "out" / LOCK).symlink_to(tmp_path / "precious")
    then = time.time() - STALE - 5
    os.utime(tmp_path / "out" / LOCK, (then, then), follow_symlinks=False)
    acquire(tmp_path / "out").release()
    assert (tmp_path / "precious").read_text() == "kept" and clean(tmp_path / "out")


def test_a_start_that_died_between_two_steps_holds_nobody_up(tmp_path: Path) -> None:
    stale = owner(pid=gone())
    locked(tmp_path, stale)
    guard = tmp_path / f".{LOCK}.stale-{stale.token}"
    guard.write_text("")
    os.utime(guard, (1, 1))
    acquire(tmp_path).release()
    assert clean(tmp_path)


# file systems

def test_without_hard_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def link(*_: object, **__: object) -> None:
        raise OSError(errno.ENOTSUP, "no links here")

    monkeypatch.setattr(run_lock.os, "link", link)
    with acquire(tmp_path), pytest.raises(Failure, match="RL0780"):
        acquire(tmp_path)
    assert clean(tmp_path)


def test_a_request_that_a_network_file_system_repeats(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.link

    def link(*given: Any, **more: Any) -> None:
        real(*given, **more)
        raise FileExistsError(errno.EEXIST, "so it says the second time")

    monkeypatch.setattr(run_lock.os, "link", link)
    acquire(tmp_path).release()


@pytest.mark.parametrize("place", ["file", "file/out"])
def test_where_no_directory_can_be(tmp_path: Path, place: str) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(Failure, match="RL0708"):
        acquire(tmp_path / place)


# heartbeats

def test_a_heartbeat_sets_the_time(tmp_path: Path) -> None:
    with acquire(tmp_path) as lock:
        os.utime(lock.file, (1, 1))
        assert lock.beat() and lock.file.stat().st_mtime > 1e9


@pytest.mark.parametrize("how", ["taken", "removed"])
def test_an_owner_learns_that_it_lost_the_directory(tmp_path: Path, how: str) -> None:
    said: list[Diagnostic] = []
    lock = acquire(tmp_path, "p.rlf", said.append)
    if how == "removed":
        lock.file.unlink()
    else:
        locked(tmp_path, owner())
    assert not lock.beat()
    assert said[0].code == "RL0780" and how in said[0].title
    lock.release()
    assert lock.file.exists() == (how == "taken"), "the lock of another run is not removed"
