"""What continuations allow and what they do not, before anything runs."""

from __future__ import annotations

import pytest

from tests.selection.test_mistakes import GEN, found

MORE = GEN + "h = a.generate(g, n=2)\nm = len(h)\n"


@pytest.mark.parametrize("body", [
    MORE + "v = mean(m by prompt)\nmetric x = mean(v + n)",  # v is a value of g
    MORE + "metric x = mean(max(mean(m by prompt) by prompt))",  # two steps up
    MORE + "metric x = mean(m - n)\nmetric y = mean(m - mean(n by prompt))",  # values of g and p broadcast
    MORE + "k = h where m > n\nmetric x = mean(len(k))",
    MORE + "k = g where mean(m by prompt) > n\nj = a.generate(k)\nmetric x = mean(len(j) - over(n, k))",
    MORE + "j = a.generate(h)\nmetric x = mean(mean(mean(mean(len(j) by prompt) by prompt) by prompt))",
    MORE + "a.train(h, loss=l(w=n))",
    "repeat {\n" + MORE + "} until mean(m) > 3 max 2\nmetric x = mean(mean(m by prompt) + n)",
    "eval e { q = e.next()\ni = a.generate(q)\nj = a.generate(i)\nmetric x = mean(len(j)) }",
    MORE + "k = h where m > 2\nmetric x = mean(len(k) - n + over(n, k))\na.train(k, loss=l(w=n))",
    MORE + "k = h where m > 2\nj = k where n > 1\nmetric x = mean(len(j) - n)",
    MORE + "metric x = mean(at_end(n, h) + h.logprobs)",
    "every 5 {\n" + MORE + "metric x = mean(m)\n}",
])
def test_fine(body: str) -> None:
    assert found(body) == []


@pytest.mark.parametrize("body, expected", [
    (MORE + "i = a.generate(g)\nmetric x = mean(m - len(i))", [("RL0202", 7, "m - len(i)")]),  # siblings
    (MORE + "metric x = mean(h.logprobs - g.logprobs)", [("RL0202", 6, "h.logprobs - g.logprobs")]),
    (MORE + "k = g where m > 1", [("RL0202", 6, "m > 1")]),  # finer than its rows
    (MORE + "v = mean(mean(m by prompt) by prompt)\nmetric x = mean(mean(v by prompt))", [("RL0208", 7, "v")]),
    (MORE + "k = h where m > 2\nmetric x = mean(mean(len(k) by prompt) - n)",
     [("RL0202", 7, "mean(len(k) by prompt) - n")]),
    (MORE + "metric x = mean(at_end(m, g))", [("RL0202", 6, "m")]),
    (MORE + "a.train(h, g, loss=l(w=n))", [("RL0202", 6, "a.train(h, g, loss=l(w=n))")]),
    (MORE + "a.train(g, loss=l(w=m))", [("RL0202", 6, "m")]),
    ("p = d.next()\nh = a.generate(a)", [("RL0203", 2, "a")]),
    (GEN + "repeat { h = a.generate(g) } until mean(len(h)) > 1 max 2", [("RL0212", 4, "repeat")]),
])
def test_mistakes(body: str, expected: list[tuple[str, int, str]]) -> None:
    assert found(body) == expected
