"""docs/algorithms.md says of each call what it was compared with, and `rows.py` says the same."""

from __future__ import annotations

import ast
import re

import pytest

from tests.oracles.cases import BATCHES
from tests.oracles.page import LINE, PAGE, column, compared, named, written
from tests.oracles.rows import HERE, ROWS, SYSTEMS, TRANSCRIBED, Row

TEXT = PAGE.read_text()
LINES = [(m["variant"], m["call"], (m["column"] or "").strip(" |")) for m in LINE.finditer(TEXT)]
CALLS = {call for _, call, _ in LINES}
PINS = {s.environment: (HERE / f"requirements-{s.environment}.txt").read_text() for s in SYSTEMS.values()}


def test_the_column_is_what_the_rows_say() -> None:
    assert written(TEXT) == TEXT, "run python -m tests.oracles.page, and read what it changes"


@pytest.mark.parametrize(("variant", "call", "found"), LINES)
def test_a_variant_that_names_a_system_was_compared_with_it(variant: str, call: str, found: str) -> None:
    """With its own functions, or our transcription where it has no wheel; and with no system that it does not name."""
    real = named(variant) - set(TRANSCRIBED)
    assert set(compared(call)) == real
    assert ("transcription" in found) == bool(named(variant) & set(TRANSCRIBED))
    assert all(f"{system} {versions[0]}" in found for system, versions in compared(call).items())


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_a_row_is_a_call_of_the_page_on_known_batches(row: Row) -> None:
    if row.same:
        assert row.call in CALLS
    assert row.batches and set(row.batches) <= set(BATCHES)
    assert row.tolerance <= 1e-10 or row.because, "a wider tolerance needs its reason"


def test_what_the_page_says_differs_is_compared_too() -> None:
    differs = {row.system for row in ROWS if not row.same}
    assert differs == {"TRL", "TRL 1.12"} and "ignored `label_smoothing`" in TEXT and "one position after" in TEXT


def oracles(server: str) -> set[str]:
    """The functions that a server offers."""
    tree = ast.parse((HERE / server).read_text())
    (listed,) = (n for n in tree.body if isinstance(n, ast.AnnAssign) and getattr(n.target, "id", "") == "ORACLES")
    return {n.id for n in ast.walk(listed.value) if isinstance(n, ast.Name)} - {"f"}


@pytest.mark.parametrize("system", SYSTEMS)
def test_a_server_offers_what_the_rows_ask_and_nothing_else(system: str) -> None:
    assert {row.oracle for row in ROWS if row.system == system} == oracles(SYSTEMS[system].server)


@pytest.mark.parametrize("server", sorted({s.server for s in SYSTEMS.values()}))
def test_a_server_imports_nothing_of_ours(server: str) -> None:
    text = (HERE / server).read_text()
    assert not re.search(r"^(?:from|import) (?:rldsl|tests)\b", text, re.M)


@pytest.mark.parametrize("environment", PINS)
def test_requirements_are_pinned(environment: str) -> None:
    pins = (HERE / "requirements-torch.txt").read_text() + PINS[environment]
    lines = [line for line in pins.splitlines() if line and not line.startswith(("#", "-r "))]
    assert lines and all(re.fullmatch(r"[A-Za-z0-9_.-]+==[0-9][\w.]*", line) for line in lines)
    assert "torch==2.13.0" in lines and not any("nvidia" in line for line in lines)


def test_versions_are_those_of_the_requirements() -> None:
    assert SYSTEMS["TRL"].version == "1.16.0" and SYSTEMS["TRL 1.12"].version.startswith("1.12.")


@pytest.mark.parametrize(("variant", "systems"), [
    ("paper; TRL (until 1.12)", {"TRL"}), ("verl, OpenRLHF: of the mean", {"verl", "OpenRLHF"}), ("paper", set()),
    ("its repository: γ is a ratio to β", {"SimPO"}), ("NeMo-RL: leave one out", {"NeMo-RL"})])
def test_named(variant: str, systems: set[str]) -> None:
    assert named(variant) == systems


def test_a_wrong_column_would_be_seen() -> None:
    changed = TEXT.replace("| verl 0.9.1 |", "| verl 0.9.0 |", 1)
    assert changed != TEXT and written(changed) == TEXT
    assert column("slime: mean", "no call") == "transcription" and column("paper", "no call") == ""
