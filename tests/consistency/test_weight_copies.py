"""Copies of weights for the products of invariant models: made once in a call, never those of parameters before an
update, with the parameters' gradients, and without memory between calls."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from benchmarks.match import prompts
from rldsl.backends.torch.model import weight_copies
from rldsl.backends.torch.model.tree_sums import row_parallel_product
from rldsl.backends.torch.model.invariant_products import linear
from rldsl.backends.torch.model.weight_copies import NO_COPIES, WeightCopies
from rldsl.models.families import describe, sizes_of
from rldsl.plan.events import Sampling
from rldsl.plan.model import Optimizer
from rldsl.runtime.backend import GenerationOutput
from tests.backend_torch.shards import make_shard, plan_model
from tests.tiny import make_model

CUTS = (0, 4, 8)
SAMPLING = Sampling(max_new_tokens=5, min_new_tokens=5)


def test_one_copy_is_made_in_a_call() -> None:
    copies, weight = WeightCopies(), nn.Parameter(torch.randn(3, 8))
    with copies.in_call():
        first = copies.cast(weight, torch.bfloat16)
        again = copies.cast(weight, torch.bfloat16)
        assert first.data_ptr() == again.data_ptr()
        assert torch.equal(first, weight.bfloat16())
        own = copies.cast(weight, torch.float32)
        assert own.data_ptr() == weight.data_ptr() and not own.requires_grad and not first.requires_grad


def test_a_later_call_reads_what_the_parameter_is_then() -> None:
    copies, weight = WeightCopies(), nn.Parameter(torch.randn(3, 8))
    with copies.in_call(), torch.no_grad():
        kept = copies.cast(weight, torch.bfloat16)  # as a captured step keeps it
    weight.data = torch.randn(3, 8)
    with copies.in_call(), torch.no_grad():
        copies.fill()
        assert torch.equal(kept, weight.bfloat16())


def test_no_memory_is_left_between_calls() -> None:
    copies, weight = WeightCopies(), nn.Parameter(torch.randn(3, 8))
    with copies.in_call():
        with copies.in_call():  # a call inside a call
            copy = copies.cast(weight, torch.bfloat16)
        assert copy.untyped_storage().nbytes() > 0
    assert copy.untyped_storage().nbytes() == 0


def test_the_gradient_is_that_of_the_parameter() -> None:
    copies, weight, x = WeightCopies(), nn.Parameter(torch.randn(3, 8)), torch.randn(5, 8, dtype=torch.bfloat16)
    (right,) = torch.autograd.grad(linear(x, weight).sum(), weight)
    with copies.in_call():
        (found,) = torch.autograd.grad(linear(x, weight, copies=copies).sum(), weight)
    assert found.dtype == torch.float32 and torch.equal(found, right)


@pytest.mark.parametrize("faster", [False, True])
def test_blocks_are_the_columns(faster: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_copies, "mkl_lacks_avx512", lambda: faster)
    copies, weight = WeightCopies(), nn.Parameter(torch.randn(3, 8))
    with copies.in_call():
        blocks = copies.blocks(weight, torch.float32, CUTS)
    assert [b.is_contiguous() for b in blocks] == [faster] * 2
    with copies.in_call():
        blocks = copies.blocks(weight, torch.float32, CUTS)
        assert torch.equal(torch.cat(blocks, 1), weight)


@pytest.mark.parametrize("kind", ["outside a call", "not kept", "no parameter"])
def test_else_there_is_none(kind: str) -> None:
    copies, weight = WeightCopies(enabled=kind != "not kept"), nn.Parameter(torch.randn(3, 8))
    given = weight * 1 if kind == "no parameter" else weight

    def pair() -> list[torch.Tensor]:
        return [copies.cast(given, torch.bfloat16) for _ in range(2)]

    if kind == "outside a call":
        first, second = pair()
    else:
        with copies.in_call():
            first, second = pair()
    assert first.data_ptr() != second.data_ptr() and torch.equal(first, second)


def test_a_product_with_copies_is_the_same() -> None:
    copies, weight, x = WeightCopies(), nn.Parameter(torch.randn(3, 8)), torch.randn(5, 8, requires_grad=True)
    found = []
    with copies.in_call():
        for kept in (NO_COPIES, copies):
            out = row_parallel_product(x, weight, CUTS, copies=kept)
            found.append((out, *torch.autograd.grad(out.sum(), (x, weight))))
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_captured_steps_read_the_updated_weights(dtype: str, tmp_path: Path) -> None:
    """The second call of a shape replays steps that the first one captured, and a train call is between them."""
    path = str(make_model(tmp_path / "m"))
    model = replace(plan_model(path, optimizer=Optimizer(lr=0.05), dtype=dtype), sizes=sizes_of(describe(path, "causal_lm")),
                    invariant=True, invariant_training=True)
    shard, asked = make_shard(model, 0), prompts(46, 4, 6, torch.device("cpu"))

    def sampled() -> GenerationOutput:
        made = shard.generate(asked, SAMPLING, seed=3, step=0, max_num_seqs=4)
        assert torch.equal(made.logprobs, shard.infer([made.batch], "logprobs", 1.0))
        return made

    before = sampled()
    for _ in range(3):
        shard.train([(before.batch,)], [("logprobs",)], 1.0, lambda _, fresh: fresh[0]["logprobs"].mean(),
                    leaves=[1] + [0] * 7)
        after = sampled()
    assert not torch.equal(before.logprobs, after.logprobs)
