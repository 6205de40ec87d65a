"""Ctrl-C while Python still imports the command line."""

from __future__ import annotations

import signal
import subprocess
import sys

from click.testing import CliRunner

from rldsl.cli import main
from rldsl.diag import Diagnostic
from rldsl.report import to_json

IMPORTS = """
import importlib.abc, os, signal, sys
class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == "click":
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Finder())
import rldsl.rlc
sys.argv = ["rlc", "--version"]
rldsl.rlc.main()
"""


def test_it_says_one_line_and_ends_with_130() -> None:
    done = subprocess.run([sys.executable, "-c", IMPORTS], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (130, "")
    assert done.stderr == "interrupted; to start again, repeat the command\n"


def test_with_json_it_prints_one_object() -> None:
    line = IMPORTS.replace('"--version"', '"check", "--json"')
    done = subprocess.run([sys.executable, "-c", line], capture_output=True, text=True, timeout=60)
    interrupted = Diagnostic("RL0090", "interrupted", help="to start again, repeat the command")
    assert (done.returncode, done.stdout, done.stderr) == (130, to_json([interrupted]) + "\n", "")


def test_a_shell_that_ignores_it_is_obeyed() -> None:
    done = subprocess.run([sys.executable, "-c", IMPORTS], capture_output=True, text=True, timeout=60,
                          preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN))
    assert done.returncode == 0 and done.stdout and not done.stderr


def test_the_command_itself_handles_it_later() -> None:
    before = signal.signal(signal.SIGINT, lambda *_: None)
    try:
        CliRunner().invoke(main, ["check", "no such file"])
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)
