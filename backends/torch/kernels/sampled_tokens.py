"""What a decode step on a CPU does with the tokens that it has sampled, in one call of `cpu_sampled_tokens.c`.

In: tokens, log-probs and the slots that sampled them. Out: both are appended to the responses of the slots' sequences.
The 20 operators of torch that do the same take a tenth of a decode step of a small model. Without compiled kernels
there is none (`takes`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from rldsl.backends.torch.kernels.kernel_library import available, library

# of what a slot has and of what a response has, in the order of the arguments in C
SLOT_DTYPES = (torch.int64, torch.int64, torch.int64, torch.float32, torch.bool, torch.bool)
RESPONSE_DTYPES = (torch.int64, torch.float32, torch.int64, torch.bool)


def takes(device: torch.device) -> bool:
    """Whether an `Appender` works there. The first call may compile it."""
    return device.type == "cpu" and available()


@dataclass(frozen=True, slots=True, repr=False)  # tensors are long to print
class Appender:
    """Gives slots their tokens, and appends these to the responses of the sequences that are active there.
    Errors: ValueError for tensors of other dtypes or shapes, or with gaps."""

    # [slots] each: number of the sequence, tokens that it has, its last token, that one's log-prob, whether it is
    # active, whether it has ended
    slots: Sequence[torch.Tensor]
    # tokens and log-probs [sequences, M + 1], whose column M takes what is dropped; and, as soon as a sequence is
    # active no more, its length and whether it has ended, [sequences] each
    responses: Sequence[torch.Tensor]
    ends: torch.Tensor  # [E] int64: tokens that end a sequence

    def __post_init__(self) -> None:
        given, (tokens, logprobs, lengths, have_ended) = (*self.slots, *self.responses, self.ends), self.responses
        if (tuple(x.dtype for x in given) != (*SLOT_DTYPES, *RESPONSE_DTYPES, torch.int64)
                or not all(x.is_contiguous() for x in given) or len({x.shape for x in self.slots}) != 1
                or tokens.shape != logprobs.shape or not len(tokens) == len(lengths) == len(have_ended)):
            raise ValueError("sampled tokens: tensors of other dtypes or shapes")

    def __call__(self, first: int, tokens: torch.Tensor, logprobs: torch.Tensor) -> int:
        """For slots from `first` on. tokens: [count] int64. logprobs: [count] float32. Returns how many sequences are
        active no more."""
        (count,), (columns,) = tokens.shape, self.slots[0].shape
        if (tokens.dtype is not torch.int64 or logprobs.dtype is not torch.float32 or logprobs.shape != tokens.shape
                or not (tokens.is_contiguous() and logprobs.is_contiguous()) or not 0 <= first <= columns - count):
            raise ValueError("sampled tokens: tensors of other dtypes or shapes")
        stopped: int = library().append_sampled(
            tokens.data_ptr(), logprobs.data_ptr(), first, count, *[x.data_ptr() for x in self.slots],
            self.ends.data_ptr(), self.ends.shape[0], self.responses[0].shape[1],
            *[x.data_ptr() for x in self.responses])
        return stopped
