"""The tables of a plan; its events are in `plan/events.py`.

A plan is a choreography: `body` is one totally ordered list of events, each naming its participants (`mesh`); a
rank's schedule is that list filtered to the events whose mesh contains it. Loops stay loops.

Vocabulary of data:
- A *frame* is a set of sequences of one step that values range over: the prompts of a batch, the completions of a
  `generate`, the chosen side of pairs. It has one sequence for each row of a *space*.
- A *space* numbers rows 0..count-1 by the sample, never by a rank. Spaces are trees: completions lie below prompts.
- A *spread* is a sharding of rows: it says which rows each dp rank of a layout works on (a dp rank is the tp * cp * pp
  ranks that work on the same rows). The partition is a pure function of the spread and the row lengths
  (`sharding/partition.py`), so that every rank computes the same one.
- A *buffer* is a value in one spread, written `value@spread` ("gen.logprobs@s2"), or a model's parameters in one
  layout, written `model@layout` ("actor@L3"). Events read and write buffers.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain
from typing import Literal

from rldsl.plan import heads
from rldsl.plan.events import Item
from rldsl.plan.expr import Level, Program, Scalar
from rldsl.plan.function import Function
from rldsl.plan.heads import HeadName

FORMAT = 6
MAX_RANKS = 16_384 * 256  # nodes * devices per node: a larger number is a mistake
MAX_NESTED_BLOCKS = 64  # around an event; the parser allows fewer brackets in brackets
DEFAULT_BACKEND = "torch"  # of a layout that names none

Ranges = tuple[tuple[int, int], ...]  # half-open [start, stop), in order
StageKind = Literal["first", "layer", "last", "ends", "all"]  # which pipeline stages hold a parameter


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
class Mesh:
    """An ordered set of ranks."""

    id: str  # unique in a plan
    ranks: Ranges  # in the order of the mesh

    def members(self) -> tuple[int, ...]:
        return tuple(chain.from_iterable(range(start, stop) for start, stop in self.ranks))

    @property
    def size(self) -> int:
        """Number of ranks."""
        return sum(stop - start for start, stop in self.ranks)


@dataclass(frozen=True, slots=True)
class Layout:
    """Parallel degrees on a mesh; dp * tp * pp * cp = size of the mesh. Coordinates run pp slowest, then dp, cp, and tp
    fastest (`sharding/layout.py`).

    The levels of `zero` are those of Rajbhandari et al. 2020 (arXiv:1910.02054). Between minibatches every level shards
    parameters, gradients and optimizer state over dp (`sharding/boxes.py`). During a minibatch gradients are whole with
    1 and sharded with 2 and 3; parameters are whole with 1 and 2, and gathered layer by layer with 3."""

    id: str  # unique in a plan
    mesh: str  # id
    dp: int = 1  # data parallelism
    tp: int = 1  # tensor parallelism
    pp: int = 1  # pipeline stages
    cp: int = 1  # context parallelism
    # divides dp: ep neighboring ranks along dp share the experts of each layer, and together have all of them
    ep: int = 1
    # of a layout that a model is trained under: what is sharded over dp during a minibatch (see above). 0: nothing is
    # sharded at any time
    zero: int = 0
    # of a layout that a model is trained under: chunks of layers per stage (`sharding/pipeline_schedule.py`)
    vpp: int = 1
    backend: str = DEFAULT_BACKEND  # that computes (`plan/backends.py`); what a rank holds does not depend on it

    def __hash__(self) -> int:
        """Cheap: layouts are the keys of many caches."""
        return hash((self.id, self.zero))


@dataclass(frozen=True, slots=True)
class Spread:
    """How the rows of frames are divided over the dp ranks of a layout. A buffer `value@spread` is held, for the rows
    of a dp rank, by each of its ranks.

    A training spread first divides rows into minibatches by (seed, step, call, epoch, row), and by the lengths of rows
    where minibatches have a size in tokens, then each minibatch over the dp ranks."""

    id: str  # unique in a plan
    mesh: str  # id
    layout: str = ""  # id; "" with granularity "all"
    # ids; the rows of all of them are divided alike, balanced by all their lengths. They share a prompt space
    # (granularity "prompt") or a row space (granularity "row")
    frames: tuple[str, ...] = ()
    # what stays together: a sequence, all sequences of a prompt, or everything (every rank of the mesh holds every row)
    granularity: Literal["row", "prompt", "all"] = "row"
    # count: equal numbers in contiguous runs; tokens: balanced by the cost of sequences, a function of their token
    # counts (`sharding/balance.py`); slot: equal numbers of 0..count-1, whether a row is present or not (the same in
    # each iteration of a frame with several)
    balance_by: Literal["count", "tokens", "slot"] = "tokens"
    minibatches: int = 1  # per epoch
    epochs: int = 1  # per call
    shuffle: bool = False  # rows are divided into minibatches at random
    call: int = 0  # which of the `train` calls of its model, from 0: each divides at random in its own way
    # into how many parts each minibatch is first divided, the same under every degree, and a dp rank has consecutive
    # ones (`sharding/gradient_leaves.py`); 0: it is divided over the dp ranks
    leaves: int = 0
    # the most tokens of a minibatch, which takes rows in order until the next one does not fit; then `minibatches` is
    # the most there can be (`plan/spaces.py`), and the last ones are empty. 0: all have the same number of rows
    minibatch_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Split:
    """How tensor parallelism divides a parameter."""

    dim: int  # that is divided
    # (units, unit size). A fused tensor has several parts one after the other, each divided on its own. A unit (an
    # attention head, a row) is never cut; with fewer units than tp, neighboring ranks hold the same unit
    parts: tuple[tuple[int, int], ...]


PACKED = ("_blocks", "_scales")  # how the names of the two stored tensors of an MXFP4 parameter end


@dataclass(frozen=True, slots=True)
class ParamSpec:
    """A parameter, or one per layer when `name` contains "{}"."""

    name: str  # dotted, as in the module; "{}" stands for the layer
    shape: tuple[int, ...]  # global
    # the pipeline stages that hold it. layer: that of its layer; ends: first and last, for tied embeddings
    stage: StageKind = "all"
    layers: int = 0  # how many there are; 0 without "{}"
    split: Split | None = None  # None: every rank of a tensor-parallel group holds all of it
    # the HF tensor-parallel style of its module: colwise, rowwise, replicated, vocab, head, or experts. The backend
    # chooses its collectives by it
    style: str = "replicated"
    # with tp > 1 each rank computes only a part of its gradient, though it holds the whole tensor
    partial_grad: bool = False
    experts: int = 0  # that dimension 0 counts; 0: not an expert's parameter
    # the tensors of the model's directory that make it up, if not one of its own name. With "{expert}" there is one per
    # expert, and several are joined along dimension 1 of the parameter; else several are equal runs of its rows
    stored: tuple[str, ...] = ()
    layer: int = -1  # the layer of a parameter that not all layers have alike, whose name has its number; -1: none
    # no optimizer changes it: the module has a buffer of this name, which a checkpoint holds, or asks for no gradient
    buffer: bool = False
    # stored in float32 in models of half precision, too, since transformers does so (`sharding/dtypes.py`)
    float32: bool = False

    def __hash__(self) -> int:
        """Cheap, as that of a layout."""
        return hash((self.name, self.shape))

    def layer_numbers(self, layers: int) -> tuple[int, ...]:
        """Numbers of the layers that have it; () if it belongs to none. layers: how many the model has."""
        if self.stage != "layer":
            return ()
        return (self.layer,) if self.layer >= 0 else tuple(range(self.layers or layers))


OptimizerKind = Literal["adamw", "adamw_8bit", "sgd", "adafactor", "muon"]


@dataclass(frozen=True, slots=True)
class ParamGroup:
    """Options of the parameters with certain names, in place of those of the whole optimizer."""

    patterns: tuple[str, ...]  # shell patterns of dotted names; one has to match
    lr_scale: float | None = None  # multiplies the learning rate; None: as without this group
    weight_decay: float | None = None  # None: as without this group


@dataclass(frozen=True, slots=True)
class Optimizer:
    """An optimizer, its options, and the schedule of its learning rate. AdamW is that of Loshchilov & Hutter 2019 (with
    8-bit state, of Dettmers et al. 2022), Adafactor that of Shazeer & Stern 2018 without a first moment, Muon that of
    Jordan et al. 2024."""

    lr: float  # peak learning rate
    betas: tuple[float, float] = (0.9, 0.999)  # AdamW: decay of the first and the second moment
    # AdamW: added to the root of the second moment. Adafactor: the smallest root mean square of a parameter that scales
    # its updates
    eps: float = 1e-8
    weight_decay: float = 0.0  # per unit of learning rate; of SGD added to the gradient
    schedule: Literal["constant", "linear", "cosine"] = "constant"  # of the learning rate, after the warmup
    warmup: float = 0.0  # optimizer steps (>= 1), or a fraction of those of the run (< 1)
    min_lr_ratio: float = 0.0  # the final learning rate, as a fraction of `lr`
    clip_grad: float = 1.0  # largest global 2-norm of the gradient; 0: off
    kind: OptimizerKind = "adamw"  # which one
    momentum: float = 0.0  # SGD, Muon: decay of the gradient's running mean
    nesterov: bool = False  # SGD, Muon: whether the momentum is Nesterov's
    beta2_decay: float = -0.8  # Adafactor: the second moment of update t has the weight t ** beta2_decay
    clip_threshold: float = 1.0  # Adafactor: largest root mean square of an update, before it is scaled
    ns_steps: int = 5  # Muon: Newton-Schulz iterations
    adjust_lr: Literal["original", "match_rms_adamw"] = "original"  # Muon: how the shape of a matrix scales its updates
    adamw_lr: float = 0.0  # Muon: peak learning rate of what AdamW updates; 0: `lr`
    decay: Literal["all", "matrices"] = "all"  # which parameters decay: "matrices" leaves out biases and norms
    groups: tuple[ParamGroup, ...] = ()  # later ones win
    freeze: tuple[str, ...] = ()  # shell patterns of the parameters that are not trained


@dataclass(frozen=True, slots=True)
class Lora:
    """Low-rank adapters (Hu et al. 2021, arXiv:2106.09685): a module that computes W x computes W x + alpha / r * B A x
    instead, with A [r, in] and B [out, r]."""

    r: int  # rank
    alpha: float  # the scale is alpha / r
    targets: tuple[str, ...]  # ends of the dotted names of the modules that have an adapter
    seed: int = 0  # from which A is drawn; B starts at zero
    path: str = ""  # the PEFT directory to start from instead; "": none
    transposed: bool = False  # the family stores weights as [in, out]


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
    """What the feed-forward block with its experts needs in the layers of one kind, where the experts have a form of
    their own, with transformers' own code of torch: bytes per token, with its input (`models/expert_blocks.py`)."""

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
    expert_blocks: tuple[ExpertBlock, ...] = ()  # of layers whose experts have a form of their own
    # whether attention makes its probabilities by products and in float32: its scores have sinks, or are capped
    composed_scores: bool = False
    # whether MLPs of layers are modules that compute down(silu(gate(x)) * up(x)), for which backends have kernels
    gated_products: bool = False


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


