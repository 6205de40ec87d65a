"""Programs on placements drawn at random, against one rank: the placement never changes numbers.

    python -m tests.end_to_end.placements --count 300 --seed 2

Every call gets its own ranks and degrees; what the compiler refuses (RL03xx) is drawn again. All placements of a
program run one after the other in one world. """

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from rldsl.diag import Failure
from rldsl.runtime.metrics.names import computed
from tests.end_to_end.programs import Metrics, compile_program
from tests.tiny import make_all
from tests.world import run_world

HERE = Path(__file__).parent
EXAMPLES = HERE.parents[1] / "examples"
WORLD = 4
CALLS = {"grpo": ("actor.generate", "actor.train", "ref.logprobs"),
         "ppo": ("actor.generate", "actor.train", "critic.values", "critic.train", "ref.logprobs", "judge.score"),
         "dpo": ("actor.train", "ref.logprobs")}


@dataclass(frozen=True, slots=True)
class Drawn:
    """place: rules. plan: its bytes. refused: codes of the draws before it."""

    place: str
    plan: bytes
    refused: tuple[str, ...]


def program(name: str, tiny: Path, folder: Path) -> tuple[Path, dict[str, Any]]:
    """Two steps of a program with tiny models."""
    sets: dict[str, Any] = {"base": str(tiny / "models/sft"), "steps": 2}
    prompts = str(tiny / "data/prompts.jsonl")
    if name == "grpo":
        return HERE / "grpo_small.rlf", sets | {"rows": prompts, "tokens": 3, "batch": 3, "samples": 2}
    path, text = folder / f"{name}.rlf", (EXAMPLES / f"{name}.rlf").read_text()
    path.write_text(text.replace("cluster nodes=1 gpus=8\n", "").replace("lr=5e-7", "lr=1e-3")
                    .replace("minibatches=4", "minibatches=2"))
    if name == "dpo":
        return path, sets | {"rows": str(tiny / "data/pairs.jsonl"), "batch": 4}
    return path, sets | {"rows": prompts, "rm": str(tiny / "models/rm"), "lr": 1e-3, "batch": 4, "tokens": 3}


def rule(call: str, draw: random.Random) -> str:
    size = draw.choice((1, 2, 2, 4, 4, 4))
    first = draw.randrange(WORLD - size + 1)
    axes = ["dp", "tp", "pp"] + ["cp"] * (not call.endswith("generate"))
    degrees = dict.fromkeys(axes, 1)
    for _ in range(size.bit_length() - 1):
        degrees[draw.choice(axes)] *= 2
    words = [f"{axis}={n}" for axis, n in degrees.items() if n > 1 or axis == "dp"]
    if draw.random() < 0.5:
        words.append(f"mbs={draw.choice((1, 2, 3, 5))}")
    if call.endswith("train"):
        if degrees["dp"] > 1 and degrees.get("cp") == 1 and draw.random() < 0.6:
            words.append(f"zero={draw.choice((1, 2, 3))}")
        if draw.random() < 0.4:
            words.append("recompute=full")
    return f"place {call} on mesh({first}:{first + size}) {' '.join(words)}"


def drawn(name: str, tiny: Path, folder: Path, draw: random.Random) -> Drawn:
    path, sets = program(name, tiny, folder)
    refused: list[str] = []
    while True:
        place = "\n".join([f"cluster nodes=1 gpus={WORLD}", *(rule(c, draw) for c in CALLS[name])]) + "\n"
        try:
            return Drawn(place, compile_program(path, sets, place, folder), tuple(refused))
        except Failure as failure:
            codes = [d.code for d in failure.diagnostics if d.severity == "error"]
            assert codes and all(c.startswith("RL03") for c in codes), f"{place}{failure}"
            refused += codes
            assert len(refused) < 200, "hardly anything is legal"


def alone(name: str, tiny: Path, folder: Path) -> Metrics:
    path, sets = program(name, tiny, folder)
    rules = "".join(f"place {c} on mesh(0:1)\n" for c in CALLS[name])
    return runs([compile_program(path, sets, f"cluster nodes=1 gpus=1\n{rules}", folder)], folder, 1)[0]


def runs(plans: list[bytes], folder: Path, world: int, like: Metrics | None = None) -> list[Metrics]:
    """What each plan computes, step by step. like: a run whose responses they get too (`tests/responses.py`)."""
    shutil.rmtree(folder / "out", ignore_errors=True)
    responses = like.responses if like is not None else folder / "responses"
    # of the objective on data alone, nothing is sampled
    follow = any(responses.parent.glob(f"{responses.name}.*"))
    run_world(world, _rank, plans, str(folder / "out"), os.getcwd(), responses, follow, timeout=60.0 + 30 * len(plans))
    found = []
    for i in range(len(plans)):
        lines = [json.loads(x) for x in (folder / f"out/{i}/metrics.jsonl").read_text().splitlines()]
        found.append(Metrics(({k: line[k] for k in computed(line)} for line in lines), responses))
    return found


def _rank(rank: int, plans: list[bytes], out: str, cwd: str, responses: Path, follow: bool) -> None:
    from rldsl.runtime.interpreter.interpreter import execute
    from rldsl.runtime.interpreter.options import Options
    from rldsl.runtime.plan_file import PlanFile
    from tests.responses import followed, recorded

    os.chdir(cwd)
    with followed(responses) if follow else recorded(responses):
        for i, plan in enumerate(plans):
            execute(PlanFile.from_bytes(plan, "test.plan"), f"{out}/{i}", options=Options(allow_write=(out,)))


def differences(found: Metrics, expected: Metrics) -> list[str]:
    wrong = [] if len(found) == len(expected) else [f"{len(found)} steps instead of {len(expected)}"]
    for step, (mine, theirs) in enumerate(zip(found, expected), 1):
        for name, value in theirs.items():
            if mine.get(name) != pytest.approx(value, rel=2e-4, abs=2e-5):
                wrong.append(f"step {step}: {name} is {mine.get(name)}, on one rank {value}")
    return wrong


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--program", choices=tuple(CALLS), action="append")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        tiny = make_all(folder / "tiny", tie_word_embeddings=True)
        for name in given.program or CALLS:
            draw, expected = random.Random(given.seed), alone(name, tiny, folder)
            for start in range(0, given.count, 20):
                several = [drawn(name, tiny, folder, draw) for _ in range(min(20, given.count - start))]
                for one, found in zip(several, runs([x.plan for x in several], folder, WORLD, expected)):
                    if wrong := differences(found, expected):
                        print(one.place, *wrong, sep="\n  ", flush=True)
                print(f"{name}: {start + len(several)} placements", flush=True)


if __name__ == "__main__":
    main()
