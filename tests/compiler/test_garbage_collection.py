"""A process whose end is quick ends as any other does, only without freeing its objects."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import atexit, os, sys, threading, time
from rldsl.garbage_collection import ending_quickly

class Cycle:
    def __init__(self):
        self.me = self
    def __del__(self, write=os.write):
        write(1, b"freed ")

def late():
    time.sleep(0.3)
    print("thread", end=" ")

cycle = Cycle()
with ending_quickly():
    atexit.register(print, "registered", end=" ")
    threading.Thread(target=late).start()
    print("body", end=" ")
    {}
"""


@pytest.mark.parametrize("last, status, said", [
    ("pass", 0, ""), ("sys.exit()", 0, ""), ("sys.exit(0)", 0, ""), ("sys.exit(2)", 2, ""), ("sys.exit(True)", 1, ""),
    ("sys.exit(256 + 7)", 7, ""), ("sys.exit(-1)", 255, ""), ("sys.exit('why')", 1, "why\n")])
def test_the_end_keeps_its_order_and_status(last: str, status: int, said: str) -> None:
    """The thread is waited for first, then what was registered is called."""
    ended = subprocess.run([sys.executable, "-c", PROGRAM.format(last)], capture_output=True, text=True)
    assert (ended.stdout, ended.stderr, ended.returncode) == ("body thread registered ", said, status)
    usual = subprocess.run([sys.executable, "-c", f"import sys; {last}"], capture_output=True, text=True)
    assert (usual.stderr, usual.returncode) == (said, status)


@pytest.mark.parametrize("last, status, said", [
    ("raise ValueError('a bug')", 1, "ValueError: a bug"), ("raise KeyboardInterrupt", -2, "KeyboardInterrupt")])
def test_other_exceptions_end_the_process_as_ever(last: str, status: int, said: str) -> None:
    ended = subprocess.run([sys.executable, "-c", PROGRAM.format(last)], capture_output=True, text=True)
    assert ended.stdout.startswith("body thread registered ")
    assert said in ended.stderr and "Traceback" in ended.stderr and ended.returncode == status


@pytest.mark.parametrize("closed", [">&-", "2>&-", ">&- 2>&-"])
def test_output_that_is_closed_from_the_start(closed: str) -> None:
    body = "from rldsl.garbage_collection import ending_quickly\nwith ending_quickly(): raise SystemExit(3)"
    ended = subprocess.run(["sh", "-c", f'"$0" -c "$1" {closed}', sys.executable, body], capture_output=True, text=True)
    assert (ended.stdout, ended.stderr, ended.returncode) == ("", "", 3)


def test_output_that_the_program_has_closed() -> None:
    body = """import sys
from rldsl.garbage_collection import ending_quickly
with ending_quickly():
    sys.stdout.close()
"""
    ended = subprocess.run([sys.executable, "-c", body], capture_output=True, text=True)
    assert (ended.stderr, ended.returncode) == ("", 0)


def test_an_exception_of_a_registered_function_is_printed() -> None:
    ended = subprocess.run([sys.executable, "-c", PROGRAM.format("atexit.register(lambda: 1 / 0); sys.exit(3)")],
                           capture_output=True, text=True)
    assert "ZeroDivisionError" in ended.stderr and ended.returncode == 3


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
def test_output_that_cannot_be_written_is_an_error_as_ever() -> None:
    found = []
    quickly = "from rldsl.garbage_collection import ending_quickly\nwith ending_quickly(): "
    for body in ("print('x')", quickly + "print('x')"):
        with open("/dev/full", "w") as full:
            ended = subprocess.run([sys.executable, "-c", body], stdout=full, stderr=subprocess.PIPE, text=True)
        found.append((ended.returncode, "No space left" in ended.stderr))
    assert found[0] == found[1] and found[0][0] != 0 and found[0][1]
