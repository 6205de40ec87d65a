"""Published steps of RL systems, predicted: step time, tokens per second and GPU, phases, and the ratio. All modelled.

    python -m benchmarks.published                    # all rows: about two minutes
    python -m benchmarks.published --only llama       # those whose names contain a word
    python -m benchmarks.published --log-std 1.0      # with another distribution of lengths
    python -m benchmarks.published --search llama8b-h100-16     # what the search finds there, with its certified gap

Gates: dense rows within 25 %, rows of mixtures of experts within 35 %, Kendall's tau of the order of the steps at least
0.9, the sign of what generating one step ahead gains right in every pair; the gain within 15 % where phases are
published and given as the durations of calls (`phases.py`). docs/published.md has the sources, the constants and the rows that miss a gate.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import combinations
from pathlib import Path

from benchmarks.published.phases import gains as gains_of_phases
from benchmarks.published.prediction import Prediction, predict, workplace
from benchmarks.published.rows import AGAIN, CALIBRATION, LEFT_OUT, LOG_STD, ONE_RACK, ROWS, SCATTERED, VERL, Row

DENSE, MOE, ORDER, GAIN = 0.25, 0.35, 0.9, 0.15
HEAD = f"{'row':<24} {'step':>8} {'published':>9} {'ratio':>6} {'tok/s/GPU':>10} {'published':>9}  phases (published)"


def line(p: Prediction) -> str:
    row = p.row
    phases = ", ".join(f"{name} {seconds:.0f}" + (f" ({row.phases[name]:.0f})" if name in row.phases else "")
                       for name, seconds in p.phases().items())
    mark = "" if within(p) else "  outside the gate"
    return (f"{row.name:<24} {p.seconds:>7.1f}s {row.seconds:>8.1f}s {p.ratio:>6.2f} {p.throughput:>10,.1f} "
            f"{row.throughput or 0:>9,.1f}  {phases}{mark}")


def within(p: Prediction) -> bool:
    """Whether a step is within its gate."""
    return abs(p.ratio - 1) <= (MOE if p.row.moe else DENSE)


def gains(found: Mapping[str, Prediction]) -> Iterator[tuple[Prediction, float, float]]:
    """(a run one step ahead, its predicted gain over the on-policy run on equally many devices, the published one)."""
    for p in found.values():
        if p.row.baseline in found:
            base = found[p.row.baseline]
            yield p, base.seconds / p.seconds, base.row.seconds / p.row.seconds


def with_mean(row: Row, folder: Path, log_std: float) -> Row:
    """The row with the mean length with which its simulated training takes as long as published."""
    low, high = 200.0, 4000.0
    for _ in range(12):
        middle = (low + high) / 2
        short = predict(replace(row, response=middle), folder, log_std).phases()["train"] < row.phases["train"]
        low, high = (middle, high) if short else (low, middle)
    return replace(row, response=round(high))


def verdict(found: Sequence[Prediction]) -> Iterator[str]:
    for name, moe, gate in (("dense", False, DENSE), ("mixtures of experts", True, MOE)):
        some = [p for p in found if p.row.moe == moe]
        if some:
            good = sum(within(p) for p in some)
            worst = max(some, key=lambda p: abs(p.ratio - 1))
            yield f"{name}: {good} of {len(some)} rows within {gate:.0%}; furthest {worst.row.name}, {worst.ratio:.2f}"
    yield f"order of {len(found)} steps: Kendall's tau {order(found):.3f} (gate {ORDER})"
    for moe in (False, True):
        some = [p for p in found if p.row.moe == moe]
        if len(some) > 1:
            yield f"  {'mixtures of experts' if moe else 'dense'}: {order(some):.3f}"
    inside = [p for p in found if within(p)]
    yield f"  of the {len(inside)} rows within their gates: {order(inside):.3f}"
    apart = largest_ratio_of_releases()
    yield (f"  of the {num_apart(found, apart)} of {num_apart(found, 1.0)} pairs that are further apart than a row is "
           f"from itself in another release ({apart - 1:.0%}): {order(found, apart):.3f}, of those within their gates "
           f"{order(inside, apart):.3f}")


def largest_ratio_of_releases() -> float:
    """The most by which a published step differs from the same one in another release, as a ratio."""
    known = {row.name: row.seconds for row in ROWS}
    return max(max(x / known[name], known[name] / x) for name, again in AGAIN.items() for x in again.values())


def ratio(a: Prediction, b: Prediction) -> float:
    """Of the published steps, at least 1."""
    return max(a.row.seconds / b.row.seconds, b.row.seconds / a.row.seconds)


def order(found: Sequence[Prediction], apart: float = 1.0) -> float:
    """Kendall's tau of the predicted and the published order. apart: least ratio of the published steps of a pair."""
    signs = [(a.seconds - b.seconds) * (a.row.seconds - b.row.seconds) for a, b in combinations(found, 2)
             if ratio(a, b) >= apart]
    return sum((s > 0) - (s < 0) for s in signs) / len(signs) if signs else 1.0