PROMPTS = "prompts"  # of rows with several answers: the frame of their prompts is NAME.prompts
INDEX = "index"  # value of such answers: the place of each among those of its row, from 0
PICKED = "pick_index"  # value of what `pick` has chosen: the place of each among those of its prompt, from 0
# row format -> what its columns are for
ROLES = {"prompts": ("prompt",), "answers": ("prompt", "answer"), "pairs": ("prompt", "chosen", "rejected")}


@dataclass(frozen=True, slots=True)
class Data:
    """A data source."""

    name: str  # in the program
    format: Literal["jsonl", "parquet", "hf"]  # of the files
    path: str  # a file, or a directory for "hf"
    # which columns it has by role (`ROLES`); all other columns reach Python functions
    row_format: Literal["prompts", "answers", "pairs"]
    batch: int  # rows (prompts, or pairs) per step
    columns: tuple[tuple[str, str], ...]  # (role, column name)
    tokenizer: str  # the model directory whose tokenizer is used
    shuffle: bool = True  # in every epoch
    max_prompt_tokens: int = 0  # 0: no limit
    max_answer_tokens: int = 0  # 0: no limit
    numbers: tuple[str, ...] = ()  # columns that are values: one number per row
    over_long: Literal["truncate", "drop", "error"] = "truncate"  # what is done with rows above a limit
    answers: int = 0  # of each row, with row format "answers"; 0: one, and a row is a sequence
    images: str = ""  # the column with the images of each row; "": rows have none
    max_image_tokens: int = 0  # of the images of a row together; 0: no limit but that of the prompt


