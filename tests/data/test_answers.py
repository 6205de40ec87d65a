"""Rows with several answers to a prompt: what is read of them, what is wrong with them, and whole runs on them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rldsl import api
from rldsl.diag import Failure
from rldsl.plan.events import Fetch, Loop
from rldsl.plan.model import Plan
from rldsl.runtime.data import open_source
from rldsl.verify import verify
from tests.data.makers import WRITERS, declared, jsonl, opened, texts, wrong
from tests.checkpoint import runs
from tests.end_to_end.programs import Metrics, compile_program, run_program
from tests.samples import thorough_between
from tests.tiny import make_model

ROWS = [{"prompt": f"{i}+{i}=", "answer": [str(2 * i), "no", "maybe " * (i % 2)], "score": [1.5, i, -1], "weight": i}
        for i in range(8)]


@pytest.mark.parametrize("format", list(WRITERS))
def test_prompts_and_the_answers_of_each(tmp_path: Path, tokenizer: str, format: str) -> None:
    rows = [{**r, "score": [float(x) for x in r["score"]]} for r in ROWS]
    source = opened(tmp_path, tokenizer, rows[:4], "answers", format, answers=3, numbers=("score", "weight"), batch=2)
    found = source.step(0, 1)
    assert list(found) == ["prompts", ""]  # in the order of the frames of a fetch
    assert texts(source) == {"prompts": ["0+0=", "1+1="],
                             "": ["0+0=0$", "0+0=no$", "0+0=$", "1+1=2$", "1+1=no$", "1+1=maybe $"]}
    assert found[""].prompt_lens == [4] * 6 and found["prompts"].response_lens == [0, 0]


def test_limits_are_those_of_each_answer(tmp_path: Path, tokenizer: str) -> None:
    dropped = opened(tmp_path, tokenizer, ROWS, "answers", answers=3, batch=4, max_answer_tokens=4, over_long="drop")
    assert len(dropped.table) == 4 and "4 of 8 rows dropped" in dropped.note  # "maybe " is too long
    cut = opened(tmp_path, tokenizer, ROWS, "answers", answers=3, batch=2, max_answer_tokens=4, tells=True)
    assert texts(cut)[""][5] == "1+1=mayb" and "4 of 8 rows truncated" in cut.note


def test_chat(tmp_path: Path, chat: str) -> None:
    rows = [{"prompt": [{"role": "user", "content": "1"}],
             "answer": [[{"role": "assistant", "content": "2"}], "3", [{"role": "assistant", "content": "4"}]]}]
    assert texts(opened(tmp_path, chat, rows, "answers", answers=3))[""] == ["u.1 a.2$", "u.1 a.3$", "u.1 a.4$"]


GOOD = {"prompt": "1+1=", "answer": ["2", "3", "4"], "score": [1, 2, 3]}


@pytest.mark.parametrize("change, code, words", [
    ({"answer": ["2", "3"]}, "RL0757", "the column `answer` has 2 answers, not 3"),
    ({"answer": ["2", "3", "4", "5"]}, "RL0757", "the column `answer` has 4 answers, not 3"),
    ({"answer": []}, "RL0757", "the column `answer` has 0 answers, not 3"),
    ({"answer": "2"}, "RL0747", "the column `answer` is a string, not a list of 3 answers"),
    ({"answer": None}, "RL0747", "is null, not a list of 3 answers"),
    ({"answer": [{"role": "assistant", "content": "2"}]}, "RL0747", "is a list, not a list of 3 answers"),
    ({"answer": ["2", 3, "4"]}, "RL0747", "answer 2 of the column `answer` is a number"),
    ({"answer": ["2", "3", None]}, "RL0747", "answer 3 of the column `answer` is null"),
    ({"answer": ["\ud800", "3", "4"]}, "RL0743", "answer 1 of the column `answer` contains an unpaired surrogate"),
    ({"score": [1, 2]}, "RL0747", "the column `score` has 2 numbers for 3 answers"),
    ({"score": [1, "a", 2]}, "RL0747", "number 2 of the column `score` is a string, not a number"),
    ({"score": None}, "RL0747", "the column `score` is null, not a number"),
    ({"prompt": ""}, "RL0749", "the prompt is empty"),
])
def test_a_row_that_does_not_fit(tmp_path: Path, tokenizer: str, change: dict[str, Any], code: str, words: str) -> None:
    path = jsonl(tmp_path, [GOOD, {**GOOD, **change}, GOOD])
    (found,) = wrong(declared(path, tokenizer, "answers", answers=3, numbers=("score",), batch=1))
    assert (found.code, found.place) == (code, f"{path}:2") and words in found.title


@pytest.mark.parametrize("missing", ["answer", "score"])
def test_a_row_without_a_column(tmp_path: Path, tokenizer: str, missing: str) -> None:
    path = jsonl(tmp_path, [{k: v for k, v in GOOD.items() if k != missing}])
    (found,) = wrong(declared(path, tokenizer, "answers", answers=3, numbers=("score",), batch=1))
    assert found.code == "RL0746" and f"`{missing}`" in found.title


def test_a_list_without_a_number_of_answers(tmp_path: Path, tokenizer: str) -> None:
    path = jsonl(tmp_path, [GOOD])
    (found,) = wrong(declared(path, tokenizer, "answers", batch=1))
    assert found.code == "RL0747" and "`answers=3` in the declaration" in found.help


def test_one_number_counts_for_all_answers(tmp_path: Path, tokenizer: str) -> None:
    path = jsonl(tmp_path, [{**GOOD, "score": 2}])
    open_source(declared(path, tokenizer, "answers", answers=3, numbers=("score",), batch=1), 1)


# ------------------------------------------------------------------------------------------------------ programs

PAGE = """data d = jsonl("{rows}", batch=4{unit}, answers={answers}, numbers=["score", "weight"]{more}, max_prompt_tokens=8,
  max_answer_tokens=8)
