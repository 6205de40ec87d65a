"""`math_equal` of the library against the package math-verify, on answers that are made on the spot.

    python -m benchmarks.math_graders [SEED] [COUNT]

Each answer has a known truth: it is the reference written in another way, or something else. The table says per family
how often each grader is right, and the answers on which the two disagree follow. Needs `pip install 'rldsl[math]'`.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from random import Random

from rldsl.stdlib.rewards import math_equal, math_verify


@dataclass(frozen=True)
class Case:
    """An answer to judge."""

    family: str      # of the ways of writing
    answer: str      # the reference
    completion: str  # what a model wrote
    right: bool      # whether both mean the same


def integers(r: Random) -> tuple[str, str, str]:
    n = r.randint(-5000, 10**6)
    return str(n), r.choice([f"{n:,}", f"{n}.0", f"{n}", f"+{n}" if n > 0 else f"{n}"]), str(n + r.choice([-1, 1, 10]))


def fractions(r: Random) -> tuple[str, str, str]:
    a, b, k = r.randint(1, 60), r.randint(2, 60), r.randint(2, 9)
    f = Fraction(a, b)
    ways = [rf"\frac{{{a * k}}}{{{b * k}}}", rf"\dfrac{{{f.numerator}}}{{{f.denominator}}}", f"{a * k}/{b * k}"]
    return f"\\frac{{{a}}}{{{b}}}", r.choice(ways), rf"\frac{{{a + 1}}}{{{b}}}"


def decimals(r: Random) -> tuple[str, str, str]:
    b = r.choice([2, 4, 5, 8, 10, 20, 25, 40])
    a = r.randint(1, 200)
    f = Fraction(a, b)
    return str(float(f)), r.choice([rf"\frac{{{f.numerator}}}{{{f.denominator}}}", f"{float(f)}0"]), str(float(f) + 0.5)


def roots(r: Random) -> tuple[str, str, str]:
    k, n = r.randint(2, 9), r.choice([2, 3, 5, 6, 7, 10])
    return rf"{k}\sqrt{{{n}}}", r.choice([rf"\sqrt{{{k * k * n}}}", rf"\sqrt{n}\cdot {k}" if n < 10 else
                                          rf"{k}\sqrt{{{n}}}"]), rf"{k}\sqrt{{{n + 1}}}"


def polynomials(r: Random) -> tuple[str, str, str]:
    a, b = r.randint(1, 9), r.randint(1, 9)
    return (f"x^2 + {a + b}x + {a * b}", r.choice([f"(x+{a})(x+{b})", f"{a * b} + {a + b}x + x^2",
                                                 rf"x\left(x+{a + b}\right) + {a * b}"]),
            f"x^2 + {a + b}x + {a * b + 1}")


def points(r: Random) -> tuple[str, str, str]:
    a, b = r.randint(-20, 20), r.randint(2, 20)
    return (f"({a}, {b}/2)", r.choice([rf"\left({a},\frac{{{b}}}{{2}}\right)", f"({a},{b / 2})"]),
            f"({b}/2, {a})" if Fraction(b, 2) != a else f"({a}, {b})")


def intervals(r: Random) -> tuple[str, str, str]:
    a, b = r.randint(-20, 0), r.randint(1, 20)
    return rf"[{a}, {b})", rf"\left[{a},{b}\right)", r.choice([f"[{a}, {b}]", f"({a}, {b})"])


def sets(r: Random) -> tuple[str, str, str]:
    some = r.sample(range(-30, 30), 3)
    mixed = r.sample(some, 3)
    return (rf"\{{{', '.join(map(str, some))}\}}", rf"\{{{', '.join(map(str, mixed))}\}}",
            rf"\{{{', '.join(map(str, some[:2]))}\}}")


def percents(r: Random) -> tuple[str, str, str]:
    p = r.randint(1, 99)
    return rf"{p}\%", r.choice([f"{p}%", f"{p / 100}", rf"\frac{{{p}}}{{100}}"]), rf"{p + 1}\%"


def units(r: Random) -> tuple[str, str, str]:
    n, unit = r.randint(2, 900), r.choice(["cm", "meters", "miles", "hours"])
    return str(n), rf"{n}\text{{ {unit}}}", rf"{n + 1}\text{{ {unit}}}"


def equations(r: Random) -> tuple[str, str, str]:
    a, b = r.randint(2, 9), r.randint(1, 9)
    return f"y = {a}x + {b}", r.choice([f"y = {b} + {a}x", f"{a}x + {b}"]), f"y = {b}x + {a}" if a != b else "y = x"


def powers(r: Random) -> tuple[str, str, str]:
    a, n = r.randint(2, 9), r.randint(2, 8)
    return str(a**n), rf"{a}^{{{n}}}", rf"{a}^{{{n + 1}}}"


def scientific(r: Random) -> tuple[str, str, str]:
    a, n = r.randint(11, 99), r.randint(3, 6)
    return str(a * 10**(n - 1)), rf"{a / 10} \times 10^{{{n}}}", rf"{a / 10} \times 10^{{{n - 1}}}"


def complexes(r: Random) -> tuple[str, str, str]:
    a, b = r.randint(1, 9), r.randint(2, 9)
    return f"{a} + {b}i", f"{b}i + {a}", f"{a} - {b}i"


def matrices(r: Random) -> tuple[str, str, str]:
    a, b, c, d = (r.randint(-9, 9) for _ in range(4))
    begin, end = r"\begin{pmatrix}", r"\end{pmatrix}"
    return (f"{begin} {a} & {b} \\\\ {c} & {d} {end}", f"{begin}{a}&{b}\\\\{c}&{d}{end}",
            f"{begin} {a} & {b} \\\\ {c} & {d + 1} {end}")


def inequalities(r: Random) -> tuple[str, str, str]:
    a = r.randint(-9, 9)
    return f"x > {a}", r.choice([f"x>{a}", f"{a} < x"]), r.choice([f"x < {a}", rf"x \geq {a}"])


def identities(r: Random) -> tuple[str, str, str]:
    k = r.randint(2, 9)
    return r.choice([(rf"{k}\sin(2x)", rf"{2 * k}\sin(x)\cos(x)", rf"{k}\sin(x)\cos(x)"),
                     (rf"\ln({k}x^2)", rf"\ln {k} + \ln(x^2)", rf"\ln({k}x)"),
                     (rf"\frac{{x^2-{k * k}}}{{x-{k}}}", f"x+{k}", f"x-{k}")])


def unions(r: Random) -> tuple[str, str, str]:
    a, b = r.randint(-9, 0), r.randint(1, 9)
    return (rf"(-\infty, {a}) \cup ({b}, \infty)", rf"\left(-\infty,{a}\right)\cup\left({b},\infty\right)",
            rf"(-\infty, {a}] \cup ({b}, \infty)")


FAMILIES: dict[str, Callable[[Random], tuple[str, str, str]]] = {
    f.__name__: f for f in (integers, fractions, decimals, roots, polynomials, points, intervals, sets, percents, units,
                            equations, powers, scientific, complexes, matrices, inequalities, identities, unions)}
WRITTEN = (r"We compute step by step. The answer is \boxed{{{}}}.", "So we get $${}$$ and\nfinally \\boxed{{{}}}",
           "Therefore\n\n\\boxed{{{}}}", "The final answer is ${}$.")


def cases(seed: int = 0, count: int = 500) -> list[Case]:
    """The families in turn; every second answer is right."""
    r, made = Random(seed), []
    for i in range(count):
        name = list(FAMILIES)[i % len(FAMILIES)]
        reference, same, other = FAMILIES[name](r)
        right = i // len(FAMILIES) % 2 == 0
        text = r.choice(WRITTEN)
        made.append(Case(name, reference, text.format(*[same if right else other] * text.count("{}")), right))
    return made


def main() -> None:
    seed, count = (int(x) for x in (*sys.argv[1:], *("0", "500")[len(sys.argv) - 1:])[:2])
    made = cases(seed, count)
    rows = [{"completion": c.completion, "answer": c.answer} for c in made]
    answers = {}
    for grader in (math_equal, math_verify):
        begin = time.process_time()
        answers[grader.__name__] = [value == 1.0 for value in grader(rows)]
        print(f"{grader.__name__}: {(time.process_time() - begin) / count * 1e3:.2f} ms of processor time per answer")
    print(f"{'family':<12}{'answers':>8}{'math_equal':>12}{'math_verify':>13}")
    for name in (*FAMILIES, "all"):
        here = [i for i, c in enumerate(made) if name in (c.family, "all")]
        right = [sum(found[i] == made[i].right for i in here) for found in answers.values()]
        print(f"{name:<12}{len(here):>8}{right[0]:>12}{right[1]:>13}")
    ours, theirs = answers.values()
    apart = [i for i in range(count) if ours[i] != theirs[i]]
    print(f"they agree on {count - len(apart)} of {count}; they disagree on:")
    for i in apart:
        c = made[i]
        print(f"  {c.family}: {c.answer!r} and {c.completion[-50:]!r}: the truth is {c.right}, math_equal says {ours[i]}")


if __name__ == "__main__":
    main()
