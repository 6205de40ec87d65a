"""Checks the bodies of functions and losses on their own, before any call.

In: a module and its file. Out: messages; what is wrong is marked in `module.broken`.
"""

from __future__ import annotations

from typing import cast

from rldsl.plan.entries import EntrySpace
from rldsl.plan.model import Frame, Space
from rldsl.plan.spaces import IndexedFrame
from rldsl.semantics.errors import BAD, Bad, Errors
from rldsl.semantics.expressions import ExpressionBuilder
from rldsl.semantics.levels import ANY, Spaces
from rldsl.semantics.losses import check_body
from rldsl.semantics.scope import Scope
from rldsl.semantics.terms import Term, const, input_
from rldsl.semantics.values import Module
from rldsl.syntax import ast

ENTRIES = "entries"  # the entry space of a function that is checked on its own


def check_alone(module: Module, file: ast.File, errors: Errors, prelude: Module) -> None:
    """Check the bodies of functions and losses on their own, over rows of no data. A broken one is marked, so that its
    error is reported once, and not at each call."""
    for item in file.items:
        if not isinstance(item, (ast.FnDecl, ast.LossDecl)):
            continue
        exprs = ExpressionBuilder(Spaces(), errors, prelude)
        frame = exprs.spaces.add(Frame("rows", "rows", "", 0, 0), Space("prompts", 1), Space("rows", 1, "prompts"))
        exprs.spaces.entries[ENTRIES] = EntrySpace("rows", 1)
        before = len(errors.found)
        if isinstance(item, ast.FnDecl):
            exprs.functions.active.append(item)
            scope = _inputs(item.params, frame, exprs, Scope(module))
            result, _, _ = exprs.functions.body(item.body, scope, item.name.span, "fn")
            if result is not None:
                exprs.functions.declared(item, result)
        else:
            scope = _inputs(item.model_outputs + item.data, frame, exprs, Scope(module))
            check_body(item, scope, {p.name.name for p in item.model_outputs}, exprs)
        if len(errors.found) > before:
            module.broken.add(item.name.name)


def _inputs(params: tuple[ast.Parameter, ...], frame: IndexedFrame, exprs: ExpressionBuilder, scope: Scope) -> Scope:
    """Parameters as inputs over one frame; plain ones with a default are that constant."""
    for p in params:
        value: Term | Bad
        level = "batch" if p.level is None else "token" if p.level.name == ANY else exprs.level(p.level)
        if p.level is None and p.default is not None:
            value = exprs.constant(p.default, scope)
        elif level is None:
            value = BAD
        else:
            space = ENTRIES if level == "entry" else exprs.spaces.of(frame, level)
            value = input_(p.name.name, level, space, p.span)
        if isinstance(value, Term) and value.constant:
            value = const(value.value, p.span, value.unit)
        exprs.functions.bind(p.name, cast(Term, value), scope)
    return scope
