"""Fuzzing of `check`: `python -m tests.fuzz.run --count 50000 [--seed 0] [--jobs 2]` prints a summary.

Inputs, by number: generated texts of the whole grammar, sensible programs, and both of them, the examples and the
library with a few characters changed. No input may give a traceback, a hang, or a message without a position.
"""

from __future__ import annotations

import argparse
import signal
import sys
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from random import Random

from rldsl import api
from rldsl.diag import Diagnostic
from rldsl.fix import apply
from rldsl.report import render, to_github, to_json
from rldsl.source import SourceFile, Span
from tests.fuzz.generate import mutate, programs, sensible

ROOT = Path(__file__).parents[2]
LIMIT = 10  # seconds of CPU for one input, however busy the machine is; the slowest takes a tenth of it
NAME = "fuzz.rlf"


@dataclass
class Summary:
    """codes: how often each was given. failures: (kind, seed, text, what went wrong)."""

    count: int = 0
    right: int = 0
    codes: Counter[str] = field(default_factory=Counter)
    failures: list[tuple[str, int, str, str]] = field(default_factory=list)
    slowest: tuple[float, str, int] = (0.0, "", 0)

    def add(self, other: "Summary") -> None:
        self.count += other.count
        self.right += other.right
        self.codes += other.codes
        self.failures += other.failures
        self.slowest = max(self.slowest, other.slowest)


@lru_cache(maxsize=1)
def pages() -> tuple[str, ...]:
    files = sorted([*ROOT.glob("examples/*.rlf"), *ROOT.glob("stdlib/*.rlf"), *ROOT.glob("tests/corpus/broken/*.rlf")])
    return tuple(p.read_text("utf-8") for p in files)


def make(number: int) -> tuple[str, str]:
    """(kind, text) of one input."""
    kind = ("grammar", "sensible", "page mutated", "sensible mutated", "grammar mutated")[number % 5]
    if kind == "grammar":
        return kind, programs(number)
    if kind == "sensible":
        return kind, sensible(number)
    base = {"page mutated": lambda: Random(number).choice(pages()), "sensible mutated": lambda: sensible(number),
            "grammar mutated": lambda: programs(number)}[kind]()
    return kind, mutate(number, base)


def problems(text: str, found: tuple[Diagnostic, ...]) -> Iterator[str]:
    """What is wrong with the answer to `text`, besides exceptions."""
    source = SourceFile(NAME, text)
    for d in found:
        for span in (d.span, *(x.span for x in d.labels), *(s for s, _ in (d.fix.edits if d.fix else ()))):
            if not _inside(span):
                yield f"a message without a position: {d}"
        if not d.title or d.title.endswith("."):
            yield f"a title that is none: {d.title!r}"
    render(found, color=True), to_json(found), to_github(found)
    mended, number = apply(source, found)
    if number and mended == text:
        yield f"a fix that changes nothing: {[d.fix for d in found]}"
    if number:
        api.examine(mended, NAME)


def _inside(span: Span | None) -> bool:
    return span is not None and 0 <= span.start <= span.end <= len(span.file.text)


def one(number: int) -> tuple[str, str, tuple[Diagnostic, ...], str]:
    """(kind, text, messages, what went wrong)"""
    kind, text = make(number)
    try:
        found = api.examine(text, NAME)
        return kind, text, found, "; ".join(problems(text, found))
    except TimeoutError:
        return kind, text, (), f"no answer in {LIMIT} s of CPU"
    except Exception:
        return kind, text, (), traceback.format_exc(limit=-6)


def run(start: int, count: int) -> Summary:
    """Inputs `start` to `start + count - 1`."""
    def late(*_: object) -> None:
        raise TimeoutError

    signal.signal(signal.SIGVTALRM, late)
    total = Summary()
    for number in range(start, start + count):
        began = time.process_time()
        signal.setitimer(signal.ITIMER_VIRTUAL, LIMIT)
        try:
            kind, text, found, wrong = one(number)
        finally:
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        total.count += 1
        total.right += not any(d.severity == "error" for d in found) and not wrong
        total.codes.update(d.code for d in found)
        total.slowest = max(total.slowest, (time.process_time() - began, kind, number))
        if wrong:
            total.failures.append((kind, number, text, wrong))
    return total


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--count", type=int, default=50_000)
    arguments.add_argument("--seed", type=int, default=0, help="the first number")
    arguments.add_argument("--jobs", type=int, default=1)
    given = arguments.parse_args()
    piece, total = 500, Summary()
    starts = range(given.seed, given.seed + given.count, piece)
    with ProcessPoolExecutor(given.jobs) as pool:
        for part in pool.map(run, starts, [min(piece, given.seed + given.count - s) for s in starts]):
            total.add(part)
    print(f"{total.count} inputs, {total.right} without errors, {sum(total.codes.values())} messages, "
          f"{len(total.failures)} failures")
    print(f"slowest: {total.slowest[0]:.2f} s of CPU ({total.slowest[1]}, number {total.slowest[2]})")
    print("messages: " + ", ".join(f"{code} {n}" for code, n in sorted(total.codes.items())))
    seen: Counter[str] = Counter()
    for kind, number, text, wrong in total.failures:
        last = wrong.strip().splitlines()[-1]
        seen[last] += 1
        if seen[last] <= 2:
            print(f"---- {kind}, number {number}\n{text}\n{wrong}")
    for last, n in seen.most_common():
        print(f"{n:6} x {last}")
    return int(bool(total.failures))


if __name__ == "__main__":
    sys.exit(main())
