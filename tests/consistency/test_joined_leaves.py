"""Leaves that are computed together (`invariant=training`): the parameters of leaves one after the other, bit for bit,
and an optimizer whose updates do not depend on where an element stands."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from rldsl.backends.torch.model.row_groups import sum_over_groups
from rldsl.backends.torch.train.ordered_adamw import VECTORS, OrderedAdamW
from rldsl.backends.torch.train.passes import TrainPass, passes_by_sum
from rldsl.models.families import describe, sizes_of
from rldsl.plan.model import Optimizer
from rldsl.sharding.gradient_leaves import LEAVES, leaves_together
from tests.backend_torch.shards import make_shard, pack, plan_model, ragged
from tests.samples import thorough_between
from tests.tiny import make_model

MODELS: dict[str, dict[str, Any]] = {
    "tied, norms of heads": dict(family="qwen3", tie_word_embeddings=True),
    "biases, odd heads": dict(family="qwen2", num_attention_heads=6, num_key_value_heads=2, hidden_size=48,
                              intermediate_size=90),
    "norms of heads before tokens": dict(family="exaone4"),
    "experts": dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32),
}
# rows of each leaf; some leaves have none
FILLED = [slice(0, 3), slice(3, 5), slice(0, 0), slice(5, 6), slice(6, 10), slice(0, 0), slice(0, 0), slice(10, 19)]


def shard_of(path: str, dtype: str) -> Any:
    record = replace(plan_model(path, optimizer=Optimizer(lr=1e-2, clip_grad=0.5), dtype=dtype), invariant=True,
                     invariant_training=True, sizes=sizes_of(describe(path, "causal_lm")))
    return make_shard(record, 0)


def trained(path: str, dtype: str, joined: int, recompute: str = "none") -> dict[str, torch.Tensor]:
    """The parameters after two updates."""
    shard, rows = shard_of(path, dtype), ragged(19, 46, longest=9)
    leaves = [rows[at] for at in FILLED]
    for _ in range(2):
        shard.train([(pack(leaf),) for leaf in leaves if leaf], [("logprobs", "entropy")], 0.7,
                    lambda _, fresh: (fresh[0]["logprobs"] - 0.1 * fresh[0]["entropy"]).sum() / 60, recompute=recompute,
                    leaves=[int(bool(leaf)) for leaf in leaves], joined=joined)
    return {name: x.clone() for name, x in shard.state_dict().items()}


@pytest.mark.numeric
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("model", thorough_between(MODELS))
def test_the_parameters_are_those_of_leaves_apart(model: str, dtype: str, tmp_path: Path) -> None:
    path = str(make_model(tmp_path / "m", **MODELS[model], num_hidden_layers=2))
    apart = trained(path, dtype, 1)
    for joined, recompute in ((2, "none"), (8, "full")):
        together = trained(path, dtype, joined, recompute)
        assert all(torch.equal(x, together[name]) for name, x in apart.items()), joined


@pytest.mark.numeric
def test_a_family_whose_norms_cannot_be_summed_by_leaf_has_them_apart(tmp_path: Path) -> None:
    path = str(make_model(tmp_path / "m", family="gpt2"))
    assert not shard_of(path, "float32").stage.joins_leaves
    apart, asked = trained(path, "float32", 1), trained(path, "float32", 8)
    assert all(torch.equal(x, asked[name]) for name, x in apart.items())


def test_passes_of_leaves_together() -> None:
    has_rows = (True, False, True, False)
    assert passes_by_sum((1, 1, 1, 1), 2, has_rows, False) == [
        [TrainPass((0, None), (0,))], [TrainPass((2, None), (2,))]]
    assert passes_by_sum((0, 1, 0, 1), 2, (False, False), False) == [[], []]
    # one without rows, for other ranks that wait
    assert passes_by_sum((0, 1, 0, 1), 2, (False, True), True) == [
        [TrainPass((0, None), ())], [TrainPass((None, 1), (1,))]]
    # apart: all passes of a leaf, one after the other
    assert passes_by_sum((2, 0), 1, (True, True), False) == [[TrainPass((0,), (0,)), TrainPass((1,), (1,))], []]
    assert passes_by_sum((1, 1), 1, (True, False), True) == [[TrainPass((0,), (0,))], [TrainPass((1,), ())]]


def together(sizes: Sequence[int], dp: int, most: int) -> int:
    """Of leaves with one row each."""
    return leaves_together([(i,) for i in range(LEAVES)], dp, sizes, 1024, most)


def test_how_many_leaves_are_together() -> None:
    assert together([100] * 8, 1, 4096) == 8 and together([100] * 8, 2, 4096) == 4 and together([100] * 8, 8, 4096) == 1
    assert together([300] * 8, 1, 1024) == 2 and together([600] * 8, 1, 1024) == 1
    # all ranks make as many passes, so the fullest run anywhere counts
    assert together([100] * 6 + [900] * 2, 4, 1024) == 1
    # a leaf of several passes
    assert together([100] * 7 + [1025], 1, 1 << 20) == 1


def test_groups_without_rows_add_nothing() -> None:
    parts = 10.0 ** torch.arange(6.0)
    found = sum_over_groups([(1, 2), (0, 0), (0, 3), (0, 0)], lambda rows: parts[rows.start].clone(), torch.float32)
    assert found is not None and torch.equal(found, (parts[0] + parts[1]) + parts[3])
    assert sum_over_groups([(0, 0)], lambda rows: parts[0], torch.float32) is None


@pytest.mark.numeric
def test_an_update_does_not_depend_on_where_an_element_stands() -> None:
    """Also on tensors shorter than a vector; against torch's own AdamW but for rounding."""
    draw = torch.Generator().manual_seed(3)
    whole, grads = torch.randn(3 * VECTORS + 7, generator=draw), torch.randn(2, 3 * VECTORS + 7, generator=draw)

    def updated(cuts: Sequence[int], kind: type[torch.optim.Optimizer]) -> torch.Tensor:
        parts = [torch.nn.Parameter(x.clone()) for x in whole.tensor_split(list(cuts))]
        optimizer = kind(parts, lr=1e-2, weight_decay=0.1, fused=True)  # type: ignore[call-arg]
        for grad in grads:
            for part, own in zip(parts, grad.tensor_split(list(cuts)), strict=True):
                part.grad = own.clone()
            optimizer.step()
        return torch.cat([part.detach() for part in parts])

    right = updated((), OrderedAdamW)
    for cuts in ((1,), (5, 70), (VECTORS,), (VECTORS, VECTORS + 3)):
        assert torch.equal(updated(cuts, OrderedAdamW), right), cuts
    assert torch.allclose(updated((), torch.optim.AdamW), right, rtol=1e-6, atol=1e-7)
