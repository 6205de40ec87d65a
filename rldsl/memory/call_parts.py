"""What the memory counts of `generate`, inference and training have in common.

In: the frames of a call, a copy of its model at a cell. Out: the activations of its layers by chunk, its head, and the
copies of weights that exist besides the stored ones.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from rldsl.memory import logits
from rldsl.memory.activations import LayerActivations, StackActivations, stack_activations
from rldsl.memory.parameters import FLOAT, Copy, largest_weight, linear_elements, row_parallel_elements, vocabulary
from rldsl.memory.values import Tables, width
from rldsl.sharding.layout import stage_layers

Needs = Mapping[str, int]  # holder -> bytes
INDEX = 48  # bytes of indices per token of a call: token ids, positions, offsets
TOP_ENTRY = 12  # bytes for each entry: of ids and log-probs that are made and joined


def call_stack(t: Tables, frames: Collection[str], copy: Copy, device: str) -> StackActivations:
    """The activations of the layers that the copy has at its cell."""
    return stack_activations(copy.model, copy.layout, copy.compute, copy.stream, device, longest_sequence(t, frames))


def longest_sequence(t: Tables, frames: Collection[str]) -> int:
    """Tokens of the longest sequence of some frames."""
    return max(width(t.frames[f]) for f in frames)


def chunk_layers(copy: Copy, stack: StackActivations) -> tuple[tuple[LayerActivations, ...], ...]:
    """The layers of each chunk of the copy's pipeline rank."""
    pp, count = copy.layout.pp, copy.layout.pp * copy.layout.vpp
    return tuple(stack.of(stage_layers(copy.model.layers, count, s)) for s in range(copy.cell.pp_rank, count, pp))


def head_of(copy: Copy) -> logits.Head:
    """The output embedding of the copy at its cell."""
    stored = copy.compute if copy.model.base else copy.stored
    if any(s.float32 for s in (*copy.model.params, *copy.model.base) if s.style in ("vocab", "head")):
        stored = FLOAT
    return logits.Head(vocabulary(copy)[0], copy.model.sizes.hidden, stored, copy.compute, bool(copy.model.invariant),
                       not copy.layout.zero, copy.model.sizes.capped_logits)


def ids_per_token(t: Tables, ids: str) -> int:
    """How many ids of tokens a value has for each response token; 0 without one."""
    return t.values[ids].width if ids else 0


def half_precision_bytes(copy: Copy) -> int:
    """Half-precision copies of float32 matrices. Autocast keeps those of trained parameters until the call ends, and an
    invariant model all; with `zero` parameters are gathered in half precision anyway; for another `ema` model one
    matrix is cast at a time."""
    if copy.stored == copy.compute or copy.layout.zero:
        return 0
    kept = copy.trained or copy.model.invariant
    return copy.compute * (linear_elements(copy) if kept else largest_weight(copy))


def weights_in_blocks(copy: Copy, device: str) -> Needs:
    """Copies of matrices that an invariant model keeps until a call ends, as `WeightCopies` of the torch backend does:
    of float32 ones in blocks of columns, which oneDNN reads on a CPU."""
    if not copy.model.invariant or copy.layout.zero:
        return {}
    blocks = FLOAT * row_parallel_elements(copy) if device == "cpu" and copy.compute == FLOAT else 0
    return {"weights in blocks": blocks} if blocks else {}
