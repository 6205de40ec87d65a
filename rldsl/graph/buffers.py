"""Replay buffers: `buffer good = rows(capacity=4096)`, `good.add(gen)`, `old = good.sample(64, weight=good.reward)`.

In: calls of the flow. Out: Store and Sample nodes, and frames of sampled rows. What the rows of a buffer have follows
from the first `add`; a `sample` may come before it, so a flow that has buffers is walked once before, to learn it.
Errors: RL0112, RL0201, RL0202, RL0203, RL0204, RL0205, RL0212, RL0215, each with its position.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Literal, cast

from rldsl.diag import Label, counted
from rldsl.graph import model as g
from rldsl.graph.weights import row_weight
from rldsl.plan.model import SEQUENCE_VALUES, Frame, Space, StoredField
from rldsl.semantics import options
from rldsl.semantics.errors import BAD, NO_VALUE, Bad, suggest
from rldsl.semantics.expressions import ExpressionBuilder
from rldsl.semantics.levels import source_name
from rldsl.semantics.scope import Scope
from rldsl.semantics.terms import Term, input_
from rldsl.semantics.values import BufferRef, FrameRef, Meaning, Pairs, describe
from rldsl.source import Span
from rldsl.syntax import ast

if TYPE_CHECKING:
    from rldsl.graph.flow import FlowBuilder

CALLS = ("add", "sample")


def declared(item: ast.Buffer, exprs: ExpressionBuilder, scope: Scope) -> g.Buffer | Bad:
    """`buffer name = rows(capacity=4096)`"""
    call = item.value
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name) or call.func.name != "rows":
        return exprs.errors.add("RL0203", "a buffer is written `rows(capacity=4096)`", call.span)
    given = options.read(options.BUFFER, [(a.name or ast.Ident(name="", span=a.span), a.value) for a in call.args],
                         "`rows`", call.span, exprs, scope)
    return given if isinstance(given, Bad) else g.Buffer(item.name.name, cast(int, given["capacity"]), item.span)


class Buffers:
    """The replay buffers of a flow."""

    def __init__(self, flow: FlowBuilder, buffers: dict[str, g.Buffer]):
        self.flow, self.errors = flow, flow.errors
        self.known = buffers  # with what their rows have, as far as it is known
        self._first: dict[str, Span] = {}  # buffer -> its first `add`
        self.found: dict[str, g.Stored] = {}  # buffer -> what its first `add` of this walk says
        self._weighing = ""  # the buffer whose weight is being built
        for name in buffers:  # all rows of a buffer, for weights; nothing of it reaches the graph
            flow.spaces.add(Frame(name, name, "", 0, 0), Space(name, 1))
        self.tried: set[str] = set()  # buffers that some `add` names, whether or not it is right

    def make(self, owner: BufferRef, call: ast.Call, scope: Scope, target: str | None, clause: g.Clause | None,
             span: Span, inside: str) -> Meaning:
        """A call that is a statement. inside: the block that it is in, "flow", "every", "repeat", "until", "eval"."""
        ident = cast(ast.Attribute, call.func).name
        if ident.name not in CALLS:
            return self.errors.add("RL0112", f"the buffer `{owner.name}` has no call `{ident.name}`", ident.span,
                                   help=suggest(ident.name, CALLS))
        if inside in ("repeat", "until", "eval"):
            what = "an evaluation must not change the run" if inside == "eval" and ident.name == "add" \
                else "rows are added and drawn once in a step"
            return self.errors.add("RL0212", f"`{ident.name}` inside `{'eval' if inside == 'eval' else 'repeat'}`",
                                   span, help=f"{what}: move this out of the block")
        if clause is not None:
            return self.errors.add("RL0212", "only model calls can be placed", clause.span,
                                   help="every rank has all rows of a buffer: remove `on ...`")
        if ident.name == "add":
            return self._add(owner.name, call, scope, target, span)
        return self._sample(owner.name, call, scope, target, span)

    # ------------------------------------------------------------------------------------------------ add

    def _add(self, name: str, call: ast.Call, scope: Scope, target: str | None, span: Span) -> Meaning:
        self.tried.add(name)
        if target is not None:
            return self.errors.add("RL0212", "`add` returns nothing", span, help="remove the name before `=`")
        if len(call.args) != 1 or call.args[0].name is not None:
            return self.errors.add("RL0204", "`add` takes one batch of sequences", call.span,
                                   help=f"write `{name}.add(kept)`")
        tree = call.args[0].value
        ref = self.flow.exprs.build(tree, scope)
        if not isinstance(ref, FrameRef):
            return BAD if isinstance(ref, Bad) else self.errors.add(
                "RL0203", f"`add` takes sequences, not {describe(ref)}", tree.span,
                help="add one side: `.chosen` or `.rejected`" if isinstance(ref, Pairs) else "")
        if ref.frame.max_turns:
            return self.errors.add("RL0213", "a buffer does not keep conversations", tree.span,
                                   f"`{source_name(ref.frame)}` has up to {ref.frame.max_turns} turns",
                                   help="train on them in the step that made them, or in a later one: `flow f(lag=1)`")
        values = self._values(ref, tree.span)
        frame, records = ref.frame, self.flow.values
        fields = tuple(StoredField(field, cast(Literal["tokens", "response", "row"], records[v].extent),
                                   cast(Literal["f32", "i64", "bool"], records[v].dtype)) for v, field in values)
        stored = g.Stored(ref.contents, fields, frame.data, frame.max_prompt_tokens, frame.max_response_tokens,
                          frame.temperature)
        first = self.found.setdefault(name, stored)
        if fault := _difference(first, stored):
            return self.errors.add("RL0202", f"these rows are not like those that `{name}` has", tree.span, fault,
                                   labels=(Label(self._first[name], "the first rows"),),
                                   help="all rows of a buffer have the same named values, limits and temperature: "
                                        "declare a second buffer for others")
        self._first.setdefault(name, tree.span)
        self.flow.items.append(g.Store(
            id=self.flow.unique(f"{name}.add"), reads=(*(v for v, _ in values), name), writes=(name,), span=span,
            buffer=name, frame=frame.id, values=values))
        return NO_VALUE

    def _values(self, ref: FrameRef, span: Span) -> tuple[tuple[str, str], ...]:
        """(value, field) of what comes along with the rows."""
        frame = ref.frame
        found = [(f"{frame.id}.{x}", x) for x in SEQUENCE_VALUES if f"{frame.id}.{x}" in self.flow.values]
        for name, term in ref.fields:
            here = self.flow.exprs.field(ref, term, span)
            if here.level != "token" and (here.level, here.space) != ("seq", frame.row_space):  # as one number per row
                here = self.flow.exprs.ops.broadcast(here, "seq", frame)
            found.append((self.flow.materialize(here, "field", span).name, name))
        return tuple(found)

    # --------------------------------------------------------------------------------------------- sample

    def _sample(self, name: str, call: ast.Call, scope: Scope, target: str | None, span: Span) -> Meaning:
        if target is None:
            return self.errors.add("RL0212", "the result of `sample` is not used", span,
                                   help=f"assign it to a name: `old = {name}.sample(64)`")
        numbers = [a for a in call.args if a.name is None]
        if len(numbers) != 1:
            return self.errors.add("RL0204", "`sample` takes the number of rows", call.span,
                                   help=f"write `{name}.sample(64)`")
        for arg in call.args:
            if arg.name is not None and arg.name.name != "weight":
                return self.errors.add("RL0107", f"`sample` has no option `{arg.name.name}`", arg.name.span,
                                       help="options: weight")
        count = options.positive_integer("sample", numbers[0].value, self.flow.exprs, scope, "sequences")
        if count is None:
            return BAD
        buffer = self.known[name]
        if count > buffer.capacity:
            return self.errors.add("RL0205", f"`{name}` has at most {counted(buffer.capacity, 'row')}",
                                   numbers[0].value.span, labels=(Label(buffer.span, "declared here"),),
                                   help="draw fewer rows, or raise its capacity")
        stored = buffer.stored
        if stored is None:  # an `add` that is wrong is reported itself
            return BAD if buffer.tried else self.errors.add("RL0215", f"nothing is added to `{name}`", span,
                                   labels=(Label(buffer.span, "declared here"),),
                                   help=f"add rows in the flow: `{name}.add(kept)`")
        weight = self._weight(name, call, stored, target, scope)
        if isinstance(weight, Bad):
            return BAD
        program, inputs = weight
        own = _numbers(name, stored)
        states = tuple(i for i in inputs if i not in own)
        frame = self.flow.spaces.add(
            Frame(target, target, stored.data, stored.max_prompt_tokens, stored.max_response_tokens,
                  stored.temperature, present_in=target), Space(target, count))
        self.flow.spaces.without_columns[frame.row_space] = "come from a buffer, which keeps none"
        values, fields = [], []
        for f in stored.fields:
            level: Literal["token", "seq"] = "seq" if f.extent == "row" else "token"
            made = self.flow.value(f"{target}.{f.name}", level, target, f.dtype, f.extent)
            values.append((f.name, made))
            if f.name not in SEQUENCE_VALUES:
                fields.append((f.name, input_(made, level, self.flow.spaces.of(frame, level), span, f.dtype)))
        lengths = self.flow.value(f"{target}.lengths", "seq", target, "i64", "lengths")
        self.flow.items.append(g.Sample(
            id=self.flow.unique(target), reads=(name, *states), writes=(*(v for _, v in values), lengths), span=span,
            buffer=name, frame=target, values=tuple(values), program=program, inputs=tuple((s, s) for s in states),
            fields=tuple((i, i.partition(".")[2]) for i in inputs if i in own)))
        return FrameRef(frame, stored.contents, fields=tuple(fields))

    def _weight(self, name: str, call: ast.Call, stored: g.Stored, target: str,
                scope: Scope) -> tuple[str, tuple[str, ...]] | Bad:
        """(the program of the weight of a row, "" if all are equally likely; its inputs)"""
        given = [a for a in call.args if a.name is not None]
        if len(given) > 1:
            return self.errors.add("RL0215", "`weight` is passed twice", given[1].span, help="remove one of the two")
        if not given:
            return "", ()
        numbers = _numbers(name, stored)
        self._weighing = name
        term = self.flow.exprs.term(given[0].value, scope)
        self._weighing = ""
        use = f"use {', '.join(f'`{n}`' for n in numbers)}" if numbers else \
            f"name a number of the rows when they are added, for example `kept = gen with x=...`, and use `{name}.x`"
        return row_weight(self.flow, term, given[0].value, target, numbers,
                          f"{use}, states that are one number, and constants; compute anything else before `add`")

    def of_all_rows(self, owner: BufferRef, expr: ast.Attribute) -> Meaning:
        """`good.reward`: a number of all rows of a buffer, in a weight."""
        name, field = owner.name, expr.name.name
        stored = self.known[name].stored
        if self._weighing != name or stored is None:
            return self.errors.add("RL0212", f"`{expr.span.text}` outside a weight", expr.span,
                                   f"this is a number of every row of `{name}`",
                                   help=f"sampled rows have `.{field}`: `old = {name}.sample(64)`, then `old.{field}`")
        known = next((f for f in stored.fields if f.name == field), None)
        if known is None:
            numbers = [n.partition(".")[2] for n in _numbers(name, stored)]
            return self.errors.add("RL0112", f"the rows of `{name}` have no number `{field}`", expr.name.span,
                                   help=suggest(field, numbers) or
                                   f"name it when rows are added: `kept = gen with {field}=...`")
        if known.extent != "row":
            return self.errors.add("RL0201", "a weight is one number for each row, not for each token", expr.span,
                                   help=f"reduce it before `add`, and name it: `kept = gen with x=mean(gen.{field} by "
                                        f"seq)`, then `weight={name}.x`")
        return Term("input", (), "seq", name, known.dtype, expr.span, (("name", f"{name}.{field}"),))


def _numbers(buffer: str, stored: g.Stored) -> tuple[str, ...]:
    """What a weight may use of a row: "good.reward"."""
    return tuple(f"{buffer}.{f.name}" for f in stored.fields if f.extent == "row")


def _difference(first: g.Stored, other: g.Stored) -> str:
    """How rows differ from the first ones of a buffer; "" if they do not."""
    mine, theirs = ({f.name: f for f in s.fields} for s in (other, first))
    if mine != theirs:
        names = sorted(n for n in mine.keys() | theirs.keys() if mine.get(n) != theirs.get(n))
        return f"`{names[0]}` is missing from one of them, or is of another kind"
    for what, before, now in (
            ("prompts of up to {} tokens", first.max_prompt_tokens, other.max_prompt_tokens),
            ("responses of up to {} tokens", first.max_response_tokens, other.max_response_tokens),
            ("log-probs at the temperature {:g}", first.temperature, other.temperature),
            ("prompts of the data `{}`", first.data, other.data)):
        if before != now:
            return f"{what.format(now)}, and the first rows have {what.format(before)}"
    return "" if first.contents == other.contents else "these come from data, and the others from a model"


def with_stored(buffers: dict[str, g.Buffer], walked: Buffers) -> dict[str, g.Buffer]:
    """The buffers, with what a walk of the flow found of their rows."""
    return {n: replace(b, stored=walked.found.get(n, b.stored), tried=n in walked.tried) for n, b in buffers.items()}


