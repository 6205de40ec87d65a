"""Evaluations in real runs: every row once, training undisturbed, the same under every placement."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.end_to_end.programs import Metrics, run_program
from tests.evaluation.programs import NAMES, whole
from tests.tiny import make_all

ROWS = 8
ABOUT_TIME = ("seconds", "tokens_per_second", "time/", "memory/", "moved/")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    make_all(folder, num_hidden_layers=2)
    rows = [{"prompt": f"{11 * i}+{7 * i}="} for i in range(1, ROWS + 1)]
    (folder / "data/heldout.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    return folder


def ran(tiny: Path, name: str, text: str, like: Metrics | None = None) -> Metrics:
    (tiny / f"{name}.rlf").write_text(text)
    with pytest.MonkeyPatch.context() as here:
        here.chdir(tiny)
        return run_program(tiny / f"{name}.rlf", {}, tiny / f"run-{name}", like=like)


@pytest.fixture(scope="module")
def evaluated(tiny: Path) -> Metrics:
    return ran(tiny, "evaluated", whole(True))


def of_training(lines: Metrics) -> list[dict[str, float]]:
    return [{k: v for k, v in line.items() if k not in NAMES and not k.startswith(ABOUT_TIME)} for line in lines]


def of_evaluation(lines: Metrics) -> list[dict[str, float]]:
    return [{k: line[k] for k in NAMES} for line in lines if "rows" in line]


def test_it_is_logged_in_the_steps_of_its_block(evaluated: Metrics) -> None:
    assert [line["step"] for line in evaluated if set(NAMES) & set(line)] == [2, 4]


def test_every_row_counts_once(evaluated: Metrics) -> None:
    """Three batches of three for eight rows."""
    assert [(e["rows"], e["tries"]) for e in of_evaluation(evaluated)] == [(ROWS, 4 * ROWS)] * 2


def test_turns_and_steps_have_samples_of_their_own(evaluated: Metrics) -> None:
    assert len({e["coin"] for e in of_evaluation(evaluated)}) == 2
    assert len({e["score"] for e in of_evaluation(evaluated)}) == 2


@pytest.mark.parametrize("first", [True, False])
def test_training_is_the_same_with_and_without(tiny: Path, evaluated: Metrics, first: bool) -> None:
    other = ran(tiny, f"other-{first}", whole(not first, first))
    assert of_training(evaluated) == of_training(other)
    assert of_training(evaluated)[0] != of_training(evaluated)[1], "the comparison can fail"
    if not first:
        assert [e["rows"] for e in of_evaluation(other)] == [ROWS] * 2
        assert [e["score"] for e in of_evaluation(other)] != [e["score"] for e in of_evaluation(evaluated)]


def test_metrics_are_over_rows_not_over_batches(tiny: Path, evaluated: Metrics) -> None:
    """Greedy answers do not depend on the batch, nor does their mean, where the last batch is short."""
    at_once = ran(tiny, "at_once", whole(True).replace('heldout.jsonl", batch=3', 'heldout.jsonl", batch=8'))
    fives = ran(tiny, "fives", whole(True, steps=2).replace('heldout.jsonl", batch=3', 'heldout.jsonl", batch=5'))
    greedy = [e["greedy"] for e in of_evaluation(evaluated)]
    assert [e["greedy"] for e in of_evaluation(at_once)] == pytest.approx(greedy, rel=1e-5)
    assert [e["greedy"] for e in of_evaluation(fives)] == pytest.approx(greedy[:1], rel=1e-5)
    assert greedy[0] != pytest.approx(greedy[1], rel=1e-4), "the comparison can fail"


@pytest.mark.thorough
def test_four_ranks_say_what_one_does(tiny: Path, evaluated: Metrics) -> None:
    """Three rows over four shards, and two in the last turn; generation and inference under other layouts."""
    four = ran(tiny, "four", whole(True, ranks=4, gen="dp=2 tp=2", infer="dp=2 pp=2"), evaluated)
    wide = ran(tiny, "wide", whole(True, ranks=4, gen="dp=4", infer="dp=1 tp=2 pp=2", steps=2), evaluated)
    want = of_evaluation(evaluated)
    for got in (of_evaluation(four), of_evaluation(wide)):
        for mine, its in zip(got, want):
            assert mine == pytest.approx(its, rel=1e-3, abs=1e-5)
    assert len(of_evaluation(four)) == 2


def test_more_rows_than_the_plan_has_room_for(tiny: Path) -> None:
    with pytest.raises(AssertionError, match="RL0779 this data has 8 rows, but `eval heldout` allows at most 2 batches"):
        ran(tiny, "narrow", whole(True).replace("max 4", "max 2"))
    assert not (tiny / "run-narrow/out/metrics.jsonl").exists() or not (
        tiny / "run-narrow/out/metrics.jsonl").read_text()


def test_room_to_the_last_batch_is_enough(tiny: Path, evaluated: Metrics) -> None:
    assert of_evaluation(ran(tiny, "tight", whole(True, steps=2).replace("max 4", "max 3"))) == of_evaluation(evaluated)[:1]
