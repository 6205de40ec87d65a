"""What a user reads: golden messages, one for each mistake; and any text at all gives messages, never an exception."""

from __future__ import annotations

import random
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rldsl import api
from rldsl.report import render
from rldsl.source import SourceFile
from rldsl.syntax.errors import UNITS
from rldsl.syntax.parse import parse_recovering
from tests.editors.words import units

ROOT = Path(__file__).parents[2]
HEAD = 'data d = jsonl("d.jsonl", batch=4)\nmodel m = causal_lm("m") train adamw(lr=1e-3)\nmodel r = causal_lm("m")\n'


def flow(*lines: str, head: str = HEAD) -> str:
    return head + "flow f(steps=2) {\n" + "".join(f"  {line}\n" for line in lines) + "}\n"


GEN = ("p = d.next()", "g = m.generate(p, n=4)")
PAIRS = 'use std.dpo (dpo)\ndata two = jsonl("e.jsonl", batch=4, kind="pairs")\n'
SIDES = ("q = two.next()", "a = r.logprobs(q.chosen)", "b = r.logprobs(q.rejected)")
CASES = {
    # syntax
    "unclosed_bracket": flow(*GEN, "x = mean(len(g)", "y = 3"),
    "unclosed_block": HEAD + "flow f(steps=1) {\n  p = d.next()\n",
    "unclosed_string": 'param a = "x\nparam b = 1\n' + flow(*GEN),
    "degree_without_number": flow("p = d.next()", "g = m.generate(p) on mesh(0:8) dp="),
    "two_errors": flow("p = = 1", *GEN, "x = g g"),
    "double_equals": "param a == 3\n" + flow(*GEN),
    "stray_brace": flow(*GEN) + "}\n",
    "wrong_head": "flow f(steps=) {\n  x = 1\n}\n",
    "missing_comma": flow("p = d.next()", "g = m.generate(p n=4)"),
    "single_quotes": "param a = 'x'\n" + flow(*GEN),
    "strange_character": "param a = 1 $ 2\n" + flow(*GEN),
    "name_after_number": "cluster nodes=10gpus=2\n" + flow(*GEN),
    "mesh_without_range": flow("p = d.next()", "g = m.generate(p) on mesh(0 8) dp=8"),
    # names
    "unknown_name": flow(*GEN, "x = reff.logprobs(g)"),
    "unknown_model_nearby": flow(*GEN, "metric k = mean(gg.logprobs)"),
    "unknown_option": flow("p = d.next()", "g = m.generate(p, max_new_token=3)"),
    "unknown_import": "use std.ppo (gaee)\n" + flow(*GEN),
    "unknown_module": "use std.pppo (gae)\n" + flow(*GEN),
    "bound_twice": flow(*GEN, "g = m.generate(p)"),
    "built_in_redefined": "param clip = 1.0\n" + flow(*GEN, "metric c = mean(len(g)) * clip"),
    "no_flow": HEAD,
    # types
    "wrong_level": "use std.ppo (gae)\n" + flow(*GEN, "a, b = gae(g.finished, g.logprobs)"),
    "metric_not_batch": flow(*GEN, "metric k = g.logprobs"),
    "mixed_frames": flow(*GEN, "h = m.generate(p)", "x = g.logprobs - h.logprobs"),
    "reduction_to_finer": flow(*GEN, "x = mean(mean(g.logprobs by seq) by seq)"),
    "head_without_call": flow(*GEN, "v = m.values(g)"),
    "train_frozen": "use std.sft (sft)\n" + flow("b = d.next()", "r.train(b, loss=sft())"),
    "option_out_of_range": flow("p = d.next()", "g = m.generate(p, top_p=1.5)"),
    "number_for_text": "model z = causal_lm(3)\n" + flow(*GEN),
    # placement
    "degrees_do_not_fill": flow("p = d.next()", "g = m.generate(p) on mesh(0:8) dp=4 tp=4"),
    "mesh_beyond_cluster": "cluster nodes=1 gpus=4\n" + flow("p = d.next()", "g = m.generate(p) on mesh(0:8) dp=8"),
    "mesh_does_not_divide": "cluster nodes=1 gpus=8\n" + flow("p = d.next()", "g = m.generate(p) on mesh(0:3) dp=3"),
    "unknown_degree": flow("p = d.next()", "g = m.generate(p) on mesh(0:8) ddp=8"),
    "selector_matches_nothing": "place actor.generate on mesh(0:2) dp=2\n" + flow(*GEN),
    "unknown_backend": flow("p = d.next()", 'g = m.generate(p) on mesh(0:8) dp=8 backend="megatorn"'),
    # what several places have a part in
    "library_mixes_frames": "use std.ppo (gae)\n" + flow(
        *GEN, "h = m.generate(p)", "a, b = gae(g.logprobs, h.logprobs)", "metric x = mean(a + b)"),
    "own_function_mixes_frames": "fn diff(a: token, b: token) -> token {\n  return a - b\n}\n" + flow(
        *GEN, "h = m.generate(p)", "x = diff(g.logprobs, h.logprobs)", "metric y = mean(x)"),
    "local_of_a_function": "fn ahead(x: token) -> token {\n  level = mean(x by seq)\n  return next(level)\n}\n" + flow(
        *GEN, "metric y = mean(ahead(g.logprobs))"),
    "missing_argument_of_library": "use std.ppo (gae)\n" + flow(*GEN, "a, b = gae(g.logprobs)"),
    "unclosed_function": "fn twice(x: token) -> token {\n  return 2 * x\n" + flow(*GEN),
    "unclosed_inner_block": flow(*GEN, "every 10 { save m"),
    "two_layouts": "use std.sft (sft)\n" + flow("b = d.next()", "m.train(b, loss=sft()) on mesh(0:4) dp=4",
                                                "m.train(b, loss=sft()) on mesh(0:4) dp=2 tp=2"),
    "two_rules": "place m.* on mesh(0:8) dp=8\nplace *.generate on mesh(0:4) dp=4\n" + flow(*GEN),
    "degrees_of_two": flow("p = d.next()", "g = m.generate(p) on mesh(0:8) dp=3 tp=4"),
    "loss_without_output": "use std.ppo (value_clip)\n" + flow(
        *GEN, "m.train(g, loss=value_clip(old=g.logprobs, ret=g.logprobs))"),
    "loss_of_parts_of_prompts": "loss bad(logprobs: token;) {\n  return mean(std(sum(logprobs by seq) by prompt))\n}\n"
                                + flow("p = d.next()", "g = m.generate(p, n=3)",
                                       "m.train(g, loss=bad(), minibatches=8)"),
    # one mistake, however often it shows
    "unknown_name_used_often": flow(*GEN, "x = mean(lenght)", "y = lenght + 1", "metric z = lenght"),
    "misspelt_import_used": "use std.ppo (gea)\n" + flow(*GEN, "a, b = gae(g.logprobs, g.logprobs)"),
    "misspelt_needed_option": "flow f(step=2) {\n}\n",
    "forgotten_import": flow(*GEN, "a, b = gae(g.logprobs, g.logprobs)"),
    # slips of other languages
    "compare_for_bind": flow(*GEN, "x == mean(len(g))", "metric y = x"),
    "colon_for_equals": flow("p = d.next()", "g = m.generate(p, n: 4)"),
    "two_statements_on_a_line": flow("p = d.next() g = m.generate(p)"),
    "double_ampersand": flow(*GEN, "x = where(g.logprobs > 0 && g.logprobs < 1, 1, 0)"),
    "curly_quotes": "param a = “x”\n" + flow(*GEN),
    "slash_comment": flow(*GEN, "x = mean(len(g)) // tokens"),
    "python_if": flow(*GEN, "if x > 0: save m"),
    "python_def": "def f(x):\n    return x\n" + flow(*GEN),
    "keyword_misspelt": "modle z = causal_lm(\"m\")\n" + flow(*GEN),
    "invisible_character": flow(*GEN, "x\u00a0= mean(len(g))"),
    "number_too_large": "param a = 1e999\n" + flow(*GEN),
    "huge_power": "param a = 2M ** 2M\n" + flow(*GEN),
    "frozen_in_library_use": "use std.ppo (ppo_clip)\n" + flow(
        *GEN, "r.train(g, loss=ppo_clip(old=g.logprobs, adv=g.logprobs))"),
}
CASES |= {
    # batches: what they are, and what is made of them
    "generate_from_answers": 'data a = jsonl("a.jsonl", batch=4, kind="answers")\n' + flow(
        "b = a.next()", "h = m.generate(b)"),
    "value_of_prompts": flow("p = d.next()", "metric x = mean(p.logprobs)"),
    "value_of_a_call": flow(*GEN, "metric x = mean(g.entropy)"),
    "value_misspelt": flow(*GEN, "metric x = mean(g.logprob)"),
    "call_of_a_batch": flow(*GEN, "x = g.logprobs(m)"),
    "selection_of_a_call": flow("p = d.next()", "gen = m.generate(p) where len(gen) > 3", "metric n = mean(len(gen))"),
    "selection_in_a_list": "use std.sft (sft)\n" + flow(*GEN, "x = [g where len(g) > 3]"),
    "names_in_a_call": "use std.sft (sft)\n" + flow(*GEN, "m.train(g with x=len(g), loss=sft())"),
    "selection_of_values_in_a_call": flow(*GEN, "metric n = mean(len(g) where len(g) > 3)"),
    "selection_for_a_reduction": flow(*GEN, "metric n = mean(g where len(g) > 3)"),
    "selection_by_tokens_in_a_call": flow(*GEN, "metric n = count(g where g.logprobs < 0)"),
    "selection_as_an_argument_of_a_function": "fn kept(x: seq) -> batch {\n  return count(x where x > 0)\n}\n" + flow(
        *GEN, "metric n = kept(len(g))"),
    "selection_after_a_call": "use std.sft (sft)\n" + flow(*GEN, "m.train(g, loss=sft()) where len(g) > 3"),
    "until_first": flow("repeat until 3 > 2 {", *GEN, "}"),
    "repeat_in_repeat_until": flow("repeat {", "repeat {", *GEN, "} until mean(len(g)) > 3 max 2",
                                   "} until 2 > 1 max 3"),
    "repeat_until_in_repeat": flow("repeat 3 {", "repeat {", *GEN, "} until mean(len(g)) > 3 max 2", "}"),
    # forms of the language in the wrong place
    "unit_after_a_name": "param bs = 8\n" + flow(*GEN).replace("batch=4", "batch=bs sequences"),
    "ema_without_decay": flow(*GEN, "ema r from m"),
    "ema_without_decay_every": flow(*GEN, "ema r from m every 10"),
    "ema_with_named_decay": flow(*GEN, "ema r from m decay=0.99"),
    "two_values_at_once": flow(*GEN, "a, b = mean(len(g)), 3"),
    "option_without_value": flow("p = d.next()", "g = m.generate(p, n=, top_p=0.9)"),
    # constants as a program writes them
    "true_for_a_number": flow("p = d.next()", "g = m.generate(p, n=true)"),
    "text_for_a_number": flow("p = d.next()", 'g = m.generate(p, n="4")'),
    "list_for_a_condition": flow("p = d.next()", 'g = m.generate(p, greedy=["x", true])'),
    "word_that_is_no_choice": 'model z = causal_lm("z", dtype="float16")\n' + flow(*GEN),
    "shortest_beyond_longest": flow("p = d.next()", "g = m.generate(p, min_new_tokens=9, max_new_tokens=3)"),
    # losses and batches that mean nothing
    "selection_in_a_function": "fn kept(x: token) -> token {\n  y = x where x > 0\n  return y\n}\n" + flow(
        *GEN, "metric n = mean(kept(g.logprobs))"),
    "selection_in_a_loss": "loss l(logprobs: token;) {\n  y = logprobs where logprobs > -1\n  return mean(y)\n}\n"
                           + flow(*GEN, "m.train(g, loss=l())"),
    "loss_without_gradient": "loss l(logprobs: token;) {\n  return mean(stop_gradient(logprobs))\n}\n" + flow(
        *GEN, "m.train(g, loss=l())"),
    "loss_of_conditions": "loss l(logprobs: token;) {\n  return mean(logprobs > -1) + count(logprobs)\n}\n" + flow(
        *GEN, "m.train(g, loss=l())"),
    "data_before_the_semicolon": "loss l(logprobs: token, adv: token) {\n  return mean(adv * logprobs)\n}\n" + flow(
        *GEN, "m.train(g, loss=l(adv=g.logprobs))"),
    "loss_as_a_value": "use std.sft (sft)\n" + flow(*GEN, "metric x = sft()"),
    "function_for_a_loss": "use std.ppo (gae)\n" + flow(*GEN, "m.train(g, loss=gae(g.logprobs, g.logprobs))"),
    "reward_of_prompts": 'use py "std/rewards.py" (exact_match: gen -> seq)\n' + flow(
        "p = d.next()", "metric x = mean(exact_match(p))"),
    "length_of_prompts": flow("p = d.next()", "q = p where len(p) > 3", "g = m.generate(q)", "metric n = mean(len(g))"),
    "too_many_minibatches": "use std.sft (sft)\n" + flow(*GEN, "m.train(g, loss=sft(), minibatches=17)"),
    "same_side_twice": PAIRS + flow(*SIDES, "m.train(q.chosen, q.chosen, loss=dpo(ref_chosen=a, ref_rejected=a))"),
    "sides_swapped": PAIRS + flow(*SIDES, "m.train(q.rejected, q.chosen, loss=dpo(ref_chosen=a, ref_rejected=b))"),
    # names that are bound, and not here
    "bound_below": flow(*GEN, "metric x = mean(y)", "y = g.logprobs"),
    "bound_by_itself": flow(*GEN, "x = mean(x)"),
    "bound_in_a_block": flow(*GEN, "every 2 { y = mean(len(g)) }", "metric x = y"),
    "number_known_at_run_time": flow(*GEN, "h = m.generate(p, temperature=mean(g.logprobs))"),
}
SEVERAL = {"two_errors": 2}


