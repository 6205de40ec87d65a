"""`sync TARGET from SOURCE [every K]`, `ema TARGET from SOURCE DECAY [every K]`: a model takes on another's parameters.

In: a statement of the flow. Out: a Sync item, in an `every` where the statement has one. Invariant: the target is not
trained, is another model than the source, and has the same kind of head; that the rest of the two agrees is checked
where the model directories are read (`placement/sync.py`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rldsl.diag import Label
from rldsl.graph import model as g
from rldsl.semantics.errors import Bad
from rldsl.semantics.options import positive_integer
from rldsl.semantics.scope import Scope
from rldsl.semantics.terms import Term
from rldsl.semantics.values import ModelRef, describe
from rldsl.syntax import ast

if TYPE_CHECKING:
    from rldsl.graph.flow import FlowBuilder


def sync(flow: FlowBuilder, s: ast.Sync | ast.Ema, scope: Scope) -> None:
    """Append the items of one statement to the flow."""
    target, source = _model(flow, s.target, scope), _model(flow, s.source, scope)
    decay = _decay(flow, s.decay, scope) if isinstance(s, ast.Ema) else 0.0
    period = positive_integer("every", s.period, flow.exprs, scope) if s.period is not None else 1
    if target is None or source is None or decay is None or period is None or not _fit(flow, s, target, source):
        return
    word = "ema" if isinstance(s, ast.Ema) else "sync"
    node = g.Sync(id=flow.unique(f"{target.name}.{word}"), reads=(), writes=(), span=s.span, model=target.name,
                  source=source.name, decay=decay)
    flow.items.append(g.When(period=period, body=(node,), span=s.span) if s.period is not None else node)


def _model(flow: FlowBuilder, ident: ast.Ident, scope: Scope) -> ModelRef | None:
    found = flow.exprs.name(ast.Name(name=ident.name, span=ident.span), scope)
    if isinstance(found, ModelRef):
        return found
    if not isinstance(found, Bad):
        flow.errors.add("RL0203", f"expected a model, found {describe(found)}", ident.span)
    return None


def _decay(flow: FlowBuilder, tree: ast.Expr, scope: Scope) -> float | None:
    value = flow.exprs.constant(tree, scope)
    if not isinstance(value, Term):
        return None
    if value.dtype != "f32" or not 0 <= float(value.value) <= 1:
        flow.errors.add("RL0205", "the decay of `ema` must be between 0 and 1", tree.span,
                        help="0.99 means 99 % of the old parameters plus 1 % of the new ones")
        return None
    return float(value.value)


def _fit(flow: FlowBuilder, s: ast.Sync | ast.Ema, target: ModelRef, source: ModelRef) -> bool:
    models = flow.models
    if target.name == source.name:
        flow.errors.add("RL0222", f"a model cannot be copied to itself: `{target.name}`", s.source.span,
                        help="write a different model after `from`")
    elif target.trainable:
        flow.errors.add("RL0221", f"`{target.name}` is trained, so it cannot be overwritten by `{source.name}`",
                        s.target.span,
                        "its optimizer state belongs to the parameters that would be overwritten",
                        labels=(Label(models[target.name].span, "declared with an optimizer"),),
                        help=f"declare `{target.name}` without `train ...`, or use another target")
    elif target.head_name != source.head_name:
        labels = tuple(Label(models[x.name].span, f"a {x.head_name}") for x in (target, source))
        flow.errors.add("RL0222", f"`{target.name}` is a {target.head_name} and `{source.name}` a {source.head_name}",
                        s.span, "their parameters are different", labels=labels,
                        help="use two models with the same head")
    else:
        return True
    return False
