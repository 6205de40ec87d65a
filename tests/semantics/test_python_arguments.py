"""Which batches a Python function of the user takes: the rows that it is called with, and where these come from."""

from __future__ import annotations

import pytest

from rldsl.diag import Diagnostic, Failure
from rldsl.graph.build import build
from rldsl.source import SourceFile
from rldsl.syntax.parse import parse

PROGRAM = '''use py "r.py" (f: gen, p -> seq, g: gen -> seq, h: gen, kept, p -> seq,
                t: gen -> prompts(max_tokens=9))
data d = jsonl("d.jsonl", batch=4)
data q = jsonl("q.jsonl", batch=4)
data e = jsonl("e.jsonl", batch=4)
model actor = causal_lm("m") train adamw(lr=1e-3)
model ref = causal_lm("m")
flow run(steps=2) {
  p = d.next()
  o = e.next()
  pair = q.next()
  x = ref.logprobs(pair.chosen)
  a = actor.generate(p, n=2)
  b = actor.generate(p, n=2)
  z = actor.generate(o, n=2)
  some = p where uniform(p1) < 0.5
  s = actor.generate(some)
  some_a = a where len(a) > 1
  c = ref.generate(t(a), n=2)
  c2 = ref.generate(t(some_a), n=2)
  kept = a where len(a) > 2
  best = kept where len(kept) > 3
  repeat {
    more  = d.next()
    tries = actor.generate(more, n=2)
    long  = tries where len(tries) > 2
  } until count(long) > 4 max 3
  r = %s
  metric m = mean(r)
}
'''.replace("uniform(p1)", "uniform(mean(len(a) by prompt))")
SOURCE = "def f(rows):\n    return [0] * len(rows)\n\n\ng = h = f\n\n\ndef g(rows): ...\n\n\ndef h(rows): ...\n\n\ndef t(rows): ...\n"


def check(call: str) -> tuple[Diagnostic, ...]:
    try:
        build(parse(SourceFile("main.rlf", PROGRAM % call)), {}, read=lambda path: SOURCE)
    except Failure as failure:
        return failure.diagnostics
    return ()


@pytest.mark.parametrize("call", [
    "f(a, p)", "f(kept, a)", "f(best, kept)", "f(best, a)", "f(best, p)", "f(s, some)", "f(s, p)", "g(kept)",
    "h(best, kept, p)", "f(tries, more)", "f(long, tries)", "f(long, more)", "f(pair.chosen, pair.rejected)", "f(c, a)",
    "f(a, c)", "h(c, a, p)", "f(p, a)", "f(c, p)",
])
def test_the_other_arguments_are_where_the_first_comes_from(call: str) -> None:
    assert check(call) == ()


@pytest.mark.parametrize(("call", "underlined", "first", "declared", "what"), [
    ("f(a, b)", "b", "a", "p", "other sequences"),
    ("f(c2, a)", "a", "c2", "p", "other sequences"),
    ("f(c, c)", "c", "c", "p", "the same sequences"),
    ("f(a, o)", "o", "a", "p", "other prompts"),
    ("f(a, some)", "some", "a", "p", "other prompts"),
    ("f(a, kept)", "kept", "a", "p", "other sequences"),
    ("f(kept, b)", "b", "kept", "p", "other sequences"),
    ("f(a, a)", "a", "a", "p", "the same sequences"),
    ("h(best, b, p)", "b", "best", "kept", "other sequences"),
    ("f(tries, p)", "p", "tries", "p", "other prompts"),
    ("f(a, tries)", "tries", "a", "p", "other sequences"),
])
def test_anything_else_is_refused_with_what_was_declared(call: str, underlined: str, first: str, declared: str,
                                                         what: str) -> None:
    [d] = check(call)
    assert d.code == "RL0202" and d.title == f"`{underlined}` is not the source of `{first}`"
    assert d.span is not None and d.span.text == underlined and d.span.start > PROGRAM.index("r = ")
    assert d.label == f"declared as `{declared}`, whose rows those of `{first}` must belong to; this is {what}"
    [where] = d.labels
    assert where.text == "declared here" and where.span.text == f"{call[0]}: " + (
        "gen, kept, p -> seq" if call[0] == "h" else "gen, p -> seq")
    assert "prompts" in d.help