use std.tpo (tpo)
use std.listwise (dpo_ranked)
use std.dpo (dpo)
state seen of d = 0
model actor = causal_lm("{base}") train adamw(lr=1e-3)
model ref   = causal_lm("{base}")
flow f(steps=2, seed=1) {{
  row = d.next()
{body}
}}
"""
BODIES = {
    "tpo": "  actor.train(row, loss=tpo(index=row.index, beta=0.3), minibatches=2)\n  metric total = mean(row.score)",
    "ranked": "  actor.train(row, loss=dpo_ranked(ref=ref.logprobs(row)), minibatch=2 prompts)\n"
              "  row.seen = row.seen + 1\n  metric seen = mean(row.seen)\n"
              "  metric order = mean(rank(row.score by prompt) * row.weight)",
    "pairs of picks": "  best  = pick(row, row.score)\n  worst = pick(row, -row.score)\n  duel  = pair(best, worst)\n"
                      "  good  = ref.logprobs(duel.chosen)\n  bad   = ref.logprobs(duel.rejected)\n"
                      "  actor.train(duel.chosen, duel.rejected, loss=dpo(ref_chosen=good, ref_rejected=bad))\n"
                      "  metric r = mean(duel.chosen.score - duel.rejected.score)",
    "with samples": "  gen  = actor.generate(row.prompts, n=2, max_new_tokens=4, temperature=0.8)\n"
                    "  gold = row where row.index == 0\n"
                    "  metric gap = mean(mean(sum(gen.logprobs by seq) by prompt))\n"
                    "  actor.train(gold, loss=sum_of())\n  metric n = count(gold)",
    "selected": "  kept = row where mean(row.score by prompt) > 0.4\n"
                "  metric kept = count(kept)\n  metric s = mean(sum(kept.score by prompt))\n"
                "  actor.train(row, loss=tpo(index=row.index))",
    "numbers of picks": "  best  = pick(row, row.score)\n  worst = pick(row, -row.score)\n  duel  = pair(best, worst)\n"
                        "  rest  = others(row)\n  mix   = concat(best, worst)\n  high  = best where best.score > 1\n"
                        "  most  = max(row.score by prompt)\n  least = min(row.score by prompt)\n"
                        "  metric best = mean(best.score) - mean(most)\n  metric count = count(best.score)\n"
                        "  metric duel = mean(duel.chosen.score - duel.rejected.score) - mean(most - least)\n"
                        "  metric same = sum(where(rest.index == row.index, 1, 0))\n"
                        "  metric mix  = 2 * mean(mix.score) - mean(most + least)\n"
                        "  metric high = sum(high.score) - sum(where(most > 1, most, 0))\n"
                        "  actor.train(best, loss=sum_of())",
}
PLACES = {
    "dp": "place *.* on mesh(0:4) dp=4 mbs=1",
    "tp": "place *.* on mesh(0:4) dp=2 tp=2 mbs=2",
    "pp": "place *.* on mesh(0:4) pp=2 dp=2 mbs=1",
    "zero": "place *.train on mesh(0:4) dp=4 zero=3 mbs=7",
    "cp": "place *.* on mesh(0:4) cp=2 dp=2",
}


def page(folder: Path, base: Path, body: str, answers: int = 3, more: str = "", unit: str = " prompts") -> Path:
    text = PAGE.format(rows=jsonl(folder, ROWS), base=base, body=body, answers=answers, more=more, unit=unit)
    (folder / "p.rlf").write_text(text + "loss sum_of(logprobs: token) { return -mean(sum(logprobs by seq)) }\n")
    return folder / "p.rlf"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model") / "base", num_hidden_layers=2)


@pytest.fixture(scope="module")
def alone(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Metrics]]:
    made: dict[str, tuple[Path, Metrics]] = {}

    def of(name: str) -> tuple[Path, Metrics]:
        if name not in made:
            folder = tmp_path_factory.mktemp("alone")
            path = page(folder, base, BODIES[name])
            made[name] = path, run_program(path, {}, folder / "run", "cluster nodes=1 gpus=1")
        return made[name]

    return of


@pytest.mark.parametrize("place", thorough_between(PLACES))
@pytest.mark.parametrize("name", ["tpo", "ranked"])
def test_a_placement_changes_no_number(alone: Callable[[str], tuple[Path, Metrics]], tmp_path: Path, name: str,
                                       place: str) -> None:
    path, expected = alone(name)
    there = run_program(path, {}, tmp_path, f"cluster nodes=1 gpus=4\n{PLACES[place]}")
    for a, b in zip(expected, there, strict=True):
        assert a.keys() == b.keys() and a == pytest.approx(b, rel=5e-4, abs=5e-6)


@pytest.mark.parametrize("name", thorough_between(["pairs of picks", "with samples", "selected", "numbers of picks"]))
def test_answers_are_like_responses(alone: Callable[[str], tuple[Path, Metrics]], tmp_path: Path, name: str) -> None:
    path, expected = alone(name)
    there = run_program(path, {}, tmp_path, f"cluster nodes=1 gpus=4\n{PLACES['dp']}",
                        like=expected if name == "with samples" else None)
    for a, b in zip(expected, there, strict=True):
        assert a.keys() == b.keys() and a == pytest.approx(b, rel=5e-4, abs=5e-6)


def test_what_the_numbers_are(alone: Callable[[str], tuple[Path, Metrics]]) -> None:
    """Both batches together are the file: of each row the mean of [1.5, i, -1], and its score ranks times i."""
    total = [m["total"] for m in alone("tpo")[1]]
    assert sum(total) / 2 == pytest.approx(sum(0.5 + i for i in range(8)) / 24, rel=1e-6)
    ranked = alone("ranked")[1]
    assert sum(m["order"] for m in ranked) / 2 == pytest.approx(3.5, rel=1e-6)  # the mean rank of three answers is 1
    assert [m["seen"] for m in ranked] == [1, 1]


def test_a_number_stays_with_its_answer(alone: Callable[[str], tuple[Path, Metrics]]) -> None:
    """Where it is picked, paired, one of the others, concatenated or selected."""
    for step in alone("numbers of picks")[1]:
        assert step["count"] == 4 and step["same"] == 0
        assert [step[name] for name in ("best", "duel", "mix", "high")] == pytest.approx([0] * 4, abs=1e-6)


@pytest.mark.parametrize("body, answers, more, unit, code, words", [
    ("  actor.train(row, loss=tpo(index=row.index), minibatch=3 prompts)", 3, "", " prompts", "RL0205", "does not divide"),
    ("  actor.train(row, loss=tpo(index=row.index), minibatches=3)", 3, "", " prompts", "RL0205", "of each prompt"),
    ("  actor.train(row, loss=tpo(index=row.index))", 3, ', kind="pairs"', " prompts", "RL0205", "do not have 3 answers"),
    ("  actor.train(row, loss=tpo(index=row.index))", 1, "", " prompts", "RL0205", "answers"),
    ("  actor.train(row, loss=tpo(index=row.index))", 3, "", " sequences", "RL0218", "counts prompts"),
    ("  gen = actor.generate(row)\n  actor.train(gen, loss=tpo(index=row.index))", 3, "", " prompts", "RL0213",
     "prompts with answers"),
    ("  actor.train(row.prompts, loss=tpo(index=row.index))", 3, "", " prompts", "RL0213", "only prompts"),
    ("  actor.train(row, loss=tpo(index=row.place))", 3, "", " prompts", "RL0112", "no field `place`"),
])
def test_programs_that_are_refused(tmp_path: Path, base: Path, body: str, answers: int, more: str, unit: str, code: str,
                                   words: str) -> None:
    found = api.check(page(tmp_path, base, body, answers, more, unit).read_text(), "p.rlf")
    assert found and found[0].code == code and words in f"{found[0].title} {found[0].label} {found[0].help}"


def plan_of(path: Path) -> Plan:
    rules = path.with_name("place.rlf")
    rules.write_text("cluster nodes=1 gpus=2")
    return api.compile(str(path), {}, str(rules))


def fetched(plan: Plan) -> Fetch:
    (loop,) = [x for x in plan.body if isinstance(x, Loop)]
    (fetch,) = [x for x in loop.body if isinstance(x, Fetch)]
    return fetch


def with_fetch(plan: Plan, **change: Any) -> Plan:
    def changed(item: Any) -> Any:
        if isinstance(item, Fetch):
            return replace(item, **change)
        return replace(item, body=tuple(map(changed, item.body))) if isinstance(item, Loop) else item

    return replace(plan, body=tuple(map(changed, plan.body)))


def test_the_verifier_knows_the_frames(tmp_path: Path, base: Path) -> None:
    plan = plan_of(page(tmp_path, base, BODIES["tpo"]))
    verify(plan)
    assert fetched(plan).frames == ("row.prompts", "row")
    data = plan.data[0]
    wrong_ones = {
        "swapped": with_fetch(plan, frames=("row", "row.prompts")),
        "prompts alone": with_fetch(plan, frames=("row.prompts",)),
        "more answers": replace(plan, data=(replace(data, answers=4),)),
        "one answer": replace(plan, data=(replace(data, answers=0),)),
        "other kind": replace(plan, data=(replace(data, row_format="prompts", columns=(("prompt", "prompt"),)),)),
        "another batch": replace(plan, data=(replace(data, batch=2),)),
    }
    for name, made in wrong_ones.items():
        with pytest.raises(Failure) as caught:
            verify(made)
        assert {d.code for d in caught.value.diagnostics} & {"RL0612", "RL0614", "RL0615"}, name


def test_a_run_resumes_in_the_middle(tmp_path: Path, base: Path) -> None:
    path = page(tmp_path, base, BODIES["ranked"] + "\n  checkpoint every 1")
    data = compile_program(path, {}, "cluster nodes=1 gpus=2", tmp_path)
    runs.run(data, tmp_path / "whole")
    runs.run(data, tmp_path / "out", stop_after=1)
    assert len(runs.lines(tmp_path / "out")) == 1
    runs.run(data, tmp_path / "out", resume=tmp_path / "out")
    assert runs.lines(tmp_path / "out") == runs.lines(tmp_path / "whole")
    mine, theirs = (runs.held(tmp_path / o / "checkpoints/step-000002") for o in ("out", "whole"))
    assert mine.keys() == theirs.keys() and all(mine[k].equal(theirs[k]) for k in theirs)


def test_python_functions_get_all_columns(tmp_path: Path, base: Path) -> None:
    (tmp_path / "r.py").write_text(
        "def marks(rows):\n    return [float(r['completion'].strip() == r['answer'][0]) + r['weight'] for r in rows]\n")
    path = page(tmp_path, base, "  m = marks(row)\n  metric m = mean(m)\n  actor.train(row, loss=tpo(index=row.index))")
    path.write_text('use py "r.py" (marks: row -> seq)\n' + path.read_text())
    done = run_program(path, {}, tmp_path / "run", "cluster nodes=1 gpus=2")
    assert sum(m["m"] for m in done) / 2 == pytest.approx(3.5 + 1 / 3, rel=1e-6)
