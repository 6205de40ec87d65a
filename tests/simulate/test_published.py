"""The page of published runs says what the benchmark has and predicts; all rows are predicted by the benchmark alone."""

from __future__ import annotations

import re
from itertools import combinations
from pathlib import Path

import pytest

from benchmarks.published.__main__ import DENSE, MOE, largest_ratio_of_releases, order, within
from benchmarks.published.prediction import Prediction, predict, workplace
from benchmarks.published.rows import ROWS
from benchmarks.published.searched import line, search
from rldsl.simulate import Timeline

PAGE = Path(__file__).parents[2] / "docs/published.md"


def table() -> list[list[str]]:
    """The cells of the rows of "Steps"."""
    text = PAGE.read_text().split("## Steps")[1].split("\n## ")[0]
    lines = [line for line in text.splitlines() if line.startswith("| ")][1:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_every_row_is_on_the_page_with_what_was_published() -> None:
    found = table()
    assert len(found) == len(ROWS)
    for cells, row in zip(found, ROWS, strict=True):
        device = {"h100": "H100", "h100-pairs": "H100", "gb200": "GB200"}[row.cluster]
        assert cells[0].lower().startswith(row.model) and f"{row.gpus} {device}" in cells[0]
        assert ("one step ahead" in cells[0]) == bool(row.lag)
        assert cells[1] == f"{row.seconds:g} s" and float(cells[4].replace(",", "")) == row.throughput
        assert abs(float(cells[2].removesuffix(" s")) / row.seconds - float(cells[3])) < 0.012


def test_the_numbers_of_rows_within_their_gates_are_those_of_the_table() -> None:
    ratios = [(row.moe, float(cells[3])) for cells, row in zip(table(), ROWS, strict=True)]
    dense = sum(abs(ratio - 1) <= DENSE for moe, ratio in ratios if not moe)
    experts = sum(abs(ratio - 1) <= MOE for moe, ratio in ratios if moe)
    said = " ".join(PAGE.read_text().split())
    assert f"{dense} of {sum(not moe for moe, _ in ratios)} dense rows" in said
    assert f"and {experts} of {sum(moe for moe, _ in ratios)} rows of mixtures" in said


def test_the_order_on_the_page_is_that_of_the_table() -> None:
    """Tenths of a second are enough: no two predicted steps are nearer."""
    plan = None  # of which nothing is read
    rows = [Prediction(row, plan, Timeline(float(cells[2].removesuffix(" s")), (), (), (), (), 0))
            for cells, row in zip(table(), ROWS, strict=True)]
    apart = largest_ratio_of_releases()
    inside = [p for p in rows if within(p)]
    said = PAGE.read_text()
    assert f"| all pairs | {order(rows):.3f} | {order(inside):.3f} |" in said
    assert (f"| pairs whose published steps differ by more than {apart - 1:.0%} | ".replace("%", " %")
            + f"{order(rows, apart):.3f} | {order(inside, apart):.3f} |") in said
    assert f"the {len(inside)} within their gates" in said and f"all {len(rows)} rows" in said


def test_the_pairs_in_the_wrong_order_are_on_the_page() -> None:
    cells = {row.name: float(c[2].removesuffix(" s")) for c, row in zip(table(), ROWS, strict=True)}
    wrong = {(min(a, b, key=lambda r: r.seconds).name, max(a, b, key=lambda r: r.seconds).name)
             for a, b in combinations(ROWS, 2) if (a.seconds - b.seconds) * (cells[a.name] - cells[b.name]) < 0}
    said = PAGE.read_text().split("## The order of the steps")[1].split("\n## ")[0]
    assert set(re.findall(r"^\| `(\S+)` \| `(\S+)` \|", said, re.M)) == wrong


def test_what_the_throughput_says_of_the_steps() -> None:
    """"At most 0.5 %", "2 %" and "16 %" on the page."""
    uneven = {row.name: row.unevenness for row in ROWS if abs(row.unevenness - 1) > 0.005}
    assert {name: f"{x - 1:.0%}" for name, x in uneven.items()} == {
        "qwen30b-h100-32-off": "2%", "qwen235b-gb200-128-off": "2%", "qwen235b-h100-256-off": "16%"}


@pytest.mark.parametrize("name", ["llama8b-gb200-8", "llama8b-gb200-8-off"])
def test_what_would_be_better_is_what_the_search_finds(name: str, tmp_path: Path) -> None:
    row = next(r for r in ROWS if r.name == name)
    with workplace(tmp_path) as folder:
        assert line(predict(row, folder), search(row, folder, 600.0, row.lag)) in PAGE.read_text()


def test_what_would_be_better_is_said_of_every_row() -> None:
    said = PAGE.read_text().split("## What would be better")[1].split("\n## ")[0]
    rows = [x.split("|") for x in said.splitlines() if x.startswith("| `")]
    assert [x[1].strip(" `") for x in rows] == [r.name for r in ROWS]
    for cells in rows:
        assert float(cells[4].strip(" %")) <= 2 and float(cells[3].strip(" s")) <= float(cells[2].strip(" s"))


@pytest.mark.parametrize("row", [r for r in ROWS if r.name in ("llama8b-h100-16", "llama8b-gb200-8-off")],
                         ids=lambda r: r.name)
def test_a_prediction_is_the_one_on_the_page(row, tmp_path: Path) -> None:
    with workplace(tmp_path) as folder:
        found = predict(row, folder)
    cells = table()[ROWS.index(row)]
    assert cells[2:4] == [f"{found.seconds:.1f} s", f"{found.ratio:.2f}"]
    assert cells[5] == f"{found.throughput:,.0f}"
