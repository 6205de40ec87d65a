"""What the verifier guarantees and is missing is an internal error with its code."""

from __future__ import annotations

import pytest

from rldsl.diag import InternalError, present


def test_a_missing_value_is_an_internal_error() -> None:
    with pytest.raises(InternalError, match="RL0699 .*there is no shard of actor"):
        present(None, "shard of actor")


@pytest.mark.parametrize("value", [0, "", False, (), 3])
def test_a_value_is_returned_as_it_is(value: object) -> None:
    assert present(value, "value") is value
