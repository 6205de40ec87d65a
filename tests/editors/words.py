"""The words of the language, from the one grammar and the compiler: what every highlighter must know."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from lark.lexer import TerminalDef

from rldsl.plan.expr import LEVELS
from rldsl.plan.operators import BUILTINS
from rldsl.syntax import parse


def terminals() -> list[TerminalDef]:
    return parse._parser().terminals


def keywords() -> set[str]:
    """Every word that the grammar spells out."""
    return {m[1] for t in terminals() if (m := re.fullmatch(r"([a-z]+)(\(\?=.*\))?", t.pattern.value))}


def units() -> set[str]:
    found = next(t for t in terminals() if t.name == "UNIT").pattern.value
    return set(re.findall(r"[a-z]{2,}", found))


def levels() -> set[str]:
    return {*LEVELS, "any"}


def builtins() -> tuple[str, ...]:
    return tuple(BUILTINS)


# ------------------------------------------------------------------------------------------- what editors mark

MARKED = ("keyword.", "storage.", "constant.language.", "support.type.")  # scopes of TextMate for words
GROUPS = ("Keyword", "Include", "Declaration", "Word", "Level", "Unit", "Boolean")  # rlf... of Vim for words


def in_patterns(patterns: Iterable[str]) -> set[str]:
    """The whole words that regular expressions spell out."""
    plain = (re.sub(r"\[[^\]]*\]", " ", re.sub(r"\\z[se]|\\.", " ", p)) for p in patterns)
    return {w for p in plain for w in re.findall(r"[a-z][a-z0-9_]*", p)}


def textmate(grammar: Any) -> Iterator[str]:
    """The patterns of a TextMate grammar that give a word a scope of words, not of names or functions."""
    if isinstance(grammar, list):
        for item in grammar:
            yield from textmate(item)
    elif isinstance(grammar, dict):
        scopes = [grammar.get("name", ""), *(c["name"] for c in grammar.get("captures", {}).values())]
        if "match" in grammar and any(s.startswith(MARKED) for s in scopes):
            yield grammar["match"]
        for value in grammar.values():
            yield from textmate(value)


def vim(text: str) -> list[str]:
    """The patterns and lists of Vim's groups of words."""
    return re.findall(rf"^syntax (?:match|keyword) rlf(?:{'|'.join(GROUPS)}) (.*)$", text, re.MULTILINE)


def pygments(tokens: Mapping[str, list[Any]]) -> list[str]:
    """The patterns of a lexer; it has no list of functions."""
    return [rule[0] for rules in tokens.values() for rule in rules if isinstance(rule, tuple)]
