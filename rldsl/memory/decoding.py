"""Which shapes decoding takes, and what its recordings hold, in bytes.

In: counts and sizes. Out: numbers that the backend works by (`backends/torch/generate/scheduler.py`,
`captured_step.py`), and the memory of a recorded step: on the CPU a recording keeps all that its operators make; a
captured graph needs what one step needs. """

from __future__ import annotations

from rldsl.memory.logits import Head
from rldsl.plan.events import Sampling

PREFILL = 1 << 14  # tokens of prompts that are run at once, so that a prefill does not grow with the batch
NARROW = 64  # of the slab's width, read in steps of at least so many tokens
KEPT = 4  # recordings with memory for each lane: each holds what its function computes on the way


def bucket(count: int, least: int = 1, parts: int = 2) -> int:
    """The next of few numbers: so many parts of each doubling, multiples of `least`."""
    unit = max(least, (1 << max(count, 1).bit_length() - 1) // parts)
    return -(-count // unit) * unit


def recordings(prompt: int, new: int) -> int:
    """How many are there at once, at most, while sequences of so many tokens get `new` more: one for each width in
    which the slab is read for two steps or more."""
    found, made = 0, 1
    while made < new and found < KEPT:
        past = min(bucket(prompt + made, NARROW, 4) - prompt + 1, new)  # where the slab is read further
        found += past - made > 1
        made = past
    return found


def sampled(head: Head, options: Sampling) -> int:
    """Bytes that a recording keeps for each logit: the product, the same in float32, weights, and what filters sort."""
    ordered = not options.greedy and options.top_p < 1 and not options.top_k
    filtered = not options.greedy and (options.top_p < 1 or options.top_k > 0 or options.min_p > 0)
    return head.making + 4 + (45 if ordered else 0) + filtered
