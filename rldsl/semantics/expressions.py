"""Builds the typed expression (`Term`) of each expression in the source: names, operators, built-in calls, functions.

In: an expression and a Scope. Out: a Meaning; BAD where a message was given. Functions are inlined, so a program has
no calls left but those of models and of Python functions, which `calls` (given by the flow) takes over.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

from rldsl.plan.expr import LEVELS, Level, Scalar
from rldsl.plan.heads import CALLS, INFERENCE_CALLS, TRAIN
from rldsl.plan.model import PROMPTS
from rldsl.plan.operators import BUILTINS, REDUCTIONS
from rldsl.semantics import composites
from rldsl.semantics.builtins import Builtins
from rldsl.semantics.errors import BAD, Bad, Errors, suggest
from rldsl.semantics.functions import Functions
from rldsl.semantics.levels import Spaces
from rldsl.semantics.modules import library_modules_with
from rldsl.semantics.operators import INFIX, Operators, Target
from rldsl.semantics.python_calls import Arguments, PythonCalls
from rldsl.semantics.scope import Scope
from rldsl.semantics.terms import Term, const
from rldsl.semantics.units import Unit
from rldsl.semantics.values import (
    BufferRef,
    DataRef,
    FnRef,
    FrameRef,
    Items,
    LossRef,
    LossUse,
    Meaning,
    ModelRef,
    Module,
    Pairs,
    PyRef,
    Several,
    StateRef,
    TopTokens,
    describe,
)
from rldsl.source import Span
from rldsl.syntax import ast

CallOfModel = Callable[[ModelRef | DataRef | BufferRef, ast.Call, Scope], Meaning]
CallForFrames = Callable[[str, ast.Call, Scope], Meaning]
SelectionOfFlow = Callable[[ast.Selection, Scope], Meaning]


class RowStatesOfFlow(Protocol):
    """What the flow does with the fields of data that are states of its rows."""

    def lookup(self, ref: FrameRef, name: str, span: Span) -> Term: ...

    def of_all_rows(self, owner: DataRef | BufferRef, expr: ast.Attribute) -> Meaning: ...


TextsOfFunction = Callable[[Arguments, ast.Call], Meaning]


class ExpressionBuilder:
    """Builds typed expressions: resolves names, checks levels and units, folds constants and inlines functions."""

    def __init__(self, spaces: Spaces, errors: Errors, prelude: Module):
        self.spaces = spaces
        self.errors = errors
        self.prelude = prelude
        self.ops = Operators(spaces, errors)
        self.builtins = Builtins(self)
        self.functions = Functions(self)
        self.python = PythonCalls(self)
        self.calls: CallOfModel | None = None  # what the flow does with a call of a model or data source
        self.texts: TextsOfFunction | None = None  # what the flow does with a function that returns prompts
        self.frames: CallForFrames | None = None  # what it does with a built-in function that makes sequences
        self.selections: SelectionOfFlow | None = None  # what it does with `gen where c` as an argument
        self.row_states: RowStatesOfFlow | None = None  # set by the flow
        self.first_bound: dict[str, Span] = {}  # name -> the statement of the flow that binds it first

    # ------------------------------------------------------------------------------------------ expressions

    def build(self, expr: ast.Expr, scope: Scope) -> Meaning:
        """What `expr` stands for; a `Term` for arithmetic, BAD after an error."""
        match expr:
            case ast.Number(value=value) if value == math.inf:
                return self.errors.add("RL0214", "this number is too large", expr.span)
            case ast.Number(value=value, unit=unit):
                return const(value, expr.span, Unit(unit))
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
            case ast.Selection():
                if self.selections is None or self.functions.active:
                    return self.errors.add("RL0212", "a selection outside the flow", expr.span,
                                           "functions and losses work on values",
                                           help="select in the flow, and pass values of what is left as arguments")
                return self.selections(expr, scope)
            case ast.Range():
                return self.errors.add("RL0203", "a range outside `mesh(...)`", expr.span,
                                       help="ranges of ranks are written `mesh(0:8)`")
        raise AssertionError(expr)

    def term(self, expr: ast.Expr, scope: Scope) -> Term | Bad:
        """A value that arithmetic can use."""
        value = self.build(expr, scope)
        if isinstance(value, (Term, Bad)):
            return value
        help_ = "use one of its fields, for example `.logprobs`" if isinstance(value, FrameRef) else ""
        if isinstance(value, (LossUse, LossRef)):
            help_ = "pass a loss to a train call: `model.train(gen, loss=...)`"
        if isinstance(value, StateRef):
            help_ = "its value is available only in the flow: pass it as an argument"
        return self.errors.add("RL0203", f"expected a value, found {describe(value)}", expr.span, help=help_)

    def constant(self, expr: ast.Expr, scope: Scope) -> Term | Bad:
        value = self.term(expr, scope)
        if isinstance(value, Term) and not value.constant:
            return self.errors.add("RL0211", "a constant is required here", expr.span,
                                   f"this is {describe(value)}, known only at run time",
                                   help="write a number, a string, or the name of a `param`")
        return value

    def name(self, expr: ast.Name, scope: Scope) -> Meaning:
        found = scope.find(expr.name)
        if found is None:
            found = self.prelude.names.get(expr.name)
        if found is not None:
            if isinstance(found, Term):  # a leaf is computed nowhere else
                found = replace(found, used=expr.span) if found.args else replace(found, span=expr.span)
            return found
        label = "this is a built-in function: call it with arguments" if expr.name in BUILTINS else "not defined here"
        return self.errors.unknown(scope.module.name, expr.name, expr.span, label,
                                   lambda: self.advice(expr.name, scope, expr.span))

    def advice(self, name: str, scope: Scope, at: Span) -> str:
        """What may have been meant by an unknown name."""
        bound = self.first_bound.get(name) if not self.functions.active else None
        if bound is not None and bound.file is at.file:
            if bound.start > at.start:
                return f"it is defined below, on line {bound.line}: define it before its first use"
            if at.start >= bound.end:
                return f"it is defined on line {bound.line}, inside a block, and visible only there"
        modules = library_modules_with(name)
        if modules:
            return f"import it from the library: `use std.{modules[0]} ({name})`"
        own = scope.known() - {name}
        return suggest(name, own | set(self.prelude.names) | BUILTINS.keys() - {name}, own)

    def attribute(self, expr: ast.Attribute, scope: Scope) -> Meaning:
        owner, what = self.build(expr.value, scope), expr.name.name
        fields: dict[str, Meaning] = {}
        if isinstance(owner, FrameRef) and what in dict(owner.fields):
            return self.field(owner, dict(owner.fields)[what], expr.span)
        match owner:
            case Bad():
                return BAD
            case DataRef() | BufferRef() if self.row_states is not None:
                return self.row_states.of_all_rows(owner, expr)
            case Pairs(chosen=FrameRef(states=states) as ref) if what in states and self.row_states is not None:
                return self.row_states.lookup(ref, what, expr.span)
            case FrameRef(states=states) if what in states and self.row_states is not None:
                return self.row_states.lookup(owner, what, expr.span)
            case Pairs(chosen=chosen, rejected=rejected):
                fields = {"chosen": chosen, "rejected": rejected}
                if what in chosen.numbers:
                    return self.number(chosen, what, expr.span)
            case FrameRef(numbers=numbers) if what in numbers:
                return self.number(owner, what, expr.span)
            case FrameRef(frame=f, base=base) if what == PROMPTS and f.id == base and (
                    prompts := self.spaces.data_prompts(base)):
                return FrameRef(prompts, "prompts", states=owner.states, base=prompts.id)
            case FrameRef(frame=f, contents="generated"):
                fields = {"logprobs": Term("input", (), "token", f.id, "f32", expr.span,
                                           (("name", f"{f.id}.logprobs"),)),
                          "finished": Term("input", (), "seq", f.row_space, "bool", expr.span,
                                           (("name", f"{f.id}.finished"),))}
            case TopTokens(ids=ids, logprobs=logprobs):
                fields = {"ids": replace(ids, used=expr.span), "logprobs": replace(logprobs, used=expr.span)}
                if what == "rest":
                    return composites.rest(self.ops, logprobs, expr.span)
        if what in fields:
            return fields[what]
        first = owner.chosen if isinstance(owner, Pairs) else owner
        names = (*first.numbers, *first.states, *dict(first.fields)) if isinstance(first, FrameRef) else ()
        help_ = suggest(what, [*fields, *names, *(("rest",) if isinstance(owner, TopTokens) else ())])
        if isinstance(owner, FrameRef):
            name = expr.value.span.text
            help_ = _made_by_a_call(owner, what, name) or _of_prompts(owner, what, name) or help_
        if isinstance(first, FrameRef) and first.contents != "generated" and not help_:
            help_ = f"to use a column of the data, declare it: `numbers=[\"{what}\"]`"
        if isinstance(owner, ModelRef):
            help_ = f"call it: `{owner.name}.{what}(...)`"
        has = "have" if isinstance(owner, (FrameRef, Several, TopTokens)) else "has"
        return self.errors.add("RL0112", f"{describe(owner)} {has} no field `{what}`", expr.name.span, help=help_)

    def field(self, ref: FrameRef, term: Term, span: Span) -> Term:
        """A named value of sequences: of those that remain, where they are a selection. One number for all is a value
        of each sequence."""
        if term.level == "batch":
            return replace(self.ops.broadcast(term, "seq", ref.frame), span=span)
        here = self.ops.on_selection(term, self.spaces.of(ref.frame, term.level))
        return replace(term if here is None else here, span=span)

    def number(self, ref: FrameRef, column: str, span: Span) -> Term:
        """A column of data: one number for each prompt, or for each sequence of a batch with answers."""
        level: Level = "prompt" if ref.contents == "prompts" else "seq"
        base = self.spaces.frames[ref.base]
        made = Term("input", (), level, self.spaces.of(base, level), "f32", span, (("name", f"{base.id}.{column}"),))
        here = self.ops.on_selection(made, self.spaces.of(ref.frame, level))
        return made if here is None else here

    # ------------------------------------------------------------------------------------------------ calls

    def call(self, expr: ast.Call, scope: Scope) -> Meaning:
        if isinstance(expr.func, ast.Attribute):
            owner = self.build(expr.func.value, scope)
            if isinstance(owner, (ModelRef, DataRef, BufferRef)):
                if self.calls is None:
                    return self.errors.add("RL0212", "a call of a model, data or a buffer outside the flow", expr.span,
                                           help="move the call to the flow and pass its result as an argument")
                return self.calls(owner, expr, scope)
            if isinstance(owner, Bad):
                return BAD
            what = expr.func.name.name
            help_ = (f"call it on a model: `model.{what}({expr.func.value.span.text})`"
                     if what in CALLS and what != TRAIN and isinstance(owner, (FrameRef, Pairs)) else "")
            has = "have" if isinstance(owner, (FrameRef, Several)) else "has"
            return self.errors.add("RL0112", f"{describe(owner)} {has} no call `{what}`", expr.func.name.span,
                                   help=help_)
        if not isinstance(expr.func, ast.Name):
            return self.errors.add("RL0203", "this is not callable", expr.func.span)
        name = expr.func.name
        found = scope.find(name)
        if found is None and name in BUILTINS:
            return self.builtins.call(name, expr, scope)
        if found is None and name == "mesh":
            return self.builtins.mesh(expr, scope)
        target = self.name(expr.func, scope)
        if expr.by is not None and not isinstance(target, Bad):
            return self.errors.add("RL0107", f"`{name}` does not take `by`", expr.by.span,
                                   help=f"only reductions take `by`: {', '.join(REDUCTIONS)}")
        match target:
            case FnRef():
                return self.functions.inline(target, expr, scope)
            case LossRef():
                return self.functions.loss_use(target, expr, scope)
            case PyRef():
                return self.python.call(target, expr, scope)
            case Bad():
                for arg in expr.args:  # their own mistakes are worth a message
                    self.build(arg.value, scope)
                return BAD
        return self.errors.add("RL0203", f"{describe(target)} is not callable", expr.func.span)

    def level(self, ident: ast.Ident) -> Level | None:
        if ident.name in LEVELS:
            return ident.name
        self.errors.add("RL0101", f"unknown level `{ident.name}`", ident.span, help=f"levels: {', '.join(LEVELS)}")
        return None

    def target(self, ident: ast.Ident, scope: Scope) -> Target | None:
        """What a reduction `by` this word goes to: a level, or the rows of a batch."""
        if ident.name in LEVELS:
            return ident.name
        found = scope.find(ident.name)
        if isinstance(found, FrameRef):
            return found
        if isinstance(found, Bad):
            return None
        if found is not None:
            self.errors.add("RL0203", f"`by {ident.name}`: {describe(found)} has no rows", ident.span,
                            help=f"levels: {', '.join(LEVELS)}; or the name of a batch, to reduce up to its rows")
            return None
        self.errors.add("RL0101", f"unknown level `{ident.name}`", ident.span,
                        help=f"levels: {', '.join(LEVELS)}; or the name of a batch, to reduce up to its rows")
        return None

    def scalar(self, expr: ast.Expr, scope: Scope) -> Scalar | tuple[Scalar, ...] | Bad:
        """The value of a constant expression, or of a list of them."""
        if isinstance(expr, ast.ListOf):
            items = self.build(expr, scope)
            return tuple(t.value for t in items.items) if isinstance(items, Items) else BAD
        term = self.constant(expr, scope)
        return term.value if isinstance(term, Term) else BAD


def _of_prompts(ref: FrameRef, what: str, name: str) -> str:
    """Advice where a batch is asked for its prompts, or they for what only answers have; "" for any other word."""
    if what == "index" and ref.contents == "prompts":
        return "prompts have no place in their row: it belongs to answers, `row.index` of `row = d.next()`"
    if what not in (PROMPTS, "prompt"):
        return ""
    if ref.contents == "prompts":
        return f"its rows are prompts already: write `{name}`"
    if ref.contents == "generated":
        return (f"its prompts are the batch that it was generated from; `by prompt` reduces values of `{name}` to "
                f"them, for example `mean(len({name}) by prompt)`")
    return "only rows of data with several answers have it (`answers=k`); a row with one answer is its own prompt"


def _made_by_a_call(ref: FrameRef, what: str, name: str) -> str:
    """Advice where `name.what` is what a call of a model gives; "" for any other word."""
    if ref.contents == "prompts" and what in (*INFERENCE_CALLS, "finished"):
        return f"prompts have no responses yet: generate them with `gen = model.generate({name})`"
    if what in INFERENCE_CALLS:
        return f"compute it with a model: `x = model.{what}({name})`"
    return ""
