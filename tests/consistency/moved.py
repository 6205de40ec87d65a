"""How many draws rounding moves: the same prompts, parameters and random numbers under several placements.

    python -m tests.consistency.moved [--rows 512] [--tokens 64]

Each row is compared with that of one rank up to its first token that differs, which is a moved draw: what follows has
another context. Prints moved draws per million tokens, with `invariant=true` and without, in float32 and in bfloat16.
"""

from __future__ import annotations

import argparse
import tempfile
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.match import prompts
from rldsl.plan.events import Sampling
from tests.backend_torch.shards import layout_of, plan_model, shard_of
from tests.tiny import make_model
from tests.world import run_world

PLACEMENTS: tuple[dict[str, int], ...] = ({}, {"tp": 2}, {"pp": 2})
WIDTH = dict(hidden_size=128, intermediate_size=256, num_attention_heads=4, num_key_value_heads=2, num_hidden_layers=2)


class Moved(NamedTuple):
    """Of all placements besides one rank."""

    draws: int   # that are moved
    tokens: int  # that were compared

    @property
    def per_million(self) -> float:
        return 1e6 * self.draws / self.tokens


def _generate(rank: int, path: str, invariant: bool, rows: int, tokens: int, dtype: str) -> list[Any]:
    """[placement] -> [rows, tokens] on ranks that have it."""
    found: list[Any] = []  # arrays: a tensor would need this process to be there when it is read
    for degrees in PLACEMENTS:
        made = shard_of(replace(plan_model(path, dtype=dtype), invariant=invariant), layout_of(**degrees), rank)
        if made is None:
            found.append(None)
            continue
        batch = made[0].generate(prompts(46, rows, 12, torch.device("cpu")),
                                 Sampling(max_new_tokens=tokens, min_new_tokens=tokens), seed=3, step=0,
                                 max_num_seqs=256).batch
        lens = batch.prompt_lens + batch.response_lens
        first = lens.cumsum(0) - tokens
        found.append(batch.tokens[first[:, None] + torch.arange(tokens)].numpy())
    return found


def count(path: str, invariant: bool, rows: int, tokens: int, dtype: str = "float32") -> Moved:
    arrays = run_world(2, _generate, path, invariant, rows, tokens, dtype, timeout=1800.0)[0]
    alone, *others = map(torch.from_numpy, arrays)
    draws = compared = 0
    for other in others:
        same = (other == alone).long().cumprod(1).sum(1)  # tokens before the first that differs
        draws += int((same < tokens).sum())
        compared += int((same + 1).clamp(max=tokens).sum())
    return Moved(draws, compared)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=64)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        model = str(make_model(Path(place) / "m", **WIDTH))
        for dtype, on in product(("float32", "bfloat16"), (False, True)):
            moved = count(model, on, given.rows, given.tokens, dtype)
            print(f"{dtype:<9} invariant={str(on).lower():<6} {moved.draws} of {moved.tokens} draws moved: "
                  f"{moved.per_million:.1f} in a million", flush=True)
