"""`metric hist` and `metric table`: what a run writes, in real worlds, is what the rows say, under every placement."""

from __future__ import annotations

import io
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console

import rldsl
from rldsl import api
from rldsl.commands.report_run import run_page
from rldsl.diag import Failure
from rldsl.plan.arrays import Histogram, histogram
from rldsl.plan.codec import decode
from rldsl.plan.expr import Node
from rldsl.runtime.interpreter.array_metrics import array
from rldsl.runtime.metrics.live import ViewState, picture
from rldsl.runtime.metrics.reporter import ReportOptions
from rldsl.verify import verify
from tests.metrics.program import TEXT, TWO, lines, plan, run

LOGGED = """  metric reward = mean(reward)
  metric hist reward_of = reward bins=6 low=-0.5 high=5.5
  metric hist gap = gen.logprobs - ref_lp + 0.5 * gen.logprobs
  best = gen where reward >= max(reward by prompt)
  metric table answers = gen, reward, mean(gen.logprobs by seq), max(reward by prompt), mean(reward) rows=5
  metric table best = best, reward rows=3
"""
ARRAYS = TEXT.replace("  metric reward = mean(reward)\n", LOGGED)
FOUR = "cluster nodes=1 gpus=4\nplace actor.generate on mesh(0:4) dp=4\nplace actor.train on mesh(2:4) dp=2\n" \
       "place ref.* on mesh(1:2)\n"


