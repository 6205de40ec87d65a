"""Text from one model to another, in real worlds: the placement changes nothing, and the numbers are those of a program
without any of this."""

from __future__ import annotations

import json
import statistics
from contextlib import chdir
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.end_to_end.programs import run_program
from tests.samples import thorough_between
from tests.texts import judges
from tests.texts.programs import SELF_REWARDING, folder, run

PLACES = {
    "dp": "place * on mesh(0:2) dp=2",
    "tp": "place * on mesh(0:2) tp=2",
    "pp": "place * on mesh(0:2) pp=2",
    "apart": "place actor.* on mesh(0:1)\nplace judge.* on mesh(1:2)",
    "wide": "place actor.generate on mesh(0:4) dp=4\nplace judge.* on mesh(2:4) tp=2\nplace actor.train on mesh(0:2) pp=2",
    "mixed": "place actor.* on mesh(0:4) dp=2 tp=2\nplace judge.* on mesh(0:4) dp=2 pp=2",
    "zero": "place actor.generate on mesh(0:4) dp=2 tp=2\nplace actor.train on mesh(0:4) dp=4 zero=2\n"
            "place judge.* on mesh(0:1)",
}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return folder(tmp_path_factory.mktemp("texts"))


@pytest.fixture(scope="module")
def alone(base: Path):  # type: ignore[no-untyped-def]
    return run(base, SELF_REWARDING, "alone")


@pytest.mark.thorough
@pytest.mark.parametrize("place", thorough_between(PLACES))
def test_the_placement_changes_no_number(base: Path, alone, place: str) -> None:  # type: ignore[no-untyped-def]
    found = run(base, SELF_REWARDING, place, place=PLACES[place], like=alone)
    assert len(found) == len(alone) == 3
    for mine, theirs in zip(found, alone, strict=True):
        assert mine == pytest.approx(theirs, rel=2e-4, abs=2e-5), place


@pytest.mark.thorough
def test_against_a_program_that_has_none_of_this(base: Path) -> None:
    """Ids of the judge's prompts, its greedy responses, and the rewards that follow from them."""
    seen = base / "seen/rows.jsonl"
    seen.parent.mkdir()
    body = SELF_REWARDING.replace("n=3, max_new_tokens=5", "max_new_tokens=5, greedy=true")
    (found,) = run(base, body, "greedy", steps=1)
    seen.parent.rename(base / "was seen")
    rows = {row["prompt"]: row for row in map(json.loads, (base / "was seen/rows.jsonl").read_text().splitlines())}
    tokenizer, model = (x.from_pretrained(base / "judge") for x in (AutoTokenizer, AutoModelForCausalLM))
    grades, by_prompt = [], {}
    for row in rows.values():
        response = row["gen"]
        asked = f"{response['prompt']}{response['completion']}? the answer is {row['answer']}"
        assert row["prompt"] == asked
        assert row["prompt_ids"] == tokenizer(asked)["input_ids"] == [tokenizer.convert_tokens_to_ids(c) for c in asked]
        ids = torch.tensor([row["prompt_ids"]])
        with torch.no_grad():
            made = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=5, do_sample=False,
                                  pad_token_id=0)
        assert row["completion_ids"] == made[0, ids.shape[1]:].tolist()
        grade = judges._grade(row["completion"], response["completion"])
        grades.append(grade)
        by_prompt.setdefault(response["prompt"], []).append(grade)
    assert len(rows) == 8 and len(by_prompt) == 4
    assert found["reward"] == pytest.approx(statistics.fmean(grades), rel=1e-6)
    assert found["best"] == pytest.approx(statistics.fmean(max(x) for x in by_prompt.values()), rel=1e-6)
    assert found["spread"] == pytest.approx(statistics.fmean(statistics.stdev(x) for x in by_prompt.values()), rel=1e-5)
    assert found["apart"] == pytest.approx(0, abs=1e-6)


