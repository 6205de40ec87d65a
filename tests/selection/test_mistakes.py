"""What is wrong with a selection, a collection or a state is said once, at the place, before anything runs."""

from __future__ import annotations

import pytest

from rldsl.diag import Failure
from rldsl.graph.build import build
from rldsl.source import SourceFile
from rldsl.syntax.parse import parse

TOP = """use std.grpo (grpo_free)
data d = jsonl("x.jsonl", batch=4)
data e = jsonl("y.jsonl", batch=4)
model a = causal_lm("m") train adamw(lr=1e-3)
state beta = 0.1
loss l(logprobs: token; w: seq) { return mean(w * mean(logprobs by seq)) }
"""
GEN = "p = d.next()\ng = a.generate(p, n=4)\nn = len(g)\n"


def found(body: str, top: str = TOP) -> list[tuple[str, int, str]]:
    """(code, line in the body, underlined text) of every message."""
    text = f"{top}flow f(steps=1) {{\n{body}\n}}\n"
    first = top.count("\n") + 1
    try:
        build(parse(SourceFile("t.rlf", text)), {})
    except Failure as failure:
        return [(x.code, x.span.line - first, x.span.text) for x in failure.diagnostics]
    return []


FINE = [
    GEN + "k = g where n > 3\na.train(k, loss=l(w=n))",
    GEN + "k = g where mean(n by prompt) > 3 and n > 1\nmetric m = mean(over(n, k))",
    GEN + "k = g where n > 3\nb = k where len(k) < 9\nmetric m = mean(n - len(b))",
    GEN + "beta = beta + mean(n)\nbeta = 2 * beta",
    "repeat {\n" + GEN + "} until mean(n) > beta max 3\na.train(g, loss=l(w=n))",
    "repeat {\n" + GEN + "m = mean(n)\n} until m > 3 or mean(n) > 5 max 2\nmetric m2 = mean(n)",
    "every 5 { beta = 0 }\n" + GEN,
    GEN + "q = p where mean(n by prompt) > 3\nh = a.generate(q)",
    "every 5 {\nrepeat {\n" + GEN + "} until mean(n) > 3 max 2\n}",
]


@pytest.mark.parametrize("body", FINE)
def test_fine(body: str) -> None:
    assert found(body) == []


@pytest.mark.parametrize("body, expected", [
    (GEN + "k = n where n > 3", [("RL0203", 4, "n")]),
    (GEN + "k = g where n", [("RL0203", 4, "n")]),
    (GEN + "k = g where mean(n) > 3", [("RL0201", 4, "mean(n) > 3")]),
    (GEN + "k = g where g.logprobs > -1", [("RL0201", 4, "g.logprobs > -1")]),
    (GEN + "k = g where nn > 1", [("RL0101", 4, "nn")]),
    (GEN + "k, j = g where n > 1", [("RL0212", 4, "k, j = g where n > 1")]),
    (GEN + "k = g where n > 1 on mesh(0:1)", [("RL0212", 4, "on mesh(0:1)")]),
    (GEN + "g = g where n > 1", [("RL0102", 4, "g")]),
    ("p = d.next()\ng = a.generate(p) where len(g) > 3\nmetric m = mean(len(g))", [("RL0212", 2, "a.generate")]),
    ("p = d.next() where len(p) > 3\ng = a.generate(p)", [("RL0212", 1, "d.next")]),
    ("p = d.next()\nq = p where len(p) > 3\ng = a.generate(q)", [("RL0213", 2, "p")]),
    ("p = d.next()\ng = a.generate(p) where len(g) > 3 on mesh(0:1)", [("RL0212", 2, "a.generate")]),
    (GEN + "k = g where n > 1 on mesh(0:1)\nmetric m = mean(len(k))", [("RL0212", 4, "on mesh(0:1)")]),
    (GEN + "q = e.next()\nh = a.generate(q)\nk = g where len(h) > 1", [("RL0202", 6, "len(h) > 1")]),
    (GEN + "k = g where n > 1\nj = g where n > 2\nmetric m = mean(len(k) + len(j))", [("RL0202", 6, "len(k) + len(j)")]),
    (GEN + "k = g where n > 1\nmetric m = mean(over(len(k), g))", [("RL0202", 5, "len(k)")]),
    (GEN + "metric m = mean(over(n, p))", [("RL0202", 4, "n")]),
    (GEN + "metric m = mean(over(n, n))", [("RL0203", 4, "over(n, n)")]),
    (GEN + "beta = n", [("RL0201", 4, "beta")]),
    (GEN + "beta = g", [("RL0203", 4, "beta")]),
    (GEN + "beta = mean(n) > 3", [("RL0201", 4, "beta")]),
    ("repeat {\n" + GEN + "} until n > 3 max 3", [("RL0203", 5, "n > 3")]),
    ("repeat {\n" + GEN + "} until mean(n) max 3", [("RL0203", 5, "mean(n)")]),
    ("repeat {\n" + GEN + "} until mean(n) > 3 max 0", [("RL0205", 5, "0")]),
    ("repeat {\n" + GEN + "m = mean(n)\n} until m > 3 max 2\nmetric m2 = m", [("RL0101", 7, "m")]),
    ("repeat {\n" + GEN + "metric m = mean(n)\n} until mean(n) > 3 max 2", [("RL0212", 5, "metric m = mean(n)")]),
    ("repeat {\nrepeat {\n" + GEN + "} until mean(n) > 3 max 2\n} until beta > 1 max 2",
     [("RL0212", 2, "repeat")]),
    ("repeat 2 {\nrepeat {\n" + GEN + "} until mean(n) > 3 max 2\na.train(g, loss=l(w=n))\n}",
     [("RL0212", 2, "repeat")]),
    ("every 2 {\nrepeat 2 {\nrepeat {\n" + GEN + "} until mean(n) > 3 max 2\n}\n}", [("RL0212", 3, "repeat")]),
    ("repeat {\n" + GEN + "a.train(g, loss=l(w=n))\n} until mean(n) > 3 max 2", [("RL0212", 5, "a.train(g, loss=l(w=n))")]),
    ("repeat {\n" + GEN + "} until mean(n) max 3\nmetric m2 = mean(n)\na.train(g, loss=l(w=n))", [("RL0203", 5, "mean(n)")]),
    ("repeat 3 { every 4 { beta = 1 } }", [("RL0205", 1, "4")]),
    ("p = d.next()\nrepeat {\ng = a.generate(p)\n} until count(len(g)) > 3 max 2",
     [("RL0212", 2, "repeat")]),
])
def test_mistakes(body: str, expected: list[tuple[str, int, str]]) -> None:
    assert found(body) == expected


