"""`eval DATA { ... }`: a pass over all rows of a separate source, and metrics over all of them.

In: the block. Out: an Eval item whose body fetches, generates and computes batch by batch and collects what the results
need, its metrics and the new values of states, and after it the computations of these. Invariants: the statements of
the block see one batch, its results all rows, so only a result is a number over the batch; nothing in the block changes
what training does, but for the states.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rldsl.graph import model as g
from rldsl.semantics.errors import Bad
from rldsl.semantics.options import positive_integer
from rldsl.semantics.scope import Scope
from rldsl.semantics.values import DataRef, Meaning, describe
from rldsl.source import Span
from rldsl.syntax import ast

if TYPE_CHECKING:
    from rldsl.graph.flow import FlowBuilder

BATCHES = 256  # that a plan has room for where the program does not say
OUTSIDE = (ast.Save, ast.Sync, ast.Ema, ast.Checkpoint, ast.WhenBlock, ast.RepeatBlock, ast.RepeatUntil, ast.EvalBlock,
           ast.Stop, ast.Return)


class Evaluations:
    """The `eval` blocks of a flow."""

    def __init__(self, flow: FlowBuilder):
        self.flow, self.errors = flow, flow.errors
        self.inside = ""  # the source of the block being built, or ""
        self._fetched: Span | None = None  # the block's `next()`

    def block(self, s: ast.EvalBlock, scope: Scope, where: str) -> None:
        """where: the kind of block around it."""
        if where not in ("flow", "every"):
            self._refuse("`eval` inside a `repeat`", Span(s.span.file, s.span.start, s.data.span.end),
                         "move it to the flow, or into an `every`")
            return
        ref = self.flow.exprs.name(ast.Name(name=s.data.name, span=s.data.span), scope)
        limit = s.max_iterations
        most = positive_integer("max", limit, self.flow.exprs, scope) if limit is not None else BATCHES
        if not isinstance(ref, DataRef):
            if not isinstance(ref, Bad):
                self.errors.add("RL0203", f"`eval` needs a data source, not {describe(ref)}", s.data.span,
                                help=f'declare one: `data {s.data.name}_rows = jsonl("heldout.jsonl", batch=64)`')
            return
        if most is not None:
            self._built(s, ref, most, scope)

    def may_fetch(self, data: str, span: Span) -> bool:
        """Whether `data.next()` is allowed here; reports why not."""
        if not self.inside:
            return True
        if data != self.inside:
            self._refuse(f"`{data}.next()` inside `eval {self.inside}`", span,
                         "an evaluation reads only its own source: write a separate `eval` for the other one")
        elif self._fetched is not None:
            self._refuse(f"a second `{data}.next()` in one evaluation", span, "reuse the batch of the first")
        else:
            self._fetched = span
            return True
        return False

    def _built(self, s: ast.EvalBlock, ref: DataRef, most: int, scope: Scope) -> None:
        flow, inner = self.flow, Scope(scope.module, scope)
        before, found = set(flow.spaces.frames), len(self.errors.found)
        outer, flow.items = flow.items, []
        with self._within(ref.name):
            results = self._statements(s, inner)
            self._checked(s, ref, results)
            after: dict[str, Meaning] = {}
            if len(self.errors.found) == found:
                after = flow.selections.collected(inner, before, most, s.data.span, "an `eval`")
            body, flow.items = tuple(flow.items), outer
            if len(self.errors.found) == found:
                flow.items.append(g.Eval(data=ref.name, max_iterations=most, body=body, span=s.span))
                for statement, names in results:
                    known = {n: v for n, v in after.items() if n in names}
                    flow.statement(statement, Scope(scope.module, scope, known), "flow")

    def _statements(self, s: ast.EvalBlock, inner: Scope) -> list[tuple[ast.Statement, frozenset[str]]]:
        """Build the statements of a batch. The result: the metrics and the new values of states, which cover all rows,
        each with the names that are bound above it."""
        results: list[tuple[ast.Statement, frozenset[str]]] = []
        for statement in s.body:
            if isinstance(statement, OUTSIDE):
                word = statement.span.text.split()[0]
                self._refuse(f"`{word}` inside `eval`", statement.span,
                             "an evaluation must not change the run: move this out of the block")
            elif isinstance(statement, ast.Metric) or isinstance(statement, ast.Assign) and any(
                    t.name in self.flow.states for t in statement.targets):
                results.append((statement, frozenset(inner.names)))
            else:
                self.flow.statement(statement, inner, "eval")
        return results

    def _checked(self, s: ast.EvalBlock, ref: DataRef, results: Sequence[object]) -> None:
        """What the block may not do, and what it must."""
        head = Span(s.span.file, s.span.start, s.data.span.end)
        programs = {p.id: p for p in self.flow.programs}
        for node in g.nodes(self.flow.items):
            if isinstance(node, g.Train | g.Update):
                what = "training" if isinstance(node, g.Train) else f"the state `{node.writes[0]}` is changed"
                self._refuse(f"{what} inside `eval`", node.span,
                             "an evaluation must not change the run: move this out of the block")
            elif isinstance(node, g.Compute) and any("batch" in (n.attr("to"), n.attr("within"))
                                                     for n in programs[node.program].nodes):
                self.errors.add("RL0201", "a number over the batch inside `eval`", node.span,
                                "this covers one batch of the rows, not all of them",
                                help="compute it in a `metric`, or in the new value of a `state`: these cover all rows")
        if self._fetched is None:
            self._refuse(f"`eval {ref.name}` does not read its rows", head,
                         f"start the block with `prompt = {ref.name}.next()`")
        if not results:
            self._refuse(f"`eval {ref.name}` has no `metric`", head,
                         "add what it measures: `metric accuracy = mean(x)`")

    @contextmanager
    def _within(self, data: str) -> Iterator[None]:
        self.inside, self._fetched = data, None
        try:
            yield
        finally:
            self.inside = ""

    def _refuse(self, what: str, span: Span, help: str) -> None:
        self.errors.add("RL0212", what, span, help=help)
