"""A run whose ranks cannot use the GPUs of their machine says so once, or is refused; no other run says anything."""

from __future__ import annotations

import os
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from rldsl import run
from rldsl.diag import Failure


def note(asked: str | None = None, built_for: str | None = None, gpus: int = 2, visible: str | None = None) -> str:
    return run._cpu_note(asked, built_for, "2.13.0", gpus, visible)


def test_a_torch_without_cuda_on_a_machine_with_gpus() -> None:
    assert note().startswith("warning: this machine has 2 GPUs, but torch 2.13.0 is built without CUDA; all ranks run on")
    assert "gloo" in note() and 'CUDA_VISIBLE_DEVICES=""' in note() and "1 GPU," in note(gpus=1)


def test_a_torch_that_sees_none() -> None:
    assert "sees none of them" in note(built_for="13.0") and "driver" in note(built_for="13.0", visible="0")


@pytest.mark.parametrize("given", [dict(asked="cpu"), dict(gpus=0), dict(visible=""), dict(visible="-1"),
                                   dict(gpus=0, built_for="13.0")])
def test_who_chose_the_cpu_or_has_nothing_else_hears_nothing(given: dict[str, object]) -> None:
    assert note(**given) == ""  # type: ignore[arg-type]


@pytest.mark.parametrize("asked, gpus, said", [(None, 1, True), ("cpu", 1, False), (None, 0, False)])
def test_it_is_printed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], asked: str | None, gpus: int,
                       said: bool) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(run.Path, "glob", lambda *_: [f"/dev/nvidia{i}" for i in range(gpus)])
    run._say_if_fallen_back(asked)
    assert (capsys.readouterr().err.count("over gloo") == 1) == said


@pytest.mark.parametrize("there", [True, False])
def test_gpus_without_nccl_are_refused(monkeypatch: pytest.MonkeyPatch, there: bool) -> None:
    """Before the version of NCCL is asked for, which a torch without it cannot tell."""
    asked: list[object] = []
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    monkeypatch.setattr(dist, "is_nccl_available", lambda: there)
    monkeypatch.setattr(dist, "init_process_group", lambda **given: asked.append(given["backend"]))
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 30))
    if there:
        run._join_ranks(torch.device("cuda", 0), 0, timedelta(seconds=1))
        assert asked == ["nccl"]
        return
    with pytest.raises(Failure, match="RL0703 torch .* has no NCCL") as caught:
        run._join_ranks(torch.device("cuda", 0), 0, timedelta(seconds=1))
    assert "--device cpu" in caught.value.diagnostics[0].help and asked == []


def test_the_cpu_needs_no_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    monkeypatch.setattr(dist, "is_nccl_available", lambda: False)
    monkeypatch.setattr(dist, "init_process_group", lambda **given: asked.append(given["backend"]))
    run._join_ranks(torch.device("cpu"), 0, timedelta(seconds=1))
    assert asked == ["gloo"] and "MASTER_ADDR" not in os.environ
