"""Every kind of event of a plan: what ranks do together, in one totally ordered list.

A kind of event is one class: its fields, their roles (`plan/references.py`), its traits (`plan/traits.py`), and what it
is called. Fields that the program itself gives are in `plan/payloads.py`, what all kinds have in `plan/base_event.py`,
and the blocks around events in `plan/blocks.py`; both are imported from here. The kinds stay in one file, so that
whoever needs to know them all reads one list. tests/plan/test_event_kinds.py adds a kind, and shows what it takes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from rldsl.plan.base_event import EVERY_ITERATION, Copy, Event, Versions, optimizer_of, split_buffer
from rldsl.plan.blocks import Item, Loop, When, ahead_of, aheads_in, runs_in
from rldsl.plan.derive_ops import DERIVE_OPS
from rldsl.plan.heads import OUTPUTS
from rldsl.plan.payloads import (
    CollectSpec,
    ComputeSpec,
    DeriveSpec,
    DrawSpec,
    FetchSpec,
    GenerateSpec,
    InferSpec,
    LookupSpec,
    SampleSpec,
    Sampling,
    SaveSpec,
    StoreSpec,
    TrainSpec,
    UpdateSpec,
    Waiting,
)
from rldsl.plan.references import Buffer, FrameId, LayoutId, ModelName, Rank, SpreadId, ValueId
from rldsl.plan.traits import EVENTS, Buffers, Traits, event_kind

__all__ = [
    "AnyCall", "Checkpoint", "Collect", "Compute", "CopyPart", "Derive", "Draw", "EVENTS", "EVERY_ITERATION", "Event",
    "Fetch", "Free", "Generate", "Infer", "Item", "Lengths", "Load", "Log", "Lookup", "Loop", "ModelCall",
    "Offload", "Onload", "Realloc", "RowStates", "Sample", "Sampling", "Save", "Store", "Train", "Transfer", "Update",
    "Versions", "When", "ahead_of", "aheads_in", "optimizer_of", "runs_in", "split_buffer",
]

CopyPart = Literal["parameters", "optimizer"]  # of a model under a layout; optimizer: moments and gradients


# -------------------------------------------------------------------------------------------- copies of parameters


@event_kind(Traits(family="residency", blocking="none", participants=("layout",), communicators="layout",
                   buffers=Buffers(("{model}@{alias_of}",), ("{model}@{layout}",)), scratch=True,
                   not_diffed=("model", "layout")))
@dataclass(frozen=True, slots=True, kw_only=True)
class Load(Event):
    """Build a model under a layout; each rank reads its own slices of the weights. Writes `model@layout`."""

    model: ModelName  # that is built
    layout: LayoutId  # that it is built under
    # a layout with the same boxes (`reshard/alias.py`), whose copy serves both; nothing is read from disk. "": none
    alias_of: LayoutId = ""


@event_kind(Traits(family="movement", blocking="async", forwards=True, participants=("src", "dst"),
                   bytes_moved="planned", order_cost=20, scratch=True, timed=True, drawing="move", color="realloc",
                   not_diffed=("model", "src", "dst", "messages", "digest", "source", "source_version")))
@dataclass(frozen=True, slots=True, kw_only=True)
class Realloc(Event):
    """Parameters of a model from layout to layout: a reshard (`reshard/`). bytes: received by all ranks.

    With a `source`, they are those of another model, and a new version of `model`:
    new = decay * old + (1 - decay) * source in float32, so a copy with decay 0."""

    model: ModelName  # whose parameters are written
    src: LayoutId  # the layout that parameters come from
    dst: LayoutId  # the layout that they go to
    messages: int = 0  # the most from one rank to one other
    digest: str = ""  # sha256 over the routes of all boxes
    source: ModelName = ""  # the model whose parameters under `src` move; "": `model` itself
    decay: float = 0.0  # the weight of the old parameters of `model`
    # position of the statement that made the version of the source that is taken; "": the version from before the step
    source_version: str = ""

    @property
    def refreshes(self) -> bool:
        return not self.source

    @property
    def origin(self) -> str:
        """The model whose parameters move."""
        return self.source or self.model

    @property
    def display_name(self) -> str:
        return f"{self.model} from {self.source}" if self.source else self.kind

    @property
    def subject(self) -> str:
        return f"{self.source} -> {self.model}" if self.source else self.model

    def copies(self) -> tuple[Copy, ...]:
        return (self.origin, self.src), (self.model, self.dst)

    def versions(self) -> Versions:
        return Versions(frozenset({self.origin}), frozenset({self.model} if self.source else ()))


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyMove(Event):
    """Moves parameters, or the optimizer state of a model that is trained under this layout, from device to host or
    back."""

    model: ModelName  # whose copy moves
    layout: LayoutId  # under which the copy is
    part: CopyPart = "parameters"  # what moves

    @property
    def subject(self) -> str:
        return self.model if self.part == "parameters" else f"optimizer of {self.model}"

    def versions(self) -> Versions:
        """Moves of optimizer state are ordered with the model's train calls by this version. Those of parameters are
        ordered by the buffer `model@layout` that they read and write."""
        state = frozenset({optimizer_of(self.model)}) if self.part == "optimizer" else frozenset[str]()
        return Versions(state, state)


@event_kind(Traits(family="residency", blocking="none", participants=("layout",), timed=True,
                   not_diffed=("model", "layout")))
@dataclass(frozen=True, slots=True, kw_only=True)
class Offload(CopyMove):
    """To host memory, after use."""


@event_kind(Traits(family="residency", blocking="none", participants=("layout",), timed=True,
                   not_diffed=("model", "layout")))
@dataclass(frozen=True, slots=True, kw_only=True)
class Onload(CopyMove):
    """Starts the copy back to the device; the first event that uses the copy waits for it."""


@event_kind(Traits(family="disk", blocking="barrier", participants=("layout",), communicators="mesh",
                   backend_communicates=True, buffers=Buffers(("{model}@{layout}",)), order_cost=50, scratch=True,
                   timed=True, drawing="value", not_diffed=("model", "layout")))
@dataclass(frozen=True, slots=True, kw_only=True)
class Save(SaveSpec, Event):
    """A HuggingFace directory."""

    layout: LayoutId  # whose ranks write their slices

    @property
    def saves_to(self) -> str:
        return self.path

    def copies(self) -> tuple[Copy, ...]:
        return ((self.model, self.layout),)


@event_kind(Traits(family="disk", blocking="barrier", all_ranks=True, communicators="mesh", scratch=True, timed=True))
@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint(Event):
    """Runs at the end of every step on all ranks. After each `every`-th step, and when the run is asked to stop, it
    writes everything that the next step needs, which is what it reads."""

    every: int  # steps between two checkpoints
    keep_last: int  # how many of the last checkpoints stay
    until: Buffer = ""  # that of the step loop: where it is true, this is the last step, and a checkpoint is written


# ---------------------------------------------------------------------------------------------- calls of models


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCall(Event):
    """A call of a model: what backends run, and placements place."""

    model: ModelName  # that is called
    layout: LayoutId  # under which it runs
    spread: SpreadId  # which rows each dp rank works on

    @property
    def is_conversing(self) -> bool:
        """Whether it holds conversations with environments."""
        return False

    def copies(self) -> tuple[Copy, ...]:
        return ((self.model, self.layout),)


@event_kind(Traits(family="call", stored_ahead=True, blocking="dp_rank", participants=("layout",),
                   communicators="layout", backend_communicates=True, needs_lengths_of=("prompts",),
                   divides_rows=True, order_cost=300, scratch=True, timed=True, drawing="call",
                   not_diffed=("model", "layout", "spread", "prompts", "frame", "sampling")))
@dataclass(frozen=True, slots=True, kw_only=True)
class Generate(GenerateSpec, ModelCall):
    """Completions of the frame `prompts` become the frame `frame`."""

    mbs: int = 0  # most sequences decoded together on a dp rank; 0: all
    # the frame whose KV cache, which its Generate wrote under this spread, has the prompts; "": they are prefilled
    cache_of: FrameId = ""
    waiting: Waiting = "keep"  # of conversations: what a slot does whose environment works

    @property
    def is_conversing(self) -> bool:
        return self.conversation is not None

    @property
    def display_name(self) -> str:
        return f"{self.model}.generate"

    @property
    def result_names(self) -> tuple[str, ...]:
        return (self.frame,)

    @property
    def new_rows(self) -> tuple[FrameId, ...]:
        return (self.frame,)

    @property
    def subject(self) -> str:
        return f"{self.frame} = {self.display_name}"

    def wanted_ahead(self, lag: int) -> int:
        return 0 if self.in_step else lag


@event_kind(Traits(family="call", stored_ahead=True, blocking="dp_rank", participants=("layout",),
                   communicators="layout", backend_communicates=True, needs_lengths_of=("frame",),
                   divides_rows=True, order_cost=100, scratch=True, timed=True, drawing="call",
                   not_diffed=("model", "layout", "spread", "frame", "value")))
@dataclass(frozen=True, slots=True, kw_only=True)
class Infer(InferSpec, ModelCall):
    """One forward pass."""

    mbs: int = 0  # most sequences in a micro-batch; 0: all
    mbt: int = 0  # most tokens in a micro-batch; 0: all

    @property
    def display_name(self) -> str:
        output = OUTPUTS.get(self.output_name)  # a plan that has not been verified may name any
        return f"{self.model}.{output.call if output is not None else self.output_name}"

    @property
    def result_names(self) -> tuple[str, ...]:
        return (self.value,)

    @property
    def subject(self) -> str:
        return f"{self.value} = {self.display_name}"


@event_kind(Traits(family="call", blocking="barrier", participants=("layout",), communicators="layout",
                   backend_communicates=True, needs_lengths_of=("frames",), divides_rows=True, order_cost=300,
                   scratch=True, timed=True, drawing="call",
                   not_diffed=("model", "layout", "spread", "frames", "outputs")))
@dataclass(frozen=True, slots=True, kw_only=True)
class Train(TrainSpec, ModelCall):
    """minibatches * epochs optimizer steps. If the loss has an output "stop", training ends at the first minibatch for
    which it is true, before that minibatch's step. The output "updates" is the number of steps made, and "skipped"
    counts the minibatches that `nonfinite` skips."""

    mbs: int = 0  # most sequences in a micro-batch, of all frames together; 0: all
    mbt: int = 0  # most tokens in a micro-batch; 0: all
    recompute: Literal["none", "full"] = "none"  # full: keep each layer's input alone (Chen et al. 2016)
    head_layouts: tuple[LayoutId, ...] = ()  # of the models in `heads`

    @property
    def display_name(self) -> str:
        return f"{self.model}.train"

    def copies(self) -> tuple[Copy, ...]:
        return ((self.model, self.layout), *self.head_copies)

    @property
    def head_copies(self) -> tuple[Copy, ...]:
        """The copies whose output embeddings are read."""
        return tuple((model, layout) for (_, model), layout in zip(self.heads, self.head_layouts, strict=False))

    @property
    def subject(self) -> str:
        return self.display_name

    def versions(self) -> Versions:
        both = frozenset({self.model, optimizer_of(self.model)})
        return Versions(both, both)


# ------------------------------------------------------------------------------------------------------- values


@event_kind(Traits(family="data", blocking="none", participants=("writes",), timed=True, drawing="value",
                   not_diffed=("frames",)))
@dataclass(frozen=True, slots=True, kw_only=True)
class Fetch(FetchSpec, Event):
    """The step's rows of a data source, read and tokenized by every participant alike."""

    @property
    def result_names(self) -> tuple[str, ...]:
        return self.frames

    @property
    def new_rows(self) -> tuple[FrameId, ...]:
        return self.frames

    @property
    def subject(self) -> str:
        return f"{', '.join(self.frames)} = {self.data}.next"


