"""Each mistake gives exactly one message: its code, what is underlined, and where it helps a suggestion."""

from __future__ import annotations

import pytest

from rldsl import api
from rldsl.diag import Diagnostic, Failure
from rldsl.graph.build import build
from rldsl.source import SourceFile
from rldsl.syntax.parse import parse

HEAD = '''use std.ppo (gae, ppo_clip, value_clip)
use std.sft (sft)
param lr = 1e-3
data d = jsonl("d.jsonl", batch=4)
data e = jsonl("d.jsonl", batch=4)
model actor = causal_lm("m") train adamw(lr=lr)
model critic = value_model("m") train adamw(lr=lr)
model ref = causal_lm("m")
model judge = reward_model("m")
'''
FLOW = '''flow f(steps=2) {
  p = d.next()
  gen = actor.generate(p, n=2)
  s = judge.score(gen)
  lp = ref.logprobs(gen)
  %s
}
'''
FILES = {"a.rlf": 'use "b.rlf" (g)\nfn h(x: seq) -> seq { return x }\n',
         "b.rlf": 'use "a.rlf" (h)\nfn g(x: seq) -> seq { return x }\n',
         "bad.rlf": 'model m = causal_lm("m")\nfn g(x: seq) -> seq { return x }\n',
         "r.py": "def f(row):\n    return 1\n", "broken.py": "def f(:\n"}


def read(path: str) -> str:
    if path not in FILES:
        raise FileNotFoundError(2, "No such file or directory", path)
    return FILES[path]


def errors(statement: str, top: str = "", **sets: str) -> tuple[Diagnostic, ...]:
    source = HEAD + top + "\n" + FLOW % statement
    with pytest.raises(Failure) as caught:
        build(parse(SourceFile("main.rlf", source)), sets, read=read)
    return caught.value.diagnostics


# statement, code, underlined text, part of the message
FLOWS = [
    ("x = mean(scor)", "RL0101", "scor", "scor"),
    ("x = mean(lpp)", "RL0101", "lpp", "`lp`"),
    ("s = mean(lp)", "RL0102", "s", "defined twice"),
    ("exp = mean(lp)", "RL0111", "exp", "built in"),
    ("metric step = mean(lp)", "RL0111", "step", "built-in field of metrics.jsonl"),
    ("metric seconds = mean(lp)", "RL0111", "seconds", "built-in field of metrics.jsonl"),
    ("metric tokens_per_second = mean(lp)", "RL0111", "tokens_per_second", "built-in field of metrics.jsonl"),
    ("x = gen.logprob", "RL0112", "logprob", "`logprobs`"),
    ("x = judge.values(gen)", "RL0206", "values", "value_model"),
    ("x = actor.generat(p)", "RL0112", "generat", "`generate`"),
    ("ref.train(gen, loss=ppo_clip(old=lp, adv=lp))", "RL0207", "train",
     "frozen"),
    ("a, b = gae(s, lp)", "RL0201", "s", "at_end"),
    ("x = sum(s by token)", "RL0208", "s", "no level finer"),
    ("x = sum(lp by sequence)", "RL0101", "sequence", "levels"),
    ("metric m = lp", "RL0201", "lp", "single number"),
    ("x = next(s)", "RL0201", "s", "at_end"),
    ("x = at_end(lp)", "RL0201", "lp", "seq"),
    ("x = gae(lp)", "RL0215", "gae", "`v`"),
    ("x, y, z = gae(lp, lp)", "RL0204", "x, y, z = gae(lp, lp)", "3 names"),
    ("x, y = gae(lp, lp, gama=1)", "RL0107", "gama", "`gamma`"),
    ("x = clip(lp, 1)", "RL0204", "clip", "3"),
    ("x = where(lp, 1, 2)", "RL0203", "lp", "condition"),
    ("x = lp + \"a\"", "RL0203", '"a"', "string"),
    ("x = 1 / 0", "RL0214", "1 / 0", "cannot be evaluated"),
    ("x = lp + gen", "RL0203", "gen", "expected a value"),
    ("x = lp * 2 on mesh(0:1)", "RL0212", "on mesh(0:1)", "placed"),
    ("lp", "RL0212", "lp", "no effect"),
    ("save actr", "RL0101", "actr", "`actor`"),
    ("save lp", "RL0203", "lp", "only models"),
    ("every 0 { save actor }", "RL0205", "0", "at least 1"),
    ("g2 = actor.generate(p, temperature=0)", "RL0205", "0", "greedy"),
    ("g2 = actor.generate(p, top_p=1.5)", "RL0205", "1.5", "at most 1"),
    ("g2 = actor.generate(p, min_p=1.5)", "RL0205", "1.5", "at most 1"),
    ("g2 = actor.generate(p, n=1.5)", "RL0205", "1.5", "integer"),
    ("g2 = actor.generate(p, max_tokens=4)", "RL0107", "max_tokens", "`max_new_tokens`"),
    ("g2 = actor.generate(p, n=lp)", "RL0211", "lp", "constant"),
    ("actor.train(gen)", "RL0215", "train", "loss"),
    ("actor.train(gen, loss=lp)", "RL0203", "lp", "loss"),
    ("actor.train(gen, loss=value_clip(old=lp, ret=lp))", "RL0206", "value_clip", "no output `values`"),
    ("actor.train(gen, loss=sft(), epochs=0)", "RL0205", "0", "at least 1"),
    ("x = 1 + ref.generate(p)", "RL0212", "ref.generate", "separate statement"),
    ("x = mean(mesh(0:2))", "RL0203", "mesh(0:2)", "mesh"),
    ("g2 = actor.generate(p) on mesh(2:2)", "RL0205", "2:2", "range"),
    ("return lp", "RL0212", "return lp", "outside"),
    ("metric m = mean(lp)\n  metric m = mean(s)", "RL0102", "m", "metric"),
]


