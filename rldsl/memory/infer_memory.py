"""What an inference call holds in the torch backend: the activations of one micro-batch, or its head.

In: the event, a copy of its model at a cell. Out: holder -> bytes, at the peak of the call.
"""

from __future__ import annotations

from rldsl.memory import logits
from rldsl.memory.activations import LayerActivations, StackActivations
from rldsl.memory.call_parts import (
    INDEX,
    TOP_ENTRY,
    Needs,
    call_stack,
    chunk_layers,
    half_precision_bytes,
    head_of,
    ids_per_token,
    longest_sequence,
    weights_in_blocks,
)
from rldsl.memory.images import ImageBytes, image_tokens
from rldsl.memory.micro_batch_size import MicroBatch, largest_micro_batch
from rldsl.memory.parameters import FLOAT, Copy
from rldsl.memory.values import Tables, rows, width
from rldsl.plan.events import Infer
from rldsl.plan.heads import DISTRIBUTION, OUTPUTS
from rldsl.plan.prompt_sources import shares_prompts


def infer_bytes(t: Tables, e: Infer, copy: Copy, device: str) -> Needs:
    """The activations of the largest micro-batch, in the layer that needs most or in the head; and the rows of the
    call."""
    stack, frame = call_stack(t, e, copy, device), t.frames[e.frame]
    count = rows(frame, t.spreads[e.spread], t.layouts, t.frames)
    m = largest_micro_batch(t, (e.frame,), count, e.mbs, e.mbt, copy.layout,
                            t.spreads[e.spread] if shares_prompts(copy.model, copy.layout) else None)
    passed = 0 if copy.last else m.tokens * stack.any.stream  # the message of the micro-batch before
    most = max(_layer_bytes(t, e, copy, stack, m), _image_bytes(t, e, copy, stack.any, m, device),
               _head_bytes(t, e, copy, stack.any, m, device) if copy.last else 0)
    row = width(frame) * INDEX + frame.max_response_tokens * TOP_ENTRY * ids_per_token(t, e.ids)
    return {"activations": passed + most, "half-precision weights": half_precision_bytes(copy),
            **weights_in_blocks(copy, device), "rows": count * row}


def _layer_bytes(t: Tables, e: Infer, copy: Copy, stack: StackActivations, m: MicroBatch) -> int:
    """The forward pass of the layer that needs most."""
    b = stack.any
    sequences = -(-m.tokens // longest_sequence(t, e))  # of full length, which need as much as those of the micro-batch
    peak = max(layer.forward_peak(m.tokens, sequences) for chunk in chunk_layers(copy, stack) for layer in chunk)
    return peak + 3 * m.cp_tokens * b.gathered_kv + m.repeated * b.repeated


def _image_bytes(t: Tables, e: Infer, copy: Copy, b: LayerActivations, m: MicroBatch, device: str) -> int:
    """The forward pass of the vision tower, before the layers; 0 without images."""
    seen = image_tokens(t, (t.frames[e.frame],), m.sequences, True)
    tower = ImageBytes.of(t, copy, seen, device).forward
    return m.tokens * b.stream + tower if tower else 0


def _head_bytes(t: Tables, e: Infer, copy: Copy, b: LayerActivations, m: MicroBatch, device: str) -> int:
    """The last hidden states, those of responses, and what the call makes of them."""
    output = OUTPUTS[e.output_name]
    made = logits.forward(head_of(copy), m.responses, output.reads == "distribution", device) if output.logits else 0
    ids = m.responses * TOP_ENTRY * ids_per_token(t, e.ids)
    hidden = m.responses * 2 * FLOAT * copy.model.sizes.hidden if e.output_name == DISTRIBUTION else 0
    return (m.tokens + m.responses) * b.hidden + made + ids + hidden
