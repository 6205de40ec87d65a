"""What a user reads: golden messages, one for each mistake; and any text at all gives messages, never an exception."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from hypothesis import given, settings, strategies as st

from rldsl import api
from rldsl.report import render
from rldsl.source import SourceFile
from rldsl.syntax.parse import parse_recovering

ROOT = Path(__file__).parents[2]
HEAD = 'data d = jsonl("d.jsonl", batch=4)\nmodel m = causal_lm("m") train adamw(lr=1e-3)\nmodel r = causal_lm("m")\n'


def flow(*lines: str, head: str = HEAD) -> str:
    return head + "flow f(steps=2) {\n" + "".join(f"  {line}\n" for line in lines) + "}\n"


GEN = ("p = d.next()", "g = m.generate(p, n=4)")
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
    "loss_not_affine": "loss bad(logprobs: token; adv: token) {\n  return mean(logprobs * adv) / mean(logprobs)\n}\n"
                       + flow(*GEN, "m.train(g, loss=bad(adv=g.logprobs))"),
    "option_out_of_range": flow("p = d.next()", "g = m.generate(p, top_p=1.5)"),
    "number_for_text": "model z = causal_lm(3)\n" + flow(*GEN),
    # placement
    "degrees_do_not_fill": flow("p = d.next()", "g = m.generate(p) on mesh(0:8) dp=4 tp=4"),
    "mesh_beyond_cluster": "cluster nodes=1 gpus=4\n" + flow("p = d.next()", "g = m.generate(p) on mesh(0:8) dp=8"),
    "mesh_does_not_divide": "cluster nodes=1 gpus=8\n" + flow("p = d.next()", "g = m.generate(p) on mesh(0:3) dp=3"),
    "unknown_degree": flow("p = d.next()", "g = m.generate(p) on mesh(0:8) ddp=8"),
    "selector_matches_nothing": "place actor.generate on mesh(0:2) dp=2\n" + flow(*GEN),
    "not_supported_yet": flow("p = d.next()", "g = m.generate(p) on mesh(0:8) dp=4 cp=2"),
}
SEVERAL = {"two_errors": 2, "wrong_head": 1}


@pytest.mark.parametrize("name", CASES)
def test_messages(name, golden):
    found = api.check(CASES[name], "page.rlf")
    assert len(found) == SEVERAL.get(name, 1), render(found)
    golden(f"diagnostics/{name}.txt", render(found) + "\n")


def test_the_pages_around_the_mistakes_are_right():
    assert not api.check(flow(*GEN, "metric n = mean(len(g))"), "page.rlf")


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
