"""Rows over data-parallel ranks where a rank computes the prompt of several responses once.

    python -m benchmarks.prompt_division

For steps of some sizes it prints what the busiest rank computes, in tokens, with rows balanced by their lengths alone
and as rldsl divides them, and the bound: every prompt once, evenly over the ranks. Prompts are half to one and a half
times the stated length, responses lognormal. CPU seconds are of one division.
"""

from __future__ import annotations

import random
import time

from rldsl.plan.model import Spread
from rldsl.sharding.balance import sequence_cost
from rldsl.sharding.partition import rows_by_dp
from rldsl.sharding.siblings import Siblings
from tests.frames import frame

STEPS = ((256, 64, 8, 32), (512, 512, 8, 64), (1024, 256, 16, 32), (128, 1024, 8, 64), (1024, 256, 16, 256))
DEGREES = (2, 8, 32)  # of dp
SPREAD = Spread("s", "m", "l", ("gen",))


def lengths(prompt: int, response: int, n: int, prompts: int) -> tuple[list[int], list[int]]:
    """(tokens of prompts, tokens in all), by row."""
    draw = random.Random(1)
    of = [p for _ in range(prompts) for p in [draw.randint(prompt // 2, prompt * 3 // 2)] * n]
    return of, [p + max(1, min(4 * response, round(response * draw.lognormvariate(-0.3, 0.8)))) for p in of]


def main() -> None:
    print("prompt response    n   rows  dp      apart   together      bound  apart/together  CPU s")
    for prompt, response, n, prompts in STEPS:
        of, whole = lengths(prompt, response, n, prompts)
        rows, tokens = frame("gen", "gen", "prompt", len(of), n, "d", 8, 8), Siblings(n, of)
        costs = Siblings(n, [sequence_cost(p) for p in of])
        for dp in DEGREES:
            busiest, seconds = [], 0.0
            for siblings in (None, costs):
                start = time.process_time()
                divided = rows_by_dp(SPREAD, dp, [rows], {"gen": whole}, 1, 1, siblings)
                seconds = time.process_time() - start
                busiest.append(max(tokens.computed(part["gen"], whole) for part in divided))
            bound = tokens.computed(range(len(of)), whole) / dp
            print(f"{prompt:6} {response:8} {n:4} {len(of):6} {dp:3} {busiest[0]:10,} {busiest[1]:10,} {bound:10,.0f}"
                  f" {busiest[0] / busiest[1]:15.2f} {seconds:6.3f}")


if __name__ == "__main__":
    main()
