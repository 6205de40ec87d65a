"""A program on two machines: two torchrun agents that meet at one address, as docs/cluster.md starts them.

Whatever happens, what comes out in the end is what one world of two ranks computes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cluster.hosts import forbidden, kill, started, until
from tests.end_to_end.programs import Metrics, compile_program, run_program
from tests.tiny import make_model, make_sums, write_jsonl

PROGRAM = """
use std.sft (sft)
param steps = 30
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


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("two_hosts")
    make_model(folder / "model", num_hidden_layers=2)
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


@pytest.fixture(params=[True, False], ids=["two_network_namespaces", "one_machine"])
def namespaces(request: pytest.FixtureRequest) -> bool:
    why = forbidden()
    if bool(why) == request.param:
        pytest.skip(why or "two network namespaces, which say more, can be made here")
    return bool(request.param)


@pytest.mark.thorough
@pytest.mark.many
def test_two_agents_one_of_whose_ranks_dies_compute_what_one_world_does(namespaces: bool, plan: bytes, whole: Metrics,
                                                                       tmp_path: Path) -> None:
    with started(plan, tmp_path, namespaces, restarts=1) as run:
        until(lambda: run.newest() >= 3, 60)
        first = run.ranks()
        kill(first[1])
        until(lambda: not {*first.values()} & {*run.ranks().values()}, 60)  # both are started again, or it is over
        assert run.wait(100) == [0, 0], run.said()
        assert json.loads((run.folder / "out/summary.json").read_text())["steps"] == 30
        assert run.metrics() == whole
        # a rank whose own torchrun counts no restart goes on with the others, and takes the run for no stranger's
        assert not any(code in run.said() for code in ("RL0763", "RL0781")), run.said()
        assert ("all 2 nodes of the plan run on one machine" in run.said()) != namespaces
