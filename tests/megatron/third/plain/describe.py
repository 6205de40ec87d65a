"""What the backend `plain` can express, and what its calls cost: inference and training of causal language models, rows divided over dp."""

from __future__ import annotations

from rldsl.backends.plain.costs import PlainMemory, PlainOrder, PlainTime
from rldsl.plan.backends import Description, Facts
from rldsl.plan.model import Layout


def problem(facts: Facts, layout: Layout) -> str:
    return "" if facts.head_name == "causal_lm" else f"the head of a {facts.head_name}"


DESCRIPTION = Description(calls=("infer", "train"), divisions=("dp",), zero=0, adapters=False,
                          problem=problem, memory=PlainMemory(), time=PlainTime(), issue_order=PlainOrder())
