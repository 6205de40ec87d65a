"""Every record of a plan, on one page.

A plan is a choreography: `body` is one totally ordered list of events, each naming its participants (`mesh`); a
rank's schedule is that list filtered to the events whose mesh contains it. Loops stay loops.

Vocabulary of data:
- A *frame* is a set of sequences of one step that values range over: the prompts of a batch, the completions of a
  `generate`, the chosen side of pairs. Its rows are numbered 0..count-1 by the sample, never by a rank.
- A *spread* says which rows each data-parallel shard of a layout works on. The partition is a pure function of the
  spread and the row lengths (`plan/partition.py`), so that every rank computes the same one.
- A *buffer* is a value in one spread, written `value@spread` ("gen.logprobs@s2"), or a model's parameters in one
  layout, written `model@layout` ("actor@L3"). Events read and write buffers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from rldsl.plan.expr import Level, Program, Scalar

FORMAT = 1

Ranges = tuple[tuple[int, int], ...]  # half-open [start, stop), in order


@dataclass(frozen=True, slots=True)
class Header:
    """`sources`: (path, sha256). `params`: resolved `param`s. `world`: number of ranks that torchrun must start."""

    format: int
    compiler: str
    program: str
    flow: str
    world: int
    devices_per_node: int
    steps: int
    seed: int
    sources: tuple[tuple[str, str], ...] = ()
    params: tuple[tuple[str, Scalar], ...] = ()


@dataclass(frozen=True, slots=True)
class Mesh:
    """An ordered set of ranks."""

    id: str
    ranks: Ranges

    def members(self) -> tuple[int, ...]:
        return tuple(r for start, stop in self.ranks for r in range(start, stop))


@dataclass(frozen=True, slots=True)
class Layout:
    """Degrees on a mesh; dp*tp*pp*cp = size of the mesh. Coordinates run pp slowest, then dp, cp, and tp fastest
    (`plan/layout.py`). `ep` divides dp*cp*tp over experts and `zero` shards training state over dp."""

    id: str
    mesh: str
    dp: int = 1
    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    zero: int = 0
    backend: str = "torch"


@dataclass(frozen=True, slots=True)
class Spread:
    """How the rows of frames are divided over the `dp` shards of a layout.

    unit: "row" (sequence by sequence), "prompt" (all sequences of a prompt together) or "all" (every rank of `mesh`
    holds every row; `layout` is then ""). weigh: "count" divides numbers evenly in contiguous runs, "tokens" balances
    token counts, "slot" divides the numbers 0..count-1 evenly whether the rows are there or not (the same in each turn
    of a frame that has several). A training spread first divides rows into minibatches by (seed, step, epoch, row), then each
    minibatch over the shards. frames: whose lengths weigh; they share a prompt space (unit "prompt") or a row space
    (unit "row"), and the rows of all of them follow the same division.

    A buffer `value@spread` is held, for the rows of a shard, by every rank of that shard."""

    id: str
    mesh: str
    layout: str = ""
    frames: tuple[str, ...] = ()
    unit: Literal["row", "prompt", "all"] = "row"
    weigh: Literal["count", "tokens", "slot"] = "tokens"
    minibatches: int = 1
    epochs: int = 1
    shuffle: bool = False


@dataclass(frozen=True, slots=True)
class Split:
    """How tensor parallelism divides dimension `dim`. Each part is (units, unit size): a fused tensor has several
    parts one after the other along `dim`, each divided on its own. A unit (an attention head, a row) is never cut.
    With fewer units than tp, neighbours hold the same unit."""

    dim: int
    parts: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class ParamSpec:
    """A parameter, or one per layer when `name` contains "{}".

    shape: global. stage: which pipeline stages hold it ("layer": the stage of its layer; "ends": first and last, for
    tied embeddings). style: the HF tensor-parallel style of its module ("colwise", "rowwise", "replicated", "vocab",
    "head"; the backend chooses its collectives by it). partial: with tp > 1 each rank computes only a part
    of its gradient though it holds the whole tensor."""

    name: str
    shape: tuple[int, ...]
    stage: Literal["first", "layer", "last", "ends", "all"] = "all"
    layers: int = 0
    split: Split | None = None
    style: str = "replicated"
    partial: bool = False


@dataclass(frozen=True, slots=True)
class Optimizer:
    """AdamW with decoupled weight decay (Loshchilov & Hutter 2019). warmup: steps (>= 1) or a fraction of the
    optimizer steps of the run (< 1). clip_grad: largest global 2-norm of the gradient; 0 is off."""

    lr: float
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    warmup: float = 0.0
    min_lr_ratio: float = 0.0
    clip_grad: float = 1.0


@dataclass(frozen=True, slots=True)
class Model:
    """kind decides the head: logits, one value per token, or one score per sequence. path: a HuggingFace directory.
    dtype: "float32" or "bfloat16". home: the layout that holds the trained parameters and the optimizer state
    ("" when frozen). updates: optimizer steps planned for the whole run. config_digest: sha256 of its config.json.
    sources: of a model that is not trained but written by others, the model that each such event takes, in order."""

    name: str
    kind: Literal["causal_lm", "value_model", "reward_model"]
    path: str
    dtype: str
    params: tuple[ParamSpec, ...]
    layers: int
    config_digest: str
    home: str = ""
    optimizer: Optimizer | None = None
    updates: int = 0
    sources: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Data:
    """A data source. kind: "prompts" (column `prompt`), "answers" (`prompt`, `answer`) or "pairs" (`prompt`,
    `chosen`, `rejected`); all further columns reach Python functions. batch: rows (prompts, or pairs) per step.
    tokenizer: the model directory whose tokenizer reads it. numbers: columns that are values: one number a row."""

    name: str
    format: str
    path: str
    kind: Literal["prompts", "answers", "pairs"]
    batch: int
    columns: tuple[tuple[str, str], ...]
    tokenizer: str
    shuffle: bool = True
    max_prompt_tokens: int = 0
    max_answer_tokens: int = 0
    numbers: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Frame:
    """count rows; `per_prompt` of them belong to each prompt (row r to prompt r // per_prompt). rows and prompts name
    the index sets: frames with the same `rows` (the two sides of a pair) can be combined sequence by sequence.
    max_prompt_tokens and max_response_tokens bound memory. temperature: at which its log-probabilities are taken.

    of: the frame that this one is a selection of; its rows keep their numbers. partial: the frame whose lengths tell
    which rows there are (a row without tokens is not there); "" when all are. turns: of how many batches, one after
    the other, a frame consists that a `repeat ... until` collects."""

    id: str
    rows: str
    prompts: str
    count: int
    per_prompt: int
    data: str
    max_prompt_tokens: int
    max_response_tokens: int
    temperature: float = 1.0
    of: str = ""
    partial: str = ""
    turns: int = 1


@dataclass(frozen=True, slots=True)
class Value:
    """A named result. extent: how many entries a row has: "tokens" (prompt and response tokens), "response"
    (response tokens), "row" (one), "prompt" (one per prompt), "batch" (one in all), "columns" (the data columns,
    as text), "lengths" (prompt length, response length)."""

    id: str
    frame: str
    level: Level
    extent: Literal["tokens", "response", "row", "prompt", "batch", "columns", "lengths"]
    dtype: Literal["f32", "i64", "bool", "text"] = "f32"


@dataclass(frozen=True, slots=True)
class Function:
    """A user's Python function. The compiler records the hash and never imports the file."""

    id: str
    path: str
    name: str
    sha256: str
    returns: Level = "seq"


@dataclass(frozen=True, slots=True)
class State:
    """A batch-level value that persists over steps, held by every rank of `spread` (unit "all")."""

    value: str
    spread: str
    initial: float


@dataclass(frozen=True, slots=True)
class Group:
    """A communicator that the runtime creates at start-up, in the order of these records. axis: "tp", "pp", "dp" of a
    layout (one group for each combination of the other coordinates), or "mesh" (all ranks of `mesh`)."""

    id: str
    axis: Literal["tp", "pp", "dp", "mesh"]
    layout: str = ""
    mesh: str = ""


@dataclass(frozen=True, slots=True)
class Sampling:
    n: int = 1
    max_new_tokens: int = 256
    min_new_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    greedy: bool = False
    stop: tuple[str, ...] = ()


# ---------------------------------------------------------------------------------------------------- events


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
    """Build a model under a layout; each rank reads its own slices of the weights. Writes `model@layout`."""

    model: str
    layout: str


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
    """Parameters of a model from layout to layout (`plan/movement.py`). messages: boxes sent; digest: sha256 over the
    expanded moves.

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
    """Parameters to host memory after use."""

    model: str
    layout: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Onload(Event):
    """Parameters back on the device before use."""

    model: str
    layout: str


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
    """One forward pass. what: "logprobs", "entropy", "values" (token level) or "scores" (seq level). mbs: most
    sequences in a micro-batch (0: all)."""

    model: str
    layout: str
    spread: str
    frame: str
    what: Literal["logprobs", "entropy", "values", "scores"]
    output: str
    temperature: float = 1.0
    mbs: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Train(Event):
    """minibatches * epochs optimizer steps, or fewer: where the program has an output "stop" that is true of a
    minibatch, that one makes no step and no other follows. The output "updates" is then the number of steps made.
    fresh: program input -> (frame, what), the differentiable outputs of this
    model; data: program input -> value. outputs: metric -> value it is written to."""

    model: str
    layout: str
    spread: str
    frames: tuple[str, ...]
    loss: str
    fresh: tuple[tuple[str, str, str], ...]
    data: tuple[tuple[str, str], ...]
    outputs: tuple[tuple[str, str], ...]
    mbs: int = 0


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
    """Of each (value, kept value), the rows of the frame `frame` go from the first to the second; each participant works
    on its own rows. condition: the seq-level value that says which rows those are, or "" when the lengths of `frame`
    are known already."""

    spread: str
    frame: str
    values: tuple[tuple[str, str], ...]
    condition: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Collect(Event):
    """Of each (value, collected value), the rows of this turn of the loop are appended: row r of turn t (from 0) becomes
    row t * count + r. A rank holds the same share under `src` and `dst`, so nothing moves."""

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
    for c in (Load, Fetch, Lengths, Transfer, Realloc, Offload, Onload, Generate, Infer, Train, Compute, Select, Collect,
              Save, Log, Free)
}


@dataclass(frozen=True, slots=True)
class Loop:
    """`trips` runs of the body, the same number on every rank. until: a batch-level buffer that the body writes; the loop
    also ends when it is true, and frees it each turn. collects: buffers that are made empty before the first turn and
    to which the body appends."""

    id: str
    trips: int
    body: tuple["Item", ...]
    until: str = ""
    collects: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Every:
    """The body, in each iteration i (from 1) of the enclosing loop with i % period == 0."""

    period: int
    body: tuple["Item", ...]


Item = Event | Loop | Every


@dataclass(frozen=True, slots=True)
class RankClass:
    """Ranks whose schedules are equal: they take part in exactly `events`, in this order. peak_bytes: estimated."""

    ranks: Ranges
    events: tuple[int, ...]
    peak_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Plan:
    header: Header
    meshes: tuple[Mesh, ...]
    layouts: tuple[Layout, ...]
    spreads: tuple[Spread, ...]
    models: tuple[Model, ...]
    data: tuple[Data, ...]
    frames: tuple[Frame, ...]
    values: tuple[Value, ...]
    functions: tuple[Function, ...]
    programs: tuple[Program, ...]
    groups: tuple[Group, ...]
    body: tuple[Item, ...]
    classes: tuple[RankClass, ...]
    states: tuple[State, ...] = ()
