"""What operator traces of decode steps hold on CPUs, against the estimate: never more, and hardly less."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from rldsl.memory import curves, generate_memory
from rldsl.models.families import describe, sizes_of
from rldsl.plan.codec import encode
from tests.families.tiny_configs import make
from tests.memory import accounting
from tests.memory.plans import GRPO, Case, plan_of
from tests.samples import thorough_unless
from tests.world import run_world

FREE = GRPO.replace("min_new_tokens={response}, ", "")  # any token may end a response
SMALL = (("vocab_size", 512),)
SHORT: dict[str, Any] = dict(batch=16, prompt=16, response=20)
CASES = (Case("llama", **SHORT), Case("one kernel samples", program=FREE, **SHORT),
         Case("qwen3, small vocabulary", family="qwen3", sizes=SMALL, **SHORT),
         Case("greedy", sampling="greedy=true", **SHORT), Case("top_p", sampling="top_p=0.9", **SHORT),
         Case("gpt2", family="gpt2", **SHORT), Case("gpt2, small vocabulary", family="gpt2", sizes=SMALL, **SHORT))
SHOWN = ("one kernel samples", "qwen3, small vocabulary", "gpt2, small vocabulary")


def traced(_: int, data: bytes, out: str, place: str) -> list[int]:
    """The bytes of each trace of a run."""
    from rldsl.backends.torch.generate import captured_step

    found: list[int] = []
    plain = captured_step.trace

    def counted(function: Any) -> Any:
        outcome, made = plain(function)
        found.append(made.bytes_made)
        return outcome, made

    captured_step.trace = counted
    accounting._rank(0, data, out, place, True)
    return found


@pytest.mark.thorough
@pytest.mark.parametrize("name", thorough_unless(SHOWN.__contains__, [c.name for c in CASES]))
def test_traces_hold_what_the_estimate_says(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    plan = plan_of(next(c for c in CASES if c.name == name), tmp_path)
    said: list[int] = []
    plain = generate_memory._trace_bytes

    def noted(*given: Any) -> int:
        said.append(plain(*given))
        return said[-1]

    monkeypatch.setattr(generate_memory, "_trace_bytes", noted)
    curves(plan, "cpu")
    (real,) = run_world(1, traced, encode(plan), str(tmp_path / "out"), os.getcwd(), timeout=240)
    assert real
    assert max(real) <= said[0] <= 1.1 * max(real)


@pytest.mark.parametrize("family, halves", [
    ("llama", True), ("gemma2", True), ("gpt2", False), ("cohere", False), ("glm", False), ("stablelm", False)])
def test_whose_rotary_embeddings_are_those_of_the_kernel(family: str, halves: bool, tmp_path: Path) -> None:
    """Cohere's and GLM's rotate pairs of neighbors, StableLM's rotate a part of each head."""
    assert sizes_of(describe(make(tmp_path / "m", family), "causal_lm")).rotated_halves == halves
