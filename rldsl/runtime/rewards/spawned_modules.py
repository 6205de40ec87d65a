"""The main module of processes that users' Python spawns with `multiprocessing`.

A worker names it as its own `__main__` (`worker_process.py`), so `multiprocessing` runs it first in a spawned process,
as `__mp_main__`. It puts the finder of `hashed_modules.py` there: local modules come from the hashed bytes there, too.
"""

from __future__ import annotations

import os

from rldsl.runtime.rewards.hashed_modules import RECORD, installed

if __name__ == "__mp_main__" and RECORD in os.environ:
    installed().restore(os.environ[RECORD])
