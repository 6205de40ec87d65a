"""`python -m tests.fresh MODULE ...` does what `python -m MODULE ...` does, in an interpreter that reads the environment
anew, as libraries do while they are imported, and forks the ranks that it launches: torch and transformers are imported
once, and not by the launcher and each rank, which takes seconds of each."""

from __future__ import annotations

import importlib
import os
import sys

from tests.forked import _run, fork_ranks

LIBRARIES = ("torch.distributed", "transformers", "rldsl.runtime.interpreter.interpreter", "rldsl.backends.torch.shard")

if __name__ == "__main__":
    for name in LIBRARIES:
        importlib.import_module(name)
    fork_ranks()
    _run(sys.argv[1], tuple(sys.argv[2:]), dict(os.environ))
