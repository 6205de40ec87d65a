"""Experts in a form that `experts.py` does not know, in decode steps that are replayed (`generate/captured_step.py`).

In: a model. Out: the same; modules of experts that read on the host which experts were chosen, as LongCat-Flash's do,
are one opaque call on a CPU without gradients (`kernels/opaque_calls.py`), which a replay makes again. Without it no
step of such a model could be captured.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from functools import partial
from typing import Any

import torch
from torch import nn

from rldsl.backends.torch.kernels.opaque_calls import opaque_on_cpu
from rldsl.models.experts import other_forms


def make_calls_of_experts(skeleton: Any) -> list[str]:
    """skeleton: a model of transformers. Returns the names of the modules that are opaque calls from now on."""
    found, hidden = [], int(skeleton.config.get_text_config().hidden_size)
    for name in other_forms(skeleton):
        module = skeleton.get_submodule(name)
        if _reads_on_the_host(module, hidden):
            module.forward = partial(_call, module.forward)
            found.append(name)
    return found


def _call(forward: Callable[..., torch.Tensor], *inputs: Any, **options: Any) -> torch.Tensor:
    if options or not all(isinstance(x, torch.Tensor) for x in inputs):
        return forward(*inputs, **options)
    return opaque_on_cpu(forward, *inputs)


@torch.no_grad()
def _reads_on_the_host(module: nn.Module, hidden: int) -> bool:
    """Whether a module of (tokens [T, hidden], chosen experts [T, K], their weights [T, K]) -> [T, hidden] needs
    numbers on the host: then it does not run on the meta device, which has none."""
    trial: Any = copy(module)
    trial._parameters = {n: None if p is None else nn.Parameter(p.to("meta")) for n, p in module._parameters.items()}
    tokens, weights = torch.empty(2, hidden, device="meta"), torch.empty(2, 1, device="meta")
    try:
        trial(tokens, torch.zeros(2, 1, dtype=torch.long, device="meta"), weights)
    except RuntimeError as error:  # one of another shape is no such module
        return "meta" in str(error).lower()
    except Exception:  # a module that is called otherwise
        return False
    return False
