"""Whether two answers mean the same in mathematics.

In: two texts, in LaTeX or plain. Out: true or false, at once, whatever they hold. Rational numbers are compared
exactly; other numbers within 1e-9; formulas with variables by their values at several points, which are the same for
every run. """

from __future__ import annotations

import cmath
import math
import re
from collections.abc import Callable, Sequence
from fractions import Fraction
from random import Random

from rldsl.stdlib.formulas import LONGEST, Tree, Unreadable, clean, read

Number = Fraction | float | complex
POINTS, NEEDED = 6, 3  # at which formulas are compared; at which both must have a value
_SPACE = re.compile(r"(?<!\d)\s+|\s+(?!\d)")  # 2 3 is not 23
BITS = 1 << 14  # of exact numbers; beyond them, floating point
MEMBERS = 64  # of sets that may come in any order


def equal(one: str, other: str) -> bool:
    """Units, full stops and a leading `x =` do not count. 50% is 50 or 0.5."""
    if len(one) > 4 * LONGEST or len(other) > 4 * LONGEST:
        return one.strip() == other.strip()
    one, other = clean(one), clean(other)
    bare = [_SPACE.sub("", t) for t in (one, other)]
    if not all(bare):
        return False
    if bare[0] == bare[1] or all(b.isalpha() and len(b) > 1 for b in bare) and bare[0].casefold() == bare[1].casefold():
        return True
    percent = [t.endswith("%") for t in (one, other)]
    try:
        trees = [read(t.removesuffix("%").strip()) for t in (one, other)]
        if percent[0] != percent[1]:
            part = Tree("/", (trees[percent.index(True)], Tree("number", value=Fraction(100))))
            if _same(part, trees[percent.index(False)]):
                return True
        return _same(*trees)
    except (Unreadable, RecursionError):
        return False


def _same(a: Tree, b: Tree) -> bool:
    if (a.kind == "relation") != (b.kind == "relation"):
        rule, bare = (a, b) if a.kind == "relation" else (b, a)
        return rule.value in (("=",), ("in",)) and _is_name(rule.args[0]) and _same(rule.args[1], bare)
    if a.kind == "relation":
        return _same_relation(a, b)
    if {a.kind, b.kind} <= {"list", "set"} or a.kind == b.kind == "union":
        return _same_members(a.args, b.args)
    if a.kind in _PLACED or b.kind in _PLACED:
        alike = (a.kind, a.value, len(a.args)) == (b.kind, b.value, len(b.args))
        return alike and all(map(_same, a.args, b.args))
    return _same_value(a, b)


_PLACED = ("tuple", "matrix", "list", "set", "union")


def _same_members(a: Sequence[Tree], b: Sequence[Tree]) -> bool:
    if max(len(a), len(b)) > MEMBERS:
        return len(a) == len(b) and all(map(_same, a, b))
    return all(any(_same(x, y) for y in b) for x in a) and all(any(_same(x, y) for x in a) for y in b)


def _same_relation(a: Tree, b: Tree) -> bool:
    if a.value == b.value and all(map(_same, a.args, b.args)):
        return True
    if a.value != b.value or len(a.args) != 2 or a.value == ("in",):
        return False
    ratios = []
    for one, other in _values(Tree("-", a.args), Tree("-", b.args)):
        if not one and not other:
            continue
        if not one or not other:
            return False
        ratios.append(one / other)
    if len(ratios) < 1 or not all(_close(r, ratios[0]) for r in ratios):
        return False
    return a.value in (("=",), ("!=",)) or not isinstance(ratios[0], complex) and ratios[0] > 0


def _is_name(tree: Tree) -> bool:
    """x, or f(x), f(x, y)."""
    if tree.kind in ("*", "tuple"):
        return all(map(_is_name, tree.args))
    return tree.kind == "name"


def _same_value(a: Tree, b: Tree) -> bool:
    return all(_close(x, y) for x, y in _values(a, b))


def _values(a: Tree, b: Tree) -> list[tuple[Number, Number]]:
    """Both formulas at the same points. Unreadable when there are too few points at which both have a value."""
    names = sorted(_names(a) | _names(b))
    if not names:
        return [(value(a, {}), value(b, {}))]
    found = []
    for k in range(POINTS):
        at = {name: _point(name, k) for name in names}
        try:
            found.append((value(a, at), value(b, at)))
        except Unreadable:
            continue
    if len(found) < NEEDED:
        raise Unreadable("no values")
    return found


def _point(name: str, number: int) -> Fraction:
    """Positive at the first points, of either sign at the others."""
    draw = Random(f"{name} {number}")
    found = Fraction(draw.randint(11, 110), 37)
    return -found if number >= NEEDED and draw.random() < 0.7 else found


def _names(tree: Tree) -> set[str]:
    if tree.kind == "name":
        return {str(tree.value)} - _CONSTANTS.keys() - {"∞"}
    return set().union(*map(_names, tree.args)) if tree.args else set()


