"""The shapes of decoding steps, and the memory of captured steps, in bytes.

In: counts and sizes. Out: numbers that the backend uses too (`backends/torch/generate/scheduler.py`,
`captured_step.py`), and the memory of a captured step: on the CPU an operator trace keeps the outputs of all its
operators; a CUDA graph needs as much as one step.
"""

from __future__ import annotations

from rldsl.memory.logits import Head
from rldsl.plan.events import Sampling
from rldsl.plan.payloads import Waiting

MAX_PREFILL_TOKENS = 1 << 14  # prompt tokens per prefill, so that its memory does not grow with the batch
MIN_CACHE_WIDTH = 64  # tokens: the smallest unit of the width that the KV cache is read in
CPU_CACHE_WIDTH = 16  # the same on a CPU, whose attention takes as long as what it reads, visible or not
SINGLE_NUMBERS = 192  # bytes of those that a decode step makes of each sequence
SAMPLING_BLOCK = 256  # tokens of the vocabulary whose weights are summed at once
MAX_CAPTURES_WITH_MEMORY = 4  # captured steps per micro-batch group that hold the intermediate results of their step

MAX_LIVE_PER_SLOT = 4  # conversations that are alive for each slot of the KV cache, where waiting ones give theirs away


def live_conversations(slots: int, waiting: Waiting) -> int:
    """How many conversations are alive at most."""
    return slots if waiting == "keep" else slots * MAX_LIVE_PER_SLOT


def round_to_bucket(count: int, least: int = 1, parts: int = 2) -> int:
    """`count` rounded up to a bucket: `parts` buckets per doubling, all multiples of `least`."""
    unit = max(least, (1 << max(count, 1).bit_length() - 1) // parts)
    return -(-count // unit) * unit


def tokens_to_read(count: int, cpu: bool = False) -> int:
    """How many tokens of each slot a step reads, at least `count`, so that few widths occur. cpu: on a CPU."""
    return round_to_bucket(count, CPU_CACHE_WIDTH, 8) if cpu else round_to_bucket(count, MIN_CACHE_WIDTH, 4)


def num_captures_with_memory(prompt: int, new: int, cpu: bool = False) -> int:
    """The largest number of captured steps with memory that exist at once, while sequences of `prompt` tokens get `new`
    more: one for each width at which the KV cache is read for two steps or more. On a CPU this is an upper bound. A
    step that does not read the width is captured once for all, and the plan does not know whether each rank has the
    kernel for that."""
    count, generated = 0, 1
    while generated < new and count < MAX_CAPTURES_WITH_MEMORY:
        next_width = min(tokens_to_read(prompt + generated, cpu) - prompt + 1, new)
        count += next_width - generated > 1
        generated = next_width
    return max(count, int(cpu and new > 2))


def sampling_bytes_of_trace(head: Head, options: Sampling, tp: int, sequences: int) -> int:
    """Bytes that an operator trace keeps to sample from the logits of `tp` ranks: what is made of each logit, sums of
    blocks of the vocabulary, the blocks with the tokens, and single numbers. None but these where one kernel multiplies
    and samples."""
    single = SINGLE_NUMBERS * sequences
    if tp == 1 and head.samples_at_once(options):
        return single
    vocab = head.rows * tp
    each = _sampling_bytes_per_logit(head, options) * vocab
    if options.greedy:
        return single + each * sequences
    blocks = -(-vocab // SAMPLING_BLOCK)
    return single + (each + 33 * SAMPLING_BLOCK + 16 * blocks) * sequences + 9 * SAMPLING_BLOCK


def _sampling_bytes_per_logit(head: Head, options: Sampling) -> int:
    """Bytes that an operator trace keeps per logit: the product, its float32 copy, the sampling weights, and the sorted
    copies of top-p."""
    ordered = not options.greedy and options.top_p < 1 and not options.top_k
    filtered = not options.greedy and (options.top_p < 1 or options.top_k > 0 or options.min_p > 0)
    return head.making + 4 + (45 if ordered else 0) + filtered
