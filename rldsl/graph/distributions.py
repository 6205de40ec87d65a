"""Calls that ask a model for its distribution at each token of some responses: `top`, `logprobs_at`, `distribution`.

In: a call of the flow. Out: a node of the graph, and the entry values that it makes (`plan/entries.py`).
Errors: RL0202, RL0203, RL0204, each with its position.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from rldsl.graph import model as g
from rldsl.plan.entries import HIDDEN, EntrySpace, vocabulary_space
from rldsl.plan.heads import DISTRIBUTION, LOGPROBS_AT, TOP
from rldsl.plan.spaces import IndexedFrame
from rldsl.semantics.errors import BAD, Bad
from rldsl.semantics.levels import source_name
from rldsl.semantics.scope import Scope
from rldsl.semantics.terms import Term, input_
from rldsl.semantics.values import ModelRef, TopTokens, describe
from rldsl.source import Span
from rldsl.syntax import ast

if TYPE_CHECKING:
    from rldsl.graph.flow import FlowBuilder


def top(flow: FlowBuilder, owner: ModelRef, frame: IndexedFrame, read: IndexedFrame, k: int, target: str,
        clause: g.Clause | None, span: Span, label: str) -> TopTokens:
    """The k most likely tokens at each token of the responses of `frame`. read: what the model reads, `frame` or the
    same responses after other prompts. label: what people call them, where the program gives them no name."""
    ids, logprobs = (f"{target}.{name}" for name in ("ids", "logprobs"))
    flow.value(ids, "entry", frame.id, "i64", label=label and f"{label}.ids", width=k, entries=ids)
    flow.value(logprobs, "entry", frame.id, label=label and f"{label}.logprobs", width=k, entries=ids)
    flow.spaces.entries[ids] = EntrySpace(frame.id, k)
    flow.items.append(g.Infer(
        id=flow.unique(target), reads=(f"{read.id}.tokens",), writes=(ids, logprobs), span=span, clause=clause,
        model=owner.name, frame=read.id, output_name=TOP, value=logprobs, ids=ids, temperature=frame.temperature))
    return TopTokens(input_(ids, "entry", ids, span, "id"), input_(logprobs, "entry", ids, span))


def logprobs_at(flow: FlowBuilder, owner: ModelRef, frame: IndexedFrame, read: IndexedFrame, ids: Term, target: str,
                clause: g.Clause | None, span: Span, label: str) -> Term:
    """The log-probs of given tokens at each token of the responses of `frame`. read, label: as of `top`."""
    space = ids.space
    flow.value(target, "entry", frame.id, label=label, width=flow.spaces.entries[space].width, entries=space)
    flow.items.append(g.Infer(
        id=flow.unique(target), reads=(f"{read.id}.tokens", space), writes=(target,), span=span, clause=clause,
        model=owner.name, frame=read.id, output_name=LOGPROBS_AT, value=target, ids=space,
        temperature=frame.temperature))
    return input_(target, "entry", space, span)


def distribution(flow: FlowBuilder, owner: ModelRef, frame: IndexedFrame, read: IndexedFrame, target: str,
                 clause: g.Clause | None, span: Span, label: str) -> Term:
    """The whole distribution at each token of the responses of `frame`: what a loss compares with that of the model in
    training. The placement says how wide its hidden states are. read, label: as of `top`."""
    space = vocabulary_space(frame.id)
    flow.value(target, "entry", frame.id, extent=HIDDEN, label=label, entries=space)
    flow.spaces.entries[space] = EntrySpace(frame.id, 0)
    flow.distributions[target] = owner.name
    flow.items.append(g.Infer(
        id=flow.unique(target), reads=(f"{read.id}.tokens",), writes=(target,), span=span, clause=clause,
        model=owner.name, frame=read.id, output_name=DISTRIBUTION, value=target, temperature=frame.temperature))
    return input_(target, "entry", space, span)


def without_ids(flow: FlowBuilder, call: ast.Call, scope: Scope) -> tuple[ast.Call, Term] | Bad:
    """`logprobs_at(gen, ids)` without its second argument, and that argument."""
    given = [a for a in call.args if a.name is None]
    if len(given) != 2:
        return flow.errors.add("RL0204", f"`{LOGPROBS_AT}` takes sequences and the ids of tokens", call.span,
                               help="for example `model.logprobs_at(gen, t.ids)` after `t = teacher.top(gen, k=64)`")
    found = flow.exprs.build(given[1].value, scope)
    if isinstance(found, Bad):
        return BAD
    if not (isinstance(found, Term) and found.dtype == "id"):
        ids = f": `{given[1].span.text}.ids`" if isinstance(found, TopTokens) else ""
        return flow.errors.add("RL0203", f"`{LOGPROBS_AT}` needs the ids of tokens, not {describe(found)}",
                               given[1].span, help=f"pass those that `top` gives{ids}")
    return replace(call, args=tuple(a for a in call.args if a is not given[1])), found


def same_tokens(flow: FlowBuilder, frame: IndexedFrame, ids: Term) -> bool:
    """Whether the ids belong to the tokens of the sequences; else RL0202."""
    if flow.spaces.frame_of(ids) == frame.id:
        return True
    name = source_name(frame)
    flow.errors.add("RL0202", f"these ids belong to tokens of other sequences than `{name}`", ids.at,
                    f"they are {flow.spaces.shown(ids)}", labels=ids.origin,
                    help=f"take the most likely tokens of `{name}`: `t = teacher.top({name}, k=64)`")
    return False
