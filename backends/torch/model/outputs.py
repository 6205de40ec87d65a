"""Outputs of a model (log-probs, entropy, values, scores) from the last stage's hidden states."""

from __future__ import annotations

from collections.abc import Collection

import torch
from rldsl.backends.torch.model.logprobs import token_logprobs
from rldsl.backends.torch.model.model_inputs import ModelInputs
from rldsl.backends.torch.model.stage import Stage

from rldsl.memory.logits import rows_at_once


def model_outputs(stage: Stage, hidden: torch.Tensor, inputs: ModelInputs, names: Collection[str],
                  temperature: float) -> dict[str, tuple[torch.Tensor, ...]]:
    """hidden: [T, H] of this rank's tokens. Returns, for each name, one flat float32 tensor for each frame: "logprobs",
    "entropy" and "values" over response tokens, "scores" over sequences. Under context parallelism every rank of the cp
    group gets those of all."""
    outputs: dict[str, torch.Tensor] = {}
    if "logprobs" in names or "entropy" in names:
        rows = rows_at_once(-(-stage.vocab // stage.head_axis.size), hidden.device.type)
        logprobs, entropy = token_logprobs(
            hidden.index_select(0, inputs.predict_at), _needed(stage.head, "head"), inputs.targets, temperature,
            stage.head_axis, stage.vocab_start, "entropy" in names, rows)
        if "logprobs" in names:
            outputs["logprobs"] = inputs.gather_predictions(logprobs)
        if entropy is not None:
            outputs["entropy"] = inputs.gather_predictions(entropy)
    if "values" in names:
        outputs["values"] = inputs.gather_predictions(_scalars(stage, hidden.index_select(0, inputs.predict_at)))
    if "scores" in names:
        outputs["scores"] = inputs.gather_last(_scalars(stage, hidden.index_select(0, inputs.last_at)))
    sizes = {name: inputs.sequences if name == "scores" else inputs.responses for name in outputs}
    return {name: value.split(sizes[name]) for name, value in outputs.items()}


def _scalars(stage: Stage, hidden: torch.Tensor) -> torch.Tensor:
    """[n, H] -> [n] float32, by the value or score head."""
    return (hidden @ _needed(stage.score, "score head")[0].to(hidden.dtype)).float()


def _needed(weight: torch.Tensor | None, name: str) -> torch.Tensor:
    if weight is None:
        raise ValueError(f"this stage has no {name}")
    return weight
