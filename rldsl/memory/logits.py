"""What the head needs while it makes log-probabilities or the next token, in bytes.

In: counts and sizes of elements. Out: the most that exists at once, besides hidden states. The counts are those of
`backends/torch/model/logprobs.py` and `backends/torch/generate/sampling.py`: logits in chunks, statistics in float32.
Of a chunk one tensor of logits exists, which becomes its own gradient; two if the entropy is needed. Up to
`KEPT_LOGITS` logits stay from the forward pass to the backward pass of training on a CPU, which then does not make
them again. There log-probs of one token of each distribution alone have kernels that compute with blocks of logits
(`kernels/cpu_heads.c`). Which machine will run a plan is not known: that it has a C compiler is assumed. One without
makes tables of up to `CPU_LOGITS` logits instead of blocks, and keeps as many as are counted."""

from __future__ import annotations

from dataclasses import dataclass

from rldsl.plan.events import Sampling

MAX_ROWS, MIN_ROWS = 1024, 32  # tokens whose logits exist at once
MIN_VOCABULARY_ROWS = 4
VOCABULARY_TABLES = 24  # of a generalized Jensen-Shannon divergence, as autograd keeps them
VOCABULARY_LOGITS = 1 << 18  # of each of these tables that exist at once on a CPU: as many as its caches hold
CPU_LOGITS = 1 << 23  # logits that exist at once on a CPU, 32 MiB: with fewer the product with the head is slower
BLOCK_COLUMNS, BLOCK_ROWS = 512, 1024  # whose logits exist at once in kernels of a CPU, where they are not kept
PER_ROW = 40  # bytes of what these kernels know of a row
KEPT_LOGITS = 1 << 26  # logits of a micro-batch that a CPU keeps for the backward pass, at most: 256 MiB


