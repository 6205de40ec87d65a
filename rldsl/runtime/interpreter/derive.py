"""The event `derive`: a frame made from another one, each rank on its own rows.

In: the state of a step. Out: the lengths of this rank's new rows, and a buffer for each value that comes along. An
operation says which rows its frame has and from which row of the source each comes (`OPS`); the rest is the same for
all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import cast

import torch

from rldsl.plan.derive_ops import DeriveOpName
from rldsl.plan.events import Derive
from rldsl.plan.function import Text
from rldsl.plan.spaces import common_parent, numberings
from rldsl.runtime.comm.row_assignment import RowLengths
from rldsl.runtime.data.written_prompts import prompt_ids
from rldsl.runtime.interpreter.cuts import cut_positions
from rldsl.runtime.interpreter.python_rows import python_rows
from rldsl.runtime.interpreter.rank_state import Services
from rldsl.runtime.state.step import StepState
from rldsl.runtime.store import RaggedRows, offsets_within


@dataclass(frozen=True, slots=True)
class DerivedRows:
    """The rows of a derived frame that this rank has."""

    rows: torch.Tensor  # [S] int64, ascending: of the derived frame, present ones alone
    source_rows: torch.Tensor  # [S] int64: the row of the source that each comes from
    tokens: RaggedRows | None = None  # of its prompts, where they are not those of the source
    logprobs: RaggedRows | None = None  # of its responses, where they are not those of the source
    # [S] int64: tokens of `tokens` that belong to the response, of each row; None: there are no responses
    response_lens: torch.Tensor | None = None


def derive(step: StepState, services: Services, event: Derive) -> None:
    context = step.context
    if event.op == "concat":
        concat(step, event)
        return
    source = context.frames[event.source]
    made = OPS[event.op](step, services, event)
    if event.makes_rows:
        step.rows.set_lengths(event.frame, _lengths(step, event, made))  # of this rank's rows, until the exchange
    for value, new in event.values:
        if made.tokens is not None and new == f"{event.frame}.tokens":
            step.buffers.put(f"{new}@{event.spread}", made.tokens)
            continue
        if made.logprobs is not None and new == f"{event.frame}.logprobs":
            step.buffers.put(f"{new}@{event.spread}", made.logprobs)
            continue
        held: RaggedRows = step.read(event.reads, value)
        if context.values[value].extent == "prompt":
            kept = held.select((made.source_rows // source.per_prompt).unique())
        else:
            kept = held.gather(made.source_rows)
            kept = RaggedRows(made.rows, kept.sizes, kept.data)
        step.buffers.put(f"{new}@{event.spread}", kept)


def concat(step: StepState, event: Derive) -> None:
    """The rows of several frames under the numbers that they have in one. Nothing says how long these are but the
    lengths of the parts, which the spread therefore does not need."""
    frames = step.context.frames
    parts, spread = [frames[p] for p in event.parts], step.context.spreads[event.spread]
    rows = [step.my_rows(spread, p.id) for p in parts]
    numbers = [r // n.run * n.stride + n.first + r % n.run
               for r, n in zip(rows, numberings(parts, common_parent(parts)), strict=True)]
    known = [step.rows.lens[p.id] for p in parts]
    lens = RowLengths(*(torch.zeros(frames[event.frame].count, dtype=x.dtype, device=x.device)
                        for x in (known[0].prompt, known[0].response)))
    for old, new, of in zip(rows, numbers, known, strict=True):
        lens.prompt[new], lens.response[new] = of.prompt[old], of.response[old]
    step.rows.set_lengths(event.frame, lens)  # of this rank's rows, until the exchange
    for made in dict.fromkeys(new for _, new in event.values):
        held: list[RaggedRows] = [step.read(event.reads, v) for v, new in event.values if new == made]
        taken = [h.select(old) for h, old in zip(held, rows, strict=True)]
        step.buffers.put(f"{made}@{event.spread}", RaggedRows.join(
            [RaggedRows(new, h.sizes, h.data) for h, new in zip(taken, numbers, strict=True)]))


def _lengths(step: StepState, event: Derive, made: DerivedRows) -> RowLengths:
    """The lengths of the frame's rows: those of the rows that they come from, and 0 where a row is absent."""
    source, count = step.rows.lens[event.source], step.context.frames[event.frame].count
    prompt, response = (torch.zeros(count, dtype=x.dtype, device=x.device) for x in (source.prompt, source.response))
    if made.tokens is not None:
        prompt[made.rows] = made.tokens.sizes
        if made.response_lens is not None:
            prompt[made.rows] -= made.response_lens
            response[made.rows] = made.response_lens
        return RowLengths(prompt, response)
    prompt[made.rows], response[made.rows] = source.prompt[made.source_rows], source.response[made.source_rows]
    if made.logprobs is not None:  # what the responses have more, the prompts have less
        prompt[made.rows] -= made.logprobs.sizes - response[made.rows]
        response[made.rows] = made.logprobs.sizes
    return RowLengths(prompt, response)


