"""What a call of a model holds while it runs, besides parameters and values: activations, logits, decode buffers.

In: an event, a copy of its model at a cell, frames. Out: holder -> bytes, at the peak of the call. Micro-batches have
rows of the maximum length. Each backend has its own counts: `MemoryCosts` has those of the torch backend, and other
backends derive theirs from it (`Description.memory`).
Errors: RL0326 a backend whose description returns something else than bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import assert_never

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
from rldsl.memory.generate_memory import generate_bytes
from rldsl.memory.images import ImageBytes, image_tokens
from rldsl.memory.micro_batch_size import MicroBatch, largest_micro_batch
from rldsl.memory.parameters import FLOAT, Copy, optimizer_state, trained, without_layouts
from rldsl.memory.train_memory import train_bytes
from rldsl.memory.values import Tables, rows, width
from rldsl.plan.backends import costs, unusable
from rldsl.plan.events import AnyCall, Generate, Infer, Train
from rldsl.plan.heads import DISTRIBUTION, OUTPUTS
from rldsl.plan.prompt_sources import shares_prompts


class MemoryCosts:
    """What a rank holds with one backend. This class has the counts of the torch backend, tensor by tensor; derive from
    it and override what differs. Every method is pure and returns bytes on one rank.

    tables: the plan's records by id. copy: the model under the layout of the event, at one of its cells. device: "cuda"
    or "cpu", which have different kernels."""

    def generate(self, tables: Tables, event: Generate, copy: Copy, device: str) -> Needs:
        """Holder -> bytes while a `generate` runs."""
        return generate_bytes(tables, event, copy, device)

    def infer(self, tables: Tables, event: Infer, copy: Copy, device: str) -> Needs:
        """Holder -> bytes while an inference call runs."""
        return infer_bytes(tables, event, copy, device)

    def train(self, tables: Tables, event: Train, copy: Copy, device: str) -> Needs:
        """Holder -> bytes while a train call runs, besides gradients and optimizer state."""
        return train_bytes(tables, event, copy, device)

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
    checked = {holder: _check_bytes(copy, method, size, holder) for holder, size in needs.items()}
    return {f"{holder} of {event.display_name}": size for holder, size in checked.items() if size}


def _check_bytes(copy: Copy, method: str, size: object, holder: str = "") -> int:
    """holder: of what the method returns, where it returns several."""
    if type(size) is not int or size < 0:
        what = f"{method}[{holder!r}]" if holder else method
        raise unusable(copy.layout.backend, f"`memory.{what}` must be a whole number of bytes, 0 or more, not {size!r}")
    return size


def infer_bytes(t: Tables, e: Infer, copy: Copy, device: str) -> Needs:
    """The activations of the largest micro-batch, in the layer that needs most or in the head; and the rows of the
    call."""
    frame = t.frames[e.frame]
    count = rows(frame, t.spreads[e.spread], t.layouts, t.frames)
    m = largest_micro_batch(t, (e.frame,), count, e.mbs, e.mbt, copy.layout,
                            t.spreads[e.spread] if shares_prompts(copy.model, copy.layout) else None)
    row = width(frame) * INDEX + frame.max_response_tokens * TOP_ENTRY * ids_per_token(t, e.ids)
    return {"activations": _forward_bytes(t, e, copy, device, m), "half-precision weights": half_precision_bytes(copy),
            **weights_in_blocks(copy, device), "rows": count * row}


def _forward_bytes(t: Tables, e: Infer, copy: Copy, device: str, m: MicroBatch) -> int:
    """The forward pass of a micro-batch, cached: the same for any number of micro-batches and dp ranks."""
    x = copy.layout
    key = (e.id, m.tokens, m.responses, m.sequences, m.cp_tokens, m.repeated, without_layouts(copy.model), copy.stored,
           x.tp, x.pp, x.vpp, x.cp, x.ep, copy.cell, device)
    found: int | None = t.passes.get(key) if t.passes is not None else None
    if found is not None:
        return found
    stack = call_stack(t, (e.frame,), copy, device)
    passed = 0 if copy.last else m.tokens * stack.any.stream  # the message of the micro-batch before
    found = passed + max(_layer_bytes(t, e, copy, stack, m), _image_bytes(t, e, copy, stack.any, m, device),
                         _head_bytes(t, e, copy, stack.any, m, device) if copy.last else 0)
    if t.passes is not None:
        t.passes[key] = found
    return found


def _layer_bytes(t: Tables, e: Infer, copy: Copy, stack: StackActivations, m: MicroBatch) -> int:
    """The forward pass of the layer that needs most."""
    b = stack.any
    # of full length, which need as much as those of the micro-batch
    sequences = -(-m.tokens // longest_sequence(t, (e.frame,)))
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
    what = logits.Read(output.reads == "distribution", bool(e.ids))
    made = logits.forward(head_of(copy), m.responses, what, device) if output.logits else 0
    ids = m.responses * TOP_ENTRY * ids_per_token(t, e.ids)
    hidden = m.responses * 2 * FLOAT * copy.model.sizes.hidden if e.output_name == DISTRIBUTION else 0
    return (m.tokens + m.responses) * b.hidden + made + ids + hidden
