"""What a call of a model needs while it runs, besides parameters, optimizer state and values.

In: an event, a copy of its model at a cell, frames. Out: what holds how much at the moment of the call with the most.
Micro-batches are of the longest rows that their frames allow.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from rldsl.memory import logits
from rldsl.memory.activations import Block, block, kernel
from rldsl.memory.decoding import PREFILL, recordings, sampled
from rldsl.memory.parameters import FLOAT, Copy, largest_weight, linear_elements, vocabulary
from rldsl.memory.values import Tables, rows, width
from rldsl.memory.zero import gathered
from rldsl.plan.events import Generate, Infer, Train
from rldsl.plan.heads import HEAD_OF
from rldsl.plan.model import Layout
from rldsl.plan.naming import call_name
from rldsl.sharding.partition import micro_batch_count
from rldsl.sharding.pipeline_schedule import actions, max_activations_in_flight, max_waiting_messages, rank_passes

INDEX = 48  # bytes of numbers for each token that a call works on: tokens, positions, places in the grid
Needs = dict[str, int]


@dataclass(frozen=True, slots=True)
class Micro:
    """A micro-batch: tokens of a rank, of which responses, in so many sequences; count: of them. whole: tokens of all
    ranks of a cp group."""

    tokens: int
    responses: int
    sequences: int
    count: int
    whole: int


def micro(t: Tables, frames: tuple[str, ...], rows: int, limit: int, budget: int, layout: Layout) -> Micro:
    """The largest of the micro-batches that `rows` rows of some frames are divided into. With context parallelism a
    rank has two chunks of each row, and at worst nothing but responses in them. A budget of tokens is filled: rows that
    are shorter are more."""
    at_least, pieces = layout.pp, 2 * layout.cp
    count = micro_batch_count(rows, limit, at_least)
    each = -(-rows // count)
    records = [t.frames[f] for f in frames]
    longest = sum(map(width, records))
    whole, responses = each * longest, each * sum(f.max_response_tokens for f in records)
    if budget and whole > budget:
        count = -(-rows // max(1, budget // longest))
        return Micro(-(-budget // layout.cp), min(budget, responses), each * len(records), count, budget)
    tokens = whole if layout.cp == 1 else each * sum(2 * -(-width(f) // pieces) for f in records)
    return Micro(tokens, min(tokens, responses), each * len(records), count, whole)


def needs(t: Tables, event: Generate | Infer | Train, copy: Copy, device: str) -> Needs:
    """By what it is for. device: "cuda" or "cpu", which have different kernels."""
    attention = kernel(copy.model, copy.compute, device)
    longest = max(width(t.frames[f]) for f in (event.frames if isinstance(event, Train) else (event.frame,)))
    b = block(copy.model, copy.layout, copy.compute, copy.stream, attention, longest)
    match event:
        case Generate():
            found = _generate(t, event, copy, b, device)
        case Infer():
            found = _infer(t, event, copy, b, device)
        case _:
            found = _train(t, event, copy, b, device)
    return {f"{what} of {call_name(event)}": size for what, size in found.items() if size}


def _generate(t: Tables, e: Generate, copy: Copy, b: Block, device: str) -> Needs:
    """The largest of three moments: a prefill, the first tokens after it, and a step of decoding that is not replayed,
    all of them beside what earlier steps have recorded."""
    frame, prompts = t.frames[e.frame], t.frames[e.prompts]
    count = rows(frame, t.spreads[e.spread], t.layouts)
    slots = min(e.mbs or count, count)
    new, sizes, tp = e.sampling.max_new_tokens, copy.model.sizes, copy.layout.tp
    heads, groups = -(-sizes.heads // tp), -(-sizes.kv_heads // tp)
    wide = prompts.max_prompt_tokens + new
    each = 2 * sizes.head_dim * wide * copy.compute  # keys and values of a sequence in one head of one layer
    prefill = min(slots * prompts.max_prompt_tokens, max(PREFILL, prompts.max_prompt_tokens))
    sampling, cast = 0, _head(copy).cast if copy.last else 0  # of the head, once
    if copy.last:
        sampling = slots * b.hidden + logits.sampling(_head(copy), slots, e.sampling, tp if vocabulary(copy)[1] else 1)
    # CUDA's kernels for few heads of keys get them repeated; others read the slab where it lies
    read = each * heads if device == "cuda" and heads != groups else 0
    masked = 5 * wide
    step = slots * (read + b.forward + masked)
    recorded = 0
    if tp == 1 and not sizes.chosen:  # experts and other ranks are not recorded
        recorded = recordings(prompts.max_prompt_tokens, new) * (
            max(step, sampling - cast) if device == "cuda" else
            slots * (copy.layers * b.made + masked + (sampled(_head(copy), e.sampling) * _head(copy).rows
                                                      if copy.last else 0)))
    drawn = 0 if e.sampling.greedy or not copy.last else 8 * new * slots
    return {"key-value cache": slots * groups * each * copy.layers,
            "activations": cast + max(prefill * b.forward, prefill * b.hidden + sampling - cast,
                                      max(step, sampling - cast) + recorded),
            "half-precision weights": _half(copy),
            "progress": drawn + count * (12 * new + INDEX + 8 * width(frame) + 8 * prompts.max_prompt_tokens)}


def _infer(t: Tables, e: Infer, copy: Copy, b: Block, device: str) -> Needs:
    count = rows(t.frames[e.frame], t.spreads[e.spread], t.layouts)
    m = micro(t, (e.frame,), count, e.mbs, e.mbt, copy.layout)
    head = 0
    if copy.last:
        head = (m.tokens + m.responses) * b.hidden
        if HEAD_OF[e.what] == "causal_lm":
            head += logits.forward(_head(copy), m.responses, e.what == "entropy", device)
    passed = 0 if copy.last else m.tokens * b.stream  # what was sent before
    most = max(m.tokens * b.forward + 3 * m.whole * b.seen, head)
    return {"activations": passed + most, "half-precision weights": _half(copy),
            "rows": count * width(t.frames[e.frame]) * INDEX}


def _train(t: Tables, e: Train, copy: Copy, b: Block, device: str) -> Needs:
    """The largest of three moments: the backward pass of a layer, of the head, and of the embedding; the optimizer's
    step, one kernel, needs nothing. How many passes a rank keeps meanwhile, its schedule says."""
    layout, frames = copy.layout, [t.frames[f] for f in e.frames]
    count = -(-(-(-frames[0].count // t.spreads[e.spread].minibatches)) // layout.dp)
    m = micro(t, e.frames, count, e.mbs, e.mbt, layout)
    full = e.recompute == "full"
    kept = m.tokens * b.saved + m.whole * b.seen  # of a layer
    each = [m.tokens * b.stream * _ends(copy, c) + layers * (m.tokens * b.stream if full else kept)
            for c, layers in enumerate(copy.chunks)]
    count_there = m.count if layout.vpp > 1 else min(m.count, layout.pp)  # more do the same for longer
    order = rank_passes(layout.pp, layout.vpp, count_there, copy.cell.stage)
    passed = m.tokens * b.stream * _passed(layout, m.count, copy.cell.stage)
    weight = (copy.compute + (FLOAT if copy.compute != FLOAT else 0)) * largest_weight(copy)
    inside = max_activations_in_flight(order, each) + (kept if full else 0) + m.tokens * b.backward + 2 * m.whole * b.seen + weight
    embedding = 0
    if copy.first and not copy.model.base:  # its gradient comes last of a micro-batch, and whole
        embedding = max_activations_in_flight(order, each, 0) - each[0] + FLOAT * vocabulary(copy)[0] * copy.model.sizes.hidden
    head = 0
    if copy.last:
        head = max_activations_in_flight(order, each, layout.vpp - 1) + m.tokens * b.final
        head += max(m.tokens * b.norm, _loss(e, copy, b, m, device))
    whole = count * sum(map(width, frames)) * INDEX
    most = passed + max(inside, embedding, head)
    return {"activations": most, "half-precision weights": _half(copy), "rows": whole, **gathered(copy)}


def _ends(copy: Copy, chunk: int) -> int:
    """How many hidden states a pass through a chunk keeps beside its layers: what came, and what was sent on."""
    return 2 - (copy.first and chunk == 0) - (copy.last and chunk == copy.layout.vpp - 1)


def _passed(layout: Layout, count: int, rank: int) -> int:
    """Messages that are on their way or wait for their passes."""
    if layout.pp == 1:
        return 0
    if layout.vpp == 1:
        return 2  # one comes while the one before it is read
    steady = min(count, 4 * layout.pp)  # more micro-batches do the same for longer
    return max(2, _waiting(layout.pp, layout.vpp, steady, rank))


@cache
def _waiting(pp: int, chunks: int, count: int, rank: int) -> int:
    return max_waiting_messages(actions(pp, chunks, count)[rank])


def _loss(e: Train, copy: Copy, b: Block, m: Micro, device: str) -> int:
    """The last hidden states, those that are read, their gradient, and logits."""
    hidden = (m.tokens + 2 * m.responses) * b.hidden
    if copy.model.kind != "causal_lm":
        return hidden
    entropy = any(what == "entropy" for _, _, what in e.fresh)
    head = _head(copy)
    return hidden + max(logits.forward(head, m.responses, entropy, device),
                        logits.backward(head, m.responses, not copy.model.base, entropy, device))


def _head(copy: Copy) -> logits.Head:
    stored = copy.compute if copy.model.base else copy.stored
    return logits.Head(vocabulary(copy)[0], copy.model.sizes.hidden, stored, copy.compute)


def _half(copy: Copy) -> int:
    """Autocast keeps what it has cast of trained parameters until the call ends; under `zero` they come half. Of a mean
    it casts one matrix at a time."""
    if copy.stored == copy.compute or copy.layout.zero:
        return 0
    return copy.compute * (linear_elements(copy) if copy.trained else largest_weight(copy))
