"""Megatron on a machine without CUDA, with nothing put in its place: what needs CUDA is said, all else computes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from rldsl.diag import Failure
from tests.backend_torch.shards import pack, plan_model, shard_of
from tests.backend_torch.test_train import OPTIONS, ROWS, UPDATES
from tests.megatron.shards import layout_of as at
from tests.megatron.shards import make, needed
from tests.world import run_world

needed()
NO_CUDA = pytest.mark.skipif(torch.cuda.is_available(), reason="there is CUDA here")


def refused(rank: int, path: str) -> tuple[str, str]:
    with pytest.raises(Failure) as caught:
        shard_of(plan_model(path), at(tp=2), rank)
    (d,) = caught.value.diagnostics
    return d.code, d.help


@NO_CUDA
def test_tensor_parallelism_is_refused_with_what_works(tmp_path: Path) -> None:
    for code, help in run_world(2, refused, make(tmp_path, "qwen3")):
        assert code == "RL0728" and "tp=1" in help and "backend=megatron" in help


def norms(rank: int, path: str) -> list[float]:
    found = []
    for layout in (at(pp=2), at(cp=2), at(dp=2, zero=1), at(dp=2, ep=2)):
        shard, mine = shard_of(plan_model(path, "causal_lm", OPTIONS, UPDATES), layout, rank, True)
        rows = ROWS[:6][mine :: layout.dp]
        found.append(shard.train([(pack(rows),)], [("logprobs",)], 1.0,
                                 lambda _, fresh: fresh[0]["logprobs"].sum() * 0.01)["grad_norm"])
    return found


@NO_CUDA
def test_other_degrees_need_no_cuda(tmp_path: Path) -> None:
    for found in run_world(2, norms, make(tmp_path, "mixtral")):
        assert found == pytest.approx([found[0]] * len(found), rel=1e-4) and found[0] > 0
