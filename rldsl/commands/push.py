"""`rlc push`: a saved model of a run goes to the Hub.

In: a directory of a run, a name. Out: the address of the commit.
"""

from __future__ import annotations

from pathlib import Path

from rldsl.python.push import push as send
from rldsl.python.runs import Run


def push(folder: str, name: str, model: str, private: bool, branch: str) -> str:
    """Errors: RL0095, RL0783, RL0798."""
    return send(Run(Path(folder)), name, model, private, branch)
