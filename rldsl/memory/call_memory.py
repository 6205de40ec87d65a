"""What a call of a model holds while it runs, besides parameters and values: activations, logits, decode buffers.

In: an event, a copy of its model at a cell, frames. Out: holder -> bytes, at the peak of the call. Micro-batches have
rows of the maximum length. Each backend has its own counts: `MemoryCosts` has those of the torch backend, and other
backends derive theirs from it (`Description.memory`).
Errors: RL0326 a backend whose description returns something else than bytes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil, gcd
from typing import assert_never

from rldsl.memory import logits
from rldsl.memory.activations import LayerActivations, StackActivations, stack_activations
from rldsl.memory.decode_shapes import (
    MAX_PREFILL_TOKENS,
    live_conversations,
    num_captures_with_memory,
    sampling_bytes_per_logit,
)
from rldsl.memory.images import ImageBytes, image_tokens
from rldsl.memory.parameters import (
    FLOAT,
    Copy,
    gathered,
    largest_step,
    largest_weight,
    linear_elements,
    optimizer_state,
    row_parallel_elements,
    summed_in_leaves,
    trained,
    vocabulary,
    without_layouts,
)
from rldsl.memory.values import ROW, WIDE, Tables, rows, width
from rldsl.plan.backends import costs, unusable
from rldsl.plan.events import AnyCall, Generate, Infer, Train
from rldsl.plan.heads import DISTRIBUTION, LOGPROBS_AT, OUTPUTS
from rldsl.plan.model import Layout, Spread
from rldsl.plan.prompt_sources import pays, shares_prompts
from rldsl.plan.spaces import IndexedFrame, unit_tokens, units_of_minibatch
from rldsl.sharding.layout import stage_layers
from rldsl.sharding.micro_batches import count_without_token_limit
from rldsl.sharding.pipeline_schedule import max_activations_in_flight, max_waiting_messages, passes_in_flight

MAX_SENT_GRADIENTS = 3  # that a rank with several chunks keeps (`tests/cuda_paths/test_coalesced.py`)
INDEX = 48  # bytes of indices per token of a call: token ids, positions, offsets
# Bytes for each entry: of ids and log-probs that are made and joined; and of what a loss keeps of them
TOP_ENTRY, LOSS_ENTRY = 12, 96
Needs = Mapping[str, int]  # holder -> bytes


class MemoryCosts:
    """What a rank holds with one backend. This class has the counts of the torch backend, tensor by tensor; derive from
    it and override what differs. Every method is pure and returns bytes on one rank.

    tables: the plan's records by id. copy: the model under the layout of the event, at one of its cells. device: "cuda"
    or "cpu", which have different kernels."""

    def generate(self, tables: Tables, event: Generate, copy: Copy, device: str) -> Needs:
        """Holder -> bytes while a `generate` runs."""
        return _generate(tables, event, copy, _stack(tables, event, copy, device), device)

    def infer(self, tables: Tables, event: Infer, copy: Copy, device: str) -> Needs:
        """Holder -> bytes while an inference call runs."""
        return _infer(tables, event, copy, _stack(tables, event, copy, device), device)

    def train(self, tables: Tables, event: Train, copy: Copy, device: str) -> Needs:
        """Holder -> bytes while a train call runs, besides gradients and optimizer state."""
        return _train(tables, event, copy, device)

    def gradient_bytes(self, copy: Copy) -> int:
        """Gradients that stay between calls: one flat float32 buffer, where the model is trained."""
        return FLOAT * trained(copy) if copy.trained else 0

    def optimizer_bytes(self, copy: Copy) -> int:
        """Optimizer state."""
        return optimizer_state(copy) if copy.trained else 0


def memory_costs(backend: str) -> MemoryCosts:
    """The memory costs of a backend's description. Errors: RL0326."""
    return costs(backend, "memory", MemoryCosts)


def gradient_bytes(copy: Copy) -> int:
    """Gradients of a copy that stay between calls. Errors: RL0326."""
    return _check_bytes(copy, "gradient_bytes", memory_costs(copy.layout.backend).gradient_bytes(copy))


def optimizer_bytes(copy: Copy) -> int:
    """The optimizer state of a copy. Errors: RL0326."""
    return _check_bytes(copy, "optimizer_bytes", memory_costs(copy.layout.backend).optimizer_bytes(copy))


