"""Which kernel finds the threshold of nucleus sampling: ours in Triton (`nucleus.py`) on CUDA, if it compiles and is
right on this machine and there are rows enough, else none; then the vocabulary is sorted.

In: a device, and a number of rows. Out: the kernel, if there is one.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec

import torch

NucleusKernel = Callable[[torch.Tensor, float], torch.Tensor]  # (scores [S, V], mass) -> [S, 1]

# With fewer rows a sort is faster: the kernel has one program for each row, which takes as long for one as for a
# hundred. On an H200 with 151,936 tokens a sort and its sums take 0.09 ms for 1 row, 1.1 for 64 and 3.5 for 256; the
# kernel 1.5, 1.6, 2.4
MIN_ROWS = 128


def nucleus_kernel(device: torch.device, rows: int = MIN_ROWS) -> NucleusKernel | None:
    """The kernel for `rows` rows; None: it does not pay, or cannot run. The first call for a device tries the kernel,
    which makes the host wait."""
    return _installed(device) if device.type == "cuda" and rows >= MIN_ROWS else None


@cache
def _installed(device: torch.device) -> NucleusKernel | None:
    if find_spec("triton") is None:
        return None
    if problem := _problem(device):
        warnings.warn(f"top_p sorts the vocabulary, since Triton cannot be used here: {problem}", stacklevel=2)
        return None
    from rldsl.backends.torch.kernels.nucleus import nucleus_threshold

    return nucleus_threshold


def _problem(device: torch.device) -> str:
    """Why the kernel cannot be used on this machine, "" if it can. Tried with tokens of which the largest four have the
    mass: 1/2, 1/4, 1/8 and 1/16."""
    try:
        from rldsl.backends.torch.kernels.nucleus import nucleus_threshold

        scores = torch.arange(1500, device=device).flip(0) * -0.6931471805599453
        found = nucleus_threshold(torch.stack([scores, scores.flip(0) + 5]), 0.9).flatten().tolist()
        expected = [float(scores[-4]), float(scores[-4]) + 5]
    except Exception as error:  # whatever a compiler raises
        return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
    gap = max(abs(a - b) for a, b in zip(found, expected, strict=True))
    return "" if gap < 1e-3 else f"its threshold differs from the right one by {gap:.3g}"
