"""Which of many cases of one test `make test` has; `make test-thorough` has the others.

`make test` is for every commit: ten minutes on two idle cores. A test is thorough if it takes more than about two
seconds and shows on more cases, ranks, kills or steps what a quicker test of its file or folder shows in small.
`.ci/run` runs both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest

ParameterSet = type(pytest.param())  # what `pytest.param` makes


def thorough_unless(shown: Callable[..., bool], cases: Iterable[Any]) -> list[Any]:
    """Cases for `parametrize`; those that are not `shown` have the marker `thorough`."""
    rows = [_parameters(case) for case in cases]
    return _marked(rows, [shown(*row.values) for row in rows])


def thorough_between(cases: Iterable[Any]) -> list[Any]:
    """Cases for `parametrize`; those between the first and the last have the marker `thorough`."""
    rows = [_parameters(case) for case in cases]
    return _marked(rows, [n in (0, len(rows) - 1) for n in range(len(rows))])


def _parameters(case: Any) -> Any:
    """As `pytest.param` makes it. A tuple has a value for each name."""
    if isinstance(case, ParameterSet):
        return case
    return pytest.param(*case) if isinstance(case, tuple) else pytest.param(case)


def _marked(rows: Sequence[Any], shown: Sequence[bool]) -> list[Any]:
    assert any(shown), "every run of the suite has some case"
    return [row if one else pytest.param(*row.values, id=row.id, marks=[*row.marks, pytest.mark.thorough])
            for row, one in zip(rows, shown, strict=True)]