@dataclass(frozen=True, slots=True, kw_only=True)
class RowStates(Event):
    """An event that works on states of the rows of a data source, on every rank that fetches from it."""

    # (state, position of the update before it in program order; "": there is none) for each such state that it reads or
    # writes. In a loop, a state read above its update has the numbers of the iteration before
    follows: tuple[tuple[ValueId, str], ...] = ()


@event_kind(Traits(family="data", stored_ahead=True, blocking="collective", participants=("writes",),
                   communicators="mesh", bytes_moved="planned", timed=True, drawing="value",
                   not_diffed=("frame", "program")))
@dataclass(frozen=True, slots=True, kw_only=True)
class Draw(DrawSpec, RowStates):
    """The numbers of the rows that the next batch consists of. The first participant draws them and sends them to the
    others: 8 bytes per row."""

    @property
    def result_names(self) -> tuple[str, ...]:
        return tuple(split_buffer(b)[0] for b in self.writes)

    @property
    def subject(self) -> str:
        return f"rows of {self.data}"


@event_kind(Traits(family="compute", stored_ahead=True, blocking="none", participants=("writes",), drawing="value",
                   not_diffed=("frame", "state", "value")))
@dataclass(frozen=True, slots=True, kw_only=True)
class Lookup(LookupSpec, RowStates):
    """Each participant looks up the numbers of the batch's rows in its copy of the state."""

    @property
    def result_names(self) -> tuple[str, ...]:
        return (self.value,)

    @property
    def subject(self) -> str:
        return self.value


