"""Prompts that Python functions write about sequences: where tokens of one model become text for another.

In: a call of a function that is declared with `-> prompts(...)`. Out: a frame with the same rows as its finest
argument, and a Derive that makes it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, cast

from rldsl.graph import model as g
from rldsl.graph.computations import label
from rldsl.plan.derive_ops import OverLong
from rldsl.semantics import options
from rldsl.semantics.errors import BAD, Bad
from rldsl.semantics.python_calls import Arguments
from rldsl.semantics.scope import Scope
from rldsl.semantics.values import FrameRef, Meaning
from rldsl.syntax import ast

if TYPE_CHECKING:
    from rldsl.graph.flow import FlowBuilder


class Texts:
    """The calls of functions that return prompts."""

    def __init__(self, flow: FlowBuilder):
        self.flow = flow
        self.named: tuple[ast.Expr, str] | None = None  # the expression that a statement gives a name, and the name
        flow.exprs.texts = self.prompts

    def prompts(self, call: Arguments, expr: ast.Call) -> Meaning:
        """`ask(gen)`: a batch of prompts."""
        flow, ref, source = self.flow, call.ref, call.rows
        scope = Scope(ref.module) if ref.module is not None else Scope(flow.exprs.prelude)
        given = options.read(options.TEXT, [(o.name, o.value) for o in ref.options], f"the prompts of `{ref.id}`",
                             ref.span, flow.exprs, scope)
        if isinstance(given, Bad):
            return BAD
        named = self.named is not None and self.named[0] is expr
        name = self.named[1] if self.named is not None and named else flow.anonymous(ref.id)
        partial = ref.returns == "prompts?" or given["over_long"] == "drop"
        frame = flow.spaces.add(replace(
            source.record, id=name, max_prompt_tokens=cast(int, given["max_tokens"]), max_response_tokens=0,
            max_turns=0, temperature=1.0, selected_from="", picked_from="",
            present_in=name if partial else source.present_in, label="" if named else label(expr.span)))
        tokens = flow.value(f"{name}.tokens", "token", name, "i64", "tokens")
        flow.value(f"{name}.lengths", "seq", name, "i64", "lengths")
        own = f"{source.id}.tokens"
        inputs = [f"{f.id}.tokens" for _, f in call.given if f.id != source.id]
        inputs.append(flow.columns[source.chain[-1].id])
        flow.items.append(g.Derive(
            id=flow.unique(name), reads=(own, *inputs), writes=(tokens,), span=expr.span, op="text", source=source.id,
            frame=name, values=((own, tokens),), also_reads=tuple(inputs), function=ref.id,
            given=tuple(("" if i == 0 else n, f.id) for i, (n, f) in enumerate(call.given)),
            over_long=cast(OverLong, given["over_long"])))
        return FrameRef(frame, "prompts")
