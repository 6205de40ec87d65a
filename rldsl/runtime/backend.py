"""What a backend does for the runtime: one protocol, four verbs (build, run a call, expose parameters, save).

A backend is a module `rldsl.backends.NAME` with a function `build(...)` as `Build` below. The runtime owns rows,
communication between calls, losses and metrics; the backend owns a model's shard and the communication inside a call.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from rldsl.plan.events import Part, Sampling
from rldsl.plan.model import Layout, Mesh, Model


@dataclass(frozen=True, slots=True)
class Axis:
    """One communicator of a layout as this rank sees it. ranks: global ranks in coordinate order; index: own position
    in it. group: a torch ProcessGroup, or None when there is one rank."""

    ranks: tuple[int, ...]
    index: int
    group: Any

    @property
    def size(self) -> int:
        return len(self.ranks)


ALONE = Axis((0,), 0, None)


@dataclass(frozen=True, slots=True)
class Axes:
    """The communicators of this rank under one layout. mesh: all its ranks. ep: those along dp with which it shares the
    experts of a layer; copies: those that hold the same experts."""

    dp: Axis
    tp: Axis
    pp: Axis
    cp: Axis
    mesh: Axis
    ep: Axis = ALONE
    copies: Axis = ALONE


@dataclass(frozen=True, slots=True)
class Packed:
    """Sequences of one frame, packed without padding.

    rows: [S] int64, row numbers in the frame. prompt_lens, response_lens: [S] int64. tokens: [T] int64 with
    T = sum(prompt_lens + response_lens); each sequence is its prompt followed by its response."""

    rows: torch.Tensor
    prompt_lens: torch.Tensor
    response_lens: torch.Tensor
    tokens: torch.Tensor

    def __len__(self) -> int:
        return self.rows.numel()


@dataclass(frozen=True, slots=True)
class Generated:
    """batch: the prompts with their responses (an end-of-sequence token belongs to the response). logprobs: [R] float32
    over response tokens, at the sampling temperature and before top-p/top-k. finished: [S] bool, ended by an
    end-of-sequence token or a stop string."""

    batch: Packed
    logprobs: torch.Tensor
    finished: torch.Tensor


# Micro-batch: one Packed per frame of the call, in the call's order (one, or two for pairs).
MicroBatch = tuple[Packed, ...]
# (micro-batch index, fresh outputs per frame: what -> flat tensor) -> this micro-batch's share of the loss.
LossFn = Callable[[int, Sequence[Mapping[str, torch.Tensor]]], torch.Tensor]


class Shard(Protocol):
    """One rank's part of one model under one layout."""

    def tensors(self) -> Mapping[str, torch.Tensor]:
        """Parameter name -> local tensor: the rank's boxes (`sharding/boxes.py`) joined along the split dimension.
        Writing into it changes the model."""

    def generate(self, prompts: Packed, sampling: Sampling, *, seed: int, step: int, limit: int,
                 most: int = 0) -> Generated:
        """Completions of `prompts` (response_lens 0; already repeated n times, rows numbered in the new frame). At most
        `limit` sequences at once (0: all). most: tokens of the longest prompt in any call (0: nobody knows), by which
        room is made. Every rank of the shard (all tp, all pp) returns the same result. Randomness is keyed by (seed,
        step, row, position) alone."""

    def infer(self, batches: Sequence[Packed], what: str, temperature: float) -> torch.Tensor:
        """what: "logprobs", "entropy", "values": flat [sum of response_lens] float32, aligned with response tokens
        (position t is predicted from the tokens before t); "scores": [S], taken at the last token. Micro-batches in
        order, results joined. Every rank of the shard returns the same result."""

    def train(self, minibatch: Sequence[MicroBatch], what: Sequence[Sequence[str]], temperature: float, loss: LossFn,
              stop: Callable[[], bool] | None = None, recompute: str = "none") -> Mapping[str, float] | None:
        """Forward and backward of every micro-batch, one gradient reduction (a *sum* over dp and cp: the loss already
        carries the global normalisation), clipping over all shards, one optimizer step. what: for each frame, the fresh
        outputs that the loss wants. `loss` is called on last-stage ranks only. Returns "grad_norm" (before clipping)
        and "lr", equal on all ranks. A shard may have no rows at all: it still takes part in every reduction.
        Under a layout with `zero` or `ep` all shards of dp get the same number of micro-batches, some of them without
        rows.

        stop: asked once, between the backward passes and the reduction, on every rank alike. When it says yes the
        gradient is dropped, nothing changes (no weight decay, no moments) and the result is None.

        recompute: as in `plan.Train`; it changes no number."""

    def skip(self, updates: int) -> float:
        """So many planned optimizer steps are not made: the learning-rate schedule passes over them. Returns the rate
        of the last of them."""

    def moments(self) -> Mapping[str, Mapping[str, torch.Tensor]]:
        """Of a trained shard: the optimizer's state by its name ("exp_avg"), each shaped as `tensors()`. Writing into
        it changes the optimizer."""

    def progress(self) -> Mapping[str, int]:
        """Of a trained shard: counts that the schedule and the optimizer go by, equal on all ranks."""

    def resume(self, progress: Mapping[str, int]) -> None:
        """Go on from these counts."""

    def export(self) -> Mapping[str, Any]:
        """For saving: "config" (the HuggingFace config object) and "tokenizer" (the source directory)."""

    def offload(self, what: Part) -> None:
        """Parameters, or what the optimizer has beside them, to host memory, where the device has memory of its own."""

    def onload(self, what: Part) -> Callable[[], None]:
        """Back on the device. What is issued after a call of the result finds their values."""

    def share(self, other: Shard) -> None:
        """From now on the parameters are those of another shard, which holds the same ones."""

    def release(self) -> None:
        """Give up the memory of parameters; of a shard that is not trained."""

    def claim(self) -> None:
        """Memory for parameters after `release`, without values."""


# Tensors that this rank has read and nothing writes, by what they are: shards that hold the same ones share them.
Pool = MutableMapping[Hashable, torch.Tensor]


class Build(Protocol):
    def __call__(self, model: Model, layout: Layout, mesh: Mesh, axes: Axes, device: torch.device, *, load: bool,
                 trainable: bool, pool: Pool | None = None) -> Shard:
        """load: read this rank's slices of the safetensors (else leave the parameters uninitialised: a realloc or a
        checkpoint fills them; `model.base` is read in any case). mesh: the ranks of the layout. trainable: also make
        gradients and optimizer state. pool: of this rank; None where the shard is moved between devices."""

