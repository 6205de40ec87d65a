"""`generate(..., per_step=N)`: responses of up to N tokens a step, which later steps continue.

In: a call with `per_step`. Out: a fetch that reads the prompts of this step again, with those of the steps before, as
far back as a response may have begun; a Generate over all of them; and a selection: the prompts whose last response
ended in this step. Nothing else is kept from step to step than the responses that have not ended.
Invariant: a row of age a of the generated frame belongs to the prompts that were fetched a steps ago, and in the next
step the same response has age a + 1 and the same number among those of its age.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

from rldsl.diag import Label
from rldsl.graph import model as g
from rldsl.plan.events import Sampling
from rldsl.plan.model import Frame, Space
from rldsl.plan.payloads import ROLLOUTS, WINDOW
from rldsl.plan.spaces import IndexedFrame
from rldsl.semantics.errors import BAD, Bad, Errors
from rldsl.semantics.levels import source_name
from rldsl.semantics.terms import const, input_
from rldsl.semantics.values import FrameRef, Meaning, ModelRef
from rldsl.source import Span
from rldsl.syntax import ast

if TYPE_CHECKING:
    from rldsl.graph.flow import FlowBuilder

ENDED, VERSION = "ended", "version"  # values of the generated frame, besides those of all


def generate(flow: FlowBuilder, owner: ModelRef, call: ast.Call, prompts: FrameRef, sampling: Sampling, per_step: int,
             in_step: bool, target: str, clause: g.Clause | None, span: Span) -> Meaning:
    """The nodes of a call with `per_step` below `max_new_tokens`, and what it stands for. in_step: as of
    `GenerateSpec`. Errors: RL0213, RL0205."""
    if flow.inside != "flow":
        return _in_a_block(span, flow.errors)
    found = _fetch_of(flow, prompts, call)
    if isinstance(found, Bad):
        return found
    if any(a.name is not None and a.name.name == "env" for a in call.args):
        at = next(a.span for a in call.args if a.name is not None and a.name.name == "per_step")
        return flow.errors.add("RL0205", "a conversation cannot be continued in a later step", at,
                               "its environment would have to wait for it",
                               help="remove `per_step`: `max_turns` and `max_tokens` bound what a conversation takes")
    steps, id_ = -(-sampling.max_new_tokens // per_step), target + ROLLOUTS
    window = _prompts(flow, found, prompts, steps, target, span)
    frame = flow.spaces.add(
        replace(window.record, id=id_, row_space=id_, present_in=id_,
                max_response_tokens=sampling.max_new_tokens, temperature=sampling.logprob_temperature,
                label=f"{target} with what has not ended"),
        Space(id_, window.count * sampling.n, window.row_space, sampling.n))
    value = flow.value
    writes = (value(f"{frame.id}.tokens", "token", frame.id, "i64", "tokens"),
              value(f"{frame.id}.logprobs", "token", frame.id),
              value(f"{frame.id}.finished", "seq", frame.id, "bool"),
              value(f"{frame.id}.{ENDED}", "seq", frame.id, "bool"),
              value(f"{frame.id}.{VERSION}", "token", frame.id, label=f"{target}.{VERSION}"))
    value(f"{frame.id}.lengths", "seq", frame.id, "i64", "lengths")
    flow.items.append(g.Generate(
        id=flow.unique(target), reads=(f"{window.id}.tokens",), writes=writes, span=span, clause=clause,
        model=owner.name, prompts=window.id, frame=frame.id, sampling=sampling, per_step=per_step, in_step=in_step))
    version = input_(f"{frame.id}.{VERSION}", "token", frame.id, span)
    columns = tuple((name, input_(f"{window.id}.{name}", "prompt", window.row_space, span)) for name in prompts.numbers)
    made = flow.selections.selected(FrameRef(frame, "generated", fields=((VERSION, version), *columns)), target, target,
                                    f"{frame.id}.{ENDED}", span)
    flow.calls.prompts_of[frame.id] = window.id
    _count_waiting(flow, frame, target, span)
    return made


def _count_waiting(flow: FlowBuilder, frame: IndexedFrame, target: str, span: Span) -> None:
    """The metric `NAME/waiting`: how many prompts the next step continues."""
    ops = flow.exprs.ops
    ended = input_(f"{frame.id}.{ENDED}", "seq", frame.row_space, span, "bool")
    each = ops.apply("where", (ended, const(0.0, span), const(1.0, span)), span)
    total = BAD if isinstance(each, Bad) else ops.reduce("sum", each, "batch", span)
    total = total if isinstance(total, Bad) else ops.apply("div", (total, const(float(frame.per_prompt), span)), span)
    if not isinstance(total, Bad):
        name = f"{target}/waiting"
        flow.metrics.append((name, flow.materialize(total, name, span, force=True, text=f"metric {name}").name))


def _fetch_of(flow: FlowBuilder, prompts: FrameRef, call: ast.Call) -> g.Fetch | Bad:
    """The fetch that made the prompts, in this block. Errors: RL0213."""
    frame, where = prompts.frame, call.args[0].span
    fetch = next((n for n in flow.items if isinstance(n, g.Fetch) and frame.id in n.frames), None)
    if prompts.contents == "prompts" and fetch is not None and not fetch.reads:
        return fetch
    weighed = fetch is not None and bool(fetch.reads)
    return flow.errors.add(
        "RL0213", "with `per_step`, `generate` needs the prompts of a `next()` of the same block", where,
        f"`{source_name(frame)}` is drawn by weight" if weighed else f"`{source_name(frame)}` contains others",
        help="it reads those of the steps before again: " + ("remove `weight=`, or `per_step`" if weighed else
                                                              "generate from `data.next()`, or remove `per_step`"))


def _prompts(flow: FlowBuilder, fetch: g.Fetch, prompts: FrameRef, steps: int, owner: str, span: Span) -> IndexedFrame:
    """The prompts of this step and of those before it, in which a response may have begun."""
    base, id = prompts.frame, owner + WINDOW
    frame = flow.spaces.add(
        Frame(id, id, base.data, base.max_prompt_tokens, 0, present_in=id, label=f"prompts of {source_name(base)}, "
              f"of {steps} steps"), Space(id, base.count * steps, iterations=steps))
    value = flow.value
    writes = [value(f"{id}.tokens", "token", id, "i64", "tokens"), value(f"{id}.lengths", "seq", id, "i64", "lengths"),
              value(f"{id}.columns", "seq", id, "text", "columns")]
    flow.columns[id] = writes[-1]
    writes += [value(f"{id}.{name}", "prompt", id) for name in prompts.numbers]
    flow.items.append(g.Fetch(id=flow.unique(id), reads=(f"{base.id}.lengths",), writes=tuple(writes), span=span,
                              data=fetch.data, frames=(id,), newest=base.id))
    return frame


def with_strides(items: tuple[g.Item, ...], errors: Errors) -> tuple[g.Item, ...]:
    """The items of a flow, where each fetch of earlier batches knows how many batches of its source a step reads.
    Errors: RL0213 for such a call, or a fetch of its source, in a block."""
    again = {n.data: n for n in items if isinstance(n, g.Fetch) and n.newest}
    inner = [n for i in items if not isinstance(i, g.Node) for n in g.nodes([i])]
    for node in inner:
        if isinstance(node, g.Generate) and node.per_step:
            _in_a_block(node.span, errors)
    evaluated = {n for i in items for n in _in_evaluations(i)}
    for node in inner:
        if isinstance(node, g.Fetch) and not node.newest and node.id not in evaluated and node.data in again:
            errors.add("RL0213", f"`{node.data}` is read in a block, and `per_step` reads its earlier batches again",
                       node.span, "how many batches a step reads must be known",
                       labels=(Label(again[node.data].span, "here"),),
                       help="read it at the top level of the flow, or declare a second `data`")
    stride = {data: sum(isinstance(n, g.Fetch) and n.data == data and not n.newest for n in items) for data in again}
    return tuple(replace(n, stride=stride[n.data]) if isinstance(n, g.Fetch) and n.newest else n for n in items)


def _in_a_block(span: Span, errors: Errors) -> Bad:
    return errors.add("RL0213", "`per_step` inside a block", span,
                      "what has not ended in a step is continued in the next one",
                      help="move the call to the flow, or remove `per_step`")


def _in_evaluations(item: g.Item) -> Iterable[str]:
    """The ids of the nodes of all evaluations in an item."""
    if isinstance(item, g.Eval):
        return [n.id for n in g.nodes(item.body)]
    return [] if isinstance(item, g.Node) else [n for i in item.body for n in _in_evaluations(i)]

