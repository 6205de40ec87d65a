"""Frames that are made from other frames: `pick(gen, x)`, `others(gen)`, `whole(more)`, `pair(a, b)`, and the named
values of `gen with x=...`.

In: calls and clauses of the flow. Out: frames that say where they come from, Derive items, and what the calls stand
for. A picked frame has one row for each prompt of its source: its row space is the source's prompt space. The others of
a frame with n rows per prompt are n - 1 rows below each row of it. Pairs of two picks from the same rows leave out the
prompts of which both picked the same row.
Errors: RL0201, RL0202, RL0203, RL0204, RL0205, RL0212, RL0213, RL0215, each with its position.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from rldsl.graph import model as g
from rldsl.graph.computations import label
from rldsl.graph.concat import concat
from rldsl.graph.prefixes import prefixes
from rldsl.plan.model import FIELD_NAMES, PICKED, SEQUENCE_VALUES, Space
from rldsl.plan.spaces import IndexedFrame, response_chain
from rldsl.semantics.errors import BAD, Bad
from rldsl.semantics.levels import source_name
from rldsl.semantics.scope import Scope
from rldsl.semantics.terms import Term, input_
from rldsl.semantics.values import FrameRef, Meaning, Pairs, describe
from rldsl.source import Span
from rldsl.syntax import ast

if TYPE_CHECKING:
    from rldsl.graph.flow import FlowBuilder

INDEX = "index"  # of the sequences of a prompt: what `pair` compares of two picks


class Derivations:
    """The derived frames of `flow`. They share the builder of selections."""

    def __init__(self, flow: FlowBuilder):
        self.flow, self.errors, self.spaces = flow, flow.errors, flow.spaces
        # an expression, and the name that its statement binds it to
        self.target: tuple[ast.Expr, str] | None = None
        self._index: dict[str, Term] = {}  # picked frame -> where each of its rows was among those of its prompt
        self._indices: dict[str, Term] = {}  # frame that was picked from -> where each of its rows is

    def call(self, name: str, expr: ast.Call, scope: Scope) -> Meaning:
        """A call of `pick`, `others`, `whole`, `pair`, `concat` or `prefixes`."""
        target = self.target[1] if self.target is not None and self.target[0] is expr else None
        values = [self.flow.exprs.build(a.value, scope) for a in expr.args if a.name is None]
        if any(isinstance(v, Bad) for v in values):
            return BAD
        if name == "prefixes":
            return prefixes(self.flow, values[0], expr, target, scope)
        trees = [a.value for a in expr.args]
        if name == "concat":
            return concat(self.flow, values, trees, expr.span, target)
        build = {"pick": self._pick, "others": self._others, "whole": self._whole, "pair": self._pair}[name]
        return build(values, trees, expr.span, target)

    # ----------------------------------------------------------------------------------------------- pick

    def _pick(self, values: list[Meaning], trees: list[ast.Expr], span: Span, target: str | None) -> Meaning:
        ref, key = values[0], values[1]
        source = self._groups(ref, trees[0], "pick", f"select some of them: `best = {trees[0].span.text} where ...`")
        if isinstance(source, Bad):
            return BAD
        old = source.frame
        number = self._key(key, old, trees[1])
        if number is None:
            return BAD
        id_ = target or self.flow.anonymous("pick")
        frame = self.spaces.add(replace(
            old, id=id_, row_space=old.prompt_space, selected_from="", picked_from=old.id,
            present_in=id_ if self._absent_by_row(old) else old.present_in, label="" if target else label(span)))
        index = self._index_of(old, span)
        along = self._standard(old, frame)
        along.append((index.name, self._made(index.name, frame, PICKED)))
        fields = tuple((n, self._field(n, t, old, frame, along)) for n, t in source.fields)
        self.flow.value(f"{id_}.lengths", "seq", id_, "i64", "lengths")
        self.flow.items.append(g.Derive(
            id=self.flow.unique(id_), reads=tuple(dict.fromkeys((number.name, *(v for v, _ in along)))),
            writes=tuple(w for _, w in along), span=span, op="pick", source=old.id, frame=id_, values=tuple(along),
            key=number.name))
        self._index[id_] = input_(f"{id_}.{PICKED}", "seq", frame.row_space, span)
        return replace(source, frame=frame, fields=fields)

    def _groups(self, ref: Meaning, tree: ast.Expr, name: str, help_: str) -> FrameRef | Bad:
        """The argument of a function `name` that works on the sequences of each prompt. help_: what to do if there is
        only one."""
        if not isinstance(ref, FrameRef):
            side = "give it one side: `.chosen` or `.rejected`" if isinstance(ref, Pairs) else ""
            return self.errors.add("RL0203", f"`{name}` takes sequences, not {describe(ref)}", tree.span, help=side)
        if ref.contents == "prompts":
            return self.errors.add("RL0213", f"`{name}` needs sequences with a response", tree.span,
                                   f"`{source_name(ref.frame)}` contains only prompts", help="generate responses first")
        if self.spaces.ungrouped_by(ref.frame.row_space):
            return self.errors.add(
                "RL0202", f"the rows of `{source_name(ref.frame)}` have no prompts in common", tree.span,
                f"it has rows of batches with {self.spaces.ungrouped_by(ref.frame.row_space)} sequences for each "
                "prompt", help=f"`{name}` before `concat`")
        if len(ref.frame.chain) == 1:
            return self.errors.add("RL0202", f"`{source_name(ref.frame)}` has one sequence for each prompt", tree.span,
                                   "there is nothing to pick from" if name == "pick" else "there are no others",
                                   help=help_)
        return ref

    def _absent_by_row(self, frame: IndexedFrame) -> bool:
        """Whether some rows of a prompt may be absent and others not."""
        return bool(frame.present_in) and self.spaces.frames[frame.present_in].row_space == frame.row_space

    def _standard(self, old: IndexedFrame, frame: IndexedFrame) -> list[tuple[str, str]]:
        """The values that come along with the sequences of `old`, and what they become in `frame`."""
        return [(f"{old.id}.{x}", self._made(f"{old.id}.{x}", frame, x)) for x in SEQUENCE_VALUES
                if f"{old.id}.{x}" in self.flow.values]

    # --------------------------------------------------------------------------------------------- others

    def _others(self, values: list[Meaning], trees: list[ast.Expr], span: Span, target: str | None) -> Meaning:
        """The other sequences of each sequence's prompt, one row for each pair of two."""
        ref = self._groups(values[0], trees[0], "others", "generate several for each prompt: `n=4`")
        if isinstance(ref, Bad):
            return BAD
        old = ref.frame
        if old.per_prompt < 2:
            return self.errors.add("RL0202", f"`{source_name(old)}` has one sequence for each prompt", trees[0].span,
                                   "there are no others", help="generate several for each prompt: `n=4`")
        id_ = target or self.flow.anonymous("others")
        fan = old.per_prompt - 1
        frame = self.spaces.add(
            replace(old, id=id_, row_space=id_, selected_from="", picked_from="",
                    present_in=id_ if self._absent_by_row(old) else old.present_in,
                    label="" if target else label(span)),
            Space(id_, old.count * fan, old.row_space, fan))
        along = self._standard(old, frame)
        fields = tuple((n, self._field(n, t, old, frame, along)) for n, t in ref.fields)
        self.flow.value(f"{id_}.lengths", "seq", id_, "i64", "lengths")
        self.flow.items.append(g.Derive(
            id=self.flow.unique(id_), reads=tuple(v for v, _ in along), writes=tuple(w for _, w in along), span=span,
            op="others", source=old.id, frame=id_, values=tuple(along)))
        return replace(ref, frame=frame, fields=fields, paired=False)

    # ---------------------------------------------------------------------------------------------- whole

    def _whole(self, values: list[Meaning], trees: list[ast.Expr], span: Span, target: str | None) -> Meaning:
        """The same rows, each with the responses of its whole chain of continuations as one response."""
        ref, tree = values[0], trees[0]
        if not isinstance(ref, FrameRef):
            side = "give it one side: `.chosen` or `.rejected`" if isinstance(ref, Pairs) else ""
            return self.errors.add("RL0203", f"`whole` takes sequences, not {describe(ref)}", tree.span, help=side)
        old, frames = ref.frame, self.spaces.frames
        parts = [frames[p] for p in response_chain(old.id, frames, self.flow.calls.prompts_of)]
        if ref.contents != "generated" or len(parts) < 2:
            return self._continues_nothing(ref, parts[0], tree)
        if any(p.temperature != old.temperature for p in parts):
            numbers = ", ".join(f"`{source_name(p)}` at {p.temperature:g}" for p in parts)
            return self.errors.add("RL0205", "the parts of a whole sequence have different temperatures", tree.span,
                                   numbers, help="its log-probabilities are taken at one temperature: generate all "
                                   "parts at the same one, or train on each of them")
        id_ = target or self.flow.anonymous("whole")
        frame = self.spaces.add(replace(
            old, id=id_, selected_from="", picked_from="", max_prompt_tokens=parts[0].max_prompt_tokens,
            max_response_tokens=sum(p.max_response_tokens for p in parts), label="" if target else label(span)))
        along = self._standard(old, frame)
        lengths = tuple(f"{p.id}.logprobs" for p in parts)  # they say how many tokens each part has
        self.flow.value(f"{id_}.lengths", "seq", id_, "i64", "lengths")
        self.flow.items.append(g.Derive(
            id=self.flow.unique(id_), reads=tuple(dict.fromkeys((*(v for v, _ in along), *lengths))),
            writes=tuple(w for _, w in along), span=span, op="whole", source=old.id, frame=id_, values=tuple(along),
            also_reads=lengths, parts=tuple(p.id for p in parts)))
        return replace(ref, frame=frame, fields=tuple((n, t) for n, t in ref.fields if t.level != "token"))

    def _continues_nothing(self, ref: FrameRef, first: IndexedFrame, tree: ast.Expr) -> Bad:
        """`whole` of sequences that continue no response."""
        name = source_name(ref.frame)
        prompts = self.spaces.frames.get(self.flow.calls.prompts_of.get(first.id, ""))
        if prompts is not None and prompts.row_space != prompts.id and not prompts.selected_from:
            return self.errors.add(
                "RL0213", f"`{name}` does not continue the responses of a model", tree.span,
                f"its prompts are text of `{source_name(prompts)}`",
                help="text ends a chain of continuations, since it is no model's response: train on "
                f"`{name}`, and on what the text was made from, in separate calls")
        of = self.flow.exprs.ops.cuts_of(prompts) if prompts is not None else ""
        if of:
            return self.errors.add(
                "RL0213", f"`{name}` does not continue whole responses", tree.span,
                f"its prompts are beginnings of the responses of `{source_name(self.spaces.frames[of])}`",
                help=f"a prefix is a prompt: train on `{name}`, whose response is what was generated after it")
        if ref.frame.iterations > 1:
            return self.errors.add("RL0213", "`whole` of what a `repeat` collected", tree.span,
                                   f"`{name}` has the sequences of all iterations",
                                   help="join them inside the block, and use the result after it")
        return self.errors.add(
            "RL0213", f"`{name}` does not continue the responses of a model", tree.span,
            help="continue a response first: `more = actor.generate(gen)`, then `whole(more)`")

    def _index_of(self, frame: IndexedFrame, span: Span) -> Term:
        """Where each row is among those of its prompt, made once in a block; `prune` drops it if no pair reads it."""
        known = self._indices.get(frame.id)
        if known is None or not any(known.name in n.writes for n in self.flow.items if isinstance(n, g.Compute)):
            term = Term("index", (), "seq", frame.row_space, "f32", span, (("frame", frame.id),))
            known = self.flow.materialize(term, INDEX, span, text=f"index of {source_name(frame)}")
            self._indices[frame.id] = known
        return known

    def _key(self, key: Meaning, frame: IndexedFrame, tree: ast.Expr) -> Term | None:
        """The number by which `pick` chooses, as a seq value of `frame`."""
        name = source_name(frame)
        if not isinstance(key, Term) or key.dtype != "f32":
            what = "a condition" if isinstance(key, Term) and key.dtype == "bool" else describe(key)
            self.errors.add("RL0203", f"`pick` needs a number for each sequence, not {what}", tree.span,
                            help="for a condition: `pick(gen, where(c, 1, 0))`"
                            if isinstance(key, Term) and key.dtype == "bool" else "")
            return None
        if key.level != "seq":
            help_ = "for example `pick(gen, mean(x by seq))`" if key.level == "token" else \
                "a number of the prompt is the same for all of its sequences"
            self.errors.add("RL0201", f"`pick` needs a seq value, not {describe(key)}", tree.span, help=help_)
            return None
        here = self.flow.exprs.ops.on_selection(key, frame.row_space)
        if here is None:
            self.errors.add("RL0202", f"this number belongs to {self.spaces.shown(key)}, not to `{name}`", tree.span,
                            help=f"compute it from `{name}`, for example `len({name})`")
            return None
        return self.flow.materialize(here, "by", tree.span)

    def _made(self, value: str, frame: IndexedFrame, name: str) -> str:
        """A new value of a picked frame, of the kind of `value`."""
        v = self.flow.values[value]
        return self.flow.value(f"{frame.id}.{name}", v.level, frame.id, v.dtype, v.extent)

    def _field(self, name: str, term: Term, old: IndexedFrame, frame: IndexedFrame,
               along: list[tuple[str, str]]) -> Term:
        """A named value of `old` as one of the picked frame; what the prompt or the batch has stays as it is."""
        if term.level in ("batch", "prompt") or term.space not in (old.id, old.row_space):
            here = self.flow.exprs.ops.on_selection(term, self.spaces.of(old, term.level))
            if here is None or here.space not in (old.id, old.row_space) or here.level == "prompt":
                return term if here is None else here
            term = here
        value = self.flow.materialize(term, "field", term.span)
        if value.op != "input":
            return value
        made = self._made(value.name, frame, name)
        along.append((value.name, made))
        return input_(made, value.level, self.spaces.of(frame, value.level), term.span, value.dtype, value.unit)

    # ----------------------------------------------------------------------------------------------- pair

    def _pair(self, values: list[Meaning], trees: list[ast.Expr], span: Span, target: str | None) -> Meaning:
        refs: list[FrameRef] = []
        for value, tree in zip(values, trees, strict=True):
            if not isinstance(value, FrameRef):
                return self.errors.add("RL0203", f"`pair` takes sequences, not {describe(value)}", tree.span,
                                       help="for one side of other pairs: `.chosen` or `.rejected`"
                                       if isinstance(value, Pairs) else "")
            if value.contents == "prompts":
                return self.errors.add("RL0213", "`pair` needs sequences with a response", tree.span,
                                       f"`{source_name(value.frame)}` contains only prompts",
                                       help="generate responses first")
            refs.append(value)
        a, b = (r.frame for r in refs)
        if a.id == b.id:
            return self.errors.add("RL0215", f"`{source_name(a)}` is passed twice", trees[1].span,
                                   "both sides are the same")
        if a.row_space != b.row_space:
            return self.errors.add(
                "RL0202", f"`{trees[0].span.text}` and `{trees[1].span.text}` do not have the same rows", span,
                "row i of one side is paired with row i of the other", help=_help(a, b, trees))
        both = [replace(r, paired=True) for r in refs]
        ia, ib = (self._index.get(f.id) for f in (a, b))
        origins = {self.spaces.frames[f.picked_from].row_origin for f in (a, b) if f.picked_from}
        if ia is None or ib is None or len(origins) > 1:
            return Pairs(both[0], both[1])
        differ = self.flow.exprs.ops.apply("ne", (ia, ib), span)
        if isinstance(differ, Bad):
            return BAD
        name = target or self.flow.anonymous("pair")
        condition = self.flow.materialize(differ, "where", span)
        sides = [self.flow.selections.selected(ref, f"{name}.{side}", name, condition.name, span)
                 for ref, side in zip(both, ("chosen", "rejected"), strict=True)]
        return Pairs(sides[0], sides[1])

    # ------------------------------------------------------------------------------------------------ with

    def named(self, value: Meaning, given: tuple[tuple[ast.Ident, ast.Expr], ...], scope: Scope,
              tree: ast.Expr) -> Meaning:
        """`value with name=expr, ...`: the same sequences, with named values."""
        if isinstance(value, Bad):
            return BAD
        if not isinstance(value, FrameRef):
            return self.errors.add("RL0203", f"`with` names values of sequences, not of {describe(value)}", tree.span,
                                   help="name them on the sequences that the pairs are made from"
                                   if isinstance(value, Pairs) else "")
        fields, good = dict(value.fields), True
        for ident, expr in given:
            term = self._value_of(ident, value, expr, scope, {i.name for i, _ in given[:given.index((ident, expr))]})
            good = good and term is not None
            if term is not None:
                fields[ident.name] = self.flow.materialize(term, f"{value.frame.id}.{ident.name}", expr.span)
        return replace(value, fields=tuple(fields.items())) if good else BAD

    def _value_of(self, ident: ast.Ident, ref: FrameRef, expr: ast.Expr, scope: Scope,
                  earlier: set[str]) -> Term | None:
        """The value of one name, of the rows of `ref`, their tokens, or what is coarser."""
        term = self.flow.exprs.term(expr, scope)
        if isinstance(term, Bad):
            return None
        name = source_name(ref.frame)
        if ident.name in earlier:
            self.errors.add("RL0102", f"`{ident.name}` is named twice", ident.span, help="choose another name")
            return None
        if ident.name in (*FIELD_NAMES, *ref.numbers, *ref.states):
            self.errors.add("RL0111", f"`{name}` has a field `{ident.name}` already", ident.span,
                            help="choose another name")
            return None
        if term.dtype == "text":
            self.errors.add("RL0203", "`with` names numbers and conditions, not strings", expr.span)
            return None
        if term.level == "entry":
            self.errors.add("RL0201", "`with` names values of tokens, sequences or prompts, not entry values",
                            expr.span, f"this is {describe(term)}",
                            help="reduce it, for example with `sum(x by token)`")
            return None
        here = self.flow.exprs.ops.on_selection(term, self.spaces.of(ref.frame, term.level))
        above = {s.id for s in ref.frame.chain}
        if here is None and term.level != "token" and term.space in above:
            here = term
        if here is None:
            self.errors.add("RL0202", f"this value belongs to {self.spaces.shown(term)}, not to `{name}`", expr.span,
                            help=f"`with` takes values of `{name}`, of its tokens, its prompts or the whole batch")
        return here


def _help(a: IndexedFrame, b: IndexedFrame, trees: list[ast.Expr]) -> str:
    """How two frames of different rows become pairs."""
    left, right = (t.span.text for t in trees)
    if a.prompt_space == b.prompt_space and len(a.chain) > 1 and len(b.chain) > 1:
        return f"take one sequence of each prompt: `pair(pick({left}, x), pick({right}, y))`"
    return "both sides must come from the same prompts, one sequence of each: `pair(pick(gen, x), pick(gen, -x))`"
