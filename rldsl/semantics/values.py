"""What a name or an expression can stand for, besides a Term."""

from __future__ import annotations

from dataclasses import dataclass, field

from rldsl.plan.function import Returns
from rldsl.plan.heads import HEADS, Head
from rldsl.plan.spaces import IndexedFrame
from rldsl.semantics.errors import Bad
from rldsl.semantics.levels import source_name
from rldsl.semantics.terms import Term
from rldsl.source import Span
from rldsl.syntax import ast


@dataclass(frozen=True, slots=True)
class Items:
    """A list of constants."""

    items: tuple[Term, ...]  # in order
    span: Span  # of the list


@dataclass(frozen=True, slots=True)
class FrameRef:
    """A batch of sequences."""

    frame: IndexedFrame  # the sequences
    contents: str  # "prompts" (no responses yet), "answers" (prompt and answer), "generated" or "pairs"
    numbers: tuple[str, ...] = ()  # the columns of data that are values
    states: tuple[str, ...] = ()  # the states of these rows
    base: str = ""  # the fetched frame that these columns and states belong to
    fields: tuple[tuple[str, Term], ...] = ()  # (name, value) of `with`
    paired: bool = False  # one side of a `pair`


@dataclass(frozen=True, slots=True)
class TopTokens:
    """The most likely tokens at each token of some responses."""

    ids: Term  # entry: which they are
    logprobs: Term  # entry: their log-probs, the largest first


@dataclass(frozen=True, slots=True)
class Pairs:
    """A batch of pairs."""

    chosen: FrameRef  # the better side
    rejected: FrameRef  # the other side, row by row


@dataclass(frozen=True, slots=True)
class ModelRef:
    """A model."""

    name: str  # in the program
    head_name: str  # of `plan.heads.HEADS`
    trainable: bool  # whether it has an optimizer

    @property
    def head(self) -> Head:
        return HEADS[self.head_name]


@dataclass(frozen=True, slots=True)
class DataRef:
    """A data source."""

    name: str  # in the program


@dataclass(frozen=True, slots=True)
class BufferRef:
    """A replay buffer: sequences that are kept for later steps."""

    name: str  # in the program


@dataclass(frozen=True, slots=True)
class StateRef:
    """A `state` outside the flow, where it has no value."""

    name: str  # in the program


@dataclass(frozen=True, slots=True)
class Several:
    """Results of a function that returns more than one."""

    values: tuple[Meaning, ...]  # in the order of `return`


@dataclass(frozen=True, slots=True)
class MeshValue:
    """`mesh(...)`"""

    nodes: tuple[int, int] | None  # [start, stop); None: ranks are given, not nodes
    devices: tuple[int, int]  # [start, stop), of each node if `nodes` is given
    span: Span  # of the call
    free: bool = False  # of `mesh(8)`: any 8 ranks; `devices` is then (0, 8)


@dataclass(frozen=True, slots=True)
class FnRef:
    """A function of the language."""

    decl: ast.FnDecl  # its declaration
    module: Module  # the file that declares it


@dataclass(frozen=True, slots=True)
class LossRef:
    """A loss."""

    decl: ast.LossDecl  # its declaration
    module: Module  # the file that declares it


@dataclass(frozen=True, slots=True)
class LossUse:
    """A loss with its data arguments, as `train(loss=...)` takes it."""

    ref: LossRef  # the loss
    args: dict[str, Term]  # parameter -> what is passed
    spans: dict[str, Span]  # parameter -> where it is passed
    span: Span  # of the call


@dataclass(frozen=True, slots=True)
class PyRef:
    """A user's Python function."""

    id: str  # the key in Plan.functions
    params: tuple[str, ...]  # the names that its declaration gives its arguments
    returns: Returns  # its level, or prompts
    span: Span  # the declaration, `f: gen, prompt -> seq`
    options: tuple[ast.Option, ...] = ()  # of a text, as the declaration writes them: `max_tokens=2k`
    module: Module | None = None  # whose names the options may use


@dataclass(frozen=True, slots=True)
class EnvRef:
    """An environment: a user's Python class with which a model talks in turns."""

    id: str  # the key in Plan.functions
    span: Span  # the declaration, `Calculator: env`


@dataclass(slots=True)
class Module:
    """The names of one file."""

    name: str  # of the file, as messages show it
    names: dict[str, Meaning] = field(default_factory=dict)  # name -> its meaning
    bound_at: dict[str, Span] = field(default_factory=dict)  # name -> where it is bound
    # functions and losses whose own body has errors; their uses stay silent
    broken: set[str] = field(default_factory=set)


Meaning = (Term | Items | FrameRef | Pairs | ModelRef | DataRef | BufferRef | StateRef | Several | MeshValue | FnRef
           | LossRef | LossUse | PyRef | EnvRef | TopTokens | Bad)


def level_value(level: str) -> str:
    """"a token value", "an entry value"."""
    return f"{'an' if level == 'entry' else 'a'} {level} value"


def describe(value: Meaning) -> str:
    """What a value is, in the words of the language."""
    match value:
        case Term(op="const", dtype=dtype):
            return {"text": "a string", "bool": "true or false", "f32": "a number"}[dtype]
        case Term(dtype="id"):
            return "the ids of tokens"
        case Term(level=level):
            return level_value(level)
        case Items():
            return "a list"
        case TopTokens():
            return "the most likely tokens"
        case FrameRef(frame=frame, contents=contents):
            return f"the {'prompts' if contents == 'prompts' else 'sequences'} `{source_name(frame)}`"
        case Pairs():
            return "a batch of pairs"
        case ModelRef(name=name):
            return f"the model `{name}`"
        case DataRef(name=name):
            return f"the data `{name}`"
        case BufferRef(name=name):
            return f"the buffer `{name}`"
        case StateRef(name=name):
            return f"the state `{name}`"
        case Several(values=values):
            return f"{len(values)} values"
        case MeshValue():
            return "a mesh"
        case FnRef(decl=decl):
            return f"the function `{decl.name.name}`"
        case LossRef(decl=decl):
            return f"the loss `{decl.name.name}`"
        case LossUse(ref=ref):
            return f"the loss `{ref.decl.name.name}`"
        case PyRef(id=id_):
            return f"the Python function `{id_}`"
        case EnvRef(id=id_):
            return f"the environment `{id_}`"
    return "an error"
