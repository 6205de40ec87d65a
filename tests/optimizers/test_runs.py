"""Runs with other optimizers than AdamW: resumed exactly, and on another placement with the same numbers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from rldsl.diag import Failure
from rldsl.runtime.persist.checkpoint_reader import LoadedCheckpoint
from tests.checkpoint.runs import held, lines, run
from tests.end_to_end.programs import compile_program
from tests.tiny import make_model

HERE = Path(__file__).parent
ONE = "cluster nodes=1 gpus=1\n" + "".join(f"place {m}.* on mesh(0:1)\n" for m in ("first", "second", "third", "fourth"))
FOUR = """cluster nodes=1 gpus=4
place first.*  on mesh(0:4) dp=2 tp=2 zero=3
place second.* on mesh(0:4) dp=2 tp=2 zero=1
place third.*  on mesh(0:4) dp=2 pp=2
place fourth.* on mesh(0:4) dp=2 tp=2 zero=1
"""


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    make_model(folder / "m", num_hidden_layers=2, tie_word_embeddings=True)
    rows = [{"prompt": "a b c"[: 1 + 2 * (i % 3)], "answer": "d e f g"[: 1 + 2 * (i % 4)]} for i in range(16)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def plan(tiny: Path, folder: Path, place: str) -> bytes:
    folder.mkdir(parents=True, exist_ok=True)
    return compile_program(HERE / "three.rlf", {"base": str(tiny / "m"), "rows": str(tiny / "rows.jsonl")}, place, folder)


@pytest.fixture(scope="module")
def whole(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("whole")
    assert set(run(plan(tiny, out / "plan", ONE), out)) == {""}
    return out


@pytest.mark.thorough
@pytest.mark.parametrize("before", [ONE, FOUR], ids=["one rank", "four ranks"])
def test_resumed_in_the_middle(tiny: Path, whole: Path, tmp_path: Path, before: str) -> None:
    """On one rank bit for bit. From four ranks, sums of gradients round in another order."""
    assert set(run(plan(tiny, tmp_path / "before", before), tmp_path, stop_after=2)) == {""}
    assert len(lines(tmp_path)) == 2
    assert set(run(plan(tiny, tmp_path / "after", ONE), tmp_path, resume=tmp_path)) == {""}
    mine, theirs = (held(out / "checkpoints/step-000004") for out in (tmp_path, whole))
    assert mine.keys() == theirs.keys()
    kinds = {(key.split("|")[0], key.split("|")[1]) for key in mine}
    assert kinds == {("first", "param"), ("first", "momentum_buffer"), ("first", "exp_avg"), ("first", "exp_avg_sq"),
                     ("second", "param"), ("second", "row_var"), ("second", "col_var"), ("second", "variance"),
                     ("third", "param"), ("third", "momentum_buffer"), ("fourth", "param"),
                     *(("fourth", f"{m}{k}") for m in ("exp_avg", "exp_avg_sq") for k in ("", "_codes", "_scales"))}
    assert not any(key.startswith(("second|row_var|model.embed_tokens", "first|exp_avg|model.layers.0.mlp.up"))
                   for key in mine)
    if before == ONE:
        assert lines(tmp_path) == lines(whole) and all(torch.equal(mine[k], theirs[k]) for k in theirs)
    else:
        middle = held(whole / "checkpoints/step-000002")
        for key, expected in theirs.items():
            end = expected.float()
            gap = float((mine[key].float() - end).norm())
            # Muon makes every direction of a momentum as long as the others, those that are mostly rounding too: its
            # momentum is compared closely, its updates roughly
            limit = 2e-3 * float(end.norm())
            if "|param|" in key:
                limit = (0.2 if key.startswith("first|") else 0.1) * float((end - middle[key].float()).norm())
            assert gap <= limit, f"{key}: {gap} apart, at most {limit} expected"


RATES = """use std.sft (sft)
data answers = jsonl("rows.jsonl", batch=8, kind=answers)
state best = 1
model actor = causal_lm("m") train adamw(lr=5, warmup=3, group("*norm*", lr_scale=2))
flow rates(steps=4) {
  row = answers.next()
  actor.train(row, loss=sft(), minibatches=2, lr=RATE)
  metric number = step_number()
  best = best / 2
}
"""


def rates(tiny: Path, folder: Path, rate: str) -> list[dict[str, float]]:
    folder.mkdir(parents=True, exist_ok=True)
    program = folder / "rates.rlf"
    program.write_text(RATES.replace("RATE", rate).replace('"m"', f'"{tiny / "m"}"')
                       .replace('"rows.jsonl"', f'"{tiny / "rows.jsonl"}"'))
    data = compile_program(program, {}, "cluster nodes=1 gpus=2\nplace actor.* on mesh(0:2) dp=2\n", folder)
    (codes,) = set(run(data, folder / "out"))
    return lines(folder / "out") if not codes else [{codes: 0.0}]


def test_a_learning_rate_is_an_expression(tiny: Path, tmp_path: Path) -> None:
    """Of the number of the step and of states; the schedule of the optimizer has no part in it."""
    found = rates(tiny, tmp_path, "1e-3 * min(step_number() / 2, (5 - step_number())) * best")
    assert [line["number"] for line in found] == [1, 2, 3, 4]
    assert [line["actor/lr"] for line in found] == pytest.approx([0.5e-3, 1e-3 / 2, 1.5e-3 / 4, 1e-3 / 8])


def test_a_learning_rate_below_zero_ends_the_run(tiny: Path, tmp_path: Path) -> None:
    assert rates(tiny, tmp_path, "1e-3 * (2.5 - step_number())") == [{"RL0735": 0.0}]


@pytest.mark.parametrize(("key", "says"), [
    ("actor|exp_avg|embed", "frozen when it was saved, by `freeze`"),  # of another parameter there is such a state
    ("actor|momentum_buffer|embed", "another optimizer"),
    ("actor|exp_avg|head", "a different shape"),
    ("actor|param|other", "no parameter `other` of the model `actor`"),
    ("actor|param|head", "only a part of parameter `head`"),
    ("prompts.rate|state|rows", "more rows"),
])
def test_what_a_checkpoint_lacks(tmp_path: Path, key: str, says: str) -> None:
    """A changed `freeze` or optimizer is not called a different shape."""
    half = [(((0, 2), (0, 4)), tmp_path / "x", "x")]
    stored = {"actor|exp_avg|head": half, "actor|param|head": half, "actor|param|embed": half}
    loaded = LoadedCheckpoint(tmp_path, 1, {}, {}, {}, {}, stored, 0, ())
    with pytest.raises(Failure) as caught:
        loaded._cover(key, ((0, 4), (0, 4)))
    (found,) = caught.value.diagnostics
    assert found.code == "RL0762" and says in f"{found.title} {found.help}"
