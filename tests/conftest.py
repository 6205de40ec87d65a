"""Golden files: `golden(name, text)` compares text with tests/golden/NAME; `pytest --update-golden` rewrites them.
Long files come first (`tests/order.py`)."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cpu import Cpu
from tests.order import longest_first

GOLDEN = Path(__file__).parent / "golden"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="rewrite the golden files from what the code says now")
    parser.addoption("--cpu", type=int, metavar="N", help="print the N tests that used most of the processors")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--cpu"):
        config.pluginmanager.register(Cpu(config.getoption("--cpu")))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items[:] = [items[i] for i in longest_first([item.nodeid for item in items])]


@pytest.fixture
def golden(request: pytest.FixtureRequest):
    def compare(name: str, text: str) -> None:
        file = GOLDEN / name
        if request.config.getoption("--update-golden"):
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
        assert file.is_file(), f"no golden file {name}; run pytest --update-golden and read what it writes"
        assert text == file.read_text(), f"differs from {name}; if the new text is right, run pytest --update-golden"

    return compare
