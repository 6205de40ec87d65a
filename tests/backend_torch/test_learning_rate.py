"""Learning-rate schedules, against those of transformers."""

from __future__ import annotations

import pytest
import torch
from rldsl.backends.torch.train.optimizer import learning_rate
from transformers import get_cosine_schedule_with_warmup, get_linear_schedule_with_warmup

from rldsl.plan.model import Optimizer

THEIRS = {"linear": get_linear_schedule_with_warmup, "cosine": get_cosine_schedule_with_warmup}


def theirs(name: str, warmup: int, updates: int) -> list[float]:
    """The rate of each update, and of the one after the last."""
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1e-3)
    schedule = THEIRS[name](optimizer, warmup, updates)
    rates = []
    for _ in range(updates + 1):
        rates.append(schedule.get_last_lr()[0])
        optimizer.step()
        schedule.step()
    return rates


@pytest.mark.parametrize("name", THEIRS)
@pytest.mark.parametrize(("warmup", "updates"), [(0, 1), (0, 2), (0, 10), (3, 10), (9, 10), (1, 100)])
def test_the_decay_is_that_of_transformers(name: str, warmup: int, updates: int) -> None:
    options = Optimizer(lr=1e-3, schedule=name, warmup=warmup)  # type: ignore[arg-type]  # a word of the table
    ours = [learning_rate(options, i, updates) for i in range(updates + 1)]
    assert ours[warmup:] == pytest.approx(theirs(name, warmup, updates)[warmup:], abs=1e-15)
    assert ours[:warmup] == pytest.approx([1e-3 * (i + 1) / warmup for i in range(warmup)])


@pytest.mark.parametrize("name", THEIRS)
@pytest.mark.parametrize("warmup", [0.0, 0.1, 5.0])
@pytest.mark.parametrize("updates", [1, 2, 6, 1000])
def test_every_planned_update_has_a_rate(name: str, warmup: float, updates: int) -> None:
    options = Optimizer(lr=1.0, schedule=name, warmup=warmup)  # type: ignore[arg-type]  # a word of the table
    rates = [learning_rate(options, i, updates) for i in range(updates)]
    assert min(rates) > 0 and max(rates) <= 1


@pytest.mark.parametrize("name", THEIRS)
def test_the_schedule_ends_at_the_least_rate_after_the_last_update(name: str) -> None:
    options = Optimizer(lr=2.0, schedule=name, min_lr_ratio=0.25)  # type: ignore[arg-type]  # a word of the table
    assert learning_rate(options, 10, 10) == pytest.approx(0.5)
    assert learning_rate(options, 9, 10) > 0.5
