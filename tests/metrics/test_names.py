"""The fields of metrics.jsonl have one table, and a program cannot write them."""

from __future__ import annotations

from pathlib import Path

import pytest

from rldsl.api import check
from rldsl.plan.metrics_file import BUILT_IN
from rldsl.runtime.metrics.json_lines import truncate
from rldsl.runtime.metrics.names import computed

PROGRAM = """data d = jsonl("d.jsonl", batch=4)
model {model} = causal_lm("m") train adamw(lr=1e-4)
loss fit(logprobs: token) {{
  metric {metric} = mean(logprobs)
  return -mean(logprobs)
}}
flow f(steps=2) {{
  p = d.next()
  gen = {model}.generate(p, max_new_tokens=4)
  {model}.train(gen, loss=fit())
  metric {plain} = mean(len(gen))
}}
"""


def codes(model: str = "actor", metric: str = "known", plain: str = "size") -> list[str]:
    return [d.code for d in check(PROGRAM.format(model=model, metric=metric, plain=plain))]


@pytest.mark.parametrize("name", sorted(name for name in BUILT_IN if "/" not in name))
def test_a_metric_of_the_flow_cannot_have_a_built_in_name(name: str) -> None:
    assert codes(plain=name) == ["RL0111"]


@pytest.mark.parametrize("name", sorted(name for name in BUILT_IN if "/" in name))
def test_nor_can_a_metric_of_a_loss(name: str) -> None:
    model, metric = name.split("/")
    assert codes(model, metric) == ["RL0111"]


@pytest.mark.parametrize("given", [{}, {"plain": "steps"}, {"plain": "seconds_each"}, {"model": "length"}])
def test_other_names_are_free(given: dict[str, str]) -> None:
    assert codes(**given) == []


def test_only_built_in_fields_are_left_out_of_what_a_program_computes() -> None:
    assert computed([*BUILT_IN, "seconds_each", "time/loss", "reward"]) == ["seconds_each", "time/loss", "reward"]


def test_damaged_lines_are_counted_when_a_run_resumes(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    file.write_text('{"step": 1}\nnonsense\n{"step": 2}\n{"stap": 3}\n{"step": 3}\n{"step": 4, "x')
    assert truncate(file, 3) == [2, 4]
    assert file.read_text() == '{"step": 1}\n{"step": 2}\n'
    assert truncate(file, 3) == []
