"""What people call values and frames that the compiler had to name: source text with its line, never `expr#1`."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from rldsl.api import build_graph
from rldsl.cli import main
from rldsl.graph import picture
from rldsl.graph.computations import LONGEST, label
from rldsl.plan.codec import decode, encode
from rldsl.plan.events import Compute
from rldsl.plan.model import Frame, Value
from rldsl.plan.naming import Labels, describe_event, label_text, labelled
from rldsl.plan.projection import event_paths
from rldsl.plan.visible_plan import visible_plan
from rldsl.source import SourceFile, Span
from rldsl.verify import verify
from tests.tiny import make_all

PROGRAM = """
use std.dapo (dapo)
use py "rewards.py" (digits: gen -> seq)
cluster nodes=1 gpus=2
data prompts = jsonl("data/prompts.jsonl", batch=4, max_prompt_tokens=16)
data held = jsonl("data/prompts.jsonl", batch=4, max_prompt_tokens=16)
model actor = causal_lm("models/sft") train adamw(lr=1e-3)
model judge = reward_model("models/rm")
state beta = 0.1
flow f(steps=2, seed=1) {
  repeat {
    prompt = prompts.next()
    gen    = actor.generate(prompt, n=4, max_new_tokens=8)
    right  = digits(gen) + judge.score(gen)
    adv    = right - mean(right by prompt)
    kept   = gen where std(right by prompt) > 0
  } until count(kept) >= 8 max 2
  actor.train(kept, loss=dapo(old=kept.logprobs, adv=adv / (beta + 1)), minibatches=2)
  beta = clip(beta * 1.01 + 0.001 * mean(len(kept)), 0.0, 0.5)
  metric reward = mean(right)
  every 2 {
    eval held {
      p = held.next()
      a = actor.generate(p, n=1, max_new_tokens=8)
      metric acc = mean(digits(a))
    }
  }
}
"""
INTERNAL = re.compile(r"\b(?!e?r#)[a-z]\w*'?#\d|\.all\b|\|kept\b")  # `expr#1`, `beta'#1`, `gen.all`, `adv|kept`


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("labels")
    make_all(folder)
    (folder / "rewards.py").write_text("def digits(rows):\n    return [1.0] * len(rows)\n")
    (folder / "n.rlf").write_text(PROGRAM)
    return folder


@pytest.fixture(scope="module")
def compiled(base: Path) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(base)
        done = CliRunner().invoke(main, ["compile", "n.rlf", "-o", "n.plan"])
    assert done.exit_code == 0, done.output
    (base / "preview.txt").write_text(done.output)
    return base


def rlc(base: Path, *arguments: str) -> Result:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(base)
        done = CliRunner().invoke(main, list(arguments))
    assert done.exit_code == 0, done.output
    return done


def test_the_preview_shows_source_texts(compiled: Path) -> None:
    text = (compiled / "preview.txt").read_text()
    assert not INTERNAL.search(text)
    for name in ("adv / (beta + 1) (n.rlf:18)", "std(right by prompt) > 0 (n.rlf:16)", "metric acc = mean(digits(a))",
                 "kept (collected).tokens"):
        assert name in text


@pytest.mark.parametrize("command", [("show", "n.plan"), ("show", "n.plan", "--event", "44"),
                                     ("show", "n.plan", "--event", "38"), ("graph", "n.rlf"),
                                     ("graph", "n.rlf", "--format", "svg"), ("sim", "n.plan", "--cluster", "h100x8"),
                                     ("emit", "n.plan", "--rank", "0"), ("diff", "n.plan", "n.plan")])
def test_no_text_shows_a_name_of_the_compiler(compiled: Path, command: tuple[str, ...]) -> None:
    assert not INTERNAL.search(re.sub(r'data-(from|to|id)="[^"]*"', "", rlc(compiled, *command).output))


def test_the_report_shows_source_texts(compiled: Path) -> None:
    rlc(compiled, "report", "n.plan", "-o", "n.html")
    text = re.sub(r"<(script|style).*?</\1>|&#\d+;|#[0-9a-f]{3,6}\b", "", (compiled / "n.html").read_text(), flags=re.S)
    assert not INTERNAL.search(text) and "adv / (beta + 1) (n.rlf:18)" in text


def test_programs_still_read_the_ids(compiled: Path) -> None:
    assert '"expr#2@' in rlc(compiled, "--json", "show", "n.plan").output
    plan = decode((compiled / "n.plan").read_bytes(), "n.plan")
    assert any(v.id == "expr#2" for v in plan.values) and any(f.id == "gen.all" for f in plan.frames)


def test_a_plan_with_labels_for_ids_is_still_sound(compiled: Path) -> None:
    plan = decode((compiled / "n.plan").read_bytes(), "n.plan")
    verify(labelled(plan))
    assert labelled(replace(plan, values=tuple(replace(v, label="") for v in plan.values),
                            frames=tuple(replace(f, label="") for f in plan.frames))).body == plan.body


def test_a_shifted_line_is_no_difference(compiled: Path) -> None:
    (compiled / "m.rlf").write_text(PROGRAM.replace("state beta", "\n\n\nstate beta"))
    rlc(compiled, "compile", "m.rlf", "-o", "m.plan")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(compiled)
        text = CliRunner().invoke(main, ["diff", "n.plan", "m.plan"]).output
    assert "calls" not in text and "blocks" not in text and "inserted" not in text


def test_the_words_of_an_event_leave_out_its_own_line(compiled: Path) -> None:
    plan = visible_plan(decode((compiled / "n.plan").read_bytes(), "n.plan"))
    [made] = [describe_event(e) for e, _ in event_paths(plan) if isinstance(e, Compute) and "adv / (" in e.display_name]
    assert made.title == "compute adv / (beta + 1)" and made.line == "n.rlf:18"


def span(text: str) -> Span:
    return Span(SourceFile("src/p.rlf", text), 0, len(text))


def test_a_long_expression_is_shortened_in_the_middle() -> None:
    assert label(span("mean(r by prompt)")) == "mean(r by prompt) (p.rlf:1)"
    long = "mean(" + " + ".join(f"a{i}" for i in range(40)) + ")"
    text = label_text(label(span(long)))
    assert len(text) == LONGEST and text.startswith("mean(a0 + a1") and text.endswith("a39)") and "…" in text
    assert label(span("mean(  # why\n  r)")) == "mean( r) (p.rlf:1)"


def test_equal_texts_are_told_apart() -> None:
    values = [Value(f"expr#{i}", "", "batch", "batch", label="mean(r) (p.rlf:1)") for i in (1, 2, 3)]
    labels = Labels.of([*values, Value("x", "", "batch", "batch")], [])
    assert [labels.name(v.id) for v in values] == [
        "mean(r) (p.rlf:1)", "mean(r) (p.rlf:1) [2]", "mean(r) (p.rlf:1) [3]"]
    assert labels.name("x") == "x" and labels.buffer("expr#2@s1") == "mean(r) (p.rlf:1) [2]@s1"


def test_a_label_does_not_pass_for_another_value() -> None:
    values = [Value("reward", "", "batch", "batch"), Value("expr#1", "", "batch", "batch", label="reward")]
    assert Labels.of(values, [Frame("gen", "gen", "d", 1, 1, label="reward")]).of_id == {
        "expr#1": "reward [2]", "gen": "reward [3]"}


def test_labels_of_a_plan_from_elsewhere_are_escaped(compiled: Path) -> None:
    plan = decode((compiled / "n.plan").read_bytes(), "n.plan")
    values = tuple(replace(v, label="\x1b[2J" if v.id == "expr#2" else v.label) for v in plan.values)
    (compiled / "evil.plan").write_bytes(encode(replace(plan, values=values)))
    for command in (("show", "evil.plan"), ("sim", "evil.plan", "--cluster", "h100x8")):
        assert "\x1b" not in rlc(compiled, *command).output


def test_a_label_in_a_picture_ends_no_string(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(base)
    graph = build_graph(SourceFile("p.rlf", PROGRAM))
    values = tuple(replace(v, label='"]<script>#1') if v.label else v for v in graph.values)
    text = picture.mermaid(replace(graph, values=values))
    assert '"]<' not in text and "#quot;]#lt;script>#35;1" in text