def rows_at_once(words: int, device: str) -> int:
    """The number of tokens whose logits over `words` vocabulary entries exist at once. The product needs many rows to
    be fast, on a GPU more than on a CPU. device: "cuda" or "cpu"."""
    return MAX_ROWS if device == "cuda" else max(MIN_ROWS, min(MAX_ROWS, CPU_LOGITS // max(words, 1)))


def are_kept(words: int, tokens: int, compute: int, device: str) -> bool:
    """Whether training keeps the logits of `tokens` tokens for their gradient, if the loss reads log-probs alone.
    compute: bytes per element of the hidden states."""
    return device == "cpu" and compute == 4 and words * tokens <= KEPT_LOGITS


def vocabulary_rows_at_once(words: int, tokens: int, device: str) -> int:
    """The same where a loss computes with the whole vocabulary, which takes `VOCABULARY_TABLES` tables: so few that all
    of them have at most 0.05 of the rows of one table for all tokens."""
    rows = MAX_ROWS // 8
    if device != "cuda":
        rows = max(MIN_VOCABULARY_ROWS, min(rows, VOCABULARY_LOGITS // max(words, 1)))
    return min(rows, max(MIN_VOCABULARY_ROWS, tokens // (20 * (VOCABULARY_TABLES + 4))))


@dataclass(frozen=True, slots=True)
class Head:
    """The output embedding on this rank."""

    rows: int  # vocabulary entries on this rank
    hidden: int  # width of a row
    stored: int  # bytes per element of the weight
    compute: int  # bytes per element of the hidden states that it is multiplied with
    invariant: bool = False  # sums over the vocabulary have one order
    holds_gradient: bool = False  # its gradient is added where it is kept, if that can be done
    capped: bool = False  # a logit z counts as c * tanh(z / c)

    @property
    def cast(self) -> int:
        """Bytes of the weight in the dtype of the hidden states, if that is another."""
        return self.compute * self.rows * self.hidden if self.stored != self.compute else 0

    @property
    def making(self) -> int:
        """Bytes per logit: the product, and the same in float32."""
        return 4 if self.compute == 4 else self.compute + 4

    def samples_at_once(self, options: Sampling) -> bool:
        """Whether on a CPU one kernel multiplies with the head and samples (`generate/sampling.py`), on one tp rank."""
        return self.compute == self.stored == 4 and not self.invariant and not self.capped and not (
            options.greedy or options.top_k or options.top_p < 1 or options.min_p or options.min_new_tokens)


@dataclass(frozen=True, slots=True)
class Read:
    """What is read of each distribution."""

    entropy: bool = False  # or another statistic of all tokens
    several: bool = False  # log-probs of several tokens

    def keeps(self, head: Head, tokens: int, device: str) -> bool:
        """Whether training keeps the logits of `tokens` tokens for their gradient."""
        return not self.entropy and not head.capped and are_kept(head.rows, tokens, head.compute, device)

    def in_blocks(self, head: Head, device: str) -> bool:
        """Whether kernels compute with blocks of logits."""
        return device == "cpu" and head.compute == head.stored == 4 and not (
            self.entropy or self.several or head.invariant or head.capped)


def _chunk(head: Head, tokens: int, trains: bool, read: Read, device: str) -> int:
    """Logits that exist at once."""
    kept = trains and read.keeps(head, tokens, device)
    return (tokens if kept else min(tokens, rows_at_once(head.rows, device))) * head.rows


def forward(head: Head, tokens: int, read: Read, device: str, trains: bool = False) -> int:
    """Bytes of the logits, which become their exp; of both for the entropy. trains: a backward pass follows."""
    if read.in_blocks(head, device):
        kept = 4 * tokens * head.rows if trains and read.keeps(head, tokens, device) else 0
        return kept + PER_ROW * tokens + 4 * BLOCK_COLUMNS * head.hidden
    chunk = _chunk(head, tokens, trains, read, device)
    return head.cast + max(head.making, 8 if read.entropy else 4) * chunk


def backward(head: Head, tokens: int, trained: bool, read: Read, device: str) -> int:
    """Bytes of the logits of a chunk, which become probabilities and gradients, beside the derivative of their cap, and
    the gradient of the weight where it is trained: in half precision each chunk's part of it, too."""
    chunk, weight = _chunk(head, tokens, True, read, device), head.rows * head.hidden
    if read.in_blocks(head, device):
        kept = 4 * tokens * head.rows if read.keeps(head, tokens, device) else 0
        rows = min(tokens, BLOCK_ROWS)
        block = BLOCK_COLUMNS * (2 * head.hidden + rows) + rows * head.hidden
        return kept + PER_ROW * tokens + 4 * (block + (weight if trained and not head.holds_gradient else 0))
    half = head.compute == 2
    gradient = 4 * weight if trained else 0
    sloping = max(head.making, 4 * (1 + read.entropy + head.capped), 4 + 2 * half) * chunk
    product = head.compute * weight if trained and half else 0
    return head.cast + gradient + max(sloping, head.compute * chunk + product)


def over_vocabulary(head: Head, tokens: int, others: int, trained: bool, device: str) -> int:
    """Bytes of the tables of a chunk, as a loss computes with whole distributions, and of the gradient of the weight
    where it is trained. others: models that the distribution is compared with, whose heads are cast, too."""
    chunk = min(tokens, vocabulary_rows_at_once(head.rows, tokens, device)) * head.rows
    weight = head.rows * head.hidden
    return head.cast * (1 + others) + (VOCABULARY_TABLES + 2 * others) * 4 * chunk + (4 * weight if trained else 0)


def sampling(head: Head, sequences: int, options: Sampling, tp: int) -> int:
    """The next token of each of `sequences`, from the logits over the whole vocabulary of `tp` such heads."""
    vocab = head.rows * tp
    here = sequences * vocab
    gathered = (8 if tp > 1 else 0) * here + 8 * sequences * head.rows
    choosing = 8  # the logits, and their exp
    if not options.greedy and options.top_p < 1 and not options.top_k:
        choosing = 36  # all in order, and their running sums in float64
    elif not options.greedy and (options.top_k or options.min_p):
        choosing = 9
    return head.cast + max(gathered, head.making * sequences * head.rows, choosing * here)
