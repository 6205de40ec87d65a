"""What the runtime asks of a backend: `Build` makes a `Shard`, which runs calls, moves, and exposes its parameters.

A backend is a package (`plan/backends.py` says which) with a function `build(...)` that has the signature of `Build`
below. The runtime owns rows, communication between calls, losses and metrics; the backend owns a model's shard and the
communication inside a call.

Symbols in shapes: S sequences, T tokens, R response tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch

from rldsl.plan.events import CopyPart, Sampling
from rldsl.plan.model import Layout, Mesh, Model
from rldsl.plan.payloads import Conversation, Waiting
from rldsl.runtime.environments import Arrival, Stopped


@dataclass(frozen=True, slots=True)
class Axis:
    """One communicator of a layout as this rank sees it."""

    ranks: tuple[int, ...]  # global ranks, in coordinate order
    index: int              # this rank's position in `ranks`
    group: Any              # the torch ProcessGroup; None when there is only one rank

    @property
    def size(self) -> int:
        return len(self.ranks)


SINGLE_RANK = Axis((0,), 0, None)


@dataclass(frozen=True, slots=True)
class Axes:
    """The communicators of this rank under one layout."""

    dp: Axis    # data parallel
    tp: Axis    # tensor parallel
    pp: Axis    # pipeline parallel
    cp: Axis    # context parallel
    mesh: Axis  # all ranks of the layout
    ep: Axis = SINGLE_RANK      # expert parallel: ranks along dp that divide the experts of a layer among themselves
    expert_dp: Axis = SINGLE_RANK  # expert data parallel: ranks along dp that hold the same experts

    @property
    def talks(self) -> bool:
        """Whether this rank is the one of its shard that talks with environments: it is among the first to know what is
        sampled."""
        return self.tp.index == 0 and self.pp.index == self.pp.size - 1


@dataclass(frozen=True, slots=True)
class PackedBatch:
    """Sequences of one frame, packed without padding."""

    rows: torch.Tensor           # [S] int64, row numbers in the frame
    prompt_lens: torch.Tensor    # [S] int64, tokens
    response_lens: torch.Tensor  # [S] int64, tokens
    # [T] int64, T = sum(prompt_lens + response_lens); each prompt precedes its response. Those of images carry the
    # numbers of their images (`runtime/image_tokens.py`)
    tokens: torch.Tensor
    # [T] bool, of conversations: which tokens are responses. Pieces of prompt and response alternate, the prompt first.
    # None: each prompt precedes its response
    own: torch.Tensor | None = None
    ids: torch.Tensor | None = None  # [R, k] int64: the tokens whose log-probs are asked for at each response token
    # [R, H] float32 each: last hidden states of other models, to compare the whole vocabulary with; see `train`
    hidden: tuple[torch.Tensor, ...] = ()
    # `prompt_lens` and `response_lens` where the host knows them, so that nobody has to read them from the device
    on_host: tuple[Sequence[int], Sequence[int]] | None = None
    # [S] names of the prompts: sequences of a micro-batch with the same name and prompts of one length have the same
    # prompt, also those of two frames. None: the caller knows none
    prompts: Sequence[Hashable] | None = None

    def __len__(self) -> int:
        return self.rows.numel()


@dataclass(frozen=True, slots=True)
class GenerationOutput:
    """Completions."""

    batch: PackedBatch      # the prompts with their responses; an end-of-sequence token belongs to the response
    logprobs: torch.Tensor  # [R] float32, at the sampling temperature and before top-k, top-p and min-p
    finished: torch.Tensor  # [S] bool, whether an end-of-sequence token or a stop string ended the response
    cache: Any = None  # with `keep_cache`: keys and values of the sequences, in the backend's own form
    num_prefilled: int = 0  # tokens of prompts that this rank ran through its part of the model


class Talk(Protocol):
    """The environments of one generate call, as a backend sees them: one conversation for each row."""

    def begin(self, row: int) -> None:
        """Begin the conversation of a row; its first arrival holds the first context."""

    def said(self, row: int, ids: Sequence[int], ended_by_limit: bool, logprobs: Sequence[float]) -> None:
        """See `Conversations`, also for the methods below."""

    def finish(self, row: int, why: Stopped) -> None: ...

    def arrivals(self, wait: bool) -> Sequence[Arrival]: ...


@dataclass(frozen=True, slots=True)
class ConversationOutput:
    """Conversations that have ended."""

    batch: PackedBatch  # what was said, with `own`
    logprobs: torch.Tensor  # [R] float32, as of a `GenerationOutput`
    rewards: torch.Tensor  # [S] float32, as the environments gave them
    turns: torch.Tensor  # [S] int64: turns of the model
    turn_sizes: torch.Tensor  # [S, max_turns] int64: tokens of each turn of the model, 0 after the last one
    turn_rewards: torch.Tensor  # [S, max_turns] float32: 0 where the environment gave none
    stopped: torch.Tensor  # [S] int64: what ended a conversation, if not itself (`plan/turns.py`)
    waited: float = 0.0  # seconds that conversations waited for their environments, as this rank saw it
    lasted: float = 0.0  # seconds from their beginnings to their ends
    given_away: int = 0  # how often one gave its slot away while it waited


class Prefix(NamedTuple):
    """Where keys and values of prompts lie: in what an earlier call of this shard kept."""

    cache: Any               # `GenerationOutput.cache` of that call
    sequences: torch.Tensor  # [S] int64: for each prompt the sequence of that call of which it is a prefix, or all


# One PackedBatch for each frame of the call, in the call's order (one frame, or two for preference pairs).
MicroBatch = tuple[PackedBatch, ...]


class VocabularyReduction(Protocol):
    """What arithmetic over a whole vocabulary needs of a backend, which may divide it. Both are differentiable."""

    def __call__(self, op: str, x: torch.Tensor) -> torch.Tensor:
        """[C, V_local] -> [C], over the whole vocabulary. op: "sum", "mean", "amax", "amin" or "count"."""

    def entries(self, x: torch.Tensor) -> torch.Tensor:
        """[C] -> [C, 1], to compute with [C, V_local]."""


# (log-probs of the model in training [C, V_local], those of each other model, numbers of each token [C] or of all [],
# reduction) -> results [C], for a few tokens at once.
VocabularyTerms = Callable[[torch.Tensor, Sequence[torch.Tensor], Sequence[torch.Tensor], VocabularyReduction],
                           tuple[torch.Tensor, ...]]
# (arithmetic, numbers of each token [R] or of all []) -> its results [R], with gradient.
OverVocabulary = Callable[[VocabularyTerms, Sequence[torch.Tensor]], tuple[torch.Tensor, ...]]
# (micro-batch index, outputs of each frame: name -> flat tensor; "logprobs_at" over the whole vocabulary: what computes
# with it) -> the micro-batch's share of the loss, a scalar.
LossFn = Callable[[int, Sequence[Mapping[str, Any]]], torch.Tensor]


class FirstPass(NamedTuple):
    """What comes before the passes of a minibatch whose loss needs all of it at once."""

    see: Callable[[int, Sequence[Mapping[str, Any]]], None]  # of each micro-batch with rows: as a `LossFn`
    end: Callable[[], None]  # after the last one; it communicates over dp


class WeightDigest(NamedTuple):
    """What a shard has read of one weight file."""

    file: str  # name of the weight file
    # names it in a message
    what: str
    # digest of the bytes that were read
    content: bytes
    # digest of which slices these are; ranks with equal ones have read the same (empty: all ranks that open the file)
    slices: bytes = b""


class Shard(Protocol):
    """One rank's part of one model under one layout."""

    def weight_digests(self) -> Iterable[WeightDigest]:
        """The digests of the files that the shard was filled from, which ranks compare; none where the backend does not
        read them itself."""

    def state_dict(self) -> Mapping[str, torch.Tensor]:
        """Parameter name -> local tensor: this rank's boxes (`sharding/boxes.py`), joined along the split dimension.
        Writing into a tensor changes the model."""

    def generate(self, prompts: PackedBatch, sampling: Sampling, *, seed: int, step: int, max_num_seqs: int,
                 max_prompt_len: int = 0, max_prompts: int = 0, continues: bool = False, keep_cache: bool = False,
                 prefix: Prefix | None = None) -> GenerationOutput:
        """Completions of `prompts`, the same on every rank of the shard (all tp, all pp). Random numbers depend only on
        (seed, step, row, position).

        prompts: already repeated n times, with rows numbered in the new frame. response_lens: tokens of each response
            that earlier calls sampled: they are run with the prompt, positions and `min_new_tokens` count them, and the
            completions, of up to max_new_tokens, follow them.
        max_num_seqs: the most sequences that decode at the same time (0: all).
        max_prompt_len: tokens of the longest prompt of any call, which sizes the KV cache (0: unknown).
        max_prompts: the most prompts of any call, where their number varies (0: it does not).
        continues: the prompts are sequences with responses. One that ends with an end-of-sequence token is complete:
            its completion is empty, and finished.
        keep_cache: the output has the keys and values of all sequences, for `prefix` of a later call.
        prefix: the prompts are (prefixes of) sequences of an earlier call, after which the parameters have not
            changed: only the last token of each prompt is run."""

    def converse(self, rows: torch.Tensor, sampling: Sampling, limits: Conversation, talk: Talk | None, *, seed: int,
                 step: int, max_num_seqs: int, waiting: Waiting = "keep") -> ConversationOutput:
        """Conversations, the same on every rank of the shard. Random numbers depend only on (seed, step, conversation,
        position among the model's own tokens in it), so that the order in which environments answer decides nothing
        that is sampled.

        rows: [S] int64, ascending: the numbers of the conversations. The rows of the result are those of their
        branches that exist, by number: branch j of conversation i is row i * limits.branches + j.
        sampling: of one turn. max_num_seqs: the most slots of the KV cache (0: one for each). waiting: what a slot does
        while its environment works. talk: on the rank of the shard for which `Axes.talks` is true, None on the others.
        Only backends whose description says so are asked."""

    def infer(self, batches: Sequence[PackedBatch], output: str, temperature: float) -> torch.Tensor:
        """One output of the model for all micro-batches, joined in order; the same on every rank of the shard.

        output: "logprobs", "entropy", "sum_squares" or "values": [R] float32, aligned with response tokens (the one at
        position t is predicted from the tokens before t); "scores" or "end_values": [S] float32, read at the last
        token; "logprobs_at": [R * k] float32, of the `ids` of the batches; "distribution": [R * H] float32, the last
        hidden states, from which a head makes the distributions.
        Under a layout with `ep` all shards that share experts get the same number of batches, some of them without
        rows."""

    def top(self, batches: Sequence[PackedBatch], k: int, temperature: float, words: int = 0
            ) -> tuple[torch.Tensor, torch.Tensor]:
        """The k most likely tokens at each response token, the most likely first and of equal ones the smaller id, and
        their log-probs: [R, k] int64 and [R, k] float32. words: only tokens with smaller ids are looked at (0: all).
        Otherwise as `infer`."""

    def train(self, minibatch: Sequence[MicroBatch], outputs: Sequence[Sequence[str]], temperature: float,
              loss_fn: LossFn, should_stop: Callable[[], bool] | None = None, recompute: str = "none",
              rate: float | None = None, heads: Sequence[Shard] = (), leaves: Sequence[int] = (), joined: int = 1,
              first_pass: FirstPass | None = None, router_bias_update_rate: float = 0.0
              ) -> Mapping[str, float] | None:
        """Forward and backward passes of every micro-batch, one gradient reduction (a *sum* over dp and cp: the loss
        already carries the global normalization), clipping over all shards, one optimizer step.

        A shard without any rows still takes part in every reduction. Under a layout with `zero` or `ep` all shards of
        dp get the same number of micro-batches, some of them without rows.

        outputs: for each frame, the model outputs that the loss reads (named as in `infer`).
        loss_fn: called on last-stage ranks only.
        should_stop: called once, between the backward passes and the reduction, on every rank. When it returns True the
            gradient is dropped, nothing changes (no weight decay, no moments), and the result is None.
        recompute: as in `plan.events.Train`; it changes no number.
        rate: the learning rate, before the scales of groups; None: that of the schedule.
        heads: shards of other models on the same ranks under the same degrees, one for each of `PackedBatch.hidden`:
            then the output "logprobs_at" is an `OverVocabulary`, whose arithmetic gets their log-probs, too.
        leaves: of a model with `invariant_training`, how many micro-batches each of this shard's leaves has, one leaf
            after the other. Gradients of a leaf are added in order, and leaves in a binary tree, those of the shard
            first and then those of all shards of dp (`sharding/gradient_leaves.py`).
        joined: how many leaves in a row may be computed as one pass, which changes no number; then each has one
            micro-batch at most. A shard may compute them apart.
        first_pass: forward passes of all micro-batches without gradient come first; on last-stage ranks it gets their
            outputs. Only backends whose description says so are asked.
        router_bias_update_rate: after the optimizer step, move router biases by it (`plan/router_bias.py`): up where an
            expert was chosen for fewer tokens of the minibatch than the mean of its layer, down where for more. A load
            counts the tokens of all rows, whatever passes they are computed in. 0: they stay. Only backends whose
            description says so are asked.
        Returns "grad_norm" (before clipping) and "lr", equal on all ranks. If "grad_norm" is not finite, nothing was
            updated, and the schedule has not advanced."""

    def skip_updates(self, updates: int) -> float:
        """Let the learning-rate schedule pass over planned optimizer steps that are not taken. Returns the learning
        rate of the last one."""

    def optimizer_state(self) -> Mapping[str, Mapping[str, torch.Tensor]]:
        """The optimizer's state of a trained shard: its name ("exp_avg") -> parameter name -> tensor, shaped as in
        `state_dict()`; but what `plan.optimizers.COMPLETE_STATE` names is about the complete parameter, and equal on
        all ranks that have a part of it. A parameter may lack some kinds. Writing into a tensor changes the
        optimizer."""

    def schedule_state(self) -> Mapping[str, int]:
        """The step counts of a trained shard's schedule and optimizer, equal on all ranks; checkpoints hold them."""

    def load_schedule_state(self, counts: Mapping[str, int]) -> None:
        """Resume from the counts that `schedule_state` returned."""

    def export(self) -> Mapping[str, Any]:
        """What saving needs besides parameters: "config" (the HuggingFace config object) and "tokenizer" (the source
        directory)."""

    def offload(self, part: CopyPart) -> None:
        """Move parameters, or optimizer state and gradients, to host memory where the device has its own memory."""

    def onload(self, part: CopyPart) -> Callable[[], None]:
        """Start the copy back to the device. Kernels that are launched after the returned function is called see the
        values."""

    def alias(self, other: Shard) -> None:
        """Use the parameters of another shard, which holds the same ones, from now on."""

    def free(self) -> None:
        """Free the memory of the parameters of a shard that is not trained."""

    def allocate(self) -> None:
        """Allocate memory for parameters after `free`; their values are undefined."""


class Images(Protocol):
    """The images of a run as one model reads them, by their numbers (`runtime/image_tokens.py`)."""

    def grid(self, number: int) -> tuple[int, int] | None:
        """Rows and columns of the image's tokens, where the positions of the model count them."""

    def inputs(self, numbers: Sequence[int]) -> Mapping[str, torch.Tensor]:
        """What the vision tower reads of some images, in this order; on the CPU."""


# Read-only tensors that this rank has loaded, by what they are: shards that hold the same ones share them.
WeightCache = MutableMapping[Hashable, torch.Tensor]


class Build(Protocol):
    def __call__(self, model: Model, layout: Layout, mesh: Mesh, axes: Axes, device: torch.device, *, load: bool,
                 trainable: bool, weight_cache: WeightCache | None = None, images: Images | None = None) -> Shard:
        """This rank's shard.

        mesh: the ranks of the layout.
        load: read this rank's slices of the safetensors files; otherwise parameters stay uninitialized until a
            reallocation or a checkpoint fills them. `model.base` is read in any case.
        trainable: also make gradients and optimizer state.
        weight_cache: this rank's; None where the shard moves between devices.
        images: of a model that reads them. Each rank reads those that it needs itself."""
