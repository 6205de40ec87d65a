"""Layers that are not alike have parameters of their own, which a shard counts once each."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rldsl.plan.model import Layout, Model, Optimizer, ParamSpec, Sizes
from rldsl.simulate.work_counts import build_shard, orthogonalization

LAYERS = 6
PARAMS = (ParamSpec("embed.weight", (100, 32), "first"),
          ParamSpec("layers.{}.up.weight", (64, 32), "layer", LAYERS),
          ParamSpec("layers.{}.down.weight", (32, 64), "layer", LAYERS),
          ParamSpec("layers.{}.experts", (8, 64, 32), "layer", LAYERS, experts=8),
          ParamSpec("norm.weight", (32,), "last"))


def model(params: tuple[ParamSpec, ...]) -> Model:
    return Model("a", "causal_lm", "m", "float32", params, LAYERS, "c", optimizer=Optimizer(1e-3, kind="muon"),
                 sizes=Sizes(hidden=32, heads=4, kv_heads=4, head_dim=8, experts_per_token=2))


def numbered(spec: ParamSpec, layers: range = range(LAYERS)) -> tuple[ParamSpec, ...]:
    """A parameter of each of some layers."""
    if not spec.layers:
        return (spec,)
    return tuple(replace(spec, name=spec.name.replace("{}", str(i)), layers=0, layer=i) for i in layers)


@pytest.mark.parametrize("pp", [1, 2, 3])
def test_a_parameter_of_each_layer_counts_as_one_of_all(pp: int) -> None:
    folded, apart = model(PARAMS), model(tuple(p for spec in PARAMS for p in numbered(spec)))
    layout = Layout("L", "m", pp=pp)
    for stage in range(pp):
        one, other = build_shard(folded, layout, stage), build_shard(apart, layout, stage)
        assert (one.layer, one.experts, one.active, one.elements, one.read(3)) == pytest.approx(
            (other.layer, other.experts, other.active, other.elements, other.read(3)))
    assert 0 < orthogonalization(folded, LAYERS) == pytest.approx(orthogonalization(apart, LAYERS))


def test_what_half_of_the_layers_have_counts_half() -> None:
    """As dense layers before those with experts: of a stage, its own layers."""
    up, experts = PARAMS[1], PARAMS[3]
    some = model((*numbered(up, range(0, 3)), *numbered(experts, range(3, 6))))
    whole = build_shard(some, Layout("L", "m"), 0)
    assert whole.layer == (64 * 32 + 8 * 64 * 32) / 2 and whole.experts == 8 * 64 * 32 / 2
    assert whole.active == 64 * 32 / 2 + 2 * 64 * 32 / 2
    first, second = (build_shard(some, Layout("L", "m", pp=2), stage) for stage in range(2))
    assert (first.layer, first.experts, second.layer, second.experts) == (64 * 32, 0, 8 * 64 * 32, 8 * 64 * 32)
