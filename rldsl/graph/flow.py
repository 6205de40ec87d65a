"""The flow: statements become graph nodes, in program order.

In: the flow's statements. Out: items, frames, values, programs and metrics. Data arithmetic of one statement is one
Compute; a nested expression that a call needs is its own Compute, just before the call.
"""

from __future__ import annotations

from typing import cast

from rldsl.diag import Label
from rldsl.graph import declare
from rldsl.graph import model as g
from rldsl.graph.array_metrics import ArrayMetrics
from rldsl.graph.buffers import Buffers
from rldsl.graph.calls import CallsOfFlow
from rldsl.graph.computations import Computations, full_label
from rldsl.graph.derive import Derivations
from rldsl.graph.evaluation import Evaluations
from rldsl.graph.row_states import RowStates
from rldsl.graph.select import Selections
from rldsl.graph.sync import sync
from rldsl.graph.texts import Texts
from rldsl.plan.metrics_file import BUILT_IN, METRICS
from rldsl.plan.payloads import DEFAULT_SAVE
from rldsl.semantics import options
from rldsl.semantics.errors import BAD, Bad
from rldsl.semantics.expressions import ExpressionBuilder
from rldsl.semantics.modules import RESERVED
from rldsl.semantics.options import positive_integer
from rldsl.semantics.scope import Scope
from rldsl.semantics.terms import Term
from rldsl.semantics.values import BufferRef, DataRef, Meaning, ModelRef, Several, describe, level_value
from rldsl.source import Span
from rldsl.syntax import ast

FIELD_OF = {"every": "period", "first": "first", "after": "after"}  # keyword of a block -> field of `g.When`


