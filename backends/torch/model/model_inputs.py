"""Packed sequences as a model reads them: tokens, positions, and where its outputs are read.

The distribution of response token t comes from the hidden state one position before it, and so does the value of the
state in which it was chosen; a score comes from the hidden state at a sequence's last token. Under context parallelism
a rank has its part of the row, reads there, and gathers what all ranks have read.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from operator import add
from typing import cast

import torch

from rldsl.backends.torch.model.attention import PackedAttention, VarlenAttention
from rldsl.backends.torch.model.context_parallel import ContextParallelAttention, Partition
from rldsl.backends.torch.model.row_groups import RowGroups
from rldsl.backends.torch.model.sequence_parallel import PaddedAttention, SequenceParallel, pad_rows
from rldsl.backends.torch.model.shared_prompts import SharedPrompts, shared_prompts
from rldsl.backends.torch.model.token_groups import GroupedAttention, GroupedPartition
from rldsl.backends.torch.model.vision import Vision
from rldsl.diag import fail
from rldsl.runtime.backend import Axis, PackedBatch
from rldsl.runtime.image_tokens import ids_of
from rldsl.runtime.store import offsets_within, ragged_indices

# one token, for ranks without rows that must run a pass
DUMMY_BATCH = PackedBatch(torch.tensor([0]), torch.tensor([1]), torch.tensor([0]), torch.tensor([0]))


@dataclass(frozen=True, slots=True)
class ModelInputs:
    """The sequences of several frames as one packed row; under context parallelism, this rank's part of it."""

    tokens: torch.Tensor                        # [T] int64, with the numbers of images
    positions: torch.Tensor                     # [T] int64, or as `vision.py` has them: [3, T]
    attention: PackedAttention                  # which tokens see each other
    predict_at: torch.Tensor                    # [R] where the hidden states that predict response tokens are
    targets: torch.Tensor                       # [R] int64, these response tokens
    ids: torch.Tensor | None                    # [R, k] int64, other tokens whose log-probs are asked for there
    hidden: tuple[torch.Tensor, ...]            # [R, H] each, last hidden states of other models there
    last_at: torch.Tensor                       # [S] where the last token of each sequence is
    responses: tuple[int, ...]                  # response tokens of each frame, on all ranks of cp together
    sequences: tuple[int, ...]                  # sequences of each frame, on all ranks of cp together
    # how `predict_at` and `last_at` are divided over cp; None without
    predict_partition: Partition | GroupedPartition | LeavesPartition | None = None
    last_partition: Partition | GroupedPartition | LeavesPartition | None = None
    predict_groups: RowGroups = ()  # of `predict_at`, where gradients have one order of sums
    # [T] int64, where loads of experts are counted: how often whole sequences have each token; of padding 0
    copies: torch.Tensor | None = None

    def gather_predictions(self, x: torch.Tensor) -> torch.Tensor:
        """[R, ...] read at `predict_at` -> those of all ranks of cp."""
        return x if self.predict_partition is None else self.predict_partition.gather(x)

    def own_predictions(self, x: torch.Tensor) -> torch.Tensor:
        """The part of [R, ...] that belongs to this rank of cp."""
        return x if self.predict_partition is None else x[self.predict_partition.own_items]

    def gather_last(self, x: torch.Tensor) -> torch.Tensor:
        """[S, ...] read at `last_at` -> those of all ranks of cp."""
        return x if self.last_partition is None else self.last_partition.gather(x)


class LeavesPartition:
    """The partitions of several leaves, whose items are one after the other. No cp divides them."""

    def __init__(self, leaves: Sequence[GroupedPartition]):
        self.leaves = leaves
        starts = accumulate((sum(leaf.sizes) for leaf in leaves), initial=0)
        self.own_items = torch.cat([leaf.own_items + start for leaf, start in zip(leaves, starts, strict=False)])

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        """See `GroupedPartition.gather`."""
        parts = x.split([sum(leaf.sizes) for leaf in self.leaves])
        return torch.cat([leaf.gather(part) for leaf, part in zip(self.leaves, parts, strict=True)])


def in_one_row(leaves: Sequence[ModelInputs | None]) -> ModelInputs:
    """Passes of several leaves as one, whose gradients are those of the leaves, added in a tree. A power of two of
    leaves; None: one without rows. Its frames are those of all leaves, one leaf after the other. No cp divides it."""
    given = [leaf for leaf in leaves if leaf is not None]
    if len(leaves) == 1:
        return given[0]
    starts = [0, *accumulate(len(leaf.tokens) for leaf in given)]

    def each(values: Iterable[torch.Tensor]) -> torch.Tensor:
        return torch.cat([value + start for value, start in zip(values, starts, strict=False)])

    def partition(of: Iterable[object]) -> LeavesPartition:
        return LeavesPartition([cast(GroupedPartition, x) for x in of])

    none = (0,) * len(given[0].predict_groups[0])
    return ModelInputs(
        torch.cat([x.tokens for x in given]), torch.cat([x.positions for x in given], -1),
        GroupedAttention.of_leaves([None if x is None else cast(GroupedAttention, x.attention) for x in leaves]),
        each(x.predict_at for x in given), torch.cat([x.targets for x in given]),
        None if given[0].ids is None else torch.cat([x.ids for x in given if x.ids is not None]), (),
        each(x.last_at for x in given), tuple(n for x in given for n in x.responses),
        tuple(n for x in given for n in x.sequences),
        partition(x.predict_partition for x in given), partition(x.last_partition for x in given),
        [none if x is None else x.predict_groups[0] for x in leaves],
        None if given[0].copies is None else torch.cat([x.copies for x in given if x.copies is not None]))


