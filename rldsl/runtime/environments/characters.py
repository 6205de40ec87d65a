"""Halves of characters (lone surrogates), which Python and JSON allow in a string, and no tokenizer encodes."""

from __future__ import annotations

import json
import re
from typing import Any

HALF = re.compile("[\ud800-\udfff]")


def half_in(value: Any) -> str:
    """The first half of a character in the strings of a JSON value, as an escape: "\\udcff"; "" if there is none."""
    found = HALF.search(json.dumps(value, ensure_ascii=False))
    return f"\\u{ord(found[0]):04x}" if found else ""
