"""Continuing sequences with their KV cache and without it: prompt tokens that run through the model, and wall time.

    python -m benchmarks.reuse [TURNS]

One process, one thread, one random model in float32. Each case generates responses, keeps their keys and values, and
continues them, or prefixes of them, twice in each turn: naive (the whole text is prefilled again) and with reuse
(`Shard.generate(prefix=...)`). Printed are the tokens prefilled, which are exact, the bound (one token for each
continuation: its last one, which nobody has run), and the ratio of the medians of the wall time, of the same run. The
lengths are drawn at random. Gate: prefilled tokens equal to the bound in every case.
"""

from __future__ import annotations

import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from rldsl.plan.events import Sampling
from rldsl.runtime.backend import GenerationOutput, PackedBatch, Prefix
from tests.backend_torch.shards import make_shard, pack, plan_model
from tests.tiny import make_model

MODEL: dict[str, Any] = dict(hidden_size=256, intermediate_size=704, num_hidden_layers=4, num_attention_heads=8,
                             head_dim=32, max_position_embeddings=1024)


@dataclass(frozen=True)
class Case:
    """prompts of up to `longest` tokens get responses of `length`; each, or each of `cuts` prefixes of it, is
    continued n times by `more` tokens."""

    name: str
    prompts: int
    longest: int
    length: int
    cuts: int
    n: int
    more: int


CASES = (
    Case("continue once", 13, 61, 187, 0, 1, 23),
    Case("branch in 3", 7, 97, 141, 0, 3, 19),
    Case("5 prefixes, n=3", 3, 45, 173, 5, 3, 17),
    Case("short responses", 21, 150, 11, 0, 1, 9),
)


def texts_of(found: GenerationOutput) -> list[list[int]]:
    sizes = (found.batch.prompt_lens + found.batch.response_lens).tolist()
    return [x.tolist() for x in found.batch.tokens.split(sizes)]


def sampling(tokens: int) -> Sampling:
    return Sampling(max_new_tokens=tokens, min_new_tokens=tokens)


def given(texts: list[list[int]]) -> PackedBatch:
    return pack([(t, []) for t in texts])


def timed(call: Callable[[], GenerationOutput]) -> tuple[float, GenerationOutput]:
    start = time.perf_counter()
    made = call()
    return time.perf_counter() - start, made


def measure(shard: Any, case: Case, turns: int) -> bool:
    draw = random.Random(case.name)
    prompts = [[draw.randrange(2, 30) for _ in range(draw.randint(2, case.longest))] for _ in range(case.prompts)]
    how = dict(seed=1, step=0, max_num_seqs=0)
    first = shard.generate(given(prompts), sampling(case.length), keep_cache=True, **how)
    begun = texts_of(first)
    parents = [(i, len(t)) for i, t in enumerate(begun)]
    if case.cuts:  # evenly over the response
        parents = [(i, len(prompts[i]) + case.length * k // case.cuts) for i in range(len(begun))
                   for k in range(case.cuts)]
    rows = [x for x in parents for _ in range(case.n)]
    texts, prefix = [begun[i][:at] for i, at in rows], Prefix(first.cache, torch.tensor([i for i, _ in rows]))
    ways = {"naive": lambda: shard.generate(given(texts), sampling(case.more), **how),
            "reuse": lambda: shard.generate(given(texts), sampling(case.more), prefix=prefix, **how)}
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    made: dict[str, GenerationOutput] = {}
    for _ in range(turns):
        for way, call in ways.items():
            spent, made[way] = timed(call)
            seconds[way].append(spent)
    naive, reuse = (statistics.median(seconds[way]) for way in ways)
    same = sum(a == b for a, b in zip(*(texts_of(made[w]) for w in ways), strict=True))
    print(f"{case.name:18} prefilled {made['naive'].num_prefilled:6,} naive {made['reuse'].num_prefilled:4,} reuse "
          f"{len(texts):4,} bound   time x{reuse / naive:4.2f}   {same} of {len(texts)} equal", flush=True)
    return made["reuse"].num_prefilled == len(texts)


def main() -> None:
    turns = int(sys.argv[1]) if len(sys.argv) > 1 else 5
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        shard = make_shard(plan_model(str(make_model(Path(folder) / "m", "qwen3", **MODEL))), 0)
        held = [measure(shard, case, turns) for case in CASES]
    print("gate: held" if all(held) else "gate: FAILED")
    sys.exit(not all(held))


if __name__ == "__main__":
    main()
