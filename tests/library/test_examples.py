"""Every program in examples/ compiles, and runs two steps on tiny models. One process runs them all."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path

import pytest

from rldsl import api
from rldsl.plan.codec import encode
from tests.library.example_data import make_data, small
from tests.samples import thorough_between
from tests.world import run_world

ROOT = Path(__file__).parents[2]
MADE_BY_DEMO = ("arithmetic_", "vault_", "vision_")  # need the models of examples/demo.py, demo_agent.py, demo_vision.py
EXAMPLES = sorted(p for p in (ROOT / "examples").glob("*.rlf") if not p.name.startswith(MADE_BY_DEMO))
ONE_RANK = "*.* on mesh(0:1) dp=1 tp=1 pp=1"


def _compiled(path: Path) -> bytes:
    made = api.compile(str(path), small(path), None, [ONE_RANK])
    return encode(made)


def _run_all(rank: int, plans: dict[str, bytes], root: str) -> dict[str, str]:
    """The error of each program that failed."""
    import traceback

    from rldsl.runtime.interpreter.interpreter import execute
    from rldsl.runtime.plan_file import PlanFile

    os.chdir(root)
    failed = {}
    for name, data in plans.items():
        try:
            execute(PlanFile.from_bytes(data, f"{name}.plan"), f"{root}/out/{name}")
        except BaseException:
            failed[name] = traceback.format_exc()
    return failed


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, float]] | str]:
    root = make_data(tmp_path_factory.mktemp("examples"))
    here = Path.cwd()
    os.chdir(root)
    done: dict[str, list[dict[str, float]] | str] = {}
    try:
        plans = {}
        for path in EXAMPLES:
            try:
                plans[path.stem] = _compiled(path)
            except Exception as error:
                done[path.stem] = f"does not compile: {error}"
    finally:
        os.chdir(here)
    by_world: dict[int, dict[str, bytes]] = {}
    for name, data in plans.items():
        by_world.setdefault(json.loads(data.splitlines()[0])["world"], {})[name] = data
    for size, group in by_world.items():
        for failed in run_world(size, _run_all, group, str(root), timeout=400.0):
            done |= failed
    for name in plans.keys() - done.keys():
        lines = (root / "out" / name / "metrics.jsonl").read_text().splitlines()
        done[name] = [json.loads(line) for line in lines]
    return done


@pytest.mark.many
@pytest.mark.parametrize("name", thorough_between([p.stem for p in EXAMPLES]))
def test_it_runs_two_steps(results: dict[str, list[dict[str, float]] | str], name: str) -> None:
    found = results[name]
    assert not isinstance(found, str), found
    steps = 2 if "steps" in small(ROOT / "examples" / f"{name}.rlf") else 1
    assert len(found) == steps
    numbers = [v for line in found for v in line.values() if isinstance(v, (int, float))]
    assert numbers and all(math.isfinite(v) for v in numbers)


def test_ppo_full_moves_its_states(results: dict[str, list[dict[str, float]] | str]) -> None:
    first, second = results["ppo_full"]
    assert first["kl"] == pytest.approx(0, abs=1e-5) and second["kl"] != 0  # the first step's policy is the reference
    assert first["beta"] == pytest.approx(0.1 * (1 - 0.2 * 8 / 10_000), rel=1e-6)
    assert second["beta"] < first["beta"]  # the divergence is below its target still
