"""A reward whose rank does in one step what the file `asked` of the working directory says: "RANK raise", "RANK hold",
"RANK grip"."""

import ctypes
import os
import time
from pathlib import Path

calls = 0


def judge(rows):
    global calls
    calls += 1
    rank, what = Path("asked").read_text().split()
    if calls == 2 and os.environ["RANK"] == rank:
        Path("here").touch()
        if what == "raise":
            raise ValueError("no answer")
        if what == "grip":  # Python's lock, for longer than anybody waits
            ctypes.PyDLL(None).sleep(600)
        while not Path("go").exists():
            time.sleep(0.02)
    return [float(len(row["completion_ids"])) for row in rows]
