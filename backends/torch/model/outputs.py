"""Outputs of a model (`plan/heads.py`) from the last stage's hidden states."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch

from rldsl.backends.torch.model.logprobs import token_logprobs, top_logprobs
from rldsl.backends.torch.model.model_inputs import ModelInputs
from rldsl.backends.torch.model.over_vocabulary import Readout, over_vocabulary
from rldsl.backends.torch.model.stage import Stage
from rldsl.memory.logits import rows_at_once, vocabulary_rows_at_once
from rldsl.plan.heads import LOGPROBS_AT, OUTPUTS
from rldsl.runtime.backend import OverVocabulary, VocabularyTerms


def model_outputs(stage: Stage, hidden: torch.Tensor, inputs: ModelInputs, names: Collection[str],
                  temperature: float, heads: Sequence[Stage] = ()) -> dict[str, tuple[Any, ...]]:
    """hidden: [T, H] of this rank's tokens. Returns, for each name, one flat float32 tensor for each frame, over
    response tokens, the `ids` at each of them, or sequences, as the output's level says. Under context parallelism
    every rank of the cp group gets those of all. heads: as of `Shard.train`."""
    outputs: dict[str, torch.Tensor] = {}
    by_seq = {name for name in names if OUTPUTS[name].level == "seq"}
    whole: dict[str, tuple[Any, ...]] = {}
    if heads and LOGPROBS_AT in names:
        whole[LOGPROBS_AT] = (_over_vocabulary(stage, hidden, inputs, temperature, heads),)
        names = [name for name in names if name != LOGPROBS_AT]
    if any(OUTPUTS[name].logits for name in names):
        ranks = 1 if stage.ordered_gradients else stage.head_axis.size  # as many rows under every tp
        rows = rows_at_once(-(-stage.vocab_size // ranks), hidden.device.type)
        targets = inputs.targets
        if LOGPROBS_AT in names:
            targets = torch.cat((targets[:, None], _needed(inputs.ids, "ids")), 1)
        found = token_logprobs(
            hidden.index_select(0, inputs.predict_at), _needed(stage.head, "head"), targets, temperature,
            stage.head_axis, stage.vocab_start, "entropy" in names, rows, stage.vocab_cuts, "sum_squares" in names,
            stage.logit_cap, inputs.predict_groups)
        by_name = found._asdict()
        if LOGPROBS_AT in names:
            by_name |= {"logprobs": found.logprobs[:, 0], LOGPROBS_AT: found.logprobs[:, 1:]}
        outputs |= {name: inputs.gather_predictions(x) for name, x in by_name.items() if name in names}
    for name in [name for name in names if not OUTPUTS[name].logits]:
        at, gather = ((inputs.last_at, inputs.gather_last) if name in by_seq else
                      (inputs.predict_at, inputs.gather_predictions))
        if inputs.predict_groups:  # of all tokens, whose groups are known
            found_of_all = stage.current.inside(inputs.attention, FROM_HIDDEN[name], stage, hidden)
            outputs[name] = gather(found_of_all.index_select(0, at))
        else:
            outputs[name] = gather(FROM_HIDDEN[name](stage, hidden.index_select(0, at)))
    sizes = {name: inputs.sequences if name in by_seq else inputs.responses for name in outputs}
    return whole | {name: tuple(part.flatten() for part in value.split(sizes[name])) for name, value in outputs.items()}


def _over_vocabulary(stage: Stage, hidden: torch.Tensor, inputs: ModelInputs, temperature: float,
                     heads: Sequence[Stage]) -> OverVocabulary:
    """What computes with the distributions of the model and of others, whose heads are divided alike."""
    student = Readout(hidden.index_select(0, inputs.predict_at), _needed(stage.head, "head"),
                      stage.logit_cap)
    teachers = [Readout(x.to(other.matmul_dtype), _needed(other.head, "head"), other.logit_cap)
                for other, x in zip(heads, inputs.hidden, strict=True)]
    if any((len(t.weight), other.vocab_start) != (len(student.weight), stage.vocab_start)
           for t, other in zip(teachers, heads, strict=True)):
        raise ValueError("the heads of the models are not divided alike")
    rows = vocabulary_rows_at_once(-(-stage.vocab_size // stage.head_axis.size), len(student.hidden),
                                   hidden.device.type)

    def over(terms: VocabularyTerms, given: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        own = [inputs.own_predictions(x) if x.dim() else x for x in given]
        found = over_vocabulary(student, teachers, terms, own, temperature, stage.head_axis, rows)
        return tuple(map(inputs.gather_predictions, found))

    return over


def top_tokens(stage: Stage, hidden: torch.Tensor, inputs: ModelInputs, k: int, temperature: float,
               words: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """The k most likely tokens at each response token and their log-probs, [R, k] each (`Shard.top`)."""
    rows = rows_at_once(-(-stage.vocab_size // stage.head_axis.size), hidden.device.type)
    found = top_logprobs(hidden.index_select(0, inputs.predict_at), _needed(stage.head, "head"), k, temperature,
                         stage.head_axis, stage.vocab_start, rows, stage.vocab_cuts, words, stage.logit_cap)
    ids, logprobs = (inputs.gather_predictions(x) for x in found)
    return ids, logprobs


def _hidden(stage: Stage, hidden: torch.Tensor) -> torch.Tensor:
    return hidden.float()


def _scores(stage: Stage, hidden: torch.Tensor) -> torch.Tensor:
    """[n] float32: the value or score head's output."""
    score = _needed(stage.score, "score head")[0]
    # products of an ordered model cast, so that its gradient is not rounded where several leaves are summed
    return (hidden @ (score if stage.ordered_gradients else score.to(hidden.dtype))).float()


# Output.name -> how it follows from hidden states: [n, H] -> [n] or [n, ...] float32, the same on every tp rank
FROM_HIDDEN: Mapping[str, Callable[[Stage, torch.Tensor], torch.Tensor]] = {
    "values": _scores,
    "scores": _scores,
    "end_values": _scores,
    "distribution": _hidden,
}


def _needed(weight: torch.Tensor | None, name: str) -> torch.Tensor:
    if weight is None:
        raise ValueError(f"this stage has no {name}")
    return weight