def pack_inputs(frames: Sequence[PackedBatch], device: torch.device, cp: Axis, sequence_parallel: SequenceParallel,
                in_groups: bool = False, vision: Vision | None = None, share: bool = False, copies: bool = False
                ) -> ModelInputs:
    """This rank's part of some frames; padded where sequence parallelism needs it. in_groups: for gradients with one
    order of sums (`token_groups.py`). vision: of a model that reads images. share: a prompt that the frames say several
    sequences have may be there once (`shared_prompts.py`). copies: make `ModelInputs.copies`.
    Errors: RL0732 for an empty prompt, since nothing predicts its first response token."""
    inputs = _own_part(frames, device, cp, in_groups, share and vision is None, copies)
    count = len(inputs.tokens)
    rows = sequence_parallel.padded_rows(count)
    if rows != count:
        padded = PaddedAttention(inputs.attention, rows)
        inputs = replace(inputs, tokens=pad_rows(inputs.tokens, rows), attention=padded, positions=padded.positions,
                         copies=None if inputs.copies is None else pad_rows(inputs.copies, rows))
    if vision is None:
        return inputs
    vision.mark(inputs.attention, inputs.tokens)
    return replace(inputs, positions=vision.positions(inputs.tokens, inputs.positions))


def _own_tokens(batch: PackedBatch) -> torch.Tensor:
    """[T] bool: the response tokens."""
    if batch.own is not None:
        return batch.own
    lengths = batch.prompt_lens + batch.response_lens
    return offsets_within(lengths) >= batch.prompt_lens.repeat_interleave(lengths)


def _on_host(frames: Sequence[PackedBatch]) -> tuple[list[int], list[int]] | None:
    """Prompt and response lengths of the sequences of all frames; None if the host does not know them."""
    known = [f.on_host for f in frames if f.on_host is not None]
    if len(known) < len(frames):
        return None
    prompts, responses = ([n for lens in side for n in lens] for side in zip(*known, strict=True))
    return prompts, responses


def _shared(frames: Sequence[PackedBatch], prompts: Sequence[int], responses: Sequence[int], device: torch.device
            ) -> SharedPrompts | None:
    """The row with each prompt once, where the frames say which are the same and it pays."""
    if any(f.own is not None for f in frames):
        return None
    names = [name for f in frames for name in f.prompts or [None] * len(f)]
    return shared_prompts(names, prompts, responses, device)


def _own_part(frames: Sequence[PackedBatch], device: torch.device, cp: Axis, in_groups: bool, share: bool,
              copies: bool) -> ModelInputs:
    tokens = torch.cat([f.tokens for f in frames]).to(device)
    prompts = torch.cat([f.prompt_lens for f in frames]).to(device)
    responses = torch.cat([f.response_lens for f in frames]).to(device)
    on_host = _on_host(frames)
    if prompts.numel() and (int(prompts.min()) if on_host is None else min(on_host[0])) == 0:
        raise fail("RL0732", "a sequence has an empty prompt", help="every prompt needs at least one token")
    lengths = prompts + responses
    starts = lengths.cumsum(0) - lengths
    each = torch.ones_like(tokens) if copies else None  # every token of the whole sequences
    if any(f.own is not None for f in frames):  # the token before the first of a turn is the environment's
        predict_at = torch.cat([_own_tokens(f) for f in frames]).to(device).nonzero()[:, 0] - 1
    else:
        total = None if on_host is None else sum(on_host[1])
        predict_at = ragged_indices(starts + prompts - 1, torch.arange(len(starts), device=device), responses, total)
    targets, last_at = ids_of(tokens[predict_at + 1]), starts + lengths - 1
    given = [f.ids for f in frames if f.ids is not None]
    ids = torch.cat(given).to(device) if given else None
    hidden = tuple(torch.cat(x).to(device) for x in zip(*(f.hidden for f in frames if f.hidden), strict=True))
    sizes = tuple(int(f.response_lens.sum()) if f.on_host is None else sum(f.on_host[1]) for f in frames), tuple(
        len(f) for f in frames)
    if in_groups:
        groups = GroupedAttention(lengths, cp)
        rows, predict, last = (groups.partition, *(GroupedPartition(groups.owner[at], cp) for at in
                                                   (predict_at, last_at)))
        return ModelInputs(
            rows.pad(tokens[rows.own_items]), groups.positions, groups, predict.places(rows, predict_at),
            targets[predict.own_items], None if ids is None else ids[predict.own_items],
            tuple(x[predict.own_items] for x in hidden), last.places(rows, last_at), *sizes, predict, last,
            (tuple(predict.sizes),), None if each is None else rows.pad(each[rows.own_items]))
    shared = _shared(frames, *on_host, device) if share and cp.size == 1 and on_host is not None else None
    if shared is not None:
        return ModelInputs(tokens[shared.keep], shared.attention.positions, shared.attention, shared.predict_at,
                           targets, ids, hidden, shared.last_at, *sizes, copies=shared.copies if copies else None)
    if cp.size == 1:
        varlen = VarlenAttention(lengths, None if on_host is None else list(map(add, *on_host)))
        return ModelInputs(tokens, varlen.positions, varlen, predict_at, targets, ids, hidden, last_at, *sizes,
                           copies=each)
    attention = ContextParallelAttention(lengths, cp)
    partition = attention.partition
    predicted, ended = Partition.of(attention.owner[predict_at], cp), Partition.of(attention.owner[last_at], cp)
    return ModelInputs(
        partition.pad(tokens[partition.own_items]), attention.positions, attention,
        partition.local_index[predict_at[predicted.own_items]],
        targets[predicted.own_items], None if ids is None else ids[predicted.own_items],
        tuple(x[predicted.own_items] for x in hidden),
        partition.local_index[last_at[ended.own_items]], *sizes, predicted, ended,
        copies=None if each is None else partition.pad(each[partition.own_items]))
