"""Sequences with the same prompt in one packed row that has this prompt once.

In: which sequences of a micro-batch have the same prompt. Out: `SharedPrompts`: a row of all distinct prompts, followed
by all responses, and where in it everything is that was in the row of whole sequences. What is computed token by token
(projections, norms, feed-forward layers, and their gradients) is computed once for a prompt; `SharedPromptAttention`
lets a response see its prompt and itself. The gradient of a prompt is the sum over its responses.

Invariants: only numbers that the host knows decide what is shared, so all ranks of tp and pp decide alike and nobody
waits for a device; a token's keys and positions are those of its own sequence, so results differ by rounding alone.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from operator import add
from typing import Any

import torch
import torch.nn.functional as F

from rldsl.backends.torch.kernels import cpu_attention
from rldsl.backends.torch.kernels.attention_kernels import varlen_attention
from rldsl.backends.torch.kernels.autograd import Function
from rldsl.backends.torch.kernels.length_buckets import LengthBuckets
from rldsl.backends.torch.model.attention import (
    Scores,
    VarlenAttention,
    masked_attention,
    uses_compiled_kernel,
    uses_varlen_kernel,
)
from rldsl.backends.torch.model.sequences import DividedSequences
from rldsl.plan.prompt_sources import pays
from rldsl.runtime.host_numbers import on_device
from rldsl.runtime.store import offsets_within, ragged_indices


class SharedPrompts:
    """The row with each prompt once. T tokens, G prompts, S sequences, R response tokens."""

    keep: torch.Tensor        # [T] int64: the token of the row of whole sequences that each one is
    copies: torch.Tensor      # [T] int64: how often the row of whole sequences has each one
    predict_at: torch.Tensor  # [R] where the hidden states that predict response tokens are
    last_at: torch.Tensor     # [S] where the last token of each sequence is
    attention: SharedPromptAttention

    def __init__(self, of: Sequence[int], prompts: Sequence[int], responses: Sequence[int], device: torch.device):
        """of: [S] the number of each sequence's prompt, counted as they come. prompts, responses: [S] tokens."""
        first: list[int] = []  # the first sequence of each prompt
        for i, g in enumerate(of):
            first += [i] if g == len(first) else []
        lens = [prompts[i] for i in first]
        before = list(accumulate(map(add, prompts, responses), initial=0))
        ends = list(accumulate(lens))
        response_starts = list(accumulate(responses, initial=ends[-1]))[:-1]
        behind = [ends[g] - 1 for g in of]  # the last token of each sequence's prompt
        total = sum(responses)
        prompt_lens, response_lens = on_device(lens, device), on_device(responses, device)
        within = offsets_within(response_lens, total)
        sequence = torch.arange(len(of), device=device)
        self.keep = torch.cat([
            ragged_indices(on_device([before[i] for i in first], device), torch.arange(len(lens), device=device),
                           prompt_lens, sum(lens)),
            ragged_indices(on_device([b + p for b, p in zip(before, prompts, strict=False)], device), sequence,
                           response_lens, total)])

        def of_token(numbers: Sequence[int]) -> torch.Tensor:
            return on_device(numbers, device).repeat_interleave(response_lens, output_size=total)

        shared = [0] * len(first)
        for g in of:
            shared[g] += 1
        self.copies = torch.cat([on_device(shared, device).repeat_interleave(prompt_lens, output_size=sum(lens)),
                                 response_lens.new_ones(total)])
        self.predict_at = torch.where(within == 0, of_token(behind), of_token(response_starts) + within - 1)
        self.last_at = on_device([start + n - 1 if n else at for start, n, at in
                                  zip(response_starts, responses, behind, strict=True)], device)
        positions = torch.cat([offsets_within(prompt_lens, sum(lens)), of_token(prompts) + within])
        self.attention = SharedPromptAttention(Lengths(tuple(of), tuple(lens), tuple(responses)), positions)


def shared_prompts(names: Sequence[Hashable | None], prompts: Sequence[int], responses: Sequence[int],
                   device: torch.device) -> SharedPrompts | None:
    """None where sharing does not pay. names: [S] as of `PackedBatch.prompts`, None where there is none. prompts,
    responses: [S] tokens."""
    numbers: dict[Hashable, int] = {}
    of = [numbers.setdefault((i,) if name is None else (name, size), len(numbers))
          for i, (name, size) in enumerate(zip(names, prompts, strict=True))]
    saved = sum(prompts) - sum(dict(zip(of, prompts, strict=True)).values())
    return SharedPrompts(of, prompts, responses, device) if pays(saved, sum(prompts) + sum(responses)) else None


@dataclass(frozen=True, slots=True)
class Lengths:
    """Of prompts and responses, on the host."""

    of: tuple[int, ...]         # [S] the number of each sequence's prompt
    prompts: tuple[int, ...]    # [G] tokens
    responses: tuple[int, ...]  # [S] tokens


