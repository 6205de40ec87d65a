"""What the order changes in which environments answer: draws that rounding moves, counted.

    python -m benchmarks.arrivals [ROUNDS]

One process, one random model in float32. Each round has 48 conversations of up to 4 turns of 24 tokens, once with
answers at once and a slot for each, and then in other orders of arrival, with fewer slots, and with slots that are
given away. Two conversations are compared token by token up to the first one that differs: one moved draw. Printed are
the draws compared, those moved, and the conversations that differ; without `invariant=true` and with it. Gate: with it
none.
"""

from __future__ import annotations

import sys
import tempfile
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from rldsl.plan.events import Sampling
from rldsl.plan.payloads import Conversation, Waiting
from tests.backend_torch.shards import make_shard, plan_model
from tests.environments.scripted import Scripted
from tests.tiny import make_model
from tests.world import run_world

CONVERSATIONS = 48
SAMPLING = Sampling(max_new_tokens=24)
LIMITS = Conversation(("Guess",), max_turns=4, max_tokens=256, turn_timeout=60.0)
OTHERS: tuple[tuple[int, int, Waiting], ...] = ((1, 0, "keep"), (2, 7, "keep"), (3, 7, "recompute"))


class Rows(Scripted):
    """As the runtime begins conversations: by row alone."""

    def begin(self, row: int) -> None:  # type: ignore[override]
        super().begin(row, {"number": row}, "12 + 3 " * (row % 5 + 1), seed=row)


def count(rank: int, path: str, rounds: int) -> dict[bool, Counter[str]]:
    """With `invariant` or without -> what was counted."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(path)
    found: dict[bool, Counter[str]] = {}
    for invariant in (False, True):
        shard = make_shard(replace(plan_model(path), invariant=invariant), rank)
        found[invariant] = Counter()
        for number in range(rounds if not invariant else max(rounds // 4, 1)):
            first = conversations(shard, Rows(tokenizer), number, 0, "keep")
            for delays, slots, waiting in OTHERS:
                other = conversations(shard, Rows(tokenizer, 10 * number + delays), number, slots, waiting)
                for mine, theirs in zip(first, other, strict=True):
                    same = next((i for i, (a, b) in enumerate(zip(mine, theirs)) if a != b),
                                min(len(mine), len(theirs)))
                    differs = mine != theirs
                    found[invariant] += Counter(draws=sum(own for _, own in mine[:same]) + differs, moved=differs,
                                                conversations=1)
    return found


def conversations(shard: Any, talk: Any, step: int, slots: int, waiting: Waiting) -> list[list[tuple[int, bool]]]:
    """The tokens of each conversation, and which of them were drawn."""
    out = shard.converse(torch.arange(CONVERSATIONS), SAMPLING, LIMITS, talk, seed=5, step=step, max_num_seqs=slots,
                         waiting=waiting)
    sizes = (out.batch.prompt_lens + out.batch.response_lens).tolist()
    return [list(zip(tokens.tolist(), own.tolist(), strict=True))
            for tokens, own in zip(out.batch.tokens.split(sizes), out.batch.own.split(sizes), strict=True)]


def main() -> None:
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 16
    with tempfile.TemporaryDirectory() as place:
        path = str(make_model(Path(place) / "model", hidden_size=128, intermediate_size=256, head_dim=32,
                              max_position_embeddings=512, scale=0.05))
        (found,) = run_world(1, count, path, rounds, timeout=3000.0)
    for invariant, counts in found.items():
        print(f"{'with invariant=true' if invariant else 'without':<20}{counts['draws']:>9,} draws  "
              f"{counts['moved']:>4} moved  of {counts['conversations']:,} conversations", flush=True)
    sys.exit(found[True]["moved"] > 0)


if __name__ == "__main__":
    main()
