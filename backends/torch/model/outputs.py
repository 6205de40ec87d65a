"""Outputs of a model (`plan/heads.py`) from the last stage's hidden states."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

import torch

from rldsl.backends.torch.model.logprobs import token_logprobs
from rldsl.backends.torch.model.model_inputs import ModelInputs
from rldsl.backends.torch.model.stage import Stage
from rldsl.memory.logits import rows_at_once
from rldsl.plan.heads import OUTPUTS


def model_outputs(stage: Stage, hidden: torch.Tensor, inputs: ModelInputs, names: Collection[str],
                  temperature: float) -> dict[str, tuple[torch.Tensor, ...]]:
    """hidden: [T, H] of this rank's tokens. Returns, for each name, one flat float32 tensor for each frame, over
    response tokens or over sequences, as the output's level says. Under context parallelism every rank of the cp group
    gets those of all."""
    outputs: dict[str, torch.Tensor] = {}
    by_seq = {name for name in names if OUTPUTS[name].level == "seq"}
    if any(OUTPUTS[name].logits for name in names):
        rows = rows_at_once(-(-stage.vocab_size // stage.head_axis.size), hidden.device.type)
        found = token_logprobs(
            hidden.index_select(0, inputs.predict_at), _needed(stage.head, "head"), inputs.targets, temperature,
            stage.head_axis, stage.vocab_start, "entropy" in names, rows, stage.vocab_cuts, "sum_squares" in names)
        outputs |= {name: inputs.gather_predictions(x) for name, x in found._asdict().items() if name in names}
    for name in [name for name in names if not OUTPUTS[name].logits]:
        at, gather = ((inputs.last_at, inputs.gather_last) if name in by_seq else
                      (inputs.predict_at, inputs.gather_predictions))
        outputs[name] = gather(FROM_HIDDEN[name](stage, hidden.index_select(0, at)))
    sizes = {name: inputs.sequences if name in by_seq else inputs.responses for name in outputs}
    return {name: value.split(sizes[name]) for name, value in outputs.items()}


def _scores(stage: Stage, hidden: torch.Tensor) -> torch.Tensor:
    """[n] float32: the value or score head's output."""
    return (hidden @ _needed(stage.score, "score head")[0].to(hidden.dtype)).float()


# Output.name -> how it follows from hidden states: [n, H] -> [n] float32, the same on every tp rank
FROM_HIDDEN: Mapping[str, Callable[[Stage, torch.Tensor], torch.Tensor]] = {
    "values": _scores,
    "scores": _scores,
    "end_values": _scores,
}


def _needed(weight: torch.Tensor | None, name: str) -> torch.Tensor:
    if weight is None:
        raise ValueError(f"this stage has no {name}")
    return weight
