"""docs/families.md says of every architecture of the installed transformers what runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from rldsl.models.vision import FAMILIES as VISION_FAMILIES
from tests.families.table import COLUMNS, VISION, YES, architectures, page, row

PAGE = (Path(__file__).parents[2] / "docs/families.md").read_text()
TABLE = PAGE.split("## Families that read images")[0]
LINES = {line.split(" | ")[0].removeprefix("| "): line for line in TABLE.splitlines() if line.startswith("| ")}
OF_ISSUE = ("gemma3_text", "gemma4_text", "gpt_oss", "deepseek_v3", "qwen3_next", "qwen3_5_text", "llama4_text", "glm",
            "glm4", "glm4_moe", "minimax", "minimax_m2")


def cells(family: str) -> dict[str, str]:
    return dict(zip(COLUMNS, LINES[family].strip("| ").split(" | ")[1:]))


def test_every_architecture_has_a_row_or_a_reason():
    without = {line.split(":")[0].removeprefix("- ") for line in PAGE.splitlines() if line.startswith("- ")}
    assert [f for f in architectures() if f not in LINES and f not in without] == []


def test_families_that_read_images_have_rows():
    assert VISION in PAGE
    assert all(family in VISION.split("`tests/images`")[0] for family in VISION_FAMILIES)


def test_most_of_those_that_are_built_run_with_dp_and_pp():
    ran = [f for f in architectures() if f in LINES]
    both = [f for f in ran if all(cells(f).get(c) == YES for c in ("log-probs", "train", "dp", "pp"))]
    assert len(both) >= 0.9 * len(ran), sorted(set(ran) - set(both))


@pytest.mark.parametrize("family", OF_ISSUE)
def test_families_that_people_ask_for_have_tp(family):
    assert cells(family)["tp"] == YES and cells(family)["train"] == YES


@pytest.mark.parametrize("family", ["llama", "qwen3_5_text", "bloom", "bert"])
def test_the_page_says_what_is_found(family):
    assert LINES[family] in page({family: row(family)}).splitlines()
