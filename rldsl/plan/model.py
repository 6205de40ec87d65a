"""The tables of a plan, and the one module to import them from; its events are in `plan/events.py`.

A plan is a choreography: `body` is one totally ordered list of events, each naming its participants (`mesh`); a
rank's schedule is that list filtered to the events whose mesh contains it. Loops stay loops.

Who holds what is in `layouts.py`, rows and their values in `rows.py`, parameters in `parameters.py`, what else a model
needs in `module_costs.py`; here is what puts them together. A *buffer* is a value in one spread, written `value@spread`
("gen.logprobs@s2"), or a model's parameters in one layout, written `model@layout` ("actor@L3"). Events read and write
buffers.
"""

from __future__ import annotations

from dataclasses import dataclass

from rldsl.plan import heads
from rldsl.plan.events import Item
from rldsl.plan.expr import Program, Scalar
from rldsl.plan.function import Function
from rldsl.plan.heads import HeadName
from rldsl.plan.layouts import DEFAULT_BACKEND, Group, Layout, Mesh, Ranges, Spread
from rldsl.plan.module_costs import ExpertBlock, Growth, Recurrence, Sizes, Tower
from rldsl.plan.parameters import PACKED, Lora, Optimizer, OptimizerKind, ParamGroup, ParamSpec, Split, StageKind
from rldsl.plan.rows import (
    CONVERSATION_VALUES,
    FIELD_NAMES,
    INDEX,
    PICKED,
    PROMPTS,
    ROLES,
    SEQUENCE_VALUES,
    Data,
    Frame,
    ReplayBuffer,
    Space,
    State,
    StoredField,
    Value,
)

__all__ = [
    "CONVERSATION_VALUES", "DEFAULT_BACKEND", "Data", "ExpertBlock", "FIELD_NAMES", "FORMAT", "Frame", "Function",
    "Group", "Growth", "Header", "INDEX", "Layout", "Lora", "MAX_NESTED_BLOCKS", "MAX_RANKS", "Mesh", "Model",
    "Optimizer", "OptimizerKind", "PACKED", "PICKED", "PROMPTS", "ParamGroup", "ParamSpec", "Plan", "ROLES", "Ranges",
    "RankClass", "Recurrence", "ReplayBuffer", "SEQUENCE_VALUES", "Sizes", "Space", "Split", "Spread", "StageKind",
    "State", "StoredField", "Tower", "Value",
]

FORMAT = 7
MAX_RANKS = 16_384 * 256  # nodes * devices per node: a larger number is a mistake
MAX_NESTED_BLOCKS = 64  # around an event; the parser allows fewer brackets in brackets


@dataclass(frozen=True, slots=True)
class Header:
    """What a plan was compiled from, and for how many ranks."""

    format: int  # `FORMAT`
    compiler: str  # version
    program: str  # name
    flow: str  # name
    world: int  # ranks that torchrun must start
    devices_per_node: int  # ranks per node
    steps: int  # of the run
    seed: int  # of data order, minibatches and sampling
    sources: tuple[tuple[str, str], ...] = ()  # (path, sha256) of every .rlf file
    params: tuple[tuple[str, Scalar], ...] = ()  # resolved `param`s
    memory: int = 0  # bytes per device; 0: unknown
    lag: int = 0  # how many steps earlier a step's rows were begun


@dataclass(frozen=True, slots=True)
class Model:
    """A model of the program, and the state that it has in a run."""

    name: str  # in the program
    head_name: HeadName  # of its head: logits, one value per token, or one score per sequence
    path: str  # a HuggingFace directory
    dtype: str  # "float32" or "bfloat16"
    params: tuple[ParamSpec, ...]  # that have versions: they are trained, resharded, saved, and part of a checkpoint
    layers: int  # transformer layers
    config_digest: str  # sha256 of its config.json
    train_layout: str = ""  # the layout of the trained parameters and the optimizer state; "": frozen
    optimizer: Optimizer | None = None  # None: frozen
    planned_updates: int = 0  # optimizer steps of the whole run
    # of a model that `sync` or `ema` writes: the model that each such event reads, in order
    updated_from: tuple[str, ...] = ()
    # the layout under which `ema` takes its mean, in float32 so that small changes are not lost; "": none
    ema_layout: str = ""
    # of a model with adapters: the frozen parameters. Each rank reads its slices of them from disk under every layout
    base: tuple[ParamSpec, ...] = ()
    lora: Lora | None = None  # its adapters
    sizes: Sizes = Sizes()  # for estimates of work and memory
    invariant: bool = False  # the outputs of a token are bitwise equal for every batch that it is computed in
    # besides, gradients are summed in one order (`sharding/gradient_leaves.py`): parameters are equal on any placement
    invariant_training: bool = False

    @property
    def head(self) -> heads.Head:
        """What it can do."""
        return heads.HEADS[self.head_name]

    def __hash__(self) -> int:
        """Cheap, as that of a layout."""
        return hash((self.name, self.train_layout))


@dataclass(frozen=True, slots=True)
class RankClass:
    """Ranks with equal schedules."""

    ranks: Ranges  # of the class, ascending
    events: tuple[int, ...]  # ids of all events that they take part in, in order
    peak_bytes: int = 0  # estimated


@dataclass(frozen=True, slots=True)
class Plan:
    """A complete plan."""

    header: Header  # what it was compiled from
    meshes: tuple[Mesh, ...]  # sets of ranks
    layouts: tuple[Layout, ...]  # how models are sharded
    spreads: tuple[Spread, ...]  # how rows are divided
    models: tuple[Model, ...]  # in the order of the program
    data: tuple[Data, ...]  # in the order of the program
    spaces: tuple[Space, ...]  # numbered rows, which form trees
    frames: tuple[Frame, ...]  # sets of sequences
    values: tuple[Value, ...]  # results that events read and write
    functions: tuple[Function, ...]  # Python functions that events call
    programs: tuple[Program, ...]  # computations, losses and weights
    groups: tuple[Group, ...]  # communicators, in the order in which they are created
    body: tuple[Item, ...]  # all events, in the one total order
    classes: tuple[RankClass, ...]  # of ranks with equal schedules; together they are all ranks
    states: tuple[State, ...] = ()  # values that persist over steps
    buffers: tuple[ReplayBuffer, ...] = ()  # rows that persist over steps

    @property
    def lasting(self) -> tuple[str, ...]:
        """The values that persist over steps, as `value@spread`."""
        kept: tuple[State | ReplayBuffer, ...] = (*self.states, *self.buffers)
        return tuple(f"{x.value}@{x.spread}" for x in kept)
