"""What is wrong with a program on distributions: one message, at its place. And with a plan: the verifier says so."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from rldsl import api
from rldsl.diag import Diagnostic, Failure
from rldsl.plan.events import Infer, Train
from rldsl.plan.model import Plan
from rldsl.plan.projection import event_paths
from tests.tiny import make_model, write_jsonl
from tests.verify.faults import change, codes

PROGRAM = """
use std.gkd (gkd)
data d = jsonl("d.jsonl", batch=4)
model student = causal_lm("m") train adamw(lr=1e-3)
model teacher = causal_lm("{teacher}")
model judge   = reward_model("rm")
loss alone(logprobs_at: entry; w: token) {{ return mean(sum(logprobs_at * w by token)) }}
loss likely(top: entry; t: entry) {{ return mean(top * t) }}
loss ids(logprobs_at: entry; t: entry, i: entry) {{ return mean(logprobs_at * t * i) }}
loss prefer(logprobs_at: entry, other: entry; t: entry) {{ return mean(logprobs_at * t) }}
loss both(logprobs_at: entry; t: entry, w: entry) {{ return mean(sum(logprobs_at * t * w by token)) }}
loss total(logprobs_at: entry; t: entry) {{ return mean(logprobs_at * t) }}
loss median_of(logprobs_at: entry; t: entry) {{ return mean(median(logprobs_at * t by token)) }}
loss of_others(logprobs_at: entry; t: entry) {{
  return mean(sum(exp(t) * next(sum(exp(logprobs_at) * t by token)) by token))
}}
flow run(steps=2) {{
  p = d.next()
  gen   = student.generate(p, n=2)
  other = student.generate(p, n=2)
  t = teacher.top(gen, k={k})
  o = teacher.top(other, k=4)
{body}
}}
"""
GOOD = "  student.train(gen, loss=gkd(teacher=t.logprobs))\n  metric r = mean(t.rest)"


def check(body: str) -> tuple[Diagnostic, ...]:
    return tuple(api.check(PROGRAM.format(body=body, k=4, teacher="m"), "main.rlf"))


def test_the_program_is_right() -> None:
    assert check(GOOD) == ()


@pytest.mark.parametrize(("body", "code", "where"), [
    ("  metric m = t.logprobs", "RL0201", "t.logprobs"),                          # a reduction is missing
    ("  metric m = mean(t.ids)", "RL0345", "t.ids"),
    ("  x = t.ids + 1", "RL0345", "t.ids"),
    ("  metric m = mean(t.logprobs - o.logprobs)", "RL0202", "t.logprobs - o.logprobs"),
    ("  metric m = mean(t.logprob)", "RL0112", "logprob"),
    ("  kept = gen where t.logprobs > 0", "RL0201", "t.logprobs > 0"),
    ("  x = next(t.logprobs)", "RL0201", "t.logprobs"),
    ("  x = gen with l=t.logprobs", "RL0201", "t.logprobs"),
    ("  x = sum(gen.logprobs by entry)", "RL0208", "gen.logprobs"),
    ("  x = sum(t.logprobs by turn)", "RL0201", "t.logprobs"),
    ("  x = teacher.top(gen)", "RL0215", "teacher.top(gen)"),
    ("  x = teacher.top(gen, k=0)", "RL0205", "0"),
    ("  x = teacher.top(gen, k=1.5)", "RL0205", "1.5"),
    ("  x = teacher.top(p, k=4)", "RL0213", "p"),
    ("  x = judge.top(gen, k=4)", "RL0206", "top"),
    ("  x = teacher.logprobs_at(gen)", "RL0204", "teacher.logprobs_at(gen)"),
    ("  x = teacher.logprobs_at(gen, t)", "RL0203", "t"),
    ("  x = teacher.logprobs_at(gen, t.logprobs)", "RL0203", "t.logprobs"),
    ("  x = teacher.logprobs_at(gen, o.ids)", "RL0202", "o.ids"),
    ("  student.train(gen, loss=gkd(teacher=gen.logprobs))", "RL0201", "gen.logprobs"),
    ("  student.train(gen, loss=gkd(teacher=t))", "RL0203", "t"),
    ("  student.train(gen, loss=gkd(teacher=o.logprobs))", "RL0202", "o.logprobs"),
    ("  student.train(gen, loss=alone(w=gen.logprobs))", "RL0346", "alone"),
    ("  student.train(gen, loss=likely(t=t.logprobs))", "RL0206", "likely"),
    ("  s = student.top(gen, k=4)\n  student.train(gen, loss=ids(t=t.logprobs, i=s.logprobs))", "RL0346", "s.logprobs"),
    ("  student.train(gen, other, loss=prefer(t=t.logprobs))", "RL0202", None),
    ('  student.train(gen, loss=gkd(teacher=t.logprobs, others="drop"))', "RL0205", None),
    ("  w = teacher.distribution(gen)\n  metric m = mean(sum(exp(w) by token))", "RL0348", "w"),
    ("  w = teacher.distribution(gen)\n  student.train(gen, loss=gkd(teacher=w + 1))", "RL0348", "w"),
    ("  w = teacher.distribution(gen)\n  metric m = mean(w)", "RL0348", "w"),
    ("  w = teacher.distribution(other)\n  student.train(gen, loss=gkd(teacher=w))", "RL0202", "w"),
    ("  w = teacher.distribution(gen)\n  student.train(gen, loss=both(t=t.logprobs, w=w))", "RL0346", "w"),
    ("  w = teacher.distribution(gen)\n  student.train(gen, loss=total(t=w))", "RL0348", None),
    ("  w = teacher.distribution(gen)\n  student.train(gen, loss=median_of(t=w))", "RL0348", None),
    ("  w = teacher.distribution(gen)\n  student.train(gen, loss=of_others(t=w))", "RL0348", None),
    ("  w = teacher.distribution(gen) on mesh(0:2) dp=2\n  student.train(gen, loss=gkd(teacher=w)) on mesh(0:2) tp=2",
     "RL0349", None),
    ("  w = teacher.distribution(gen) on mesh(2:4) dp=2\n  student.train(gen, loss=gkd(teacher=w)) on mesh(0:2) dp=2",
     "RL0349", None),
])
def test_one_message_at_its_place(body: str, code: str, where: str | None) -> None:
    found = check(body)
    assert [d.code for d in found] == [code], found
    if where is not None:
        assert found[0].span is not None and found[0].span.text == where


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("plans")
    make_model(root / "m")
    make_model(root / "wide", vocab_size=64)
    make_model(root / "biased", family="phi")
    make_model(root / "rm", head="reward_model")
    write_jsonl(root / "d.jsonl", [{"prompt": "1+1="}] * 8)
    return root


def compiled(folder: Path, monkeypatch: pytest.MonkeyPatch, k: int = 4, teacher: str = "m") -> Plan:
    monkeypatch.chdir(folder)
    body = GOOD + "\n  s = student.logprobs_at(gen, t.ids)\n  metric s = mean(s - t.logprobs)"
    (folder / "main.rlf").write_text(PROGRAM.format(body=body, k=k, teacher=teacher))
    return api.compile(str(folder / "main.rlf"))


def test_more_tokens_than_there_are(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(Failure) as caught:
        compiled(folder, monkeypatch, k=47)
    assert [d.code for d in caught.value.diagnostics] == ["RL0347"]


def test_a_teacher_finds_only_tokens_that_the_student_knows(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = compiled(folder, monkeypatch, teacher="wide")
    tops = {e.ids: e.words for e, _ in event_paths(plan) if isinstance(e, Infer) and e.output_name == "top"}
    assert tops == {"t.ids": 46, "o.ids": 0}  # nobody reads the ids of the other one


def test_a_teacher_of_other_tokens_or_one_that_changes(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    for teacher, body in (("wide", "  w = teacher.distribution(gen)\n  student.train(gen, loss=gkd(teacher=w))"),
                          ("m", "  w = student.distribution(gen)\n  student.train(gen, loss=gkd(teacher=w))")):
        (folder / "main.rlf").write_text(PROGRAM.format(body=body, k=4, teacher=teacher))
        with pytest.raises(Failure) as caught:
            api.compile(str(folder / "main.rlf"))
        assert [d.code for d in caught.value.diagnostics] == ["RL0349"]


def test_a_teacher_whose_output_embedding_has_a_bias(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its hidden states alone do not say what its distributions are; its most likely tokens do."""
    monkeypatch.chdir(folder)
    for body, codes in (("  w = teacher.distribution(gen)\n  student.train(gen, loss=gkd(teacher=w))", ["RL0349"]),
                        ("  w = teacher.top(gen, k=4)\n  student.train(gen, loss=gkd(teacher=w.logprobs))", [])):
        (folder / "main.rlf").write_text(PROGRAM.format(body=body, k=4, teacher="biased"))
        assert _codes(folder) == codes


