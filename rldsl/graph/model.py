"""The dataflow graph of one program, on one page: what the language means before anything is placed.

Nodes are model function calls, fetches and pure computations, in program order, which is a topological order. Edges
are implied: a node reads the values that earlier nodes write, and a call reads the current version of its model (the
version after the model's last train in program order; at the top of a step, the last train of the step before).

Records that survive into the plan unchanged (frames, values, programs, functions, optimizers) are the plan's own types,
and what a node shares with the event made of it is declared once, in `plan/payloads.py`. The graph names no rank:
placement clauses ride along unresolved.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from rldsl.plan.expr import Program, Scalar
from rldsl.plan.function import Function
from rldsl.plan.model import Lora, Optimizer, StoredField, Value
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
    SaveSpec,
    StoreSpec,
    TrainSpec,
    UpdateSpec,
)
from rldsl.plan.spaces import IndexedFrame
from rldsl.source import Span


@dataclass(frozen=True, slots=True)
class Model:
    """A `model` of the program."""

    name: str  # in the program
    head_name: str  # of `plan.heads.HEADS`
    path: str  # as given; relative to the working directory
    optimizer: Optimizer | None  # None: frozen
    dtype: str  # "float32" or "bfloat16"
    span: Span  # of its declaration
    lora: Lora | None = None  # its adapter
    lora_span: Span | None = None  # where the program says so
    invariant: bool = False  # as in `plan.model.Model`
    path_span: Span | None = None  # the path argument
    patterns: tuple[tuple[str, Span], ...] = ()  # that its optimizer has for names of parameters, and where
    invariant_training: bool = False  # as in `plan.model.Model`


@dataclass(frozen=True, slots=True)
class Data:
    """A `data` source of the program."""

    name: str  # in the program
    format: str  # as in `plan.model.Data`
    path: str  # as written; relative to the working directory
    row_format: str  # as in `plan.model.Data`
    # all named arguments (batch, max_prompt_tokens, shuffle, ...), resolved to scalars
    options: tuple[tuple[str, Scalar], ...]  # (name, value) of the call, defaults included
    span: Span  # of its declaration
    unit: tuple[str, Span] | None = None  # (name, where) of the unit that `batch` is written in, if any
    numbers: tuple[str, ...] = ()  # columns that are values
    answers: int = 0  # as in `plan.model.Data`
    path_span: Span | None = None  # where the path is written


@dataclass(frozen=True, slots=True)
class MeshRef:
    """The resolved numbers of `mesh(a:b)` or `mesh(n0:n1, d0:d1)`."""

    nodes: tuple[int, int] | None  # [start, stop); None: ranks are given, not nodes
    devices: tuple[int, int]  # [start, stop), of each node if `nodes` is given
    span: Span  # of the call of `mesh`
    free: bool = False  # of `mesh(8)`: any 8 ranks; `devices` is then (0, 8)


@dataclass(frozen=True, slots=True)
class Clause:
    """A placement as written; degrees and options are not checked yet."""

    mesh: MeshRef | None  # None: not given
    options: tuple[tuple[str, Scalar, Span], ...]  # (name, value, where)
    span: Span  # of the clause, without `on`
    auto: bool = False  # the compiler chooses


@dataclass(frozen=True, slots=True)
class Rule:
    """`place SELECTOR on ...`"""

    selector: str  # as written: "actor.generate", "ref.*", "@gen", "*"
    clause: Clause  # where the selected nodes run
    span: Span  # of the rule


# ---------------------------------------------------------------------------------------------------- nodes


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A model function call, a fetch, or a computation."""

    id: str  # unique, and what the user calls it where possible: "gen", "actor.train", "adv"
    reads: tuple[str, ...]  # ids of values
    writes: tuple[str, ...]  # ids of values
    span: Span  # of the statement or expression
    clause: Clause | None = None  # its `on ...`


@dataclass(frozen=True, slots=True, kw_only=True)
class Fetch(FetchSpec, Node):
    """`prompts.next()`"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Draw(DrawSpec, Node):
    """`prompts.next(weight=...)`: which rows; a Fetch follows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lookup(LookupSpec, Node):
    """`prompt.rate`, of a `state rate of prompts`"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Update(UpdateSpec, Node):
    """`prompt.rate = x`"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Generate(GenerateSpec, Node):
    """`model.generate(prompts)`"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Infer(InferSpec, Node):
    """`model.logprobs(gen)` and the like; writes `value`, or the values of a distribution."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Train(TrainSpec, Node):
    """`model.train(gen, loss=...)`. The outputs "loss", "grad_norm" and "lr" always exist, then the loss's own metrics,
    and "skipped" where minibatches may be."""

    minibatches: int  # optimizer steps per epoch, at most
    epochs: int  # passes over the rows
    shuffle: bool  # rows are divided into minibatches at random
    call: int = 0  # which of the `train` calls of its model, from 0
    invariant: bool = False  # gradients are summed in one order: its model has `invariant_training`
    whole_prompts: bool = False  # all rows of a prompt are in one minibatch
    minibatch_tokens: int = 0  # as in `plan.model.Spread`


@dataclass(frozen=True, slots=True, kw_only=True)
class Compute(ComputeSpec, Node):
    """What remains of functions and expressions of the flow."""

    label: str = ""  # what people call it, where the program gives it no name (`plan/naming.py`)
    source: str = ""  # the label with its whole source text, by which rules select it


@dataclass(frozen=True, slots=True, kw_only=True)
class Broadcast(Node):
    """A batch-level value reaches every rank under a name that outlives its mesh: a `state`, or the condition that ends
    a `repeat`. It reads that value and writes the name."""

    program: str  # id of the program, which has the value as its only output


