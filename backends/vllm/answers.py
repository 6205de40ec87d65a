"""What an engine has sampled, checked first: by a wrong count, rows would get the tokens of others.

Errors: RL0801.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import accumulate
from typing import NamedTuple

from rldsl.backends.vllm.engine import Arrays
from rldsl.backends.vllm.process import EngineProcess


class Response(NamedTuple):
    """What was sampled for one row."""

    tokens: list[int]
    logprobs: list[float]
    finished: bool  # by an end-of-sequence token or a stop string


def responses(engine: EngineProcess, verb: str, arrays: Arrays, most: Mapping[int, int]) -> dict[int, Response]:
    """Row -> its response, of the rows that an answer names. verb: of the request. most: rows that were asked for ->
    tokens that each may have."""
    rows, lens = arrays["rows"].tolist(), arrays["lens"].tolist()
    sizes = {name: len(arrays[name]) for name in ("tokens", "logprobs", "finished")}
    if len({*rows}) < len(rows) or not set(rows) <= set(most):
        raise engine.failed(verb, f"it answered for the rows {_shown(rows)}, but {_shown(sorted(most))} were asked for")
    if (len(lens), sizes["finished"]) != (len(rows), len(rows)):
        raise engine.failed(verb, f"it answered with {len(lens)} lengths and {sizes['finished']} flags for {len(rows)} "
                                  "rows")
    if not sizes["tokens"] == sizes["logprobs"] == sum(lens):
        raise engine.failed(verb, f"it answered with {sizes['tokens']} tokens and {sizes['logprobs']} log-probs, but "
                                  f"its responses have {sum(lens)} tokens")
    if wrong := [(row, n) for row, n in zip(rows, lens, strict=True) if not 0 < n <= most[row]]:
        row, count = wrong[0]
        raise engine.failed(verb, f"it answered with {count} tokens for row {row}, which may have 1 to {most[row]}")
    tokens, logprobs = arrays["tokens"].tolist(), arrays["logprobs"].tolist()
    return {row: Response(tokens[end - n:end], logprobs[end - n:end], bool(finished))
            for row, n, end, finished in zip(rows, lens, accumulate(lens), arrays["finished"], strict=True)}


def _shown(rows: list[int]) -> str:
    return ", ".join(map(str, rows[:8])) + (", ..." if len(rows) > 8 else "") if rows else "(none)"
