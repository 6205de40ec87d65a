"""Adapters of a model that vLLM samples from: it takes the weights of the base with the adapters merged."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from rldsl.models.families import describe, sizes_of
from rldsl.plan.events import Sampling
from rldsl.plan.model import Lora
from tests.backend_torch.shards import layout_of, pack, shard_of
from tests.lora.adapted import adapted, make_adapter
from tests.tiny import make_model
from tests.vllm.engines import BOTH, use

PROMPTS = pack([(p, []) for p in ([5, 6, 7, 8], [9], [20] * 9)])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.mktemp("adapters")
    make_model(base / "model", head_dim=32, num_hidden_layers=2)
    make_adapter(base / "adapter", str(base / "model"), Lora(4, 8.0, ("q_proj", "v_proj", "down_proj")))
    return base


def shards(folder: Path, dtype: str = "float32", cache: Any = None) -> tuple[Any, Any]:
    """With an engine, and of the torch backend."""
    path = str(folder / "model")
    model = adapted(path, Lora(4, 8.0, ("q_proj", "v_proj", "down_proj"), path=str(folder / "adapter")), dtype=dtype)
    model = replace(model, sizes=sizes_of(describe(path, "causal_lm")))
    found = [shard_of(model, layout_of(**where), 0, weight_cache=cache) for where in ({"backend": "vllm"}, {})]
    assert found[0] and found[1]
    return found[0][0], found[1][0]


@pytest.fixture(scope="module", params=BOTH)
def both(request: pytest.FixtureRequest, folder: Path) -> Iterator[tuple[Any, Any]]:
    with pytest.MonkeyPatch.context() as patch:
        use(patch, request.param)
        cache: dict[Any, torch.Tensor] = {}
        found = shards(folder, cache=cache)
        yield found
        found[0].close()


def difference(engine: Any, plain: Any, step: int = 0) -> float:
    """The largest one of log-probs."""
    found = engine.generate(PROMPTS, Sampling(max_new_tokens=8), seed=1, step=step, max_num_seqs=0, max_prompt_len=9)
    assert len(found.logprobs) > 8
    return float((found.logprobs - plain.infer([found.batch], "logprobs", 1.0)).abs().max())


@pytest.mark.thorough
def test_log_probs_are_those_of_the_adapted_model(both: tuple[Any, Any]) -> None:
    """From the adapter's files, and whenever the factors have changed. The base is the torch backend's own, and stays
    as it is."""
    engine, plain = both
    assert set(engine.state_dict()) == set(plain.state_dict()) and all("lora_" in n for n in engine.state_dict())
    base = {name: x.clone() for name, x in engine.base.items()}
    assert all(x.data_ptr() == plain.stage.base[name].data_ptr() for name, x in engine.base.items())
    assert difference(engine, plain) < 3e-5
    for step in range(3):
        for name, mine in engine.state_dict().items():
            mine.add_(0.2 * torch.randn(mine.shape, generator=torch.Generator().manual_seed(step)))
            if step != 1:
                plain.state_dict()[name].copy_(mine)
        found = difference(engine, plain, step)
        assert found < 5e-5 if step != 1 else found > 1e-2, "other factors are other log-probs"
    assert all(torch.equal(engine.base[name], x) for name, x in base.items())


def test_memory_is_given_back_and_comes_again(both: tuple[Any, Any]) -> None:
    engine, plain = both
    kept = {name: x.clone() for name, x in plain.state_dict().items()}
    engine.free()
    assert not engine.tensors and not any(x.any() for x in engine.shared.tensors.values())
    engine.allocate()
    for name, x in engine.state_dict().items():
        x.copy_(kept[name])
    assert difference(engine, plain) < 5e-5
    engine.offload("parameters")
    engine.onload("parameters")()
    assert difference(engine, plain) < 5e-5


def test_bfloat16_merges_in_float32_and_rounds_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, "standin")
    engine, plain = shards(folder, "bfloat16")
    assert difference(engine, plain) < 0.1
    factors = engine.state_dict()
    for name, merged in engine.shared.tensors.items():
        module = name.removesuffix(".weight")
        expected = engine.base[name].double()
        if f"{module}.lora_A.weight" in factors:
            a, b = (factors[f"{module}.lora_{x}.weight"].double() for x in "AB")
            expected = expected + 2 * b @ a
            assert not torch.equal(merged, engine.base[name])
        assert merged.dtype == torch.bfloat16 and ((merged.double() - expected).abs() <= expected.abs() * 2**-8).all()
    engine.close()
