"""`rlc diff-runs`: the first step, row and value at which two runs part, recomputed by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from rldsl.cli import main
from rldsl.commands.diff_runs import diff_runs
from rldsl.diag import Failure

LINES = [{"step": s, "reward": 0.5 * s, "actor/loss": 1.0 / s, "seconds": 3.0 * s} for s in range(1, 6)]
ROWS = [{"step": s, "row": r, "prompt": f"{r}+{s}=", "completion": f"the sum of {r} and {s} is {r + s}", "reward": 1.0}
        for s in range(1, 6) for r in range(4)]


def make(folder: Path, lines: list[dict[str, Any]] = LINES, rows: list[dict[str, Any]] = ROWS, plan: bytes = b"plan"
         ) -> str:
    (folder / "samples").mkdir(parents=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "samples/gen.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "run.plan").write_bytes(plan)
    return str(folder)


def changed(items: list[dict[str, Any]], number: int, **values: Any) -> list[dict[str, Any]]:
    return [item | values if i == number else item for i, item in enumerate(items)]


@pytest.fixture
def one(tmp_path: Path) -> str:
    return make(tmp_path / "one")


def rlc(*arguments: str) -> tuple[int, str]:
    done = CliRunner().invoke(main, ["diff-runs", *arguments])
    return done.exit_code, done.output


def test_equal_runs(one: str, tmp_path: Path) -> None:
    two = make(tmp_path / "two", [line | {"seconds": 1.0} for line in LINES])  # times are measured, not computed
    assert diff_runs(one, two).same
    status, text = rlc(one, two)
    assert status == 0 and "no differences" in text and "5 steps and 20 sampled sequences" in text
    assert json.loads(rlc(one, two, "--json")[1])["same"]


def test_the_first_metric(one: str, tmp_path: Path) -> None:
    lines = changed(changed(LINES, 2, **{"actor/loss": 0.25}), 4, **{"actor/loss": 0.1, "reward": 9.0})
    found = diff_runs(one, make(tmp_path / "two", lines))
    loss, reward = found.numbers
    assert (loss.name, loss.step, loss.row, loss.one, loss.two, loss.places) == ("actor/loss", 3, None, 1 / 3, 0.25, 2)
    assert loss.largest == pytest.approx(0.1) and (reward.name, reward.step, reward.largest) == ("reward", 5, 6.5)
    assert not found.texts


def test_the_first_text_and_value(one: str, tmp_path: Path) -> None:
    rows = changed(ROWS, 9, completion="the sum of 1 and 3 was 4", reward=0.0)  # step 3, row 1
    rows = changed(rows, 14, completion="no")  # step 4, row 2
    two = make(tmp_path / "two", rows=rows)
    (text,), (number,) = diff_runs(one, two).texts, diff_runs(one, two).numbers
    assert (text.batch, text.step, text.row, text.part, text.position, text.rows) == ("gen", 3, 1, "completion", 19, 2)
    assert text.one.endswith("is 4") and text.two.endswith("was 4")
    assert (number.name, number.step, number.row, number.one, number.two) == ("gen.reward", 3, 1, 1.0, 0.0)
    status, printed = rlc(one, two)
    assert status == 1 and "first difference in step 3" in printed and "step 3, row 1" in printed


def test_a_prompt_that_differs(one: str, tmp_path: Path) -> None:
    (text,) = diff_runs(one, make(tmp_path / "two", rows=changed(ROWS, 0, prompt="0-1=", completion="?"))).texts
    assert (text.part, text.position, text.one, text.two) == ("prompt", 1, "0+1=", "0-1=")


def test_what_one_run_lacks_is_a_difference(one: str, tmp_path: Path) -> None:
    lines = [{k: v for k, v in line.items() if k != "reward" or line["step"] < 4} for line in LINES]
    two = make(tmp_path / "two", lines, [])
    (reward,) = diff_runs(one, two).numbers
    assert (reward.step, reward.two, reward.largest, reward.places, reward.missing) == (4, None, None, 2, 2)
    said = rlc(one, two)[1]
    assert "in one of the runs only, at 2 places" in said and "inf" not in said
    (reward,) = diff_runs(one, make(tmp_path / "three", changed(lines, 0, reward=lines[0]["reward"] + 3), [])).numbers
    assert (reward.step, reward.largest, reward.places, reward.missing) == (1, 3.0, 3, 2)
    assert "largest difference 3, at 3 places, 2 of them in one of the runs only" in rlc(one, str(tmp_path / "three"))[1]


def test_values_that_the_recording_rank_did_not_have(one: str, tmp_path: Path) -> None:
    """A value of the flow is recorded where a rank has both: another placement records it of other rows."""
    some = [row if row["row"] < 2 else {k: x for k, x in row.items() if k != "reward"} for row in ROWS]
    assert diff_runs(one, make(tmp_path / "two", rows=some)).same
    (reward,) = diff_runs(one, make(tmp_path / "three", rows=changed(some, 1, reward=2.0))).numbers
    assert (reward.step, reward.row, reward.one, reward.two, reward.places) == (1, 1, 1.0, 2.0, 1)
    never = [{k: x for k, x in row.items() if k != "reward"} for row in ROWS]
    (reward,) = diff_runs(one, make(tmp_path / "four", rows=never)).numbers
    assert (reward.two, reward.missing) == (None, len(ROWS))


def test_a_tolerance(one: str, tmp_path: Path) -> None:
    two = make(tmp_path / "two", changed(changed(LINES, 1, reward=1.0 + 1e-7), 3, reward=2.1))
    (number,) = diff_runs(one, two, 1e-6).numbers
    assert (number.step, diff_runs(one, two, 1e-6).ignored) == (4, 1)
    assert diff_runs(one, two).numbers[0].step == 2 and diff_runs(one, two, 0.5).same


def test_numbers_that_are_not_finite(one: str, tmp_path: Path) -> None:
    nan = make(tmp_path / "nan", changed(LINES, 1, reward=None))
    assert diff_runs(nan, make(tmp_path / "same", changed(LINES, 1, reward=None))).same
    (number,) = diff_runs(one, nan).numbers
    assert number.step == 2 and number.largest == float("inf")
    assert json.loads(rlc(one, nan, "--json")[1])["numbers"][0]["two"] is None


def test_different_plans_are_named(one: str, tmp_path: Path) -> None:
    assert "different plans" in rlc(one, make(tmp_path / "two", plan=b"other"))[1]


@pytest.mark.parametrize(("rows", "lines", "code"), [
    ([{"step": 1}], LINES, "RL0784"),
    (ROWS, [line | {"step": line["step"] + 100} for line in LINES], "RL0784"),
    (ROWS, [], "RL0784"),
])
def test_what_cannot_be_compared(one: str, tmp_path: Path, rows: list[dict[str, Any]], lines: list[dict[str, Any]],
                                 code: str) -> None:
    two = make(tmp_path / "two", lines, rows)
    with pytest.raises(Failure) as caught:
        diff_runs(one, two)
    assert caught.value.diagnostics[0].code == code and rlc(one, two)[0] == 2


def test_a_directory_without_a_run(one: str, tmp_path: Path) -> None:
    assert rlc(one, str(tmp_path / "none"))[0] == 2 and "RL0783" in rlc(one, str(tmp_path))[1]


def test_a_run_whose_first_step_has_not_ended(one: str, tmp_path: Path) -> None:
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "run.json").write_text("{}")
    assert "RL0784" in rlc(one, str(tmp_path / "new"))[1] and "no metrics yet" in rlc(one, str(tmp_path / "new"))[1]


def test_rewards_of_turns(tmp_path: Path) -> None:
    """Of conversations, they are compared one by one; other lines are as before."""
    def talk(*rewards: float) -> dict[str, Any]:
        return {"conversation": {"stopped": "done", "turns": [
            {"role": "environment", "content": "x"}, *({"role": "assistant", "reward": r} for r in rewards)]}}

    one = make(tmp_path / "one", rows=changed(ROWS, 5, **talk(0.0, 1.0)))
    assert diff_runs(one, make(tmp_path / "same", rows=changed(ROWS, 5, **talk(0.0, 1.0)))).same
    (found,) = diff_runs(one, make(tmp_path / "two", rows=changed(ROWS, 5, **talk(0.0, 3.0)))).numbers
    assert (found.name, found.one, found.two) == ("gen.turns.1.reward", 1.0, 3.0)
    (found,) = diff_runs(one, make(tmp_path / "odd", rows=changed(ROWS, 5, conversation=[3]))).numbers[:1]
    assert found.two is None


BINS = {"low": 0.0, "high": 1.0, "below": 0, "above": 0, "nan": 0, "counts": [3, 1]}
BAD = [{"step": 2, "row": 4, "prompt": "1+1=", "completion": "three", "reward": 0.5}]


def arrays(folder: str, rows: list[dict[str, Any]] = BAD, **histograms: Any) -> str:
    """Adds a table `bad` and the histograms of step 2."""
    (Path(folder) / "tables").mkdir()
    (Path(folder) / "tables/bad.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (Path(folder) / "histograms.jsonl").write_text(json.dumps({"step": 2} | histograms) + "\n")
    return folder


def test_histograms(one: str, tmp_path: Path) -> None:
    arrays(one, gap=BINS, score=BINS)
    assert diff_runs(one, arrays(make(tmp_path / "same"), gap=BINS, score=BINS)).same
    two = arrays(make(tmp_path / "two"), gap=BINS | {"high": 1.5, "counts": [2, 2]}, wide=BINS)
    found = {n.name: (n.step, n.row, n.one, n.two, n.places, n.missing) for n in diff_runs(one, two).numbers}
    assert found == {"histogram gap.high": (2, None, 1.0, 1.5, 1, 0), "histogram gap.counts": (2, None, 3, 2, 2, 0),
                     "histogram score.counts": (2, None, 3, None, 2, 2),
                     "histogram wide.counts": (2, None, None, 3, 2, 2)}
    status, printed = rlc(one, two)
    assert status == 1 and "first difference in step 2" in printed


def test_tables(one: str, tmp_path: Path) -> None:
    arrays(one)
    two = arrays(make(tmp_path / "two"), [BAD[0] | {"completion": "four", "reward": 0.25}])
    (text,), (number,) = diff_runs(one, two).texts, diff_runs(one, two).numbers
    assert (text.batch, text.step, text.row, text.part, text.rows) == ("table bad", 2, 4, "completion", 1)
    assert (number.name, number.row, number.one, number.two) == ("table bad.reward", 4, 0.5, 0.25)
    assert diff_runs(one, two).rows == 20  # sampled sequences only
    (other,) = diff_runs(one, arrays(make(tmp_path / "other"), [BAD[0], BAD[0] | {"row": 7}])).numbers
    assert (other.name, other.row, other.one, other.two, other.missing) == ("table bad.row", 7, None, 7, 1)


def test_a_damaged_table(one: str, tmp_path: Path) -> None:
    two = arrays(make(tmp_path / "two"), [{"step": 1}])
    with pytest.raises(Failure) as refused:
        diff_runs(one, two)
    assert refused.value.diagnostics[0].code == "RL0784" and "the row of a table" in refused.value.diagnostics[0].title