def _codes(folder: Path) -> list[str]:
    try:
        api.compile(str(folder / "main.rlf"))
    except Failure as failure:
        return [d.code for d in failure.diagnostics]
    return []


def test_the_verifier_knows_whole_distributions(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    body = "  w = teacher.distribution(gen)\n  student.train(gen, loss=gkd(teacher=w))\n" \
        "  x = teacher.top(gen, k=3)\n  metric x = mean(x.rest)"
    (folder / "main.rlf").write_text(PROGRAM.format(body=body, k=4, teacher="m"))
    plan = api.compile(str(folder / "main.rlf"))
    assert codes(plan) == set()
    train = next(e for e, _ in event_paths(plan) if isinstance(e, Train))
    made = next(e for e, _ in event_paths(plan) if isinstance(e, Infer) and e.output_name == "distribution")
    assert "RL0615" in codes(change(plan, train.id, heads=(("w", "student"),)))
    assert "RL0615" in codes(change(plan, train.id, heads=(), head_layouts=()))
    assert "RL0614" in codes(change(plan, train.id, reads=tuple(b for b in train.reads if "teacher" not in b))) | \
        codes(change(plan, train.id, reads=tuple(b for b in train.reads if "w@" not in b)))
    assert codes(change(plan, train.id, reads=tuple(b for b in train.reads if "teacher" not in b)))
    assert codes(change(plan, made.id, output_name="top")) & {"RL0614", "RL0615"}

    def value(**new: object) -> Plan:
        return replace(plan, values=tuple(replace(v, **new) if v.id == "w" else v for v in plan.values))

    for mutated in (value(width=3), value(entries="t.ids"), value(extent="entry"), value(entries="")):
        assert codes(mutated)


def test_the_verifier_knows_entry_values(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = compiled(folder, monkeypatch, teacher="wide")
    assert codes(plan) == set()
    top, at = (next(e for e, _ in event_paths(plan) if isinstance(e, Infer) and e.output_name == name)
               for name in ("top", "logprobs_at"))
    train = next(e for e, _ in event_paths(plan) if isinstance(e, Train))
    assert codes(change(plan, top.id, words=0)) == {"RL0615"}      # tokens that the student does not know
    assert codes(change(plan, top.id, words=3)) == {"RL0615"}      # fewer than are looked for
    assert codes(change(plan, top.id, ids="")) & {"RL0614", "RL0615"}
    assert codes(change(plan, at.id, ids="")) & {"RL0614", "RL0615"}
    assert codes(change(plan, at.id, output_name="logprobs")) & {"RL0615"}
    assert codes(change(plan, train.id, ids="")) & {"RL0614", "RL0615", "RL0617"}
    assert codes(change(plan, train.id, ids="t.logprobs")) & {"RL0615", "RL0617"}

    def value(id_: str, **new: object) -> Plan:
        return replace(plan, values=tuple(replace(v, **new) if v.id == id_ else v for v in plan.values))

    for mutated in (value("t.ids", width=5), value("t.logprobs", width=5), value("t.logprobs", entries=""),
                    value("t.ids", dtype="f32"), value("t.logprobs", entries="t.logprobs"), value("t.ids", width=0),
                    value("s", level="token"), value("s", entries="o.ids"), value("t.ids", extent="hidden")):
        assert codes(mutated)
