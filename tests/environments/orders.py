"""Whole runs in every order of arrival: the same numbers, bit for bit, and the same trained weights' losses.

    python -m tests.environments.orders [PLACE ...]        # for example "mesh(0:2) tp=2"; all of PLACES

Three seeds of delays, few slots (given away or kept) and one for each conversation, generation under dp 1, 2 and 4, tp 2
and pp 2, with `invariant=true` and training on one rank: tokens, rewards, log-probs and losses of two steps against a
run whose environments answer at once. `make test` does less of it (`test_runs.py`, `test_layouts.py`).
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from tests.environments.programs import folder, run
from tests.environments.test_runs import BODY, numbers

PLACES = ("mesh(0:1)", "mesh(0:2) dp=2", "mesh(0:4) dp=4", "mesh(0:2) tp=2", "mesh(0:2) pp=2")
SLOTS = {"many": "", "few": " mbs=1", "few, offload": " mbs=1 waiting=offload",
         "few, recompute": " mbs=1 waiting=recompute"}
REST = "place actor.train on mesh(0:1)\nplace actor.logprobs on mesh(0:1)"


def main() -> None:
    wrong = count = 0
    with tempfile.TemporaryDirectory() as place:
        base = folder(Path(place))
        right = numbers(run(base, BODY, options=", invariant=true"))
        for where in sys.argv[1:] or PLACES:
            for name, slots in SLOTS.items():
                for seed in (1, 2, 3) if name in ("many", "few") else (1,):
                    found = numbers(run(base, BODY, options=", invariant=true", delays=seed,
                                        place=f"place actor.generate on {where}{slots}\n{REST}"))
                    differs = [n for a, b in zip(right, found, strict=True) for n in a if a[n] != b[n]]
                    count, wrong = count + 1, wrong + bool(differs)
                    print(f"{where:<16}{name:<16}delays {seed}: {differs or 'equal bit for bit'}", flush=True)
    print(f"{count} runs, {wrong} that differ")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
