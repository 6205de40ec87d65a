"""What the head needs while it makes log-probabilities or the next token, in bytes.

In: counts and sizes of elements. Out: the most that exists at once, besides hidden states. The counts are those of
`backends/torch/{logprobs,sampling}.py`: logits in chunks, statistics in float32, and what a loop still holds of the
chunk before.
"""

from __future__ import annotations

from dataclasses import dataclass

from rldsl.plan.events import Sampling

CHUNK = 1024  # tokens whose logits exist at once


@dataclass(frozen=True, slots=True)
class Head:
    """rows: of the output embedding on this rank, hidden: of each. stored, compute: bytes of an element of the weight,
    and of what it is multiplied with."""

    rows: int
    hidden: int
    stored: int
    compute: int

    @property
    def cast(self) -> int:
        """The weight in the dtype of the hidden states, where that is another."""
        return self.compute * self.rows * self.hidden if self.stored != self.compute else 0

    @property
    def making(self) -> int:
        """Of a logit: the product, and the same in float32."""
        return 4 if self.compute == 4 else self.compute + 4


def forward(head: Head, tokens: int, entropy: bool) -> int:
    """Bytes of the logits and their exp (and p * log p for entropy); from the second chunk on, the previous chunk's
    logits are still alive."""
    chunk = min(tokens, CHUNK) * head.rows
    again = 8 if tokens > CHUNK else 0
    return head.cast + max(again + head.making, 12 if entropy or again else 8) * chunk


def backward(head: Head, tokens: int, trained: bool, entropy: bool) -> int:
    """Bytes of the logits, probabilities and gradients of a chunk, and the gradient of the weight where it is
    trained."""
    chunk, weight = min(tokens, CHUNK) * head.rows, head.rows * head.hidden
    gradient = 4 * weight if trained else 0
    again = 8 + head.compute if tokens > CHUNK else 0
    making = (again + head.making) * chunk
    sloping = (16 + (2 if head.compute == 2 else 0) + (4 if entropy else 0)) * chunk
    product = (head.compute + (4 if head.compute == 2 else 0)) * weight if trained else 0
    return head.cast + gradient + max(making, sloping, (8 + head.compute) * chunk + product)


def sampling(head: Head, sequences: int, options: Sampling, tp: int) -> int:
    """The next token of so many sequences, from the logits over the whole vocabulary of `tp` such heads."""
    vocab = head.rows * tp
    here = sequences * vocab
    gathered = (8 if tp > 1 else 0) * here + 8 * sequences * head.rows
    kept = 4 if options.min_new_tokens else 0  # a second copy in which some tokens are forbidden
    if options.greedy:
        choosing = 12
    elif options.top_p < 1:
        choosing = 44 + kept
    else:
        choosing = 24 + kept + (4 if options.top_k else 0)
    return head.cast + max(gathered, choosing * here)