class FlowBuilder(Computations):
    """Walks the flow once."""

    def __init__(self, exprs: ExpressionBuilder, models: dict[str, g.Model], data: dict[str, g.Data],
                 states: dict[str, g.State], buffers: dict[str, g.Buffer]):
        self.exprs, self.errors = exprs, exprs.errors
        super().__init__(exprs.spaces, [name for name, s in states.items() if not s.data])
        for buffer in buffers:
            self.value(buffer, "batch", "", "i64", "stored")
        self.models, self.data = models, data
        self.metrics: list[tuple[str, str]] = []  # (shown name, value)
        self._bound: dict[str, Span] = {}  # name -> where the flow binds it
        self._shown: set[str] = set()  # names of metrics
        self.checkpoint: g.Checkpoint | None = None
        self.distributions: dict[str, str] = {}  # value -> the model whose whole distribution it is
        self.stops: list[Term] = []  # the conditions that end the run, each computed at its place in the step
        self.stop = ""  # the value that ends the run where it is true; "" if nothing does
        self._iterations: int | None = None  # of the enclosing `repeat`
        self.calls = CallsOfFlow(self)
        self.derivations = Derivations(self)
        self.selections = Selections(self)
        self.evaluations = Evaluations(self)
        self.texts = Texts(self)
        self.array_metrics = ArrayMetrics(self)
        self.row_states = RowStates(self, [s for s in states.values() if s.data], data.values())
        self.buffers = Buffers(self, buffers)
        self.inside = "flow"  # the block that is being built
        self.lag = 0  # of the flow, or of its calls
        self.own_lag = 0  # of calls that do not say it
        self.steps: int | None = None  # of the flow; None if what the program says is wrong
        exprs.calls = self.calls.nested
        exprs.frames = self.derivations.call
        exprs.selections = self.selections.argument
        exprs.row_states = self.row_states

    # ------------------------------------------------------------------------------------------- statements

    def block(self, statements: tuple[ast.Statement, ...], scope: Scope, inside: str) -> tuple[g.Item, ...]:
        """The items of one block. inside: "flow", "every" (also `first` and `after`), "repeat", "until" or "eval"."""
        outer, self.items = self.items, []
        for s in statements:
            self.statement(s, scope, inside)
        if inside == "flow" and self.stops:
            self._end_of_run()
        made, self.items = self.items, outer
        return tuple(made)

    def statement(self, s: ast.Statement, scope: Scope, inside: str) -> None:
        """Random numbers of a statement follow its name: another statement leaves them as they were."""
        ops = self.exprs.ops
        outer, ops.statement = ops.statement, _name(s)
        around, self.inside = self.inside, self.inside if inside in ("flow", "every") else inside
        self._build_statement(s, scope, inside)
        ops.statement, self.inside = outer, around

    def _build_statement(self, s: ast.Statement, scope: Scope, inside: str) -> None:
        match s:
            case ast.Assign(where=None):
                self._assign(s, scope)
            case ast.Assign():
                self._select(s, scope)
            case ast.Update():
                self.row_states.update(s, scope)
            case ast.RepeatUntil():
                self.selections.until(s, scope, inside)
            case ast.EvalBlock():
                self.evaluations.block(s, scope, inside)
            case ast.Do(value=value):
                self._do(s, value, scope)
            case ast.Metric(form="hist" | "table"):
                self._array_metric(s, scope)
            case ast.Metric(name=name, value=value):
                self._metric(s, name, value, scope)
            case ast.Save():
                self._save(s, scope)
            case ast.WhenBlock(count=number) | ast.RepeatBlock(times=number):
                self._nested(s, number, scope)
            case ast.Sync() | ast.Ema():
                sync(self, s, scope)
            case ast.Checkpoint():
                self._checkpoint(s, scope, inside)
            case ast.Stop():
                self._stop(s, scope, inside)
            case _:
                self.errors.add("RL0212", "`return` outside a function", s.span)

    def call_of(self, value: ast.Expr, scope: Scope) -> tuple[ModelRef | DataRef | BufferRef, ast.Call] | None:
        """The call of a model, of data or of a buffer that a statement consists of."""
        if (isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute)
                and isinstance(value.func.value, ast.Name)):
            owner = scope.find(value.func.value.name)
            if isinstance(owner, (ModelRef, DataRef, BufferRef)):
                return owner, value
        return None

    def clause(self, tree: ast.Clause | None, scope: Scope) -> g.Clause | None:
        made = declare.clause(tree, self.exprs, scope) if tree is not None else None
        return None if isinstance(made, Bad) else made

    def _assign(self, s: ast.Assign, scope: Scope) -> None:
        call = self.call_of(s.value, scope)
        if call and s.named:
            self._with_a_call(s, scope)
            return
        if call:
            name = s.targets[0].name
            unbound = self._can_bind(s.targets[0])
            if not unbound and name not in self.states:
                self._report_rebinding(s.targets[0], scope)
                return
            value = self.calls.make(*call, scope, name if unbound else None, self.clause(s.clause, scope), s.span)
            if unbound:
                self._bind(s, value, scope)
            return
        value = self._value_of(s, scope)
        if s.clause is not None and not isinstance(value, Bad):
            self.errors.add("RL0212", "only model calls can be placed", s.clause.span, "this statement calls no model",
                            help="arithmetic runs where its inputs are: remove `on ...`")
        values = value.values if isinstance(value, Several) else (value,)
        if len(values) == len(s.targets) and all(t.name in self.states or self._can_bind(t) for t in s.targets):
            names = [f"{t.name}'" if t.name in self.states else t.name for t in s.targets]
            names = [self.anonymous(n) if n.endswith("'") else n for n in names]
            terms = [(n, v) for n, v in zip(names, values, strict=True) if isinstance(v, Term)]
            labels = {n: full_label(s.span) for n, t in zip(names, s.targets, strict=True) if n != t.name}
            made = self.compute(terms, names[0], s.span, labels=labels)
            parts = tuple(made.get(n, v) for n, v in zip(names, values, strict=True))
            value = parts[0] if len(parts) == 1 else Several(parts)
        self._bind(s, value, scope)

    def _value_of(self, s: ast.Assign, scope: Scope) -> Meaning:
        """The value of an assignment. Sequences that it makes have the name that they are bound to."""
        if len(s.targets) == 1 and self._can_bind(s.targets[0]) and s.targets[0].name not in self.states:
            self.derivations.target = self.texts.named = s.value, s.targets[0].name
        value = self.exprs.build(s.value, scope)
        self.derivations.target = None
        return self.derivations.named(value, s.named, scope, s.value) if s.named else value

    def _with_a_call(self, s: ast.Assign, scope: Scope) -> None:
        """Say that `gen = actor.generate(prompt) with ...` is two statements."""
        names = " ".join(s.span.text[s.named[0][0].span.start - s.span.start:].split())
        self.errors.add("RL0212", "a call and `with` in the same statement", s.named[0][0].span,
                        help=f"write two statements: `{s.targets[0].name} = {s.value.span.text}`, then "
                             f"`NAME = {s.targets[0].name} with {names}`")
        self._bind(s, BAD, scope)

    def _select(self, s: ast.Assign, scope: Scope) -> None:
        if self.selections.of_a_call(s, scope):
            value: Meaning = BAD
        elif len(s.targets) != 1 or s.clause is not None:
            where = s.clause.span if s.clause is not None else s.span
            value = self.errors.add("RL0212", "a selection takes a single name and no placement", where,
                                    help="it runs where its sequences are")
        else:
            value = self.selections.where(s, scope, s.targets[0].name if self._can_bind(s.targets[0]) else None)
        self._bind(s, value, scope)

    def _write(self, ident: ast.Ident, value: Meaning) -> None:
        """`state = value`"""
        if not isinstance(value, Term):
            if not isinstance(value, Bad):
                self.errors.add("RL0203", f"the state `{ident.name}` must be a number, not {describe(value)}",
                                ident.span)
        elif value.level != "batch" or value.dtype != "f32":
            self.errors.add("RL0201", f"the state `{ident.name}` must be a single number, not {describe(value)}",
                            ident.span,
                            f"this is {describe(value)}", help="reduce it over the batch, for example with `mean(x)`")
        else:
            new = self.materialize(value, f"{ident.name}'", ident.span, force=True, text=f"new {ident.name}")
            self.broadcast(new, ident.name, ident.span)

    def _can_bind(self, ident: ast.Ident) -> bool:
        """Whether the name may still be bound in this flow; an already bound one is reported by `_bind`."""
        return ident.name not in self._bound and ident.name not in self.models and ident.name not in self.data

    def _bind(self, s: ast.Assign, value: Meaning, scope: Scope) -> None:
        inner = Scope(scope.module)
        self.exprs.functions.assign(s, value, inner)
        for ident in s.targets:
            name = ident.name
            if name in self.states:
                self._write(ident, inner.names.get(name, value))
                continue
            first = self._bound.get(name) or scope.module.bound_at.get(name)
            if name in RESERVED:
                self.errors.add("RL0111", f"`{name}` is built in", ident.span, help="choose another name")
            elif first is not None:
                self._report_rebinding(ident, scope)
                continue
            self._bound[name] = ident.span
            scope.names[name] = inner.names.get(name, value)

    def _report_rebinding(self, ident: ast.Ident, scope: Scope) -> None:
        """Say that a name is bound already."""
        first = self._bound.get(ident.name) or scope.module.bound_at.get(ident.name)
        self.errors.add("RL0102", f"`{ident.name}` is defined twice", ident.span, "the second definition",
                        labels=(Label(first, "the first definition"),) if first else (),
                        help="a name can be assigned only once; choose another name")

    def _do(self, s: ast.Do, value: ast.Expr, scope: Scope) -> None:
        call = self.call_of(value, scope)
        if call:
            self.calls.make(*call, scope, None, self.clause(s.clause, scope), s.span)
            return
        result = self.exprs.build(value, scope)
        if not isinstance(result, Bad):
            self.errors.add("RL0212", "this statement has no effect", s.span, f"its value is {describe(result)}",
                            help="assign it to a name: `name = ...`")

    def _metric(self, s: ast.Metric, name: ast.Ident, value: ast.Expr, scope: Scope) -> None:
        term = self.exprs.term(value, scope)
        if isinstance(term, Bad):
            return
        if self.inside == "until":  # also in an `every` of it
            self.errors.add("RL0212", "a metric inside `repeat ... until`", s.span,
                            help="move it after the block, where the names refer to everything that was collected")
        elif term.level != "batch":
            self.errors.add("RL0201", f"a metric must be a single number, not {level_value(term.level)}", value.span,
                            f"this is {describe(term)}", help="reduce it over the batch: `mean(x)`")
        elif self._check_metric_name(name):
            self.metrics.append((name.name, self.materialize(term, name.name, s.span, force=True).name))

    def _array_metric(self, s: ast.Metric, scope: Scope) -> None:
        """`metric hist`, `metric table`"""
        if self.inside == "until":  # also in an `every` of it
            self.errors.add("RL0212", "a metric inside `repeat ... until`", s.span,
                            help="move it after the block, where the names refer to everything that was collected")
        elif self._check_metric_name(s.name):
            self.metrics += self.array_metrics.logged(s, scope)

    def _check_metric_name(self, name: ast.Ident) -> bool:
        """Whether a metric can have this name; RL0111 or RL0102 where not."""
        if name.name in BUILT_IN:
            self.errors.add("RL0111", f"`{name.name}` is a built-in field of {METRICS}", name.span,
                            help="choose another name: every run writes this field itself")
        elif name.name in self._shown:
            self.errors.add("RL0102", f"the metric `{name.name}` is defined twice",
                            name.span, help="choose another name")
        else:
            self._shown.add(name.name)
            return True
        return False

    def _save(self, s: ast.Save, scope: Scope) -> None:
        path = self.exprs.constant(s.path, scope) if s.path is not None else None
        if isinstance(path, Term) and path.dtype != "text":
            self.errors.add("RL0205", "a path must be a string", path.span)
        if path is not None and len(s.models) > 1 and isinstance(path, Term) and "{model}" not in str(path.value):
            self.errors.add("RL0212", "two models cannot be saved to the same path", s.span,
                            help="write one `save` for each model")
        for ident in s.models:
            ref = self.exprs.name(ast.Name(name=ident.name, span=ident.span), scope)
            if isinstance(ref, ModelRef):
                where = str(path.value) if isinstance(path, Term) else DEFAULT_SAVE
                self.items.append(g.Save(id=self.unique(f"{ref.name}.save"), reads=(), writes=(), span=s.span,
                                         model=ref.name, path=where.replace("{model}", ref.name)))
            elif not isinstance(ref, Bad):
                self.errors.add("RL0203", f"only models can be saved, not {describe(ref)}", ident.span)

    def _checkpoint(self, s: ast.Checkpoint, scope: Scope, inside: str) -> None:
        period = positive_integer("every", s.period, self.exprs, scope)
        given = options.read(options.CHECKPOINT, [(o.name, o.value) for o in s.options], "`checkpoint`", s.span,
                             self.exprs, scope)
        if inside != "flow":
            self.errors.add("RL0212", "`checkpoint` inside a block", s.span,
                            help="it saves the whole run after a step: move it to the flow")
        elif self.checkpoint is not None:
            self.errors.add("RL0212", "a second `checkpoint`", s.span,
                            labels=(Label(self.checkpoint.span, "the first one"),),
                            help="a flow can have only one `checkpoint`")
        elif period is not None and not isinstance(given, Bad):
            self.checkpoint = g.Checkpoint(period, cast(int, given["keep"]), s.span)

    def _stop(self, s: ast.Stop, scope: Scope, inside: str) -> None:
        """A condition that ends the run after a step: a computation at this place of the step."""
        if inside != "flow":
            self.errors.add("RL0212", "`stop when` inside a block", s.span,
                            "in the flow it ends the run, in a loss the minibatches of a train call",
                            help="write what it depends on to a `state` in the block, and test the state in the flow")
            return
        condition = self.exprs.term(s.condition, scope)
        if isinstance(condition, Bad):
            return
        if isinstance(s.condition, ast.Bool):
            self.errors.add("RL0203", f"`stop when {condition.span.text}` does not depend on the run", s.span,
                            "ends the run after its first step" if s.condition.value else "never ends the run",
                            help="use a comparison, for example `stop when mean(reward) > 0.95`; the number of steps "
                                 "is an option of the flow, `steps=1`")
        elif condition.dtype != "bool":
            self.errors.add("RL0203", "`stop when` needs a condition", s.condition.span,
                            f"this is {describe(condition)}",
                            help="use a comparison, for example `stop when mean(reward) > 0.95`")
        elif condition.level != "batch":
            level = level_value(condition.level)
            self.errors.add("RL0201", f"`stop when` needs a single condition per step, not {level}",
                            s.condition.span, f"this is {describe(condition)}",
                            help="reduce it first, for example `mean(reward) > 0.95`")
        else:
            self.stops.append(self.materialize(condition, "stop", s.condition.span, force=True))

    def _end_of_run(self) -> None:
        """One condition, on every rank: that one of the conditions of `stop when` holds."""
        either = self.stops[0]
        for term in self.stops[1:]:
            both = self.exprs.ops.apply("or", (either, term), term.span)
            either = both if isinstance(both, Term) else either
        either = self.materialize(either, "stop", either.span, force=True)
        text = full_label(either.span, "stop when " + " or ".join(" ".join(t.span.text.split()) for t in self.stops))
        self.stop = self.broadcast(either, self.anonymous("stop"), either.span, text)

    def _nested(self, s: ast.WhenBlock | ast.RepeatBlock, number: ast.Expr, scope: Scope) -> None:
        word = s.word if isinstance(s, ast.WhenBlock) else "repeat"
        times = positive_integer(word, number, self.exprs, scope)
        if times and self._iterations and self._iterations < times + (word == "after") and word in ("every", "after"):
            self.errors.add("RL0205", f"`{word} {times}` never runs", number.span,
                            f"it counts the iterations of the enclosing `repeat`, which has only {self._iterations}",
                            help="move it out of the `repeat` to count steps")
        outer, self._iterations = self._iterations, times if word == "repeat" else self._iterations
        body = self.block(s.body, Scope(scope.module, scope), "repeat" if word == "repeat" else "every")
        self._iterations = outer
        if times is not None:
            self.items.append(g.Repeat(iterations=times, body=body, span=s.span) if word == "repeat"
                              else g.When(body=body, span=s.span, **{FIELD_OF[word]: times}))


def _name(s: ast.Statement) -> str:
    """What a statement is called: the name that it binds, its metric, or the call that it is."""
    match s:
        case ast.Assign(targets=targets):
            return targets[0].name
        case ast.Metric(name=name):
            return f"metric {name.name}"
        case ast.Update(target=target):
            return target.span.text
        case ast.Do(value=ast.Call(func=func)):
            return func.span.text
    return type(s).__name__
