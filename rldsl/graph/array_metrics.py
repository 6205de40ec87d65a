"""Metrics of several numbers: `metric hist x` and `metric table gen, reward`.

In: the statements of the flow. Out: values of the extent "array" (`plan/arrays.py`), each made by a Compute, and the
names under which they are logged: a histogram by one, a table by its own for its rows and by "TABLE/COLUMN" for each
column.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from rldsl.graph.computations import full_label
from rldsl.plan import arrays
from rldsl.plan.expr import Scalar
from rldsl.plan.spaces import IndexedFrame
from rldsl.semantics import options
from rldsl.semantics.errors import BAD, Bad
from rldsl.semantics.scope import Scope
from rldsl.semantics.terms import Term, const
from rldsl.semantics.values import FrameRef, Pairs, describe, level_value
from rldsl.syntax import ast

if TYPE_CHECKING:
    from rldsl.graph.flow import FlowBuilder

FIXED = ("step", "row", "prompt", "completion")  # columns that every table has


class ArrayMetrics:
    """The histograms and tables of a flow."""

    def __init__(self, flow: FlowBuilder):
        self.flow, self.errors = flow, flow.errors

    def logged(self, s: ast.Metric, scope: Scope) -> list[tuple[str, str]]:
        """The metrics of one statement: (shown name, value). None of them if a message was given."""
        return self._histogram(s, scope) if s.form == "hist" else self._table(s, scope)

    def _histogram(self, s: ast.Metric, scope: Scope) -> list[tuple[str, str]]:
        exprs = self.flow.exprs
        x = exprs.term(s.value, scope)
        given = options.read(options.HISTOGRAM, [(o.name, o.value) for o in s.options], "a histogram", s.span, exprs,
                             scope)
        if isinstance(x, Bad) or isinstance(given, Bad):
            return []
        if x.dtype == "text":
            self.errors.add("RL0205", "a histogram is of numbers", x.at, f"this is {describe(x)}",
                            help="of texts, log a table: `metric table NAME = gen`")
            return []
        if x.level == "batch":
            self.errors.add("RL0208", "a histogram of a single number", x.at, f"this is {describe(x)}",
                            help=f"log the number itself: `metric {s.name.name} = {s.value.span.text}`")
            return []
        if x.dtype not in ("f32", "bool") or exprs.ops.whole(x):
            exprs.ops.reduce("mean", x, "batch", x.span)  # reports why there are no numbers
            return []
        low, high = given["low"], given["high"]
        if (low is None) != (high is None):
            there, missing = ("low", "high") if high is None else ("high", "low")
            self.errors.add("RL0215", f"a histogram with `{there}` needs `{missing}`", s.span,
                            help="give both ends of the range, or neither: then it is that of the elements")
            return []
        ends: tuple[tuple[str, Scalar], ...] = ()
        if isinstance(low, int | float) and isinstance(high, int | float):
            if not low < high:
                where = next(o.value.span for o in s.options if o.name.name == "high")
                self.errors.add("RL0205", f"`low` must be less than `high`, and {low:g} is not less than {high:g}",
                                where)
                return []
            ends = (("low", float(low)), ("high", float(high)))
        attrs: tuple[tuple[str, Scalar], ...] = (("to", "batch"), ("bins", cast(int, given["bins"])), *ends)
        made = Term(arrays.HISTOGRAM, (x,), "batch", "", "f32", s.span, attrs)
        return [(s.name.name, self._made(s, [(s.name.name, made)])[0])]

    def _table(self, s: ast.Metric, scope: Scope) -> list[tuple[str, str]]:
        exprs, name = self.flow.exprs, s.name.name
        rows = exprs.build(s.value, scope)
        given = options.read(options.TABLE, [(o.name, o.value) for o in s.options], "a table", s.span, exprs, scope)
        if isinstance(rows, Bad) or isinstance(given, Bad):
            return []
        if not isinstance(rows, FrameRef) or f"{rows.frame.id}.tokens" not in self.flow.values:
            help_ = f"for example `{s.value.span.text}.chosen`" if isinstance(rows, Pairs) else \
                f"name the sequences first, then their values: `metric table {name} = gen, {s.value.span.text}`"
            self.errors.add("RL0203", f"a table is of sequences, not of {describe(rows)}", s.value.span, help=help_)
            return []
        common: tuple[tuple[str, Scalar], ...] = (
            ("to", "batch"), ("frame", rows.frame.id), ("rows", cast(int, given["rows"])), ("table", name))
        terms = [(name, Term(arrays.ROWS, (), "batch", "", "f32", s.span, common))]
        for tree in s.columns:
            label, x = " ".join(tree.span.text.split()), self._column(tree, rows.frame, scope)
            if isinstance(x, Bad):
                return []
            if label in FIXED or any(f"{name}/{label}" == known for known, _ in terms):
                self.errors.add("RL0102", f"the table `{name}` has two columns `{label}`", tree.span,
                                help="remove one of them, or give the value another name first"
                                if label not in FIXED else f"every table has {', '.join(FIXED)}: choose another name")
                return []
            attrs = (*common, ("column", label))
            terms.append((f"{name}/{label}", Term(arrays.COLUMN, (x,), "batch", "", "f32", tree.span, attrs)))
        return list(zip([shown for shown, _ in terms], self._made(s, terms), strict=True))

    def _column(self, tree: ast.Expr, frame: IndexedFrame, scope: Scope) -> Term | Bad:
        """A number for each row of the table."""
        ops = self.flow.exprs.ops
        x = self.flow.exprs.term(tree, scope)
        if isinstance(x, Bad):
            return BAD
        if x.dtype == "text":
            return self.errors.add("RL0205", "a column of a table must be one number for each sequence, not text",
                                   tree.span, f"this is {describe(x)}",
                                   help="the texts of the rows are in the table anyway: remove it")
        if x.level in ("token", "turn", "entry"):
            return self.errors.add("RL0201", f"a column of a table must be one number for each sequence, not "
                                   f"{level_value(x.level)}", tree.span, f"this is {describe(x)}",
                                   help=f"reduce it: `mean({tree.span.text} by seq)`")
        if x.dtype == "bool":
            number = ops.apply("where", (x, const(1.0, x.span), const(0.0, x.span)), x.span)
            x = x if isinstance(number, Bad) else number
        if (x.level, x.space) == ("seq", frame.row_space):
            return x
        spread = ops.apply("add", (x, ops.zeros("seq", frame, x.span)), x.span)
        if isinstance(spread, Term) and (spread.level, spread.space) != ("seq", frame.row_space):
            return self.errors.add("RL0202", f"`{tree.span.text}` has no value for each sequence of the table",
                                   tree.span, f"this is {describe(x)} of {self.flow.spaces.shown(x)}",
                                   help="reduce it to the sequences of the table, or make a table of its own sequences")
        return spread

    def _made(self, s: ast.Metric, terms: list[tuple[str, Term]]) -> list[str]:
        """The values, in one computation."""
        names = [self.flow.anonymous(shown) for shown, _ in terms]
        label = full_label(s.span)
        made = self.flow.compute([(n, t) for n, (_, t) in zip(names, terms, strict=True)], names[0], s.span, force=True,
                                 labels=dict.fromkeys(names, label))
        return [made[n].name for n in names]
