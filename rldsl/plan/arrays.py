"""Metrics of several numbers per step: histograms, and tables of sequences.

In: the node of a program that makes one, an operator of `ARRAYS`. Out: how many numbers it has, and what they mean, for
the compiler, the verifier, the ranks that compute it and the one that writes it. Such a value has the extent "array";
only the log reads it.

A histogram: the ends of its range, how many elements lie below and above it, how many are NaN, and the counts of its
bins, which are equally wide. The rows of a table: for each its number (-1: there is none), how many tokens come before
the response, how many there are, and the tokens. A column of a table: a number for each of these rows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rldsl.plan.expr import Node, Program
from rldsl.plan.spaces import IndexedFrame

EXTENT = "array"  # of the value
HISTOGRAM, ROWS, COLUMN = "histogram", "table_rows", "table_column"  # operators
ARRAYS = (HISTOGRAM, ROWS, COLUMN)
RANGE = 5  # numbers of a histogram before its bins
HEAD = 3  # numbers of a row of a table before its tokens
MOST_BINS, MOST_ROWS = 512, 64  # of one metric; W&B and trackio take no more bins


@dataclass(frozen=True, slots=True)
class Histogram:
    """How often the elements of a value are where."""

    low: float  # the left end of the first bin
    high: float  # the right end of the last bin, which belongs to it
    below: int  # elements to the left of them, minus infinity among them
    above: int  # elements to the right of them, infinity among them
    nan: int  # elements that are no numbers
    counts: tuple[int, ...]  # of the bins, which are equally wide

    def edges(self) -> list[float]:
        """The ends of the bins, one more than there are bins."""
        bins = len(self.counts)
        return [self.low + (self.high - self.low) * i / bins for i in range(bins)] + [self.high]


@dataclass(frozen=True, slots=True)
class Row:
    """A row of a table, without its numbers."""

    number: int  # of its sequence among those of the step
    prompt: tuple[int, ...]  # ids of the tokens before the response
    response: tuple[int, ...]  # ids of the tokens of the response


@dataclass(frozen=True, slots=True)
class Array:
    """One logged value of several numbers, as a program makes it."""

    op: str  # of `ARRAYS`
    table: str = ""  # the name of the table that it belongs to
    column: str = ""  # of a column: what people call it
    frame: str = ""  # of a table: its sequences
    rows: int = 0  # of a table: how many it has at most

    @staticmethod
    def of(node: Node) -> Array:
        return Array(node.op, str(node.attr("table", "")), str(node.attr("column", "")), str(node.attr("frame", "")),
                     int(node.attr("rows", 0) or 0))


def width(node: Node, frames: Mapping[str, IndexedFrame]) -> int:
    """How many numbers the value of a node has: 1 unless its operator is one of `ARRAYS`."""
    match node.op:
        case "histogram":
            return RANGE + int(node.attr("bins", 0) or 0)
        case "table_rows":
            return int(node.attr("rows", 0) or 0) * (HEAD + tokens(frames[str(node.attr("frame"))]))
        case "table_column":
            return int(node.attr("rows", 0) or 0)
    return 1


def tokens(frame: IndexedFrame) -> int:
    """Tokens of the longest row."""
    return frame.max_prompt_tokens + frame.max_response_tokens


def fault(node: Node) -> str:
    """What is wrong with the attributes of a node that makes an array, or ""."""
    whole = {n: node.attr(n) for n in ("bins", "rows")}
    limits = {"bins": MOST_BINS} if node.op == HISTOGRAM else {"rows": MOST_ROWS}
    for name, most in limits.items():
        if type(whole[name]) is not int or not 1 <= whole[name] <= most:  # type: ignore[operator]
            return f"{name} is {whole[name]!r}, not 1 to {most}"
    if node.op != HISTOGRAM:
        return "" if isinstance(node.attr("frame"), str) and node.attr("table") else "it belongs to no table"
    low, high = node.attr("low"), node.attr("high")
    if low is None and high is None:
        return ""
    if not all(type(x) in (int, float) and math.isfinite(x) for x in (low, high)):  # type: ignore[arg-type]
        return f"its range is {low!r} to {high!r}"
    return "" if low < high else f"its range is {low!r} to {high!r}"  # type: ignore[operator]


def arrays(programs: Sequence[Program]) -> dict[str, Array]:
    """What the outputs of programs are that have several numbers, by name: in the flow, the names of values."""
    return {name: Array.of(p.nodes[i]) for p in programs for name, i in p.outputs if p.nodes[i].op in ARRAYS}


def histogram(numbers: Sequence[float]) -> Histogram:
    """From the numbers of a value."""
    low, high, below, above, nan = numbers[:RANGE]
    return Histogram(low, high, int(below), int(above), int(nan), tuple(int(x) for x in numbers[RANGE:]))


def table_rows(numbers: Sequence[float], rows: int) -> list[Row]:
    """From the numbers of a value; rows: how many it has at most."""
    each, found = len(numbers) // rows, []
    for i in range(rows):
        row = [int(x) for x in numbers[i * each : (i + 1) * each]]
        if row[0] >= 0:
            prompt, end = HEAD + row[1], HEAD + row[2]
            found.append(Row(row[0], tuple(row[HEAD:prompt]), tuple(row[prompt:end])))
    return found