@pytest.mark.parametrize("name", CASES)
def test_messages(name, golden):
    found = api.check(CASES[name], "page.rlf")
    assert len(found) == SEVERAL.get(name, 1), render(found)
    golden(f"diagnostics/{name}.txt", stable(render(found)) + "\n")


def stable(text: str) -> str:
    """The message without the line numbers of the library, which change with it."""
    head, std, rest = text.partition("::: std/")
    if not std:
        return text
    lines = [re.sub(r"^ *\d* (?=[|=:])", "  ", line) for line in f"{head}{std}{rest}".splitlines()]
    return "\n".join(re.sub(r"^ +(--> |::: )", r"  \1", line) for line in lines)


def test_the_pages_around_the_mistakes_are_right():
    assert not api.check(flow(*GEN, "metric n = mean(len(g))"), "page.rlf")


@pytest.mark.parametrize("name", CASES)
def test_no_message_speaks_python(name):
    """None of its constants or lists stands in a message outside the program's own text."""
    for d in api.check(CASES[name], "page.rlf"):
        told = " ".join((d.title, d.label, d.help, *(x.text for x in d.labels)))
        assert not re.search(r"\b(True|False|None)\b|'\w+'|\(\)|\bframes?\b", told), told


@pytest.mark.parametrize(("line", "advice"), [
    ("x = f(a,,b)", "statement of its own"), ("x = mean(len(g),, 3)", "statement of its own"),
    ("ema r from m 0.9 0.8", "decay"), ("x = g 8", "unit"), ("x = where(len(g) > 3, 1)", "selection"),
    ("x = mean(len(g)) on mesh(0:4 8)", "mesh(0:8)"), ("x == ", "give")])