def _close(a: Number, b: Number) -> bool:
    if a == b:
        return True
    if isinstance(a, Fraction) and isinstance(b, Fraction):
        return False
    a, b = complex(a), complex(b)
    return cmath.isfinite(a) and cmath.isfinite(b) and cmath.isclose(a, b, rel_tol=1e-9, abs_tol=1e-12)


def value(tree: Tree, at: dict[str, Fraction]) -> Number:
    """The number that a formula is when its variables are as `at` says. Unreadable: undefined or too large."""
    if isinstance(tree.value, Fraction):
        return tree.value
    if tree.kind == "name":
        name = str(tree.value)
        return math.inf if name == "∞" else at[name] if name in at else _CONSTANTS[name]
    if tree.kind not in _OPERATIONS:
        raise Unreadable(tree.kind)
    args = [value(x, at) for x in tree.args]
    if tree.kind == "neg":
        return -args[0]
    try:
        found = _OPERATIONS[tree.kind](*args)
        if isinstance(found, Fraction):
            if max(found.numerator.bit_length(), found.denominator.bit_length()) > BITS:
                found = float(found)
        elif not cmath.isfinite(found):
            raise Unreadable("not finite")
        return found.real if isinstance(found, complex) and not found.imag else found
    except (ArithmeticError, ValueError, TypeError):  # a float that is too large, log 0, a complex factorial
        raise Unreadable("undefined") from None


_CONSTANTS: dict[str, Number] = {"π": math.pi, "e": math.e, "i": 1j}


def _mixed(exact: Callable[[Fraction, Fraction], Number]) -> Callable[[Number, Number], Number]:
    """An operation of two exact numbers, or of two floating ones."""
    def run(a: Number, b: Number) -> Number:
        if isinstance(a, Fraction) and isinstance(b, Fraction):
            return exact(a, b)
        return exact(_float(a), _float(b))  # type: ignore[arg-type]  # its operators take floats, too

    return run


def _float(a: Number) -> float | complex:
    return float(a) if isinstance(a, Fraction) else a


def _power(a: Number, b: Number) -> Number:
    if isinstance(a, Fraction) and isinstance(b, Fraction) and b.denominator == 1:
        size = max(a.numerator.bit_length(), a.denominator.bit_length())
        if size * abs(b) <= BITS:
            return a ** int(b)
    return _float(a) ** _float(b)


def _root(a: Number, degree: Number = Fraction(2)) -> Number:
    """The principal one; of a negative number the real one where the degree is odd. Exact where it can be."""
    if isinstance(a, Fraction) and degree == 2 and a >= 0:
        up, down = math.isqrt(a.numerator), math.isqrt(a.denominator)
        if up * up == a.numerator and down * down == a.denominator:
            return Fraction(up, down)
    if isinstance(degree, Fraction) and degree.denominator == 1 and degree % 2 and not isinstance(a, complex) and a < 0:
        return -_root(-a, degree)
    if degree == 2:
        return cmath.sqrt(_float(a))
    return _float(a) ** (1 / _float(degree))


def _factorial(a: Number) -> Number:
    if not isinstance(a, Fraction) or a.denominator != 1 or not 0 <= a <= 170:
        raise Unreadable("factorial")
    return Fraction(math.factorial(int(a)))


def _binomial(n: Number, k: Number) -> Number:
    if not all(isinstance(x, Fraction) and x.denominator == 1 and 0 <= x <= 1000 for x in (n, k)):
        raise Unreadable("binomial")
    return Fraction(math.comb(int(n), int(k)))  # type: ignore[arg-type]  # both are Fractions, as checked above


def _log(a: Number, base: Number | None = None) -> Number:
    """Without a base the natural one, as in mathematics."""
    found = cmath.log(_float(a))
    return found if base is None else found / cmath.log(_float(base))


def _of(function: Callable[[complex], complex]) -> Callable[[Number], Number]:
    return lambda a: function(complex(a))


_OPERATIONS: dict[str, Callable[..., Number]] = {
    "neg": lambda a: -a, "+": _mixed(lambda a, b: a + b), "-": _mixed(lambda a, b: a - b),
    "*": _mixed(lambda a, b: a * b), "/": _mixed(lambda a, b: a / b), "^": _power, "!": _factorial, "abs": abs,
    "sqrt": _root, "root": _root, "binom": _binomial, "log": _log, "ln": _log, "exp": _of(cmath.exp),
    "sin": _of(cmath.sin), "cos": _of(cmath.cos), "tan": _of(cmath.tan), "cot": _of(lambda a: 1 / cmath.tan(a)),
    "sec": _of(lambda a: 1 / cmath.cos(a)), "csc": _of(lambda a: 1 / cmath.sin(a)), "arcsin": _of(cmath.asin),
    "arccos": _of(cmath.acos), "arctan": _of(cmath.atan),
}
