"""A class written for TRL sees here what it sees under TRL's own loop. RLDSL_TRL_PYTHON names a Python with TRL 1.16,
unless this one has it."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

PYTHON = os.environ.get("RLDSL_TRL_PYTHON", sys.executable)


@pytest.mark.skipif(PYTHON == sys.executable and importlib.util.find_spec("trl") is None,
                    reason="trl is not installed, and RLDSL_TRL_PYTHON does not name a Python that has it")
def test_the_same_calls_answers_tokens_and_reward() -> None:
    root = Path(__file__).parents[2]
    done = subprocess.run([PYTHON, str(Path(__file__).parent / "trl_loop.py")], text=True, capture_output=True,
                          timeout=170, env={**os.environ, "PYTHONPATH": str(root)})
    assert done.returncode == 0, done.stderr[-3000:]
    ours, theirs = json.loads(done.stdout.split("RESULT")[1])
    assert ours == theirs
    assert [call[0] for call in ours["calls"]] == ["reset", "add", "slowly", "slowly", "add"] and ours["reward"] == 1.0
    assert "{'error': 'broken'}" in [message["content"] for message in ours["answers"]]