class SharedPromptAttention(DividedSequences):
    """Causal attention inside each of G prompts and of S sequences, of which the row has the responses alone."""

    def __init__(self, lengths: Lengths, positions: torch.Tensor):
        """positions: [T] int64, of tokens in their sequences."""
        self.lengths, self.positions, self.device = lengths, positions, positions.device
        self.answered = [i for i, n in enumerate(lengths.responses) if n]  # the others ask for nothing
        self.prompt_tokens = sum(lengths.prompts)

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scores: Scores) -> torch.Tensor:
        """See `PackedAttention.attend`."""
        if uses_compiled_kernel(q, k, v, scores):
            return cpu_attention.attend(q, k, v, self._segments, scores.scale, scores.window)
        if uses_varlen_kernel(q, v, scores):
            keys, offsets, longest = self._packed
            q, k, v = (x.transpose(0, 1) for x in (q, k, v))
            return varlen_attention(q, keys.repeat(k), keys.repeat(v), offsets, longest, scores.scale, scores.window)
        sizes = [self.prompt_tokens, q.shape[1] - self.prompt_tokens]
        of_prompts, of_responses = q.split(sizes, 1)
        first = self._prompts.attend(layer, of_prompts, k[:, : sizes[0]], v[:, : sizes[0]], scores)
        if not self.answered:
            return first
        buckets, masks = self._padded.buckets, self._padded.masks(scores, q.dtype)
        repeated = (self._padded.repeat(x.transpose(0, 1)) for x in (k, v))
        rows = zip(buckets.pad(of_responses.transpose(0, 1)), *repeated, masks, strict=True)
        return torch.cat([first, buckets.unpad([
            masked_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), mask, scores).transpose(1, 2)
            for q, k, v, mask in rows])])

    @cached_property
    def _segments(self) -> cpu_attention.Segments:
        """A group for each prompt: the prompt, and every response to it."""
        prompts, responses = self.lengths.prompts, self.lengths.responses
        starts = list(accumulate(prompts, initial=0))
        response_starts = list(accumulate(responses, initial=starts[-1]))
        groups = [[(starts[g], size, 0, 0)] for g, size in enumerate(prompts)]
        for i in self.answered:
            g = self.lengths.of[i]
            groups[g].append((response_starts[i], responses[i], starts[g], prompts[g]))
        return cpu_attention.Segments.of(groups)

    @cached_property
    def _prompts(self) -> VarlenAttention:
        """Attention inside prompts."""
        return VarlenAttention(on_device(self.lengths.prompts, self.device), self.lengths.prompts)

    @cached_property
    def _padded(self) -> PaddedResponses:
        return PaddedResponses(self.lengths, self.device)

    @cached_property
    def _packed(self) -> tuple[RepeatedPrompts, tuple[torch.Tensor, torch.Tensor], tuple[int, int]]:
        """Keys of all prompts, then of each response that has tokens after those of its prompt; the offsets of
        queries and of keys; the longest of both."""
        of, prompts, responses = self.lengths.of, self.lengths.prompts, self.lengths.responses
        queries = [*prompts, *(responses[i] for i in self.answered)]
        keys = [*prompts, *(prompts[of[i]] + responses[i] for i in self.answered)]
        offsets = tuple(F.pad(on_device(x, self.device).cumsum(0), (1, 0)).to(torch.int32) for x in (queries, keys))
        runs = [Run(g, -1, size) for g, size in enumerate(prompts)]
        runs += [run for i in self.answered for run in (Run(of[i], -1, prompts[of[i]]), Run(of[i], i, responses[i]))]
        return RepeatedPrompts(self.lengths, runs, self.device), (offsets[0], offsets[1]), (max(queries), max(keys))


