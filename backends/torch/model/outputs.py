"""Outputs of a model (`plan/heads.py`) from the last stage's hidden states."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

import torch

from rldsl.backends.torch.model.logprobs import token_logprobs, top_logprobs
from rldsl.backends.torch.model.model_inputs import ModelInputs
from rldsl.backends.torch.model.stage import Stage
from rldsl.memory.logits import rows_at_once
from rldsl.plan.heads import LOGPROBS_AT, OUTPUTS


def model_outputs(stage: Stage, hidden: torch.Tensor, inputs: ModelInputs, names: Collection[str],
                  temperature: float) -> dict[str, tuple[torch.Tensor, ...]]:
    """hidden: [T, H] of this rank's tokens. Returns, for each name, one flat float32 tensor for each frame, over
    response tokens, the `ids` at each of them, or sequences, as the output's level says. Under context parallelism
    every rank of the cp group gets those of all."""
    outputs: dict[str, torch.Tensor] = {}
    by_seq = {name for name in names if OUTPUTS[name].level == "seq"}
    if any(OUTPUTS[name].logits for name in names):
        rows = rows_at_once(-(-stage.vocab_size // stage.head_axis.size), hidden.device.type)
        targets = inputs.targets
        if LOGPROBS_AT in names:
            targets = torch.cat((targets[:, None], _needed(inputs.ids, "ids")), 1)
        found = token_logprobs(
            hidden.index_select(0, inputs.predict_at), _needed(stage.head, "head"), targets, temperature,
            stage.head_axis, stage.vocab_start, "entropy" in names, rows, stage.vocab_cuts, "sum_squares" in names)
        by_name = found._asdict()
        if LOGPROBS_AT in names:
            by_name |= {"logprobs": found.logprobs[:, 0], LOGPROBS_AT: found.logprobs[:, 1:]}
        outputs |= {name: inputs.gather_predictions(x) for name, x in by_name.items() if name in names}
    for name in [name for name in names if not OUTPUTS[name].logits]:
        at, gather = ((inputs.last_at, inputs.gather_last) if name in by_seq else
                      (inputs.predict_at, inputs.gather_predictions))
        outputs[name] = gather(FROM_HIDDEN[name](stage, hidden.index_select(0, at)))
    sizes = {name: inputs.sequences if name in by_seq else inputs.responses for name in outputs}
    return {name: tuple(part.flatten() for part in value.split(sizes[name])) for name, value in outputs.items()}


def top_tokens(stage: Stage, hidden: torch.Tensor, inputs: ModelInputs, k: int, temperature: float,
               words: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """The k most likely tokens at each response token and their log-probs, [R, k] each (`Shard.top`)."""
    rows = rows_at_once(-(-stage.vocab_size // stage.head_axis.size), hidden.device.type)
    found = top_logprobs(hidden.index_select(0, inputs.predict_at), _needed(stage.head, "head"), k, temperature,
                         stage.head_axis, stage.vocab_start, rows, stage.vocab_cuts, words)
    ids, logprobs = (inputs.gather_predictions(x) for x in found)
    return ids, logprobs


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
