"""A rank whose host memory is other memory than its device's, on a machine that has one memory alone.

What has gone, and what has not come yet, is NaN: whoever still uses it, or does not wait, computes with NaN.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from tests.end_to_end.programs import Metrics, _rank, compile_program, computed
from tests.world import run_world

Tensors = dict[str, torch.Tensor]


def offload(host: object, tensors: Mapping[str, torch.Tensor]) -> Tensors:
    return _taken(tensors)


def onload(host: object, tensors: Mapping[str, torch.Tensor]) -> tuple[Tensors, Callable[[], None]]:
    values = _taken(tensors)
    made = {name: torch.full_like(t, float("nan")) for name, t in values.items()}

    def finish() -> None:
        for name, tensor in made.items():
            tensor.copy_(values[name])

    return made, finish


@torch.no_grad()
def _taken(tensors: Mapping[str, torch.Tensor]) -> Tensors:
    found = {name: tensor.clone() for name, tensor in tensors.items()}
    for tensor in tensors.values():
        tensor.fill_(float("nan"))
    return found


def run(path: Path, folder: Path, goes: bool) -> Metrics:
    """What `run_program` says of it. goes: an offload really moves."""
    data = compile_program(path, {}, None, folder)
    run_world(json.loads(data.splitlines()[0])["world"], _apart if goes else _rank, data, str(folder / "out"),
              str(Path.cwd()), None, folder / "responses", timeout=240.0)
    lines = [json.loads(line) for line in (folder / "out/metrics.jsonl").read_text().splitlines()]
    return Metrics(({name: line[name] for name in computed(line)} for line in lines), folder / "responses")


def _apart(rank: int, data: bytes, out: str, cwd: str, trace: str | None, responses: Path) -> None:
    """The process of a world, which ends with it."""
    from rldsl.runtime.host_memory import HostMemory

    HostMemory.offload, HostMemory.onload = offload, onload  # type: ignore[assignment,method-assign]
    _rank(rank, data, out, cwd, trace, responses)
