"""torchrun on this machine, without its traceback when a rank fails: the rank itself has said what went wrong.

In: the arguments of torchrun. Out: the exit status of the first rank that failed, else 0.
"""

from __future__ import annotations

import logging
import sys


def main(arguments: list[str]) -> int:
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main as torchrun

    logging.disable(logging.CRITICAL)  # of this process alone: the ranks speak for themselves
    try:
        torchrun(arguments)
    except ChildFailedError as error:
        code = min(error.failures.values(), key=lambda f: f.timestamp).exitcode
        return code if code > 0 else 1
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
