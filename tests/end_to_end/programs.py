"""Compile a program and run it in a real gloo world; what every end-to-end test stands on."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from contextlib import chdir
from pathlib import Path
from typing import Any

from rldsl import api
from rldsl.plan.codec import encode
from rldsl.runtime.metrics.names import computed
from tests.responses import forget
from tests.world import run_world


class Metrics(list[dict[str, float]]):
    """What a run computes of each step."""

    responses: Path  # where the run wrote what it sampled, or read what it followed (`tests/responses.py`)

    def __init__(self, steps: Iterable[dict[str, float]], responses: Path) -> None:
        super().__init__(steps)
        self.responses = responses


def compile_program(path: Path, sets: Mapping[str, Any], place: str | None, folder: Path) -> bytes:
    """Plan bytes. place: text of a placement file, or None."""
    rules = None
    if place is not None:
        rules = folder / "placement.rlf"
        rules.write_text(place)
    return encode(api.compile(str(path), dict(sets), str(rules) if rules else None))


def run_program(path: Path, sets: Mapping[str, Any], folder: Path, place: str | None = None,
                timeout: float = 240.0, trace: Path | None = None, like: Metrics | None = None) -> Metrics:
    """What the program computes of each step, without what was measured. like: a run whose responses it gets too, but
    for those whose probabilities differ by more than rounding. Everything is written under `folder`, and the timeline
    to `trace`."""
    folder.mkdir(parents=True, exist_ok=True)
    data = compile_program(path, sets, place, folder)
    world = json.loads(data.splitlines()[0])["world"]
    responses = like.responses if like is not None else folder / "responses"
    if like is None:
        forget(responses)
    run_world(world, _rank, data, str(folder / "out"), os.getcwd(), str(trace) if trace else None, responses,
              like is not None, timeout=timeout)
    lines = [json.loads(line) for line in (folder / "out" / "metrics.jsonl").read_text().splitlines()]
    found = ({"step": line["step"], **{name: line[name] for name in computed(line)}} for line in lines)
    return Metrics(found, responses)


def run_text(base: Path, text: str, out: str, place: str | None = None, like: Metrics | None = None) -> Metrics:
    """`run_program` of this text, in the directory `base`."""
    path = base / f"{out}.rlf"
    path.write_text(text)
    with chdir(base):
        return run_program(path, {}, base / out, place=place, like=like)


def _rank(rank: int, data: bytes, out: str, cwd: str, trace: str | None, responses: Path, follow: bool = False) -> None:
    from rldsl.runtime.interpreter.interpreter import execute
    from rldsl.runtime.interpreter.options import Options
    from rldsl.runtime.plan_file import PlanFile
    from tests.responses import followed, recorded

    os.chdir(cwd)
    with followed(responses) if follow else recorded(responses):
        execute(PlanFile.from_bytes(data, "test.plan"), out,
                options=Options(trace=trace, allow_write=(str(Path(out).parents[1]),)))
