"""`rlc diff-runs`: where two runs first differ.

In: two directories of runs. Out: for each metric, histogram and value of sampled sequences and tables the first step at
which the runs differ and by how much; the first sampled sequence or row of a table whose text differs, with the
position. What is measured (times, rates, memory) is left out. Two runs that are equal in everything computed print no
differences.
Errors: RL0783 no run, RL0784 damaged metrics or samples, or no step that both have.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from itertools import takewhile, zip_longest
from pathlib import Path
from typing import Any

from rldsl.commands.runs import metrics
from rldsl.diag import fail, visible
from rldsl.files import read_bytes
from rldsl.plan.codec import plan_id
from rldsl.plan.metrics_file import HISTOGRAMS, MEASURED, SAMPLES, STEP, TABLES, Lines, histogram_lines
from rldsl.runtime.metrics.run_record import PLAN

Key = tuple[str, int, int]  # batch or "table NAME", step, row
ComparedNumber = tuple[tuple[int, int | None, str], float | None, float | None]  # (step, row, name), value, value
CONTEXT = 24  # characters of a text that are shown around the first difference
SHOWN = 12    # numbers that are listed as text


@dataclass(frozen=True, slots=True)
class NumberDifference:
    """A metric, or a value of histograms, tables or sampled sequences, that differs."""

    name: str     # of the metric; "BATCH.VALUE" of sampled sequences, "table NAME.VALUE", "histogram NAME.counts"
    step: int     # the first step at which it differs
    row: int | None  # of that step; None for a metric and a histogram
    one: float | None  # in the first run at that place; None if only the other run has it
    two: float | None  # in the second run
    largest: float | None  # absolute difference over the places that both have; None: none; inf: not finite
    places: int   # how many steps, rows or bins differ
    missing: int  # at how many of them one of the runs has no number


@dataclass(frozen=True, slots=True)
class TextDifference:
    """The first sampled sequence of a batch, or row of a table, whose text differs."""

    batch: str     # its name in the program; "table NAME"
    step: int      # the step of the sequence
    row: int       # its row in the batch
    part: str      # "prompt" or "completion"
    position: int  # of the first character that differs
    one: str       # the text around that position in the first run
    two: str       # in the second run
    rows: int      # how many of the batch or table differ


@dataclass(frozen=True, slots=True)
class RunDifference:
    """Where two runs differ."""

    same_plan: bool             # whether both ran the same plan
    steps: int                  # how many steps both have
    rows: int                   # how many sampled sequences both have
    numbers: tuple[NumberDifference, ...]  # what differs, the earliest first
    texts: tuple[TextDifference, ...]     # what differs, the earliest first
    ignored: int                # differences that are within the tolerance

    @property
    def same(self) -> bool:
        return not self.numbers and not self.texts

    def json(self) -> dict[str, Any]:
        return {"same": self.same, **asdict(self)}

    def text(self, names: tuple[str, str]) -> str:
        """For people. names: of the two runs."""
        head = [f"{names[0]} and {names[1]}: {'the same plan' if self.same_plan else 'different plans'}, "
                f"{_count(self.steps, 'step')} and {_count(self.rows, 'sampled sequence')} in both"]
        if not self.rows:
            head.append("record sequences with `--log-samples N` to see which one differs first")
        within = f" ({_count(self.ignored, 'difference')} within the tolerance)" if self.ignored else ""
        if self.same:
            return "\n".join([*head, f"no differences{within}"])
        first = min([*(n.step for n in self.numbers), *(t.step for t in self.texts)])
        lines = [*head, f"first difference in step {first}{within}"]
        for t in self.texts:
            lines += [f"  {t.batch}, step {t.step}, row {t.row}: the {t.part} differs from character {t.position} on "
                      f"({_count(t.rows, 'sequence')} in all)", f"    {t.one}", f"    {t.two}"]
        rows = [(n.name, f"step {n.step}" + (f", row {n.row}" if n.row is not None else ""), _shown(n.one),
                 _shown(n.two), _extent(n))
                for n in self.numbers[:SHOWN]]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines += ["  " + "  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in rows]
        if len(self.numbers) > SHOWN:
            lines.append(f"  and {len(self.numbers) - SHOWN} more (--json lists all)")
        return "\n".join(lines)


def diff_runs(one: str, two: str, tolerance: float = 0.0) -> RunDifference:
    """Compare two runs. tolerance: relative difference of two numbers that does not count; 0 compares bits.
    Errors: RL0783, RL0784."""
    folders = Path(one), Path(two)
    lines = [_by_step(metrics(folder)) for folder in folders]
    samples = [_sequences(folder, SAMPLES) for folder in folders]
    tables = [_sequences(folder, TABLES, "table ") for folder in folders]
    histograms = [_histograms(folder) for folder in folders]
    steps, rows = lines[0].keys() & lines[1].keys(), samples[0].keys() & samples[1].keys()
    if not steps:
        raise fail("RL0784", "the runs have no step in common", place=two,
                   notes=tuple(f"{folder}: steps {min(found)} to {max(found)}" for folder, found in
                               zip(folders, lines, strict=True)), help="give two runs of the same program")
    places: list[ComparedNumber] = [((step, None, name), a, b) for step in steps
                                    for name, a, b in _pairs(lines[0][step], lines[1][step])]
    places += _of_samples(samples[0], samples[1], rows)
    logged = tables[0].keys() & tables[1].keys()
    places += [((key[1], key[2], f"{key[0]}.{name}"), a, b) for key in logged
               for name, a, b in _pairs(_values(tables[0][key]), _values(tables[1][key]))]
    # runs need not record the same sequences with `--log-samples`, but a table has the rows that the program chooses
    places += [((step, row, f"{name}.row"), *((row, None) if (name, step, row) in tables[0] else (None, row)))
               for name, step, row in tables[0].keys() ^ tables[1].keys() if step in steps]
    places += [((step, None, f"histogram {name}"), a, b) for step in steps
               for name, a, b in _bins(*(found.get(step, {}) for found in histograms))]
    different = [(place, a, b) for place, a, b in places if not _equal(a, b, 0.0)]
    beyond = [(place, a, b) for place, a, b in different if not _equal(a, b, tolerance)]
    return RunDifference(_plan(folders[0]) == _plan(folders[1]), len(steps), len(rows), tuple(_numbers(beyond)),
                         tuple(_texts(samples[0] | tables[0], samples[1] | tables[1], rows | logged)),
                         len(different) - len(beyond))


def _of_samples(one: Mapping[Key, Mapping[str, Any]], two: Mapping[Key, Mapping[str, Any]], rows: set[Key]
                ) -> Iterator[ComparedNumber]:
    """The numbers of the sequences that both runs have recorded. A value of the flow is recorded with those of its rows
    that are on the recording rank, which depends on the placement: where one run alone has it, nothing is compared."""
    recorded = [{(key[0], name) for key, line in of.items() for name in line} for of in (one, two)]
    for key in rows:
        for name, a, b in _pairs(_values(one[key]), _values(two[key])):
            elsewhere = all((key[0], name) in names for names in recorded)
            if not (elsewhere and (a is None or b is None)):
                yield (key[1], key[2], f"{key[0]}.{name}"), a, b


def _by_step(lines: Lines) -> dict[int, dict[str, float]]:
    return {int(line[STEP]): {n: x for n, x in line.items() if n != STEP and n not in MEASURED} for line in lines}


def _histograms(folder: Path) -> dict[int, dict[str, Any]]:
    """Step -> name -> histogram."""
    try:
        lines = histogram_lines(folder / HISTOGRAMS)
    except FileNotFoundError:  # the program logs none
        return {}
    return {int(line[STEP]): {name: h for name, h in line.items() if name != STEP} for line in lines}


def _bins(one: Mapping[str, Any], two: Mapping[str, Any]) -> Iterator[tuple[str, float | None, float | None]]:
    """The numbers of the histograms of a step, with their names. Of one that only one run has, the bins."""
    for name in dict.fromkeys([*one, *two]):
        a, b = one.get(name), two.get(name)
        if a is not None and b is not None:
            yield from ((f"{name}.{end}", a[end], b[end]) for end in ("low", "high", "below", "above", "nan"))
        bins = zip_longest((a or {}).get("counts", ()), (b or {}).get("counts", ()))
        yield from ((f"{name}.counts", x, y) for x, y in bins)


def _sequences(folder: Path, directory: str, prefix: str = "") -> dict[Key, dict[str, Any]]:
    """The sampled sequences of a run, or the rows of its tables. prefix: of their names."""
    found = {}
    for file in sorted((folder / directory).glob("*.jsonl")):
        for number, text in enumerate(read_bytes(str(file)).split(b"\n")[:-1], 1):
            try:
                line = json.loads(text)
                found[prefix + file.stem, int(line["step"]), int(line["row"])] = line
            except (ValueError, KeyError, TypeError, RecursionError):
                what = "the row of a table" if prefix else "a sampled sequence"
                raise fail("RL0784", f"this line is not {what}", place=f"{file}:{number}",
                           help="the file is damaged; delete it to compare metrics only") from None
    return found


def _values(line: Mapping[str, Any]) -> dict[str, float]:
    found = {name: x for name, x in line.items() if name not in ("step", "row") and type(x) in (int, float)}
    try:
        earned = [turn["reward"] for turn in line["conversation"]["turns"] if "reward" in turn]
    except (KeyError, TypeError):  # it is no conversation
        earned = []
    return found | {f"turns.{i}.reward": x for i, x in enumerate(earned) if type(x) in (int, float)}


def _pairs(one: Mapping[str, float], two: Mapping[str, float]) -> Iterator[tuple[str, float | None, float | None]]:
    return ((name, one.get(name), two.get(name)) for name in dict.fromkeys([*one, *two]))


def _equal(one: float | None, two: float | None, tolerance: float) -> bool:
    if one is None or two is None:
        return one is two
    if math.isnan(one) or math.isnan(two):
        return math.isnan(one) and math.isnan(two)
    return one == two or abs(one - two) <= tolerance * max(abs(one), abs(two))


def _numbers(compared: Iterable[ComparedNumber]) -> list[NumberDifference]:
    by_name: dict[str, list[ComparedNumber]] = {}
    for found in sorted(compared, key=lambda p: (p[0][0], -1 if p[0][1] is None else p[0][1])):
        by_name.setdefault(found[0][2], []).append(found)
    numbers = [NumberDifference(name, found[0][0][0], found[0][0][1], found[0][1], found[0][2],
                                max((_difference(a, b) for _, a, b in found if a is not None and b is not None),
                                    default=None), len(found), sum(a is None or b is None for _, a, b in found))
               for name, found in by_name.items()]
    return sorted(numbers, key=lambda n: (n.step, n.row is None, n.name))


def _difference(one: float, two: float) -> float:
    found = abs(one - two)
    return math.inf if math.isnan(found) else found


def _texts(one: Mapping[Key, Mapping[str, Any]], two: Mapping[Key, Mapping[str, Any]], rows: set[Key]
           ) -> Iterator[TextDifference]:
    """The first difference of each batch, the earliest first."""
    first: dict[str, TextDifference] = {}
    count: dict[str, int] = {}
    for key in sorted(rows, key=lambda k: (k[1], k[2], k[0])):
        parts = ("prompt", "completion")
        part = next((p for p in parts if one[key].get(p) != two[key].get(p)), None)
        if part is None:
            continue
        batch, step, row = key
        count[batch] = count.get(batch, 0) + 1
        if batch not in first:
            texts = str(one[key].get(part, "")), str(two[key].get(part, ""))
            at = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(*texts, strict=False)))
            first[batch] = TextDifference(batch, step, row, part, at, _around(texts[0], at), _around(texts[1], at), 0)
    for batch, text in first.items():
        yield TextDifference(**{**asdict(text), "rows": count[batch]})


def _around(text: str, at: int) -> str:
    start = max(0, at - CONTEXT)
    shown = visible(text[start : at + CONTEXT])
    return f"{'...' if start else ''}{shown}{'...' if at + CONTEXT < len(text) else ''}"


def _plan(folder: Path) -> str:
    return plan_id(read_bytes(str(folder / PLAN)))


def _count(n: int, what: str) -> str:
    return f"{n:,} {what}{'s' * (n != 1)}"


def _extent(n: NumberDifference) -> str:
    """How much numbers differ, and how often."""
    places = _count(n.places, "place")
    if n.largest is None:
        return f"in one of the runs only, at {places}"
    also = f", {n.missing:,} of them in one of the runs only" if n.missing else ""
    return f"largest difference {n.largest:.3g}, at {places}{also}"


def _shown(x: float | None) -> str:
    return "missing" if x is None else repr(x)
