"""A rank before it has met the others: who speaks, and what the libraries find in the environment."""

from __future__ import annotations

import os
import sys
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rldsl import run
from rldsl.diag import Failure


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a run sets goes with the test."""
    monkeypatch.setattr(os, "environ", os.environ.copy())


def stopped(monkeypatch: pytest.MonkeyPatch, plan: Path, rank: int, local: int, *more: str) -> None:
    monkeypatch.setattr(run, "GRACE", 0.0)
    monkeypatch.setattr(sys, "argv", ["rldsl.run", str(plan), *more])
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


@pytest.mark.parametrize("version, said", [((2, 21, 5), True), ((2, 25), True), ((2, 26, 2), False), ((3, 0), False)])
def test_an_nccl_that_ignores_the_order_is_named(version: tuple[int, ...], said: bool) -> None:
    note = run._nccl_note(version)
    assert bool(note) == said and (not said or f"NCCL {version[0]}.{version[1]}" in note and "2.26" in note)


@pytest.mark.parametrize("device", ["cpu", "cuda:3"])
def test_communicators_know_their_device(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
                                         device: str) -> None:
    import torch
    import torch.distributed as dist

    asked: dict[str, Any] = {}
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    monkeypatch.setattr(dist, "init_process_group", lambda **given: asked.update(given))
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 20, 1))
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)  # whatever this torch has
    run._join_ranks(torch.device(device), 0, timedelta(seconds=1))
    said = capsys.readouterr().err
    if device == "cpu":
        assert not said and asked["backend"] == "gloo" and "device_id" not in asked
    else:
        assert asked["backend"] == "nccl" and asked["device_id"] == torch.device(device)
        assert "NCCL 2.20.1 ignores NCCL_LAUNCH_ORDER_IMPLICIT" in said


@pytest.mark.parametrize("given, found", [({}, "expandable_segments:True"), ({"PYTORCH_ALLOC_CONF": "x:1"}, "x:1"),
                                          ({"PYTORCH_CUDA_ALLOC_CONF": "x:1"}, None)])
def test_the_allocator_grows_its_segments_unless_the_user_says_otherwise(
        monkeypatch: pytest.MonkeyPatch, tmp_path: Path, given: dict[str, str], found: str | None) -> None:
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.setenv(name, "")  # so that it is restored
        monkeypatch.delenv(name)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    stopped(monkeypatch, tmp_path / "none.plan", 0, 0)
    assert os.environ.get("PYTORCH_ALLOC_CONF") == found
    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)


@pytest.mark.parametrize("there, ranks, local, device", [(8, 8, 3, 3), (8, 2, 1, 1), (1, 8, 3, 0), (1, 1, 0, 0)])
def test_the_gpu_of_a_rank(monkeypatch: pytest.MonkeyPatch, there: int, ranks: int, local: int, device: int) -> None:
    """A scheduler may show each rank one GPU, its own, which is then number 0."""
    import torch

    chosen: list[Any] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: there)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    assert run._device(None, local, ranks) == torch.device("cuda", device) == chosen[0]


def test_fewer_gpus_than_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    with pytest.raises(Failure) as raised:
        run._device(None, 5, 8)
    assert raised.value.diagnostics[0].code == "RL0703"


@pytest.mark.parametrize("uuids, shared", [(("a", "b"), False), (("a", "a"), True), ((None, None), False)])
def test_two_ranks_never_take_one_gpu(monkeypatch: pytest.MonkeyPatch, uuids: tuple[str | None, ...], shared: bool
                                      ) -> None:
    import torch
    import torch.distributed as dist

    store = dist.HashStore()
    for rank, uuid in enumerate(uuids):
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device, uuid=uuid: SimpleNamespace(uuid=uuid))
        if rank and shared:
            with pytest.raises(Failure, match="ranks 0 and 1 see the same GPU"):
                run._claim_device(store, torch.device("cuda", 0), rank)
        else:
            run._claim_device(store, torch.device("cuda", 0), rank)


@pytest.mark.parametrize("given", [[], ["--deterministic"]])
def test_deterministic_kernels_are_chosen_before_torch_is_there(monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
                                                               given: list[str]) -> None:
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    stopped(monkeypatch, tmp_path / "none.plan", 0, 0, *given)
    assert os.environ.get("CUBLAS_WORKSPACE_CONFIG") == (":4096:8" if given else None)