def call_bytes(tables: Tables, event: AnyCall, copy: Copy, device: str) -> dict[str, int]:
    """Holder -> bytes while a call runs, named after the call. device: "cuda" or "cpu". Errors: RL0326."""
    model = memory_costs(copy.layout.backend)
    needs: object
    match event:
        case Generate():
            needs, method = model.generate(tables, event, copy, device), "generate"
        case Infer():
            needs, method = model.infer(tables, event, copy, device), "infer"
        case Train():
            needs, method = model.train(tables, event, copy, device), "train"
        case _:
            assert_never(event)
    if not isinstance(needs, Mapping) or not all(isinstance(holder, str) for holder in needs):
        raise unusable(copy.layout.backend, f"`memory.{method}` must return holder -> bytes, not {needs!r}")
    checked = {holder: _check_bytes(copy, f"{method}[{holder!r}]", size) for holder, size in needs.items()}
    return {f"{holder} of {event.display_name}": size for holder, size in checked.items() if size}


def _check_bytes(copy: Copy, what: str, size: object) -> int:
    if type(size) is not int or size < 0:
        raise unusable(copy.layout.backend, f"`memory.{what}` must be a whole number of bytes, 0 or more, not {size!r}")
    return size


# ------------------------------------------------------------------------------------- micro-batches


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """The largest micro-batch of a rank."""

    tokens: int  # of all its sequences
    responses: int  # tokens among them that are responses
    sequences: int  # that it has
    count: int  # how many micro-batches there are
    cp_tokens: int  # tokens on all ranks of the cp group together
    repeated: int = 0  # tokens whose keys and values are there again, next to responses to one prompt


