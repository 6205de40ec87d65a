"""Ctrl-C reaches the launcher of a run once, whether a terminal sends it to all processes or somebody to `rlc run`
alone, and ends processes that have only begun without a word."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from rldsl.python import start
from rldsl.signals import ctrl_c_held, interrupting_signal
from tests.runtime.test_interrupt import PROGRAM
from tests.runtime.test_local_ranks import READY, gone, until_ready
from tests.runtime.test_local_ranks import start as started_ranks
from tests.tiny import make_model, make_sums, write_jsonl

# what stands in the place of the launcher: counts what it gets, and ends half a second after the first signal or, with
# a patience, when the second comes
LAUNCHER = """
import os, signal, sys, time
from pathlib import Path
got = []
def note(number, _):
    got.append(signal.Signals(number).name)
signal.signal(signal.SIGINT, note)
HANDLES
Path("session").write_text(str(os.getsid(0) == os.getpid()))
Path("up").write_text(str(os.getpid()))
while len(got) < NEEDS:
    time.sleep(0.01)
time.sleep(0.5)
Path("got").write_text(" ".join(got))
"""
CALLER = """
import sys
from rldsl.progress import Interrupted
from rldsl.python import start
start.interpreter = lambda: [sys.executable, "launcher.py"]
try:
    start.launch("x.plan", 1, "out", [])
except Interrupted as stop:
    print(stop)
    sys.exit(130)
"""


def caller(folder: Path, handles: str = "signal.signal(signal.SIGTERM, note)", needs: int = 1,
           text: str = CALLER) -> subprocess.Popen[str]:
    """A process that has started the launcher, in a process group of its own as in a terminal."""
    (folder / "launcher.py").write_text(LAUNCHER.replace("HANDLES", handles).replace("NEEDS", str(needs)))
    process = subprocess.Popen([sys.executable, "-c", text], cwd=folder, stdout=subprocess.PIPE, text=True,
                               stderr=subprocess.STDOUT, start_new_session=True, env=os.environ | {
                                   "PYTHONPATH": str(Path(__file__).parents[2])})
    end = time.monotonic() + 60
    while not (folder / "up").is_file() or not (folder / "up").read_text():
        assert process.poll() is None and time.monotonic() < end
        time.sleep(0.01)
    return process


@pytest.mark.parametrize("send", [os.kill, os.killpg])
def test_the_launcher_gets_it_once(tmp_path: Path, send: Callable[[int, int], None]) -> None:
    process = caller(tmp_path)
    begun = time.monotonic()
    send(process.pid, signal.SIGINT)
    said = process.communicate(timeout=60)[0]
    assert time.monotonic() - begun < start.PATIENCE, "nobody waits for what does not come"
    assert process.returncode == 130 and said == f"interrupted {start.EARLY}\n"
    assert (tmp_path / "got").read_text() == "SIGINT" and gone(int((tmp_path / "up").read_text()))


def test_a_second_one_is_passed_on(tmp_path: Path) -> None:
    process = caller(tmp_path, needs=2)
    for _ in range(2):
        process.send_signal(signal.SIGINT)
        time.sleep(0.3)
    process.communicate(timeout=60)
    assert process.returncode == 130 and (tmp_path / "got").read_text() == "SIGINT SIGINT"


def test_a_launcher_that_imports_ends_without_a_word(tmp_path: Path) -> None:
    process = caller(tmp_path, handles="signal.signal(signal.SIGINT, signal.default_int_handler)")
    process.send_signal(signal.SIGINT)
    said = process.communicate(timeout=60)[0]
    assert process.returncode == 130 and said == f"interrupted {start.EARLY}\n" and not (tmp_path / "got").exists()


def test_where_a_shell_has_it_ignored_nothing_ends(tmp_path: Path) -> None:
    """As in a background job: there, Ctrl-C is meant for others."""
    process = caller(tmp_path, text=f"import signal\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\n{CALLER}")
    process.send_signal(signal.SIGINT)
    time.sleep(0.5)
    assert process.poll() is None and not (tmp_path / "got").exists()
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    assert (tmp_path / "got").read_text() == "SIGTERM"


def test_another_thread_leaves_it_to_the_terminal(tmp_path: Path) -> None:
    """It gets no Ctrl-C that it could pass on, so the launcher stays where the terminal reaches it."""
    text = (f"import threading\ncode = {CALLER!r}\nthread = threading.Thread(target=exec, args=(code, {{}}))\n"
            "thread.start()\nwhile thread.is_alive():\n    try:\n        thread.join()\n"
            "    except KeyboardInterrupt:\n        pass\n")
    process = caller(tmp_path, text=text)
    assert (tmp_path / "session").read_text() == "False"
    os.killpg(process.pid, signal.SIGINT)
    process.communicate(timeout=60)
    assert (tmp_path / "got").read_text() == "SIGINT"


def test_ranks_that_import_end_without_a_word(tmp_path: Path) -> None:
    process = started_ranks(tmp_path, 2, f"{READY}time.sleep(600)")
    ranks = until_ready(tmp_path, 2)
    process.send_signal(signal.SIGINT)
    said = process.communicate(timeout=60)[0]
    assert (process.returncode, said) == (130, "") and all(map(gone, ranks))


def test_ranks_that_run_get_ctrl_c_itself(tmp_path: Path) -> None:
    what = f"""signal.signal(signal.SIGTERM, lambda *_: say("terminated"))
