"""The heads of models: one record per head, from which everything else derives.

A head decides which calls a model supports, what each call returns, what a loss can read of the model in training, and
which tensor ends the model. Compiler, verifier, memory estimate, simulator, backends and editor ask these records; how
a backend computes an output is in its own table by `Output.name` (`backends/torch/model/outputs.py`).
docs/howto/add-a-call.md adds an output.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from rldsl.plan.expr import Level

GENERATE, TRAIN = "generate", "train"  # the calls that compute no output

TOP, LOGPROBS_AT, DISTRIBUTION = "top", "logprobs_at", "distribution"  # outputs of level entry

SCORE_WEIGHT = "score.weight"  # [1, H], the last tensor of a model without output embedding, as HuggingFace names it


@dataclass(frozen=True, slots=True)
class Output:
    """One kind of output of a forward pass."""

    call: str  # the call that computes it: "score"
    name: str  # its name in a loss, in the plan and in a backend: "scores"
    # token: one per token of the response, entry: several per token, seq: one per sequence, read at its last token
    level: Level
    reads: Literal["hidden", "token", "distribution"]  # last hidden states; or logits: of the tokens drawn, or all
    meaning: str  # for editors
    in_loss: bool = True  # whether a loss can have it as an output of the model in training

    @property
    def logits(self) -> bool:
        """Whether it needs logits. They depend on the sampling temperature, and their memory counts."""
        return self.reads != "hidden"


@dataclass(frozen=True, slots=True)
class Head:
    """What a model can do."""

    name: str  # its constructor in the language, and `Model.head_name` in a plan
    meaning: str  # for editors
    outputs: tuple[Output, ...]  # the main one first: a loss on pairs reads it under other names
    vocabulary: bool  # ends in the output embedding (a CausalLM), else in SCORE_WEIGHT (a SequenceClassification)
    generates: bool = False  # supports `generate`
    needs_trained_head: bool = False  # a frozen one whose directory lacks SCORE_WEIGHT is an error; else it starts at 0

    @property
    def calls(self) -> tuple[str, ...]:
        """The calls that it supports; `train` needs an optimizer besides."""
        return (*((GENERATE,) if self.generates else ()), *(o.call for o in self.outputs), TRAIN)

    @property
    def main(self) -> Output:
        return self.outputs[0]

    def output_of(self, call: str) -> Output:
        """The output that `call` computes. Errors: KeyError, if it has no such call."""
        return {o.call: o for o in self.outputs}[call]


_HEADS = (
    Head("causal_lm", "A language model from a HuggingFace directory.", (
        Output("logprobs", "logprobs", "token", "token", "log-probabilities of the responses, at the sampling "
               "temperature"),
        Output("entropy", "entropy", "token", "distribution", "the entropy of the model's distribution at each token"),
        Output("sum_squares", "sum_squares", "token", "distribution", "the sum of the squared probabilities of all "
               "tokens at each token"),
        Output(LOGPROBS_AT, LOGPROBS_AT, "entry", "token", "log-probabilities of given tokens at each token"),
        Output(TOP, TOP, "entry", "distribution", "the most likely tokens at each token, with their "
               "log-probabilities", in_loss=False),
        Output(DISTRIBUTION, DISTRIBUTION, "entry", "hidden", "the whole distribution at each token, for losses",
               in_loss=False),
    ), vocabulary=True, generates=True),
    Head("value_model", "A model with one value per token.", (
        Output("values", "values", "token", "hidden", "the value of the state before each token"),
        Output("value_end", "end_values", "seq", "hidden", "the value of the state after the last token"),
    ), vocabulary=False),
    Head("reward_model", "A model with one score per sequence.", (
        Output("score", "scores", "seq", "hidden", "the reward model's score at the last token"),
    ), vocabulary=False, needs_trained_head=True),
)
HEADS: Mapping[str, Head] = {h.name: h for h in _HEADS}
OUTPUTS: Mapping[str, Output] = {o.name: o for h in _HEADS for o in h.outputs}
INFERENCE_CALLS = tuple(dict.fromkeys(o.call for o in OUTPUTS.values()))
CALLS = tuple(dict.fromkeys(call for h in _HEADS for call in h.calls))


def heads_with(call: str) -> tuple[str, ...]:
    """The heads that support a call."""
    return tuple(h.name for h in _HEADS if call in h.calls)


if TYPE_CHECKING:
    HeadName = str
    What = str
else:  # for the codec, which refuses any other name in a plan file
    HeadName = Literal[tuple(HEADS)]
    What = Literal[tuple(OUTPUTS)]

STOP = "stop"  # the output of a loss's program that is true where training ends
SKIPPED = "skipped"  # the metric of a train call that may skip minibatches: how many it skipped
UPDATES = "updates"  # the metric of a train call that may end early: how many optimizer steps it made
