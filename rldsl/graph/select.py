"""Selections and collections: batches whose number of rows is known only at run time.

In: `kept = gen where ...` and `repeat { ... } until ... max N`. Out: frames that say where they come from, Derive,
Collect and Until items. A selected frame keeps the row numbers of the frame that it was taken from, so a value of that
frame has the same number for the same row in both. A collected frame is the frames of all iterations, one after the
other.
Invariant: a value is used over a smaller frame only by way of a Derive that made a value of that frame.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from rldsl.diag import internal_error
from rldsl.graph import model as g
from rldsl.graph.carried import VERSION
from rldsl.graph.computations import label
from rldsl.plan.entries import ENTRIES, HIDDEN, EntrySpace, vocabulary_space
from rldsl.plan.model import SEQUENCE_VALUES, Space, Value
from rldsl.plan.naming import collected
from rldsl.plan.spaces import IndexedFrame
from rldsl.semantics.errors import BAD, Bad
from rldsl.semantics.levels import source_name
from rldsl.semantics.options import positive_integer
from rldsl.semantics.row_operators import cut_length
from rldsl.semantics.scope import Scope
from rldsl.semantics.terms import Term, input_, walk
from rldsl.semantics.values import FrameRef, Meaning, Pairs, describe, level_value
from rldsl.source import Span
from rldsl.syntax import ast

if TYPE_CHECKING:
    from rldsl.graph.flow import FlowBuilder


class Selections:
    def __init__(self, flow: FlowBuilder):
        self.flow, self.errors, self.spaces = flow, flow.errors, flow.spaces
        flow.exprs.ops.restrict = self.restrict
        # text of an argument that is a selection, and what it reads -> the block that it is in, and the rows
        self._arguments: dict[tuple[str, tuple[str, ...]], tuple[list[g.Item], Meaning]] = {}

    # ------------------------------------------------------------------------------------------- selections

    def where(self, s: ast.Assign, scope: Scope, target: str | None) -> Meaning:
        """`target = value where condition`. target: None when the name cannot be bound."""
        if s.where is None:
            raise internal_error("a selection without a condition")
        value, condition = self.flow.exprs.build(s.value, scope), self.flow.exprs.term(s.where, scope)
        if s.named:
            value = self.flow.derivations.named(value, s.named, scope, s.value)
        return self._of(value, condition, s.value, s.where, target, s.span)

    def argument(self, expr: ast.Selection, scope: Scope) -> Meaning:
        """`value where condition` as an argument: in a block the same rows once."""
        value, condition = self.flow.exprs.build(expr.value, scope), self.flow.exprs.term(expr.condition, scope)
        read = walk([condition]) if isinstance(condition, Term) else []
        # states of rows have other names after an update
        key = " ".join(expr.span.text.split()), tuple(t.name for t in read if t.op == "input")
        block, known = self._arguments.get(key, ([], None))
        if known is not None and block is self.flow.items:
            return known
        made = self._of(value, condition, expr.value, expr.condition, self.flow.anonymous("where"), expr.span,
                        label(expr.span))
        if read and not any(t.op == "uniform" or t.op == "input" and t.name in self.flow.states for t in read):
            self._arguments[key] = self.flow.items, made
        return made

    def _of(self, value: Meaning, condition: Term | Bad, of: ast.Expr, tree: ast.Expr, target: str | None, span: Span,
            shown: str = "") -> Meaning:
        """The rows of `value` for which `condition`. target: None when the name cannot be bound. shown: what people
        call them, where the program gives them no name."""
        if isinstance(value, Bad) or isinstance(condition, Bad):
            return BAD
        if not isinstance(value, (FrameRef, Pairs)):
            return self.errors.add("RL0203", f"`where` selects sequences, not {describe(value)}", of.span,
                                   help="for values use `where(condition, a, b)`, or select the sequences first")
        refs = (value,) if isinstance(value, FrameRef) else (value.chosen, value.rejected)
        chosen = self._condition(condition, refs[0].frame, tree)
        if chosen is None or target is None:
            return BAD
        made = [self.selected(ref, target + _side(ref.frame), target, chosen.name, span,
                              shown and shown + _side(ref.frame)) for ref in refs]
        return made[0] if len(made) == 1 else Pairs(made[0], made[1])

    def of_a_call(self, s: ast.Assign, scope: Scope) -> bool:
        """RL0212 for `gen = actor.generate(prompt) where ...`, which must be two statements. Returns whether `s` is one
        such statement."""
        called = self.flow.call_of(s.value, scope)
        if called is None or s.where is None or not isinstance(called[1].func, ast.Attribute):
            return False
        what = called[1].func.name.name
        if what not in ("generate", "next"):
            return False
        name = s.targets[0].name
        call, condition = (" ".join(t.span.text.split()) for t in (s.value, s.where))
        call += f" {s.clause.span.text}" if s.clause is not None else ""
        made, kept = (name, "kept" if scope.find("kept") is None else f"{name}_kept")
        if name == "kept":
            made, kept = "gen", name
        condition = re.sub(rf"\b{name}\b", made, condition)
        self.errors.add("RL0212", f"`{what}` and a selection in the same statement", called[1].func.span,
                        "select only from named sequences",
                        help=f"write two statements: `{made} = {call}`, then `{kept} = {made} where {condition}`")
        return True

    def _condition(self, term: Term, frame: IndexedFrame, tree: ast.Expr) -> Term | None:
        """The condition as a seq value of `frame`."""
        if term.dtype != "bool":
            self.errors.add("RL0203", "`where` needs a condition", tree.span, f"this is {describe(term)}",
                            help="use a comparison, for example `std(r by prompt) > 0`")
        elif term.level in ("batch", "token", "entry"):
            help_ = "for example `where mean(x by seq) > 0`" if term.level != "batch" else ""
            self.errors.add("RL0201", f"a selection needs a prompt or seq condition, not {level_value(term.level)}",
                            tree.span,
                            f"this is {describe(term)}", help=help_)
        else:
            here = self.flow.exprs.ops.on_frame(term, frame)
            if here is None:
                name = source_name(frame)
                self.errors.add("RL0202", f"the condition belongs to {self.spaces.shown(term)}, not to `{name}`",
                                tree.span, help=f"compute it from `{name}`, for example `len({name}) > 8`")
                return None
            own = here.level == "seq" and here.space == frame.row_space
            wide = here if own else self.flow.exprs.ops.broadcast(here, "seq", frame)
            return self.flow.materialize(wide, "where", tree.span)
        return None

    def selected(self, ref: FrameRef, id_: str, space: str, condition: str, span: Span,
                 shown: str = "") -> FrameRef:
        """The rows of `ref` for which `condition`, a seq value, holds: the frame `id_`, whose rows are `space`.
        shown: as of `_of`."""
        old = ref.frame
        frame = self.spaces.add(replace(old, id=id_, row_space=space, selected_from=old.id, picked_from="",
                                        present_in=id_, label=shown), *_selected_spaces(old, space))
        values = [(f"{old.id}.{x}", self.flow.value(f"{frame.id}.{x}", v.level, frame.id, v.dtype, v.extent))
                  for x in SEQUENCE_VALUES if (v := self.flow.values.get(f"{old.id}.{x}")) is not None]
        self.flow.value(f"{frame.id}.lengths", "seq", frame.id, "i64", "lengths")
        if old.chain[-1].id in self.flow.columns:  # rows of a buffer have none
            self.flow.columns[frame.chain[-1].id] = self.flow.columns[old.chain[-1].id]
        self.flow.items.append(g.Derive(
            id=self.flow.unique(frame.id), reads=(condition, *(v for v, _ in values)), span=span, op="where",
            writes=tuple(w for _, w in values), source=old.id, frame=frame.id, values=tuple(values), key=condition))
        return replace(ref, frame=frame)

    def restrict(self, term: Term, space: str) -> Term:
        """The values of `term` for the rows of the selection that has `space`."""
        value = self.flow.materialize(term, "expr", term.span)
        frame = next(f for f in self.spaces.frames.values()
                     if f.selected_from and self.spaces.of(f, term.level) == space)
        for node in self.flow.items:  # in this block: the same values once
            if isinstance(node, g.Derive) and node.op == "restrict" and node.frame == frame.id \
                    and node.reads == (value.name,):
                entries = self.flow.values[node.writes[0]].entries
                return input_(node.writes[0], term.level, entries or space, term.span, term.dtype, term.unit)
        name = self.flow.unique(f"{value.name}|{frame.id}")
        record = self.flow.values.get(value.name)
        known = (record.label if record is not None else "") or value.name
        entries, width = self._entries(term, frame, name)
        self.flow.value(name, term.level, frame.id, "i64" if term.dtype == "id" else term.dtype,
                        HIDDEN if entries == vocabulary_space(frame.id) else "",
                        label=f"{known} of {frame.label or frame.id}", width=width, entries=entries)
        if value.name in self.flow.distributions:
            self.flow.distributions[name] = self.flow.distributions[value.name]
        self.flow.items.append(g.Derive(id=name, reads=(value.name,), writes=(name,), span=term.span, op="restrict",
                                        source=frame.selected_from, frame=frame.id, values=((value.name, name),)))
        return input_(name, term.level, entries or space, term.span, term.dtype, term.unit)

    def _entries(self, term: Term, frame: IndexedFrame, name: str) -> tuple[str, int]:
        """The entry space of what the value `term` becomes in a selection, and its width; ("", 1) below that level.
        name: of the new value."""
        if term.level != "entry":
            return "", 1
        width = self.spaces.entries[term.space].width
        if not width:
            space = vocabulary_space(frame.id)
            self.spaces.entries[space] = EntrySpace(frame.id, 0)
            return space, 1
        ids = name if term.dtype == "id" else \
            self.restrict(input_(term.space, "entry", term.space, term.span, "id"), frame.id).space
        self.spaces.entries[ids] = EntrySpace(frame.id, width)
        return ids, width

    # ------------------------------------------------------------------------------------------ collections

    def until(self, s: ast.RepeatUntil, scope: Scope, inside: str) -> None:
        """The block, what it collects, and the condition over what was collected so far."""
        names = {t.name: BAD for a in ast.walk(s.body) if isinstance(a, ast.Assign) for t in a.targets}
        if inside not in ("flow", "every"):
            scope.names.update(names)  # their uses stay silent
            self.errors.add("RL0212", "`repeat ... until` inside another `repeat`", _head(s),
                            help="combine the conditions: `until a and b max N`" if inside == "until" else
                            "move it to the flow; for more iterations, increase the steps of the flow")
            return
        iterations = positive_integer("max", s.max_iterations, self.flow.exprs, scope)
        before = set(self.spaces.frames)
        inner = Scope(scope.module, scope)
        outer, self.flow.items = self.flow.items, []
        for statement in s.body:
            self.flow.statement(statement, inner, "until")
        for node in g.nodes(self.flow.items):
            if isinstance(node, g.Train | g.Save | g.Sync):
                self.errors.add("RL0212", "this is not allowed in a `repeat ... until`", node.span,
                                "the number of iterations is known only at run time",
                                help="collect first, then train on what was collected")
        if iterations is not None:
            after = self.collected(inner, before, iterations, _head(s), "a `repeat ... until`")
            now = {n: v for n, v in inner.names.items() if isinstance(v, Term) and v.level == "batch"}
            after |= {n: BAD for n, v in inner.names.items() if isinstance(v, Bad)}  # their uses stay silent
            condition = self.flow.exprs.term(s.condition, Scope(scope.module, scope, now | after))
            if isinstance(condition, Term) and (condition.dtype != "bool" or condition.level != "batch"):
                self.errors.add("RL0203", "`until` needs a single condition for the whole batch", s.condition.span,
                                f"this is {describe(condition)}", help="for example `until count(kept) >= 512`")
            elif isinstance(condition, Term):
                value = self.flow.materialize(condition, "until", s.condition.span, force=True)
                name = self.flow.broadcast(value, self.flow.anonymous("enough"), s.condition.span,
                                           label(s.condition.span, f"until {s.condition.span.text}"))
                body = tuple(self.flow.items)
                outer.append(g.Until(max_iterations=iterations, condition=name, body=body, span=s.span))
                scope.names.update(after)
                names = {}
        scope.names.update(names)
        self.flow.items = outer

    def collected(self, inner: Scope, before: set[str], iterations: int, span: Span, block: str) -> dict[str, Meaning]:
        """What the names of a block stand for after it, and the Collect items at its end. span: of its head."""
        new = [f for f in self.spaces.frames.values() if f.id not in before]
        outside = {s.id for f in before for s in self.spaces.frames[f].chain}
        if any(f.chain[-1].id in outside for f in new):
            self.errors.add("RL0212", f"{block} uses prompts from outside the block", span,
                            help="fetch them inside the block: `prompt = prompts.next()`")
        all_rows = {f.id: self.spaces.add(replace(
            f, id=f"{f.id}.all", row_space=f"{f.row_space}.all",
            selected_from=f"{f.selected_from}.all" if f.selected_from and f.selected_from not in before else "",
            picked_from=f"{f.picked_from}.all" if f.picked_from and f.picked_from not in before else "",
            present_in=f"{f.id}.all", label=collected(f.label or f.id)),
            *_collected_spaces(f, iterations, outside)) for f in new}
        left_out = ("lengths", ENTRIES, HIDDEN)
        values = [v for v in self.flow.values.values() if v.frame in all_rows and v.extent not in left_out]
        for frame in new:
            into = all_rows[frame.id]
            self.flow.value(f"{into.id}.lengths", "seq", into.id, "i64", "lengths", f"{into.label}.lengths")
            pairs = [(v.id, self.flow.value(self._renamed(v, frame), v.level, into.id, v.dtype, v.extent,
                                            self._label(v, frame, into))) for v in values if v.frame == frame.id]
            columns = self.flow.columns.get(frame.chain[-1].id)
            if columns is not None:  # rows of several batches have none
                self.flow.columns[into.chain[-1].id] = f"{columns.removesuffix('.columns')}.all.columns"
            self.flow.items.append(g.Collect(
                id=self.flow.unique(into.id), reads=tuple(v for v, _ in pairs), writes=tuple(w for _, w in pairs),
                span=span, frame=frame.id, into=into.id, values=tuple(pairs)))
        after = {name: self._after(value, all_rows) for name, value in inner.names.items()}
        return {name: meaning for name, meaning in after.items() if meaning is not None}

    def _renamed(self, v: Value, frame: IndexedFrame) -> str:
        """gen.tokens -> gen.all.tokens; r -> r.all."""
        own = f"{frame.id}."
        return f"{frame.id}.all.{v.id.removeprefix(own)}" if v.id.startswith(own) else f"{v.id}.all"

    def _label(self, v: Value, frame: IndexedFrame, into: IndexedFrame) -> str:
        """What people call the collected value: "gen (collected).tokens"; "r (collected)"."""
        own = f"{frame.id}."
        return f"{into.label}.{v.id.removeprefix(own)}" if v.id.startswith(own) else collected(v.label or v.id)

    def _after(self, value: Meaning, all_rows: dict[str, IndexedFrame]) -> Meaning | None:
        """What `value` stands for after the block. all_rows: frame -> its rows of all iterations."""
        match value:
            case FrameRef():
                return self._collected_ref(value, all_rows)
            case Pairs(chosen=a, rejected=b):
                return Pairs(self._collected_ref(a, all_rows), self._collected_ref(b, all_rows))
            case Term(level="entry"):
                return None
            case Term(op="input", level=level) if level != "batch":
                record = self.flow.values[value.name]
                if record.frame not in all_rows:
                    return value
                frame = all_rows[record.frame]
                name = self._renamed(record, self.spaces.frames[record.frame])
                return input_(name, level, self.spaces.of(frame, level), value.span, value.dtype, value.unit)
            case Term() if value.constant:
                return value
        return None

    def _collected_ref(self, ref: FrameRef, all_rows: dict[str, IndexedFrame]) -> FrameRef:
        base = all_rows[ref.base].id if ref.base in all_rows else ref.base
        cut = ref.frame.id in all_rows and self.flow.exprs.ops.cuts_of(ref.frame) in all_rows
        fields = tuple((n, t) for n, old in ref.fields
                       for t in [self._collected_cuts(ref.frame, all_rows, old.span) if cut and n == "at"
                                 else self._collected_age(old, all_rows) if n == VERSION and old.op != "input"
                                 else self._after(old, all_rows)]
                       if isinstance(t, Term))
        return replace(ref, frame=all_rows.get(ref.frame.id, ref.frame), base=base, fields=fields)

    def _collected_age(self, age: Term, all_rows: dict[str, IndexedFrame]) -> Term | None:
        """How old the tokens of all iterations are: as old as those of each. age: a number, repeated for each token."""
        frame = all_rows.get(age.space)
        return None if frame is None else self.flow.exprs.ops.broadcast(age.args[0], "token", frame)

    def _collected_cuts(self, frame: IndexedFrame, all_rows: dict[str, IndexedFrame], span: Span) -> Term:
        """The lengths of the prefixes that a block collects, which are prefixes, too. frame: a selection of them, of
        whose rows these are the values, or they themselves."""
        ops = self.flow.exprs.ops
        while frame.id not in ops.prefixes:
            frame = self.spaces.frames[frame.selected_from]
        into, source = all_rows[frame.id], all_rows[ops.prefixes[frame.id]]
        ops.prefixes[into.id] = source.id
        return cut_length(ops, into, source, span)


def _side(frame: IndexedFrame) -> str:
    """".chosen" for that side of a pair; "" for sequences of no pair."""
    of_pair = frame.id != frame.row_space and frame.id.startswith(f"{frame.row_space}.")
    return f".{frame.id.rpartition('.')[2]}" if of_pair else ""


def _selected_spaces(frame: IndexedFrame, target: str) -> Iterator[Space]:
    """The spaces of a selection of `frame`: those of the frame, each with the same numbers."""
    names = {s.id: f"{target}.{s.id}" if i else target for i, s in enumerate(frame.chain)}
    for s in reversed(frame.chain):
        yield replace(s, id=names[s.id], parent=names.get(s.parent, ""), of=s.id, parts=())


def _collected_spaces(frame: IndexedFrame, iterations: int, outside: set[str]) -> Iterator[Space]:
    """The spaces of what a block collects of `frame`. outside: those that are not of the block."""
    for s in reversed(frame.chain):
        yield replace(s, id=f"{s.id}.all", count=s.count * iterations, parent=f"{s.parent}.all" if s.parent else "",
                      of=f"{s.of}.all" if s.of and s.of not in outside else "",
                      iterations=1 if s.parent else iterations, parts=())


def _head(s: ast.RepeatUntil) -> Span:
    """The word `repeat`."""
    return Span(s.span.file, s.span.start, s.span.start + len("repeat"))
