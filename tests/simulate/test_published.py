"""The page of published runs says what the benchmark has and predicts; all rows are predicted by the benchmark alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.published.__main__ import DENSE, MOE
from benchmarks.published.prediction import predict, workplace
from benchmarks.published.rows import ROWS

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


@pytest.mark.parametrize("row", [r for r in ROWS if r.name in ("llama8b-h100-16", "llama8b-gb200-8-off")],
                         ids=lambda r: r.name)
def test_a_prediction_is_the_one_on_the_page(row, tmp_path: Path) -> None:
    with workplace(tmp_path) as folder:
        found = predict(row, folder)
    cells = table()[ROWS.index(row)]
    assert cells[2:4] == [f"{found.seconds:.0f} s", f"{found.ratio:.2f}"]
    assert cells[5] == f"{found.throughput:,.0f}"
