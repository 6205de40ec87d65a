"""What a call says, whatever the stage: the fields that a node of the dataflow graph and the event made of it share.

`graph/model.py` adds where a node stands in the program, `plan/events.py` where it runs; a field of the program itself
is declared here alone. These are bases of records, and are never instantiated themselves.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

from rldsl.plan.derive_ops import DeriveOpName, OverLong
from rldsl.plan.heads import What
from rldsl.plan.references import DataName, FrameId, ModelName, ProgramId, ValueId


@dataclass(frozen=True, slots=True)
class Sampling:
    """How completions are drawn."""

    n: int = 1  # completions of each prompt
    max_new_tokens: int = 256  # per completion
    min_new_tokens: int = 0  # tokens before which no sequence ends
    temperature: float = 1.0  # divides the logits
    top_p: float = 1.0  # 1: off
    top_k: int = 0  # 0: off
    min_p: float = 0.0  # 0: off
    greedy: bool = False  # the most likely token; temperature and the filters have no effect
    stop: tuple[str, ...] = ()  # strings that end a completion

    @property
    def logprob_temperature(self) -> float:
        """The temperature at which the log-probabilities of the completions are taken."""
        return 1.0 if self.greedy else self.temperature


@dataclass(frozen=True, kw_only=True)
class FetchSpec:
    """The next batch of a data source."""

    __slots__ = ()
    data: DataName  # the source
    # what its rows become: one frame, the two sides of pairs, or the prompts and the several answers of each
    frames: tuple[FrameId, ...]
    # the frame that the batch of this step became: its rows are read again, and with them those of as many batches as
    # the frame has iterations, the newest first; "": the next batch of the source
    newest: FrameId = ""
    stride: int = 1  # with `newest`: batches of the source in a step


@dataclass(frozen=True, kw_only=True)
class DrawSpec:
    """Rows of a data source drawn by weight, without replacement, for the next batch."""

    __slots__ = ()
    data: DataName  # the source
    frame: FrameId  # the first frame that the batch becomes, which names the row numbers and the random numbers
    program: ProgramId  # the weight of one row, its output "weight", at batch level; evaluated for every row
    inputs: tuple[tuple[str, ValueId], ...]  # (program input, state): of rows, or one number
    columns: tuple[tuple[str, str], ...]  # (program input, column of numbers)


@dataclass(frozen=True, kw_only=True)
class LookupSpec:
    """The numbers that a state of rows has for the rows of a batch."""

    __slots__ = ()
    data: DataName  # the source
    frame: FrameId  # of fetched rows
    state: ValueId  # that is read
    value: ValueId  # that it makes


@dataclass(frozen=True, kw_only=True)
class UpdateSpec:
    """New numbers of a state of rows, for those rows of a batch that have a value."""

    __slots__ = ()
    data: DataName  # the source
    frame: FrameId  # of fetched rows
    state: ValueId  # that is written
    value: ValueId  # the new numbers, of the rows of `frame` or of a selection of them


# What a conversation does with its slot of the KV cache while it waits for its environment: it keeps the slot, or gives
# it to another one and gets its keys and values back, from host memory or by a prefill of all it has said.
Waiting = Literal["keep", "offload", "recompute"]
WAITING: tuple[Waiting, ...] = get_args(Waiting)


@dataclass(frozen=True, slots=True)
class Conversation:
    """What a model talks with, in turns, and how long."""

    # ids of the functions that are their classes; of several, each row of data names one in the column `env`
    environments: tuple[str, ...]
    max_turns: int  # of the model
    max_tokens: int  # of a row: what the environment says and what the model says
    turn_timeout: float  # seconds in which the environment must answer
    # what an environment that raises, dies or takes too long does: it stops the run, or ends its conversation
    on_error: Literal["stop", "end"] = "stop"
    # sequences of a conversation, at most: an agent may ask for something else than the next turn. The rows of the
    # frame that a conversation has, of which those are absent that it does not need
    branches: int = 1


ROLLOUTS = ".rollouts"  # ends the id of the frame that a generate with `per_step` makes, with what has not ended
WINDOW = f"{ROLLOUTS}.prompts"  # ends the id of the frame of its prompts, which are those of several steps


@dataclass(frozen=True, kw_only=True)
class GenerateSpec:
    """Completions of prompts."""

    __slots__ = ()
    model: ModelName  # that generates
    prompts: FrameId  # what it continues
    frame: FrameId  # the completions
    sampling: Sampling  # how tokens are drawn; of a conversation, those of one turn
    conversation: Conversation | None = None  # None: a completion is one response
    # tokens of a response in one step; the rest follows in the next steps, and the prompts are those of several steps.
    # 0: all in one step
    per_step: int = 0
    in_step: bool = False  # with a lag: it runs in its own step, as the program says of this call

    @property
    def draws_as(self) -> str:
        """The name that its random numbers are keyed by: with `per_step` a token is drawn as it would be without."""
        return self.frame.removesuffix(ROLLOUTS) if self.per_step else self.frame


@dataclass(frozen=True, kw_only=True)
class InferSpec:
    """One forward pass."""

    __slots__ = ()
    model: ModelName  # that is run
    frame: FrameId  # the sequences
    output_name: What  # the output that it computes
    value: ValueId  # that it makes
    temperature: float = 1.0  # divides the logits
    ids: ValueId = ""  # at level entry: the ids of the tokens, which `top` makes and `logprobs_at` reads
    words: int = 0  # of `top`: only tokens with smaller ids count, the vocabulary that all readers have; 0: all


@dataclass(frozen=True, kw_only=True)
class TrainSpec:
    """Optimizer steps on one batch."""

    __slots__ = ()
    model: ModelName  # that is trained
    frames: tuple[FrameId, ...]  # the sequences; two for pairs
    loss: ProgramId  # the program of the loss
    # (program input, frame, output): outputs of the trained model, computed now and differentiable
    model_outputs: tuple[tuple[str, FrameId, What], ...]
    data_inputs: tuple[tuple[str, ValueId], ...]  # (program input, value): inputs without gradient
    outputs: tuple[tuple[str, ValueId], ...]  # metric -> the value that it is written to
    ids: ValueId = ""  # the ids of the tokens whose log-probs the output `logprobs_at` has
    # (value, model) of data inputs that are whole distributions: last hidden states, and the model whose head makes
    # log-probs of them. Then the output `logprobs_at` has those of the whole vocabulary
    heads: tuple[tuple[ValueId, ModelName], ...] = ()
    rate: ValueId = ""  # a batch value, the learning rate of this call; "": that of the optimizer's schedule
    nonfinite: Literal["stop", "skip"] = "stop"  # of a minibatch whose gradient is not finite: stop the run, or skip it
    # what the loss needs of the whole minibatch at once, with its place: a pass without gradient comes before the
    # passes of each minibatch. "": each micro-batch adds its share of the loss, and no such pass is needed
    first_pass: str = ""
    # by which router biases move after each step, by the load of their experts (`plan/router_bias.py`); 0: they stay
    router_bias_update_rate: float = 0.0


@dataclass(frozen=True, kw_only=True)
class ComputeSpec:
    """A pure program over values."""

    __slots__ = ()
    program: ProgramId  # that is evaluated
    frames: tuple[FrameId, ...]  # those that its values belong to
    inputs: tuple[tuple[str, ValueId], ...]  # program input -> value
    outputs: tuple[tuple[str, ValueId], ...]  # program output -> value


@dataclass(frozen=True, kw_only=True)
class DeriveSpec:
    """A frame made from another one, and the values that come along."""

    __slots__ = ()
    op: DeriveOpName  # of `plan/derive_ops.py`
    source: FrameId  # whose rows it reads
    frame: FrameId  # that is made
    # (value of the source, the value that it becomes); of "concat" each value is made of one of each part, in order
    values: tuple[tuple[ValueId, ValueId], ...]
    key: ValueId = ""  # a seq value of the source that says which rows there are, where the operation has one
    also_reads: tuple[ValueId, ...] = ()  # what else it reads of the rows
    # of "whole": the frames whose responses are joined, one after the other; the last one is the source. Of "concat":
    # the frames whose rows are those of the new one; the first one is the source. Of "reprompt": the frame of the
    # prompts, and that of the responses, which is the source
    parts: tuple[FrameId, ...] = ()
    function: str = ""  # of "text": the id of the Python function
    # of "text": (argument, frame whose rows the function gets), in which those of the source lie; "": the row itself
    given: tuple[tuple[str, FrameId], ...] = ()
    over_long: OverLong = "error"  # of "text": what is done with more tokens than the frame's prompts may have
    # of "prefixes", one of these: after each token that completes this text; every N tokens; at these fractions
    # of the response. The empty beginning is always one, the end never
    cut_at: str = ""
    cut_every: int = 0  # of "prefixes": tokens of the response from one cut to the next; 0: none
    cut_fractions: tuple[float, ...] = ()  # of "prefixes": cuts at these fractions of the response


@dataclass(frozen=True, kw_only=True)
class StoreSpec:
    """Rows that a replay buffer keeps."""

    __slots__ = ()
    buffer: ValueId  # that rows are added to
    frame: FrameId  # whose rows are added
    values: tuple[tuple[ValueId, str], ...]  # (value of the frame, field of the buffer)


@dataclass(frozen=True, kw_only=True)
class SampleSpec:
    """Rows drawn from a replay buffer: as many as the frame has, or all where there are fewer."""

    __slots__ = ()
    buffer: ValueId  # that rows are drawn from
    frame: FrameId  # that they become
    values: tuple[tuple[str, ValueId], ...]  # (field of the buffer, value of the frame)
    # the weight of one row, its output "weight", at batch level; evaluated for every row. "": all are equally likely
    program: ProgramId = ""
    inputs: tuple[tuple[str, ValueId], ...] = ()  # (program input, state)
    fields: tuple[tuple[str, str], ...] = ()  # (program input, field of the buffer)


@dataclass(frozen=True, kw_only=True)
class CollectSpec:
    """The rows of one iteration of a loop, appended to those of the iterations before."""

    __slots__ = ()
    frame: FrameId  # of one iteration
    into: FrameId  # of all iterations: row r of iteration t, counted from 0, becomes row t * count + r
    values: tuple[tuple[ValueId, ValueId], ...]  # (value of one iteration, value of all)


DEFAULT_SAVE = "{out}/step-{step}/{model}"  # where `save` writes unless the program says where


@dataclass(frozen=True, kw_only=True)
class SaveSpec:
    """A model as a HuggingFace directory."""

    __slots__ = ()
    model: ModelName  # that is saved
    path: str  # "{out}" and "{step}" are filled in at run time


def payload(record: Any, spec: type) -> dict[str, Any]:
    """The fields of `spec` in a record that has them, to make another such record with."""
    return {f.name: getattr(record, f.name) for f in fields(spec)}
