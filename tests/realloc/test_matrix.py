"""ReaL's own matrix (its test of parameter reallocation): all 36 ordered pairs of six strategies, on real shards.

For every pair, a training step under the first, the way to the second, and back: log-probs or values are the same under
both, and the parameters that come back are those that left, bit for bit.
"""

from __future__ import annotations

from itertools import count

import pytest
import torch
import torch.distributed as dist

from rldsl.backends.torch import build
from rldsl.plan.model import Layout, Mesh, Model, Optimizer
from rldsl.runtime.backend import Axes, Shard
from rldsl.runtime.comm.reshard import RankReshard, Tensors, reshard
from rldsl.runtime.comm.side_stream import SideStream
from rldsl.sharding.layout import axis_ranks
from tests.backend_torch.shards import _axis, pack, plan_model, ragged
from tests.samples import thorough_unless
from tests.tiny import make_model
from tests.world import run_world

MATRIX = ((4, 1, 1), (2, 2, 2), (1, 8, 1), (3, 2, 1), (2, 1, 2), (1, 2, 2))  # (pp, dp, tp)
WORLD = 8
CPU = torch.device("cpu")
ROWS = pack(ragged(6, 46))


class At:
    """A strategy on the first ranks: its layout, and the shard of this rank, if it has one."""

    def __init__(self, model: Model, rank: int, pp: int, dp: int, tp: int, train: bool) -> None:
        self.mesh = Mesh("m0", ((0, pp * dp * tp),))
        self.layout = Layout(f"L{pp}{dp}{tp}", "m0", dp=dp, tp=tp, pp=pp)
        axes = {}
        for axis in ("dp", "tp", "pp", "cp", "mesh"):
            found = axis_ranks(self.layout, self.mesh, axis)
            if rank < pp * dp * tp:
                axes[axis] = _axis(found, rank)
            else:
                for ranks in found:
                    if len(ranks) > 1:
                        dist.new_group(list(ranks))
        self.shard: Shard | None = None
        if axes:
            self.shard = build(model, self.layout, self.mesh, Axes(**axes), CPU, load=train, trainable=train)

    def state_dict(self) -> Tensors | None:
        return self.shard and self.shard.state_dict()


def move(model: Model, rank: int, a: At, b: At, tag: int) -> None:
    route = RankReshard.plan(model, a.layout, a.mesh, b.layout, b.mesh, 4, rank)
    reshard(route, a.state_dict(), b.state_dict(), torch.float32, SideStream(CPU), tag).finish()


def seen(at: At, what: str) -> torch.Tensor | None:
    """What the last stage computes of the rows; every rank of a layout has to ask."""
    return at.shard and at.shard.infer([ROWS], what, 1.0)


def matrix(rank: int, path: str, kind: str, what: str) -> list[tuple[str, bool, float]]:
    """For each pair with this rank: whether the parameters came back as they left, and how far what is computed is
    off."""
    model = plan_model(path, kind, Optimizer(lr=1e-2), 10)
    every = {x: At(model, rank, *x, train=False) for x in MATRIX}
    tags, found = count(0, 64), []
    for x in MATRIX:
        home = At(model, rank, *x, train=True)
        for y in MATRIX:
            if home.shard is not None:
                home.shard.train([(ROWS,)], [(what,)], 1.0, lambda _, fresh: (fresh[0][what] - 0.5).square().sum())
                left = {n: t.clone() for n, t in home.shard.state_dict().items()}
            before = seen(home, what)
            move(model, rank, home, every[y], next(tags))
            after = seen(every[y], what)
            if home.shard is not None:
                for t in home.shard.state_dict().values():
                    t.data.fill_(torch.nan)
            move(model, rank, every[y], home, next(tags))
            same = home.shard is None or all(torch.equal(left[n], t) for n, t in home.shard.state_dict().items())
            off = -1.0  # nothing to compare
            if before is not None and after is not None and len(before) and before.shape == after.shape:
                off = float((before - after).abs().max()) if before.abs().max() > 1e-3 else 1.0
            found.append((f"{x} to {y}", same, off))
            dist.barrier()
    return found


@pytest.mark.thorough
@pytest.mark.many
@pytest.mark.parametrize("kind, what", thorough_unless(lambda kind, _: kind == "causal_lm", [
    ("causal_lm", "logprobs"), ("value_model", "values")]), ids=["actor", "critic"])
def test_all_pairs(tmp_path, kind: str, what: str) -> None:
    path = str(make_model(tmp_path / "m", family="llama", num_hidden_layers=4, num_attention_heads=8, hidden_size=32,
                          num_key_value_heads=2))
    every = run_world(WORLD, matrix, path, kind, what, timeout=300)
    assert all(len(found) == 36 for found in every)
    for found in every:
        for pair, same, off in found:
            assert same, f"{pair}: a parameter changed"
            assert off < 1e-5, f"{pair}: {what} differ by {off}"
    assert len({pair for found in every for pair, _, off in found if off >= 0}) >= 24, "most pairs meet on a last stage"
