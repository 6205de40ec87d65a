"""A cap of logits: who has one, and that memory with it is what the estimate says, against runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from rldsl.models.families import describe, sizes_of
from tests.memory.estimates import compare_with_run
from tests.memory.plans import GRPO, ONE, Case
from tests.tiny import make_model

SIZES = dict(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=4,
             head_dim=16, max_position_embeddings=128)


@pytest.mark.parametrize("family, cap, capped", [
    ("gemma2", 30.0, True), ("gemma2", None, False), ("gemma2", 0.0, False), ("llama", None, False)])
def test_who_has_one(family: str, cap: float | None, capped: bool, tmp_path: Path) -> None:
    sizes = SIZES if family == "llama" else SIZES | {"final_logit_softcapping": cap}
    make_model(tmp_path / "m", family=family, vocab_size=64, **sizes)
    assert sizes_of(describe(str(tmp_path / "m"), "causal_lm")).capped_logits == capped


def test_a_run_with_a_large_vocabulary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its tables of logits are most of what a call holds. Without a cap there are none, or all logits are kept."""
    monkeypatch.chdir(tmp_path)
    make_model(tmp_path / "m", family="gemma2", vocab_size=1 << 15, **SIZES)
    compare_with_run(tmp_path, Case("", program=GRPO, batch=24, prompt=8, response=16,
                                    place=ONE + "mbs=24\nplace actor.generate on mesh(0:1) mbs=4"))
