"""A program on two machines: two torchrun agents that meet at one address, as docs/cluster.md starts them.

Whatever happens, what comes out in the end is what one world of two ranks computes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cluster.hosts import Run, forbidden, kill, started, until
from tests.end_to_end.programs import Metrics, compile_program, run_program
from tests.tiny import make_model, make_sums, write_jsonl

PROGRAM = """
use std.sft (sft)
param steps = 40
param base: text
param rows: text
cluster nodes=2 gpus=1
data sums = jsonl(rows, batch=4, answer="answer")
model actor = causal_lm(base) train adamw(lr=1e-3)
flow tuning(steps=steps, seed=1) {
  batch = sums.next()
  actor.train(batch, loss=sft()) on mesh(0:2) dp=2
  checkpoint every 1
}
"""
NAMESPACES = pytest.param(True, id="two_network_namespaces")
ONE_MACHINE = pytest.param(False, id="one_machine")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("two_hosts")
    make_model(folder / "model")
    write_jsonl(folder / "sums.jsonl", make_sums(16))
    (folder / "p.rlf").write_text(PROGRAM)
    return folder


def sets(source: Path) -> dict[str, str]:
    return {"base": str(source / "model"), "rows": str(source / "sums.jsonl")}


@pytest.fixture(scope="module")
def plan(source: Path) -> bytes:
    return compile_program(source / "p.rlf", sets(source), None, source)


@pytest.fixture(scope="module")
def whole(source: Path) -> Metrics:
    """Of one world of two ranks."""
    return run_program(source / "p.rlf", sets(source), source / "whole")


@pytest.fixture
def namespaces(request: pytest.FixtureRequest) -> bool:
    if request.param and (why := forbidden()):
        pytest.skip(why)
    return bool(request.param)


def ended_well(run: Run) -> None:
    assert run.wait(100) == [0, 0], run.said()
    assert json.loads((run.folder / "out/summary.json").read_text())["steps"] == 40


def lose(run: Run, rank: int) -> None:
    """Kill a rank after some steps; return when both are there again and have made more steps."""
    before, first = run.ranks(), run.newest()
    kill(before[rank][0])
    until(lambda: not {p for p, _ in before.values()} & {p for p, _ in run.ranks().values()}, 60)
    until(lambda: len(run.ranks()) == 2 and run.newest() > max(first, 1), 60)


@pytest.mark.parametrize("namespaces", [ONE_MACHINE, NAMESPACES], indirect=True)
def test_two_agents_whose_ranks_die_compute_what_one_world_does(namespaces: bool, plan: bytes, whole: Metrics,
                                                               tmp_path: Path) -> None:
    with started(plan, tmp_path, namespaces, restarts=2) as run:
        until(lambda: run.newest() >= 3, 60)
        lose(run, 1)
        print(run.ranks())
        lose(run, 0)
        print(run.ranks())
        ended_well(run)
        assert run.metrics() == whole
        assert ("all 2 nodes of the plan are on one machine" in run.said()) != namespaces
