"""The syntax tree, on one page. Frozen; every node carries the span that a message would underline."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from functools import cache

from rldsl.source import SourceFile, Span


@dataclass(frozen=True, slots=True, kw_only=True)
class Tree:
    """A node of the tree."""

    span: Span  # what a message underlines


@dataclass(frozen=True, slots=True, kw_only=True)
class Ident(Tree):
    """A name where it is bound or selected, so that it can be underlined alone."""

    name: str


# ------------------------------------------------------------------------------------------- expressions


@dataclass(frozen=True, slots=True, kw_only=True)
class Number(Tree):
    """A number with or without a unit."""

    value: int | float  # int or float as written (1_000, 1e-6, 4k, 2M)
    unit: str = ""      # "prompts", "sequences", "pairs", "tokens" or ""


@dataclass(frozen=True, slots=True, kw_only=True)
class String(Tree):
    """A quoted text."""

    value: str  # without quotes


@dataclass(frozen=True, slots=True, kw_only=True)
class Bool(Tree):
    """true  |  false"""

    value: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ListOf(Tree):
    """[a, b]"""

    items: tuple[Expr, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Name(Tree):
    """name     (used, not bound)"""

    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Attribute(Tree):
    """value.name"""

    value: Expr
    name: Ident


@dataclass(frozen=True, slots=True, kw_only=True)
class Unary(Tree):
    """op operand"""

    op: str  # "-" or "not"
    operand: Expr


@dataclass(frozen=True, slots=True, kw_only=True)
class Binary(Tree):
    """left op right"""

    op: str  # + - * / ** < <= > >= == != and or
    left: Expr
    right: Expr


@dataclass(frozen=True, slots=True, kw_only=True)
class Argument(Tree):
    """value  |  name=value"""

    name: Ident | None  # None: positional
    value: Expr


@dataclass(frozen=True, slots=True, kw_only=True)
class Call(Tree):
    """func(args)  |  func(arg by LEVEL)"""

    func: Expr
    args: tuple[Argument, ...]
    by: Ident | None = None  # the level's name


@dataclass(frozen=True, slots=True, kw_only=True)
class Range(Tree):
    """start:stop     (inside mesh(...) only)"""

    start: Expr
    stop: Expr


Expr = Number | String | Bool | ListOf | Name | Attribute | Unary | Binary | Call | Range

# -------------------------------------------------------------------------------------------- statements


@dataclass(frozen=True, slots=True, kw_only=True)
class Option(Tree):
    """name=value of a placement, cluster or flow."""

    name: Ident
    value: Expr


@dataclass(frozen=True, slots=True, kw_only=True)
class Clause(Tree):
    """on MESH dp=4 pp=2  |  dp=4  |  auto"""

    mesh: Expr | None   # a Call of `mesh`, or a Name; None: only options are given
    options: tuple[Option, ...]
    auto: bool = False  # `auto`, and nothing else


@dataclass(frozen=True, slots=True, kw_only=True)
class Assign(Tree):
    """targets = value [with name=..., ...] [where condition] [on ...]"""

    targets: tuple[Ident, ...]
    value: Expr
    named: tuple[tuple[Ident, Expr], ...] = ()
    where: Expr | None = None
    clause: Clause | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Update(Tree):
    """batch.state = value"""

    target: Attribute
    value: Expr


@dataclass(frozen=True, slots=True, kw_only=True)
class Do(Tree):
    """An expression for its effect: `critic.train(...) on ...`."""

    value: Expr
    clause: Clause | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric(Tree):
    """metric name = value"""

    name: Ident
    value: Expr


@dataclass(frozen=True, slots=True, kw_only=True)
class Return(Tree):
    """return values"""

    values: tuple[Expr, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Save(Tree):
    """save actor, critic [to "path"]"""

    models: tuple[Ident, ...]
    path: Expr | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EveryBlock(Tree):
    """every K { ... }"""

    period: Expr
    body: tuple[Statement, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RepeatBlock(Tree):
    """repeat K { ... }"""

    times: Expr
    body: tuple[Statement, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RepeatUntil(Tree):
    """repeat { ... } until condition max max_iterations"""

    body: tuple[Statement, ...]
    condition: Expr
    max_iterations: Expr


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalBlock(Tree):
    """eval data [max max_iterations] { ... }"""

    data: Ident
    max_iterations: Expr | None
    body: tuple[Statement, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stop(Tree):
    """stop when condition     (in a loss: no further optimizer step of this train call)"""

    condition: Expr


@dataclass(frozen=True, slots=True, kw_only=True)
class Sync(Tree):
    """sync target from source [every K]"""

    target: Ident
    source: Ident
    period: Expr | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Ema(Tree):
    """ema target from source decay [every K]"""

    target: Ident
    source: Ident
    decay: Expr
    period: Expr | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint(Tree):
    """checkpoint every K [keep=N]"""

    period: Expr
    options: tuple[Option, ...]


Statement = (Assign | Update | Do | Metric | Return | Save | EveryBlock | RepeatBlock | RepeatUntil | EvalBlock | Stop
             | Sync | Ema | Checkpoint)

# ---------------------------------------------------------------------------------------- declarations


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter(Tree):
    """name: level = default     (of a fn or loss)"""

    name: Ident
    level: Ident | None  # None: a plain number
    default: Expr | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Use(Tree):
    """use std.ppo (a, b)  |  use "file.rlf" (a)"""

    module: str  # dotted name or path
    names: tuple[Ident, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PyFunction(Tree):
    """exact_match: gen, prompt -> seq; ask: gen -> prompts?(max_tokens=2k)"""

    name: Ident
    params: tuple[Ident, ...]
    returns: Ident
    optional: bool  # with `?`: it may return None for a row
    options: tuple[Option, ...]  # in brackets after the result

    @property
    def result(self) -> str:
        """What it returns, as one writes it: "prompts?(max_tokens=2k)"."""
        options = ", ".join(o.span.text for o in self.options)
        return f"{self.returns.name}{'?' * self.optional}{f'({options})' if options else ''}"


@dataclass(frozen=True, slots=True, kw_only=True)
class UsePy(Tree):
    """use py "file.py" (exact_match: gen, prompt -> seq)"""

    path: str
    functions: tuple[PyFunction, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Param(Tree):
    """param name [: type] [= default]"""

    name: Ident
    type: Ident | None
    default: Expr | None  # None: it must be set


@dataclass(frozen=True, slots=True, kw_only=True)
class State(Tree):
    """state name [of data] = initial"""

    name: Ident
    initial: Expr
    data: Ident | None = None  # the data source whose rows have a number each; None: one number


@dataclass(frozen=True, slots=True, kw_only=True)
class Buffer(Tree):
    """buffer name = rows(capacity=4096)"""

    name: Ident
    value: Expr


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster(Tree):
    """cluster nodes=1 gpus=8  |  cluster "file.yaml" """

    path: str | None  # a file; None: options are given
    options: tuple[Option, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshDecl(Tree):
    """mesh name = value"""

    name: Ident
    value: Expr


@dataclass(frozen=True, slots=True, kw_only=True)
class DataDecl(Tree):
    """data name = value"""

    name: Ident
    value: Call


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelDecl(Tree):
    """model name = value [train optimizer]"""

    name: Ident
    value: Call
    optimizer: Call | None


@dataclass(frozen=True, slots=True, kw_only=True)
class FnDecl(Tree):
    """fn name(params) -> (levels) { body }"""

    name: Ident
    params: tuple[Parameter, ...]
    returns: tuple[Ident, ...]  # the levels
    body: tuple[Statement, ...]
    doc: str = ""               # the comment block directly above


@dataclass(frozen=True, slots=True, kw_only=True)
class LossDecl(Tree):
    """loss name(model_outputs; data) { body }"""

    name: Ident
    model_outputs: tuple[Parameter, ...]
    data: tuple[Parameter, ...]
    body: tuple[Statement, ...]
    doc: str = ""  # the comment block directly above


@dataclass(frozen=True, slots=True, kw_only=True)
class Place(Tree):
    """place actor.generate on all dp=4"""

    selector: str  # "actor.generate", "ref.*", "*.logprobs", "@gen"
    clause: Clause


@dataclass(frozen=True, slots=True, kw_only=True)
class Flow(Tree):
    """flow name(options) { body }"""

    name: Ident
    options: tuple[Option, ...]
    body: tuple[Statement, ...]


Declaration = (Use | UsePy | Param | State | Buffer | Cluster | MeshDecl | DataDecl | ModelDecl | FnDecl | LossDecl
               | Place | Flow)


@dataclass(frozen=True, slots=True)
class File:
    """A program or a module."""

    source: SourceFile
    items: tuple[Declaration, ...]  # in the order of the text


def walk(node: object) -> Iterator[Tree]:
    """The nodes of a tree, or of several, a parent before its children."""
    ahead = [node]
    while ahead:
        node = ahead.pop()
        if isinstance(node, tuple):
            ahead += node[::-1]
        elif isinstance(node, Tree):
            yield node
            ahead += [getattr(node, name) for name in _below(type(node))]  # type: ignore[arg-type]  # a class is hashable, whatever its instances are


@cache
def _below(kind: type[Tree]) -> tuple[str, ...]:
    """The fields that may hold nodes, the last one first."""
    return tuple(f.name for f in reversed(fields(kind)) if f.name != "span")
