"""`prefixes(gen, ...)`: the beginnings of responses, as prompts that a model can continue.

In: a call of the flow. Out: a frame whose rows lie below those of `gen`, and the Derive that makes it. Cut 0 is always
the empty beginning; the end of a response is never a cut.
Errors: RL0203, RL0205, RL0212, RL0213, RL0215, RL0218, each with its position.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, cast

from rldsl.graph import model as g
from rldsl.graph.computations import label
from rldsl.plan.model import Space
from rldsl.semantics import options
from rldsl.semantics.errors import BAD, Bad
from rldsl.semantics.levels import source_name
from rldsl.semantics.row_operators import cut_length
from rldsl.semantics.scope import Scope
from rldsl.semantics.values import FrameRef, Meaning, Pairs, describe
from rldsl.syntax import ast

if TYPE_CHECKING:
    from rldsl.graph.flow import FlowBuilder

RULES = ("at", "every", "fractions")  # what says where a response is cut: one of them


def prefixes(flow: FlowBuilder, ref: Meaning, expr: ast.Call, target: str | None, scope: Scope) -> Meaning:
    """target: the name that the prefixes are bound to; None: they have none."""
    tree = next(a.value for a in expr.args if a.name is None)
    if not isinstance(ref, FrameRef):
        return flow.errors.add("RL0203", f"`prefixes` takes sequences, not {describe(ref)}", tree.span,
                               help="give it one side: `.chosen` or `.rejected`" if isinstance(ref, Pairs) else "")
    if ref.contents != "generated":
        return flow.errors.add("RL0213", "`prefixes` cuts responses that a model generated", tree.span,
                               f"`{source_name(ref.frame)}` has none" if ref.contents == "prompts" else
                               f"those of `{source_name(ref.frame)}` come from data", help="generate responses first")
    if ref.frame.max_turns:
        return flow.errors.add("RL0213", "`prefixes` cuts one response, not a conversation", tree.span,
                               f"`{source_name(ref.frame)}` has up to {ref.frame.max_turns} turns",
                               help="a value of each turn is `.turn_reward`; for values of states use a model's "
                                    "`values`")
    given = [(a.name, a.value) for a in expr.args if a.name is not None]
    read = options.read(options.PREFIXES, given, "`prefixes`", expr.span, flow.exprs, scope)
    if isinstance(read, Bad):
        return BAD
    rules = [n for n in RULES if read[n] is not None]
    if len(rules) != 1:
        title = "`prefixes` needs one of `at`, `every` and `fractions`" if not rules else \
            f"`prefixes` takes one of `{'`, `'.join(rules)}`"
        return flow.errors.add("RL0215", title, expr.func.span,
                               help="for example `prefixes(gen, at=\"\\n\\n\", most=8)`")
    most = _most(flow, read, ref.frame.max_response_tokens, expr)
    if most is None:
        return BAD
    old, name = ref.frame, target or flow.anonymous("prefixes")
    frame = flow.spaces.add(replace(
        old.record, id=name, row_space=name, max_prompt_tokens=old.max_prompt_tokens + old.max_response_tokens,
        max_response_tokens=0, temperature=1.0, selected_from="", picked_from="", present_in=name,
        label="" if target else label(expr.span)), Space(name, old.count * most, old.row_space, most))
    tokens = flow.value(f"{name}.tokens", "token", name, "i64", "tokens")
    flow.value(f"{name}.lengths", "seq", name, "i64", "lengths")
    own = f"{old.id}.tokens"
    flow.items.append(g.Derive(
        id=flow.unique(name), reads=(own,), writes=(tokens,), span=expr.span, op="prefixes", source=old.id, frame=name,
        values=((own, tokens),), cut_at=cast(str, read["at"] or ""), cut_every=cast(int, read["every"] or 0),
        cut_fractions=cast("tuple[float, ...]", read["fractions"] or ())))
    flow.exprs.ops.prefixes[name] = old.id
    at = cut_length(flow.exprs.ops, frame, old, expr.span)
    return FrameRef(frame, "prompts", fields=(("at", at),))


def _most(flow: FlowBuilder, read: dict[str, options.Value], longest: int, expr: ast.Call) -> int | None:
    """How many cuts a response has at most; None after an error."""
    fractions = cast("tuple[float, ...] | None", read["fractions"])
    if read["at"] == "":
        flow.errors.add("RL0205", "`at` must be a text", expr.func.span, "this is \"\"",
                        help="for cuts after each number of tokens: `every=16`")
        return None
    if fractions is not None:
        if not fractions or any(not 0 < x < 1 for x in fractions) or list(fractions) != sorted({*fractions}):
            flow.errors.add("RL0205", "`fractions` must be between 0 and 1, in ascending order", expr.func.span,
                            f"this is {options.shown(fractions)}",
                            help="0 is always a cut and 1, the end, never: `fractions=[0.25, 0.5, 0.75]`")
            return None
        needed = len(fractions) + 1
    else:
        every = cast("int | None", read["every"])
        needed = longest if every is None else max(1, -(-longest // every))
    most = cast("int | None", read["most"])
    if most is None and read["at"] is not None:
        flow.errors.add("RL0215", "`prefixes` with `at` needs `most`", expr.func.span,
                        "how often a text is in a response is not known in advance",
                        help="write `most=8` for at most 8 prefixes of each response")
        return None
    return min(needed, most) if most is not None else needed
