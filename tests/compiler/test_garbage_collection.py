"""A command that ends with what it makes does not go through all of it once more."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import os, sys
from rldsl.garbage_collection import never_collect

class Cycle:
    def __init__(self):
        self.me = self
    def __del__(self, write=os.write):
        write(1, b"collected")

{}
never_collect()
Cycle()
"""


@pytest.mark.parametrize(("before", "printed"), [("", ""), ("sys.modules['torch'] = sys", "collected")])
def test_the_last_collection_is_skipped_unless_torch_is_loaded(before: str, printed: str) -> None:
    """A library that triton uses prints a list of what is not freed when the process ends."""
    ended = subprocess.run([sys.executable, "-c", PROGRAM.format(before)], capture_output=True, text=True)
    assert (ended.stdout, ended.stderr, ended.returncode) == (printed, "", 0)
