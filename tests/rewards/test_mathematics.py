"""When two answers mean the same in mathematics, and that no text takes long."""

from __future__ import annotations

import time
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rldsl.stdlib.formulas import clean, read
from rldsl.stdlib.mathematics import equal, value

SAME = [
    # numbers
    ("1/2", "0.5"), ("\\frac{1}{2}", "0.50"), ("\\frac12", "\\dfrac{1}{2}"), ("-\\frac{3}{4}", "\\frac{-3}{4}"),
    ("1,234", "1234"), ("10,000.50", "10000.5"), ("1{,}000", "1000"), ("1e3", "1000"), ("2.5e-3", "0.0025"),
    ("-5", "−5"), ("3\\frac{1}{2}", "7/2"), ("1 1/2", "1.5"), ("-1 1/2", "-1.5"), ("5!", "120"),
    ("\\binom{5}{2}", "10"), ("1011_2", "11"), ("2^{10}", "1024"), ("2**10", "2^10"), ("2 \\cdot 3^{2}", "18"),
    ("6 \\times 7", "42"), ("6 \\div 4", "1.5"), (".5", "0.5"),
    ("12345678901234567890123", "12345678901234567890122 + 1"),
    # roots, constants, functions
    ("2\\sqrt{2}", "\\sqrt{8}"), ("sqrt(2)/2", "1/sqrt(2)"), ("√2", "\\sqrt2"), ("\\sqrt[3]{-8}", "-2"),
    ("\\sqrt[4]{16}", "2"), ("\\frac{1+\\sqrt5}{2}", "0.5+\\sqrt{5}/2"), ("8^{1/3}", "2"), ("\\frac{\\pi}{4}", "π/4"),
    ("pi/4", "\\pi/4"), ("2π", "\\pi 2"), ("\\sin(\\pi/6)", "1/2"), ("\\sin^2 x + \\cos^2 x", "1"), ("\\log_2 8", "3"),
    ("\\ln e^2", "2"), ("e^{i\\pi}", "-1"), ("2+3i", "3i+2"), ("|-3|", "3"), ("\\left|−3\\right|", "3"),
    ("\\tan 0", "0"), ("\\exp(0)", "1"),
    # percents, units, signs around
    ("50\\%", "0.5"), ("50%", "50"), ("50 percent", "50%"), ("5 \\text{ cm}", "5"), ("5 cm", "5"),
    ("12 square units", "12"), ("90^\\circ", "90"), ("90°", "90"), ("\\$10", "10 dollars"), ("$5$.", "5"),
    ("\\(5\\)", "5"), ("\\[ 5 \\]", "5"), ("20\\text{ cm}^2", "20"),
    # variables
    ("x^2+2x+1", "(x+1)^2"), ("(x-y)(x+y)", "x^2-y^2"), ("xy", "yx"), ("\\frac{x}{2}+\\frac x2", "x"), ("x=5", "5"),
    ("f(x)=3x", "3x"), ("x_1 + x_2", "x_{2}+x_{1}"), ("\\alpha\\beta", "\\beta \\alpha"), ("2^{x+1}", "2 \\cdot 2^x"),
    # relations
    ("y=2x+1", "2x-y+1=0"), ("x>5", "5<x"), ("x \\geq 2", "2x>=4"), ("1<x<5", "5>x>1"), ("x \\neq 0", "x!=0"),
    ("x \\in [1,2]", "[1,2]"),
    # several things
    ("(1, 2)", "( 1.0 , 4/2 )"), ("[0,\\infty)", "\\left[0, \\infty\\right)"), ("\\{1,2\\}", "{2, 1}"),
    ("1, 2", "2, 1"), ("3\\text{ and }4", "4,3"), ("1\\pm\\sqrt{2}", "1-\\sqrt2, 1+\\sqrt 2"),
    ("\\{1,1,2\\}", "\\{1,2\\}"), ("(-\\infty, 2)\\cup(3,4]", "(3,4]\\cup(-\\infty,2)"),
    ("x = 3 \\text{ or } x = 4", "x=4, x=3"), ("((1,2),3)", "((1,2),6/2)"),
    ("\\begin{pmatrix} 1 & 2 \\\\ 3 & 4\\end{pmatrix}", "\\begin{bmatrix}1&2\\\\3&4.0\\end{bmatrix}"),
    # words
    ("Tuesday", "tuesday"), ("\\text{Yes}", "yes"), ("\\text{(A)}", "A"), ("\\textbf{B}", "B"),
]
DIFFERENT = [
    ("1/3", "0.333"), ("3.14", "\\pi"), ("1.41421356", "\\sqrt2"), ("5", "-5"), ("0", "1e-300"),
    ("10^{-30}", "10^{-31}"), ("1", "1.0000000001"), ("12345678901234567890123", "12345678901234567890124"),
    ("1234", "1,2,3,4"), ("∞", "-∞"), ("1e300*1e300", "1e301*1e300"), ("(1,2)", "(2,1)"), ("[1,2]", "(1,2)"),
    ("(1,2)", "(1,2,3)"), ("1,2", "1,2,3"), ("\\{1\\}", "\\{2\\}"), ("(1,2)", "\\{1,2\\}"),
    ("\\begin{pmatrix}1&2\\end{pmatrix}", "\\begin{pmatrix}1\\\\2\\end{pmatrix}"), ("(0,1)\\cup(2,3)", "(0,1)"),
    ("x", "y"), ("sqrt(x^2)", "x"), ("1/x", "2/x"), ("x^2", "x^3"), ("x_1", "x_2"), ("2^x", "x^2"), ("a", "A"),
    ("x<5", "x>5"), ("x<5", "x<=5"), ("x<5", "x<6"), ("x=1", "x!=1"), ("y=2x", "y=3x"), ("5", "x=6"), ("x=5", "y=5"),
    ("x<5", "5"), ("live", "evil"), ("dog", "god"), ("yes", "no"), ("A", "B"), ("50%", "0.05"), ("50%", "5"),
    ("1/0", "1/0+0"), ("0/0", "1"), ("", ""), ("", "1"), ("$", "$"), ("{}", "0"), ("(((", "1"), ("1)", "1 "),
    ("^", "2"), ("\\frac{1}", "1"), ("\\unknown{3}", "3"), ("__import__('os')", "1"), ("1 if 1 else 2", "1"),
    ("lambda: 1", "1"), ("log(0)", "0"), ("(-1)!", "1"), ("0^{-1}", "0"), ("9_2", "9"), ("3_99", "3"), ("2 3", "23"),
]
NINES = "9" * 1000
HOSTILE = [
    "10**10**10", "9^9^9^9^9", "10**10**10+1", "((1+1)^(9999))^9999", "2^{2^{2^{2^{2^2}}}}", "(((9!)!)!)!",
    "170!" * 100, "99!*" * 500 + "1", "(" * 900 + "1" + ")" * 900, "{" * 900 + "1" + "}" * 900, "\\sqrt{" * 300,
    "\\frac{" * 400, "\\frac" * 300 + "1", "-" * 1900 + "1", "x^" * 900 + "x", "1^" * 900 + "1", "|" * 1000,
    "1!" + "!" * 1900, NINES + "^" + NINES, f"1/{NINES}+" * 1 + f"1/{NINES[:-1]}7", "1e999", "1e-999999999999",
    "9" * 100_000, "\\boxed{" * 100_000, "a" * 1_000_000, " " * 1_000_000 + "1", "1," * 900 + "1", "x," * 900 + "y",
    ",".join(f"x+{i}" for i in range(300)), "(1+x)^{1000}" * 100, "\\binom{1000}{500}" * 50, "x^{1/3}^{1/7}" * 50,
    "\\text{" * 300, "1/(x-x)", "(x+1)^{4000}", "\\left(" * 500, "\\begin{pmatrix}" * 200, "1_" * 500 + "2",
    "sin " * 500 + "x", "\\sin^" * 300 + "x", "±" * 50 + "1", "1±1" * 20, "1\\pm" * 500 + "1", "π" * 1900, "\\\\" * 900,
    "\0" * 100, "\ud800", "١٢٣", "1" + "\n" * 1000 + "1", "²" * 900,
]