@event_kind(Traits(family="compute", blocking="none", participants=("writes",), drawing="value",
                   not_diffed=("frame", "state", "value")))
@dataclass(frozen=True, slots=True, kw_only=True)
class Update(UpdateSpec, RowStates):
    """Each participant writes the new numbers into its copy of the state; where the batch has a row twice, the last one
    stays."""

    @property
    def subject(self) -> str:
        return self.state


@event_kind(Traits(family="movement", blocking="barrier", participants=("writes", "spread"), source_spread="spread",
                   communicators="mesh", divides_rows=True, bytes_moved="planned", timed=True, color="transfer",
                   not_diffed=("frame", "spread")))
@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths(Event):
    """Row lengths of a frame, from the ranks of `spread` to every participant. Fixed size: 16 bytes per row."""

    frame: FrameId  # whose lengths are exchanged
    spread: SpreadId  # whose ranks know the lengths of their own rows

    @property
    def subject(self) -> str:
        return f"{self.frame}.lengths"


@event_kind(Traits(family="movement", blocking="async", participants=("src", "dst"), source_spread="src",
                   needs_lengths_of=("values",), divides_rows=False, bytes_moved="planned", scratch=True, timed=True,
                   drawing="move", color="transfer",
                   not_diffed=("values", "src", "dst")))
