"""Expected lengths: bounds, means, and those of an earlier run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rldsl import api
from rldsl.diag import Failure
from rldsl.simulate import Lengths, check_lengths, observed_lengths, simulate
from rldsl.simulate.lengths import token_frames
from rldsl.simulate.summary import format_timeline
from tests.frames import frame
from tests.simulate.plans import ROUND, plan
from tests.verify.plans import folder

FRAME = frame("gen", "gen", "prompt", 16, 2, "prompts", 8, 16)


@pytest.mark.parametrize("given, row", [
    (Lengths(), (8, 16, 16)), (Lengths(3.5, 10), (3.5, 10, 16)), (Lengths(3, 10, 12), (3, 10, 12)),
    (Lengths(100, 100, 100), (8, 16, 16)), (Lengths(response=10, longest=4), (8, 10, 10))])
def test_lengths_are_within_the_bounds(given: Lengths, row: tuple[float, float, float]) -> None:
    found = given.of(FRAME)
    assert (found.prompt, found.response, found.longest) == row and found.tokens == row[0] + row[1]


@pytest.mark.parametrize("given", [Lengths(), Lengths(8, 16, 16), Lengths(3.5), Lengths(0, 0, 1), Lengths(1, 4, 4)])
def test_lengths_that_rows_can_have(given: Lengths) -> None:
    check_lengths(given, [FRAME], "p.rlf")


@pytest.mark.parametrize("given, title, help", [
    (Lengths(9), "no row can have prompts of 9 tokens", "at most 8 tokens per prompt"),
    (Lengths(0, 16.5), "no row can have responses of 16.5 tokens", "at most 16 tokens per response"),
    (Lengths(0, 0, 17), "no row can have a longest response of 17 tokens", "at most 16 tokens per response"),
    (Lengths(0, 10, 4), "the longest response of a batch cannot have 4 tokens where the mean is 10", "omit"),
    (Lengths(float("inf")), "no row can have prompts of inf tokens", "8 tokens"),
    (Lengths(0, float("nan")), "no row can have responses of nan tokens", "16 tokens"),
    (Lengths(-1), "no row can have prompts of -1 tokens", "8 tokens")])
def test_lengths_that_no_row_can_have(given: Lengths, title: str, help: str) -> None:
    with pytest.raises(Failure) as caught:
        check_lengths(given, [FRAME], "p.rlf")
    (said,) = caught.value.diagnostics
    assert said.code == "RL0205" and title in said.title and help in said.help


def test_a_length_that_some_rows_can_have_is_enough() -> None:
    longer = frame("long", "long", "prompt", 16, 2, "prompts", 8, 64)
    check_lengths(Lengths(0, 40), [FRAME, longer], "p.rlf")
    assert Lengths(0, 40).of(FRAME).response == 16, "each row is as long as it can be"
    with pytest.raises(Failure, match="no row can have responses"):
        check_lengths(Lengths(0, 65), [FRAME, longer], "p.rlf")


def test_without_responses_there_is_no_length_of_them() -> None:
    prompts = frame("p", "p", "prompt", 16, 1, "prompts", 8, 0)
    with pytest.raises(Failure) as caught:
        check_lengths(Lengths(0, 5), [prompts], "p.rlf")
    assert caught.value.diagnostics[0].help == "the program has no responses"


def run(folder: Path, lines: list[dict]) -> str:
    (folder / "metrics.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines))
    return str(folder)


def test_an_earlier_run_tells_them(tmp_path: Path) -> None:
    lines = [{"step": i, "length/response": 10.0 + i, "seconds": 2.0,
              "tokens_per_second": (5 + 10 + i) * 16 / 2.0} for i in (0, 2)]
    assert observed_lengths(plan(), run(tmp_path, lines)) == Lengths(5.0, 11.0)
    assert observed_lengths(plan(), str(tmp_path / "metrics.jsonl")).response == 11


def test_a_number_that_was_not_finite_is_left_out(tmp_path: Path) -> None:
    """The runtime writes it as null."""
    lines = [{"step": 1, "length/response": 10.0, "seconds": None, "tokens_per_second": 3.0},
             {"step": 2, "length/response": None, "seconds": 2.0, "tokens_per_second": 3.0},
             {"step": 3, "length/response": 12.0, "seconds": 2.0, "tokens_per_second": (5 + 12) * 16 / 2.0}]
    found = observed_lengths(plan(), run(tmp_path, lines))
    assert found.response == 11 and found.prompt == pytest.approx(6)


def test_a_run_that_goes_on_is_read_up_to_its_last_whole_line(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "length/response": 7}\n{"step": 2, "length/resp')
    assert observed_lengths(plan(), str(tmp_path)).response == 7


@pytest.mark.parametrize("text, code", [
    (None, "RL0091"), ("", "RL0205"), ('{"step": 1, "loss": 2}\n', "RL0205"), ("no json\n", "RL0784"),
    ("[1]\n", "RL0784"), ('{"step": 1, "length/response": null}\n', "RL0205"), ("[" * 100_000 + "\n", "RL0784"),
    ('{"step": 1, "length/response": "long"}\n', "RL0784")])
def test_runs_that_tell_nothing(text: str | None, code: str, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / "metrics.jsonl").write_text(text)
    with pytest.raises(Failure) as caught:
        observed_lengths(plan(), str(tmp_path))
    assert [d.code for d in caught.value.diagnostics] == [code]


TURNS = """
use std.sft (sft)
cluster nodes=1 gpus=1
data rows = jsonl("data/train.jsonl", batch=6)
data heldout = jsonl("data/prompts.jsonl", batch=4, max_prompt_tokens=16)
model actor = causal_lm("models/sft") train adamw(lr=0.02)
flow f(steps=8) {
  repeat 3 {
    row = rows.next()
    actor.train(row, loss=sft())
  }
  every 2 {
    eval heldout max 4 {
      prompt = heldout.next()
      gen    = actor.generate(prompt, n=2, max_new_tokens=6)
      metric length = mean(len(gen))
    }
  }
}
"""


def test_turns_count_and_what_is_not_in_every_step_does_not() -> None:
    with folder() as here:
        (here / "p.rlf").write_text(TURNS)
        plan = api.compile("p.rlf")
    assert [(f.id, rows) for f, rows in token_frames(plan)] == [("row", 18)]
    said = format_timeline(plan, simulate(plan, ROUND, Lengths()), ROUND, Lengths(), "p.plan")
    assert "18 x (" in said and "loops     eval heldout: 4 batches (the maximum)" in said
