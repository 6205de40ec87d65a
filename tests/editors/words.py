"""The words of the language, from the one grammar and the compiler: what every highlighter must know."""

from __future__ import annotations

import re

from lark import Lark

from rldsl.plan.expr import LEVELS
from rldsl.semantics.operators import NAMES
from rldsl.syntax.parse import grammar


def keywords() -> set[str]:
    """Every word that the grammar spells out."""
    terminals = Lark(grammar(), parser="lalr").terminals
    return {t.pattern.value for t in terminals if re.fullmatch(r"[a-z]+", t.pattern.value)}


def units() -> set[str]:
    found = next(t for t in Lark(grammar(), parser="lalr").terminals if t.name == "UNIT").pattern.value
    return set(re.findall(r"[a-z]{2,}", found))


def levels() -> set[str]:
    return {*LEVELS, "any"}


def builtins() -> set[str]:
    return set(NAMES)
