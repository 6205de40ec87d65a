"""A rank before it has met the others: who speaks, and what the libraries find in the environment."""

from __future__ import annotations

import os
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from rldsl import run


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a run sets goes with the test."""
    monkeypatch.setattr(os, "environ", os.environ.copy())


def stopped(monkeypatch: pytest.MonkeyPatch, plan: Path, rank: int, local: int) -> None:
    monkeypatch.setattr(run, "GRACE", 0.0)
    monkeypatch.setattr(sys, "argv", ["rldsl.run", str(plan)])
    for name, value in (("RANK", rank), ("LOCAL_RANK", local), ("WORLD_SIZE", 16)):
        monkeypatch.setenv(name, str(value))
    with pytest.raises(SystemExit) as ended:
        run.main()
    assert ended.value.code == 1


@pytest.mark.parametrize("rank, local, says", [(0, 0, True), (8, 0, True), (9, 1, False), (1, 1, False)])
@pytest.mark.parametrize("text, code", [(None, "RL0700"), ("{}", "RL0601")])
def test_one_rank_of_each_machine_says_that_it_has_no_plan(
        monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, rank: int, local: int,
        says: bool, text: str | None, code: str) -> None:
    plan = tmp_path / "p.plan"
    if text is not None:
        plan.write_text(text)
    stopped(monkeypatch, plan, rank, local)
    assert (code in capsys.readouterr().err) == says


@pytest.mark.parametrize("given, found", [(None, "1"), ("0", "0")])
def test_nccl_starts_kernels_in_the_order_of_the_plan_unless_the_user_says_otherwise(
        monkeypatch: pytest.MonkeyPatch, tmp_path: Path, given: str | None, found: str) -> None:
    name = "NCCL_LAUNCH_ORDER_IMPLICIT"
    monkeypatch.setenv(name, given or "") if given else monkeypatch.delenv(name, raising=False)
    stopped(monkeypatch, tmp_path / "none.plan", 0, 0)
    assert os.environ[name] == found


@pytest.mark.parametrize("device", ["cpu", "cuda:3"])
def test_communicators_know_their_device(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    import torch
    import torch.distributed as dist

    asked: dict[str, Any] = {}
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    monkeypatch.setattr(dist, "init_process_group", lambda **given: asked.update(given))
    run._join_ranks(torch.device(device), 0, timedelta(seconds=1))
    if device == "cpu":
        assert asked["backend"] == "gloo" and "device_id" not in asked
    else:
        assert asked["backend"] == "nccl" and asked["device_id"] == torch.device(device)