@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer(Event):
    """Values of one frame from spread to spread."""

    values: tuple[ValueId, ...]  # all of one frame
    src: SpreadId  # the spread that they are in
    dst: SpreadId  # the spread that they go to

    @property
    def subject(self) -> str:
        return ", ".join(self.values)


@event_kind(Traits(family="compute", stored_ahead=True, blocking="collective", participants=("spread",),
                   communicators="mesh", needs_lengths_of=("frames",), divides_rows=True, order_cost=10, scratch=True,
                   timed=True, drawing="value", not_diffed=("spread", "program", "frames", "outputs")))
@dataclass(frozen=True, slots=True, kw_only=True)
class Compute(ComputeSpec, Event):
    """A pure program over values of the participants' rows."""

    spread: SpreadId  # which rows each dp rank works on

    @property
    def display_name(self) -> str:
        return self.outputs[0][1] if self.outputs else self.program  # a plan that has not been verified may have none

    @property
    def result_names(self) -> tuple[str, ...]:
        return tuple(value for _, value in self.outputs)

    @property
    def subject(self) -> str:
        return ", ".join(self.result_names)


@event_kind(Traits(family="compute", blocking="none", participants=("spread",),
                   needs_lengths_of=("source", "parts", "frame", "given"), divides_rows=True, timed=True,
                   drawing="value", not_diffed=("spread", "source", "parts", "frame", "values", "also_reads", "given")))
