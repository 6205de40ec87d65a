"""Estimates against what runs really hold, for families with layers that carry a state, at shapes that nothing was
fitted to; and what trials say of such modules."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import rldsl
from click.testing import CliRunner
from rldsl.cli import main
from rldsl.memory.curve import left_out
from rldsl.models import recurrence
from rldsl.models.families import describe
from rldsl.models.skeleton import build
from rldsl.plan.model import Growth
from tests.families.tiny_configs import make, tiny_config
from tests.memory.estimates import compare_with_run
from tests.memory.plans import GRPO, Case, on
from tests.samples import thorough_between, thorough_unless
from tests.tiny import make_model, write_jsonl

SIZES: dict[str, dict[str, Any]] = {
    "qwen3_next": dict(num_attention_heads=8, num_key_value_heads=4, head_dim=32, linear_num_value_heads=8,
                       linear_num_key_heads=4, linear_key_head_dim=32, linear_value_head_dim=32,
                       moe_intermediate_size=128, layer_types=["linear_attention", "full_attention"]),
    "falcon_h1": dict(num_attention_heads=8, num_key_value_heads=4, head_dim=32, mamba_d_ssm=256, mamba_n_heads=4,
                      mamba_d_head=64, mamba_d_state=16, mamba_chunk_size=32),
    "jamba": dict(num_attention_heads=8, num_key_value_heads=4, mamba_d_state=16),
    "mamba2": dict(expand=2, num_heads=8, head_dim=64, state_size=16, chunk_size=32)}
FEW, MANY = Case("few rows", batch=4, prompt=40, response=14), Case("many rows", batch=12, prompt=70, response=9)
CASES = (*((family, shape) for family in SIZES for shape in (FEW, MANY)),
         ("mamba2", replace(FEW, name="half", dtype="bfloat16")),
         ("falcon_h1", replace(MANY, name="half", dtype="bfloat16")),
         ("qwen3_next", replace(MANY, name="adapters", adapters=", lora(r=8)")),
         ("falcon_h1", replace(MANY, name="pp=2", world=2, place=on(2, "pp=2 mbs=2", "dp=2", "pp=2"))))

SHOWN = {("qwen3_next", "few rows"), ("mamba2", "half")}


@pytest.mark.thorough
@pytest.mark.parametrize("family, case", thorough_unless(lambda family, case: (family, case.name) in SHOWN, CASES), ids=[f"{f}, {c.name}" for f, c in CASES])
def test_estimates_are_within_the_gate(family: str, case: Case, tmp_path: Path,
                                       monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    wide = 256 if case.batch < 10 else 192
    make(tmp_path / "m", family, **dict(hidden_size=wide, intermediate_size=2 * wide, num_hidden_layers=2,
                                        vocab_size=2048, max_position_embeddings=512) | SIZES[family]
         | (dict(num_heads=wide // 32) if family == "mamba2" else {}))
    compare_with_run(tmp_path, case)


STATES = ("bamba", "lfm2", "qwen3_5_text", "zaya")


@pytest.mark.parametrize("family", thorough_between(STATES))
def test_every_family_with_states_has_a_trial(family: str, tmp_path: Path) -> None:
    """Of each layer with a state, in both sizes of an element."""
    found = describe(make(tmp_path / "m", family), "causal_lm").recurrences
    assert found and {r.itemsize for r in found} == {2, 4}
    for r in found:
        assert r.state > 0 and r.step > 0 and r.backward.bytes(200) >= r.saved.bytes(200) * 0.5 > 0
        assert r.saved.bytes(2000) > r.saved.bytes(200)  # more tokens need more


def test_a_model_without_states_has_none(tmp_path: Path) -> None:
    assert describe(str(make_model(tmp_path / "m")), "causal_lm").recurrences == ()


@pytest.mark.thorough
def test_chunks_are_found(tmp_path: Path) -> None:
    """The delta rule works on 64 tokens at a time, Mamba's second version on as many as its config says, and its first
    on one."""
    chunks = {family: {r.saved.chunk for r in describe(make(tmp_path / family, family, **more), "causal_lm").recurrences}
              for family, more in (("qwen3_next", {}), ("mamba2", dict(chunk_size=32)), ("jamba", {}))}
    assert chunks == {"qwen3_next": {64}, "mamba2": {32}, "jamba": {0}}


def test_growth() -> None:
    growth = Growth(100, 10, chunk=4, single=7, per_chunk=1000, squared=1)
    assert growth.bytes(4) == 47 and growth.bytes(5) == 100 + 50 + 2000 + 4
    assert Growth(-50, 1).bytes(10) == 0


def test_a_trial_that_fails_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a module does not run without storage, the plan says what its estimate leaves out."""
    def unknown(*_: Any) -> Any:
        raise NotImplementedError("no kernel for this device")

    monkeypatch.setattr(recurrence, "_call", unknown)
    found = build(tiny_config("lfm2"), "m", None)
    assert found.recurrences == () and found.uncounted == "the states of layers.0.conv and 1 more"


@pytest.mark.parametrize("family, said", [("bloom", "padded rows"), ("nemotron_h", "padded rows")])
def test_what_is_known_to_be_left_out_is_said(family: str, said: str, tmp_path: Path,
                                              monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    make(tmp_path / "m", family)
    write_jsonl(tmp_path / "prompts.jsonl", [{"prompt": "7"}] * 8)
    (tmp_path / "run.rlf").write_text(GRPO.format(**{k: getattr(FEW, k) for k in Case.__dataclass_fields__}))
    plan = rldsl.compile(Path("run.rlf"))
    first, second = left_out(plan.record)
    assert first.startswith("not counted of `actor`: ") and said in first and said in second
    assert first in plan.memory.text()
    monkeypatch.setenv("COLUMNS", "500")
    shown = CliRunner().invoke(main, ["compile", "run.rlf"])
    assert shown.exit_code == 0 and "not counted of `ref`" in shown.output