try:
    {READY}    time.sleep(600)
except KeyboardInterrupt:
    say("interrupted")"""
    process = started_ranks(tmp_path, 2, what)
    until_ready(tmp_path, 2)
    process.send_signal(signal.SIGINT)
    said = process.communicate(timeout=60)[0]
    assert process.returncode == 130 and said.splitlines() == ["interrupted"] * 2


@pytest.mark.parametrize("number, status", [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_in_the_middle_of_the_start_ends_every_rank(tmp_path: Path, number: signal.Signals, status: int) -> None:
    """The first rank sends it, while the others are being started."""
    what = f"{READY}if rank == 0:\n    os.kill(os.getppid(), {number.value})\ntime.sleep(600)"
    process = started_ranks(tmp_path, 16, what)
    said = process.communicate(timeout=100)[0]
    assert (process.returncode, said) == (status, "")
    assert all(gone(int(file.read_text())) for file in tmp_path.glob("ready*") if file.read_text())


# ------------------------------------------------------------------------------------------------------------ parts


def test_what_ends_a_process() -> None:
    for code, expected in (("", signal.SIGTERM), ("signal.signal(signal.SIGTERM, print); ", signal.SIGINT)):
        line = [sys.executable, "-c", f"import signal, time; {code}print(1, flush=True); time.sleep(600)"]
        with subprocess.Popen(line, stdout=subprocess.PIPE) as process:
            assert process.stdout is not None and process.stdout.readline() == b"1\n"
            assert interrupting_signal(process.pid) == expected
            process.kill()
    assert interrupting_signal(process.pid) == signal.SIGINT  # it has gone: nothing is known


def test_ctrl_c_is_held_until_it_is_released() -> None:
    before = signal.getsignal(signal.SIGINT)
    passed = []
    with pytest.raises(KeyboardInterrupt):
        with ctrl_c_held() as release:
            signal.raise_signal(signal.SIGINT)
            passed.append("inside")
            release()
            passed.append("after")
    assert passed == ["inside"] and signal.getsignal(signal.SIGINT) is before
    with pytest.raises(KeyboardInterrupt):
        with ctrl_c_held():
            signal.raise_signal(signal.SIGINT)
            passed.append("to the end")
    assert passed[-1] == "to the end" and signal.getsignal(signal.SIGINT) is before


def test_without_ctrl_c_nothing_is_raised() -> None:
    before = signal.getsignal(signal.SIGINT)
    with ctrl_c_held() as release:
        release()
        release()
    with pytest.raises(ZeroDivisionError), ctrl_c_held():
        raise ZeroDivisionError
    assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.parametrize("handler", [signal.SIG_IGN, lambda *_: None])
def test_another_handler_stays(handler: Callable[..., None]) -> None:
    before = signal.signal(signal.SIGINT, handler)
    try:
        with ctrl_c_held():
            assert signal.getsignal(signal.SIGINT) is handler
            signal.raise_signal(signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, before)


def test_another_thread_holds_nothing() -> None:
    found: list[object] = []

    def work() -> None:
        with ctrl_c_held():
            found.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [signal.getsignal(signal.SIGINT)]


@pytest.mark.thorough
def test_rlc_run_alone_gets_it(tmp_path: Path) -> None:
    make_model(tmp_path / "model", num_hidden_layers=2)
    write_jsonl(tmp_path / "sums.jsonl", make_sums(16))
    (tmp_path / "p.rlf").write_text(PROGRAM)
    process = subprocess.Popen([sys.executable, "-m", "rldsl.cli", "run", "p.rlf", "--out", "out"], cwd=tmp_path, text=True,
                               stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True)
    end = time.monotonic() + 90
    while not (tmp_path / "out/metrics.jsonl").is_file():
        assert process.poll() is None and time.monotonic() < end
        time.sleep(0.05)
    begun = time.monotonic()
    process.send_signal(signal.SIGINT)
    said = process.communicate(timeout=60)[0]
    assert process.returncode == 130 and time.monotonic() - begun < start.PATIENCE, said
    assert said.count("interrupted in step ") == 1 and "Traceback" not in said and "error" not in said, said
    assert not (tmp_path / "out/run.lock").exists()


@pytest.mark.parametrize("number, says", [(signal.SIGKILL, True), (signal.SIGSEGV, True), (signal.SIGTERM, False)])
def test_a_launcher_that_is_killed(number: signal.Signals, says: bool, tmp_path: Path) -> None:
    """`rlc run` tells what has happened to it, unless it asked for it itself; the status is that of a shell."""
    (tmp_path / "launcher.py").write_text(f"import os; os.kill(os.getpid(), {int(number)})")
    text = CALLER.replace('start.launch("x.plan", 1, "out", [])', 'sys.exit(start.launch("x.plan", 1, "out", []))')
    done = subprocess.run([sys.executable, "-c", text], cwd=tmp_path, capture_output=True, text=True, timeout=60,
                          env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}, check=False)
    assert done.returncode == 128 + number and "Traceback" not in done.stderr
    assert (f"the process that started the ranks was killed ({number.name})" in done.stderr) == says
    assert ("--resume" in done.stderr) == says
