"""Arguments of fn and loss: binding to parameters, and the levels that parameters declare."""

from __future__ import annotations

from typing import cast

from rldsl.diag import Label
from rldsl.plan.expr import LEVELS, Level
from rldsl.plan.spaces import IndexedFrame
from rldsl.semantics.errors import BAD, Bad, Errors, suggest
from rldsl.semantics.levels import ANY, depth
from rldsl.semantics.operators import Operators
from rldsl.semantics.terms import Term
from rldsl.semantics.values import describe, level_value
from rldsl.source import Span
from rldsl.syntax import ast


def bind(name: str, params: tuple[ast.Parameter, ...], expr: ast.Call, errors: Errors) -> dict[str, ast.Expr] | Bad:
    """Parameter name -> given expression; parameters left to their default are absent."""
    names = [p.name.name for p in params]
    given: dict[str, ast.Expr] = {}
    bad = False
    for i, arg in enumerate(expr.args):
        if arg.name is None:
            if i >= len(names):
                errors.add("RL0204", f"`{name}` takes {len(names)} argument{'s' if len(names) != 1 else ''}", arg.span,
                           "unexpected argument", help=f"parameters: {', '.join(names) or 'none'}")
                return BAD
            key = names[i]
        else:
            key = arg.name.name
            if key not in names:
                errors.add("RL0107", f"`{name}` has no parameter `{key}`", arg.name.span, help=suggest(key, names))
                bad = True
                continue
        if key in given:
            errors.add("RL0215", f"`{key}` is passed twice", arg.span, help="remove one of the two")
            bad = True
        given[key] = arg.value
    if bad:
        return BAD
    missing = [p for p in params if p.name.name not in given and p.default is None]
    if missing:
        first = missing[0].name
        errors.add("RL0215", f"`{name}` needs `{'`, `'.join(p.name.name for p in missing)}`", expr.func.span,
                   "missing argument", labels=(Label(first.span, "declared here"),),
                   help=f"write `{first.name}=...`")
        return BAD
    return given


def accept(params: tuple[ast.Parameter, ...], values: dict[str, Term], spans: dict[str, Span], ops: Operators, *,
           broadcast: bool, frames: tuple[IndexedFrame, ...] = ()) -> dict[str, Term] | Bad:
    """Check each value against the level of its parameter. A single number is broadcast to any level; with `broadcast`,
    every coarser value is. frames: over which; by default the finest argument decides. The two sides of a pair share
    sequences, and not tokens."""
    frame = frames[0] if frames else None
    if frame is None and values:
        finest = max(values.values(), key=lambda t: depth(t.level))
        frame = next(iter(ops.spaces.frames_with_space(finest.level, finest.space)), None)
    out: dict[str, Term] = {}
    bad = False
    for param in params:
        name = param.name.name
        tokens = param.level is not None and param.level.name == "token"
        result = _fit(param, values[name], spans[name], ops, broadcast, None if tokens and len(frames) > 1 else frame)
        if isinstance(result, Bad):
            bad = True
        else:
            out[name] = result
    return BAD if bad else out


def _fit(param: ast.Parameter, value: Term, span: Span, ops: Operators, broadcast: bool,
         frame: IndexedFrame | None) -> Term | Bad:
    name, errors = param.name.name, ops.errors
    declared = Label(param.span, "declared here")
    if param.level is None:
        if value.level == "batch":
            return value
        return errors.add("RL0201", f"`{name}` must be a single number, not {level_value(value.level)}", span,
                          f"this is {describe(value)}", labels=(declared,),
                          help="reduce it over the batch, for example with `mean(x)`")
    if param.level.name not in (*LEVELS, ANY):
        return errors.add("RL0101", f"unknown level `{param.level.name}`", param.level.span,
                          help=f"levels: {', '.join(LEVELS)}, or `{ANY}`")
    level = cast(Level, param.level.name)
    if value.dtype == "text":
        return errors.add("RL0203", f"`{name}` must be a {level} value", span, "this is a string", labels=(declared,))
    if value.level == level or param.level.name == ANY:
        return value
    coarser = depth(value.level) < depth(level)
    if level == "entry":  # which tokens would it be about?
        return errors.add("RL0201", f"`{name}` must be an entry value, not {level_value(value.level)}", span,
                          f"this is {describe(value)}", labels=(declared,),
                          help="pass log-probs of several tokens: `t = teacher.top(gen, k=64)`, then `t.logprobs`")
    if coarser and frame is not None and (broadcast or value.level == "batch"):
        here = ops.on_frame(value, frame)
        if here is not None:
            return ops.broadcast(here, level, frame)
    if coarser:
        help_ = "`at_end(x)` puts a seq value at the last token" if (value.level, level) == ("seq", "token") else ""
    else:
        how = "sum" if level == "token" else "mean"
        help_ = f"reduce it, for example with `{how}(x by {level})`" if level != "batch" else "reduce it: `mean(x)`"
    return errors.add("RL0201", f"`{name}` must be a {level} value, not {level_value(value.level)}", span,
                      f"this is {describe(value)}", labels=(declared,), help=help_)