class PaddedResponses:
    """The responses of a row in buckets of nearly equal lengths, each with the keys of its prompt before its own. Keys
    of a bucket: [sequences, longest prompt + longest response]."""

    def __init__(self, lengths: Lengths, device: torch.device):
        self.of_row = [lengths.prompts[g] for g in lengths.of]
        self.responses, self.device = lengths.responses, device
        self.buckets = LengthBuckets(on_device(lengths.responses, device), lengths.responses, self.of_row)
        self.widths = [max(self.of_row[i] for i in run) for run in self.buckets.runs]
        runs = [each for run, width, (_, longest) in zip(self.buckets.runs, self.widths, self.buckets.shapes,
                                                         strict=True)
                for i in run for each in (Run(lengths.of[i], -1, width), Run(lengths.of[i], i, longest))]
        self.repeated = RepeatedPrompts(lengths, runs, device)
        self._masks: dict[Any, list[torch.Tensor]] = {}

    def repeat(self, x: torch.Tensor) -> list[torch.Tensor]:
        """[T, heads, D] -> [sequences, longest prompt + longest response, heads, D] of each bucket."""
        cells = self.repeated.repeat(x)
        sizes = [(count, before + longest) for (count, longest), before in zip(self.buckets.shapes, self.widths,
                                                                                strict=True)]
        parts = cells.split([count * width for count, width in sizes])
        return [part.unflatten(0, size) for part, size in zip(parts, sizes, strict=True)]

    def masks(self, scores: Scores, dtype: torch.dtype) -> list[torch.Tensor]:
        """[T, L] or [sequences, 1, T, L] of each bucket: which keys its queries see. Made once for all layers with the
        same window; as numbers where attention would make them of it for each layer."""
        as_numbers = scores.plain_softmax
        key = scores.masked, dtype if as_numbers else torch.bool
        if key not in self._masks:
            seen = [self._mask(bucket, scores) for bucket in range(len(self.widths))]
            self._masks[key] = [x.new_zeros(x.shape, dtype=dtype).masked_fill_(~x, -torch.inf) for x in seen] \
                if as_numbers else seen
        return self._masks[key]

    def _mask(self, bucket: int, scores: Scores) -> torch.Tensor:
        run, width, longest = self.buckets.runs[bucket], self.widths[bucket], self.buckets.shapes[bucket][1]
        prompts = sorted({self.of_row[i] for i in run})
        sizes = prompts if len(prompts) == 1 else [self.of_row[i] for i in run]
        behind = on_device(sizes, self.device)[:, None]
        own = torch.arange(longest, device=self.device) + behind  # positions of the responses
        before = torch.arange(width, device=self.device).expand(len(sizes), -1)
        columns = torch.cat([before, own], 1)
        exists = torch.cat([before < behind, torch.ones_like(own, dtype=torch.bool)], 1)
        seen = scores.visible(own[:, :, None], columns[:, None]) & exists[:, None]
        return seen[0] if len(sizes) == 1 else seen[:, None]


@dataclass(frozen=True, slots=True)
class Run:
    """Neighboring cells that hold a prompt, or a response: its tokens, and then the last one again."""

    prompt: int    # its number
    response: int  # the number of the sequence; -1: of the prompt
    width: int     # cells


class RepeatedPrompts:
    """Tokens of a row in cells, each prompt as often as there are runs of it."""

    def __init__(self, lengths: Lengths, runs: Sequence[Run], device: torch.device):
        """runs: of all cells, one after the other; every response that has tokens is in one of them."""
        starts = list(accumulate(lengths.prompts, initial=0))
        response_starts = list(accumulate(lengths.responses, initial=starts[-1]))
        cells = list(accumulate((run.width for run in runs), initial=0))
        copies: list[list[int]] = [[] for _ in lengths.prompts]  # where cells of each prompt begin
        own = [0] * len(lengths.responses)
        for run, cell in zip(runs, cells, strict=False):
            if run.response < 0:
                copies[run.prompt].append(cell)
            else:
                own[run.response] = cell
        widths = on_device([run.width for run in runs], device)
        first, last = (on_device(x, device).repeat_interleave(widths, output_size=cells[-1]) for x in zip(*(
            (starts[r.prompt], starts[r.prompt + 1] - 1) if r.response < 0 else
            (response_starts[r.response], response_starts[r.response + 1] - 1) for r in runs), strict=True))
        # [C] the token of the row that each cell holds
        self.token_of_cell = torch.minimum(first + offsets_within(widths, cells[-1]), last)
        # [R] the cell of each response token
        self.own = ragged_indices(on_device(own, device), torch.arange(len(own), device=device),
                                  on_device(lengths.responses, device), sum(lengths.responses))
        # [prompt tokens, most copies] the cells of each prompt token, and which of them are there
        most, sizes = max(map(len, copies)), on_device(lengths.prompts, device)
        table = on_device([cell for x in copies for cell in (*x, *[-1] * (most - len(x)))], device).view(-1, most)
        of_token = table.repeat_interleave(sizes, 0, output_size=starts[-1])
        self.missing = None if min(map(len, copies)) == most else of_token < 0
        self.copies = of_token.clamp(min=0) + offsets_within(sizes, starts[-1])[:, None]

    def repeat(self, x: torch.Tensor) -> torch.Tensor:
        """[T, heads, D] -> [C, heads, D]."""
        out: torch.Tensor = _Repeat.apply(x, self)
        return out


class _Repeat(Function):
    """The gradient of a prompt token is the sum over its cells, in their order and in float32; those of padding are
    zero, or are read nowhere."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, cells: RepeatedPrompts) -> torch.Tensor:
        ctx.cells = cells
        return x.index_select(0, cells.token_of_cell)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        cells: RepeatedPrompts = ctx.cells
        prompts = grad.index_select(0, cells.copies.flatten()).unflatten(0, cells.copies.shape)
        if cells.missing is not None:
            prompts.masked_fill_(cells.missing[:, :, None, None], 0)
        return torch.cat([prompts.sum(1), grad.index_select(0, cells.own)]), None
