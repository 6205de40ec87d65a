"""Compile a program and run it in a real gloo world; what every end-to-end test stands on."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rldsl import api
from rldsl.plan.codec import encode
from rldsl.runtime.metrics.names import computed
from tests.world import run_world

Metrics = list[dict[str, float]]


def compile_program(path: Path, sets: Mapping[str, Any], place: str | None, folder: Path) -> bytes:
    """Plan bytes. place: text of a placement file, or None."""
    rules = None
    if place is not None:
        rules = folder / "placement.rlf"
        rules.write_text(place)
    return encode(api.compile(str(path), dict(sets), str(rules) if rules else None))


def run_program(path: Path, sets: Mapping[str, Any], folder: Path, place: str | None = None,
                timeout: float = 240.0, trace: Path | None = None) -> Metrics:
    """What the program computes of each step, without what was measured. Everything is written under `folder`/out, and
    the timeline to `trace`."""
    folder.mkdir(parents=True, exist_ok=True)
    data = compile_program(path, sets, place, folder)
    world = json.loads(data.splitlines()[0])["world"]
    run_world(world, _rank, data, str(folder / "out"), os.getcwd(), str(trace) if trace else None, timeout=timeout)
    lines = [json.loads(line) for line in (folder / "out" / "metrics.jsonl").read_text().splitlines()]
    return [{"step": line["step"], **{name: line[name] for name in computed(line)}} for line in lines]


def _rank(rank: int, data: bytes, out: str, cwd: str, trace: str | None) -> None:
    from rldsl.runtime.interpreter.interpreter import execute
    from rldsl.runtime.interpreter.options import Options

    os.chdir(cwd)
    execute(data, "test.plan", out, options=Options(trace=trace, allow_write=(str(Path(out).parents[1]),)))
