"""What a decode step on a CPU does with the tokens that it has sampled, in one call of `cpu_sampled_tokens.c`.

In: tokens, log-probs and the slots that sampled them. Out: both are appended to the responses of the slots' sequences.
The 20 operators of torch that do the same take a tenth of a decode step of a small model. Without compiled kernels
there is none (`takes`).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from rldsl.backends.torch.kernels.kernel_library import available, library

# of what a slot has, in the order of the arguments in C, and of the other tensors
SLOT_DTYPES = (torch.int64, torch.int64, torch.int64, torch.float32, torch.bool, torch.bool)
DTYPES = (torch.int64, torch.float32, *SLOT_DTYPES, torch.int64, torch.int64, torch.float32)


def takes(device: torch.device) -> bool:
    """Whether `append` works there. The first call may compile it."""
    return device.type == "cpu" and available()


def append(slots: Sequence[torch.Tensor], first: int, tokens: torch.Tensor, logprobs: torch.Tensor, ends: torch.Tensor,
           responses: torch.Tensor, response_logprobs: torch.Tensor) -> None:
    """Give slots from `first` on their tokens, and append these to the responses of their sequences where they are
    active.

    slots: [slots] each: number of the sequence, tokens that it has, its last token, that one's log-prob, whether it is
    active, whether it has ended. tokens: [count] int64. logprobs: [count] float32. ends: [E] int64, tokens that end a
    sequence. responses [sequences, M + 1] int64 and response_logprobs, float32: column M takes what is dropped.
    Errors: ValueError for tensors of other dtypes or shapes, or with gaps."""
    count, columns = len(tokens), len(slots[0])
    given = (tokens, logprobs, *slots, ends, responses, response_logprobs)
    if (tuple(x.dtype for x in given) != DTYPES or not all(x.is_contiguous() for x in given)
            or len(logprobs) != count or not 0 <= first <= columns - count or any(len(x) != columns for x in slots)
            or responses.shape != response_logprobs.shape):
        raise ValueError("sampled tokens: tensors of other dtypes or shapes")
    library().append_sampled(tokens.data_ptr(), logprobs.data_ptr(), first, count, *(x.data_ptr() for x in slots),
                             ends.data_ptr(), len(ends), responses.shape[1], responses.data_ptr(),
                             response_logprobs.data_ptr())
