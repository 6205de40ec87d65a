"""What a `generate` holds in the torch backend: KV cache, states, activations of a prefill and of decoding steps.

In: the event, a copy of its model at a cell. Out: holder -> bytes, at the peak of the call; and what is held of its
sequences afterwards: offloaded, carried to a later step, or kept for another call.
"""

from __future__ import annotations

from rldsl.memory import logits
from rldsl.memory.activations import StackActivations
from rldsl.memory.call_parts import INDEX, Needs, chunk_layers, half_precision_bytes, head_of, weights_in_blocks
from rldsl.memory.decode_shapes import (
    MAX_PREFILL_TOKENS,
    live_conversations,
    num_captures_with_memory,
    sampling_bytes_per_logit,
)
from rldsl.memory.images import ImageBytes
from rldsl.memory.parameters import FLOAT, Copy, vocabulary
from rldsl.memory.values import ROW, WIDE, Tables, rows, width
from rldsl.plan.events import Generate


def generate_bytes(t: Tables, e: Generate, copy: Copy, stack: StackActivations, device: str) -> Needs:
    """The maximum over a prefill, the first tokens after it, and a decoding step that is not replayed. The captured
    steps so far (CUDA graphs, on the CPU operator traces) are held during all three."""
    b, here = stack.any, [layer for chunk in chunk_layers(copy, stack) for layer in chunk]
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
    sampling, cast = 0, head_of(copy).cast if copy.last else 0  # the head is cast once
    if copy.last:
        sampling = slots * b.hidden + logits.sampling(head_of(copy), slots, e.sampling,
                                                      tp if vocabulary(copy)[1] else 1)
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
                     + (sampling_bytes_per_logit(head_of(copy), e.sampling) * head_of(copy).rows if copy.last else 0))
            + sum(layer.fixed_outputs for layer in here))
    drawn = 0 if e.sampling.greedy or not copy.last else 8 * new * slots
    return {"KV cache": slots * groups * each * sum(layer.caches for layer in here),
            "states": 2 * slots * sum(layer.state for layer in here),
            "activations": cast + max(max(layer.forward_peak(prefill, prefilled) for layer in here),
                                      prefill * b.stream + images if images else 0,
                                      prefill * b.hidden + sampling - cast,
                                      max(step, sampling - cast) + captured),
            "half-precision weights": half_precision_bytes(copy), **weights_in_blocks(copy, device),
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
