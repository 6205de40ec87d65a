"""What a train call holds while it runs, besides gradients and optimizer state: activations of the passes, logits, and
under `zero` parameters and gradients that are complete.

In: an event, a copy of its model at a cell. Out: holder -> bytes, at the moment of a minibatch when most is held.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil

from rldsl.memory import logits
from rldsl.memory.activations import LayerActivations
from rldsl.memory.call_parts import (
    INDEX,
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
from rldsl.memory.parameters import (
    FLOAT,
    Copy,
    largest_step,
    largest_weight,
    summed_in_leaves,
    tied_gradient,
    vocabulary,
    without_layouts,
)
from rldsl.memory.values import PassPeaks, Tables, width
from rldsl.memory.zero_memory import bytes_under_zero
from rldsl.plan.events import Train
from rldsl.plan.heads import LOGPROBS_AT, OUTPUTS
from rldsl.plan.model import Layout
from rldsl.plan.prompt_sources import shares_prompts
from rldsl.plan.spaces import unit_tokens, units_of_minibatch
from rldsl.sharding.pipeline_schedule import max_activations_in_flight, max_waiting_messages, passes_in_flight

MAX_SENT_GRADIENTS = 3  # that a rank with several chunks keeps (`tests/cuda_paths/test_coalesced.py`)
LOSS_ENTRY = 96  # bytes of what a loss keeps for each entry


def train_bytes(t: Tables, e: Train, copy: Copy, device: str) -> Needs:
    """The maximum over the passes of a minibatch and the optimizer step: one fused kernel without extra memory, except
    where it needs complete parameters."""
    rows = _rows_of_minibatch(t, e, copy.layout) * sum([width(t.frames[f]) for f in e.frames]) * INDEX
    peaks, step = _passes_of_minibatch(t, e, copy, device), largest_step(copy)
    most = bytes_under_zero(copy, peaks, device) if copy.layout.zero else {"activations": peaks.most}
    return {**(most if step <= sum(most.values()) else {"activations": step}), "rows": rows,
            "half-precision weights": half_precision_bytes(copy), **summed_in_leaves(copy),
            **weights_in_blocks(copy, device)}


def _rows_of_minibatch(t: Tables, e: Train, layout: Layout) -> int:
    """Rows of each frame on the dp rank that has most."""
    frames, spread = [t.frames[f] for f in e.frames], t.spreads[e.spread]
    unit = frames[0].per_prompt if spread.granularity == "prompt" else 1  # rows that stay together
    longest = unit_tokens(frames, unit > 1)
    return unit * ceil(units_of_minibatch(spread, frames[0].count // unit, longest) / layout.dp)


def _passes_of_minibatch(t: Tables, e: Train, copy: Copy, device: str) -> PassPeaks:
    """`_pass_peaks`, cached: nothing in them depends on what `zero` divides, and on `dp` they depend only through the
    micro-batches."""
    if t.passes is None:
        return _pass_peaks(t, e, copy, device, _largest_micro_batch(t, e, copy))
    x = copy.layout
    common = (e.id, e.recompute, without_layouts(copy.model), copy.trained, x.tp, x.pp, x.vpp, x.cp, x.ep, copy.cell,
              device)
    key = e.mbs, e.mbt, x.dp, common
    if key not in t.passes:
        m = _largest_micro_batch(t, e, copy)
        if x.vpp == 1:  # more of them only last longer
            m = replace(m, count=min(m.count, max(x.pp, 2)))
        of_micro_batch = m, common
        if of_micro_batch not in t.passes:
            t.passes[of_micro_batch] = _pass_peaks(t, e, copy, device, m)
        t.passes[key] = t.passes[of_micro_batch]
    found: PassPeaks = t.passes[key]
    return found


def _largest_micro_batch(t: Tables, e: Train, copy: Copy) -> MicroBatch:
    return largest_micro_batch(t, e.frames, _rows_of_minibatch(t, e, copy.layout), e.mbs, e.mbt, copy.layout,
                               t.spreads[e.spread] if shares_prompts(copy.model, copy.layout) else None)


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


def _pass_peaks(t: Tables, e: Train, copy: Copy, device: str, m: MicroBatch) -> PassPeaks:
    """The pipeline schedule gives the number of forward passes in flight. m: the largest micro-batch."""
    stack, layout, full = call_stack(t, e.frames, copy, device), copy.layout, e.recompute == "full"
    b, chunks = stack.any, chunk_layers(copy, stack)
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
    messages = m.tokens * b.stream * _num_messages(layout, m.count, copy.cell.pp_rank, device)
    begins = messages + passes.when_backward_begins()
    waiting = tied_gradient(copy)
    each = 2 * m.cp_tokens * b.gathered_kv + m.repeated * b.repeated + _weight_bytes(copy) + waiting
    last_of_chunk = min([m.tokens * b.stream if full else k[-1] for k in saved if k], default=0)
    first_layer = saved[0][0] + peaks[0][0] + (0 if full else -sum(saved[0]))
    return PassPeaks(
        head=messages + _head_peak(t, e, copy, passes, b, m, device),
        layers=begins + each + max(_backward(k, p, full) for k, p in zip(saved, peaks, strict=True)),
        first_layer=messages + passes.when_backward_begins(0) + each + first_layer,
        embedding=messages + waiting + _embedding_peak(copy, passes),
        tower=messages + waiting + _tower_peak(copy, passes, images, m.tokens * b.stream),
        between_layers=begins + waiting - last_of_chunk,
        between_passes=messages + passes.before_layers(),
        several=m.count > 1)


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
    head, what = head_of(copy), logits.Read(any(output.reads == "distribution" for output in read), bool(e.ids))
    return hidden + max(logits.forward(head, m.responses, what, device, trains=True),
                        logits.backward(head, m.responses, not copy.model.base, what, device))
