"""The Triton kernel of nucleus sampling in Triton's interpreter, against a sort, in a process of its own: what Triton
defines is interpreted or compiled from the moment that it is imported.

    TRITON_INTERPRET=1 python -m tests.generation.nucleus_check      # one line of JSON
"""

from __future__ import annotations

import json

import torch

from rldsl.backends.torch.generate.sampling import threshold
from rldsl.backends.torch.kernels import nucleus
from rldsl.plan.events import Sampling

PARTS = (1e-9, 0.5, 0.95, 1 - 1e-7)
NEAR = 1e-6  # of the mass: sums of blocks are float32


def cases() -> list[tuple[str, torch.Tensor]]:
    draw = torch.Generator().manual_seed(3)
    plain = torch.randn(2, 2100, generator=draw) * 3
    tied = (plain * 2).round() / 2
    barred = plain.clone()
    barred[:, ::3] = -torch.inf
    far = torch.randn(2, 300, generator=draw) * 1e4 + 2e4
    return [("plain", plain), ("tied", tied), ("barred", barred), ("far", far), ("one token", plain[:, :1]),
            ("all alike", torch.full((2, 1100), -3.5)), ("positive", plain.abs()), ("part of a block", plain[:, :1025]),
            ("not contiguous", plain[:, ::2])]


def differences() -> list[str]:
    """Where the kernel is wrong, or differs from a sort though no token is at the very edge of the mass."""
    found = []
    for name, scores in cases():
        weights = scores.double().softmax(-1)
        for part in PARTS:
            lowest = nucleus.nucleus_threshold(scores, part)
            right = threshold(scores, Sampling(top_p=part))
            reached, without = ((weights * seen).sum(-1) for seen in (scores >= lowest, scores > lowest))
            clear = (reached - part).abs().minimum((without - part).abs()) > NEAR
            good = (scores == lowest).any(-1) & (reached >= part - NEAR) & (without < part + NEAR)
            good &= (lowest == right)[:, 0] | ~clear
            if not bool(good.all()):
                found.append(f"{name} {part}")
    return found


def of_rows() -> bool:
    """A row alone, and among others."""
    scores = torch.randn(3, 1500, generator=torch.Generator().manual_seed(4))
    together = nucleus.nucleus_threshold(scores, 0.8)
    return all(torch.equal(nucleus.nucleus_threshold(scores[i : i + 1], 0.8), together[i : i + 1]) for i in range(3))


def main() -> None:
    nan = torch.tensor([[1.0, float("nan"), 2.0], [1.0, 3.0, 2.0]])
    print(json.dumps({"differ": differences(), "rows": of_rows(),
                      "none": nucleus.nucleus_threshold(torch.zeros(0, 5), 0.5).shape,
                      "beside NaN": nucleus.nucleus_threshold(nan, 0.5)[1].item()}))


if __name__ == "__main__":
    main()
