"""The names of other systems in docs/coming-from/*.md are names of these systems."""

from __future__ import annotations

import json
import re

import pytest

from tests.oracles.options import FILE, PAGES, SOURCES, asked, script
from tests.oracles.page import PAGE

RECORDED = json.loads(FILE.read_text())


def test_every_page_is_held_to_its_system() -> None:
    assert {p.stem for p in PAGES.glob("*.md")} == set(SOURCES) == set(RECORDED)


@pytest.mark.parametrize("page", SOURCES)
def test_the_system_has_every_option_of_the_page(page: str) -> None:
    """Where this fails: make oracles RECORD=--record asks the installed systems."""
    assert asked(page) == RECORDED[page] and len(asked(page)) > (25 if page == "real" else 40)


@pytest.mark.parametrize(("page", "names"), [
    ("trl", {"loss_type", "vespo", "scale_rewards", "ld_alpha"}), ("verl", {"grpo_passk", "kl_ctrl.type", "clip_ratio_c"}),
    ("openrlhf", {"--algo.kl.init_coef", "reinforce", "--actor.adam.lr"}),
    ("real", {"allocation_mode", "ppo.kl_ctl", "packed_ref_logprobs"})])
def test_names_values_and_flags_are_asked(page: str, names: set[str]) -> None:
    assert names <= set(asked(page))


def test_the_script_of_real_is_asked() -> None:
    found = script((PAGES / "real.md").read_text())
    assert len(found) > 14 and {"ppo.kl_ctl=0.1", "allocation_mode=manual"} <= set(found)
    assert all(re.fullmatch(r"[\w.]+=\S+", word) for word in found)


def test_the_algorithms_are_found_by_these_names() -> None:
    """The table at the end of docs/algorithms.md has names of the pages, each under its system."""
    rows = re.findall(r"^\| (\[.+) \| (.*)\| (.*)\| (.*)\|$", PAGE.read_text().partition("## Names of other")[2], re.M)
    assert len(rows) > 25
    for _, *cells in rows:
        for page, cell in zip(("trl", "verl", "openrlhf"), cells, strict=True):
            assert set(re.findall(r"`([^`]+)`", cell)) <= set(asked(page))