@pytest.mark.parametrize(("statement", "code", "underlined", "part"), FLOWS, ids=[f[0][:40] for f in FLOWS])
def test_mistake_in_the_flow(statement: str, code: str, underlined: str, part: str) -> None:
    found = errors(statement)
    assert [d.code for d in found] == [code], found
    [d] = found
    assert d.span is not None and d.span.text == underlined
    assert part in " ".join((d.title, d.label, d.help, *d.notes))


TOPS = [
    ('use std.pppo (gae2)', "RL0103", "ppo"),
    ('use std.ppo (gea)', "RL0104", "`gae`"),
    ('use "none.rlf" (g)', "RL0103", "No such file"),
    ('use "a.rlf" (h)', "RL0105", "a.rlf -> b.rlf -> a.rlf"),
    ('use "bad.rlf" (g)', "RL0108", "module"),
    ('use py "none.py" (f: gen -> seq)', "RL0110", "No such file"),
    ('use py "r.py" (g: gen -> seq)', "RL0110", "does not define a function"),
    ('use py "broken.py" (f: gen -> seq)', "RL0110", "line 1"),
    ('use py "r.py" (f: gen -> batch)', "RL0201", "seq"),
    ('use py "r.py" (f: gen -> token)', "RL0201", "one number per row"),
    ('model x = causal_llm("m")', "RL0101", "`causal_lm`"),
    ('model x = causal_lm()', "RL0215", "path"),
    ('model x = causal_lm(3)', "RL0205", "string"),
    ('model x = causal_lm("m", dtype="float16")', "RL0205", "bfloat16"),
    ('model x = causal_lm("m") train lion(lr=1)', "RL0101", "adamw"),
    ('model x = causal_lm("m") train adamw(lr=1, beta=2)', "RL0107", "`betas`"),
    ('model x = causal_lm("m") train adamw(lr=1, schedule=cosin)', "RL0101", "cosin"),
    ('model x = causal_lm("m") train adamw(lr=1, betas=[0.9])', "RL0205", "two numbers"),
    ('data x = parquet("m")', "RL0215", "batch"),
    ('data x = hf("m", batch=1, over_long=cut)', "RL0101", "cut"),
    ('data x = hf("m", batch=1, over_long="cut")', "RL0205", "truncate, drop, error"),
    ('data x = jsonl("m")', "RL0215", "batch"),
    ('data x = jsonl("m", batch=0)', "RL0205", "at least 1"),
    ('model actor = causal_lm("m")', "RL0102", "defined twice"),
    ('cluster nodes=1', "RL0215", "gpus"),
    ('fn f1(x: tokn) -> token { return x }', "RL0101", "tokn"),
    ('fn f1(x: token) -> token { return y }', "RL0101", "`y`"),
    ('fn f1(x: token) -> token { y = x }', "RL0212", "return"),
    ('fn whiten(exp: token) -> token { return sqrt(q) }', "RL0101", "`q`"),
    ('fn f1(x: token) -> (token, token) { return x }', "RL0204", "declares 2"),
    ('fn f1(x: token) -> seq { return x }', "RL0201", "declares seq"),
    ('loss l(logprobs: token;) { return logprobs }', "RL0201", "single number"),
    ('loss l(logprobs: token;) { return mean(rank(logprobs)) }', "RL0209", "no gradient"),
    ('loss l(logprobs: token;) { return exp(mean(logprobs > -1)) }', "RL0209", "no gradient"),
    ('loss l(logprobs: token; a: token) { return std(sort(a)) / mean(a) }', "RL0209", "does not depend"),
    ('loss l(logprobs: token;) { return mean(logprobs * uniform(logprobs)) }', "RL0210", "uniform"),
    ('loss l(logprobs: token;) { return mean(sort(logprobs by token)) }', "RL0208", "no order"),
    ('loss l(logprobs: token; x: batch) { return mean(logprobs) * rank(x) }', "RL0208", "no order"),
    ('loss l(logprobs: token; a: token) { return 1.0 * 2 }', "RL0209", "does not depend"),
]


