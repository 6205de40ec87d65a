"""What the order changes in which environments answer: draws that rounding moves, counted.

    python -m benchmarks.arrivals [ROUNDS]

One process, one random model, in float32 and in bfloat16. Each round has 48 conversations of up to 4 turns of 24
tokens, once with answers at once and a slot for each, and then in other orders of arrival, with fewer slots, and with
slots that are given away. Two conversations are compared token by token up to the first one that differs: one moved
draw. Printed are the draws compared, the log-probs that differ among them and by how much at most, the draws that
moved, and the conversations; without `invariant=true` and with it. Gate: with it nothing differs.
"""

from __future__ import annotations

import sys
import tempfile
from dataclasses import dataclass, replace
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
CASES = (("float32", "float32", False), ("bfloat16", "bfloat16", False), ("float32, invariant=true", "float32", True))
Said = list[tuple[int, bool, float]]  # of each token: its id, whether the model drew it, its log-prob
OTHERS: tuple[tuple[int, int, Waiting], ...] = ((1, 0, "keep"), (2, 7, "keep"), (3, 7, "recompute"))


class Rows(Scripted):
    """As the runtime begins conversations: by row alone."""

    def begin(self, row: int) -> None:  # type: ignore[override]
        super().begin(row, {"number": row}, "12 + 3 " * (row % 5 + 1), seed=row)


@dataclass
class Count:
    """What was compared, and what differed."""

    draws: int = 0
    rounded: int = 0  # log-probs that differ
    largest: float = 0.0  # difference of two
    moved: int = 0  # draws
    conversations: int = 0

    def compare(self, mine: Said, theirs: Said) -> None:
        """Two runs of one conversation."""
        same = next((i for i, (a, b) in enumerate(zip(mine, theirs)) if a[:2] != b[:2]), min(len(mine), len(theirs)))
        gaps = [abs(a - b) for (_, own, a), (_, _, b) in zip(mine[:same], theirs, strict=False) if own]
        moved = [x[:2] for x in mine] != [x[:2] for x in theirs]
        self.draws += len(gaps) + moved
        self.rounded += sum(gap > 0 for gap in gaps)
        self.largest = max(self.largest, *gaps)
        self.moved += moved
        self.conversations += 1


def count(rank: int, path: str, rounds: int) -> dict[str, Count]:
    """Case -> what was counted."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(path)
    found: dict[str, Count] = {}
    for name, dtype, invariant in CASES:
        shard = make_shard(replace(plan_model(path, dtype=dtype), invariant=invariant), rank)
        found[name] = Count()
        for number in range(rounds if not invariant else max(rounds // 4, 1)):
            first = conversations(shard, Rows(tokenizer), number, 0, "keep")
            for delays, slots, waiting in OTHERS:
                other = conversations(shard, Rows(tokenizer, 10 * number + delays), number, slots, waiting)
                for mine, theirs in zip(first, other, strict=True):
                    found[name].compare(mine, theirs)
    return found


def conversations(shard: Any, talk: Any, step: int, slots: int, waiting: Waiting) -> list[Said]:
    """The tokens of each conversation, which of them were drawn, and their log-probs."""
    out = shard.converse(torch.arange(CONVERSATIONS), SAMPLING, LIMITS, talk, seed=5, step=step, max_num_seqs=slots,
                         waiting=waiting)
    sizes = (out.batch.prompt_lens + out.batch.response_lens).tolist()
    logprobs = torch.zeros(len(out.batch.own))
    logprobs[out.batch.own] = out.logprobs
    return [list(zip(*(x.tolist() for x in parts), strict=True)) for parts in zip(
        *(x.split(sizes) for x in (out.batch.tokens, out.batch.own, logprobs)), strict=True)]


def main() -> None:
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 16
    with tempfile.TemporaryDirectory() as place:
        path = str(make_model(Path(place) / "model", hidden_size=128, intermediate_size=256, head_dim=32,
                              max_position_embeddings=512, scale=0.05))
        (found,) = run_world(1, count, path, rounds, timeout=3000.0)
    for name, of in found.items():
        print(f"{name:<24}{of.draws:>9,} draws  {of.rounded:>9,} rounded otherwise, by {of.largest:.1e} at most  "
              f"{of.moved:>4} moved  {of.conversations:,} conversations", flush=True)
    sys.exit(any(found[name].rounded or found[name].moved for name, _, invariant in CASES if invariant))


if __name__ == "__main__":
    main()
