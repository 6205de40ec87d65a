"""States of the rows of a data source: `state rate of prompts = 0.5`, `prompt.rate`, `prompt.rate = x`, and the rows
that `prompts.next(weight=...)` draws.

In: fields and statements of the flow. Out: Lookup, Update and Draw items. Every read is a lookup at its place in the
program, so reads and writes happen in program order. The weight of a row is a program at batch level, which is
evaluated for each row of the source: while it is built, `prompts.rate` is a value of all rows of `prompts`.
Errors: RL0112, RL0201, RL0202, RL0203, RL0212, each with its position.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from rldsl.graph import model as g
from rldsl.graph.computations import label
from rldsl.graph.weights import row_weight
from rldsl.plan.expr import Level
from rldsl.plan.model import Frame, Space
from rldsl.plan.spaces import IndexedFrame
from rldsl.semantics.errors import BAD, Bad, suggest
from rldsl.semantics.levels import source_name
from rldsl.semantics.scope import Scope
from rldsl.semantics.terms import Term, input_
from rldsl.semantics.values import BufferRef, DataRef, FrameRef, Meaning, Pairs, describe
from rldsl.source import Span
from rldsl.syntax import ast

if TYPE_CHECKING:
    from rldsl.graph.flow import FlowBuilder

ROW_NUMBERS = "row_numbers"  # value of a batch: the number of each of its rows in the source


@dataclass(frozen=True, slots=True)
class Weight:
    """What `weight=` says."""

    program: str  # id
    inputs: tuple[tuple[str, str], ...]  # (program input, state)
    columns: tuple[tuple[str, str], ...]  # (program input, column)


class RowStates:
    """The states of rows in `flow`."""

    def __init__(self, flow: FlowBuilder, states: Iterable[g.State], data: Iterable[g.Data]):
        self.flow, self.errors, self.spaces = flow, flow.errors, flow.spaces
        self._names: dict[str, list[str]] = defaultdict(list)  # data source -> the names of its states
        self._weighing = ""  # the source whose weight is being built
        # (fetched frame, state) -> the block in which it was looked up, and the value, which no update has made stale
        self._known: dict[tuple[str, str], tuple[list[g.Item], Term]] = {}
        for s in states:
            self._names[s.data].append(s.name.partition(".")[2])
            flow.value(s.name, "batch", "", extent="table")
        for d in data:  # all rows of a source, for weights; nothing of it reaches the graph
            if self._names[d.name] or d.numbers:
                flow.spaces.add(Frame(d.name, d.name, d.name, 0, 0), Space(d.name, 1))

    def of(self, data: str) -> tuple[str, ...]:
        """The names of the states of a source."""
        return tuple(self._names[data])

    # ---------------------------------------------------------------------------------------------- lookups

    def lookup(self, ref: FrameRef, name: str, span: Span) -> Term:
        """`prompt.rate`: the numbers as they are at this place of the program."""
        rows = self._of_rows(ref)
        base = self.spaces.frames[rows.base]
        state = f"{base.data}.{name}"
        block, term = self._known.get((base.id, state), ([], None))
        if term is None or block is not self.flow.items:
            term = self._looked_up(base, _level(rows), state, span)
            self._known[base.id, state] = self.flow.items, term
        here = self.flow.exprs.ops.on_selection(term, self.spaces.of(rows.frame, term.level))
        return replace(term if here is None else here, span=span)

    def _of_rows(self, ref: FrameRef) -> FrameRef:
        """The sequences that are the rows of data: of several answers to each prompt the prompts."""
        prompts = self.spaces.data_prompts(ref.base)
        return ref if prompts is None else FrameRef(prompts, "prompts", states=ref.states, base=prompts.id)

    def _looked_up(self, base: IndexedFrame, level: Level, state: str, span: Span) -> Term:
        made = self.flow.anonymous(state)  # what a loop collects of a batch has names made of the batch's
        self.flow.value(made, level, base.id, label=label(span))
        self.flow.items.append(g.Lookup(
            id=made, reads=(f"{base.id}.{ROW_NUMBERS}", state), writes=(made,), span=span, data=base.data,
            frame=base.id, state=state, value=made))
        return input_(made, level, self.spaces.of(base, level), span)

    # ---------------------------------------------------------------------------------------------- updates

    def update(self, s: ast.Update, scope: Scope) -> None:
        """`prompt.rate = value`"""
        owner, term = self.flow.exprs.build(s.target.value, scope), self.flow.exprs.term(s.value, scope)
        name = s.target.name.name
        if isinstance(owner, Bad) or isinstance(term, Bad):
            return
        ref = owner.chosen if isinstance(owner, Pairs) else owner
        if not isinstance(ref, FrameRef) or name not in ref.states:
            self._refuse_target(s, ref)
            return
        ref = self._of_rows(ref)
        new = self._fitting(s, ref, term)
        if new is None:
            return
        base = self.spaces.frames[ref.base]
        state = f"{base.data}.{name}"
        if new.op == "input":  # what is sent has one owner per row, which a value of a model call may not have
            new = Term("stop_gradient", (new,), new.level, new.space, new.dtype, new.span)
        made = self.flow.materialize(new, f"{state}'", s.span, text=f"new {s.target.span.text}")
        self.flow.items.append(g.Update(
            id=self.flow.unique(f"{state} ="), reads=(made.name, f"{base.id}.{ROW_NUMBERS}"), writes=(state,),
            span=s.span, data=base.data, frame=base.id, state=state, value=made.name))
        self._known.clear()

    def _reduced(self, term: Term, frame: IndexedFrame) -> str:
        """How a value of what lies below the rows of a frame becomes a number for each of these rows."""
        above = self.spaces.chain(term)
        nearest = [f for f in self.spaces.frames.values()
                   if f.prompt_space == frame.row_space != f.row_space and f.row_space in above]
        if nearest and all(term.space not in (f.id, f.row_space) for f in nearest):
            return f"mean(mean(x by {source_name(nearest[0])}) by prompt)"
        return "mean(x by prompt)"

    def _refuse_target(self, s: ast.Update, owner: Meaning) -> None:
        what, name = s.target.span.text, s.target.name.name
        if not isinstance(owner, FrameRef):
            self.errors.add("RL0203", f"`{what}` cannot be assigned", s.target.span,
                            f"`{s.target.value.span.text}` is {describe(owner)}",
                            help="only states of rows can: `state rate of prompts = 0.5`, then `prompt.rate = ...`")
        elif name in owner.numbers:
            self.errors.add("RL0203", f"the column `{name}` cannot be assigned", s.target.span,
                            help=f"a number per row that changes is a state: `state NAME of {owner.frame.data} = 0`")
        else:
            declare = f"declare it: `state {name} of {owner.frame.data} = 0`" if owner.base else \
                "states belong to rows of data: use the batch that `next()` returned"
            self.errors.add("RL0112", f"{describe(owner)} have no state `{name}`", s.target.name.span,
                            help=suggest(name, owner.states) or declare)

    def _fitting(self, s: ast.Update, ref: FrameRef, term: Term) -> Term | None:
        """`term` as a number for each row of `ref`, or of a selection of these."""
        what, level, frame, ops = s.target.span.text, _level(ref), ref.frame, self.flow.exprs.ops
        if term.dtype != "f32":
            given = "a condition" if term.dtype == "bool" else describe(term)
            self.errors.add("RL0203", f"`{what}` must be a number, not {given}", s.value.span,
                            help="for a condition: `where(c, 1, 0)`" if term.dtype == "bool" else "")
            return None
        if term.level == "batch":
            return ops.broadcast(term, level, frame)
        here = None if term.level == "token" else ops.on_frame(term, frame)
        if here is None and self.spaces.is_selection_of(term.level, term.space, frame.row_space):
            here = term  # rows that are not selected keep their numbers
        if here is not None and here.space in (frame.row_space, term.space):
            return here
        below = any(frame.row_space in self.spaces.chain(t) for t in (term,))
        self.errors.add("RL0201" if below else "RL0202",
                        f"`{what}` takes one number per {'prompt' if level == 'prompt' else 'row'}, not "
                        f"{describe(term)}" if below else
                        f"this value belongs to {self.spaces.shown(term)}, not to `{source_name(frame)}`",
                        s.value.span, f"this is {describe(term)}",
                        help=f"reduce it: `{self._reduced(term, frame)}`" if below else
                        f"compute it from `{source_name(frame)}` or from what was made of it")
        return None

    # ---------------------------------------------------------------------------------------------- weights

    def of_all_rows(self, owner: DataRef | BufferRef, expr: ast.Attribute) -> Meaning:
        """`prompts.rate`, `good.reward`: a value of all rows of the data, or of a buffer, in a weight."""
        if isinstance(owner, BufferRef):
            return self.flow.buffers.of_all_rows(owner, expr)
        numbers = () if self.flow.data[owner.name].answers else self.flow.data[owner.name].numbers
        name, known = expr.name.name, (*self._names[owner.name], *numbers)
        if name not in known:
            return self.errors.add("RL0112", f"{describe(owner)} has no field `{name}`", expr.name.span,
                                   help=suggest(name, known) or
                                   f"declare a state of its rows: `state {name} of {owner.name} = 0`")
        if self._weighing != owner.name:
            return self.errors.add("RL0212", f"`{expr.span.text}` outside a weight", expr.span,
                                   f"this is a number for every row of `{owner.name}`",
                                   help=f"the rows of a batch have `.{name}`: `row = {owner.name}.next()`, then "
                                        f"`row.{name}`")
        return Term("input", (), "seq", owner.name, "f32", expr.span, (("name", f"{owner.name}.{name}"),))

    def weight(self, owner: DataRef, tree: ast.Expr, target: str, scope: Scope) -> Weight | Bad:
        """The weight of a row, for the batch `target`."""
        self._weighing = owner.name
        term = self.flow.exprs.term(tree, scope)
        self._weighing = ""
        fields = [f"`{owner.name}.{n}`" for n in (*self._names[owner.name], *self.flow.data[owner.name].numbers)]
        columns = {f"{owner.name}.{c}": c for c in self.flow.data[owner.name].numbers}
        own = {f"{owner.name}.{s}" for s in self._names[owner.name]}
        made = row_weight(self.flow, term, tree, target, {*columns, *own},
                          f"use {', '.join(fields) or 'a state or a number column of the data'}; to use anything else, "
                          "write it to a `state`")
        if isinstance(made, Bad):
            return BAD
        id_, names = made
        return Weight(id_, tuple((n, n) for n in names if n not in columns),
                      tuple((n, columns[n]) for n in names if n in columns))


def _level(ref: FrameRef) -> Level:
    return "prompt" if ref.contents == "prompts" else "seq"
