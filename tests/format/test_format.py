"""The formatter as a function: canonical, idempotent, and the program and its comments stay what they are."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rldsl.diag import Failure
from rldsl.source import SourceFile
from rldsl.syntax import format as formatter
from rldsl.syntax.format import NotTheSame, format, shape
from rldsl.syntax.lossless import WIDTH
from rldsl.syntax.parse import parse
from tests.fuzz.generate import programs

ROOT = Path(__file__).parents[2]
COMMENT = re.compile(r'"(?:\\.|[^"\\\n])*"|(#[^\n]*)')


def fmt(text: str) -> str:
    return format(SourceFile("t.rlf", text))


def tree(text: str) -> object:
    return shape(parse(SourceFile("t.rlf", text)))


def comments(text: str) -> list[str]:
    return [c.rstrip() for c in COMMENT.findall(text) if c]


def keeps(text: str) -> str:
    """The canonical form of text, and that it is one."""
    result = fmt(text)
    assert fmt(result) == result
    assert tree(result) == tree(text)
    assert comments(result) == comments(text)
    assert not re.search(r"[ \t\r]\n|\t|\r|\n\n\n|\A\n", COMMENT.sub("x", result))
    assert result == "" or result.endswith("\n") and not result.endswith("\n\n")
    return result


def test_golden(golden) -> None:
    """Before and after, side by side in one file; what is above the line is the input."""
    for name, text in BEFORE.items():
        golden(f"format/{name}.txt", f"{text}\n{'=' * WIDTH}\n{keeps(text)}")


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 10**9))
def test_any_program_keeps_its_tree_and_comments(seed: int) -> None:
    keeps(programs(seed))


@pytest.mark.parametrize("seed", [2016, 4206])  # a block on one line with a long rest
def test_seeds_that_once_failed(seed: int) -> None:
    keeps(programs(seed))


LEAVES = st.sampled_from(["a", "b.c", "f(x)", "2", "3 tokens", "1.5", '"s"', "[a, b]", "f(a by seq)"])
EXPRESSIONS = st.recursive(LEAVES, lambda inner: st.one_of(
    st.builds("{} {} {}".format, inner, st.sampled_from("+ - * / ** < == and or".split()), inner),
    st.builds("-{}".format, inner), st.builds("not {}".format, inner), st.builds("({})".format, inner),
    st.builds("( {} ) . m".format, inner), st.builds("f({}, k={})".format, inner, inner)), max_leaves=8)


@settings(max_examples=200, deadline=None)
@given(EXPRESSIONS)
def test_brackets_are_exactly_those_needed(expression: str) -> None:
    text = f"param x = {expression}\n"
    try:
        meant = tree(text)
    except Failure:
        return  # `a < b < c`
    result = keeps(text)
    for start, stop in groups(result):
        shorter = f"{result[:start]} {result[start + 1 : stop]} {result[stop + 1 :]}"
        try:
            assert tree(shorter) != meant or re.match(r"\d", result[start + 1 :]), f"{result} has needless brackets"
        except Failure:
            continue


def groups(text: str) -> list[tuple[int, int]]:
    """The brackets that are not of a call; strings have none here."""
    stack, found = [], []
    for i, c in enumerate(text):
        if c == "(":
            stack.append(i)
        elif c == ")":
            start = stack.pop()
            if not re.search(r"[\w)\]\"]\Z", text[:start]) or re.search(r"\b(and|or|not)\Z", text[:start]):
                found.append((start, i))
    return found


def of_ours() -> list[Path]:
    """Programs that someone reads; those made for a test of their own look as that test needs it."""
    return sorted(p for folder in ("examples", "stdlib", "rldsl", "tests/end_to_end")
                  for p in (ROOT / folder).rglob("*.rlf"))


@pytest.mark.parametrize("path", of_ours(), ids=lambda p: str(p.relative_to(ROOT)))
def test_every_program_of_the_repository_is_in_canonical_form(path: Path) -> None:
    text = path.read_text("utf-8")
    assert keeps(text) == text, f"run: rlc fmt {path.relative_to(ROOT)}"


@pytest.mark.parametrize("path", sorted((ROOT / "tests/corpus/broken").glob("*.rlf")), ids=lambda p: p.stem)
def test_broken_programs_are_formatted_or_refused_as_by_the_parser(path: Path) -> None:
    text = path.read_bytes().decode()
    try:
        tree(text)
    except Failure as failure:
        with pytest.raises(Failure) as caught:
            fmt(text)
        assert [d.code for d in caught.value.diagnostics] == [d.code for d in failure.diagnostics]
    else:
        keeps(text)


@pytest.mark.parametrize("old, new", [
    ("a=1+2*3", "a = 1 + 2 * 3"), ("a = ((1+2))*3", "a = (1 + 2) * 3"), ("a = -(x**2)", "a = -x ** 2"),
    ("a = (-x)**2", "a = (-x) ** 2"), ("a = b-(c-d)", "a = b - (c - d)"), ("a = (b-c)-d", "a = b - c - d"),
    ("a = (b**c)**d", "a = (b ** c) ** d"), ("a = b**(c**d)", "a = b ** c ** d"), ("a = 2**(-b)", "a = 2 ** -b"),
    ("a = not (b < c)", "a = not b < c"), ("a = (not b) < c", "a = (not b) < c"),
    ("a = (b < c) < d", "a = (b < c) < d"),
    ("a = (b and c) or d", "a = b and c or d"), ("a = b and (c or d)", "a = b and (c or d)"),
    ("a = b or (c or d)", "a = b or (c or d)"), ("a = (b + c).d", "a = (b + c).d"), ("a = (b.c)(d)", "a = b.c(d)"),
    ("a = (1).x", "a = (1).x"), ("a = 1 . _5", "a = 1 ._5"), ("a = f( (x) , k = (y) , )", "a = f(x, k=y)"),
    ("a = [ ]", "a = []"), ("a = f ( )", "a = f()"), ("a = mesh( 0 : (8) )", "a = mesh(0:8)"),
    ("a = mean( x  by  seq )", "a = mean(x by seq)"), ("a = 1_000\t+ 4k*1e-6", "a = 1_000 + 4k * 1e-6"),
    ("a = 512  prompts", "a = 512 prompts"), ("a , b=f( x )", "a, b = f(x)"),
    ("a = x  where  y>0", "a = x where y > 0"),
    ('save a , b to ( "d" )', 'save a, b to "d"'), ("sync a from b every (10)", "sync a from b every 10"),
    ("ema a from b (0.9)", "ema a from b 0.9"), ("stop when (x > 1)", "stop when x > 1"),
    ("f(x) dp = 2  tp=(a+b)", "f(x)   dp=2 tp=(a + b)"), ("f(x) on (m) dp=(3) tokens=4", "f(x)   on m dp=(3) tokens=4"),
    ("(metric).f(x)", "(metric).f(x)"), ("every 3 {save a}", "every 3 { save a }"), ("repeat 3 {\n}", "repeat 3 {}"),
    ("every 2 { every 3 { save a } }", "every 2 { every 3 { save a } }"),
    ("every 2 { a=f(x)   on m }", "every 2 { a = f(x) on m }"), ('a = "tab\tand # hash"', 'a = "tab\tand # hash"'),
    ("return (a), (b)", "return a, b"), ("metric m=(a)", "metric m = a"),
    ("repeat { a = b } until (c) max (4)", "repeat { a = b } until c max 4")])
def test_statements(old: str, new: str) -> None:
    assert keeps(f"flow f {{\n{old}\n}}\n") == f"flow f {{\n  {new}\n}}\n"


@pytest.mark.parametrize("old, new", [
    ("use   std . ppo( a,b, )", "use std.ppo (a, b)"), ('use "x.rlf"(a)', 'use "x.rlf" (a)'),
    ('use py "r.py"( f:a,b->seq )', 'use py "r.py" (f: a, b -> seq)'),
    ('use py "r.py"(f:a->prompts ? ( max_tokens = 2k,over_long = drop ),g:b->prompts( max_tokens=(n+1) ))',
     'use py "r.py" (f: a -> prompts?(max_tokens=2k, over_long=drop), g: b -> prompts(max_tokens=(n + 1)))'),
    ("param x:number=(1)", "param x: number = 1"),
    ("param x : text", "param x: text"), ("state beta=.1".replace(".1", "0.1"), "state beta = 0.1"),
    ("cluster  nodes = 1   gpus = 8", "cluster nodes=1 gpus=8"), ('cluster  "c.yaml"', 'cluster "c.yaml"'),
    ("model m=f( x )train g( lr = 1 )", "model m = f(x) train g(lr=1)"),
    ("place  a . *  on all  dp = 2", "place a.* on all dp=2"),
    ("place *.* on m", "place *.* on m"), ("place @gen  dp=2", "place @gen dp=2"),
    ("fn f ( ) { return 1 }", "fn f() { return 1 }"),
    ("fn f(x:token,g=1,)->( token,token ){return x,x}", "fn f(x: token, g = 1) -> (token, token) { return x, x }"),
    ("loss l(a:token;){return mean(a)}", "loss l(a: token;) { return mean(a) }"),
    ("loss l( ; a : seq , b=1 ) {}", "loss l(; a: seq, b = 1) {}"),
    ("flow f( steps = 1 , ) {\n\n}", "flow f(steps=1) {}"),
    ("flow f {}", "flow f {}"), ("", "")])
def test_declarations(old: str, new: str) -> None:
    assert keeps(old) == (f"{new}\n" if new else "")


def test_line_ends_and_blank_lines() -> None:
    assert keeps("\r\n\r\n# a\t \r\n\r\n\r\nparam x = 1\r\n\r\n\r\n\r\nparam y = 2   \t") == (
        "# a\n\nparam x = 1\n\nparam y = 2\n")
    assert keeps("# only a comment") == "# only a comment\n"
    assert keeps("\n\n\n") == ""
    assert keeps("flow f {\n\n\ta = 1\n\n\n\tb = 2\n\n}") == "flow f {\n  a = 1\n\n  b = 2\n}\n"


def test_what_is_aligned() -> None:
    assert keeps("param a = 1\nparam long = 2\nstate b = 3\n") == "param a    = 1\nparam long = 2\nstate b = 3\n"
    assert keeps("param a = 1\n\nparam long = 2\n") == "param a = 1\n\nparam long = 2\n"
    assert keeps("param a = 1\n# note\nparam long = 2\n") == "param a = 1\n# note\nparam long = 2\n"
    assert keeps("place a.b on m\nplace abc.* on m dp=2\n") == "place a.b   on m\nplace abc.* on m dp=2\n"
    assert keeps("param a = 1 # x\nparam b = 22\nparam c = 333 # y\n") == (
        "param a = 1    # x\nparam b = 22\nparam c = 333  # y\n")


def test_what_lines_of_different_kinds_do_not_share() -> None:
    text = """flow f {
  a = f(x)   on m
  metric b = g(x)
  long.call(x, y)   on m dp=2
  c = 1
  d     = f(x, yyyy)   on m
  eeeee = f(x)         on m
}
"""
    assert keeps(text) == text.replace("  c = 1", "  c     = 1")


def test_alignment_gives_way_to_the_width() -> None:
    text = f"flow f {{\n  a = {'x' * (WIDTH - 6)}\n  long = 1\n}}\n"
    assert keeps(text) == text


def test_the_margin_does_not_count() -> None:
    call = f"actor.train(gen, k={'x' * (WIDTH - 22)})"
    text = f"flow f {{\n  {call}   on mesh(0:8) dp=4 pp=2  # why\n}}\n"
    assert len(text.split("\n")[1]) > WIDTH and keeps(text) == text
    assert "(gen,\n      kk=xx" in keeps(text.replace("k=", "kk="))


def test_brackets_that_let_a_line_break_stay() -> None:
    long = " + ".join(["something_long"] * 9)
    result = keeps(f"param x = ({long})\n")
    assert result.startswith("param x = (\n    something_long\n    + something_long\n")
    assert keeps("param x = (a\n+ b)") == "param x = a + b\n"
    assert keeps(f"param x = {long}\n") == f"param x = {long}\n"  # without brackets there is nowhere to break


def test_the_tree_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(formatter, "_rows", lambda found: ["param x = 2"])
    with pytest.raises(NotTheSame):
        fmt("param x = 1\n")
    monkeypatch.setattr(formatter, "_rows", lambda found: ["param x = 1"])
    with pytest.raises(NotTheSame):
        fmt("param x = 1  # why\n")


@pytest.mark.parametrize("text", [
    "param x =\n", "flow f {", "flow f {\n  a = (1\n}\n", 'param x = "open\n', "param x = 'a'\n", "x = 1\n",
    "flow f {\n  every 2 {\n  a = 1\n}\n", "param x = 1 param y = 2\n", "fn f(x: ) {}\n", "\ufeffparam x = 1\n",
    f"param x = {'(' * 80}1{')' * 80}\n", "param x = a < b < c\n"])
def test_what_does_not_parse(text: str) -> None:
    with pytest.raises(Failure) as caught:
        fmt(text)
    assert caught.value.diagnostics == _errors(text)


def _errors(text: str) -> tuple:
    with pytest.raises(Failure) as caught:
        parse(SourceFile("t.rlf", text))
    return caught.value.diagnostics


BEFORE = {
    "comments": """#!first
