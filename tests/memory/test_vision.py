"""Estimates against what runs really hold, for models that read images: a tower that is trained, and one that is not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from examples.tiny import make_vision_model
from rldsl.api import compile
from rldsl.memory import curves
from rldsl.memory.curve import each_rank, left_out, peak, points
from rldsl.models import tower
from rldsl.models.families import describe
from rldsl.plan.codec import encode
from rldsl.plan.events import Generate, Infer, Train
from rldsl.plan.model import Plan
from rldsl.plan.projection import event_paths
from tests.images.models import MAKERS, make
from tests.memory.accounting import measured
from tests.memory.vision import vision_program
from tests.samples import thorough_between, thorough_unless
from tests.tiny import make_model

GATE = 0.10


@pytest.mark.thorough
@pytest.mark.parametrize("family, freeze, kernels", thorough_unless(
    lambda family, freeze, _: family == "gemma3" and not freeze, [
        ("gemma3", False, True), ("gemma3", True, True), ("qwen2_5_vl", False, True), ("qwen2_5_vl", True, True),
        ("qwen2_5_vl", False, False)]))
def test_estimates_are_within_the_gate(family: str, freeze: bool, kernels: bool, tmp_path: Path,
                                       monkeypatch: pytest.MonkeyPatch) -> None:
    """kernels: those for CPUs, which the estimate counts; without a compiler, torch's operators keep more."""
    monkeypatch.chdir(tmp_path)
    within_the_gate(compile(str(vision_program(tmp_path, family, freeze=freeze))), tmp_path, kernels)


@pytest.mark.parametrize("family, freeze", thorough_unless(lambda family, _: family == "gemma3", [
    ("gemma3", False), ("qwen2_5_vl", False), ("qwen2_5_vl", True)]))
def test_estimates_of_prompts_with_one_picture_and_text(family: str, freeze: bool, tmp_path: Path,
                                                        monkeypatch: pytest.MonkeyPatch) -> None:
    """The data says how many tokens its pictures have; without that all tokens of a prompt count as those of one. The
    peak of the model whose tower is frozen is that of its layers, either way."""
    monkeypatch.chdir(tmp_path)
    whole, limited = (compile(str(vision_program(tmp_path, family, images=1, freeze=freeze, limited=x)))
                      for x in (False, True))
    more, less = (peak(curve).bytes for x in (whole, limited) for _, curve in each_rank(curves(x, "cpu")))
    assert less == more if freeze else less < more
    within_the_gate(limited, tmp_path, True)


def within_the_gate(plan: Plan, tmp_path: Path, kernels: bool) -> None:
    """Peak and calls of a run of one rank."""
    calls = {e.id: e for e, _ in event_paths(plan) if isinstance(e, Generate | Infer | Train)}
    (found,) = measured(encode(plan), tmp_path / "out", 1, kernels=kernels)
    ((_, curve),) = each_rank(curves(plan, "cpu"))
    assert peak(curve).bytes == pytest.approx(found.peak, rel=GATE)
    for point in points(curve):
        if point.event in calls:
            said = (point.before, point.during, point.after)
            assert said == pytest.approx(found.events[point.event], rel=GATE), type(calls[point.event]).__name__
    assert left_out(plan) == ()


@pytest.mark.parametrize("family", thorough_between(MAKERS))
def test_every_tower_has_a_trial(family: str, tmp_path: Path) -> None:
    """In both sizes of an element; half precision keeps less."""
    whole, half = describe(str(make(tmp_path / "m", family)), "causal_lm").towers
    assert (whole.itemsize, half.itemsize) == (4, 2) and whole.operations == half.operations > 0
    assert whole.backward >= whole.saved > half.saved > half.forward > 0 < half.pixels
    assert (whole.gates > half.gates > 0) == (family == "qwen2_5_vl")  # of whose tower alone MLPs have gates


@pytest.mark.thorough
def test_more_layers_keep_more(tmp_path: Path) -> None:
    few, more = (describe(str(make_vision_model(tmp_path / str(n), tower=dict(depth=n))), "causal_lm").towers[0].saved
                 for n in (2, 4))
    assert few < more


def test_a_text_model_has_no_tower(tmp_path: Path) -> None:
    assert describe(str(make_model(tmp_path / "m")), "causal_lm").towers == ()


def test_a_trial_that_fails_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import AutoConfig

    from rldsl.models.skeleton import build

    def unknown(*_: Any) -> Any:
        raise NotImplementedError("no kernel for this device")

    monkeypatch.setattr(tower, "_vectors", unknown)
    found = build(AutoConfig.from_pretrained(make(tmp_path / "m", "llava")), "m", None)
    assert found.towers == () and found.uncounted == "its vision tower"
