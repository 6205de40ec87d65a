"""Functions and losses: arguments, bodies, and inlining.

In: a declaration and a call of it. Out: the Terms that its body makes of the arguments, so that a program has no calls
of functions left; BAD where a message was given.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from rldsl.diag import Label, internal_error
from rldsl.semantics.arguments import accept, bind
from rldsl.semantics.errors import BAD, Bad
from rldsl.semantics.levels import ANY, depth
from rldsl.semantics.scope import Scope
from rldsl.semantics.terms import Term
from rldsl.semantics.values import FnRef, LossRef, LossUse, Meaning, Module, Several, describe, level_value
from rldsl.source import Span
from rldsl.syntax import ast

if TYPE_CHECKING:
    from rldsl.semantics.expressions import ExpressionBuilder


MAX_INLINED = 2_000  # calls of functions in one program; each function that calls another twice doubles them


class Functions:
    """Inlines calls of functions and keeps the arguments of losses."""

    def __init__(self, exprs: ExpressionBuilder):
        self.exprs, self.errors = exprs, exprs.errors
        self.active: list[ast.FnDecl | ast.LossDecl] = []  # being inlined, outermost first
        self.num_inlined = 0  # calls so far

    def arguments(self, decl: ast.FnDecl | ast.LossDecl, params: tuple[ast.Parameter, ...], module: Module,
                  expr: ast.Call, scope: Scope) -> tuple[dict[str, Term], dict[str, Span]] | Bad:
        """Arguments and defaults by parameter name, levels not yet checked."""
        given = bind(decl.name.name, params, expr, self.errors)
        if isinstance(given, Bad):
            return BAD
        values: dict[str, Term] = {}
        spans: dict[str, Span] = {}
        bad = False
        for param in params:
            tree = given.get(param.name.name)
            value = self.exprs.term(tree, scope) if tree else self.default(decl, param, module)
            if isinstance(value, Bad):
                bad = True
                continue
            values[param.name.name], spans[param.name.name] = value, tree.span if tree else expr.span
        return BAD if bad else (values, spans)

    def default(self, decl: ast.FnDecl | ast.LossDecl, param: ast.Parameter, module: Module) -> Term | Bad:
        """The default of a parameter, which may call other functions."""
        if (default := param.default) is None:
            raise internal_error(f"`{param.name.name}` has no default", str(param.span))
        if any(decl is d for d in self.active):
            return self.errors.add("RL0217", f"`{decl.name.name}` calls itself", default.span,
                                   help="functions are inlined, so they cannot be recursive")
        self.active.append(decl)
        value = self.exprs.constant(default, Scope(module))
        self.active.pop()
        return value

    def inline(self, ref: FnRef, expr: ast.Call, scope: Scope) -> Meaning:
        decl, name = ref.decl, ref.decl.name.name
        bound = self.arguments(decl, decl.params, ref.module, expr, scope)
        if isinstance(bound, Bad) or name in ref.module.broken:
            return BAD
        if decl in self.active:
            return self.errors.add("RL0217", f"`{name}` calls itself", expr.span,
                                   help="functions are inlined, so they cannot be recursive")
        self.num_inlined += 1
        if self.num_inlined > MAX_INLINED:
            return BAD if self.num_inlined > MAX_INLINED + 1 else self.too_many(expr)
        values = accept(decl.params, *bound, self.exprs.ops, broadcast=False)
        if isinstance(values, Bad):
            return BAD
        inner = Scope(ref.module, names=dict(values))
        self.active.append(decl)
        self.errors.trail.append(expr.func.span)
        result, _, _ = self.body(decl.body, inner, decl.name.span, "fn")
        self.errors.trail.pop()
        self.active.pop()
        if result is None:
            return BAD
        if not self.declared(decl, result, values.values()):
            return BAD
        return result[0] if len(result) == 1 else Several(result)

    def too_many(self, expr: ast.Call) -> Bad:
        """Said at the outermost call, once in a program."""
        trail, self.errors.trail = self.errors.trail, []
        if not any(d.code == "RL0219" for d in self.errors.found):
            self.errors.add("RL0219", f"inlining functions gives more than {MAX_INLINED:,} calls",
                            trail[0] if trail else expr.func.span, "this call expands to too many",
                            help="a function that calls another one twice doubles the size: call it once and use the "
                                 "result twice")
        self.errors.trail = trail
        return BAD

    def declared(self, decl: ast.FnDecl, result: tuple[Term, ...], given: Iterable[Term] = ()) -> bool:
        """Whether the results are what `-> (...)` says. given: the arguments: a value may be declared
        `prompt` if it ranges over the prompts of one of them, also where these prompts are themselves sequences."""
        below = [term for term in given if term.level in ("seq", "turn", "token")]
        prompts = {s for term in below for s in self.exprs.spaces.chain(term)[1:2]}
        name = decl.name.name
        if decl.returns and len(decl.returns) != len(result):
            self.errors.add("RL0204", f"`{name}` returns {len(result)} values but declares {len(decl.returns)}",
                            decl.name.span)
            return False
        for value, ident in zip(result, decl.returns, strict=False):  # no `->`: nothing is declared
            if ident.name == ANY:
                continue
            level = self.exprs.level(ident)
            called = "prompt" if level == "prompt" and value.level == "seq" and value.space in prompts else value.level
            if level is not None and depth(called) > depth(level):
                self.errors.add("RL0201", f"`{name}` declares {level} but returns {describe(value)}", ident.span,
                                labels=(Label(value.span, level_value(value.level)),))
                return False
        return True

    def loss_use(self, ref: LossRef, expr: ast.Call, scope: Scope) -> LossUse | Bad:
        model_outputs = {p.name.name for p in ref.decl.model_outputs} - {p.name.name for p in ref.decl.data}
        for arg in expr.args:
            if arg.name is not None and arg.name.name in model_outputs:
                name, key = ref.decl.name.name, arg.name.name
                return self.errors.add("RL0107", f"`{name}` has no data argument `{key}`", arg.name.span,
                                       f"`{key}` is an output of the model being trained",
                                       labels=(Label(ref.decl.name.span, "declared here"),),
                                       help=f"data arguments follow `;`: `loss {name}(...; {key}: token)`")
        bound = self.arguments(ref.decl, ref.decl.data, ref.module, expr, scope)
        if isinstance(bound, Bad) or ref.decl.name.name in ref.module.broken:
            return BAD
        return LossUse(ref, bound[0], bound[1], expr.func.span)

    def body(self, statements: tuple[ast.Statement, ...], scope: Scope, span: Span,
             kind: str) -> tuple[tuple[Term, ...] | None, list[tuple[ast.Ident, Term]], list[Term]]:
        """Statements of a fn or loss: the returned values (None after an error), the metrics, and the conditions of
        `stop when`."""
        metrics: list[tuple[ast.Ident, Term]] = []
        stops: list[Term] = []
        result: tuple[Term, ...] | None = None
        returned = False
        for s in statements:
            match s:
                case _ if returned:
                    self.errors.add("RL0212", "unreachable: nothing can follow `return`", s.span)
                case ast.Assign(where=condition) if condition is not None:
                    self.errors.add("RL0212", f"a selection is not allowed in a {kind}", condition.span,
                                    "sequences can be selected only in the flow",
                                    help="to choose per element, write `where(condition, a, b)`")
                    self.assign(s, BAD, scope)
                case ast.Assign(named=named) if named:
                    self.errors.add("RL0212", f"`with` is not allowed in a {kind}", named[0][0].span,
                                    "values of sequences can be named only in the flow")
                    self.assign(s, BAD, scope)
                case ast.Assign(clause=None):
                    self.assign(s, self.exprs.build(s.value, scope), scope)
                case ast.Metric(form="hist" | "table" as form) if kind == "loss":
                    self.errors.add("RL0212", f"`metric {form}` in a loss", s.span,
                                    "a loss sees one minibatch, and its metrics are means over minibatches",
                                    help="log it in the flow: what a loss is given has its values there, and "
                                         "`lp = actor.logprobs(gen)` after the train call those of the trained model")
                case ast.Metric(name=name, value=value) if kind == "loss":
                    term = self.exprs.term(value, scope)
                    if isinstance(term, Term):
                        metrics.append((name, term))
                case ast.Stop(condition=condition) if kind == "loss":
                    term = self.exprs.term(condition, scope)
                    if isinstance(term, Term):
                        stops.append(term)
                case ast.Return(values=values):
                    returned = True
                    many = [self.exprs.build(v, scope) for v in values]
                    flat = [v for m in many for v in (m.values if isinstance(m, Several) else (m,))]
                    for found in flat:
                        if not isinstance(found, Term | Bad):
                            self.errors.add("RL0203", f"a {kind} returns values, not {describe(found)}", s.span)
                    terms = tuple(v for v in flat if isinstance(v, Term))
                    result = terms if len(terms) == len(flat) else None
                case _:
                    self.errors.add("RL0212", f"this statement is not allowed in a {kind}", s.span,
                                    help="model calls, metrics of data, `save` and blocks belong in the flow")
        if not returned:
            self.errors.add("RL0212", f"this {kind} has no `return`", span, help="end it with `return ...`")
        return result, metrics, stops

    def assign(self, s: ast.Assign, value: Meaning, scope: Scope) -> tuple[Meaning, ...]:
        """Bind the targets in this block; returns their values."""
        values: tuple[Meaning, ...] = value.values if isinstance(value, Several) else (value,)
        if isinstance(value, Bad):
            values = (BAD,) * len(s.targets)
        elif len(values) != len(s.targets):
            names, found = len(s.targets), len(values)
            self.errors.add("RL0204", f"{names} name{'s' * (names > 1)} for {found} value{'s' * (found > 1)}", s.span)
            values = (BAD,) * len(s.targets)
        for ident, v in zip(s.targets, values, strict=True):
            self.bind(ident, v, scope)
        return values

    def bind(self, ident: ast.Ident, value: Meaning, scope: Scope) -> None:
        if ident.name in scope.names:
            self.errors.add("RL0102", f"`{ident.name}` is defined twice", ident.span, "the second definition",
                            help="a name can be assigned only once; choose another name")
            return
        scope.names[ident.name] = value