@pytest.mark.parametrize(("top", "code", "part"), TOPS, ids=[t[0][:60] for t in TOPS])
def test_mistake_in_a_declaration(top: str, code: str, part: str) -> None:
    found = errors("unused = mean(lp)", top)
    assert [d.code for d in found] == [code], found
    assert part in " ".join((found[0].title, found[0].label, found[0].help))


def test_frames_do_not_mix_and_both_are_named() -> None:
    [d] = errors("o = actor.generate(p, n=2)\n  x = lp - ref.logprobs(o)")
    assert d.code == "RL0202" and "`gen`" in d.title and "`o`" in d.title and len(d.labels) == 2


def test_a_broken_function_is_told_once_however_often_it_is_called() -> None:
    [d] = errors("x = f1(lp)\n  y = f1(x) + 1\n  z = mean(y)", "fn f1(a: token) -> token { return a + nothing }")
    assert d.code == "RL0101" and d.span is not None and d.span.text == "nothing"


def test_all_mistakes_are_reported_in_one_go() -> None:
    found = errors("x = mean(aaa)\n  y = mean(x)\n  z = mean(bbb)", "model q = causal_lm()")
    assert sorted(d.code for d in found) == ["RL0101", "RL0101", "RL0215"]


def test_recursion_is_an_error() -> None:
    found = errors("x = f1(lp)", "fn f1(a: token) -> token { return f1(a) }")
    assert {d.code for d in found} == {"RL0217"}


def doubling(levels: int) -> str:
    """f0 .. fN, each of which calls the one before twice."""
    first = "fn f0(x: token) -> token { return x + 1 }\n"
    return first + "".join(f"fn f{i}(x: token) -> token {{ return f{i - 1}(x) * f{i - 1}(x) }}\n"
                           for i in range(1, levels + 1))


@pytest.mark.thorough
@pytest.mark.parametrize("levels", [11, 40])
def test_functions_that_double_are_no_hang(levels: int) -> None:
    """2 to the power of 40 bodies would take years."""
    [d] = errors(f"x = mean(f{levels}(lp))", doubling(levels))
    assert d.code == "RL0219" and d.span is not None and d.span.text == "f9"


def test_a_few_that_double_are_right() -> None:
    source = HEAD + doubling(8) + "\n" + FLOW % "metric m = mean(f8(lp))"
    build(parse(SourceFile("main.rlf", source)), {}, read=read)