def largest_micro_batch(t: Tables, frames: tuple[str, ...], rows: int, mbs: int, mbt: int,
                        layout: Layout, shared: Spread | None = None) -> MicroBatch:
    """The largest micro-batch of `rows` rows of some frames, with at most `mbs` rows and `mbt` tokens (0: any number).
    With context parallelism a rank has two chunks of each row, which at worst hold nothing but responses. A token
    budget counts as full, since shorter rows are packed until it is. shared: the spread of a call that computes a
    prompt of several rows once."""
    num_chunks = 2 * layout.cp  # of a row
    count = count_without_token_limit(rows, mbs, min_count=layout.pp)
    num_rows = -(-rows // count)  # of the largest micro-batch, of each frame
    records = [t.frames[f] for f in frames]
    longest = sum(map(width, records))
    cp_tokens, responses = num_rows * longest, num_rows * sum(f.max_response_tokens for f in records)
    if mbt and cp_tokens > mbt:
        count = -(-rows // max(1, mbt // longest))
        return MicroBatch(-(-mbt // layout.cp), min(mbt, responses), num_rows * len(records), count, mbt)
    tokens = cp_tokens if layout.cp == 1 else num_rows * sum(2 * -(-width(f) // num_chunks) for f in records)
    found = MicroBatch(tokens, min(tokens, responses), num_rows * len(records), count, cp_tokens)
    saved = _shared_tokens(t, records, num_rows, shared) if shared else 0
    return replace(found, tokens=tokens - saved, cp_tokens=cp_tokens - saved, repeated=saved) \
        if pays(saved, tokens) else found


def _shared_tokens(t: Tables, frames: Sequence[IndexedFrame], rows: int, spread: Spread) -> int:
    """Tokens of prompts that `rows` rows of each frame have in common, at least, if they are as many as can be. A
    micro-batch has no more prompts than there are in all. Its rows compute no more than neighbors would
    (`sharding/siblings.py`), except where a shuffle has divided the rows before."""
    run = gcd(*(t.prompts[f.id].run for f in frames if f.id in t.prompts)) or 1
    parted = spread.shuffle and spread.minibatches > 1
    of_neighbors = rows if parted else -(-rows // run) + (rows % run > 0)
    most: dict[str, int] = {}  # prompts of each source
    longest: dict[str, int] = {}
    saved = 0
    for frame in frames:
        source = t.prompts.get(frame.id)
        if source is None:
            continue
        saved += rows * frame.max_prompt_tokens
        most[source.frame] = min(rows, of_neighbors, -(-frame.count // source.run))
        longest[source.frame] = frame.max_prompt_tokens
    return saved - sum(count * longest[source] for source, count in most.items())


# ------------------------------------------------------------------------------- the torch backend's counts


def _stack(t: Tables, event: AnyCall, copy: Copy, device: str) -> StackActivations:
    return stack_activations(copy.model, copy.layout, copy.compute, copy.stream, device, _longest(t, event))


def _longest(t: Tables, event: AnyCall) -> int:
    """Tokens of the longest sequence."""
    return max(width(t.frames[f]) for f in (event.frames if isinstance(event, Train) else (event.frame,)))


def _chunks(copy: Copy, stack: StackActivations) -> tuple[tuple[LayerActivations, ...], ...]:
    """Of the layers of each chunk here."""
    pp, count = copy.layout.pp, copy.layout.pp * copy.layout.vpp
    return tuple(stack.of(stage_layers(copy.model.layers, count, s)) for s in range(copy.cell.pp_rank, count, pp))


def _generate(t: Tables, e: Generate, copy: Copy, stack: StackActivations, device: str) -> Needs:
    """The maximum over a prefill, the first tokens after it, and a decoding step that is not replayed. The captured
    steps so far (CUDA graphs, on the CPU operator traces) are held during all three."""
    b, here = stack.any, [layer for chunk in _chunks(copy, stack) for layer in chunk]
    frame, prompts = t.frames[e.frame], t.frames[e.prompts]
    count = rows(frame, t.spreads[e.spread], t.layouts, t.frames)
    slots = _slots(e, count)
    new = frame.max_response_tokens if e.conversation is not None else e.sampling.max_new_tokens
    sizes, tp = copy.model.sizes, copy.layout.tp
    heads, groups = -(-sizes.heads // tp), -(-sizes.kv_heads // tp)
    longest = width(prompts)
    if e.per_step:  # all but the last part of a response is run with the prompt
        new, longest = e.per_step, longest + (prompts.iterations - 1) * e.per_step
    wide = longest + new
    each = 2 * sizes.head_dim * wide * copy.compute  # keys and values of a sequence in one head of one layer
    # an answer of an environment may be long, and a conversation that gave its slot away is prefilled as a whole
    prompt = wide if e.conversation is not None else longest
    prefill = min(slots * prompt, max(MAX_PREFILL_TOKENS, prompt))
    sampling, cast = 0, _head(copy).cast if copy.last else 0  # the head is cast once
    if copy.last:
        sampling = slots * b.hidden + logits.sampling(_head(copy), slots, e.sampling, tp if vocabulary(copy)[1] else 1)
    # CUDA's kernels for grouped-query attention get repeated keys and values; others read the KV cache in place
    read = each * heads if device == "cuda" and heads != groups else 0
    if e.conversation is not None:  # slots of a pass need not be neighbors: what they hold is copied
        read = max(read, each * groups)
    masked = 5 * wide
    step = slots * read + max(layer.decoding(slots, masked) for layer in here)
    prefilled = prefill // max(prompt, 1)  # sequences of a prefill
    seen = min(prefill, -(-slots // max(e.sampling.n, 1)) * min(prompts.max_prompt_tokens, t.images))
    images = ImageBytes.of(t, copy, seen, device).forward
    captured = 0
    # steps with experts or collectives are not captured, nor are those of conversations
    if tp == 1 and not sizes.experts_per_token and e.conversation is None:
        captured = num_captures_with_memory(longest, new, device == "cpu") * (
            max(step, sampling - cast) if device == "cuda" else
            slots * (sum(layer.outputs + layer.row_outputs for layer in here) + masked
                     + (sampling_bytes_per_logit(_head(copy), e.sampling) * _head(copy).rows if copy.last else 0))
            + sum(layer.fixed_outputs for layer in here))
    drawn = 0 if e.sampling.greedy or not copy.last else 8 * new * slots
    return {"KV cache": slots * groups * each * sum(layer.caches for layer in here),
            "states": 2 * slots * sum(layer.state for layer in here),
            "activations": cast + max(max(layer.forward_peak(prefill, prefilled) for layer in here),
                                      prefill * b.stream + images if images else 0,
                                      prefill * b.hidden + sampling - cast,
                                      max(step, sampling - cast) + captured),
            "half-precision weights": _half_precision_bytes(copy), **_weights_in_blocks(copy, device),
            "progress": drawn + count * (12 * new + INDEX + 8 * width(frame) + 8 * longest)}


def _sequences_at_once(e: Generate, count: int) -> int:
    """How many of `count` rows are decoded at a time, at most: of a conversation's branches one."""
    return -(-count // e.conversation.branches) if e.conversation is not None else count


def _slots(e: Generate, count: int) -> int:
    """Of the KV cache, for `count` rows."""
    at_once = _sequences_at_once(e, count)
    return min(e.mbs or at_once, at_once)


def offloaded_cache_bytes(t: Tables, e: Generate, copy: Copy) -> int:
    """Keys and values of conversations that gave their slots away, in host memory."""
    if e.waiting != "offload":
        return 0
    sizes, frame = copy.model.sizes, t.frames[e.frame]
    count = rows(frame, t.spreads[e.spread], t.layouts, t.frames)
    slots = _slots(e, count)
    # a slot is given away to a conversation that has it from then on
    away = min(live_conversations(slots, e.waiting), _sequences_at_once(e, count)) - slots
    heads = -(-sizes.kv_heads // copy.layout.tp)
    return away * width(frame) * 2 * heads * sizes.head_dim * copy.compute * copy.layers


def carried_bytes(t: Tables, e: Generate) -> int:
    """Bytes of the responses that a later step continues, at most: all but those of the oldest prompts, with their
    log-probs and whether they have ended."""
    frame = t.frames[e.frame]
    num_rows = rows(frame, t.spreads[e.spread], t.layouts, t.frames)
    waiting = num_rows - num_rows // frame.iterations
    longest = (frame.iterations - 1) * e.per_step
    return waiting * (longest * (WIDE + FLOAT) + 1 + 3 * ROW)


def kept_cache_bytes(t: Tables, e: Generate, copy: Copy) -> int:
    """Keys and values that a rank keeps of the sequences that `e` generates. The last token of a sequence has none."""
    sizes, frame = copy.model.sizes, t.frames[e.frame]
    heads = -(-sizes.kv_heads // copy.layout.tp)
    tokens = rows(frame, t.spreads[e.spread], t.layouts, t.frames) * max(width(frame) - 1, 0)
    return tokens * 2 * heads * sizes.head_dim * copy.compute * copy.layers


def _infer(t: Tables, e: Infer, copy: Copy, stack: StackActivations, device: str) -> Needs:
    b, here = stack.any, [layer for chunk in _chunks(copy, stack) for layer in chunk]
    count = rows(t.frames[e.frame], t.spreads[e.spread], t.layouts, t.frames)
    m = largest_micro_batch(t, (e.frame,), count, e.mbs, e.mbt, copy.layout,
                            t.spreads[e.spread] if shares_prompts(copy.model, copy.layout) else None)
    head = 0
    if copy.last:
        head = (m.tokens + m.responses) * b.hidden
        if OUTPUTS[e.output_name].logits:
            head += logits.forward(_head(copy), m.responses, OUTPUTS[e.output_name].reads == "distribution", device)
        head += m.responses * TOP_ENTRY * _width(t, e.ids)
        head += m.responses * 2 * FLOAT * copy.model.sizes.hidden * (e.output_name == DISTRIBUTION)
    passed = 0 if copy.last else m.tokens * b.stream  # the message of the micro-batch before
    sequences = -(-m.tokens // _longest(t, e))  # of full length, which need as much as those of the micro-batch
    most = max(max(layer.forward_peak(m.tokens, sequences) for layer in here)
               + 3 * m.cp_tokens * b.gathered_kv + m.repeated * b.repeated, head)
    if images := ImageBytes.of(t, copy, image_tokens(t, (t.frames[e.frame],), m.sequences, True), device).forward:
        most = max(most, m.tokens * b.stream + images)
    return {"activations": passed + most, "half-precision weights": _half_precision_bytes(copy),
            **_weights_in_blocks(copy, device),
            "rows": count * (width(t.frames[e.frame]) * INDEX
                             + t.frames[e.frame].max_response_tokens * TOP_ENTRY * _width(t, e.ids))}


def _width(t: Tables, ids: str) -> int:
    """How many ids of tokens a value has for each response token; 0 without one."""
    return t.values[ids].width if ids else 0


def _train(t: Tables, e: Train, copy: Copy, device: str) -> Needs:
    """The maximum over the passes of a minibatch and the optimizer step: one fused kernel without extra memory, except
    where it needs complete parameters."""
    whole = _rows_of_minibatch(t, e, copy.layout) * sum([width(t.frames[f]) for f in e.frames]) * INDEX
    most = max(_passes_of_minibatch(t, e, copy, device), largest_step(copy))
    return {"activations": most, "half-precision weights": _half_precision_bytes(copy), "rows": whole, **gathered(copy),
            **summed_in_leaves(copy), **_weights_in_blocks(copy, device)}


def _rows_of_minibatch(t: Tables, e: Train, layout: Layout) -> int:
    """Rows of each frame on the dp rank that has most."""
    frames, spread = [t.frames[f] for f in e.frames], t.spreads[e.spread]
    unit = frames[0].per_prompt if spread.granularity == "prompt" else 1  # rows that stay together
    longest = unit_tokens(frames, unit > 1)
    return unit * ceil(units_of_minibatch(spread, frames[0].count // unit, longest) / layout.dp)


def _passes_of_minibatch(t: Tables, e: Train, copy: Copy, device: str) -> int:
    """As `_peak_of_passes`, which nothing of depends on what `zero` divides."""
    if t.passes is None:
        return _peak_of_passes(t, e, copy, device)
    x = copy.layout
    key = (e.id, e.mbs, e.mbt, e.recompute, without_layouts(copy.model), copy.trained, x.dp, x.tp, x.pp, x.vpp, x.cp,
           x.ep, copy.cell, device)
    if key not in t.passes:
        t.passes[key] = _peak_of_passes(t, e, copy, device)
    return t.passes[key]


def _peak_of_passes(t: Tables, e: Train, copy: Copy, device: str) -> int:
    """The maximum over the backward passes of a layer, of the head, and of the embedding. The pipeline schedule gives
    the number of forward passes in flight."""
    stack = _stack(t, e, copy, device)
    b, chunks = stack.any, _chunks(copy, stack)
    layout, frames = copy.layout, [t.frames[f] for f in e.frames]
    count = _rows_of_minibatch(t, e, layout)
    m = largest_micro_batch(t, e.frames, count, e.mbs, e.mbt, layout,
                            t.spreads[e.spread] if shares_prompts(copy.model, layout) else None)
    full = e.recompute == "full"
    sequences = -(-m.tokens // _longest(t, e))  # of full length, which need as much as those of the micro-batch
    # by each layer, for its backward pass
    kept = [[layer.kept(m.tokens, sequences) + m.cp_tokens * b.gathered_kv + m.repeated * b.repeated
             for layer in layers] for layers in chunks]
    each = [m.tokens * b.stream * _num_boundary_states(copy, c) + (len(k) * m.tokens * b.stream if full else sum(k))
            for c, k in enumerate(kept)]
    images = ImageBytes.of(t, copy, image_tokens(t, frames, m.sequences // len(frames), False), device, full)
    each[0] += images.kept
    scheduled = m.count if layout.vpp > 1 else min(m.count, layout.pp)  # more micro-batches only last longer
    schedule = layout.pp, layout.vpp, scheduled, copy.cell.pp_rank
    passed = m.tokens * b.stream * _num_messages(layout, m.count, copy.cell.pp_rank, device)
    weight = (copy.compute + (FLOAT if copy.compute != FLOAT else 0)) * largest_weight(copy)
    inside = (max_activations_in_flight(passes_in_flight(*schedule), each) + weight
              + 2 * m.cp_tokens * b.gathered_kv + m.repeated * b.repeated)
    inside += max(_backward(k, [layer.backward_peak(m.tokens, sequences) for layer in layers], full)
                  for k, layers in zip(kept, chunks, strict=True))
    embedding = 0
    if copy.first and not copy.model.base:  # its gradient comes last, as a full matrix
        gradient = FLOAT * vocabulary(copy)[0] * copy.model.sizes.hidden
        embedding = max_activations_in_flight(passes_in_flight(*schedule, 0), each) - each[0] + gradient
    if images.forward:  # its passes come first, and last
        tower = max(m.tokens * b.stream + images.forward, images.kept + images.backward + weight)
        embedding = max(embedding, max_activations_in_flight(passes_in_flight(*schedule, 0), each) - each[0] + tower)
    head = 0
    if copy.last:
        head = max_activations_in_flight(passes_in_flight(*schedule, layout.vpp - 1), each) + m.tokens * b.final
        head += max(m.tokens * b.norm, _loss(t, e, copy, b, m, device)) + m.responses * LOSS_ENTRY * _width(t, e.ids)
    return passed + max(inside, embedding, head)


def _backward(kept: Sequence[int], peaks: Sequence[int], full: bool) -> int:
    """The peak of the backward passes of some layers, besides what all of them keep: that of a layer begins when those
    of later layers are over. peaks: of each layer."""
    if full:  # each is run again
        return max(k + p for k, p in zip(kept, peaks, strict=True))
    return max(p - sum(kept[n + 1 :]) for n, p in enumerate(peaks))


def _num_boundary_states(copy: Copy, chunk: int) -> int:
    """Hidden states that a pass through a chunk keeps besides those of its layers: the received one and the sent
    one."""
    return 2 - (copy.first and chunk == 0) - (copy.last and chunk == copy.layout.vpp - 1)


def _num_messages(layout: Layout, count: int, rank: int, device: str) -> int:
    """Messages in flight, or received before the pass that uses them; and with several chunks under NCCL gradients that
    were sent in exchanges whose messages no pass has used yet (`P2PCommunicator`)."""
    if layout.pp == 1:
        return 0
    if layout.vpp == 1:
        return 2  # one arrives while the previous one is read
    steady = min(count, 4 * layout.pp)  # more micro-batches only last longer
    waiting = max(2, max_waiting_messages(layout.pp, layout.vpp, steady)[rank])
    return waiting if device == "cpu" else waiting + MAX_SENT_GRADIENTS - 1


def _loss(t: Tables, e: Train, copy: Copy, b: LayerActivations, m: MicroBatch, device: str) -> int:
    """The last hidden states, those of response tokens, their gradient, and logits."""
    hidden = (m.tokens + 2 * m.responses) * b.hidden
    if e.heads:
        hidden += m.responses * sum(2 * FLOAT * t.values[v].width for v, _ in e.heads)
        hidden += logits.over_vocabulary(_head(copy), m.responses, len(e.heads), not copy.model.base, device)
    read = {OUTPUTS[what] for _, _, what in e.model_outputs if not (e.heads and what == LOGPROBS_AT)}
    if not any(output.logits for output in read):
        return hidden
    entropy = any(output.reads == "distribution" for output in read)
    head = _head(copy)
    return hidden + max(logits.forward(head, m.responses, entropy, device, trains=True),
                        logits.backward(head, m.responses, not copy.model.base, entropy, device))


def _head(copy: Copy) -> logits.Head:
    stored = copy.compute if copy.model.base else copy.stored
    return logits.Head(vocabulary(copy)[0], copy.model.sizes.hidden, stored, copy.compute)


def _half_precision_bytes(copy: Copy) -> int:
    """Half-precision copies of float32 matrices. Autocast keeps those of trained parameters until the call ends, and an
    invariant model all; with `zero` parameters are gathered in half precision anyway; for another `ema` model one
    matrix is cast at a time."""
    if copy.stored == copy.compute or copy.layout.zero:
        return 0
    kept = copy.trained or copy.model.invariant
    return copy.compute * (linear_elements(copy) if kept else largest_weight(copy))


def _weights_in_blocks(copy: Copy, device: str) -> Needs:
    """Copies of matrices that an invariant model keeps until a call ends, as `WeightCopies` of the torch backend does:
    of float32 ones in blocks of columns, which oneDNN reads on a CPU."""
    if not copy.model.invariant or copy.layout.zero:
        return {}
    blocks = FLOAT * row_parallel_elements(copy) if device == "cpu" and copy.compute == FLOAT else 0
    return {"weights in blocks": blocks} if blocks else {}
