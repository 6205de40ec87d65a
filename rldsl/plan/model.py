"""The tables of a plan; its events are in `plan/events.py`.

A plan is a choreography: `body` is one totally ordered list of events, each naming its participants (`mesh`); a
rank's schedule is that list filtered to the events whose mesh contains it. Loops stay loops.

Vocabulary of data:
- A *frame* is a set of sequences of one step that values range over: the prompts of a batch, the completions of a
  `generate`, the chosen side of pairs. Its rows are numbered 0..count-1 by the sample, never by a rank.
- A *spread* says which rows each data-parallel shard of a layout works on. The partition is a pure function of the
  spread and the row lengths (`sharding/partition.py`), so that every rank computes the same one.
- A *buffer* is a value in one spread, written `value@spread` ("gen.logprobs@s2"), or a model's parameters in one
  layout, written `model@layout` ("actor@L3"). Events read and write buffers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from rldsl.plan import heads
from rldsl.plan.events import Item
from rldsl.plan.expr import Level, Program, Scalar
from rldsl.plan.function import Function
from rldsl.plan.heads import HeadName

FORMAT = 1
MOST_RANKS = 16_384 * 256  # nodes, devices of each: beyond it a number is a slip
MOST_BLOCKS = 64  # around an event; the parser allows fewer brackets in brackets
DEFAULT_BACKEND = "torch"  # where a layout names none

Ranges = tuple[tuple[int, int], ...]  # half-open [start, stop), in order


@dataclass(frozen=True, slots=True)
class Header:
    """`sources`: (path, sha256). `params`: resolved `param`s. `world`: number of ranks that torchrun must start.
    `memory`: bytes of a device, 0 when unknown."""

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
    memory: int = 0


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
    (`sharding/layout.py`). `ep` divides dp: runs of ep neighbours along dp share the experts of each layer, and each
    run has all of them; everything else is as without it. `zero`, of a layout that a model is trained under, divides
    parameters, gradients and optimizer state over dp at rest (`sharding/boxes.py`). Gradients are whole during a
    minibatch with 1, and divided with 2 and 3; parameters are whole during a minibatch with 1 and 2, and layer by layer
    with 3 (Rajbhandari et al. 2020, arXiv:1910.02054). `vpp`, of a layout that a model is trained under, is the number
    of chunks of layers that each rank of a pipeline has (`sharding/pipeline_schedule.py`). `backend`: what computes
    (`plan/backends.py`); what a rank holds does not depend on it."""

    id: str
    mesh: str
    dp: int = 1
    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    zero: int = 0
    vpp: int = 1
    backend: str = DEFAULT_BACKEND

    def __hash__(self) -> int:
        """Quickly: it is the key of much that is worked out once."""
        return hash((self.id, self.zero))


@dataclass(frozen=True, slots=True)
class Spread:
    """How the rows of frames are divided over the `dp` shards of a layout.

    unit: "row" (sequence by sequence), "prompt" (all sequences of a prompt together) or "all" (every rank of `mesh`
    holds every row; `layout` is then ""). weigh: "count" divides numbers evenly in contiguous runs, "tokens" balances
    token counts, "slot" divides the numbers 0..count-1 evenly whether the rows are there or not (the same in each turn
    of a frame that has several). A training spread first divides rows into minibatches by (seed, step, epoch, row),
    then each minibatch over the shards. frames: whose lengths weigh; they share a prompt space (unit "prompt") or a row
    space (unit "row"), and the rows of all of them follow the same division.

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
    "head", and "experts" for what experts hold; the backend chooses its collectives by it). partial: with tp > 1 each
    rank computes only a part of its gradient though it holds the whole tensor. experts: how many dimension 0 counts;
    0 for what is not an expert's. stored: the tensors of the model's directory that make it up, where there is not one
    of its own name: with "{expert}" in the name there is one for each expert, and several are joined along the
    parameter's dimension 1."""

    name: str
    shape: tuple[int, ...]
    stage: Literal["first", "layer", "last", "ends", "all"] = "all"
    layers: int = 0
    split: Split | None = None
    style: str = "replicated"
    partial: bool = False
    experts: int = 0
    stored: tuple[str, ...] = ()

    def __hash__(self) -> int:
        """Quickly, as of a layout."""
        return hash((self.name, self.shape))


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
class Lora:
    """Low-rank adapters (Hu et al. 2021, arXiv:2106.09685): a module that computes W x computes W x + alpha / r * B A x
    instead, with A [r, in] and B [out, r]. targets: ends of the dotted names of the modules that have one. seed: from
    which A is drawn (B begins at zero). path: the PEFT directory with which it begins instead; "" for none. transposed:
    the family keeps its weights as [in, out]."""

    r: int
    alpha: float
    targets: tuple[str, ...]
    seed: int = 0
    path: str = ""
    transposed: bool = False