@pytest.mark.thorough
@pytest.mark.parametrize(("length", "code"), [(3000, ""), (300, "RL0007")])
def test_long_and_deep_functions_end_in_an_answer(length: int, code: str) -> None:
    if code:  # each calls the one before
        top = "fn f0(x: token) -> token { return x }\n" + "".join(
            f"fn f{i}(x: token) -> token {{ return f{i - 1}(x) + 1 }}\n" for i in range(1, length + 1))
        assert [d.code for d in errors(f"metric m = mean(f{length}(lp))", top)] == [code]
    else:  # one after the other
        lines = "".join(f"  y{i + 1} = y{i} + 1\n" for i in range(length))
        top = f"fn long(y0: token) -> token {{\n{lines}  return y{length}\n}}\n"
        build(parse(SourceFile("main.rlf", HEAD + top + FLOW % "metric m = mean(long(lp))")), {}, read=read)


LOSSES = ["mean(0 * logprobs)", "mean(where(logprobs > -1, logprobs, 0))", "mean(stop_gradient(logprobs) * logprobs)",
          "mean(logprobs) + count(logprobs)", "mean(max(logprobs, stop_gradient(logprobs)))"]


@pytest.mark.parametrize("value", LOSSES)
def test_losses_that_have_a_gradient(value: str) -> None:
    top = f"loss l(logprobs: token;) {{ return {value} }}\n"
    build(parse(SourceFile("main.rlf", HEAD + top + FLOW % "actor.train(gen, loss=l())")), {}, read=read)


@pytest.mark.parametrize(("sets", "code"), [({"lrr": "1"}, "RL0106"), ({"lr": "fast"}, "RL0205")])
def test_set_on_the_command_line(sets: dict[str, str], code: str) -> None:
    found = errors("x = mean(lp)", "", **sets)
    assert [d.code for d in found] == [code]


@pytest.mark.parametrize("source", ["", HEAD, HEAD + "flow a(steps=1) { }\nflow b(steps=1) { }\n"])
def test_one_flow(source: str) -> None:
    with pytest.raises(Failure) as caught:
        build(parse(SourceFile("main.rlf", source)), {}, read=read)
    assert [d.code for d in caught.value.diagnostics] == ["RL0109"]


@pytest.mark.parametrize("text", ['cluster "h100\x00.yaml"\n', 'use "a\x00b.rlf" (x)\n'])
def test_a_name_that_no_file_can_have(text: str) -> None:
    assert api.check(text, "x.rlf")[0].code == "RL0103"


PAIRS = 'use std.dpo (dpo)\ndata pairs = jsonl("p.jsonl", batch=4, kind="pairs")\n'
TWO = "q = pairs.next()\n  a = ref.logprobs(q.chosen)\n  b = ref.logprobs(q.rejected)\n  "
DPO = "loss=dpo(ref_chosen=a, ref_rejected=b)"


@pytest.mark.parametrize(("statement", "code", "help_"), [
    (f"o = actor.generate(p, n=2)\n  actor.train(gen, o, {DPO})", "RL0202",
     "make pairs of one sequence of each prompt: `duel = pair(pick(gen, x), pick(o, y))`"),
    (f"actor.train(gen, q.rejected, {DPO})", "RL0202", "train on `q.chosen` and `q.rejected`"),
    (f"kept = q where len(q.chosen) > 2\n  actor.train(kept.chosen, q.rejected, {DPO})", "RL0202",
     "train on `kept.chosen` and `kept.rejected`"),
    (f"actor.train(q.rejected, q.rejected, {DPO})", "RL0215", "train on `q.chosen` and `q.rejected`"),
    (f"actor.train(gen, gen, {DPO})", "RL0215", "pass it once"),
    ("x = at_end(len(q.chosen) + len(q.rejected))", "RL0202", "specify the sequences: `at_end(x, q.chosen)`"),
])
def test_help_names_what_the_program_has(statement: str, code: str, help_: str) -> None:
    [d] = errors(TWO + statement, PAIRS)
    assert d.code == code and d.help.startswith(help_)
