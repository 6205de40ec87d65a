"""Which of many cases of one test every run of the suite has; `make test-thorough` has the others."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest


def thorough_unless(shown: Callable[..., bool], cases: Iterable[Any]) -> list[Any]:
    """Cases for `parametrize`; those that are not `shown` have the marker `thorough`."""
    rows = [case if isinstance(case, tuple) else (case,) for case in cases]
    return _marked(rows, [shown(*row) for row in rows])


def thorough_between(cases: Iterable[Any]) -> list[Any]:
    """Cases for `parametrize`; those between the first and the last have the marker `thorough`."""
    rows = [case if isinstance(case, tuple) else (case,) for case in cases]
    return _marked(rows, [n in (0, len(rows) - 1) for n in range(len(rows))])


def _marked(rows: Sequence[tuple[Any, ...]], shown: Sequence[bool]) -> list[Any]:
    assert any(shown), "every run of the suite has some case"
    return [pytest.param(*row, marks=[] if one else pytest.mark.thorough) for row, one in zip(rows, shown, strict=True)]
