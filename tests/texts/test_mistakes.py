"""What is wrong with a program in which Python writes prompts: one message each, at its place."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from rldsl import api
from rldsl.diag import Diagnostic, Failure
from rldsl.graph.build import build
from rldsl.graph.model import Train
from rldsl.source import SourceFile
from rldsl.syntax.parse import parse
from tests.texts.programs import folder, text

PROGRAM = '''use py "r.py" (ask: gen -> {returns}, f: gen -> seq, g: a, b -> seq, h: gen, completion -> seq)
param most = 32
data d = jsonl("d.jsonl", batch=4)
model actor = causal_lm("m") train adamw(lr=1e-3)
model judge = causal_lm("m")
loss nll(logprobs: token;) {{ return -mean(logprobs) }}
flow run(steps=2) {{
  p = d.next()
  gen = actor.generate(p, n=2)
  other = actor.generate(p, n=2)
{body}
}}
'''
SOURCE = "".join(f"def {name}(rows): ...\n\n\n" for name in ("ask", "f", "g", "h"))
JUDGED = "  v = judge.generate(ask(gen), n=3)\n  metric m = mean(f(v))"


def check(body: str = JUDGED, returns: str = "prompts(max_tokens=64)") -> tuple[Diagnostic, ...]:
    program = PROGRAM.format(body=body, returns=returns)
    try:
        build(parse(SourceFile("main.rlf", program)), {}, read=lambda path: SOURCE)
    except Failure as failure:
        return failure.diagnostics
    return ()


@pytest.mark.parametrize("returns", [
    "prompts(max_tokens=64)", "prompts?(max_tokens=64)", "prompts(max_tokens=2k, over_long=drop)",
    'prompts(max_tokens=64 tokens, over_long="truncate")', "prompts(max_tokens=most)",
])
def test_what_may_be_declared(returns: str) -> None:
    assert check(returns=returns) == ()


@pytest.mark.parametrize(("returns", "code", "title"), [
    ("prompts", "RL0215", "the prompts of `ask` needs `max_tokens`"),
    ("prompts()", "RL0001", None),
    ("prompts(max_tokens=0)", "RL0205", "`max_tokens` must be at least 1"),
    ("prompts(max_tokens=1.5)", "RL0205", "`max_tokens` must be an integer"),
    ("prompts(max_tokens=8 sequences)", "RL0218", "`max_tokens` counts tokens, not sequences"),
    ("prompts(max_tokens=8, over_long=cut)", "RL0101", None),
    ('prompts(max_tokens=8, over_long="cut")', "RL0205", '`over_long` cannot be "cut"'),
    ("prompts(max_token=8)", "RL0107", "the prompts of `ask` has no option `max_token`"),
    ("prompts(max_tokens=missing)", "RL0101", None),
    ("seq?", "RL0201", "`seq?`: only `prompts` has `?` or options"),
    ("seq(max_tokens=8)", "RL0201", "`seq(max_tokens=8)`: only `prompts` has `?` or options"),
    ("token", "RL0201", "a Python function cannot return `token`"),
    ("text(max_tokens=8)", "RL0201", "a Python function cannot return `text`"),
])
def test_what_may_not_be_declared(returns: str, code: str, title: str | None) -> None:
    found = check(returns=returns) if code != "RL0001" else _syntax(returns)
    assert [d.code for d in found] == [code]
    assert title is None or found[0].title == title


def _syntax(returns: str) -> tuple[Diagnostic, ...]:
    with pytest.raises(Failure) as raised:
        parse(SourceFile("main.rlf", PROGRAM.format(body=JUDGED, returns=returns)))
    return raised.value.diagnostics


@pytest.mark.parametrize("body", [
    "  asked = ask(gen)\n  v = judge.generate(asked)\n  metric m = mean(len(v) + mean(f(v) by prompt))",
    "  asked = ask(p)\n  v = judge.generate(asked, n=2)\n  metric m = mean(mean(f(v) by prompt) + mean(f(gen) by prompt))",
    "  v = judge.generate(ask(gen), n=3)\n  metric m = mean(f(gen) * mean(f(v) by prompt) - f(v))",
    "  v = judge.generate(ask(gen), n=3)\n  w = judge.generate(ask(v))\n  metric m = mean(g(w, gen) + f(gen))",
    "  kept = gen where f(gen) > 0\n  v = judge.generate(ask(kept))\n  metric m = mean(f(v) + f(kept) * f(gen))",
    "  v = judge.generate(ask(gen), n=3)\n  judge2 = mean(max(f(v) by prompt) by prompt)\n  metric m = mean(judge2)",
])
def test_what_may_be_done_with_text(body: str) -> None:
    assert check(body) == ()


@pytest.mark.parametrize(("body", "code", "underlined"), [
    ("  asked = ask(gen)\n  metric m = mean(f(asked))", "RL0213", "asked"),
    ("  asked = ask(gen)\n  lp = judge.logprobs(asked)\n  metric m = mean(lp)", "RL0213", "asked"),
    ("  actor.train(ask(gen), loss=nll())", "RL0213", "actor.train(ask(gen), loss=nll())"),
    ("  metric m = mean(ask(gen))", "RL0203", "ask(gen)"),
    ("  x = ask(gen) + 1\n  metric m = mean(x)", "RL0203", "ask(gen)"),
    ("  x = ask(gen).columns\n  metric m = mean(x)", "RL0112", "columns"),
    ("  v = judge.generate(ask(gen))\n  metric m = mean(f(v) + f(other))", "RL0202", "f(v) + f(other)"),
    ("  v = judge.generate(ask(gen))\n  metric m = mean(g(v, other))", "RL0202", "other"),
    ("  metric m = mean(g(gen, other))", "RL0202", "other"),
    ("  v = judge.generate(ask(gen))\n  metric m = mean(h(v, gen))", "RL0205", "h: gen, completion -> seq"),
    ("  metric m = mean(f(ask))", "RL0203", "ask"),
    ("  v = judge.generate(ask(gen, p))\n  metric m = mean(f(v))", "RL0204", "ask(gen, p)"),
    ("  ask(gen)", "RL0212", "ask(gen)"),
])
def test_what_may_not_be_done_with_text(body: str, code: str, underlined: str) -> None:
    [found] = check(body)
    assert found.code == code and found.span is not None and found.span.text == underlined


def test_a_loss_reduces_up_to_the_responses_that_were_judged() -> None:
    body = "  v = judge.generate(ask(gen), n=2)\n  actor.train(v, loss=good())"
    program = PROGRAM.format(body=body, returns="prompts(max_tokens=64)").replace(
        "loss nll", "loss good(logprobs: token;) { return -mean(mean(logprobs by prompt)) }\nloss nll")
    graph = build(parse(SourceFile("main.rlf", program)), {}, read=lambda path: SOURCE)
    [train] = [n for n in graph.items if isinstance(n, Train)]
    assert train.whole_prompts and "by prompt" in train.first_pass


# ------------------------------------------------------------------------------------------------- tokenizers


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return folder(tmp_path_factory.mktemp("tokenizers"))


def compiled(base: Path, body: str) -> str:
    """The code of the mistake in a program, "" for none."""
    (base / "program.rlf").write_text(text(body))
    before = os.getcwd()
    os.chdir(base)
    try:
        api.compile("program.rlf")
    except Failure as failure:
        return failure.diagnostics[0].code
    finally:
        os.chdir(before)
    return ""


GEN = "  prompt = prompts.next()\n  gen = actor.generate(prompt, n=2, max_new_tokens=4)\n"


@pytest.mark.parametrize(("body", "code"), [
    ("  asked = ask(gen)\n  v = judge.generate(asked)\n  metric m = mean(short(v))", ""),
    ("  asked = ask(gen)\n  v = judge.generate(asked)\n  w = actor.generate(ask(gen))\n  metric m = mean(short(v) + 0)\n"
     "  metric n = mean(short(w))", ""),
    ("  asked = ask(gen)\n  v = judge.generate(asked)\n  w = actor.generate(asked)\n  metric m = mean(short(v))\n"
     "  metric n = mean(short(w))", "RL0316"),
    ("  v = judge.generate(ask(gen))\n  lp = actor.logprobs(v)\n  metric m = mean(lp)", "RL0316"),
    ("  v = judge.generate(ask(gen))\n  kept = v where short(v) > 1\n  lp = actor.logprobs(kept)\n  metric m = mean(lp)",
     "RL0316"),
    ("  lp = judge.logprobs(gen)\n  metric m = mean(lp)", "RL0316"),
])
def test_two_tokenizers_read_no_tokens_of_one_another(base: Path, body: str, code: str) -> None:
    assert compiled(base, GEN + body) == code
