"""What a program may not say about the whole minibatch, and plans that claim what does not hold."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from rldsl import api, preview
from rldsl.diag import Failure
from rldsl.plan import backends
from rldsl.plan.codec import encode
from rldsl.plan.events import Train
from rldsl.plan.model import Plan
from rldsl.plan.projection import event_paths
from tests.tiny import make_model, write_jsonl
from tests.verify.faults import change, codes

PROGRAM = """
use std.gkd (gkd)
data d = jsonl("d.jsonl", batch=4)
model student = causal_lm("m") train adamw(lr=1e-3)
model teacher = causal_lm("m")
loss mine(logprobs: token; r: seq, w: token) {{ return {loss} }}
loss other(logprobs_at: entry; t: entry, w: token) {{ return {entries} }}
flow run(steps=2) {{
  p = d.next()
  gen = student.generate(p, n=3)
  r = len(gen)
  w = gen.logprobs
  t = teacher.top(gen, k=4)
  v = teacher.distribution(gen)
{body}
}}
"""
TRAIN = "  student.train(gen, loss=mine(r=r, w=w){options})"
OTHER = "  student.train(gen, loss=other(t={t}, w=w))"
PLAIN, EACH = "mean(logprobs * r * w)", "mean(sum(exp(t) * (t - logprobs_at) by token))"


def text(loss: str = PLAIN, entries: str = EACH, body: str = TRAIN.format(options="")) -> str:
    return PROGRAM.format(loss=loss, entries=entries, body=body)


NEEDS = {
    PLAIN: "", "mean(logprobs * w) + 0.1 * sum(logprobs * w * r) / 3": "", "mean(mean(logprobs * w by seq) * r)": "",
    "mean(max(logprobs * w by seq) * r)": "", "mean(logsumexp(logprobs * w by seq) * r)": "",
    "exp(mean(logprobs * w * r))": "not linear", "max(logprobs * w * r)": "not linear",
    "mean(logprobs * w * r) ** 2": "not linear", "std(logprobs * w * r)": "not linear",
    "mean((logprobs - mean(logprobs)) * w * r)": "used for single elements",
    "mean(logprobs * (w - mean(w)) * r)": "reduces data over the minibatch",
    "mean(logprobs * w * (r - mean(r by prompt)))": "all sequences of a prompt",
    "mean(logprobs * rank(w) * r)": "orders the elements of the minibatch",
    "mean(logprobs * w * rank(r by prompt))": "orders the elements of each prompt",
    "mean(sort(logprobs * w by seq) * r)": "orders the elements of each seq",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("plans")
    make_model(root / "m")
    write_jsonl(root / "d.jsonl", [{"prompt": "1+1="}] * 8)
    return root


def compiled(folder: Path, monkeypatch: pytest.MonkeyPatch, **parts: str) -> Plan:
    monkeypatch.chdir(folder)
    (folder / "main.rlf").write_text(text(**parts))
    return api.compile("main.rlf")


def train_of(plan: Plan) -> Train:
    return next(e for e, _ in event_paths(plan) if isinstance(e, Train))


@pytest.mark.parametrize("loss", NEEDS)
def test_which_losses_take_two_passes(folder: Path, monkeypatch: pytest.MonkeyPatch, loss: str) -> None:
    plan = compiled(folder, monkeypatch, loss=loss)
    event = train_of(plan)
    assert (NEEDS[loss] in event.first_pass) and bool(NEEDS[loss]) == bool(event.first_pass)
    assert not event.first_pass or "main.rlf:6:" in event.first_pass  # where it is
    (spread,) = [s for s in plan.spreads if s.id == event.spread]
    assert (spread.granularity == "prompt") == ("by prompt" in loss)
    assert codes(plan) == set()


@pytest.mark.parametrize("options", [", minibatches=4", ", minibatches=2", ", minibatch=2 prompts", ", minibatch=6"])
def test_minibatches_of_whole_prompts(options: str) -> None:
    loss = "mean(logprobs * w * (r - mean(r by prompt)))"
    assert api.check(text(loss, body=TRAIN.format(options=options)), "main.rlf") == ()


@pytest.mark.parametrize("options", [", minibatches=3", ", minibatches=12", ", minibatch=4", ", minibatches=6"])
def test_minibatches_of_parts_of_prompts(options: str) -> None:
    (found,) = api.check(text("mean(logprobs * w * rank(r by prompt))", body=TRAIN.format(options=options)), "main.rlf")
    assert found.code == "RL0205" and "all sequences of each prompt" in found.title
    assert "rank(r by prompt)" in found.label and found.span is not None and found.span.text == options.split("=")[1]


@pytest.mark.parametrize(("parts", "code", "where"), [
    (dict(loss="mean(rank(logprobs) * w * r)"), "RL0209", None),
    (dict(loss="mean(w) * mean(r) / std(w)"), "RL0209", None),
    (dict(loss="mean(uniform(logprobs) * r) * mean(w)"), "RL0210", None),
    (dict(loss="mean(logprobs * w * sort(r by token))"), "RL0208", "r"),
    (dict(loss="mean(logprobs * w * rank(r, 2))"), "RL0204", "rank"),
    (dict(loss="mean(logprobs * w * rank(r by prompts))"), "RL0101", "prompts"),
    (dict(loss="mean(logprobs * w * r) * rank(2)"), "RL0208", "2"),
    (dict(body="  metric m = mean(rank(t.ids))"), "RL0345", "t.ids"),
    (dict(body="  metric m = mean(rank(gen))"), "RL0203", "gen"),
    (dict(loss="mean(across(logprobs * w))"), "RL0208", None),
    (dict(body="  metric m = mean(across(r by prompt))"), "RL0208", None),
    (dict(body="  metric m = mean(sort(r by gen))"), "RL0208", None),
    (dict(body="  rank = mean(r)"), "RL0111", "rank"),
    (dict(entries="mean(sum(exp(t) * (t - logprobs_at) * rank(w) by token))", body=OTHER.format(t="v")), "RL0348",
     "rank(w)"),
    (dict(entries="mean(sum(exp(t) * (t - logprobs_at) * mean(w) by token))", body=OTHER.format(t="v")), "RL0348",
     "mean(w)"),
    (dict(entries="mean(sum(sort(logprobs_at) * w * t by token))", body=OTHER.format(t="v")), "RL0348",
     "sort(logprobs_at)"),
])
def test_mistakes(parts: dict[str, str], code: str, where: str | None) -> None:
    found = api.check(text(**parts), "main.rlf")
    assert [d.code for d in found] == [code], found
    assert where is None or found[0].span is not None and found[0].span.text == where


def test_what_is_reduced_to_tokens_may_be_compared_with_the_minibatch(folder: Path, monkeypatch: pytest.MonkeyPatch
                                                                      ) -> None:
    entries = "std(sum(exp(t) * (t - logprobs_at) by token)) + mean(w) * mean(sum(exp(t) * logprobs_at by token))"
    plan = compiled(folder, monkeypatch, entries=entries, body=OTHER.format(t="v"))
    assert train_of(plan).first_pass and codes(plan) == set()


def with_program(plan: Plan, name: str, edit: Callable[[str], str]) -> Plan:
    """The plan with attributes of the nodes of a program changed."""
    def changed(value: object) -> object:
        return edit(value) if isinstance(value, str) else value

    return replace(plan, programs=tuple(
        p if p.id != name else replace(p, nodes=tuple(
            replace(n, attrs=tuple((k, changed(v) if k in ("within", "to") else v) for k, v in n.attrs))
            for n in p.nodes)) for p in plan.programs))


def test_the_verifier_knows_what_needs_the_pass(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for loss in [x for x, why in NEEDS.items() if why]:
        plan = compiled(folder, monkeypatch, loss=loss)
        event = train_of(plan)
        data_alone = "mean(w)" in loss  # adds up, but of other numbers
        assert data_alone or "RL0618" in codes(change(plan, event.id, first_pass="")), loss


def test_the_verifier_wants_whole_prompts(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for loss in ("mean(logprobs * w * (r - mean(r by prompt)))", "mean(logprobs * w * rank(r by prompt))"):
        plan = compiled(folder, monkeypatch, loss=loss)
        spread = train_of(plan).spread
        rows = tuple(replace(s, granularity="row") if s.id == spread else s for s in plan.spreads)
        assert "RL0618" in codes(replace(plan, spreads=rows))
    plain = compiled(folder, monkeypatch)
    spread = train_of(plain).spread
    prompts = tuple(replace(s, granularity="prompt") if s.id == spread else s for s in plain.spreads)
    assert "RL0538" in codes(replace(plain, spreads=prompts))


@pytest.mark.parametrize("level", ["token", "entry", "turn", "elsewhere"])
def test_the_verifier_knows_orders(folder: Path, monkeypatch: pytest.MonkeyPatch, level: str) -> None:
    plan = compiled(folder, monkeypatch, loss="mean(logprobs * w * rank(r by prompt))")
    event = train_of(plan)
    assert "RL0616" in codes(with_program(plan, event.loss, lambda word: level if word == "prompt" else word))


@pytest.mark.parametrize("level", ["token", "batch", "turn", "elsewhere"])
def test_the_verifier_adds_up_across_prompts_alone(folder: Path, monkeypatch: pytest.MonkeyPatch, level: str) -> None:
    plan = compiled(folder, monkeypatch, loss="mean(across(logprobs * w by prompt) * w)")
    assert codes(plan) == set() and train_of(plan).first_pass
    forged = with_program(plan, train_of(plan).loss, lambda word: level if word == "prompt" else word)
    assert "RL0616" in codes(forged)


def test_the_preview_says_why(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    for loss, said in ((PLAIN, False), ("exp(mean(logprobs * w * r))", True)):
        (folder / "main.rlf").write_text(text(loss))
        lines = " ".join(" ".join(preview.first_passes([train_of(api.compile("main.rlf"))])).split())
        assert ("student.train" in lines and "exp(mean(logprobs * w * r))" in lines) == bool(lines) == said


def test_a_backend_without_it_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = backends.described("torch")
    assert real is not None
    less = replace(real, first_pass=False)
    plan = compiled(folder, monkeypatch, loss="exp(mean(logprobs * w * r))")
    for module in ("rldsl.placement.backends", "rldsl.verify.issue_order"):
        monkeypatch.setattr(f"{module}.described", lambda name: less)
    assert "RL0537" in codes(plan)
    with pytest.raises(Failure) as caught:
        compiled(folder, monkeypatch, loss="exp(mean(logprobs * w * r))")
    assert [d.code for d in caught.value.diagnostics] == ["RL0327"]
    assert codes(compiled(folder, monkeypatch)) == set()


def test_the_first_pass_takes_time_and_memory(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one, two = (compiled(folder, monkeypatch, loss=loss) for loss in (PLAIN, "exp(mean(logprobs * w * r))"))
    assert json.loads(encode(two).splitlines()[0])["world"] == 1
    assert max(c.peak_bytes for c in two.classes) > max(c.peak_bytes for c in one.classes)
