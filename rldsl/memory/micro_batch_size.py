"""The largest micro-batch of a rank: what activations are counted for.

In: the frames of a call, rows of a rank, limits of a micro-batch. Out: tokens and rows, at most. Rows have the maximum
length.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import gcd

from rldsl.memory.values import Tables, width
from rldsl.plan.model import Layout, Spread
from rldsl.plan.prompt_sources import pays
from rldsl.plan.spaces import IndexedFrame
from rldsl.sharding.micro_batches import count_without_token_limit


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """The largest micro-batch of a rank."""

    tokens: int  # of all its sequences
    responses: int  # tokens among them that are responses
    sequences: int  # that it has
    count: int  # how many micro-batches there are
    cp_tokens: int  # tokens on all ranks of the cp group together
    repeated: int = 0  # tokens whose keys and values are there again, next to responses to one prompt


def largest_micro_batch(t: Tables, frames: tuple[str, ...], rows: int, mbs: int, mbt: int,
                        layout: Layout, shared: Spread | None = None) -> MicroBatch:
    """The largest micro-batch of `rows` rows of some frames, with at most `mbs` rows and `mbt` tokens (0: any number).
    With context parallelism a rank has two chunks of each row, which at worst hold nothing but responses. A token
    budget counts as full, since shorter rows are packed until it is. shared: the spread of a call that computes a
    prompt of several rows once."""
    num_chunks = 2 * layout.cp  # of a row
    count = count_without_token_limit(rows, mbs, min_count=layout.pp)
    num_rows = -(-rows // count)  # of the largest micro-batch, of each frame
    records = [t.frames[f] for f in frames]
    longest = sum(map(width, records))
    cp_tokens, responses = num_rows * longest, num_rows * sum(f.max_response_tokens for f in records)
    if mbt and cp_tokens > mbt:
        count = -(-rows // max(1, mbt // longest))
        return MicroBatch(-(-mbt // layout.cp), min(mbt, responses), num_rows * len(records), count, mbt)
    tokens = cp_tokens if layout.cp == 1 else num_rows * sum(2 * -(-width(f) // num_chunks) for f in records)
    found = MicroBatch(tokens, min(tokens, responses), num_rows * len(records), count, cp_tokens)
    saved = _shared_tokens(t, records, num_rows, shared) if shared else 0
    return replace(found, tokens=tokens - saved, cp_tokens=cp_tokens - saved, repeated=saved) \
        if pays(saved, tokens) else found


def _shared_tokens(t: Tables, frames: Sequence[IndexedFrame], rows: int, spread: Spread) -> int:
    """Tokens of prompts that `rows` rows of each frame have in common, at least, if they are as many as can be. A
    micro-batch has no more prompts than there are in all. Its rows compute no more than neighbors would
    (`sharding/siblings.py`), except where a shuffle has divided the rows before."""
    run = gcd(*(t.prompts[f.id].run for f in frames if f.id in t.prompts)) or 1
    parted = spread.shuffle and spread.minibatches > 1
    of_neighbors = rows if parted else -(-rows // run) + (rows % run > 0)
    most: dict[str, int] = {}  # prompts of each source
    longest: dict[str, int] = {}
    saved = 0
    for frame in frames:
        source = t.prompts.get(frame.id)
        if source is None:
            continue
        saved += rows * frame.max_prompt_tokens
        most[source.frame] = min(rows, of_neighbors, -(-frame.count // source.run))
        longest[source.frame] = frame.max_prompt_tokens
    return saved - sum(count * longest[source] for source, count in most.items())
