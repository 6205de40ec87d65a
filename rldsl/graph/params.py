"""Parameters of a program: declared type, default, and the value that --set or a placement file gives.

In: `param` declarations, --set values, `param`s of a placement file. Out: one constant for each, of the declared type
(else the default's), with its unit. A value has exactly one source: --set, then the placement file, then the default.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from rldsl.diag import Label
from rldsl.plan.expr import Scalar
from rldsl.semantics.errors import BAD, Bad, suggest
from rldsl.semantics.expressions import ExpressionBuilder
from rldsl.semantics.options import shown
from rldsl.semantics.scope import Scope
from rldsl.semantics.terms import Term, const
from rldsl.semantics.units import UNITS, Unit, differ
from rldsl.source import COMMAND_LINE, SourceFile, Span
from rldsl.syntax import ast

TYPES: dict[str, type] = {"number": float, "int": int, "text": str, "bool": bool}
SHOWN = {bool: "true or false", int: "an integer", float: "a number", str: "a string"}
_NUMBER = re.compile(r"([+-]?[0-9.][0-9_.]*(?:[eE][+-]?[0-9]+)?)([kM]?)")


def param(decl: ast.Param, sets: Mapping[str, Scalar], placed: Mapping[str, ast.Param], exprs: ExpressionBuilder,
          scope: Scope, program: str) -> Term | Bad:
    """The value of one parameter. placed: the placement file's. program: the file to name in advice.
    Errors: RL0101 unknown type, RL0113 no value, RL0205 wrong type, RL0215 neither type nor default, RL0218 wrong
    unit."""
    name = decl.name.name
    kind = _kind(decl, exprs)
    if isinstance(kind, Bad) or name in placed and isinstance(_kind(placed[name], exprs), Bad):
        return BAD
    if kind is None and decl.default is None:
        return exprs.errors.add("RL0215", f"the parameter `{name}` has neither a type nor a default", decl.span,
                                help=f"write `param {name}: number` or `param {name} = ...`")
    source = decl.default
    if source is None and name in placed:
        source = placed[name].default
    default: Term | None = None
    if source is not None:
        found = _default(name, source, kind, exprs, scope)
        if isinstance(found, Bad):
            return BAD
        default = found
    if name in sets:
        return _given(decl, sets[name], kind, default, exprs)
    if default is not None:
        return default
    file = program if program.endswith(".rlf") else "FILE"
    return exprs.errors.add("RL0113", f"the parameter `{name}` has no value", decl.name.span, "it has no default",
                            help=f"`rlc compile {file} --set {name}=...`")


def supplied(program: Sequence[ast.Declaration], placement: Sequence[ast.Declaration]) -> dict[str, ast.Param]:
    """The `param`s of a placement file that give a value to one that the program declares without."""
    bare = {d.name.name for d in program if isinstance(d, ast.Param) and d.default is None}
    return {d.name.name: d for d in placement if isinstance(d, ast.Param) and d.name.name in bare}


def _kind(decl: ast.Param, exprs: ExpressionBuilder) -> type | None | Bad:
    """The declared type; None where none is."""
    if decl.type is None:
        return None
    return TYPES.get(decl.type.name) or exprs.errors.add("RL0101", f"unknown type `{decl.type.name}`", decl.type.span,
                                                         help=suggest(decl.type.name, TYPES))


def _default(name: str, tree: ast.Expr, kind: type | None, exprs: ExpressionBuilder, scope: Scope) -> Term | Bad:
    """The constant of the program's text, as the declared type."""
    value = exprs.constant(tree, scope)
    if isinstance(value, Bad) or kind is None:
        return value
    typed = fit(kind, value.value)
    if typed is None:
        return exprs.errors.add("RL0205", f"`{name}` must be {SHOWN[kind]}", tree.span,
                                f"this is {shown(value.value)}")
    return const(typed, value.span, value.unit)


def _given(decl: ast.Param, given: Scalar, kind: type | None, default: Term | None,
           exprs: ExpressionBuilder) -> Term | Bad:
    """What --set gave, converted to the declared type, else to the default's; its unit must be the default's."""
    name = decl.name.name
    like = kind or (type(default.value) if default is not None else str)
    converted, unit = convert(given, like)
    if converted is None:
        because = f"the default is {shown(default.value)}" if kind is None and default is not None else \
            f"declared as `{decl.type.name}`" if decl.type is not None else ""
        return exprs.errors.add("RL0205", f"--set {name}={given} is not {SHOWN[like]}", _typed(name, given),
                                labels=(Label(decl.span, because),))
    usual = default.unit.word if default is not None else ""
    if unit and usual and differ(unit, usual):
        return exprs.errors.add("RL0218", f"--set {name}={given} counts {unit}, and `{name}` counts {usual}",
                                _typed(name, given), f"this is in {unit}",
                                labels=(Label(decl.span, f"the default is in {usual}"),), help=f"give it in {usual}")
    return const(converted, decl.span, Unit(unit or usual))


def fit(kind: type, value: Scalar) -> Scalar | None:
    """`value` as `kind`: whole numbers are numbers too, and a number that is whole is a whole number; else None."""
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if kind is float and number:
        return float(value)
    if kind is int and number:
        return int(value) if isinstance(value, int) or float(value).is_integer() else None
    return value if kind in (str, bool) and isinstance(value, kind) else None


def convert(given: Scalar, kind: type) -> tuple[Scalar | None, str]:
    """A value of the command line as `kind`, and its unit. Numbers as in a program: 1_000, 4k, 1e-6, 512 prompts."""
    text = str(given).strip()
    if kind is str:
        return str(given), ""
    if kind is bool:
        return {"true": True, "false": False}.get(text.lower()), ""
    if isinstance(given, bool):
        return None, ""
    words = text.split()
    unit = words[1] if len(words) == 2 and words[1] in UNITS else ""
    match = _NUMBER.fullmatch(words[0] if unit else text)
    if match is None:
        return None, ""
    try:
        digits = match[1].replace("_", "")
        number = int(digits) if digits.lstrip("+-").isdigit() else float(digits)
    except ValueError:
        return None, ""
    return fit(kind, number * {"": 1, "k": 1_000, "M": 1_000_000}[match[2]]), unit


def _typed(name: str, given: Scalar) -> Span:
    """The value where it stands on the command line."""
    text = f"--set {name}={given}"
    return Span(SourceFile(COMMAND_LINE, text), text.index("=") + 1, len(text))
