"""What a train call under `zero` holds: of each moment of a minibatch, by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from rldsl.memory.parameters import Copy
from rldsl.memory.values import PassPeaks
from rldsl.memory.zero_memory import bytes_under_zero, groups_of
from rldsl.plan.model import Model, Optimizer
from rldsl.sharding.boxes import Cell
from tests.backend_torch.shards import layout_of, plan_model
from tests.tiny import make_model

NONE = PassPeaks(0, 0, 0, 0, 0, 0, 0, several=False)
TABLE, LAYER = 4 * 96 * 32, 4 * (4 * 32 * 32 + 3 * 32 * 64 + 2 * 32)  # bytes: the embedding; a layer
SIZES = dict(vocab_size=96, hidden_size=32, intermediate_size=64, num_hidden_layers=4, num_attention_heads=4,
             num_key_value_heads=4)


def model(folder: Path, **more: object) -> Model:
    return plan_model(str(make_model(folder / "m", family="llama", **SIZES | more)), "causal_lm", Optimizer(lr=1e-3))


def copy_at(model: Model, zero: int, stage: int = 0, **degrees: int) -> Copy:
    return Copy(model, layout_of(dp=2, zero=zero, **degrees), Cell(stage, 0))


def total(copy: Copy, peaks: PassPeaks = NONE, device: str = "cpu") -> int:
    return sum(bytes_under_zero(copy, peaks, device).values())


def test_groups_are_layers_and_what_is_outside(tmp_path: Path) -> None:
    found = groups_of(copy_at(model(tmp_path), 1))
    assert found.parts == found.gradients == (LAYER,) * 4
    assert found.outside == 2 * TABLE + 4 * 32 and found.head == TABLE
    tied = groups_of(copy_at(model(tmp_path / "tied", tie_word_embeddings=True), 1))
    assert tied.outside == TABLE + 4 * 32 and tied.head == 0, "it waits for that of the embedding, with or without zero"


@pytest.mark.parametrize("zero, layers", [(1, 4), (2, 4), (3, 0)])
def test_at_the_end_what_is_outside_layers_is_reduced(zero: int, layers: int, tmp_path: Path) -> None:
    """Gradients, their copy by ranks, half of it as a result, and the result of the last layer reduced before."""
    copy = copy_at(model(tmp_path, vocab_size=960), zero)
    outside = groups_of(copy).outside
    assert outside > 4 * LAYER
    assert total(copy) == outside + layers * LAYER + 2 * outside + outside // 2 + LAYER // 2
    assert total(copy, device="cuda") == total(copy) + LAYER, "NCCL may read until it is waited for"


@pytest.mark.parametrize("zero, gradients", [(1, 2), (2, 0), (3, 0)])
def test_a_stage_between_the_ends_has_layers_alone(zero: int, gradients: int, tmp_path: Path) -> None:
    """Level 1 keeps the gradients of both layers to the end; the others reduce one while that of the next is there."""
    copy = copy_at(model(tmp_path, num_hidden_layers=8), zero, stage=1, pp=4)
    assert groups_of(copy).outside == 0 and len(groups_of(copy).parts) == 2
    kept = LAYER if gradients else LAYER // 2
    assert total(copy) == 2 * LAYER + 2 * LAYER + LAYER // 2 + kept


def test_activations_are_not_added_to_what_comes_after_them(tmp_path: Path) -> None:
    """The passes need what they have with parameters; the reductions at the end find no activations."""
    copy, big = copy_at(model(tmp_path), 1), 10**9
    there = groups_of(copy).outside + 4 * LAYER
    head = replace(NONE, head=big)
    assert total(copy, head) == big + there
    assert total(copy, replace(head, several=True)) == big + 2 * there, "gradients of the micro-batches before"
    assert total(copy_at(copy.model, 2), head) == big + there
    assert total(copy_at(copy.model, 3), head) == big + groups_of(copy).outside
    assert total(copy, NONE) < big


@pytest.mark.parametrize("peak", ["head", "layers", "first_layer", "embedding", "tower", "between_layers", "between_passes"])
def test_no_peak_is_forgotten(peak: str, tmp_path: Path) -> None:
    """At the level that has it."""
    made, most = model(tmp_path), replace(NONE, **{peak: 10**9})
    found = max(total(copy_at(made, zero), most) for zero in (1, 2))
    assert found > 10**9


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_gradients_of_a_tower_are_with_its_activations(zero: int, tmp_path: Path) -> None:
    """They are outside the layers, and the last that a backward pass makes."""
    copy, big = copy_at(model(tmp_path), zero), 10**9
    tower, embedding = (total(copy, replace(NONE, **{peak: big})) for peak in ("tower", "embedding"))
    assert tower - embedding == groups_of(copy).outside - groups_of(copy).head


def test_sums_of_leaves_are_kept_until_the_end(tmp_path: Path) -> None:
    plain = model(tmp_path)
    summed = replace(plain, invariant=True, invariant_training=True)
    assert total(copy_at(summed, 2)) > total(copy_at(plain, 2)) + 2 * sum(groups_of(copy_at(plain, 2)).gradients)
