"""`lora(...)` in the declaration of a model: which adapter it trains on a base that stays as it is.

In: the declaration. Out: a `Lora` whose targets are as written; placement reads the model directory and resolves them.
An adapter that begins with a directory, `lora("dir")`, takes rank and targets from there (r is 0 until then).
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Any, cast

from rldsl.graph import model as g
from rldsl.plan.model import Lora
from rldsl.semantics import options
from rldsl.semantics.errors import BAD, Bad, Errors, suggest
from rldsl.semantics.expressions import ExpressionBuilder
from rldsl.semantics.scope import Scope
from rldsl.semantics.terms import Term
from rldsl.semantics.values import describe
from rldsl.syntax import ast

WORD = "lora"
FORM = 'write `causal_lm("path", lora(r=8))`'


def taken(call: ast.Call, exprs: ExpressionBuilder, scope: Scope) -> tuple[ast.Call, Lora | None | Bad]:
    """The call of a model without its adapter, and the adapter."""
    for i, arg in enumerate(call.args[1:], 1):
        if arg.name is not None and arg.name.name == WORD:
            return _without(call, i), exprs.errors.add("RL0204", "an adapter is not an option", arg.name.span,
                                                       help=FORM)
        if arg.name is None and isinstance(arg.value, ast.Call):
            return _without(call, i), _read(arg.value, exprs, scope)
        if arg.name is None and isinstance(arg.value, ast.Name) and arg.value.name == WORD:
            return _without(call, i), exprs.errors.add("RL0203", "`lora` is written with parentheses", arg.span,
                                                       help=FORM)
    return call, None


def _without(call: ast.Call, i: int) -> ast.Call:
    return replace(call, args=call.args[:i] + call.args[i + 1 :])


def _read(call: ast.Call, exprs: ExpressionBuilder, scope: Scope) -> Lora | Bad:
    if not isinstance(call.func, ast.Name) or call.func.name != WORD:
        return exprs.errors.add("RL0101", f"unknown adapter `{call.func.span.text}`", call.func.span,
                                help=suggest(call.func.span.text, (WORD,)))
    unnamed = [a for a in call.args if a.name is None]
    given = [(a.name, a.value) for a in call.args if a.name is not None]
    if not unnamed:
        values = options.read(options.LORA, given, "`lora`", call.func.span, exprs, scope)
        return values if isinstance(values, Bad) else Lora(**cast(dict[str, Any], values))
    path = exprs.constant(unnamed[0].value, scope)
    if not isinstance(path, Term):
        return BAD
    if path.dtype != "text":
        return exprs.errors.add("RL0205", "the only positional argument of `lora` is the directory of an adapter",
                                unnamed[0].span, f"this is {describe(path)}",
                                help="options such as the rank must be named: `r=8`")
    if not path.value:
        return exprs.errors.add("RL0205", "the directory of an adapter is empty", unnamed[0].span, "no directory",
                                help=f"name one, or {FORM} for a new adapter")
    if len(call.args) > 1:
        other = next(a for a in call.args if a is not unnamed[0])
        return exprs.errors.add("RL0204", "the directory defines the rank, alpha and targets of its adapter",
                                other.span, help="remove the other options")
    return Lora(0, 0.0, (), path=str(path.value))


def check(models: Collection[g.Model], synced: Collection[str], errors: Errors) -> None:
    """RL0241: a new adapter that nothing ever writes. synced: the models that follow others."""
    for m in models:
        if m.lora is not None and not m.lora.path and m.optimizer is None and m.name not in synced:
            errors.add("RL0241", f"the adapter of `{m.name}` is never trained", m.lora_span,
                       "a new adapter has no effect until it is trained",
                       help="add `train adamw(lr=...)` or remove the adapter; `lora(\"dir\")` loads a trained one")
