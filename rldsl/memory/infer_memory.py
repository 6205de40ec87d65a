"""What an inference call holds in the torch backend: the activations of one micro-batch, or its head.

In: the event, a copy of its model at a cell. Out: holder -> bytes, at the peak of the call.
"""

from __future__ import annotations

from rldsl.memory import logits
from rldsl.memory.activations import StackActivations
from rldsl.memory.call_parts import (
    INDEX,
    TOP_ENTRY,
    Needs,
    chunk_layers,
    half_precision_bytes,
    head_of,
    ids_per_token,
    longest_sequence,
    weights_in_blocks,
)
from rldsl.memory.images import ImageBytes, image_tokens
from rldsl.memory.micro_batch_size import largest_micro_batch
from rldsl.memory.parameters import FLOAT, Copy
from rldsl.memory.values import Tables, rows, width
from rldsl.plan.events import Infer
from rldsl.plan.heads import DISTRIBUTION, OUTPUTS
from rldsl.plan.prompt_sources import shares_prompts


def infer_bytes(t: Tables, e: Infer, copy: Copy, stack: StackActivations, device: str) -> Needs:
    b, here = stack.any, [layer for chunk in chunk_layers(copy, stack) for layer in chunk]
    count = rows(t.frames[e.frame], t.spreads[e.spread], t.layouts, t.frames)
    m = largest_micro_batch(t, (e.frame,), count, e.mbs, e.mbt, copy.layout,
                            t.spreads[e.spread] if shares_prompts(copy.model, copy.layout) else None)
    head = 0
    if copy.last:
        head = (m.tokens + m.responses) * b.hidden
        if OUTPUTS[e.output_name].logits:
            head += logits.forward(head_of(copy), m.responses, OUTPUTS[e.output_name].reads == "distribution", device)
        head += m.responses * TOP_ENTRY * ids_per_token(t, e.ids)
        head += m.responses * 2 * FLOAT * copy.model.sizes.hidden * (e.output_name == DISTRIBUTION)
    passed = 0 if copy.last else m.tokens * b.stream  # the message of the micro-batch before
    sequences = -(-m.tokens // longest_sequence(t, e))  # of full length, which need as much as those of the micro-batch
    most = max(max(layer.forward_peak(m.tokens, sequences) for layer in here)
               + 3 * m.cp_tokens * b.gathered_kv + m.repeated * b.repeated, head)
    if images := ImageBytes.of(t, copy, image_tokens(t, (t.frames[e.frame],), m.sequences, True), device).forward:
        most = max(most, m.tokens * b.stream + images)
    return {"activations": passed + most, "half-precision weights": half_precision_bytes(copy),
            **weights_in_blocks(copy, device),
            "rows": count * (width(t.frames[e.frame]) * INDEX
                             + t.frames[e.frame].max_response_tokens * TOP_ENTRY * ids_per_token(t, e.ids))}