PAIRWISE = """
  prompt = prompts.next()
  judged = judge.generate(rewrite(prompt), max_new_tokens=4)
  a = actor.generate(prompt, max_new_tokens=6)
  b = judge.generate(ask(a), max_new_tokens=4)
  won = prefers(a, b)
  metric won = mean(won)
  metric both = mean(won + 0.01 * short(b) + 0.1 * short(a))
  metric other = mean(short(judged))
  actor.train(a, loss=pg(adv=mean(won by prompt)))
"""
SOME = """
  prompt = prompts.next()
  gen = actor.generate(prompt, n=2, max_new_tokens=6)
  asked = ask_some(gen)
  verdict = judge.generate(asked, n=2, max_new_tokens=4)
  r = mean(short(verdict) by prompt)
  metric rows = count(len(verdict))
  metric asked = mean(r)
  kept = verdict where short(verdict) > 2
  metric kept = count(len(kept))
  actor.train(gen, loss=pg(adv=r))
"""
CRITIQUE = """
  prompt = prompts.next()
  gen = actor.generate(prompt, n=2, max_new_tokens=6)
  critique = judge.generate(ask(gen), n=2, max_new_tokens=4)
  revised = actor.generate(revise(critique, gen), n=2, max_new_tokens=4)
  second = mean(short(revised) by prompt)
  better = second - short(gen)
  metric better = mean(better)
  metric spread = mean(std(second by prompt))
  metric top = mean(max(mean(second by prompt) by prompt))
  actor.train(revised, loss=pg(adv=short(revised) - second))
  judge.train(critique, loss=pg(adv=better))
"""


@pytest.mark.thorough
@pytest.mark.parametrize("body", [PAIRWISE, SOME, CRITIQUE], ids=["pairwise", "some", "critique"])
def test_two_batches_and_missing_rows(base: Path, body: str) -> None:
    first = run(base, body, "one", steps=2)
    for place in ("dp", "apart", "wide"):
        assert run(base, body, "many", steps=2, place=PLACES[place], like=first) == [
            pytest.approx(step, rel=2e-4, abs=2e-5) for step in first], place
    if body is SOME:  # of rows 0 to 3 of the data, 0 and 3 are missing; of 4 to 7 row 6
        assert [step["rows"] for step in first] == [2 * 2 * 2, 3 * 2 * 2]


def test_text_without_a_function_of_ones_own(base: Path) -> None:
    (base / "shipped.rlf").write_text("""
use py "std/text.py" (whole: gen -> prompts(max_tokens=32), question: gen -> prompts(max_tokens=16))
data prompts = jsonl("prompts.jsonl", batch=4, max_prompt_tokens=16, shuffle=false)
model actor = causal_lm("model")
model judge = causal_lm("judge")
flow f(steps=1) {
  prompt = prompts.next()
  gen = actor.generate(prompt, n=2, max_new_tokens=6)
  more = judge.generate(whole(gen), max_new_tokens=4)
  again = judge.generate(question(gen), max_new_tokens=4)
  metric more = mean(len(more))
  metric again = mean(len(again))
}
""")
    with chdir(base):
        (found,) = run_program(base / "shipped.rlf", {}, base / "shipped")
    assert 0 < found["more"] <= 4 and 0 < found["again"] <= 4


@pytest.mark.thorough
def test_an_evaluation_with_a_judge(base: Path) -> None:
    body = SELF_REWARDING + """
  every 2 {
    eval prompts max 6 {
      q = prompts.next()
      tried = actor.generate(q, n=2, max_new_tokens=6)
      opinion = judge.generate(ask(tried), max_new_tokens=5)
      metric heldout = mean(mean(short(opinion) by prompt))
    }
  }
"""
    first = run(base, body, "eval1", steps=2)
    assert 0 < first[1]["heldout"] <= 5
    for place in ("dp", "wide"):
        assert run(base, body, "eval2", steps=2, place=PLACES[place], like=first)[1] == pytest.approx(
            first[1], rel=2e-4, abs=2e-5)


@pytest.mark.parametrize("over_long, code", thorough_between([("error", "RL0789"), ("truncate", ""), ("drop", "")]))
def test_prompts_that_are_too_long(base: Path, over_long: str, code: str) -> None:
    body = SELF_REWARDING.replace("metric long = mean(len(verdict))", "metric long = count(len(verdict))")
    # all completions are as long, and not those of a model that training has changed
    body = body.replace("max_new_tokens=6", "max_new_tokens=6, min_new_tokens=6")
    body = "\n".join(line for line in body.splitlines() if "actor.train" not in line)
    if code:  # a prompt of the fourth batch has one token more
        with pytest.raises(AssertionError, match=code):
            run(base, body, "long", steps=4, most=27, over_long=over_long)
        return
    first, *_, last = run(base, body, "long", steps=4, most=27, over_long=over_long)
    assert (first["long"], last["long"]) == (24, 24 if over_long == "truncate" else 0)