def test_advice_that_does_not_fit_is_not_given(line, advice):
    found = api.check(flow(*GEN, line), "page.rlf")
    assert found and not any(advice in d.help for d in found)


def test_units_are_those_of_the_grammar():
    assert set(UNITS) == units()


PROGRAMS = [p.read_text() for p in (*ROOT.glob("examples/*.rlf"), *ROOT.glob("stdlib/*.rlf"))]


def check_robust(text: str) -> None:
    _, found = parse_recovering(SourceFile("x.rlf", text))
    for d in found:
        assert d.span is not None and 0 <= d.span.start <= len(text) and d.title
        assert render([d]).startswith(f"error[{d.code}]")


@settings(max_examples=300, deadline=None)
@given(st.text(alphabet=st.sampled_from("abmx01 .,:;=+-*/()[]{}\"'\n#\\$é\t<>!"), max_size=60))
def test_any_text_gives_messages(text):
    check_robust(text)


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 2**32))
def test_mutated_programs_give_few_messages(seed):
    """Drop, double or swap a few characters of a real program."""
    draw = random.Random(seed)
    text = draw.choice(PROGRAMS)
    for _ in range(draw.randint(1, 2)):
        at, width = draw.randrange(len(text)), draw.randint(1, 3)
        put = draw.choice(["", text[at : at + width] * 2, draw.choice("(){}=,.\"\n")])
        text = text[:at] + put + text[at + width :]
    check_robust(text)
    assert len(parse_recovering(SourceFile("x.rlf", text))[1]) <= 6


@pytest.mark.parametrize("text", ["(" * 5000, "param a = " + "-" * 5000 + "1", "param a = " + "not " * 3000 + "b",
                                  "flow f {" * 500, "param a = 1" + " + 1" * 3000, "\x00", "\ufeffparam a = 1"])
def test_hostile_texts(text):
    check_robust(text)
