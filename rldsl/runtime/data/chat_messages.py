"""Chat messages, whatever the format of the file that they come from.

In: what a reader makes of a value. Out: the value as it was written: Arrow gives every message of a column, and every
object in it, all the fields that any of them has, and null where this one has none.
"""

from __future__ import annotations

from typing import Any


def without_nulls(value: Any) -> Any:
    """Messages, or a value in them, without fields that are null. So chat templates do not see them, and messages with
    the same meaning are equal."""
    if isinstance(value, dict):
        return {k: without_nulls(v) for k, v in value.items() if v is not None}
    return [without_nulls(v) for v in value] if isinstance(value, list) else value
