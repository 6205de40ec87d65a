"""The parser of the grammar, and its tables as text, so that a later start need not compute them again.

The text is JSON: unlike Lark's own cache it holds no code, so that reading a damaged file can do no harm. A text that
does not fit this grammar, this Lark or this Python is not read.
"""

from __future__ import annotations

import json
import sys
from hashlib import sha256
from importlib import metadata
from typing import Any

from lark import Lark
from lark.grammar import Rule
from lark.lark import PostLex
from lark.lexer import TerminalDef


def make(grammar: str, postlex: PostLex) -> Lark:
    return Lark(grammar, parser="lalr", propagate_positions=True, maybe_placeholders=True, postlex=postlex)


def dump(parser: Lark, grammar: str) -> str:
    """The tables of `parser` as JSON."""
    data, memo = parser.memo_serialize([TerminalDef, Rule])
    for options in (data["options"], data["parser"]["lexer_conf"]):
        options.pop("postlex", None)
    return json.dumps({"key": key(grammar), "data": _lists(data), "memo": _lists(memo)})


def load(text: str, grammar: str, postlex: PostLex) -> Lark | None:
    """The parser that `dump` wrote; None if the text does not belong to this grammar."""
    try:
        found = json.loads(text)
        if found["key"] != key(grammar):
            return None
        parser: Lark = Lark._load_from_dict(_dicts(found["data"]), _dicts(found["memo"]), postlex=postlex)
        return parser
    except (ValueError, KeyError, TypeError, AttributeError, IndexError):  # a damaged file: as if there were none
        return None


def key(grammar: str) -> str:
    """A hash of everything that the tables depend on."""
    made_by = f"{metadata.version('lark')} {sys.version_info[:2]} {grammar}"
    return sha256(made_by.encode()).hexdigest()


def _lists(value: Any) -> Any:
    """Dicts as lists of pairs, since the keys of JSON objects are texts and those of the tables are numbers too."""
    if isinstance(value, dict):
        return {"pairs": [[_lists(k), _lists(v)] for k, v in value.items()]}
    return [_lists(v) for v in value] if isinstance(value, (list, tuple)) else value


def _dicts(value: Any) -> Any:
    if isinstance(value, dict):
        return {_dicts(k): _dicts(v) for k, v in value["pairs"]}
    return [_dicts(v) for v in value] if isinstance(value, list) else value
