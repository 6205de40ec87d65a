"""The syntax tree: every kind of node, in one file, since it is read as one list. Frozen; every node carries the span
that a message would underline."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from functools import cache
from typing import Literal

from rldsl.source import SourceFile, Span


@dataclass(frozen=True, slots=True, kw_only=True)
class Tree:
    """A node of the tree."""

    span: Span  # what a message underlines


@dataclass(frozen=True, slots=True, kw_only=True)
class Ident(Tree):
    """A name where it is bound or selected, so that it can be underlined alone."""

    name: str  # as written


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

    value: bool  # true or false


@dataclass(frozen=True, slots=True, kw_only=True)
class ListOf(Tree):
    """[a, b]"""

    items: tuple[Expr, ...]  # the entries, in order


@dataclass(frozen=True, slots=True, kw_only=True)
class Name(Tree):
    """name     (used, not bound)"""

    name: str  # as written


@dataclass(frozen=True, slots=True, kw_only=True)
class Attribute(Tree):
    """value.name"""

    value: Expr  # what the field belongs to
    name: Ident  # of the field


@dataclass(frozen=True, slots=True, kw_only=True)
class Unary(Tree):
    """op operand"""

    op: str  # "-" or "not"
    operand: Expr  # what `op` applies to


@dataclass(frozen=True, slots=True, kw_only=True)
class Binary(Tree):
    """left op right"""

    op: str  # + - * / ** < <= > >= == != and or
    left: Expr  # the operand before `op`
    right: Expr  # the operand after `op`


@dataclass(frozen=True, slots=True, kw_only=True)
class Argument(Tree):
    """value  |  name=value"""

    name: Ident | None  # None: positional
    value: Expr  # what is passed


@dataclass(frozen=True, slots=True, kw_only=True)
class Call(Tree):
    """func(args)  |  func(arg by LEVEL)"""

    func: Expr  # what is called: a Name, or an Attribute such as `actor.generate`
    args: tuple[Argument, ...]  # in the order of the text
    by: Ident | None = None  # the level's name


@dataclass(frozen=True, slots=True, kw_only=True)
class Range(Tree):
    """start:stop     (inside mesh(...) only)"""

    start: Expr  # the first rank or node
    stop: Expr  # one more than the last


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection(Tree):
    """value where condition     (as an argument; a separate statement is an Assign)"""

    value: Expr  # the sequences
    condition: Expr  # which of them


Expr = Number | String | Bool | ListOf | Name | Attribute | Unary | Binary | Call | Range | Selection

# -------------------------------------------------------------------------------------------- statements


@dataclass(frozen=True, slots=True, kw_only=True)
class Option(Tree):
    """name=value of a placement, cluster or flow."""

    name: Ident  # before `=`
    value: Expr  # after `=`


@dataclass(frozen=True, slots=True, kw_only=True)
class Clause(Tree):
    """on MESH dp=4 pp=2  |  dp=4  |  auto"""

    mesh: Expr | None   # a Call of `mesh`, or a Name; None: only options are given
    options: tuple[Option, ...]  # after the mesh, in the order of the text
    auto: bool = False  # `auto`, and nothing else


@dataclass(frozen=True, slots=True, kw_only=True)
class Assign(Tree):
    """targets = value [with name=..., ...] [where condition] [on ...]"""

    targets: tuple[Ident, ...]  # the names that are bound; several for a function that returns several values
    value: Expr  # to the right of `=`
    named: tuple[tuple[Ident, Expr], ...] = ()  # of `with`: (name, value)
    where: Expr | None = None  # the condition of a selection; None: no selection
    clause: Clause | None = None  # its `on ...`; None: not given


@dataclass(frozen=True, slots=True, kw_only=True)
class Update(Tree):
    """batch.state = value"""

    target: Attribute  # the state of a batch, `prompt.rate`
    value: Expr  # the new numbers


@dataclass(frozen=True, slots=True, kw_only=True)
class Do(Tree):
    """An expression for its effect: `critic.train(...) on ...`."""

    value: Expr  # the call
    clause: Clause | None = None  # its `on ...`; None: not given


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric(Tree):
    """metric name = value, metric hist name [= value], metric table name [= value, value]"""

    name: Ident  # under which the value is logged
    value: Expr  # the number to log; of a histogram the elements, of a table the sequences
    form: Literal["number", "hist", "table"] = "number"  # the word after `metric`
    columns: tuple[Expr, ...] = ()  # of a table: numbers of its sequences
    options: tuple[Option, ...] = ()  # `bins=20`, `rows=4`


@dataclass(frozen=True, slots=True, kw_only=True)
class Return(Tree):
    """return values"""

    values: tuple[Expr, ...]  # one per level that the function declares


@dataclass(frozen=True, slots=True, kw_only=True)
class Save(Tree):
    """save actor, critic [to "path"]"""

    models: tuple[Ident, ...]  # the models to save
    path: Expr | None = None  # the directory; None: the default, below the directory of the run


@dataclass(frozen=True, slots=True, kw_only=True)
class WhenBlock(Tree):
    """every K { ... }, first K { ... }, after K { ... }"""

    word: Literal["every", "first", "after"]  # runs in every K-th step, the first K, those after them
    count: Expr  # K, in steps, or in iterations of the enclosing `repeat`
    body: tuple[Statement, ...]  # the statements in braces


@dataclass(frozen=True, slots=True, kw_only=True)
class RepeatBlock(Tree):
    """repeat K { ... }"""

    times: Expr  # K
    body: tuple[Statement, ...]  # the statements in braces


@dataclass(frozen=True, slots=True, kw_only=True)
class RepeatUntil(Tree):
    """repeat { ... } until condition max max_iterations"""

    body: tuple[Statement, ...]  # the statements in braces
    condition: Expr  # ends the loop once it holds after an iteration
    max_iterations: Expr  # the most iterations


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalBlock(Tree):
    """eval data [max max_iterations] { ... }"""

    data: Ident  # name of the data source
    max_iterations: Expr | None  # the most batches; None: all rows
    body: tuple[Statement, ...]  # the statements in braces


@dataclass(frozen=True, slots=True, kw_only=True)
class Stop(Tree):
    """stop when condition     (in a loss: no further optimizer step of this train call)"""

    condition: Expr  # a condition at batch level


@dataclass(frozen=True, slots=True, kw_only=True)
class Sync(Tree):
    """sync target from source [every K]"""

    target: Ident  # the model that is written
    source: Ident  # the model that is read
    period: Expr | None = None  # K, in steps; None: every step


@dataclass(frozen=True, slots=True, kw_only=True)
class Ema(Tree):
    """ema target from source decay [every K]"""

    target: Ident  # the model that is written
    source: Ident  # the model that is read
    decay: Expr  # the share of the old parameters that stays
    period: Expr | None = None  # K, in steps; None: every step


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint(Tree):
    """checkpoint every K [keep=N]"""

    period: Expr  # K, in steps
    options: tuple[Option, ...]  # `keep=N`


Statement = (Assign | Update | Do | Metric | Return | Save | WhenBlock | RepeatBlock | RepeatUntil | EvalBlock | Stop
             | Sync | Ema | Checkpoint)

# ---------------------------------------------------------------------------------------- declarations


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter(Tree):
    """name: level = default     (of a fn or loss)"""

    name: Ident  # of the parameter
    level: Ident | None  # None: a plain number
    default: Expr | None  # for calls that omit it; None: calls must pass it


@dataclass(frozen=True, slots=True, kw_only=True)
class Use(Tree):
    """use std.ppo (a, b)  |  use "file.rlf" (a)"""

    module: str  # dotted name or path
    names: tuple[Ident, ...]  # what is imported


@dataclass(frozen=True, slots=True, kw_only=True)
class PyFunction(Tree):
    """exact_match: gen, prompt -> seq; ask: gen -> prompts?(max_tokens=2k); Calculator: env"""

    name: Ident  # of the function, or class, in the file
    params: tuple[Ident, ...]  # what its arguments are rows of; none of a class
    returns: Ident | None  # the level of its result, or `prompts`; None: it is the class of an environment
    optional: bool  # with `?`: it may return None for a row
    options: tuple[Option, ...]  # in brackets after the result

    @property
    def result(self) -> str:
        """What it returns, as one writes it: "prompts?(max_tokens=2k)"."""
        options = ", ".join(o.span.text for o in self.options)
        if self.returns is None:
            return ""
        return f"{self.returns.name}{'?' * self.optional}{f'({options})' if options else ''}"


@dataclass(frozen=True, slots=True, kw_only=True)
class UsePy(Tree):
    """use py "file.py" (exact_match: gen, prompt -> seq, Calculator: env)"""

    path: str  # of the file, as written
    functions: tuple[PyFunction, ...]  # what is imported, functions and environments


@dataclass(frozen=True, slots=True, kw_only=True)
class Param(Tree):
    """param name [: type] [= default]"""

    name: Ident  # of the parameter
    type: Ident | None  # `number`, `int`, `text` or `bool`; None: that of the default
    default: Expr | None  # None: it must be set


@dataclass(frozen=True, slots=True, kw_only=True)
class State(Tree):
    """state name [of data] = initial"""

    name: Ident  # of the state
    initial: Expr  # its value before the first step
    data: Ident | None = None  # the data source whose rows have a number each; None: one number


@dataclass(frozen=True, slots=True, kw_only=True)
class Buffer(Tree):
    """buffer name = rows(capacity=4096)"""

    name: Ident  # of the buffer
    value: Expr  # the call of `rows`


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster(Tree):
    """cluster nodes=1 gpus=8  |  cluster "file.yaml" """

    path: str | None  # a file; None: options are given
    options: tuple[Option, ...]  # `nodes=`, `gpus=`, ...


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshDecl(Tree):
    """mesh name = value"""

    name: Ident  # of the mesh
    value: Expr  # a call of `mesh`, or another mesh


@dataclass(frozen=True, slots=True, kw_only=True)
class DataDecl(Tree):
    """data name = value"""

    name: Ident  # of the data source
    value: Call  # the call of `jsonl`, `parquet` or `hf`


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelDecl(Tree):
    """model name = value [train optimizer]"""

    name: Ident  # of the model
    value: Call  # the call of `causal_lm`, `value_model` or `reward_model`
    optimizer: Call | None  # the call after `train`; None: frozen


@dataclass(frozen=True, slots=True, kw_only=True)
class FnDecl(Tree):
    """fn name(params) -> (levels) { body }"""

    name: Ident  # of the function
    params: tuple[Parameter, ...]  # in the order of the text
    returns: tuple[Ident, ...]  # the levels
    body: tuple[Statement, ...]  # the statements in braces
    doc: str = ""               # the comment block directly above


@dataclass(frozen=True, slots=True, kw_only=True)
class LossDecl(Tree):
    """loss name(model_outputs; data) { body }"""

    name: Ident  # of the loss
    model_outputs: tuple[Parameter, ...]  # before the semicolon: what the trained model computes, with gradient
    data: tuple[Parameter, ...]  # after the semicolon: what `train(loss=...)` passes, without gradient
    body: tuple[Statement, ...]  # the statements in braces
    doc: str = ""  # the comment block directly above


@dataclass(frozen=True, slots=True, kw_only=True)
class PlaceRule(Tree):
    """place actor.generate on all dp=4"""

    selector: str  # "actor.generate", "ref.*", "*.logprobs", "@gen"
    clause: Clause  # where the selected computations run


@dataclass(frozen=True, slots=True, kw_only=True)
class Flow(Tree):
    """flow name(options) { body }"""

    name: Ident  # of the flow
    options: tuple[Option, ...]  # `steps=`, `seed=`
    body: tuple[Statement, ...]  # the statements in braces


Declaration = (Use | UsePy | Param | State | Buffer | Cluster | MeshDecl | DataDecl | ModelDecl | FnDecl | LossDecl
               | PlaceRule | Flow)


@dataclass(frozen=True, slots=True)
class File:
    """A program or a module."""

    source: SourceFile  # name and text
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
            # mypy asks whether the instances are hashable; the argument is their class
            ahead += [getattr(node, name) for name in _below(type(node))]  # type: ignore[arg-type]


@cache
def _below(kind: type[Tree]) -> tuple[str, ...]:
    """The fields that may hold nodes, the last one first."""
    return tuple(f.name for f in reversed(fields(kind)) if f.name != "span")