#  own   line
param a=1# trailing
   # before b
param bb=2    # at b

# group


# second group
flow f(  # after the bracket
  steps = 3, # three
  # own, before seed
  seed = 1 # one
  # own, at the end
  ) {  # opened

  # before the first
  x = g(a # in the middle
    + b, c) # end of x
      # deeper than it should be

  every 2 {
    # only a comment
  }
  y = [ # list
  ]
  # at the end
} # closed
# last""",
    "long": """use py "rewards.py" (exact_match: gen, prompt -> seq, format_is_right: gen -> seq, length_penalty: gen, prompt -> seq)
model actor = causal_lm("models/a/very/long/path/to/some/model") train adamw(lr=1e-6, betas=[0.9, 0.95], warmup=10, schedule=linear)
loss very_long_name(logprobs: token; old: token, advantages: token, reference: token, beta = 0.04, low = 0.2, high = 0.28) {
return mean(mean(max(-advantages * exp(logprobs - old), -advantages * clip(exp(logprobs - old), 1 - low, 1 + high)) + beta * kl_k3(logprobs, reference) by seq))
}
flow f {
  actor.train(gen, loss=very_long_name(old=gen.logprobs, advantages=whiten(adv), reference=ref_lp, beta=beta), minibatches=4, epochs=2, shuffle=false) on mesh(0:8) dp=4 pp=2
  every 100 { save actor to "runs/a/very/long/name/of/a/directory/that/does/not/fit/beside/the/rest/of/this" }
}""",
    "page": """use std.ppo(kl_rewards,gae,ppo_clip,value_clip)
param base="models/sft"   # rlc compile ppo.rlf --set base=...
param lr=1e-6
model actor=causal_lm(base) train adamw(lr=lr)
model critic=value_model(base) train adamw(lr=(5e-6))
model ref=causal_lm(base)
flow ppo(steps=1000,seed=1) {
prompt=prompts.next()
gen=actor.generate(prompt,max_new_tokens=256) on mesh(0:8) dp=4 pp=2
v=critic.values(gen) on mesh(0:2) dp=2


r=kl_rewards(score,gen.logprobs,ref_lp,coef=0.1)
adv,ret=gae(r,v,gamma=1.0,lam=0.95)
critic.train(gen,loss=value_clip(old=v,ret=ret),minibatches=4) on mesh(4:8) dp=2 pp=2
actor.train(gen,loss=ppo_clip(old=gen.logprobs,adv=whiten(adv)),minibatches=4) on mesh(0:4) dp=2 pp=2
metric score=mean(score)
metric kl=mean((gen.logprobs-ref_lp))
every 100 {save actor,critic}
}""",
}
