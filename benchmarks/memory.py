"""Estimated and measured memory of whole runs, rank by rank.

    python -m benchmarks.memory [NAME ...]     # all cases of tests/memory/plans.py, or those that are named

Measured: every storage that torch makes, counted while it lives, on the CPU (tests/memory/accounting.py). rss: by how
much the process grew, with the libraries that it loaded and what the allocator keeps. Gate: within 10 %.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

from rldsl.memory import curves
from rldsl.memory.curve import each_rank, peak
from rldsl.plan.codec import encode
from tests.memory.accounting import measured
from tests.memory.plans import CASES, Case, plan_of

GATE = 0.10
MIB = 2**20


def rows(case: Case) -> list[tuple[int, int, int, int]]:
    """(rank, estimate, measured, growth of the process) of a case, in bytes."""
    back = os.getcwd()
    with tempfile.TemporaryDirectory() as place:
        os.chdir(place)
        try:
            plan = plan_of(case, Path(place))
            found = measured(encode(plan), Path(place) / "out", case.world)
        finally:
            os.chdir(back)
    return [(rank, peak(c).bytes, found[rank].peak, found[rank].rss) for rank, c in each_rank(curves(plan, "cpu"))]


def main(names: list[str]) -> int:
    """The number of ranks that are out of the gate."""
    print(f"{'case':<24}{'rank':>5}{'estimate':>12}{'measured':>12}{'error':>8}{'rss':>10}   MiB", flush=True)
    worst, out = 0.0, 0
    for case in CASES:
        if names and case.name not in names:
            continue
        for rank, estimate, real, rss in rows(case):
            error = estimate / real - 1
            worst, out = max(worst, abs(error)), out + (abs(error) > GATE)
            print(f"{case.name:<24}{rank:>5}{estimate / MIB:>12.2f}{real / MIB:>12.2f}{error:>+8.1%}{rss / MIB:>10.1f}",
                  flush=True)
    print(f"largest error {worst:.1%}, gate {GATE:.0%}, {out} ranks outside")
    return out


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]) > 0)
