"""`python -m tests.fresh MODULE ...` does what `python -m MODULE ...` does, in an interpreter that reads the environment
anew, as libraries do while they are imported, and forks the ranks that it launches: torch and transformers are imported
once, and not by the launcher and each rank, which takes seconds of each. `read_environment` does the same for the
libraries of the Hub in a process that is forked with them."""

from __future__ import annotations

import importlib
import os
import sys

from tests.forked import _run, fork_ranks

LIBRARIES = ("torch.distributed", "transformers", "rldsl.runtime.interpreter.interpreter", "rldsl.backends.torch.shard")


def read_environment() -> None:
    """Give the constants that huggingface_hub reads when it is imported, and the client that it makes with them, what
    the environment says now."""
    from huggingface_hub import constants, hf_api

    old = {name: value for name, value in vars(constants).items() if name.isupper()}
    importlib.reload(constants)
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] in ("huggingface_hub", "transformers"):
            for key in old.keys() & vars(module).keys():
                if vars(module)[key] is old[key]:
                    setattr(module, key, getattr(constants, key))
    hf_api.api.__init__()  # type: ignore[misc]


if __name__ == "__main__":
    for name in LIBRARIES:
        importlib.import_module(name)
    fork_ranks()
    _run(sys.argv[1], tuple(sys.argv[2:]), dict(os.environ))
