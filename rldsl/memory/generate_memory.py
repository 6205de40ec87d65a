"""What a `generate` holds in the torch backend: KV cache, states, activations of a prefill and of decoding steps.

In: the event, a copy of its model at a cell. Out: holder -> bytes, at the peak of the call; and what is held of its
sequences afterwards: offloaded, carried to a later step, or kept for another call.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rldsl.memory import logits
from rldsl.memory.activations import LayerActivations, stack_activations
from rldsl.memory.attention import attention_kind, value_width
from rldsl.memory.call_parts import INDEX, Needs, chunk_layers, half_precision_bytes, head_of, weights_in_blocks
from rldsl.memory.decode_shapes import (
    MAX_PREFILL_TOKENS,
    live_conversations,
    num_captures_with_memory,
    sampling_bytes_of_trace,
)
from rldsl.memory.images import ImageBytes
from rldsl.memory.parameters import FLOAT, Copy, vocabulary
from rldsl.memory.values import ROW, WIDE, Tables, rows, width
from rldsl.plan.events import Generate

ANGLES = 6  # numbers of a position's rotary embedding that are made for each of a head; a kernel makes two


@dataclass(frozen=True, slots=True)
class _Decoding:
    """How many sequences a rank decodes at a time, and how long they are at most."""

    rows: int  # of the call on this rank
    slots: int  # sequences at a time
    prompt: int  # tokens before the generated ones: of the prompt, and of a carried response from earlier steps
    new: int  # tokens that are generated for a sequence
    prefilled: int  # tokens of a sequence that a prefill runs at once

    @property
    def length(self) -> int:
        """Tokens of a sequence that the KV cache holds."""
        return self.prompt + self.new

    @property
    def prefill(self) -> int:
        """Tokens of a prefill of several sequences."""
        return min(self.slots * self.prefilled, max(MAX_PREFILL_TOKENS, self.prefilled))


def generate_bytes(t: Tables, e: Generate, copy: Copy, device: str) -> Needs:
    """The maximum over a prefill, the first tokens after it, and a decoding step that is not replayed. The captured
    steps so far (CUDA graphs, on the CPU operator traces) are held during all three."""
    d = _decoding(t, e)
    stack = stack_activations(copy.model, copy.layout, copy.compute, copy.stream, device, d.prefilled)
    b, layers = stack.any, [layer for chunk in chunk_layers(copy, stack) for layer in chunk]
    cast = head_of(copy).cast if copy.last else 0  # the head is cast once
    sampling = _sampling_bytes(e, copy, d.slots, b.hidden) - cast if copy.last else 0
    step = max(_step_bytes(e, copy, d, layers, device), sampling)
    captured = _num_captures(e, copy, d, device) * (
        step if device == "cuda" else _trace_bytes(e, copy, d, layers))
    images = ImageBytes.of(t, copy, _image_tokens(t, e, d), device).forward
    sequences = d.prefill // max(d.prefilled, 1)  # of a prefill
    activations = max(max(layer.forward_peak(d.prefill, sequences) for layer in layers),
                      d.prefill * b.stream + images if images else 0,
                      d.prefill * b.hidden + sampling,
                      step + captured)
    drawn = 0 if e.sampling.greedy or not copy.last else 8 * d.new * d.slots
    tokens = 12 * d.new + INDEX + 8 * width(t.frames[e.frame]) + 8 * d.prompt
    return {"KV cache": d.slots * _kv_heads(copy) * _bytes_per_head(copy, d.length) * sum(x.caches for x in layers),
            "states": 2 * d.slots * sum(layer.state for layer in layers),
            "activations": cast + activations,
            "half-precision weights": half_precision_bytes(copy), **weights_in_blocks(copy, device),
            "progress": drawn + d.rows * tokens}


def _decoding(t: Tables, e: Generate) -> _Decoding:
    frame, prompts = t.frames[e.frame], t.frames[e.prompts]
    count = rows(frame, t.spreads[e.spread], t.layouts, t.frames)
    new = frame.max_response_tokens if e.conversation is not None else e.sampling.max_new_tokens
    prompt = width(prompts)
    if e.per_step:  # all but the last part of a response is run with the prompt
        new, prompt = e.per_step, prompt + (prompts.iterations - 1) * e.per_step
    # an answer of an environment may be long, and a conversation that gave its slot away is prefilled as a whole
    prefilled = prompt + new if e.conversation is not None else prompt
    return _Decoding(count, _slots(e, count), prompt, new, prefilled)


def _kv_heads(copy: Copy) -> int:
    """Heads of the KV cache on this rank."""
    return -(-copy.model.sizes.kv_heads // copy.layout.tp)


def _bytes_per_head(copy: Copy, tokens: int) -> int:
    """Keys and values of `tokens` tokens in one head of one layer."""
    return (copy.model.sizes.head_dim + value_width(copy.model)) * tokens * copy.compute


def _step_bytes(e: Generate, copy: Copy, d: _Decoding, layers: Sequence[LayerActivations], device: str) -> int:
    """A decoding step without its head: the layer that needs most, and copies of the KV cache."""
    heads, groups, each = -(-copy.model.sizes.heads // copy.layout.tp), _kv_heads(copy), _bytes_per_head(copy, d.length)
    # CUDA's kernels for grouped-query attention get repeated keys and values; others read the KV cache in place
    read = each * heads if device == "cuda" and heads != groups else 0
    if attention_kind(copy.model, copy.compute, device, padded=True) == "math" and copy.compute != FLOAT:
        # in float32, with scaled keys, and these in the order of their product
        read = FLOAT * groups * d.length * (3 * copy.model.sizes.head_dim + value_width(copy.model))
    if e.conversation is not None:  # slots of a pass need not be neighbors: what they hold is copied
        read = max(read, each * groups)
    return d.slots * read + max(layer.decoding(d.slots, _mask_bytes(d)) for layer in layers)


def _mask_bytes(d: _Decoding) -> int:
    """The attention mask of a slot."""
    return 5 * d.length


def _sampling_bytes(e: Generate, copy: Copy, slots: int, hidden: int) -> int:
    """The last hidden states and their logits, from which tokens are sampled. hidden: bytes of a hidden state."""
    divided = copy.layout.tp if vocabulary(copy)[1] else 1
    return slots * hidden + logits.sampling(head_of(copy), slots, e.sampling, divided)


def _num_captures(e: Generate, copy: Copy, d: _Decoding, device: str) -> int:
    """Captured steps that hold memory. Those of conversations are not captured, nor on a GPU those with experts or
    collectives."""
    alone = copy.layout.tp == 1 and not copy.model.sizes.experts_per_token
    if e.conversation is not None or device != "cpu" and not alone:
        return 0
    return num_captures_with_memory(d.prompt, d.new, device == "cpu")


def _trace_bytes(e: Generate, copy: Copy, d: _Decoding, layers: Sequence[LayerActivations]) -> int:
    """The outputs of the operators of a captured step on a CPU, which all stay."""
    head, tp = head_of(copy), copy.layout.tp if vocabulary(copy)[1] else 1
    made = sampling_bytes_of_trace(head, e.sampling, tp, d.slots) if copy.last else 0
    ends = layers[0].stream * copy.first + layers[0].hidden * copy.last  # embeddings, and the norm after the layers
    angles = FLOAT * ANGLES * copy.model.sizes.head_dim  # the cosines and sines of a position, and what they are of
    of_slot = sum(layer.outputs + layer.row_outputs for layer in layers) + _mask_bytes(d) + ends + angles
    return d.slots * of_slot + made + sum(layer.fixed_outputs for layer in layers) + _collective_bytes(copy, d)


def _collective_bytes(copy: Copy, d: _Decoding) -> int:
    """What the collectives of a captured step make: the logits of all ranks. Sums are in place, through memory that the
    ranks of a machine share."""
    if copy.layout.tp == 1 or not copy.last or not vocabulary(copy)[1]:
        return 0
    return FLOAT * d.slots * head_of(copy).rows * (1 + copy.layout.tp)


def _image_tokens(t: Tables, e: Generate, d: _Decoding) -> int:
    """Tokens of images in a prefill, at most: those of a prompt are run once for all its responses."""
    prompts = -(-d.slots // max(e.sampling.n, 1))
    return min(d.prefill, prompts * min(t.frames[e.prompts].max_prompt_tokens, t.images))


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
    frame = t.frames[e.frame]
    count = rows(frame, t.spreads[e.spread], t.layouts, t.frames)
    slots = _slots(e, count)
    # a slot is given away to a conversation that has it from then on
    away = min(live_conversations(slots, e.waiting), _sequences_at_once(e, count)) - slots
    return away * _kv_heads(copy) * _bytes_per_head(copy, width(frame)) * copy.layers


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
    frame = t.frames[e.frame]
    tokens = rows(frame, t.spreads[e.spread], t.layouts, t.frames) * max(width(frame) - 1, 0)
    return _kv_heads(copy) * _bytes_per_head(copy, tokens) * copy.layers
