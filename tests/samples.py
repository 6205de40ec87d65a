"""Which of many cases of one test every run of the suite has; `make test-thorough` has the others."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest


def thorough_unless(shown: Callable[..., bool], cases: Iterable[Any]) -> list[Any]:
    """Cases for `parametrize`; those that are not `shown` have the marker `thorough`."""
    rows = [case if isinstance(case, tuple) else (case,) for case in cases]
    assert any(shown(*row) for row in rows), "every run of the suite has some case"
    return [pytest.param(*row, marks=[] if shown(*row) else pytest.mark.thorough) for row in rows]
