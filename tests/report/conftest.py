"""The browser of the tests of pages. Where there is none, these tests are skipped."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.report.browser import MISSING, Page, program


@pytest.fixture(scope="module")
def browser() -> Iterator[Page]:
    found = program()
    if found is None:
        pytest.skip(MISSING)
    with Page(found) as page:
        yield page
