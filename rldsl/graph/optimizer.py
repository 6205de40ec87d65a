"""`train OPTIMIZER(...)` in the declaration of a model.

In: the call. Out: an `Optimizer`, and where the program has each pattern for names of parameters, which placement
compares with the model's directory.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, cast

from rldsl.plan.model import Optimizer, ParamGroup
from rldsl.semantics import options
from rldsl.semantics.errors import BAD, Advice, Bad, suggest
from rldsl.semantics.expressions import ExpressionBuilder
from rldsl.semantics.scope import Scope
from rldsl.semantics.terms import Term
from rldsl.semantics.values import describe
from rldsl.source import Span
from rldsl.syntax import ast

GROUP = "group"
GROUP_FORM = 'write `group("*norm*", weight_decay=0)`'


@dataclass(frozen=True, slots=True)
class DeclaredOptimizer:
    """An optimizer as the program declares it."""

    record: Optimizer  # of the plan
    patterns: tuple[tuple[str, Span], ...]  # for names of parameters, and where each is


def read_optimizer(call: ast.Expr, exprs: ExpressionBuilder, scope: Scope) -> DeclaredOptimizer | Bad:
    """`adamw(lr=..., group("*norm*", weight_decay=0))`; the learning rate may be the first argument."""
    if not isinstance(call, ast.Call):
        return exprs.errors.add("RL0203", "an optimizer is written `adamw(lr=...)`", call.span, "expected a call")
    name = call.func.name if isinstance(call.func, ast.Name) else call.func.span.text
    if name not in options.OPTIMIZERS:
        near = suggest(name, options.OPTIMIZERS)
        return exprs.errors.add("RL0101", f"unknown optimizer `{name}`", call.func.span,
                                help=near if isinstance(near, Advice) else f"one of: {', '.join(options.OPTIMIZERS)}")
    given, trees = [], []
    for i, arg in enumerate(call.args):
        if arg.name is not None:
            given.append((arg.name, arg.value))
        elif _is_group(arg.value):
            trees.append(cast(ast.Call, arg.value))
        elif i == 0:
            given.append((ast.Ident(name="lr", span=arg.span), arg.value))
        else:
            exprs.errors.add("RL0204", f"the options of `{name}` must be named", arg.span, help="write `option=value`")
    groups = [_read_group(tree, exprs, scope) for tree in trees]
    table = options.OPTIMIZER | options.OPTIMIZERS[name]
    values = options.read(table, given, f"`{name}`", call.func.span, exprs, scope)
    sound = [group for group in groups if not isinstance(group, Bad)]
    if isinstance(values, Bad) or len(sound) < len(groups):
        return BAD
    if values.get("nesterov") and not values["momentum"]:
        return exprs.errors.add("RL0205", "`nesterov` needs a `momentum` above 0", call.func.span,
                                help="write `momentum=0.9`, or remove `nesterov`")
    warmup = cast(float, values["warmup"])
    if warmup > 1 and warmup != int(warmup):
        tree = next(tree for ident, tree in given if ident.name == "warmup")
        return exprs.errors.add("RL0205", f"`warmup={warmup:g}` is neither a number of steps nor a fraction", tree.span,
                                "optimizer steps if at least 1, a fraction of all of them if below 1",
                                help=f"write `warmup={round(warmup)}` for optimizer steps, or `warmup=0.03` for 3 % of "
                                     "them")
    if values.get("adamw_lr") is None:
        values.pop("adamw_lr", None)
    record = Optimizer(**cast(dict[str, Any], values), kind=name, groups=tuple(group for group, _ in sound))
    frozen = next((tree.span for ident, tree in given if ident.name == "freeze"), call.span)
    return DeclaredOptimizer(record, (*((p, frozen) for p in record.freeze), *(p for _, own in sound for p in own)))


def _is_group(tree: ast.Expr) -> bool:
    return isinstance(tree, ast.Call) and isinstance(tree.func, ast.Name) and tree.func.name == GROUP


def _read_group(call: ast.Call, exprs: ExpressionBuilder,
                scope: Scope) -> tuple[ParamGroup, tuple[tuple[str, Span], ...]] | Bad:
    patterns: list[tuple[str, Span]] = []
    bad = False
    for arg in (a for a in call.args if a.name is None):
        value = exprs.constant(arg.value, scope)
        if isinstance(value, Term) and value.dtype == "text":
            patterns.append((str(value.value), arg.span))
            continue
        bad = True
        if isinstance(value, Term):
            exprs.errors.add("RL0205", "a pattern for names of parameters must be a string", arg.span,
                             f"this is {describe(value)}", help=GROUP_FORM)
    given = [(a.name, a.value) for a in call.args if a.name is not None]
    values = options.read(options.GROUP, given, f"`{GROUP}`", call.func.span, exprs, scope)
    if bad or isinstance(values, Bad):
        return BAD
    if not patterns or all(v is None for v in values.values()):
        what = "a pattern for names of parameters" if not patterns else "`lr_scale` or `weight_decay`"
        return exprs.errors.add("RL0215", f"`{GROUP}` needs {what}", call.func.span, help=GROUP_FORM)
    return replace(ParamGroup(tuple(p for p, _ in patterns)), **cast(dict[str, Any], values)), tuple(patterns)
