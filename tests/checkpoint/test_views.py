"""Machines that do not see the same directory: no rank goes on from another checkpoint than the others."""

from __future__ import annotations

import shutil
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from rldsl.diag import Failure
from rldsl.runtime.checkpoint_files import MANIFEST
from rldsl.runtime.persist.manifest import FORMAT, manifest_text
from tests.world import run_world

HEADER: dict[str, Any] = {"sources": {}, "functions": {}, "params": {}, "seed": 1}


def checkpoint(out: Path, step: int, mark: float = 0.0) -> Path:
    folder = out / f"checkpoints/step-{step:06d}"
    folder.mkdir(parents=True)
    file = folder / "rank-00000.safetensors"
    save_file({"m|param|w|0:1": torch.full((1,), mark)}, str(file))
    said = {"bytes": file.stat().st_size, "sha256": sha256(file.read_bytes()).hexdigest()}
    manifest = {"format": FORMAT, "step": step, "plan": "", "states": {}, "data": {}, "models": {}, "readings": {},
                "files": {file.name: said}, **HEADER}
    (folder / MANIFEST).write_text(manifest_text(manifest))
    return folder


def _resume(rank: int, outs: list[str], asked: str) -> Any:
    """Each rank with a directory of its own at the same place."""
    import os

    from rldsl.runtime.persist.checkpoint_reader import load_checkpoint

    os.chdir(outs[rank])
    try:
        return load_checkpoint(Path(asked), HEADER, torch.device("cpu")).step
    except Failure as failure:
        return failure.diagnostics[0].code if failure.diagnostics else ""


@pytest.fixture
def outs(tmp_path: Path) -> list[Path]:
    checkpoint(tmp_path / "0/out", 200)
    checkpoint(tmp_path / "0/out", 300)
    shutil.copytree(tmp_path / "0", tmp_path / "1")
    return [tmp_path / "0", tmp_path / "1"]


def resumed(outs: list[Path], asked: str = "out") -> list[Any]:
    return run_world(2, _resume, [str(out) for out in outs], asked, timeout=30)


def test_the_same_on_both(outs: list[Path]) -> None:
    assert resumed(outs) == [300, 300]
    assert resumed(outs, "out/checkpoints/step-000200") == [200, 200]


def test_one_rank_lists_one_more(outs: list[Path]) -> None:
    checkpoint(outs[1] / "out", 400)
    assert resumed(outs) == [300, 300]


def test_the_newest_is_not_there_for_one_rank(outs: list[Path]) -> None:
    shutil.rmtree(outs[1] / "out/checkpoints/step-000300")
    assert resumed(outs) == ["RL0766", "RL0766"]


def test_there_is_another_one_under_its_name(outs: list[Path]) -> None:
    shutil.rmtree(outs[1] / "out/checkpoints/step-000300")
    checkpoint(outs[1] / "out", 300, mark=1.0)
    assert resumed(outs) == ["RL0766", "RL0766"]


@pytest.mark.parametrize("rank", [0, 1])
def test_one_rank_has_none(outs: list[Path], rank: int) -> None:
    shutil.rmtree(outs[rank] / "out")
    assert resumed(outs) == (["RL0760"] * 2 if rank == 0 else ["RL0766"] * 2)