@pytest.mark.parametrize("one, other", SAME)
def test_the_same(one: str, other: str) -> None:
    assert equal(one, other) and equal(other, one)


@pytest.mark.parametrize("one, other", DIFFERENT)
def test_different(one: str, other: str) -> None:
    assert not equal(one, other) and not equal(other, one)


@pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
def test_hostile_texts_are_judged_at_once(text: str) -> None:
    begun = time.process_time()
    assert not equal(text, "7") and not equal("7", text) and not equal(text, "x+7")
    equal(text, text[:-1])
    assert time.process_time() - begun < 20  # CPU seconds, where backtracking would take minutes


@settings(max_examples=300, deadline=None)
@given(st.text(alphabet="0123456789+-*/^!.,()[]{}|\\xyfracsqt_=<>%$& ", max_size=40), st.text(max_size=20))
def test_any_text_is_judged(one: str, other: str) -> None:
    assert equal(one, other) == equal(other, one)
    assert not one.strip("$. ") or "\\" in one or "$" in one or not clean(one) or equal(one, one)


def formulas() -> st.SearchStrategy[tuple[str, Fraction]]:
    """A formula of rational numbers with its value by Python's own arithmetic."""
    def joined(pair: tuple) -> tuple[str, Fraction]:
        (a, x), (b, y), sign = pair
        if sign == "/" and not y:
            sign = "+"
        result = {"+": lambda: x + y, "-": lambda: x - y, "*": lambda: x * y, "/": lambda: x / y}[sign]()
        text = f"\\frac{{{a}}}{{{b}}}" if sign == "/" else f"({a}) {sign.replace('*', chr(92) + 'cdot')} ({b})"
        return text, result

    numbers = st.integers(-50, 50).map(lambda n: (str(n), Fraction(n)))
    return st.recursive(numbers, lambda inner: st.tuples(inner, inner, st.sampled_from("+-*/")).map(joined),
                        max_leaves=8)


@settings(max_examples=200, deadline=None)
@given(formulas())
def test_exact_values(pair: tuple[str, Fraction]) -> None:
    text, wanted = pair
    assert value(read(clean(text)), {}) == wanted
    assert equal(text, str(wanted)) and not equal(text, str(wanted + Fraction(1, 10**30)))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(-5, 5), min_size=1, max_size=4), st.lists(st.integers(-5, 5), min_size=1, max_size=4),
       st.booleans())
def test_formulas_with_a_variable_agree_with_sympy(one: list[int], other: list[int], change: bool) -> None:
    sympy = pytest.importorskip("sympy")
    x = sympy.Symbol("x")
    factors = [sum(c * x**i for i, c in enumerate(cs)) for cs in (one, other)]
    whole = sympy.expand(factors[0] * factors[1]) + (sympy.Rational(1, 10**12) * x if change else 0)
    text = f"({sympy.latex(factors[0])}) ({sympy.latex(factors[1])})"
    assert equal(text, sympy.latex(whole)) == (sympy.simplify(factors[0] * factors[1] - whole) == 0)
