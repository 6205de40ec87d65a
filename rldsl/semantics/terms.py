"""Typed expressions: what a source expression means once names, levels and constants are resolved.

In: operators and typed arguments. Out: `Term`s, an immutable graph; `program` flattens some of them into a plan
Program. Invariant: a term's level is at least as fine as that of each argument, unless it reduces.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rldsl.diag import Label
from rldsl.plan.expr import Level, Node, Program, Scalar
from rldsl.plan.operators import OPERATORS
from rldsl.semantics.units import PLAIN, Unit
from rldsl.source import Span


@dataclass(frozen=True, slots=True, eq=False)
class Term:
    """One value. op, level, space and attrs are as in `plan.expr.Node`."""

    op: str  # name of the operator
    args: tuple[Term, ...]  # its arguments
    level: Level  # what it has one element for
    space: str  # the index set of its elements: a frame, a row space, a prompt space, or "" for batch
    dtype: str  # "f32", "bool", "id" (tokens), or "text" (constants only)
    span: Span  # where it is computed
    attrs: tuple[tuple[str, Scalar], ...] = ()  # (name, value) of the operator
    used: Span | None = None  # the name that refers to it, if one does
    unit: Unit = PLAIN  # what it counts, and how it grows with the rows

    @property
    def at(self) -> Span:
        """What a message about this value underlines."""
        return self.used or self.span

    @property
    def origin(self) -> tuple[Label, ...]:
        """The second place of such a message: where a name got the value."""
        return (Label(self.span, "computed here"),) if self.used else ()

    @property
    def constant(self) -> bool:
        return self.op == "const"

    @property
    def value(self) -> Scalar:
        """The scalar of a constant."""
        return dict(self.attrs)["value"]

    @property
    def name(self) -> str:
        """The name of an input."""
        return str(dict(self.attrs)["name"])


def const(value: Scalar, span: Span, unit: Unit = PLAIN) -> Term:
    dtype = "bool" if isinstance(value, bool) else "text" if isinstance(value, str) else "f32"
    return Term("const", (), "batch", "", dtype, span, (("value", value),), unit=unit)


def input_(name: str, level: Level, space: str, span: Span, dtype: str = "f32",
           unit: Unit = PLAIN) -> Term:
    return Term("input", (), level, space, dtype, span, (("name", name),), unit=unit)


def _sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x)) if x >= 0 else math.exp(x) / (1 + math.exp(x))


def _power(a: float, b: float) -> Scalar:
    """a ** b. Errors: OverflowError, because an integer of a million digits is never meant and takes minutes."""
    if abs(a) > 1 and b * math.log(abs(a)) > LARGEST:
        raise OverflowError("the result is too large")
    result: float = a**b
    return result


LARGEST = 700.0  # the logarithm of the largest number, about that of floats
# How operators act on constants; the elementwise operators of plan/operators.py.
FOLD: dict[str, Callable[..., Scalar]] = {
    "add": lambda a, b: a + b, "sub": lambda a, b: a - b, "mul": lambda a, b: a * b, "div": lambda a, b: a / b,
    "neg": lambda a: -a, "pow": _power,
    "lt": lambda a, b: a < b, "le": lambda a, b: a <= b, "gt": lambda a, b: a > b, "ge": lambda a, b: a >= b,
    "eq": lambda a, b: a == b, "ne": lambda a, b: a != b,
    "and": lambda a, b: a and b, "or": lambda a, b: a or b, "not": lambda a: not a,
    "exp": math.exp, "log": math.log, "expm1": math.expm1, "log1p": math.log1p, "sqrt": math.sqrt, "abs": abs,
    "min": min, "max": max,
    "sigmoid": _sigmoid, "logsigmoid": lambda a: min(a, 0.0) - math.log1p(math.exp(-abs(a))),
    "where": lambda c, a, b: a if c else b, "stop_gradient": lambda a: a,
}
if wrong := {name for name, operator in OPERATORS.items() if operator.family == "elementwise"} ^ FOLD.keys():
    raise TypeError(f"elementwise operators are those in FOLD: {', '.join(sorted(wrong))}")


def fold(op: str, args: Sequence[Term]) -> Scalar:
    """The result on constants. ArithmeticError or ValueError where there is none."""
    result = FOLD[op](*(a.value for a in args))
    if isinstance(result, complex) or (isinstance(result, float) and not math.isfinite(result)) or (
            isinstance(result, int) and result.bit_length() > 1000):
        raise ValueError("no finite real result")
    return result


def walk(roots: Sequence[Term]) -> list[Term]:
    """All terms below `roots`, arguments first, each once. Long chains need no deep stack."""
    seen: set[int] = set()
    order: list[Term] = []
    open_: list[tuple[Term, bool]] = [(root, False) for root in reversed(roots)]
    while open_:
        term, below = open_.pop()
        if below:
            order.append(term)
        elif id(term) not in seen:
            seen.add(id(term))
            open_.append((term, True))
            open_ += [(arg, False) for arg in reversed(term.args)]
    return order


def program(id_: str, outputs: Sequence[tuple[str, Term]], at: str = "") -> Program:
    """Straight-line form; equal sub-expressions are computed once."""
    nodes: list[Node] = []
    known: dict[tuple[object, ...], int] = {}
    index: dict[int, int] = {}
    for term in walk([t for _, t in outputs]):
        args = tuple(index[id(a)] for a in term.args)
        # repr, for 1 == 1.0 == True
        key = (term.op, args, term.level, term.space, repr(term.attrs))
        if key not in known:
            known[key] = len(nodes)
            nodes.append(Node(term.op, args, term.level, term.space, term.attrs))
        index[id(term)] = known[key]
    return Program(id_, tuple(nodes), tuple((name, index[id(t)]) for name, t in outputs), at)