@dataclass(frozen=True, slots=True, kw_only=True)
class Derive(DeriveSpec, Node):
    """A frame from another one: `gen where condition`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Collect(CollectSpec, Node):
    """What a `repeat ... until` collects of its iterations."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Store(StoreSpec, Node):
    """`buffer.add(gen)`"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample(SampleSpec, Node):
    """`buffer.sample(k)`"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Save(SaveSpec, Node):
    """`save model`"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sync(Node):
    """The parameters of `model` become decay times their own plus 1 - decay times those of `source`."""

    model: str  # that is written
    source: str  # that is read
    decay: float  # 0: a copy


@dataclass(frozen=True, slots=True, kw_only=True)
class When:
    """`every K { ... }`, `after K { ... }`, `first K { ... }`. They count steps, or the iterations of the enclosing
    repeat."""

    period: int = 1  # of `every`
    after: int = 0  # of `after`
    first: int = 0  # of `first`; 0: no limit
    body: tuple[Item, ...]  # in program order
    span: Span  # of the block

    @property
    def head(self) -> str:
        """As the program says it."""
        if self.after or self.first:
            return f"after {self.after}" if self.after else f"first {self.first}"
        return f"every {self.period}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Repeat:
    """`repeat K { ... }`"""

    iterations: int  # K
    body: tuple[Item, ...]  # in program order
    span: Span  # of the block


@dataclass(frozen=True, slots=True, kw_only=True)
class Until:
    """`repeat { ... } until CONDITION max N`"""

    max_iterations: int  # N
    condition: str  # id of the value, which a Broadcast in the body writes
    body: tuple[Item, ...]  # in program order
    span: Span  # of the block


@dataclass(frozen=True, slots=True, kw_only=True)
class Eval:
    """`eval`: the body for each batch of a source, once over its rows in file order."""

    data: str  # name of the source
    max_iterations: int  # batches
    body: tuple[Item, ...]  # in program order
    span: Span  # of the block


Item = Node | When | Repeat | Until | Eval


def nodes(items: Iterable[Item]) -> Iterator[Node]:
    """Every node, in program order, those of blocks too."""
    for item in items:
        if isinstance(item, When | Repeat | Until | Eval):
            yield from nodes(item.body)
        else:
            yield item


@dataclass(frozen=True, slots=True)
class State:
    """`state name = initial`, `state name of data = initial`"""

    name: str  # the id of its value: "beta", "prompts.rate"
    initial: float  # the value before the first step
    span: Span  # of its declaration
    data: str = ""  # the source whose rows have a number each; "": one number


@dataclass(frozen=True, slots=True)
class Stored:
    """What the rows of a buffer have, as the first `add` says."""

    contents: str  # as of `FrameRef`
    fields: tuple[StoredField, ...]  # tokens, log-probs, and the values named by `with`
    data: str  # the source of their prompts
    max_prompt_tokens: int  # per row
    max_response_tokens: int  # per row
    temperature: float  # of the log-probs


@dataclass(frozen=True, slots=True)
class Buffer:
    """`buffer name = rows(capacity=4096)`"""

    name: str  # in the program
    capacity: int  # rows
    span: Span  # of its declaration
    stored: Stored | None = None  # None: not known yet
    tried: bool = False  # whether some `add` names it


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """`checkpoint every K keep=N`: the full state of the run after every K-th step."""

    every: int  # K, in steps
    keep_last: int  # N: how many of the last are kept
    span: Span  # of the statement


@dataclass(frozen=True, slots=True)
class Cluster:
    """The cluster that the program declares."""

    nodes: int  # number of machines
    gpus: int  # per node
    memory_gb: float  # per device; 0: unknown
    span: Span | None = None  # of its declaration; None: the program declares none
    path: str = ""  # of its file, or the name of a preset; "": the program gives everything


@dataclass(frozen=True, slots=True)
class Graph:
    """One program."""

    program: str  # name
    flow: str  # name
    steps: int  # of the run
    seed: int  # of data order, minibatches and sampling
    params: tuple[tuple[str, Scalar], ...]  # resolved
    sources: tuple[tuple[str, str], ...]  # (path, sha256) of every .rlf file read
    cluster: Cluster | None  # None: the program declares none; then it is one node, as large as the largest rank named
    models: tuple[Model, ...]  # in the order of their declarations
    data: tuple[Data, ...]  # in the order of their declarations
    frames: tuple[IndexedFrame, ...]  # sequences that values range over
    values: tuple[Value, ...]  # results of the nodes
    functions: tuple[Function, ...]  # Python functions that the flow calls
    programs: tuple[Program, ...]  # computations and losses, lowered to operators
    items: tuple[Item, ...]  # the flow, in program order
    # (shown name, id of the value) in program order; outputs of train calls are named "MODEL/METRIC"
    metrics: tuple[tuple[str, str], ...]
    rules: tuple[Rule, ...]  # in the order of the text
    states: tuple[State, ...] = ()  # in the order of their declarations
    buffers: tuple[Buffer, ...] = ()  # in the order of their declarations
    checkpoint: Checkpoint | None = None  # None: no checkpoints
    stop: str = ""  # id of the value that ends the run where it is true; "" if nothing does
    lag: int = 0  # a step trains on what was generated for it this many steps earlier
    ahead: frozenset[str] = frozenset()  # ids of the nodes that run `lag` steps ahead
    may_run_ahead: frozenset[str] = frozenset()  # ids of those that may run as early where their ranks do not train
