"""What a model needs in memory and work besides its parameters: its sizes, and what trials of some modules found.

The memory estimate and the simulator read these records; no rank computes with them.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Growth:
    """Bytes that a sequence needs, by its tokens."""

    sequence: int  # whatever its tokens
    token: int  # for each token
    chunk: int = 0  # tokens of a chunk, up to which a sequence is padded; 0: no chunks
    single: int = 0  # instead of all but `token`, where there is one chunk
    per_chunk: int = 0  # for each chunk
    squared: int = 0  # for each pair of chunks

    def bytes(self, tokens: int) -> int:
        """Of a sequence of `tokens` tokens."""
        chunks = -(-tokens // self.chunk) if self.chunk else 0
        rest = self.single if chunks == 1 else self.sequence + (self.per_chunk + self.squared * chunks) * chunks
        return max(self.token * tokens + rest, 0)


@dataclass(frozen=True, slots=True)
class Recurrence:
    """What the modules that carry a state need in the layers of one kind, with transformers' own code of torch: bytes
    per sequence (`models/recurrence.py`)."""

    itemsize: int  # bytes of an element in which these hold
    layers: tuple[int, ...]  # numbers of the layers
    attends: bool  # whether the layers have attention, too
    modules: tuple[str, ...]  # their names in a layer
    saved: Growth  # kept for the backward pass, with what they read
    forward: Growth  # peak of a forward pass that saves nothing
    backward: Growth  # peak of the backward pass, with what is saved
    state: int  # what is kept between decoding steps
    step: int  # peak of a decoding step, without the state
    outputs: int  # of all operations of a decoding step together
    written: int = 0  # of all operations of a forward pass together, for each token
    operations: int = 0  # of a forward pass, with floating-point numbers, for each token, without those of parameters


@dataclass(frozen=True, slots=True)
class Tower:
    """What a vision tower needs for each token that a prompt has for its images, with transformers' own code of torch
    (`models/tower.py`)."""

    itemsize: int  # bytes of an element in which this holds
    modules: tuple[str, ...]  # how the names of its parameters begin
    pixels: int  # bytes of its inputs
    saved: int  # bytes kept for the backward pass
    forward: int  # bytes at the peak of a forward pass that saves nothing
    backward: int  # bytes at the peak of the backward pass, with what is saved
    operations: int  # of a forward pass, with floating-point numbers
    gates: int = 0  # bytes that are saved besides where no kernel computes gated products


@dataclass(frozen=True, slots=True)
class ExpertBlock:
    """What the feed-forward block with its experts needs in the layers of one kind, where the experts have a special
    form, with transformers' own code of torch: bytes per token, with its input (`models/expert_blocks.py`)."""

    itemsize: int  # bytes of an element in which these hold
    layers: tuple[int, ...]  # numbers of the layers
    trained: bool  # whether its parameters have a gradient; in models with adapters they have none
    saved: int  # kept for the backward pass
    forward: int  # peak of a forward pass that saves nothing
    backward: int  # peak of the backward pass, with what is saved
    outputs: int  # of all operations of a forward pass together
    # bytes of a pass, whatever its tokens: what is made of weights
    fixed: int  # kept for the backward pass
    fixed_forward: int  # at the peak of a forward pass that saves nothing
    fixed_outputs: int  # of all operations of a forward pass together


@dataclass(frozen=True, slots=True)
class Sizes:
    """The sizes of a model that determine the work and memory of a call, besides its parameters; 0: unknown."""

    hidden: int = 0  # width
    intermediate: int = 0  # width of the MLP, or of one expert
    heads: int = 0  # attention heads
    kv_heads: int = 0  # key and value heads
    head_dim: int = 0  # width of a head
    vocab: int = 0  # tokens
    activation: str = ""  # of the MLP, as in the config: "silu"
    experts_per_token: int = 0  # experts per token; 0: a dense model
    whole_sequences: bool = False  # whether modules need complete sequences: they carry a state, or read images
    recurrences: tuple[Recurrence, ...] = ()  # of layers that carry a state from token to token
    other_norms: bool = False  # whether norms of layers keep their inputs for the backward pass (Gemma's)
    towers: tuple[Tower, ...] = ()  # of its vision tower, for each size of an element; (): it has none
    uncounted: str = ""  # what of it the memory estimate leaves out; "": nothing that is known
    expert_blocks: tuple[ExpertBlock, ...] = ()  # of layers whose experts have a special form
    # whether attention makes its probabilities by products and in float32: its scores have sinks, or are capped
    composed_scores: bool = False
    # whether MLPs of layers are modules that compute down(silu(gate(x)) * up(x)), for which backends have kernels
    gated_products: bool = False
    capped_logits: bool = False  # whether a logit z counts as c * tanh(z / c)
    rotated_halves: bool = False  # whether rotary embeddings rotate halves of heads, for which backends have kernels
