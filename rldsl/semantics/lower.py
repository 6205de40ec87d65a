"""From expressions of the syntax tree to typed Terms: names, operators, built-in calls and inlined functions.

In: an expression and a Scope. Out: a Meaning; BAD where a message was given. Functions are inlined, so a program has
no calls left but those of models, which `calls` (given by the flow) takes over.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import cast

from rldsl.diag import Label
from rldsl.plan.expr import LEVELS, Level, Scalar
from rldsl.semantics.arguments import accept, bind
from rldsl.semantics.builtins import Builtins
from rldsl.semantics.errors import BAD, Bad, Errors, suggest
from rldsl.semantics.levels import ANY, Spaces, depth
from rldsl.semantics.modules import homes
from rldsl.semantics.operators import INFIX, NAMES, REDUCERS, Operators
from rldsl.semantics.terms import Term, const
from rldsl.semantics.values import (DataRef, FnRef, FrameRef, Items, LossRef, LossUse, Meaning, ModelRef, Module,
                                    Pairs, PyRef, Several, StateRef, describe)
from rldsl.source import Span
from rldsl.syntax import ast


@dataclass(slots=True)
class Scope:
    """Names in sight: those of this block, of the enclosing ones, then of the module."""

    module: Module
    parent: "Scope | None" = None
    names: dict[str, Meaning] = field(default_factory=dict)

    def find(self, name: str) -> Meaning | None:
        scope: Scope | None = self
        while scope is not None:
            if name in scope.names:
                return scope.names[name]
            scope = scope.parent
        return self.module.names.get(name)

    def known(self) -> set[str]:
        return set(self.names) | (self.parent.known() if self.parent else set(self.module.names))


Calls = Callable[[ModelRef | DataRef, ast.Call, Scope], Meaning]


class Lower:
    """The evaluator. `calls`: what the flow does with a call of a model or data source."""

    def __init__(self, spaces: Spaces, errors: Errors, prelude: Module):
        self.spaces = spaces
        self.errors = errors
        self.prelude = prelude
        self.ops = Operators(spaces, errors)
        self.builtins = Builtins(self)
        self.calls: Calls | None = None
        self.active: list[ast.FnDecl | ast.LossDecl] = []

    # ------------------------------------------------------------------------------------------ expressions

    def eval(self, expr: ast.Expr, scope: Scope) -> Meaning:
        match expr:
            case ast.Number(value=value) if value == math.inf:
                return self.errors.add("RL0214", "this number is too large", expr.span)
            case ast.Number(value=value, unit=unit):
                return const(value, expr.span, unit)
            case ast.String(value=value) | ast.Bool(value=value):
                return const(value, expr.span)
            case ast.ListOf(items=items):
                values = [self.constant(i, scope) for i in items]
                good = tuple(v for v in values if isinstance(v, Term))
                return Items(good, expr.span) if len(good) == len(values) else BAD
            case ast.Name():
                return self.name(expr, scope)
            case ast.Attribute():
                return self.attribute(expr, scope)
            case ast.Unary(op=op, operand=operand):
                arg = self.term(operand, scope)
                return arg if isinstance(arg, Bad) else self.ops.apply("neg" if op == "-" else "not", (arg,), expr.span)
            case ast.Binary(op=op, left=left, right=right):
                a, b = self.term(left, scope), self.term(right, scope)
                return BAD if isinstance(a, Bad) or isinstance(b, Bad) else self.ops.apply(INFIX[op], (a, b), expr.span)
            case ast.Call():
                return self.call(expr, scope)
            case ast.Range():
                return self.errors.add("RL0203", "a range outside `mesh(...)`", expr.span)
        raise AssertionError(expr)

    def term(self, expr: ast.Expr, scope: Scope) -> Term | Bad:
        """A value that arithmetic can use."""
        value = self.eval(expr, scope)
        if isinstance(value, (Term, Bad)):
            return value
        help_ = "take one of its values, for instance `.logprobs`" if isinstance(value, FrameRef) else ""
        if isinstance(value, StateRef):
            help_ = "it has a value in the flow alone: pass that as an argument"
        return self.errors.add("RL0203", f"expected a value, found {describe(value)}", expr.span, help=help_)

    def constant(self, expr: ast.Expr, scope: Scope) -> Term | Bad:
        value = self.term(expr, scope)
        if isinstance(value, Term) and not value.constant:
            return self.errors.add("RL0211", "a constant is required here", expr.span,
                                   f"this is {describe(value)}, known only at run time")
        return value

    def name(self, expr: ast.Name, scope: Scope) -> Meaning:
        found = scope.find(expr.name)
        if found is None:
            found = self.prelude.names.get(expr.name)
        if found is not None:
            if isinstance(found, Term):  # a leaf is computed nowhere else
                found = replace(found, used=expr.span) if found.args else replace(found, span=expr.span)
            return found
        label = "built-in functions are called: put arguments after it" if expr.name in NAMES else "not bound here"
        return self.errors.unknown(scope.module.name, expr.name, expr.span, label,
                                   lambda: self.advice(expr.name, scope))

    def advice(self, name: str, scope: Scope) -> str:
        """What may have been meant by an unknown name."""
        there = homes(name)
        if there:
            return f"it is in the library: `use std.{there[0]} ({name})`"
        own = scope.known() - {name}
        return suggest(name, own | set(self.prelude.names) | NAMES - {name}, own)

    def attribute(self, expr: ast.Attribute, scope: Scope) -> Meaning:
        owner, what = self.eval(expr.value, scope), expr.name.name
        fields: dict[str, Meaning] = {}
        match owner:
            case Bad():
                return BAD
            case Pairs(chosen=chosen, rejected=rejected):
                fields = {"chosen": chosen, "rejected": rejected}
                if what in chosen.numbers:
                    return self.number(chosen, what, expr.span)
            case FrameRef(numbers=numbers) if what in numbers:
                return self.number(owner, what, expr.span)
            case FrameRef(frame=f, kind="generated"):
                fields = {"logprobs": Term("input", (), "token", f.id, "f32", expr.span,
                                           (("name", f"{f.id}.logprobs"),)),
                          "finished": Term("input", (), "seq", f.rows, "bool", expr.span,
                                           (("name", f"{f.id}.finished"),))}
        if what in fields:
            return fields[what]
        first = owner.chosen if isinstance(owner, Pairs) else owner
        help_ = suggest(what, [*fields, *(first.numbers if isinstance(first, FrameRef) else ())])
        if isinstance(first, FrameRef) and first.kind != "generated" and not help_:
            help_ = f'a column of the data is a value when it is declared: `numbers=["{what}"]`'
        if isinstance(owner, ModelRef):
            help_ = f"call it: `{owner.name}.{what}(...)`"
        return self.errors.add("RL0112", f"{describe(owner)} has no value `{what}`", expr.name.span, help=help_)

    def number(self, ref: FrameRef, column: str, span: Span) -> Term:
        """A column of data: one number for each prompt, or for each sequence of a batch with answers."""
        level: Level = "prompt" if ref.kind == "prompts" else "seq"
        base = self.spaces.frames[ref.base]
        made = Term("input", (), level, self.spaces.of(base, level), "f32", span, (("name", f"{base.id}.{column}"),))
        here = self.ops.to_space(made, self.spaces.of(ref.frame, level))
        return made if here is None else here

    # ------------------------------------------------------------------------------------------------ calls

    def call(self, expr: ast.Call, scope: Scope) -> Meaning:
        if isinstance(expr.func, ast.Attribute):
            owner = self.eval(expr.func.value, scope)
            if isinstance(owner, (ModelRef, DataRef)):
                if self.calls is None:
                    return self.errors.add("RL0212", "a model or data call outside the flow", expr.span,
                                           help="make the call in the flow and pass its result as an argument")
                return self.calls(owner, expr, scope)
            if isinstance(owner, Bad):
                return BAD
            return self.errors.add("RL0112", f"{describe(owner)} has no call `{expr.func.name.name}`",
                                   expr.func.name.span)
        if not isinstance(expr.func, ast.Name):
            return self.errors.add("RL0203", "this cannot be called", expr.func.span)
        name = expr.func.name
        found = scope.find(name)
        if found is None and name in NAMES:
            return self.builtins.call(name, expr, scope)
        if found is None and name == "mesh":
            return self.builtins.mesh(expr, scope)
        target = self.name(expr.func, scope)
        if expr.by is not None and not isinstance(target, Bad):
            return self.errors.add("RL0107", f"`{name}` takes no `by`", expr.by.span,
                                   help=f"`by` belongs to reductions: {', '.join(REDUCERS)}")
        match target:
            case FnRef():
                return self.inline(target, expr, scope)
            case LossRef():
                return self.loss_use(target, expr, scope)
            case PyRef():
                return self.python(target, expr, scope)
            case Bad():
                for arg in expr.args:  # their own mistakes are worth a message
                    self.eval(arg.value, scope)
                return BAD
        return self.errors.add("RL0203", f"{describe(target)} cannot be called", expr.func.span)

    def level(self, ident: ast.Ident) -> Level | None:
        if ident.name in LEVELS:
            return cast(Level, ident.name)
        self.errors.add("RL0101", f"unknown level `{ident.name}`", ident.span, help=f"levels: {', '.join(LEVELS)}")
        return None

    def python(self, ref: PyRef, expr: ast.Call, scope: Scope) -> Meaning:
        """A user's function over the rows of its first argument; the others must be where those come from."""
        args = [self.eval(a.value, scope) for a in expr.args]
        if any(isinstance(a, Bad) for a in args):
            return BAD
        if len(args) != len(ref.params) or any(a.name is not None for a in expr.args):
            return self.errors.add("RL0204", f"`{ref.id}` takes {len(ref.params)} arguments ({', '.join(ref.params)}) "
                                   "by position", expr.span)
        for arg, tree in zip(args, expr.args):
            if not isinstance(arg, FrameRef):
                return self.errors.add("RL0203", f"a Python function takes sequences, found {describe(arg)}",
                                       tree.span, help="pass the generated batch and its prompts")
        frames = [a.frame for a in args if isinstance(a, FrameRef)]
        for other, tree in zip(frames[1:], expr.args[1:]):
            if other.prompts != frames[0].prompts and not self.spaces.selected("prompt", frames[0].prompts,
                                                                              other.prompts):
                return self.errors.add("RL0202", f"`{other.id}` is not where `{frames[0].id}` comes from", tree.span)
        space = self.spaces.of(frames[0], ref.returns)
        return Term("py", (), ref.returns, space, "f32", expr.span, (("function", ref.id), ("frame", frames[0].id)))

    # ------------------------------------------------------------------------------- functions and losses

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
            value = self.term(tree, scope) if tree else self.default(decl, param, module)
            if isinstance(value, Bad):
                bad = True
                continue
            values[param.name.name], spans[param.name.name] = value, tree.span if tree else expr.span
        return BAD if bad else (values, spans)

    def default(self, decl: ast.FnDecl | ast.LossDecl, param: ast.Parameter, module: Module) -> Term | Bad:
        """The default of a parameter, which may call other functions."""
        assert param.default is not None
        if any(decl is d for d in self.active):
            return self.errors.add("RL0217", f"`{decl.name.name}` calls itself", param.default.span,
                                   help="functions are inlined, so they cannot be recursive")
        self.active.append(decl)
        value = self.constant(param.default, Scope(module))
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
        values = accept(decl.params, *bound, self.ops, widen=False)
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
        if not self.declared(decl, result):
            return BAD
        return result[0] if len(result) == 1 else Several(result)

    def declared(self, decl: ast.FnDecl, result: tuple[Term, ...]) -> bool:
        """Whether the results are what `-> (...)` says."""
        name = decl.name.name
        if decl.returns and len(decl.returns) != len(result):
            self.errors.add("RL0204", f"`{name}` returns {len(result)} values and declares {len(decl.returns)}",
                            decl.name.span)
            return False
        for value, ident in zip(result, decl.returns):
            if ident.name == ANY:
                continue
            level = self.level(ident)
            if level is not None and depth(value.level) > depth(level):
                self.errors.add("RL0201", f"`{name}` declares {level} and returns {describe(value)}", ident.span,
                                labels=(Label(value.span, f"a {value.level} value"),))
                return False
        return True

    def loss_use(self, ref: LossRef, expr: ast.Call, scope: Scope) -> LossUse | Bad:
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
                    self.errors.add("RL0212", "nothing can follow `return`", s.span)
                case ast.Assign(clause=None):
                    self.assign(s, self.eval(s.value, scope), scope)
                case ast.Metric(name=name, value=value) if kind == "loss":
                    term = self.term(value, scope)
                    if isinstance(term, Term):
                        metrics.append((name, term))
                case ast.Stop(condition=condition) if kind == "loss":
                    term = self.term(condition, scope)
                    if isinstance(term, Term):
                        stops.append(term)
                case ast.Return(values=values):
                    returned = True
                    many = [self.eval(v, scope) for v in values]
                    flat = [v for m in many for v in (m.values if isinstance(m, Several) else (m,))]
                    for value in flat:
                        if not isinstance(value, (Term, Bad)):
                            self.errors.add("RL0203", f"a {kind} returns values, not {describe(value)}", s.span)
                    terms = tuple(v for v in flat if isinstance(v, Term))
                    result = terms if len(terms) == len(flat) else None
                case _:
                    self.errors.add("RL0212", f"this statement does not belong in a {kind}", s.span,
                                    help="model calls, metrics of data, `save` and blocks stand in the flow")
        if not returned:
            self.errors.add("RL0212", f"this {kind} returns nothing", span, help="end it with `return ...`")
        return result, metrics, stops

    def assign(self, s: ast.Assign, value: Meaning, scope: Scope) -> tuple[Meaning, ...]:
        """Bind the targets in this block; returns their values."""
        values: tuple[Meaning, ...] = value.values if isinstance(value, Several) else (value,)
        if isinstance(value, Bad):
            values = (BAD,) * len(s.targets)
        elif len(values) != len(s.targets):
            self.errors.add("RL0204", f"{len(s.targets)} names for {len(values)} values", s.span)
            values = (BAD,) * len(s.targets)
        for ident, v in zip(s.targets, values):
            self.bind(ident, v, scope)
        return values

    def bind(self, ident: ast.Ident, value: Meaning, scope: Scope) -> None:
        if ident.name in scope.names:
            self.errors.add("RL0102", f"`{ident.name}` is bound twice", ident.span, "the second time",
                            help="a name has one value; choose another name")
            return
        scope.names[ident.name] = value

    def scalar(self, expr: ast.Expr, scope: Scope) -> Scalar | tuple[Scalar, ...] | Bad:
        """The value of a constant expression, or of a list of them."""
        if isinstance(expr, ast.ListOf):
            items = self.eval(expr, scope)
            return tuple(t.value for t in items.items) if isinstance(items, Items) else BAD
        term = self.constant(expr, scope)
        return term.value if isinstance(term, Term) else BAD
