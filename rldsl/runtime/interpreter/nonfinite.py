"""The end of a run whose gradient is not finite: the minibatch stays on disk, so that it can be studied.

In: what a loss saw on each rank. Out: `OUT/failed-batch-step-N/rank-R.safetensors`, of every rank with rows that
it reports, and the Failure, on all ranks together. In a file, by name: `FRAME.rows`, `FRAME.prompt_lens`,
`FRAME.response_lens`, `FRAME.tokens` (ids of the prompt and response of one row after another), `FRAME.images` (where
rows have images: for each token the number of its image in the run, or -1), and `data.NAME` for each data input of the
loss (entries of one row after another). Its metadata has the step, the model and the loss.
Errors: RL0733.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

import torch

from rldsl.diag import fail
from rldsl.runtime.comm.agreement import any_rank
from rldsl.runtime.image_tokens import ids_of, image_of
from rldsl.runtime.state.context import RunContext


def refuse_minibatch(context: RunContext, step: int, rows: Mapping[str, torch.Tensor], norm: float, group: Any, *,
                     model: str, loss: str, at: str) -> NoReturn:
    """Write the minibatch to disk and end the run with RL0733. rows: this rank's tensors; empty if another rank writes
    them. norm: of the gradient. group: all ranks of the call, which call this together. model, loss, at: of the call,
    and where it is in the program."""
    folder = context.out / f"failed-batch-step-{step}"
    problem = _write(folder / f"rank-{context.rank:05d}.safetensors", rows,
                     {"step": str(step), "model": model, "loss": loss, "grad_norm": f"{norm:g}"})
    # this also makes all ranks wait until every one has written
    failed = any_rank((bool(problem),), group, context.device)[0]
    where = f"the minibatch is in {folder}" if not failed else \
        f"the minibatch could not be written to {folder}" + (f": {problem}" if problem else "")
    raise fail("RL0733", f"the gradient of `{model}` is not finite ({norm:g})", place=at,
               notes=(f"loss: {loss}; no parameter was updated", where),
               help="look for a division by zero, a logarithm of 0 or an overflow of `exp` in the loss and its data; "
                    "use `nonfinite=skip` to skip such minibatches")


def _write(file: Path, rows: Mapping[str, torch.Tensor], about: Mapping[str, str]) -> str:
    """An error text, or "". Never raises: the gradient that is not finite is the error to report."""
    from safetensors.torch import save_file

    if not rows:
        return ""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        save_file({name: t.detach().cpu().contiguous() for name, t in _ids_apart(rows).items()}, str(file),
                  metadata=dict(about))
    except Exception as error:  # the library's own error type covers a full disk
        return str(getattr(error, "strerror", None) or error)
    return ""


def _ids_apart(rows: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The same with ids as tokens, and the image of each token beside them where there are any."""
    apart = dict(rows)
    for name, tokens in rows.items():
        if name.endswith(".tokens") and bool((image_of(tokens) >= 0).any()):
            apart |= {name: ids_of(tokens), f"{name.removesuffix('.tokens')}.images": image_of(tokens)}
    return apart