def num_apart(found: Sequence[Prediction], apart: float) -> int:
    """Pairs whose published steps have this ratio at least."""
    return sum(ratio(a, b) >= apart for a, b in combinations(found, 2))


def searched(only: str, seconds: float, log_std: float) -> None:
    """The table of "What would be better" in docs/published.md, for rows whose names contain `only`."""
    from benchmarks.published.searched import HEAD as SEARCHED
    from benchmarks.published.searched import line as searched_line
    from benchmarks.published.searched import search
    from rldsl.diag import Failure

    with tempfile.TemporaryDirectory() as place, workplace(Path(place)) as folder:
        print(f"modelled\n\n{SEARCHED}", flush=True)
        for row in ROWS:
            if only not in row.name:
                continue
            as_published = predict(row, folder, log_std)
            try:
                print(searched_line(as_published, search(row, folder, seconds, row.lag, log_std)), flush=True)
            except Failure as failure:
                print(f"| `{row.name}` | {as_published.seconds:.1f} s | {failure} | | |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="rows whose names contain this")
    parser.add_argument("--log-std", type=float, default=LOG_STD, help="standard deviation of the logarithm of lengths")
    parser.add_argument("--search", help='search for the rows whose names contain this; "" for all')
    parser.add_argument("--seconds", type=float, default=60.0, help="CPU seconds of such a search")
    given = parser.parse_args()
    if given.search is not None:
        return searched(given.search, given.seconds, given.log_std)
    found: dict[str, Prediction] = {}
    with tempfile.TemporaryDirectory() as place, workplace(Path(place)) as folder:
        print(f"modelled; lengths lognormal with log-std {given.log_std:g}, cut at the maximum\n\n{HEAD}", flush=True)
        for row in (*ROWS, *CALIBRATION):
            if given.only in row.name:
                found[row.name] = p = predict(row, folder, given.log_std)
                print(line(p) + ("  [constants come from it]" if row in CALIBRATION else ""), flush=True)
        means: dict[str, float] = {}
        for row in VERL:
            if given.only in row.name:
                whole = with_mean(row, folder, given.log_std) if not row.baseline else row
                means[row.name] = whole.response or means.get(row.baseline, 1000.0)
                found[row.name] = p = predict(replace(whole, response=means[row.name]), folder, given.log_std)
                print(line(p).replace("  outside the gate", "") + f"  [mean {means[row.name]:.0f} tokens]", flush=True)
        measured = [gain for p in found.values() if p.row.phases and p.row.baseline in found
                    for gain in gains_of_phases(found[p.row.baseline], p, folder)]
        by_rack = [predict(replace(p.row, scattered=False, domain=ONE_RACK), folder, given.log_std)
                   for name, p in found.items() if name in SCATTERED]
    judged = [p for p in found.values() if p.row in ROWS]
    print()
    if judged:
        print("\n".join(verdict(judged)))
    for p in by_rack:
        print(f"  {p.row.name} if no group spans racks: {p.seconds:.1f} s, {p.ratio:.2f}")
    print("\ngain of generating one step ahead")
    for p, ours, theirs in gains(found):
        right = "right" if (ours > 1) == (theirs > 1) else "WRONG"
        print(f"  {p.row.name:<24} {ours:.2f}, published {theirs:.2f}: sign {right}")
    print(f"\nthe same where phases are published, with their seconds as the durations of calls (gate {GAIN:.0%})")
    for gain in measured:
        mark = "" if abs(gain.error) <= GAIN else "  outside the gate"
        print(f"  {gain.row.name:<18} {gain.what:<54} {gain.seconds[0]:>4.0f} s / {gain.seconds[1]:>4.0f} s = "
              f"{gain.predicted:.2f}, published {gain.published:.2f}, {gain.error:+.0%}{mark}")
    print("\npublished, not simulated")
    for name, why in LEFT_OUT.items():
        print(f"  {name}: {why}")


if __name__ == "__main__":
    main()
