"""What invariance costs: CPU time of decoding and of training, plain and invariant in turns.

    python -m benchmarks.invariant [--layers N] [--rounds N] [--tokens N]

A dense model at the shapes of the other benchmarks (hidden size 512 by default) decodes, and is trained on what it
decoded, once plain, once with `invariant=true` and once with `invariant=training`, round by round on one core. The
last is trained twice: with all rows in one leaf, and in eight leaves that are computed together, as a run does. The
price is the median over the rounds of the ratio to the plain time in the same round. Also: the bytes that a sum over
tp in one order moves, over those of a ring all-reduce. Goals: at most 1.5 for each price, at most 2 for bytes.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.match import prompts
from rldsl.plan.events import Sampling
from rldsl.plan.model import Optimizer
from rldsl.runtime.backend import PackedBatch, Shard
from rldsl.sharding.gradient_leaves import JOINED_TOKENS, LEAVES, PASS_TOKENS, leaves_together

GOAL, BYTES_GOAL = 1.5, 2.0
MODES = {"plain": (False, False), "true": (True, False), "training": (True, True)}
TRAINED = {"plain": 0, "true": 0, "training": 1, "8 leaves": LEAVES}  # leaves with rows; 0: no order of gradients


def decode(shard: Shard, sequences: int, tokens: int) -> Any:
    """The batch that was generated."""
    return shard.generate(prompts(46, sequences, 24, torch.device("cpu")),
                          Sampling(max_new_tokens=tokens, min_new_tokens=tokens), seed=1, step=0, max_num_seqs=32)


def train(shard: Shard, batch: Any, leaves: int) -> None:
    """One update on all rows, in a micro-batch for each leaf."""
    parts, total = split(batch, max(leaves, 1)), int(batch.response_lens.sum())
    sizes = [len(part.tokens) for part in parts]
    joined = leaves_together([(i,) for i in range(leaves)], 1, sizes, PASS_TOKENS, JOINED_TOKENS) if leaves > 1 else 1
    shard.train([(part,) for part in parts], [("logprobs",)], 1.0,
                lambda _, fresh: -fresh[0]["logprobs"].sum() / total,
                leaves=[1] * leaves + [0] * (LEAVES - leaves) if leaves else (), joined=joined)


def split(batch: PackedBatch, parts: int) -> list[PackedBatch]:
    """As many rows in each."""
    lengths = batch.prompt_lens + batch.response_lens
    rows = torch.arange(len(lengths)).chunk(parts)
    return [PackedBatch(batch.rows[at], batch.prompt_lens[at], batch.response_lens[at], tokens)
            for at, tokens in zip(rows, batch.tokens.split([int(lengths[at].sum()) for at in rows]), strict=True)]


def wire_bytes(ranks: int, size: int) -> tuple[float, float]:
    """Bytes that a rank sends for a sum over `ranks` of `size` bytes: in one order, and in a ring.

    Parts are exchanged (all-to-all), added locally and gathered, as `collectives.tree_all_reduce` does; over two ranks
    whole tensors are gathered."""
    parts = 2 * (ranks - 1) / ranks * size
    return ((ranks - 1) * size if ranks == 2 else parts), parts


def main(words: list[str]) -> int:
    """The number of goals that are missed."""
    from rldsl.models.families import describe, sizes_of
    from tests.backend_torch.shards import make_shard, plan_model
    from tests.tiny import make_model

    parser = argparse.ArgumentParser()
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--dtype", default="float32")
    given = parser.parse_args(words)
    torch.set_num_threads(1)
    spent: dict[tuple[str, str], list[float]] = {}
    with tempfile.TemporaryDirectory() as place:
        path = str(make_model(Path(place) / "m", family="qwen3", hidden_size=given.hidden, head_dim=64,
                              intermediate_size=3 * given.hidden, num_hidden_layers=given.layers,
                              num_attention_heads=given.hidden // 64, num_key_value_heads=given.hidden // 128,
                              max_position_embeddings=512, tie_word_embeddings=True))
        model = replace(plan_model(path, optimizer=Optimizer(lr=1e-5), dtype=given.dtype),
                        sizes=sizes_of(describe(path, "causal_lm")))
        shards = {mode: make_shard(replace(model, invariant=on, invariant_training=ordered), 0)
                  for mode, (on, ordered) in MODES.items()}
        for number in range(given.rounds + 1):  # the first also records
            for mode, shard in shards.items():
                begin = time.process_time()
                batch = decode(shard, 32, given.tokens).batch
                if number:
                    spent.setdefault((mode, "decode"), []).append(time.process_time() - begin)
                for name in (mode, "8 leaves")[: 1 + (mode == "training")]:
                    begin = time.process_time()
                    train(shard, batch, TRAINED[name])
                    if number:
                        spent.setdefault((name, "train"), []).append(time.process_time() - begin)
    missed = 0
    for work, modes in (("decode", MODES), ("train", TRAINED)):
        plain = spent["plain", work]
        for mode in [mode for mode in modes if mode != "plain"]:
            price = statistics.median(a / b for a, b in zip(spent[mode, work], plain, strict=True))
            missed += price > GOAL
            print(f"{work:<7}{mode:<9} {statistics.median(spent[mode, work]):7.3f} s CPU, plain "
                  f"{statistics.median(plain):7.3f} s: {price:5.2f}{'' if price <= GOAL else '  MISSED'}", flush=True)
    for ranks in (2, 4, 8):
        ours, ring = wire_bytes(ranks, 1 << 20)
        missed += ours > BYTES_GOAL * ring
        print(f"bytes  tp={ranks}     {ours / ring:5.2f} of a ring all-reduce", flush=True)
    print(f"goals: price {GOAL:g}, bytes {BYTES_GOAL:g}; {missed} missed", flush=True)
    return missed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]) > 0)