@dataclass(frozen=True, slots=True)
class Space:
    """Numbered rows 0..count-1, a node of a tree: row r belongs to row r // fan of the parent, so ancestors are found
    by division. What a `repeat ... until` collects nests, too: row r of iteration t is row t * count + r of all."""

    id: str  # unique in a plan
    count: int  # rows
    parent: str = ""  # id of the space that its rows belong to; "": a root
    fan: int = 1  # rows of each row of the parent; 1 for a root
    of: str = ""  # id of the space that this one is a selection of, whose row numbers it keeps; "": none
    iterations: int = 1  # of a root that a `repeat ... until` or an `eval` collects: how many batches
    # of a root that concatenates the rows of other spaces: (space, number that its row 0 has here), in order
    parts: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True, slots=True)
class Frame:
    """Sequences of one step, one for each row of a space. `plan/spaces.py` has what follows from its space."""

    id: str  # unique in a plan
    row_space: str  # id; frames with the same one (the two sides of a pair) combine sequence by sequence
    data: str  # the source of its prompts
    max_prompt_tokens: int  # per row; bounds memory
    max_response_tokens: int  # per row; bounds memory
    temperature: float = 1.0  # of its log-probabilities
    # the model directory whose tokenizer made its tokens; "": that of its data source
    tokenizer: str = ""
    selected_from: str = ""  # the frame that this one is a selection of; "": none
    picked_from: str = ""  # the frame of which this one has one row for each prompt; "": none
    # the frame whose lengths say which rows are present (a row without tokens is absent); "": all are
    present_in: str = ""
    label: str = ""  # what people call it, where its id is a name of the compiler's (`plan/naming.py`)
    # turns of the model in a row, at most. With 0 a response follows a prompt; else both are in pieces, and in its
    # tokens those that the environment wrote are stored as ~id (`plan/turns.py`)
    max_turns: int = 0


