"""Calls of a user's Python functions: which rows they get, and what they return.

In: a call, and the function as `use py` declares it. Out: a `Term` of the level that the function returns, or the
prompts that it makes. Errors: RL0201, RL0202, RL0203, RL0204, RL0205, RL0212, RL0213, each with its position.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from rldsl.diag import Label
from rldsl.plan.expr import Level
from rldsl.plan.function import ROW_KEYS, call_attributes
from rldsl.plan.spaces import IndexedFrame
from rldsl.semantics.errors import BAD, Bad
from rldsl.semantics.levels import source_name
from rldsl.semantics.scope import Scope
from rldsl.semantics.terms import Term
from rldsl.semantics.values import FrameRef, Meaning, PyRef, describe
from rldsl.source import Span
from rldsl.syntax import ast

if TYPE_CHECKING:
    from rldsl.semantics.expressions import ExpressionBuilder


@dataclass(frozen=True, slots=True)
class Arguments:
    """What a Python function is called with."""

    ref: PyRef  # the function
    refs: tuple[FrameRef, ...]  # its arguments, as the program gives them
    rows: IndexedFrame  # the finest of them: the function gives one result for each of its rows
    given: tuple[tuple[str, IndexedFrame], ...]  # (name, batch) of those whose rows it gets; the first is its first

    @property
    def returns_text(self) -> bool:
        """Whether it returns prompts, and not numbers."""
        return self.ref.returns in ("prompts", "prompts?")


class PythonCalls:
    """Builds the calls of Python functions in expressions."""

    def __init__(self, exprs: ExpressionBuilder):
        self.exprs, self.errors, self.spaces = exprs, exprs.errors, exprs.spaces

    def call(self, ref: PyRef, expr: ast.Call, scope: Scope) -> Meaning:
        """A user's function over the rows of its finest argument; the others must be where those come from, or share
        them."""
        args = [self.exprs.build(a.value, scope) for a in expr.args]
        if any(isinstance(a, Bad) for a in args):
            return BAD
        if len(args) != len(ref.params) or any(a.name is not None for a in expr.args):
            many = "s" * (len(ref.params) > 1)
            return self.errors.add(
                "RL0204", f"`{ref.id}` takes {len(ref.params)} positional argument{many} ({', '.join(ref.params)})",
                expr.span)
        for arg, tree in zip(args, expr.args, strict=True):
            if not isinstance(arg, FrameRef):
                return self.errors.add("RL0203", f"a Python function takes sequences, not {describe(arg)}",
                                       tree.span, help="pass the generated batch and its prompts")
        bound = self._arguments(ref, [a for a in args if isinstance(a, FrameRef)], expr)
        if isinstance(bound, Bad):
            return BAD
        if bound.rows.root_origin in self.spaces.without_columns:
            made = f"m.logprobs(gen, prompt={ref.id}(gen))" if bound.returns_text else f"{ref.id}(gen)"
            what = "what needs the prompts" if bound.returns_text else "it"
            return self.errors.add("RL0213", f"`{ref.id}` needs the columns of data of its rows", expr.args[0].span,
                                   f"the rows of `{source_name(bound.rows)}` "
                                   f"{self.spaces.without_columns[bound.rows.root_origin]}",
                                   help=f"compute {what} before, and keep it with the rows: `kept = gen with "
                                        f"x={made}`, then `.x` of those that are sampled or concatenated")
        if bound.returns_text:
            if self.exprs.texts is None:
                return self.errors.add("RL0212", f"`{ref.id}` makes prompts, outside the flow", expr.span,
                                       help="call it in a statement of the flow: `asked = ...`")
            return self.exprs.texts(bound, expr)
        level: Level = "prompt" if ref.returns == "prompt" else "seq"
        contents = {b.contents for b in bound.refs}
        if level == "prompt" and contents != {"prompts"}:
            return self.errors.add("RL0201",
                                   f"`{ref.id}` returns one number per prompt, but `{source_name(bound.rows)}` has "
                                   "several sequences per prompt", expr.args[0].span,
                                   help=f"declare `-> seq` and reduce: `mean({ref.id}(...) by prompt)`")
        if level == "seq" and contents == {"prompts"}:
            return self.errors.add("RL0213", f"`{ref.id}` returns one number per sequence", expr.args[0].span,
                                   f"`{source_name(bound.rows)}` contains only prompts",
                                   help="generate responses first, or declare `-> prompt` for one number per prompt")
        return Term("py", (), level, self.spaces.of(bound.rows, level), "f32", expr.span,
                    (("function", ref.id), *call_attributes(bound.rows.id, tuple((n, f.id) for n, f in bound.given))))

    def _arguments(self, ref: PyRef, refs: list[FrameRef], expr: ast.Call) -> Arguments | Bad:
        """The batches whose rows a function gets: those with responses, each row with the row of the others that it
        belongs to, and the first one. Prompts of data are part of the rows that come from them, and the rows from which
        others were selected are these rows."""
        finest = max(refs, key=lambda r: len(r.frame.chain))  # the first of those
        above = {s.id for s in finest.frame.chain}
        given: list[tuple[str, IndexedFrame]] = []
        for i, (name, other, tree) in enumerate(zip(ref.params, refs, expr.args, strict=True)):
            twice = any(other.frame.id == frame.id for _, frame in given)
            lies = other.frame.row_space in above
            same = other.contents == "prompts" or self.spaces.is_selection_of("seq", finest.frame.row_space,
                                                                       other.frame.row_space)
            if twice or not lies and not (same and i and self.spaces.is_made_from(finest.frame, other.frame)):
                return self._no_source(ref, name, other.frame, finest.frame, tree.span)
            if i == 0 or lies and other.contents != "prompts":
                given.append((name, other.frame))
        for name, frame in given[1:]:
            if name in ROW_KEYS:
                return self.errors.add("RL0205", f"`{ref.id}` gets each row of `{source_name(frame)}` under the name "
                                       f"`{name}`, which rows have anyway", ref.span,
                                       help=f"rename the argument: {', '.join(f'`{k}`' for k in ROW_KEYS)} are taken")
        return Arguments(ref, tuple(refs), finest.frame, tuple(given))

    def _no_source(self, ref: PyRef, name: str, other: IndexedFrame, rows: IndexedFrame, span: Span) -> Bad:
        """RL0202 for an argument of a Python function whose rows are not among those that the finest comes from."""
        given = "the same sequences" if other.id == rows.id else "other sequences" \
            if other.max_response_tokens else "other prompts"
        return self.errors.add(
            "RL0202", f"`{source_name(other)}` is not the source of `{source_name(rows)}`", span,
            f"declared as `{name}`, whose rows those of `{source_name(rows)}` must belong to; this is {given}",
            labels=(Label(ref.span, "declared here"),),
            help=f"`{ref.id}` gets each row of `{source_name(rows)}` with the rows that it belongs to: "
                 "its prompts, what it was generated from, or a batch with the same rows. To compare other "
                 "batches, reduce values of each, for example `mean(x by prompt)`")