@dataclass(frozen=True, slots=True)
class Sizes:
    """What of a model decides the work and memory of a call, beyond its parameters; 0: unknown. hidden, intermediate
    and head_dim: widths. heads, kv_heads, vocab: counts. activation: of the MLP, as the config calls it ("silu").
    chosen: how many experts work on a token; intermediate is then the width of one."""

    hidden: int = 0
    intermediate: int = 0
    heads: int = 0
    kv_heads: int = 0
    head_dim: int = 0
    vocab: int = 0
    activation: str = ""
    chosen: int = 0


@dataclass(frozen=True, slots=True)
class Model:
    """kind decides the head: logits, one value per token, or one score per sequence. path: a HuggingFace directory.
    params: the parameters of which there are versions: trained, moved, saved, and part of a checkpoint. base: of a
    model with adapters, those that stay as they are in the directory; each rank reads its slices of them under every
    layout. dtype: "float32" or "bfloat16". home: the layout that holds the trained parameters and the optimizer state
    ("" when frozen). updates: optimizer steps planned for the whole run. config_digest: sha256 of its config.json.
    sources: of a model that is not trained but written by others, the model that each such event takes, in order. mean:
    the layout under which a mean with others is taken ("" when none is), so that what is added to it is not lost.
    invariant: the numbers of a token are the same, bit by bit, whatever is computed beside it."""

    name: str
    kind: HeadName
    path: str
    dtype: str
    params: tuple[ParamSpec, ...]
    layers: int
    config_digest: str
    home: str = ""
    optimizer: Optimizer | None = None
    updates: int = 0
    sources: tuple[str, ...] = ()
    mean: str = ""
    base: tuple[ParamSpec, ...] = ()
    lora: Lora | None = None
    sizes: Sizes = Sizes()
    invariant: bool = False

    @property
    def head(self) -> heads.Head:
        """What it can do."""
        return heads.HEADS[self.kind]

    def __hash__(self) -> int:
        """Quickly, as of a layout."""
        return hash((self.name, self.home))


# kind of data -> what its columns are for
ROLES = {"prompts": ("prompt",), "answers": ("prompt", "answer"), "pairs": ("prompt", "chosen", "rejected")}


@dataclass(frozen=True, slots=True)
class Data:
    """A data source. kind: "prompts" (column `prompt`), "answers" (`prompt`, `answer`) or "pairs" (`prompt`,
    `chosen`, `rejected`); all further columns reach Python functions. batch: rows (prompts, or pairs) per step.
    tokenizer: the model directory whose tokenizer reads it. numbers: columns that are values: one number a row.
    over_long: what becomes of rows with more tokens than the two limits (0: none)."""

    name: str
    format: Literal["jsonl", "parquet", "hf"]
    path: str
    kind: Literal["prompts", "answers", "pairs"]
    batch: int
    columns: tuple[tuple[str, str], ...]
    tokenizer: str
    shuffle: bool = True
    max_prompt_tokens: int = 0
    max_answer_tokens: int = 0
    numbers: tuple[str, ...] = ()
    over_long: Literal["truncate", "drop", "error"] = "truncate"


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
class State:
    """A batch-level value that persists over steps, held by every rank of `spread` (unit "all")."""

    value: str
    spread: str
    initial: float


@dataclass(frozen=True, slots=True)
class Group:
    """A communicator that the runtime creates at start-up, in the order of these records. axis: "tp", "pp", "dp", "cp"
    of a layout (one group for each combination of the other coordinates), "ep" and "copies" (ranks along dp that share
    experts, and those that hold the same ones), or "mesh" (all ranks of `mesh`)."""

    id: str
    axis: Literal["tp", "pp", "dp", "cp", "ep", "copies", "mesh"]
    layout: str = ""
    mesh: str = ""


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
