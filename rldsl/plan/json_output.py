"""Results of commands as JSON. In: records, lists and numbers. Out: JSON text, the same from every command."""

from __future__ import annotations

import json
import math
from typing import Any


def json_output(result: Any) -> str:
    """NaN and the infinities, which JSON does not have, become null."""
    return json.dumps(_finite(result), indent=1, ensure_ascii=False, allow_nan=False)


def _finite(x: Any) -> Any:
    if isinstance(x, dict):
        return {key: _finite(value) for key, value in x.items()}
    if isinstance(x, list | tuple):
        return [_finite(value) for value in x]
    return None if isinstance(x, float) and not math.isfinite(x) else x
