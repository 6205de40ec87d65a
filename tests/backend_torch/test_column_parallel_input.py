"""Ranks of tp agree on the all-reduces of a pass, however long tensors live: whoever looks at a rank's stack, as the
watchdog does, keeps what is in there alive for a moment."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rldsl.plan.model import Optimizer
from rldsl.runtime import collectives
from tests.backend_torch.shards import make_shard, pack, plan_model, ragged
from tests.samples import thorough_between
from tests.tiny import make_model
from tests.world import run_world

LAYERS, HIDDEN = 3, 32


def sums_of_a_step(rank: int, path: str, kept: str, recompute: bool) -> list[tuple[int, ...]]:
    """The shapes of what is summed over tp in a training step. kept: what rank 0 keeps alive of what modules get."""
    model = plan_model(path, optimizer=Optimizer(lr=1e-3))
    shard: Any = make_shard(model, rank, tp=2)
    alive: list[Any] = []
    for module in {m for chunk in shard.stage.chunks for _, layer in chunk.own_layers() for m in layer.modules()}:
        if rank == 0 and kept == "inputs":
            module.register_forward_pre_hook(lambda _, given: alive.append(given))
        elif rank == 0 and kept == "some":
            module.register_forward_pre_hook(lambda _, given: alive.append(given) if len(alive) % 3 else alive.append(0))
    plain, asked = collectives.all_reduce, []

    def noted(x: torch.Tensor, *args: Any, **more: Any) -> None:
        asked.append(tuple(x.shape))
        plain(x, *args, **more)

    collectives.all_reduce = noted
    batch = pack([(p, [*r, 5]) for p, r in ragged(6, 40)])
    shard.train([(batch,)], [("logprobs",)], 1.0, lambda _, out: out[0]["logprobs"].mean(), recompute=recompute)
    return asked


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("kept", ["inputs", "some"])
@pytest.mark.parametrize("family", thorough_between(["qwen3_moe", "mixtral", "llama"]))
def test_what_is_kept_alive_changes_no_sum(family: str, kept: str, recompute: bool, tmp_path: Any) -> None:
    path = str(make_model(tmp_path / "m", family))
    one, other = run_world(2, sums_of_a_step, path, kept, recompute)
    assert one == other and one


def test_modules_that_read_the_same_share_a_sum(tmp_path: Any) -> None:
    """Of a family whose layers divide no tokens over tp, which would be gathered instead."""
    path = str(make_model(tmp_path / "m", "qwen3_moe", num_hidden_layers=LAYERS, hidden_size=HIDDEN))
    one, _ = run_world(2, sums_of_a_step, path, "nothing", False)
    activations = [shape for shape in one if shape[-1:] == (HIDDEN,)]
    # the outputs of attention and of experts, and the gradients of their inputs; the embedding
    assert len(activations) == 4 * LAYERS + 1
