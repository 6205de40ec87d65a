"""A gradient that is not finite: the run ends with the minibatch on disk, or the minibatch is left out and counted."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path

import pytest
from safetensors.torch import load_file

from rldsl.diag import Failure
from tests.end_to_end.programs import compile_program, run_program
from tests.tiny import make_model, make_sums, write_jsonl
from tests.world import run_world

PROGRAM = """
data rows = jsonl("{rows}", batch=8, answer="answer", numbers=["label"], shuffle=false)
model actor = causal_lm("{base}") train adamw(lr=0.001)
loss odd(logprobs: token; label: seq) {{
  metric size = mean(-logprobs / label)
  return -mean(logprobs / label)
}}
flow f(steps=1) {{
  row = rows.next()
  actor.train(row, loss=odd(label=row.label), minibatches=4, shuffle=false{policy}) on mesh(0:{ranks}) dp={ranks}
}}
"""


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("nonfinite") / "model", num_hidden_layers=2)


def program(base: Path, folder: Path, ranks: int, policy: str, zeros: tuple[int, ...]) -> Path:
    labelled = [row | {"label": float(i not in zeros)} for i, row in enumerate(make_sums(8))]
    rows = write_jsonl(folder / "rows.jsonl", labelled)
    path = folder / "p.rlf"
    path.write_text(PROGRAM.format(rows=rows, base=base, policy=policy, ranks=ranks))
    return path


@pytest.mark.parametrize("ranks", [1, 2])
def test_skip(base: Path, tmp_path: Path, ranks: int) -> None:
    path = program(base, tmp_path, ranks, ", nonfinite=skip", (2, 3))
    (line,) = run_program(path, {}, tmp_path / "run")
    assert line["actor/skipped"] == 1
    assert all(math.isfinite(line[f"actor/{name}"]) for name in ("loss", "size", "grad_norm", "lr"))


def test_skip_of_all_leaves_no_numbers_that_look_right(base: Path, tmp_path: Path) -> None:
    path = program(base, tmp_path, 2, ", nonfinite=skip", tuple(range(8)))
    (line,) = run_program(path, {}, tmp_path / "run")
    assert {n: x for n, x in line.items() if n.startswith("actor/")} == {"actor/skipped": 4, "actor/lr": 0.001}


def test_skip_without_cause_counts_nothing(base: Path, tmp_path: Path) -> None:
    (line,) = run_program(program(base, tmp_path, 1, ", nonfinite=skip", ()), {}, tmp_path / "run")
    assert line["actor/skipped"] == 0


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("policy", ["", ", nonfinite=stop"])
def test_stop(base: Path, tmp_path: Path, ranks: int, policy: str) -> None:
    data = compile_program(program(base, tmp_path, ranks, policy, (2, 3)), {}, None, tmp_path)
    assert json.loads(data.splitlines()[0])["world"] == ranks
    for codes, note in run_world(ranks, _rank, data, str(tmp_path / "out"), os.getcwd()):
        assert codes == "RL0733" and "failed-batch-step-1" in note
    files = sorted((tmp_path / "out/failed-batch-step-1").iterdir())
    assert [f.name for f in files] == [f"rank-{r:05d}.safetensors" for r in range(ranks)]
    held = [load_file(f) for f in files]
    assert sorted(int(r) for h in held for r in h["row.rows"]) == [2, 3]
    for h in held:
        assert set(h["data.label"].tolist()) == {0.0}
        assert h["row.tokens"].numel() == int(h["row.prompt_lens"].sum() + h["row.response_lens"].sum())


def test_an_unknown_policy(base: Path, tmp_path: Path) -> None:
    with pytest.raises(Failure):
        compile_program(program(base, tmp_path, 1, ", nonfinite=ignore", ()), {}, None, tmp_path)


def _rank(rank: int, data: bytes, out: str, cwd: str) -> tuple[str, str]:
    from rldsl.runtime.interpreter.interpreter import execute
    from rldsl.runtime.plan_file import PlanFile

    os.chdir(cwd)
    try:
        execute(PlanFile.from_bytes(data, "test.plan"), out)
    except Failure as failure:
        return " ".join(d.code for d in failure.diagnostics), " ".join(n for d in failure.diagnostics for n in d.notes)
    return "", ""