def _where(step: StepState, services: Services, event: Derive) -> DerivedRows:
    """The rows whose condition holds, under the same numbers."""
    rows = step.my_rows(step.context.spreads[event.spread], event.source)
    kept = rows[step.read(event.reads, event.key).select(rows).data.to(torch.bool)]
    return DerivedRows(kept, kept)


def _restrict(step: StepState, services: Services, event: Derive) -> DerivedRows:
    """The rows that the frame has already."""
    rows = step.my_rows(step.context.spreads[event.spread], event.frame)
    return DerivedRows(rows, rows)


def _pick(step: StepState, services: Services, event: Derive) -> DerivedRows:
    """Of each prompt the row with the largest number, the first of equals. NaN is smaller than any number."""
    context = step.context
    rows = step.my_rows(context.spreads[event.spread], event.source)
    prompts, prompt_of_row = (rows // context.frames[event.source].per_prompt).unique(return_inverse=True)
    numbers = step.read(event.reads, event.key).select(rows).data
    numbers = numbers.masked_fill(numbers.isnan(), -torch.inf)
    largest = numbers.new_empty(prompts.numel()).scatter_reduce(0, prompt_of_row, numbers, "amax", include_self=False)
    behind = torch.full_like(rows, context.frames[event.source].count)
    candidates = torch.where(numbers == largest[prompt_of_row], rows, behind)
    first = torch.zeros_like(prompts).scatter_reduce(0, prompt_of_row, candidates, "amin", include_self=False)
    return DerivedRows(prompts, first)


def _others(step: StepState, services: Services, event: Derive) -> DerivedRows:
    """For each row the other rows of its prompt, in their order."""
    rows = step.my_rows(step.context.spreads[event.spread], event.source)
    n = step.context.frames[event.source].per_prompt
    siblings = rows[:, None] // n * n + torch.arange(n, device=rows.device)
    one, other = rows[:, None].expand(-1, n).flatten(), siblings.flatten()
    chosen = (one != other) & torch.isin(other, rows)
    one, other = one[chosen], other[chosen]
    # row r has n - 1 rows below it: its siblings in order, numbered without r itself
    return DerivedRows(one * (n - 1) + other % n - (other > one).to(one.dtype), other)


def _whole(step: StepState, services: Services, event: Derive) -> DerivedRows:
    """The same rows, whose responses are those of all parts, one after the other."""
    context = step.context
    rows = step.my_rows(context.spreads[event.spread], event.source)
    count = context.frames[event.source].count
    parts: list[RaggedRows] = []
    for part in event.parts:
        held: RaggedRows = step.read(event.reads, f"{part}.logprobs")
        parts.append(held.gather(rows // (count // context.frames[part].count)))
    index = torch.arange(len(rows), device=rows.device)
    of_entry = torch.cat([index.repeat_interleave(p.sizes) for p in parts])
    # sorted by row; a stable sort keeps the parts of a row in their order, and the tokens of a part in theirs
    joined = torch.cat([p.data for p in parts])[of_entry.argsort(stable=True)]
    return DerivedRows(rows, rows, logprobs=RaggedRows(rows, torch.stack([p.sizes for p in parts]).sum(0), joined))


def _text(step: StepState, services: Services, event: Derive) -> DerivedRows:
    """Prompts that a Python function writes about the rows."""
    context = step.context
    function, frame = context.functions[event.function], context.frames[event.frame]
    rows = step.my_rows(context.spreads[event.spread], event.source)
    arguments, names = python_rows(step, services.data, event.reads, event.source, rows, event.given)
    services.ring.begin_call(function.name)
    texts = cast("list[Text | None]", services.rewards.call(function, arguments, names))
    ids = prompt_ids(services.data.tokens(frame), function, texts, names, frame.max_prompt_tokens, event.over_long)
    services.ring.resume()
    kept = rows[torch.tensor([bool(x) for x in ids], dtype=torch.bool, device=context.device)]
    sizes = torch.tensor([len(x) for x in ids if x], dtype=torch.int64, device=context.device)
    data = torch.tensor([token for x in ids for token in x], dtype=torch.int64, device=context.device)
    return DerivedRows(kept, kept, RaggedRows(kept, sizes, data))


def _prefixes(step: StepState, services: Services, event: Derive) -> DerivedRows:
    """Prompts that are the beginnings of each row's response."""
    context = step.context
    rows = step.my_rows(context.spreads[event.spread], event.source)
    packed = step.packed(event.source, step.read(event.reads, f"{event.source}.tokens"), rows)
    fan = context.frames[event.frame].per_prompt
    tokenizer = services.data.tokens(context.frames[event.source]).tokenizer
    decode = partial(tokenizer.decode, skip_special_tokens=True)
    made: list[int] = []
    sources: list[int] = []
    sizes: list[int] = []
    tokens: list[torch.Tensor] = []
    lens = zip(rows.tolist(), packed.prompt_lens.tolist(), packed.response_lens.tolist(), strict=True)
    start = 0
    for row, prompt, response in lens:
        text = packed.tokens[start : start + prompt + response]
        start += prompt + response
        for j, cut in enumerate(cut_positions(event, text[prompt:].tolist(), fan, decode)):
            made.append(row * fan + j)
            sources.append(row)
            sizes.append(prompt + cut)
            tokens.append(text[: prompt + cut])
    ids, of, n = (torch.tensor(x, dtype=torch.int64, device=context.device) for x in (made, sources, sizes))
    data = torch.cat(tokens) if tokens else packed.tokens[:0]
    return DerivedRows(ids, of, RaggedRows(ids, n, data))


def _reprompt(step: StepState, services: Services, event: Derive) -> DerivedRows:
    """The same rows, whose responses are after the prompts of another frame."""
    context = step.context
    rows = step.my_rows(context.spreads[event.spread], event.source)
    asked, source = (context.frames[f] for f in event.parts)
    held: RaggedRows = step.read(event.reads, f"{asked.id}.tokens")
    prompts = held.gather(rows // (source.count // asked.count))
    old = step.packed(source.id, step.read(event.reads, f"{source.id}.tokens"), rows)
    sizes = old.prompt_lens + old.response_lens
    is_response = offsets_within(sizes) >= old.prompt_lens.repeat_interleave(sizes)
    index = torch.arange(len(rows), device=rows.device)
    of_token = torch.cat([index.repeat_interleave(prompts.sizes), index.repeat_interleave(old.response_lens)])
    # sorted by row; a stable sort keeps each prompt before its response
    joined = torch.cat([prompts.data, old.tokens[is_response]])[of_token.argsort(stable=True)]
    tokens = RaggedRows(rows, prompts.sizes + old.response_lens, joined)
    return DerivedRows(rows, rows, tokens, response_lens=old.response_lens)


OPS: Mapping[DeriveOpName, Callable[[StepState, Services, Derive], DerivedRows]] = {
    "where": _where, "restrict": _restrict, "pick": _pick, "others": _others, "whole": _whole, "text": _text,
    "prefixes": _prefixes, "reprompt": _reprompt,
}