@dataclass(frozen=True, slots=True, kw_only=True)
class Derive(DeriveSpec, Event):
    """Rows of the frame `frame` are made from those of the frame `source`, with the values that come along; each
    participant works on its own rows."""

    spread: SpreadId  # which rows each dp rank works on

    @property
    def makes_rows(self) -> bool:
        """Whether the frame's rows begin with it, so that an exchange of their lengths follows."""
        return DERIVE_OPS[self.op].makes_rows

    @property
    def verb(self) -> str:
        return DERIVE_OPS[self.op].verb

    @property
    def display_name(self) -> str:
        return f"{self.verb} {self.frame}"

    @property
    def result_names(self) -> tuple[str, ...]:
        return (self.frame,)

    @property
    def subject(self) -> str:
        return ", ".join(dict.fromkeys(made for _, made in self.values)) or self.frame


@event_kind(Traits(family="compute", blocking="none", participants=("dst",), divides_rows=False, timed=True,
                   drawing="value", not_diffed=("frame", "into", "values", "src", "dst")))
@dataclass(frozen=True, slots=True, kw_only=True)
class Collect(CollectSpec, Event):
    """The rows of this iteration of the loop are appended. A rank holds the same rows of an iteration under `src` and
    `dst`, so nothing moves."""

    src: SpreadId  # the spread of an iteration
    dst: SpreadId  # the spread of what is collected

    @property
    def display_name(self) -> str:
        return f"collect {self.frame}"

    @property
    def result_names(self) -> tuple[str, ...]:
        return (self.into,)

    @property
    def subject(self) -> str:
        return ", ".join(made for _, made in self.values) or self.into


@event_kind(Traits(family="data", blocking="none", participants=("writes",), needs_lengths_of=("frame", "values"),
                   drawing="value", not_diffed=("buffer", "frame", "values", "version")))
@dataclass(frozen=True, slots=True, kw_only=True)
class Store(StoreSpec, Event):
    """The rows of a frame are added to a replay buffer, in ascending order, by every rank alike."""

    version: str = ""  # position of the statement that stored rows before; "": none in this step

    @property
    def display_name(self) -> str:
        return f"{self.buffer}.add"

    @property
    def subject(self) -> str:
        return self.display_name


@event_kind(Traits(family="data", stored_ahead=True, blocking="none", participants=("writes",), drawing="value",
                   not_diffed=("buffer", "frame", "values", "program", "version")))
@dataclass(frozen=True, slots=True, kw_only=True)
class Sample(SampleSpec, Event):
    """Rows of a replay buffer, drawn by every participant alike: by seed, step and the number of the row."""

    version: str = ""  # position of the statement that stored rows before; "": none in this step

    @property
    def display_name(self) -> str:
        return f"{self.buffer}.sample"

    @property
    def result_names(self) -> tuple[str, ...]:
        return (self.frame,)

    @property
    def new_rows(self) -> tuple[FrameId, ...]:
        return (self.frame,)

    @property
    def subject(self) -> str:
        return f"{self.frame} = {self.display_name}"


# -------------------------------------------------------------------------------------------------- bookkeeping


@event_kind(Traits(family="bookkeeping", blocking="gather", participants=("to",), first_rank_of=("metrics",),
                   bytes_moved="at run time", timed=True))
@dataclass(frozen=True, slots=True, kw_only=True)
class Log(Event):
    """Batch-level values to the log; the first rank of each buffer's mesh sends it."""

    metrics: tuple[tuple[str, Buffer], ...]  # (name, value)
    to: Rank = 0  # the rank that writes them

    @property
    def logged(self) -> tuple[tuple[str, Buffer], ...]:
        return self.metrics

    @property
    def subject(self) -> str:
        return ", ".join(name for name, _ in self.metrics)


@event_kind(Traits(family="bookkeeping", blocking="none", participants=("buffers",), timed=True))
@dataclass(frozen=True, slots=True, kw_only=True)
class Free(Event):
    """Buffers that nothing reads any more."""

    buffers: tuple[Buffer, ...]  # that end

    @property
    def frees(self) -> tuple[Buffer, ...]:
        return self.buffers

    @property
    def subject(self) -> str:
        return ", ".join(dict.fromkeys(split_buffer(b)[0] for b in self.buffers))


AnyCall = Generate | Infer | Train  # closed, for `match` and `assert_never`
