"""Fresh outputs of a model from the last stage's hidden states."""

from __future__ import annotations

from collections.abc import Collection

import torch
from rldsl.backends.torch.model.logprobs import token_logprobs
from rldsl.backends.torch.model.packed_batch import Batch
from rldsl.backends.torch.model.stage import Stage

from rldsl.memory.logits import rows_at_once


def outputs(stage: Stage, hidden: torch.Tensor, batch: Batch, what: Collection[str],
            temperature: float) -> dict[str, tuple[torch.Tensor, ...]]:
    """hidden: [T, H] of this rank's tokens. what -> one flat float32 tensor for each frame: "logprobs", "entropy",
    "values" over response tokens, "scores" over sequences; those of all ranks of a cp group, on each of them."""
    found: dict[str, torch.Tensor] = {}
    if "logprobs" in what or "entropy" in what:
        found["logprobs"], entropy = token_logprobs(
            hidden.index_select(0, batch.before), stage.head, batch.targets, temperature, stage.head_axis,
            stage.vocab_start, "entropy" in what,
            rows_at_once(-(-stage.vocab // stage.head_axis.size), hidden.device.type))
        if entropy is not None:
            found["entropy"] = entropy
    if "values" in what:
        found["values"] = (hidden.index_select(0, batch.before) @ stage.score[0].to(hidden.dtype)).float()
    if "scores" in what:
        found["scores"] = (hidden.index_select(0, batch.ends) @ stage.score[0].to(hidden.dtype)).float()
    found = {name: batch.whole(value, ends=name == "scores") for name, value in found.items() if name in what}
    sizes = {name: batch.sequences if name == "scores" else batch.responses for name in found}
    return {name: value.split(sizes[name]) for name, value in found.items()}