# values of a frame, each where its sequences have it; turn_sizes: how many tokens each turn of a conversation has
SEQUENCE_VALUES = ("tokens", "logprobs", "finished", "turn_sizes")
# (name, level) of further values of conversations: what `get_reward` returned, turns of the model, what stopped it
# (`plan/turns.py`), which of the branches of its conversation it is, from 0, how many these are, and the reward of each
# turn
CONVERSATION_VALUES: tuple[tuple[str, Level], ...] = (
    ("reward", "seq"), ("turns", "seq"), ("stopped", "seq"), ("branch", "seq"), ("branches", "seq"),
    ("turn_reward", "turn"))
# of fields of sequences; programs cannot choose them
FIELD_NAMES = (*SEQUENCE_VALUES, "lengths", "columns", INDEX, PICKED)


@dataclass(frozen=True, slots=True)
class Value:
    """A named result."""

    id: str  # unique in a plan
    frame: str  # id
    level: Level  # what it has one element for: an entry, a token, a turn, a sequence, a prompt, or the whole batch
    # the entries of a row. tokens: one per prompt and response token; response: one per response token; turn: as many
    # as the frame may have turns, those after the last turn are padding; row, prompt,
    # batch: one each; columns: the data columns as text; lengths: prompt length, response length; row_numbers: the
    # number of the row in its data source; table: no rows of a frame, but one entry per row of a data source; cache:
    # keys and values of the sequence, in the form of the backend, on the ranks that computed them; stored: all rows of
    # a replay buffer; entry: `width` per response token; hidden: the last hidden state before each response token, from
    # which the log-probs of the whole vocabulary follow; array: `width` numbers of the whole batch (`plan/arrays.py`)
    extent: Literal["tokens", "response", "turn", "row", "prompt", "batch", "columns", "lengths", "row_numbers",
                    "table", "cache", "stored", "entry", "hidden", "array"]
    dtype: Literal["f32", "i64", "bool", "text"] = "f32"  # of an element
    # what people call it, where its id is a name of the compiler's: "mean(r by prompt) (ppo.rlf:12)"
    label: str = ""
    width: int = 1  # numbers for each response token, of extents "entry" and "hidden"; numbers of an "array"
    entries: str = ""  # at level entry: its space (`plan/entries.py`)


    @property
    def ragged(self) -> bool:
        """Whether rows have different numbers of entries, by the lengths of their sequences."""
        return self.extent in ("tokens", "response", "entry", "hidden")


@dataclass(frozen=True, slots=True)
class State:
    """A value that persists over steps: one number, or one for each row of a data source."""

    value: str  # id
    spread: str  # of granularity "all": every rank of its mesh holds the value
    initial: float  # before the first step
    data: str = ""  # the source whose rows have a number each (a value of extent "table"); "": one number


@dataclass(frozen=True, slots=True)
class StoredField:
    """A value of each row of a replay buffer."""

    name: str  # "tokens", "logprobs", or of `with`
    extent: Literal["tokens", "response", "row"]  # as of a `Value`
    dtype: Literal["f32", "i64", "bool"]  # as of a `Value`


@dataclass(frozen=True, slots=True)
class ReplayBuffer:
    """Rows that persist over steps: `buffer good = rows(capacity=4096)`. The oldest leave when it is full. Each rank of
    the spread holds all rows, in host memory, so that rows are drawn and checkpoints resumed without communication."""

    value: str  # id of the value that stands for all of its rows
    spread: str  # of granularity "all"
    capacity: int  # rows
    fields: tuple[StoredField, ...]  # what each row has
    # of the sequences: as of the frames that are stored, and of those that are sampled
    data: str
    max_prompt_tokens: int  # per row
    max_response_tokens: int  # per row
    temperature: float = 1.0  # of the log-probs
    tokenizer: str = ""  # as of a `Frame`


@dataclass(frozen=True, slots=True)
class Group:
    """A communicator. The runtime creates them at start-up, in the order of these records."""

    id: str  # unique in a plan
    # of a layout: one group for each combination of the other coordinates. ep: ranks along dp that divide the experts
    # among themselves; expert_dp: ranks along dp that hold the same experts; mesh: all ranks of `mesh`
    axis: Literal["tp", "pp", "dp", "cp", "ep", "expert_dp", "mesh"]
    layout: str = ""  # id; "" for axis "mesh"
    mesh: str = ""  # id; "" for the axes of a layout


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
