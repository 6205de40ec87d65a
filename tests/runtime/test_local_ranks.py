"""The launcher of `rlc run`: what ranks are told, whose exit status counts, and that none outlives it."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import rldsl
from rldsl.python.start import interpreter
from rldsl.runtime.local_ranks import held_port

RANK = """
import json, os, signal, sys, time
from pathlib import Path
rank = int(os.environ["RANK"])
def say(*words):  # in one piece
    os.write(1, (" ".join(map(str, words)) + "\\n").encode())
WHAT
"""
READY = "Path(f'ready{rank}').write_text(str(os.getpid()))\n"


def start(folder: Path, world: int, what: str) -> subprocess.Popen[str]:
    (folder / "one_rank.py").write_text(RANK.replace("WHAT", what))
    return subprocess.Popen(
        [sys.executable, "-m", "rldsl.runtime.launch", "--parent", str(os.getpid()), "--standalone", "--nproc-per-node",
         str(world), "-m", "one_rank", "a", "-m", "b"], cwd=folder, start_new_session=True, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True)


def until_ready(folder: Path, world: int) -> list[int]:
    """The processes of the ranks, once all have begun."""
    end = time.monotonic() + 60
    while True:
        found = [folder / f"ready{rank}" for rank in range(world)]
        if all(f.is_file() and f.read_text() for f in found):
            return [int(f.read_text()) for f in found]
        assert time.monotonic() < end
        time.sleep(0.02)


def test_nobody_else_gets_the_port_of_a_run_that_begins() -> None:
    with held_port() as port:
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(("127.0.0.1", port))
        others = []
        for _ in range(64):
            free = socket.socket()
            free.bind(("127.0.0.1", 0))
            others.append(free)
        assert port not in {free.getsockname()[1] for free in others}
        for free in others:
            free.close()
        with held_port() as another:
            assert another != port
        store = torch.distributed.TCPStore("127.0.0.1", port, 1, is_master=True)  # as rank 0 does
        store.set("rank", "0")
        assert store.get("rank") == b"0"


def gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def test_files_of_the_working_directory_take_no_librarys_place(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the command of `rlc run`, the plan that does not exist is all that is wrong."""
    for name in ("json", "torch", "rldsl"):
        (tmp_path / f"{name}.py").write_text("raise RuntimeError('stray')")
    line = ["-m", "rldsl.runtime.launch", "--parent", str(os.getpid()), "--standalone", "--nproc-per-node", "1", "-m",
            "rldsl.run", "no.plan", "--out", "out"]
    monkeypatch.chdir(tmp_path)
    said = subprocess.run([*interpreter(), *line], capture_output=True, text=True, timeout=100).stderr
    assert "no.plan" in said and "error[" in said and "stray" not in said and "Traceback" not in said, said


def test_the_working_directory_stays_where_the_package_is_in_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    assert interpreter() == [sys.executable, "-P"]
    monkeypatch.chdir(Path(rldsl.__file__).parents[1])
    assert interpreter() == [sys.executable]


def test_what_ranks_are_told(tmp_path: Path) -> None:
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    process = start(tmp_path, 2, f"say(json.dumps([[os.environ[n] for n in {names}], sys.argv[1:]]))")
    said = process.communicate(timeout=60)[0].splitlines()
    told = sorted(json.loads(line) for line in said)
    assert process.returncode == 0 and [x[1] for x in told] == [["a", "-m", "b"]] * 2
    assert [x[0][:5] for x in told] == [[str(r), str(r), "2", "2", "127.0.0.1"] for r in range(2)]
    assert told[0][0][5] == told[1][0][5] != "0"


@pytest.mark.parametrize("what, code", [("sys.exit(7)", 7), ("os.kill(os.getpid(), signal.SIGKILL)", 1)])
def test_the_first_failure_ends_the_others(tmp_path: Path, what: str, code: int) -> None:
    process = start(tmp_path, 2, f"""{READY}if rank:
    while not (Path("ready0").is_file() and Path("ready0").read_text()):  # a rank that is ended before it begins tells nothing
        time.sleep(0.01)
    {what}
time.sleep(600)""")
    ranks = until_ready(tmp_path, 2)
    said = process.communicate(timeout=60)[0]
    assert process.returncode == code and all(map(gone, ranks))
    assert ("rank 1 was killed (SIGKILL)" in said) == (code == 1)


def test_sigterm_goes_to_the_ranks(tmp_path: Path) -> None:
    """They end after the step; the launcher waits for them."""
    what = f"signal.signal(signal.SIGTERM, lambda *_: (say('stopped', rank), sys.exit(0)))\n{READY}time.sleep(600)"
    process = start(tmp_path, 2, what)
    until_ready(tmp_path, 2)
    process.terminate()
    assert sorted(process.communicate(timeout=60)[0].splitlines()) == ["stopped 0", "stopped 1"]
    assert process.returncode == 0


def test_ctrl_c_ends_all(tmp_path: Path) -> None:
    process = start(tmp_path, 2, f"{READY}time.sleep(600)")
    ranks = until_ready(tmp_path, 2)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    assert process.returncode == 130 and all(map(gone, ranks))


def test_no_torch_in_the_launcher() -> None:
    code = "import sys, rldsl.runtime.launch; print({'torch', 'numpy', 'transformers'} & set(sys.modules) or 'none')"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "none"
