"""Data declarations on their way into a plan: what is written, what is refused, what a plan may not say."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from rldsl import api
from rldsl.diag import Failure
from rldsl.plan.codec import decode, encode
from rldsl.plan.model import Data
from rldsl.verify import verify
from tests.plan.sample import grpo

PAGE = """data d = {source}
model m = causal_lm("m")
flow f(steps=1) {{
  row = d.next()
  gen = m.generate(row)
  metric n = mean(len(gen))
}}
"""


def codes(source: str) -> list[tuple[str, str]]:
    return [(d.code, d.help) for d in api.check(PAGE.format(source=source), "page.rlf")]


@pytest.mark.parametrize("source", ['jsonl("a", batch=4)', 'parquet("a", batch=4)', 'hf("a", batch=4 prompts)',
                                    'hf("a", batch=4, over_long=drop)', 'parquet("a", batch=4, over_long="error")',
                                    'jsonl("a", batch=4, over_long=truncate, prompt="q")'])
def test_declarations(source: str) -> None:
    assert codes(source) == []


@pytest.mark.parametrize("source, code, words", [
    ('parqet("a", batch=4)', "RL0101", "parquet"), ('hf("a")', "RL0215", "batch"),
    ('parquet(batch=4)', "RL0215", 'parquet("path")'), ('parquet(3, batch=4)', "RL0205", "double quotes"),
    ('hf("a", batch=4, over_lon=drop)', "RL0107", "over_long"), ('hf("a", batch=4, over_long=3)', "RL0205", ""),
    ('hf("a", batch=4, over_long="cut")', "RL0205", "truncate, drop, error"),
    ('parquet("a", batch=4 pairs)', "RL0218", "prompts"), ('jsonl("a", batch=4, split="train")', "RL0107", "only `hf`"),
])
def test_declarations_that_are_refused(source: str, code: str, words: str) -> None:
    (found, help_), *others = codes(source)
    assert found == code and words in help_ and not others


def test_a_plan_holds_them() -> None:
    data = Data("tasks", "parquet", "t", "answers", 8, (("prompt", "q"),), "models/a", over_long="drop")
    made = replace(grpo(), data=(data,))
    assert decode(encode(made), "x").data == (data,)
    assert b"over_long" not in encode(replace(made, data=(replace(data, over_long="truncate"),)))


@pytest.mark.parametrize("change, code", [
    (dict(format="csv"), "RL0606"), (dict(over_long="cut"), "RL0606"), (dict(row_format="images"), "RL0606"),
    (dict(batch=0), "RL0612"), (dict(max_prompt_tokens=-1), "RL0612"), (dict(max_answer_tokens=-1), "RL0612"),
    (dict(columns=(("prompt", "q"), ("prompt", "r"))), "RL0612"), (dict(columns=(("chosen", "q"),)), "RL0612"),
])
def test_a_plan_that_says_otherwise_is_refused(change: dict[str, Any], code: str) -> None:
    good = grpo()
    verify(decode(encode(good), "x"))
    with pytest.raises(Failure) as caught:
        verify(decode(encode(replace(good, data=(replace(good.data[0], **change), *good.data[1:]))), "x"))
    assert code in {d.code for d in caught.value.diagnostics}
