"""Which vLLM the tests run: the stand-in, always, and the real one where RLDSL_VLLM_PYTHON names a Python that has it.

The stand-in (`standin/vllm`) replaces the package `vllm` alone: process, messages, weights and everything else are what
a run uses.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from rldsl.backends.vllm.describe import PYTHON

REAL = os.environ.get(PYTHON, "")  # as the tester has it, before a test changes it
STANDIN = Path(__file__).parent / "standin"
BOTH = ["standin", pytest.param("vllm", marks=pytest.mark.skipif(
    not REAL, reason=f"{PYTHON} does not name a Python that has vLLM"))]


def variables(name: str) -> dict[str, str]:
    """The environment of a run with an engine."""
    return {PYTHON: REAL} if name == "vllm" else {PYTHON: sys.executable, "PYTHONPATH": str(STANDIN)}


def use(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    for variable, value in variables(name).items():
        monkeypatch.setenv(variable, value)


def engine_of(pid: int) -> bool:
    """Whether a process is an engine that still runs."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        return state != "Z" and b"engine.py" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except FileNotFoundError:
        return False
