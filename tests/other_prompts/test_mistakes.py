"""What is wrong with a call that gives responses other prompts: one message each, at its place."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from rldsl import api
from rldsl.diag import Diagnostic, Failure
from rldsl.graph.build import build
from rldsl.graph.model import Derive, Infer, nodes
from rldsl.plan.events import Derive as DeriveEvent
from rldsl.plan.events import Infer as InferEvent
from rldsl.plan.model import Plan
from rldsl.plan.projection import event_paths
from rldsl.source import SourceFile
from rldsl.syntax.parse import parse
from rldsl.verify import verify
from tests.other_prompts.programs import folder, run, text
from tests.tiny import CHARACTERS, make_model
from tests.verify.faults import change, codes, row

PROGRAM = '''use py "r.py" (ask: gen -> prompts(max_tokens=64), some: gen -> prompts?(max_tokens=64), Talk: env,
  dropped: gen -> prompts(max_tokens=64, over_long=drop), hint: prompt -> prompts(max_tokens=64), f: gen -> seq,
  again: q -> prompts(max_tokens=64))
data d = jsonl("d.jsonl", batch=4)
data held = jsonl("d.jsonl", batch=4)
buffer good = rows(capacity=16)
data seen = jsonl("d.jsonl", batch=4, images="pictures", over_long=error)
data sorted = jsonl("d.jsonl", batch=4, kind="pairs")
model actor = causal_lm("m") train adamw(lr=1e-3)
model other = causal_lm("m")
loss nll(logprobs: token;) { return -mean(logprobs) }
flow run(steps=2) {
  p = d.next()
  gen = actor.generate(p, n=2)
  far = actor.generate(p, n=2)
  look = seen.next()
  shown = actor.generate(look, n=2)
  talk = actor.generate(p, env=Talk, n=2, max_turns=2, max_new_tokens=8, max_tokens=600)
  kept = gen where len(gen) > 3
  best = pick(gen, len(gen))
  two = sorted.next()
  lp = other.logprobs(gen)
BODY
}
'''
SOURCE = "class Talk:\n    def reset(self): ...\n    def step(self, text): ...\n\n\n" + "".join(
    f"def {name}(rows): ...\n\n\n" for name in ("ask", "some", "dropped", "hint", "f", "again"))


def check(body: str) -> tuple[Diagnostic, ...]:
    try:
        build(parse(SourceFile("main.rlf", PROGRAM.replace("BODY", body))), {}, read=lambda path: SOURCE)
    except Failure as failure:
        return failure.diagnostics
    return ()


@pytest.mark.parametrize("body", [
    "metric m = mean(other.logprobs(gen, prompt=ask(gen)))", "x = other.entropy(gen, prompt=hint(p))\n  metric m = mean(x)",
    "metric m = mean(actor.logprobs(kept, prompt=ask(kept)))", "metric m = mean(other.logprobs(best, prompt=ask(best)))",
    "metric m = mean(other.logprobs(gen, prompt=p))", "metric m = mean(other.logprobs(best, prompt=hint(p)))",
    "metric m = mean(other.logprobs(two.chosen, prompt=ask(two.chosen)))",
    "both = concat(gen, far)\n  metric m = mean(other.logprobs(both))",
    "t = other.top(gen, k=3, prompt=ask(gen))\n  metric m = mean(t.rest)",
    "every 2 { metric m = mean(other.logprobs(gen, prompt=ask(gen))) }",
])
def test_what_may_be_asked(body: str) -> None:
    assert check(body) == ()


@pytest.mark.parametrize(("body", "code", "under"), [
    ("x = other.logprobs(gen, prompt=3)", "RL0203", "3"),
    ('x = other.logprobs(gen, prompt="think")', "RL0203", '"think"'),
    ("x = other.logprobs(gen, prompt=ask)", "RL0203", "ask"),
    ("x = other.logprobs(gen, prompt=lp)", "RL0203", "lp"),
    ("x = other.logprobs(gen, prompt=f(gen))", "RL0203", "f(gen)"),
    ("x = other.logprobs(gen, prompt=two)", "RL0203", "two"),
    ("x = other.logprobs(gen, prompt=nothing)", "RL0101", "nothing"),
    ("x = other.logprobs(gen, prompt=gen)", "RL0213", "gen"),
    ("x = other.logprobs(gen, prompt=far)", "RL0213", "far"),
    ("x = other.logprobs(p, prompt=ask(gen))", "RL0213", "p"),
    ("x = other.logprobs(talk, prompt=ask(talk))", "RL0213", "ask(talk)"),
    ("x = other.logprobs(shown, prompt=ask(shown))", "RL0213", "ask(shown)"),
    ("x = other.logprobs(gen, prompt=some(gen))", "RL0213", "some(gen)"),
    ("x = other.logprobs(gen, prompt=dropped(gen))", "RL0213", "dropped(gen)"),
    ("q = some(gen)\n  x = other.logprobs(gen, prompt=again(q))", "RL0213", "again(q)"),
    ("x = other.logprobs(gen, prompt=ask(far))", "RL0202", "ask(far)"),
    ("x = other.logprobs(kept, prompt=ask(gen))", "RL0202", "ask(gen)"),
    ("x = other.logprobs(best, prompt=ask(gen))", "RL0202", "ask(gen)"),
    ("x = other.logprobs(two.chosen, prompt=hint(p))", "RL0202", "hint(p)"),
    ("x = other.logprobs(gen, prompt=ask(gen), prompt=ask(gen))", "RL0215", "prompt=ask(gen)"),
    ("x = other.logprobs(gen, promt=ask(gen))", "RL0107", "promt"),
    ("x = other.top(gen, prompt=ask(gen))", "RL0215", None),
    ("x = actor.generate(p, prompt=ask(gen))", "RL0107", "prompt"),
    ("actor.train(gen, loss=nll(), prompt=ask(gen))", "RL0107", "prompt"),
])
def test_mistakes(body: str, code: str, under: str | None) -> None:
    (found,) = check(body)
    assert found.code == code, found
    assert under is None or found.span is not None and found.span.text == under
    assert found.help or code == "RL0101"


@pytest.mark.parametrize(("body", "way_out"), [
    ("x = actor.generate(p, prompt=ask(gen))", "`m.generate(ask(x))`"),
    ("actor.train(gen, loss=nll(), prompt=ask(gen))", "`teacher.logprobs(gen, prompt=ask(gen))`"),
])
def test_calls_without_another_prompt_say_what_to_do_instead(body: str, way_out: str) -> None:
    (found,) = check(body)
    assert way_out in found.help


EVALUATION = '''  eval held {
    q = held.next()
    g = actor.generate(q, n=2)
    asked = ask(g)
    BODY
  }'''


@pytest.mark.parametrize("given", ["asked", "q", "hint(q)", "ask(g)"])
def test_in_an_evaluation_a_call_is_a_statement(given: str) -> None:
    assert check(EVALUATION.replace("BODY", f"x = other.logprobs(g, prompt={given})\n    metric m = mean(x)")) == ()


@pytest.mark.parametrize("given", ["asked", "q", "hint(q)"])
def test_prompts_from_the_block_are_not_put_before_what_it_has_collected(given: str) -> None:
    (found,) = check(EVALUATION.replace("BODY", f"metric m = mean(other.logprobs(g, prompt={given}))"))
    assert found.code == "RL0213" and "leaves rows out" not in str(found.label), found
    assert f"`x = m.logprobs(g, prompt={given})`" in found.help


def test_rows_of_a_buffer_keep_numbers_and_no_prompts() -> None:
    (found,) = check("old = good.sample(4)\n  x = other.logprobs(old, prompt=ask(old))\n  good.add(gen)")
    assert found.code == "RL0213" and "`kept = gen with x=m.logprobs(gen, prompt=ask(gen))`" in found.help


def test_the_same_prompts_are_put_before_responses_once() -> None:
    graph = build(parse(SourceFile("main.rlf", PROGRAM.replace("BODY", """  asked = ask(gen)
  metric a = mean(other.logprobs(gen, prompt=asked))
  metric b = mean(actor.entropy(gen, prompt=asked))
  metric c = mean(other.logprobs(gen, prompt=hint(p)))"""))), {}, read=lambda path: SOURCE)
    made = [n for n in nodes(graph.items) if isinstance(n, Derive) and n.op == "reprompt"]
    assert len(made) == 2
    calls = [n for n in nodes(graph.items) if isinstance(n, Infer)]
    of = {v.id: v.frame for v in graph.values}
    assert {of[n.value] for n in calls} == {"gen"} and [n.frame for n in calls].count(made[0].frame) == 2


# ------------------------------------------------------------------------------------------------------ at run time

ASKS = """
  prompt = prompts.next()
  gen    = student.generate(prompt, n=2, max_new_tokens=4)
  lp     = teacher.logprobs(gen, prompt={ask}(gen))
  metric lp = mean(lp)