def test_what_is_logged_is_what_the_samples_say(place: Path) -> None:
    run(plan(place, text=ARRAYS), place / "out", ReportOptions(samples=100))
    rows = lines(place / "out/samples/gen.jsonl")
    found = lines(place / "out/histograms.jsonl")
    assert [h["step"] for h in found] == [1, 2, 3]
    for step, line in enumerate(found, 1):
        mine = [r for r in rows if r["step"] == step]
        counts, _ = np.histogram([r["reward"] for r in mine], bins=6, range=(-0.5, 5.5))
        assert line["reward_of"] == {"low": -0.5, "high": 5.5, "below": 0, "above": 0, "nan": 0,
                                     "counts": counts.tolist()}
        gap = line["gap"]
        assert len(gap["counts"]) == 30 and sum(gap["counts"]) >= len(mine) and gap["low"] < gap["high"] <= 1e-3
        answers = [r for r in lines(place / "out/tables/answers.jsonl") if r["step"] == step]
        assert [(r["row"], r["prompt"], r["completion"], r["reward"]) for r in answers] == [
            (r["row"], r["prompt"], r["completion"], r["reward"]) for r in mine[:5]]
        for r in answers:
            of_prompt = [m["reward"] for m in mine if m["row"] // 2 == r["row"] // 2]
            assert r["max(reward by prompt)"] == max(of_prompt)
            assert r["mean(reward)"] == pytest.approx(np.mean([m["reward"] for m in mine]))
        best = [r for r in lines(place / "out/tables/best.jsonl") if r["step"] == step]
        kept = [m for m in mine if m["reward"] >= max(x["reward"] for x in mine if x["row"] // 2 == m["row"] // 2)]
        assert [(r["row"], r["reward"]) for r in best] == [(m["row"], m["reward"]) for m in kept[:3]]


@pytest.mark.thorough
def test_no_placement_changes_them(place: Path) -> None:
    run(plan(place, text=ARRAYS), place / "one")
    for name, where in (("two", TWO), ("four", FOUR)):
        run(plan(place, where, text=ARRAYS), place / name)
        for file in ("tables/answers.jsonl", "tables/best.jsonl"):
            mine, theirs = lines(place / name / file), lines(place / "one" / file)
            assert [_texts(r) for r in mine] == [_texts(r) for r in theirs] and len(theirs) in (9, 15)
        mine, theirs = lines(place / name / "histograms.jsonl"), lines(place / "one/histograms.jsonl")
        assert [h["reward_of"] for h in mine] == [h["reward_of"] for h in theirs]
        for a, b in zip(mine, theirs, strict=True):
            assert sum(a["gap"]["counts"]) == sum(b["gap"]["counts"])
            assert a["gap"]["low"] == pytest.approx(b["gap"]["low"], rel=1e-4)


def _texts(row: dict[str, Any]) -> dict[str, Any]:
    return {k: round(v, 3) if isinstance(v, float) else v for k, v in row.items()}


# ------------------------------------------------------------------------------------------------------- numbers

BINS = Node("histogram", (0,), "batch", "", (("to", "batch"), ("bins", 4)))


@pytest.mark.parametrize("elements, wanted", [
    ([0.0, 1.0, 2.0, 4.0], Histogram(0.0, 4.0, 0, 0, 0, (1, 1, 1, 1))),
    ([3.0], Histogram(2.5, 3.5, 0, 0, 0, (0, 0, 1, 0))),
    ([], Histogram(0.0, 1.0, 0, 0, 0, (0, 0, 0, 0))),
    ([math.nan, math.inf, -math.inf, 0.0, 4.0], Histogram(0.0, 4.0, 1, 1, 1, (1, 0, 0, 1))),
    ([math.nan], Histogram(0.0, 1.0, 0, 0, 1, (0, 0, 0, 0))),
    ([1e20, 1e20], Histogram(0.5e20, 1.5e20, 0, 0, 0, (0, 0, 2, 0))),
])
def test_a_histogram_of_elements(elements: list[float], wanted: Histogram) -> None:
    found = array(BINS, torch.tensor(elements, dtype=torch.float64), None, None, None)
    assert histogram(found.tolist()) == wanted


def test_a_range_counts_what_lies_outside() -> None:
    node = Node("histogram", (0,), "batch", "", (("to", "batch"), ("bins", 2), ("low", -1.0), ("high", 1.0)))
    x = torch.tensor([-2.0, -1.0, -0.5, 0.0, 1.0, 1.5, math.inf, math.nan])
    assert histogram(array(node, x, None, None, None).tolist()) == Histogram(-1.0, 1.0, 1, 2, 1, (2, 2))


def test_a_histogram_is_numpys() -> None:
    x = torch.randn(1000, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    node = Node("histogram", (0,), "batch", "", (("to", "batch"), ("bins", 17)))
    found = histogram(array(node, x, None, None, None).tolist())
    counts, edges = np.histogram(x.numpy(), bins=17)
    assert found.counts == tuple(counts) and found.edges() == pytest.approx(edges.tolist())


# ------------------------------------------------------------------------------------------------------- mistakes

@pytest.mark.parametrize("line, code, words", [
    ("metric hist reward_of = mean(reward)", "RL0208", "a histogram of a single number"),
    ("metric hist x = reward bins=0", "RL0205", "bins"),
    ("metric hist x = reward bins=1000", "RL0205", "at most 512"),
    ("metric hist x = reward low=0", "RL0215", "needs `high`"),
    ("metric hist x = reward low=1 high=-1", "RL0205", "`low` must be less than `high`"),
    ("metric hist x = reward rows=4", "RL0107", "no option `rows`"),
    ("metric hist x = gen", "RL0203", "gen"),
    ("metric hist nothing", "RL0101", "nothing"),
    ("metric hist gen.logprobs", "RL0001", "`metric hist NAME = gen.logprobs`"),
    ("metric hist mean(gen.logprobs by seq)", "RL0001", "`metric hist NAME = mean(gen.logprobs by seq)`"),
    ("metric hist actor/loss = reward", "RL0001", "`metric hist actor_loss = reward`"),
    ("metric hist gen.logprobs == 0", "RL0001", "`metric hist NAME = gen.logprobs == 0`"),
    ("metric hist x = reward low=edge - 0.5 high=1", "RL0001", "`low=(edge - 0.5)`"),
    ("metric hist x = reward low=0 high=2 * 3  # edge=1", "RL0001", "`high=(2 * 3)`"),
    ("metric hist x = reward low=(edge - 0.5) high=1", "RL0101", "edge"),
    ('metric hist x = "a"', "RL0205", "of numbers"),
    ("metric hist step = reward", "RL0111", "built-in"),
    ("metric hist length = reward", "RL0102", "twice"),
    ("metric table x = reward", "RL0203", "a table is of sequences"),
    ("metric table x = gen, gen.logprobs", "RL0201", "one number for each sequence"),
    ("metric table x = gen, reward, reward", "RL0102", "two columns"),
    ('metric table x = gen, "hi"', "RL0205", "not text"),
    ("metric table x = gen rows=65", "RL0205", "at most 64"),
    ("metric table x = gen, nobody", "RL0101", "nobody"),
    ("metric table gen = gen, reward\n  metric table gen", "RL0102", "twice"),
    ("more = ref.generate(prompt, n=3)\n  metric table x = gen, len(more)", "RL0202", "cannot be combined"),
])
def test_mistakes(place: Path, line: str, code: str, words: str) -> None:
    plan(place)
    text = TEXT.replace("  metric length = mean(len(gen))\n", f"  metric length = mean(len(gen))\n  {line}\n")
    found = [d for d in api.check(text, str(place / "p.rlf")) if d.severity == "error"]
    assert [d.code for d in found] == [code], found
    assert words in " ".join([found[0].title, found[0].label or "", found[0].help or ""])
    assert found[0].span is not None and found[0].span.text in line or code == "RL0001"


def test_a_loss_has_none(place: Path) -> None:
    plan(place)
    loss = "loss own(logprobs: token; old: token) {\n  metric hist ratio = exp(logprobs - old)\n  return -mean(logprobs)\n}\n"
    text = TEXT.replace("flow small", loss + "flow small").replace(
        "grpo(old=gen.logprobs, adv=group_norm(reward), ref=ref_lp, beta=0.05)", "own(old=gen.logprobs)")
    (found,) = [d for d in api.check(text, str(place / "p.rlf")) if d.severity == "error"]
    assert found.code == "RL0212" and "log it in the flow" in found.help


@pytest.mark.parametrize("change", ["width", "bins", "extent", "read", "rows", "column"])
def test_the_verifier_refuses(place: Path, change: str) -> None:
    made = decode(plan(place, text=ARRAYS), "p")
    values, programs = list(made.values), list(made.programs)
    at = next(i for i, v in enumerate(values) if v.extent == "array")
    if change == "width":
        values[at] = replace(values[at], width=values[at].width + 1)
    elif change == "extent":
        values[at] = replace(values[at], extent="batch", width=1)
    elif change == "read":  # as the input of arithmetic
        number = next(i for i, p in enumerate(programs) if any(n.op == "histogram" for n in p.nodes))
        nodes, [(name, out)] = programs[number].nodes, programs[number].outputs
        programs[number] = replace(programs[number], nodes=(*nodes, Node("neg", (out,))), outputs=((name, len(nodes)),))
    else:
        op = {"bins": "histogram", "rows": "table_rows", "column": "table_column"}[change]
        for number, p in enumerate(programs):
            attrs = {"bins": ("bins", 600), "rows": ("rows", 0), "column": ("frame", "prompt")}[change]
            programs[number] = replace(p, nodes=tuple(
                replace(n, attrs=tuple(attrs if a[0] == attrs[0] else a for a in n.attrs)) if n.op == op else n
                for n in p.nodes))
    with pytest.raises(Failure) as caught:
        verify(replace(made, values=tuple(values), programs=tuple(programs)))
    assert {d.code for d in caught.value.diagnostics} <= {"RL0612", "RL0616", "RL0617"}


# --------------------------------------------------------------------------------------------------- other readers

def test_python_and_the_page_have_them(place: Path) -> None:
    run(plan(place, text=ARRAYS), place / "out")
    found = rldsl.runs(place)[0]
    assert set(found.tables["table"]) == {"answers", "best"} and "reward" in found.tables
    histograms = found.histograms
    assert list(histograms["metric"]) == ["reward_of", "gap"] * 3 and list(histograms["step"]) == [1, 1, 2, 2, 3, 3]
    page = run_page(str(place / "out")).html()
    assert page.count('class="card metric"') == page.count('class="plot"'), "the script draws a curve in each"
    assert "Distributions" in page and "table answers" in page and page.count('class="spread"') == 2


def test_a_damaged_file_is_said(place: Path) -> None:
    run(plan(place, text=ARRAYS, steps=1), place / "out")
    (place / "out/histograms.jsonl").write_text('{"step": 1, "gap": {"low": 0}}\n')
    with pytest.raises(Failure) as caught:
        run_page(str(place / "out")).html()
    assert caught.value.diagnostics[0].code == "RL0784"


def test_a_resumed_run_continues_both_files(place: Path) -> None:
    text = ARRAYS.replace("minibatches=2)\n", "minibatches=2)\n  checkpoint every 2\n")
    run(plan(place, text=text), place / "whole")
    run(plan(place, text=text, steps=2), place / "out")
    run(plan(place, text=text), place / "out", again=True)
    for file in ("histograms.jsonl", "tables/answers.jsonl", "tables/best.jsonl"):
        assert lines(place / "out" / file) == lines(place / "whole" / file)


def test_the_live_view_shows_the_latest() -> None:
    seen = replace(ViewState("f", 3), histograms={"gap": Histogram(-1.0, 2.0, 0, 0, 0, (0, 1, 8, 1) * 20)})
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(picture(seen))
    text = console.export_text()
    assert "gap" in text and "-1" in text and "█" in text


def test_an_evaluation_and_every(place: Path) -> None:
    """Those of an evaluation cover all its rows; those of a block come when it runs."""
    text = ARRAYS.replace("  metric reward = mean(reward)\n", "").replace(
        "  actor.train(gen", "  every 2 { metric hist now_and_then = len(gen) }\n  actor.train(gen").replace(
        "\n}\n", "\n  every 3 {\n    eval prompts {\n      p = prompts.next()\n      e = ref.generate(p, n=1, greedy=true, "
        "max_new_tokens=4)\n      metric hist held = len(e)\n      metric table shown = e, len(e) rows=6\n    }\n  }\n}\n")
    run(plan(place, text=text), place / "out")
    found = lines(place / "out/histograms.jsonl")
    assert [set(h) & {"held", "now_and_then"} for h in found] == [set(), {"now_and_then"}, {"held"}]
    shown = lines(place / "out/tables/shown.jsonl")
    rows = len((place / "data/prompts.jsonl").read_text().splitlines())
    assert sum(found[2]["held"]["counts"]) == rows and len(shown) == min(rows, 6) and {r["step"] for r in shown} == {3}


def test_a_table_of_one_row_and_a_histogram_of_one_bin(place: Path) -> None:
    text = ARRAYS.replace(" rows=3\n", " rows=1\n  metric hist one = reward bins=1\n")
    run(plan(place, text=text), place / "out")
    best, answers = (lines(place / f"out/tables/{name}.jsonl") for name in ("best", "answers"))
    assert [row["step"] for row in best] == [1, 2, 3]
    for row in best:
        mine = [r["reward"] for r in answers if (r["step"], r["row"]) == (row["step"], row["row"])]
        assert mine in ([], [row["reward"]])
    for line in lines(place / "out/histograms.jsonl"):
        assert line["one"]["counts"] == [sum(line["reward_of"]["counts"])]
