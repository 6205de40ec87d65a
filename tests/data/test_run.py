"""Whole runs on data of other formats: the same numbers, one line about dropped rows, and exact resumption."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.checkpoint.runs import Asker, held
from tests.data.makers import hf, jsonl
from tests.end_to_end.programs import compile_program
from tests.tiny import make_model
from tests.world import run_world

PROGRAM = """
use std.dpo (dpo)
param base: text
param rows: text
data pairs = {format}(rows, batch=4 pairs, max_prompt_tokens=6, max_answer_tokens=5, over_long=drop)
model actor = causal_lm(base) train adamw(lr=1e-3)
model ref   = causal_lm(base)
flow dpo(steps=5, seed=1) {{
  pair = pairs.next()
  good = ref.logprobs(pair.chosen)
  bad  = ref.logprobs(pair.rejected)
  actor.train(pair.chosen, pair.rejected, loss=dpo(ref_chosen=good, ref_rejected=bad, beta=0.1))
  checkpoint every 1
}}
"""
ROWS = [{"prompt": f"{i}+{i}=", "pos_answers": [str(2 * i), f"0{2 * i}"], "neg_answers": [str(i), "longer" * (i % 4)],
         "id": i} for i in range(9)]
NOTE = ("note: data pairs: 6 of 18 rows dropped because they are longer than max_prompt_tokens=6 or "
        "max_answer_tokens=5\n")


def parquet(folder: Path, rows: list[dict[str, Any]]) -> Path:
    pq.write_table(pa.Table.from_pylist(rows), folder / "d.parquet", row_group_size=2)
    return folder / "d.parquet"


WRITERS = {"jsonl": jsonl, "parquet": parquet, "hf": hf}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model") / "base", num_hidden_layers=2)


def plan(folder: Path, base: Path, format: str, gpus: int = 2) -> bytes:
    folder.mkdir()
    (folder / "d.rlf").write_text(PROGRAM.format(format=format))
    place = f"cluster nodes=1 gpus={gpus}\nplace *.* on mesh(0:{gpus}) dp={gpus}\n"
    return compile_program(folder / "d.rlf", {"base": base, "rows": WRITERS[format](folder, ROWS)}, place, folder)


def run(data: bytes, out: Path, stop_after: int = 0, resume: Path | None = None) -> list[str]:
    """What each rank wrote to stderr."""
    out.mkdir(exist_ok=True)
    world = json.loads(data.splitlines()[0])["world"]
    run_world(world, _rank, data, str(out), stop_after, str(resume) if resume else None)
    return [(out / f"stderr{rank}").read_text() for rank in range(world)]


def _rank(rank: int, data: bytes, out: str, stop_after: int, resume: str | None) -> None:
    from rldsl.runtime.interpreter.interpreter import execute
    from rldsl.runtime.interpreter.options import Options
    from rldsl.runtime.plan_file import PlanFile

    with open(f"{out}/stderr{rank}", "w") as sys.stderr:
        watch: Any = Asker(stop_after) if stop_after and rank == 0 else None
        execute(PlanFile.from_bytes(data, "d.plan"), out, watchdog=watch, options=Options(resume=resume))


def lines(out: Path) -> list[dict[str, float]]:
    """The numbers of training in each step."""
    return [{k: v for k, v in json.loads(line).items() if k == "step" or k.startswith("actor/")}
            for line in (out / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def whole(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    said = run(plan(folder / "plan", base, "jsonl"), folder / "out")
    assert NOTE in said[0] and "dropped" not in said[1]
    assert said[0].count("warning[RL0802]: `pos_answers` and `neg_answers` are equal in 1 of 18 pairs") == 1
    assert "RL0802" not in said[1]
    return folder / "out"


@pytest.mark.thorough
@pytest.mark.parametrize("format", ["parquet", "hf"])
def test_every_format_gives_the_same_run(base: Path, whole: Path, tmp_path: Path, format: str) -> None:
    run(plan(tmp_path / "plan", base, format), tmp_path / "out")
    assert lines(tmp_path / "out") == lines(whole)


@pytest.mark.thorough
@pytest.mark.parametrize("format", ["jsonl", "parquet"])
def test_a_resumed_run_reads_on_where_the_other_stopped(base: Path, whole: Path, tmp_path: Path, format: str) -> None:
    data = plan(tmp_path / "plan", base, format)
    run(data, tmp_path / "out", stop_after=2)
    assert len(lines(tmp_path / "out")) == 2
    run(data, tmp_path / "out", resume=tmp_path / "out")
    assert lines(tmp_path / "out") == lines(whole)
    mine, theirs = (held(o / "checkpoints/step-000005") for o in (tmp_path / "out", whole))
    assert mine.keys() == theirs.keys() and all(mine[k].equal(theirs[k]) for k in theirs)


def test_other_ranks_read_the_same_rows(base: Path, whole: Path, tmp_path: Path) -> None:
    run(plan(tmp_path / "plan", base, "hf", gpus=1), tmp_path / "out")
    for mine, theirs in zip(lines(tmp_path / "out"), lines(whole), strict=True):
        assert mine == {k: pytest.approx(v, rel=1e-4, abs=1e-6) for k, v in theirs.items()}


def test_a_bad_row_stops_the_run_before_its_first_step(base: Path, tmp_path: Path) -> None:
    data = plan(tmp_path / "plan", base, "parquet", gpus=1)
    os.remove(tmp_path / "plan/d.parquet")
    parquet(tmp_path / "plan", [*ROWS, {**ROWS[0], "neg_answers": ["1"]}])
    with pytest.raises(AssertionError, match="RL0757 these answers cannot be paired"):
        run(data, tmp_path / "out")
    assert not (tmp_path / "out/metrics.jsonl").exists()
