"""Every event of a plan, and the blocks that hold them: what ranks do together, in one totally ordered list.

Buffers are written `value@spread` or `model@layout` (`plan/model.py`); an event reads and writes them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from rldsl.plan.heads import What


@dataclass(frozen=True, slots=True)
class Sampling:
    n: int = 1
    max_new_tokens: int = 256
    min_new_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    greedy: bool = False
    stop: tuple[str, ...] = ()


Part = Literal["parameters", "optimizer"]  # optimizer: moments and gradients


def split(buffer: str) -> tuple[str, str]:
    """ "gen.tokens@s2" -> ("gen.tokens", "s2")."""
    left, _, right = buffer.rpartition("@")
    return left, right


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """What its participants (every rank of `mesh`) do together. at: the source position that asked for it.
    because: why the compiler inserted it; "" for what the user wrote. bytes: moved between ranks, when the program
    fixes it; -1 when the lengths of a run do."""

    id: int
    mesh: str
    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
    at: str = ""
    because: str = ""
    bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Load(Event):
    """Build a model under a layout; each rank reads its own slices of the weights. Writes `model@layout`. of: the
    layout whose copy it is too, where both hold the same (`reshard/alias.py`): there is one, and nothing is
    read from the disk."""

    model: str
    layout: str
    of: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fetch(Event):
    """The step's rows of a data source, read and tokenized by every participant alike."""

    data: str
    frames: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths(Event):
    """Row lengths of a frame, from the ranks of `spread` to every participant. Fixed size: 16 bytes a row."""

    frame: str
    spread: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer(Event):
    """Values of one frame from spread to spread."""

    values: tuple[str, ...]
    src: str
    dst: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Realloc(Event):
    """Parameters of a model from layout to layout (`reshard/`). bytes: received by all ranks. messages: the most from
    one rank to one other. digest: sha256 over the paths that they take.

    source: the model whose parameters under `src` move, where it is another one ("": the model itself). They become a
    new version of `model`: new = decay * old + (1 - decay) * source in float32, so a copy with decay 0. version: the
    position of what made the source's version, the last before this in the program ("": nothing before it did)."""

    model: str
    src: str
    dst: str
    messages: int = 0
    digest: str = ""
    source: str = ""
    decay: float = 0.0
    version: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Offload(Event):
    """Parameters, or the optimizer's state of a model that is trained under this layout, to host memory after use."""

    model: str
    layout: str
    what: Part = "parameters"


@dataclass(frozen=True, slots=True, kw_only=True)
class Onload(Event):
    """Back on the device: issued here, and waited for by what uses it."""

    model: str
    layout: str
    what: Part = "parameters"


@dataclass(frozen=True, slots=True, kw_only=True)
class Generate(Event):
    """Completions of the frame `prompts` become the frame `frame`. mbs: most sequences decoded together on a shard
    (0: all)."""

    model: str
    layout: str
    spread: str
    prompts: str
    frame: str
    sampling: Sampling
    mbs: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Infer(Event):
    """One forward pass. what: "logprobs", "entropy", "values" (token level) or "scores" (seq level). mbs, mbt: most
    sequences, and most tokens, in a micro-batch (0: all)."""

    model: str
    layout: str
    spread: str
    frame: str
    what: What
    output: str
    temperature: float = 1.0
    mbs: int = 0
    mbt: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Train(Event):
    """minibatches * epochs optimizer steps, or fewer: where the program has an output "stop" that is true of a
    minibatch, that one makes no step and no other follows. The output "updates" is then the number of steps made.
    fresh: program input -> (frame, what), the differentiable outputs of this model; data: program input -> value.
    outputs: metric -> value it is written to. nonfinite: what becomes of a minibatch whose gradient is not: the run
    stops, or the minibatch makes no step and the output "skipped" counts it. mbs, mbt: as in `Infer`, of all frames
    together. recompute: "full" keeps the input of each layer alone for the backward pass, which runs the layer's
    forward again (Chen et al. 2016)."""

    model: str
    layout: str
    spread: str
    frames: tuple[str, ...]
    loss: str
    fresh: tuple[tuple[str, str, str], ...]
    data: tuple[tuple[str, str], ...]
    outputs: tuple[tuple[str, str], ...]
    mbs: int = 0
    mbt: int = 0
    nonfinite: Literal["stop", "skip"] = "stop"
    recompute: Literal["none", "full"] = "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class Compute(Event):
    """A pure program over values of the participants' rows. inputs: program input -> value; outputs: program output
    -> value."""

    spread: str
    program: str
    frames: tuple[str, ...]
    inputs: tuple[tuple[str, str], ...]
    outputs: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Select(Event):
    """Of each (value, kept value), the rows of the frame `frame` go from the first to the second; each participant
    works on its own rows. condition: the seq-level value that says which rows those are, or "" when the lengths of
    `frame` are known already."""

    spread: str
    frame: str
    values: tuple[tuple[str, str], ...]
    condition: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Collect(Event):
    """Of each (value, collected value), the rows of this turn of the loop are appended: row r of turn t (from 0)
    becomes row t * count + r. A rank holds the same share under `src` and `dst`, so nothing moves."""

    frame: str
    into: str
    values: tuple[tuple[str, str], ...]
    src: str
    dst: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Save(Event):
    """A HuggingFace directory; "{out}" and "{step}" in `path` are filled in at run time."""

    model: str
    layout: str
    path: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint(Event):
    """The end of a step, on every rank: all that the next step needs of this one (it reads it) is written after each
    `every`-th step, and when the run is asked to stop, which all ranks then do together. The last `keep` stay."""

    every: int
    keep: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Log(Event):
    """Batch-level values to the log. metrics: (name, buffer); the first rank of the buffer's mesh sends it to rank
    `to`."""

    metrics: tuple[tuple[str, str], ...]
    to: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Free(Event):
    """Buffers that nothing reads any more."""

    buffers: tuple[str, ...]


EVENTS: dict[str, type[Event]] = {
    c.__name__.lower(): c
    for c in (Load, Fetch, Lengths, Transfer, Realloc, Offload, Onload, Generate, Infer, Train, Compute, Select,
              Collect, Save, Checkpoint, Log, Free)
}


@dataclass(frozen=True, slots=True)
class Loop:
    """`trips` runs of the body, the same number on every rank. until: a batch-level buffer that the body writes; the
    loop also ends when it is true, and frees it each turn. collects: buffers that are made empty before the first turn
    and to which the body appends. over: the data source over whose rows it goes once, in file order, a batch each
    turn; the last batch may be short, and `trips` is then the most turns."""

    id: str
    trips: int
    body: tuple[Item, ...]
    until: str = ""
    collects: tuple[str, ...] = ()
    over: str = ""


@dataclass(frozen=True, slots=True)
class Every:
    """The body, in each iteration i (from 1) of the enclosing loop with i % period == 0."""

    period: int
    body: tuple[Item, ...]


Item = Event | Loop | Every