"""


@pytest.mark.thorough
@pytest.mark.parametrize(("ask", "most", "code", "says"), [
    ("ask", 3, "RL0789", "`ask` returned a prompt of"), ("nothing", 64, "RL0776", "`nothing` returned an empty string"),
    ("nobody", 64, "RL0776", "`nobody` returned None"), ("number", 64, "RL0776", "`number` returned"), ("fails", 64, "RL0775", "no such column"),
])
def test_a_function_that_writes_no_prompt_stops_the_run(ask: str, most: int, code: str, says: str, tmp_path: Path,
                                                        capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(Exception) as caught:  # noqa: PT011, raised by the world
        run(folder(tmp_path), ASKS.format(ask=ask), most=most, steps=1)
    said = str(caught.value) + capfd.readouterr().err
    assert code in said and says in said
    for refused in ("prompts?", "over_long=drop"):  # what `prompt=` does not take is not advised without saying so
        assert refused not in said or "`prompt=`, which needs one for each response" in " ".join(said.split()), said


def test_a_teacher_with_other_tokens_is_refused(tmp_path: Path) -> None:
    base = folder(tmp_path)
    make_model(base / "teacher", num_hidden_layers=2, characters="".join(reversed(CHARACTERS)))
    (base / "p.rlf").write_text(text(ASKS.format(ask="ask")))
    with pytest.raises(Failure) as caught:
        compiled(base)
    assert caught.value.diagnostics[0].code == "RL0316"


# ----------------------------------------------------------------------------------------------------- forged plans


def compiled(base: Path) -> Plan:
    before = os.getcwd()
    os.chdir(base)
    try:
        return api.compile("p.rlf", {}, None)
    finally:
        os.chdir(before)


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Plan:
    base = folder(tmp_path_factory.mktemp("forged"))
    (base / "p.rlf").write_text(text(ASKS.format(ask="ask") + "  far = teacher.logprobs(gen)\n  metric far = mean(far)\n"))
    return compiled(base)


def test_what_the_compiler_makes_is_accepted(plan: Plan) -> None:
    assert verify(plan).events > 20


def derive(plan: Plan) -> DeriveEvent:
    return next(e for e, _ in event_paths(plan) if isinstance(e, DeriveEvent) and e.op == "reprompt")


def test_forged_plans_are_refused(plan: Plan) -> None:
    e, frames = derive(plan), {f.id: i for i, f in enumerate(plan.frames)}
    asked, own = e.parts
    call = next(x for x, _ in event_paths(plan) if isinstance(x, InferEvent) and x.frame == e.frame)
    plain = next(x for x, _ in event_paths(plan) if isinstance(x, InferEvent) and x.frame == own)
    forged = {
        "responses alone": change(plan, e.id, parts=(own,)), "itself": change(plan, e.id, parts=(own, own)),
        "turned round": change(plan, e.id, parts=(own, asked)), "nothing": change(plan, e.id, parts=()),
        "no prompts are read": change(plan, e.id, also_reads=()),
        "another operation": change(plan, e.id, op="whole"), "text": change(plan, e.id, op="text"),
        "no room": row(plan, "frames", frames[e.frame], max_prompt_tokens=1),
        "longer responses": row(plan, "frames", frames[e.frame], max_response_tokens=99),
        "another heat": row(plan, "frames", frames[e.frame], temperature=0.5),
        "a selection": row(plan, "frames", frames[e.frame], selected_from=own),
        "lacking rows": row(plan, "frames", frames[asked], present_in=asked),
        "a value of other rows": change(plan, call.id, frame=asked),
        "a value of its own frame": change(plan, plain.id, value=call.value),
    }
    assert [name for name, p in forged.items() if not codes(p)] == []


def test_a_value_of_the_frame_behind_is_a_value_of_the_responses_alone(plan: Plan) -> None:
    """An inference on the responses' own frame cannot make a value of the frame with other prompts."""
    e = derive(plan)
    plain = next(x for x, _ in event_paths(plan) if isinstance(x, InferEvent) and x.frame == e.source)
    at = next(i for i, v in enumerate(plan.values) if v.id == plain.value)
    assert codes(replace(plan, values=tuple(replace(v, frame=e.frame) if i == at else v
                                            for i, v in enumerate(plan.values))))