@pytest.mark.parametrize("top, expected", [
    (TOP + 'state x = "a"\n', ["RL0205"]),
    (TOP + "state beta = 2\n", ["RL0102"]),
    (TOP + "state mean = 2\n", ["RL0111"]),
    (TOP + "state x = beta\n", ["RL0203"]),
    (TOP + "fn h(x: any) -> any { return x * beta }\n", ["RL0203"]),
    (TOP + "loss h(logprobs: token;) { return beta * mean(logprobs) }\n", ["RL0203"]),
    (TOP + "param q = beta\n", ["RL0203"]),
])
def test_mistakes_of_states(top: str, expected: list[str]) -> None:
    assert [code for code, _, _ in found(GEN, top)] == expected


def helps(body: str) -> list[str]:
    with pytest.raises(Failure) as failure:
        build(parse(SourceFile("t.rlf", f"{TOP}flow f(steps=1) {{\n{body}\n}}\n")), {})
    return [d.help for d in failure.value.diagnostics]


@pytest.mark.parametrize("body, advice", [
    ("p = d.next()\ng = a.generate(p, n=2) where len(g) > 3",
     "write two statements: `g = a.generate(p, n=2)`, then `kept = g where len(g) > 3`"),
    ("p = d.next()\nkept = a.generate(p) where len(kept) > 3",
     "write two statements: `gen = a.generate(p)`, then `kept = gen where len(gen) > 3`"),
    ("repeat {\nrepeat {\n" + GEN + "} until mean(n) > 3 max 2\n} until beta > 1 max 2",
     "combine the conditions: `until a and b max N`"),
    ("repeat 2 {\nrepeat {\n" + GEN + "} until mean(n) > 3 max 2\n}",
     "move it to the flow; for more iterations, increase the steps of the flow"),
])
def test_advice(body: str, advice: str) -> None:
    assert helps(body) == [advice]


@pytest.mark.parametrize("body", [
    GEN + "h = a.generate(p)",
    "repeat {\n" + GEN + "} until mean(n) > 3 max 2\nh = a.generate(p)",
    GEN + "p2 = p where mean(n by prompt) > 1\nh = a.generate(p2)",
    "p = d.next()\ng = a.generate(p, n=2)\nkept = g where len(g) > 3",
    "repeat {\n" + GEN + "} until mean(n) > 3 and beta > 1 max 2",
])
def test_what_is_advised_is_right(body: str) -> None:
    assert found(body) == []
