"""What a call of a model holds while it runs, besides parameters and values: activations, logits, decode buffers.

In: an event, a copy of its model at a cell, frames. Out: holder -> bytes, at the peak of the call. Micro-batches have
rows of the maximum length. Each backend has its own counts: `MemoryCosts` has those of the torch backend, and other
backends derive theirs from it (`Description.memory`).
Errors: RL0326 a backend whose description returns something else than bytes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil
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
from rldsl.memory.parameters import (
    FLOAT,
    Copy,
    gathered,
    largest_step,
    largest_weight,
    optimizer_state,
    summed_in_leaves,
    trained,
    vocabulary,
    without_layouts,
)
from rldsl.memory.values import Tables, rows, width
from rldsl.plan.backends import costs, unusable
from rldsl.plan.events import AnyCall, Generate, Infer, Train
from rldsl.plan.heads import DISTRIBUTION, LOGPROBS_AT, OUTPUTS
from rldsl.plan.model import Layout
from rldsl.plan.prompt_sources import shares_prompts
from rldsl.plan.spaces import unit_tokens, units_of_minibatch
from rldsl.sharding.pipeline_schedule import max_activations_in_flight, max_waiting_messages, passes_in_flight

MAX_SENT_GRADIENTS = 3  # that a rank with several chunks keeps (`tests/cuda_paths/test_coalesced.py`)
LOSS_ENTRY = 96  # bytes of what a loss keeps for each entry


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
    checked = {holder: _check_bytes(copy, f"{method}[{holder!r}]", size) for holder, size in needs.items()}
    return {f"{holder} of {event.display_name}": size for holder, size in checked.items() if size}


def _check_bytes(copy: Copy, what: str, size: object) -> int:
    if type(size) is not int or size < 0:
        raise unusable(copy.layout.backend, f"`memory.{what}` must be a whole number of bytes, 0 or more, not {size!r}")
    return size


def infer_bytes(t: Tables, e: Infer, copy: Copy, device: str) -> Needs:
    """The activations of the largest micro-batch, in the layer that needs most or in the head; and the rows of the
    call."""
    stack, frame = call_stack(t, (e.frame,), copy, device), t.frames[e.frame]
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
    made = logits.forward(head_of(copy), m.responses, output.reads == "distribution", device) if output.logits else 0
    ids = m.responses * TOP_ENTRY * ids_per_token(t, e.ids)
    hidden = m.responses * 2 * FLOAT * copy.model.sizes.hidden if e.output_name == DISTRIBUTION else 0
    return (m.tokens + m.responses) * b.hidden + made + ids + hidden


def train_bytes(t: Tables, e: Train, copy: Copy, device: str) -> Needs:
    """The maximum over the passes of a minibatch and the optimizer step: one fused kernel without extra memory, except
    where it needs complete parameters."""
    whole = _rows_of_minibatch(t, e, copy.layout) * sum([width(t.frames[f]) for f in e.frames]) * INDEX
    most = max(_passes_of_minibatch(t, e, copy, device), largest_step(copy))
    return {"activations": most, "half-precision weights": half_precision_bytes(copy), "rows": whole, **gathered(copy),
            **summed_in_leaves(copy), **weights_in_blocks(copy, device)}


def _rows_of_minibatch(t: Tables, e: Train, layout: Layout) -> int:
    """Rows of each frame on the dp rank that has most."""
    frames, spread = [t.frames[f] for f in e.frames], t.spreads[e.spread]
    unit = frames[0].per_prompt if spread.granularity == "prompt" else 1  # rows that stay together
    longest = unit_tokens(frames, unit > 1)
    return unit * ceil(units_of_minibatch(spread, frames[0].count // unit, longest) / layout.dp)


def _passes_of_minibatch(t: Tables, e: Train, copy: Copy, device: str) -> int:
    """`_peak_of_passes`, cached: nothing in it depends on what `zero` divides."""
    if t.passes is None:
        return _peak_of_passes(t, e, copy, device)
    x = copy.layout
    key = (e.id, e.mbs, e.mbt, e.recompute, without_layouts(copy.model), copy.trained, x.dp, x.tp, x.pp, x.vpp, x.cp,
           x.ep, copy.cell, device)
    if key not in t.passes:
        t.passes[key] = _peak_of_passes(t, e, copy, device)
    return t.passes[key]


@dataclass(frozen=True, slots=True)
class _PassesInFlight:
    """Forward passes of a minibatch whose backward passes have not run yet."""

    schedule: tuple[int, int, int, int]  # pp, chunks of a rank, micro-batches, this rank's index along pp
    kept: tuple[int, ...]  # bytes that a forward pass through each chunk keeps for its backward pass

    def when_backward_begins(self, chunk: int | None = None) -> int:
        """The most that is kept when a backward pass begins: of any chunk, or of this one."""
        return max_activations_in_flight(passes_in_flight(*self.schedule, chunk), self.kept)

    def before_layers(self) -> int:
        """The most that is kept when the backward pass of the first chunk has gone through all its layers."""
        return self.when_backward_begins(0) - self.kept[0]


def _peak_of_passes(t: Tables, e: Train, copy: Copy, device: str) -> int:
    """The maximum over the backward passes of a layer, of the head, and of the embedding. The pipeline schedule gives
    the number of forward passes in flight."""
    stack, layout, full = call_stack(t, e.frames, copy, device), copy.layout, e.recompute == "full"
    b, chunks = stack.any, chunk_layers(copy, stack)
    m = largest_micro_batch(t, e.frames, _rows_of_minibatch(t, e, layout), e.mbs, e.mbt, layout,
                            t.spreads[e.spread] if shares_prompts(copy.model, layout) else None)
    # of full length, which need as much as those of the micro-batch
    sequences = -(-m.tokens // longest_sequence(t, e.frames))
    seen = image_tokens(t, [t.frames[f] for f in e.frames], m.sequences // len(e.frames), False)
    images = ImageBytes.of(t, copy, seen, device, full)
    saved = [[layer.kept(m.tokens, sequences) + m.cp_tokens * b.gathered_kv + m.repeated * b.repeated
              for layer in layers] for layers in chunks]  # by each layer, for its backward pass
    peaks = [[layer.backward_peak(m.tokens, sequences) for layer in layers] for layers in chunks]
    kept = [m.tokens * b.stream * _num_boundary_states(copy, c) + (len(k) * m.tokens * b.stream if full else sum(k))
            for c, k in enumerate(saved)]
    kept[0] += images.kept
    micro_batches = m.count if layout.vpp > 1 else min(m.count, layout.pp)  # more of them only last longer
    passes = _PassesInFlight((layout.pp, layout.vpp, micro_batches, copy.cell.pp_rank), tuple(kept))
    layers = (passes.when_backward_begins() + _weight_bytes(copy) + 2 * m.cp_tokens * b.gathered_kv
              + m.repeated * b.repeated
              + max(_backward(k, p, full) for k, p in zip(saved, peaks, strict=True)))
    messages = m.tokens * b.stream * _num_messages(layout, m.count, copy.cell.pp_rank, device)
    return messages + max(layers, _embedding_peak(copy, passes), _tower_peak(copy, passes, images, m.tokens * b.stream),
                          _head_peak(t, e, copy, passes, b, m, device))


def _weight_bytes(copy: Copy) -> int:
    """The gradient of the largest matrix: in the dtype of its product and, if that is another, in float32."""
    return (copy.compute + (FLOAT if copy.compute != FLOAT else 0)) * largest_weight(copy)


def _embedding_peak(copy: Copy, passes: _PassesInFlight) -> int:
    """The backward pass of the embedding: its gradient comes last, as a full matrix. 0 where it is not trained here."""
    if not copy.first or copy.model.base:
        return 0
    return passes.before_layers() + FLOAT * vocabulary(copy)[0] * copy.model.sizes.hidden


def _tower_peak(copy: Copy, passes: _PassesInFlight, images: ImageBytes, hidden: int) -> int:
    """The passes of a vision tower, which come first, and last; 0 without images. hidden: bytes of the hidden states of
    a micro-batch."""
    if not images.forward:
        return 0
    return passes.before_layers() + max(hidden + images.forward, images.kept + images.backward + _weight_bytes(copy))


def _head_peak(t: Tables, e: Train, copy: Copy, passes: _PassesInFlight, b: LayerActivations, m: MicroBatch,
               device: str) -> int:
    """The passes of the last norm, the head and the loss; 0 on other stages."""
    if not copy.last:
        return 0
    entries = m.responses * LOSS_ENTRY * ids_per_token(t, e.ids)
    return (passes.when_backward_begins(copy.layout.vpp - 1) + m.tokens * b.final
            + max(m.tokens * b.norm, _loss(t, e, copy, b, m, device)) + entries)


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
        hidden += logits.over_vocabulary(head_of(copy), m.responses, len(e.heads), not copy.model.base, device)
    read = {OUTPUTS[what] for _, _, what in e.model_outputs if not (e.heads and what == LOGPROBS_AT)}
    if not any(output.logits for output in read):
        return hidden
    entropy = any(output.reads == "distribution" for output in read)
    head = head_of(copy)
    return hidden + max(logits.forward(head, m.responses, entropy, device, trains=True),
                        logits.backward(head, m.responses, not copy.model.base, entropy, device))
