"""torch's fused AdamW, with the same bits for an element wherever it stands in a tensor.

torch's kernel for CPUs computes whole vectors by one formula and what is left over at the end of a tensor by another,
which rounds differently. A tensor of whole vectors has no such end, on any number of threads (a thread's part is a
multiple of them); any other is updated in a copy that is padded to one. So invariant models have the same bits where
the kernel of `kernels/adamw.py` does not run.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

VECTORS = 64  # elements: a multiple of a CPU's vectors


class OrderedAdamW(torch.optim.AdamW):
    """AdamW with the options and the state of torch's own."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # nothing here gives a closure
        """Update all parameters that have a gradient."""
        for group in self.param_groups:
            parameters, grads, means, squares, steps = ([] for _ in range(5))  # type: ignore[var-annotated]
            self._init_group(group, parameters, grads, means, squares, [], steps)  # type: ignore[no-untyped-call]
            tensors = [list(each) for each in zip(parameters, grads, means, squares, strict=True)]
            padded = [_padded(each) if each[0].numel() % VECTORS else each for each in tensors]
            if padded:
                p, g, m, s = map(list, zip(*padded, strict=True))
                torch._foreach_add_(steps, 1)
                torch._fused_adamw_(p, g, m, s, [], steps, lr=group["lr"], beta1=group["betas"][0],
                                    beta2=group["betas"][1], weight_decay=group["weight_decay"], eps=group["eps"],
                                    amsgrad=False, maximize=False)
            for own, copies in zip(tensors, padded, strict=True):
                for x, new in zip(own, copies, strict=True):
                    if new is not x:
                        x.copy_(new[: x.numel()].view(x.shape))


def _padded(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    return [F.pad(x.detach().reshape(-1), (0, -x.numel() % VECTORS)) for x in tensors]
