"""`teacher.logprobs(gen, prompt=ask(gen))`: a model is asked about responses as if they followed another prompt.

In: an inference call of the flow. Out: the sequences that the model reads, and a Derive that makes them. What the call
returns belongs to the tokens of the response. These are the same in both, so its values are values of the sequences
that the program names.
Errors: RL0202, RL0203, RL0213, RL0215, each with its position.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from rldsl.graph import model as g
from rldsl.plan.spaces import IndexedFrame
from rldsl.semantics.errors import BAD, Bad
from rldsl.semantics.levels import source_name
from rldsl.semantics.scope import Scope
from rldsl.semantics.values import FrameRef, Meaning, describe
from rldsl.source import Span
from rldsl.syntax import ast

if TYPE_CHECKING:
    from rldsl.graph.flow import FlowBuilder

PROMPT = "prompt"  # the option


def behind_prompt(flow: FlowBuilder, call: ast.Call, ref: FrameRef, scope: Scope) -> IndexedFrame | Bad:
    """The frame whose rows the model reads: that of `ref`, or one with its responses after what `prompt=` gives."""
    given = [a for a in call.args if a.name is not None and a.name.name == PROMPT]
    if not given:
        return ref.frame
    if len(given) > 1:
        return flow.errors.add("RL0215", f"`{PROMPT}` is passed twice", given[1].span, help="remove one of the two")
    at = given[0].value.span
    asked = flow.exprs.build(given[0].value, scope)
    if isinstance(asked, Bad) or not _fits(flow, ref, asked, at) or not isinstance(asked, FrameRef):
        return BAD
    return _reprompted(flow, ref.frame, asked.frame, at)


def _fits(flow: FlowBuilder, ref: FrameRef, asked: Meaning, at: Span) -> bool:
    """Whether the responses of `ref` can be read after the prompts `asked`; else an error."""
    add, name = flow.errors.add, source_name(ref.frame)
    if not isinstance(asked, FrameRef):
        add("RL0203", f"`{PROMPT}` must be prompts, not {describe(asked)}", at,
            help=f"declare a function that writes them: `use py \"hints.py\" (ask: gen -> prompts(max_tokens=1k))`, "
                 f"then `{PROMPT}=ask({name})`")
    elif asked.contents != "prompts":
        add("RL0213", f"`{PROMPT}` must be prompts, but `{at.text}` has responses", at,
            help=f"let a Python function write the prompts: `{PROMPT}=ask({name})`, with `ask` declared "
                 "`-> prompts(max_tokens=...)`")
    elif ref.frame.max_turns:
        add("RL0213", f"`{PROMPT}` of a conversation", at, f"the responses of `{name}` are in turns",
            help="leave the option out, or generate without `env=`")
    elif ref.frame.data in flow.data and dict(flow.data[ref.frame.data].options).get("images"):
        add("RL0213", f"`{PROMPT}` of sequences with images", at, f"the data of `{name}` has images",
            help="leave the option out, or use data without `images=`")
    elif asked.frame.row_space not in [s.id for s in ref.frame.chain]:
        add("RL0202", f"`{at.text}` has no prompt for each sequence of `{name}`", at,
            f"it belongs to `{source_name(asked.frame)}`",
            help=f"call the function on `{name}`: `{PROMPT}=ask({name})`")
    elif asked.frame.present_in not in ("", ref.frame.present_in):
        own, collected = asked.frame, asked.frame.iterations > 1
        partial = not collected and own.present_in == own.id != own.row_space  # a Python function leaves some out
        add("RL0213", f"`{at.text}` may lack prompts", at,
            "a function with `-> prompts?(...)` or `over_long=drop` leaves rows out" if partial else
            f"not all rows of `{source_name(flow.spaces.frames[asked.frame.present_in])}` may be there",
            help="declare it `-> prompts(...)`, and return the question itself where there is nothing to add; or "
                 "select the sequences first" if partial else
                 f"call a function on `{name}`: `{PROMPT}=ask({name})`" +
                 (", or make the call a statement of the block, before its rows are collected: "
                  f"`x = m.logprobs({name}, {PROMPT}={at.text})`" if collected else ""))
    else:
        return True
    return False


def _reprompted(flow: FlowBuilder, source: IndexedFrame, asked: IndexedFrame, span: Span) -> IndexedFrame:
    """The responses of `source` after the prompts `asked`: in a block the same frame once."""
    parts = (asked.id, source.id)
    for node in flow.items:
        if isinstance(node, g.Derive) and (node.op, node.parts) == ("reprompt", parts):
            return flow.spaces.frames[node.frame]
    id_, shown = flow.anonymous("behind"), f"{source_name(source)} after {source_name(asked)}"
    frame = flow.spaces.add(replace(
        source, id=id_, selected_from="", picked_from="", max_prompt_tokens=asked.max_prompt_tokens,
        label=shown))
    own, prompts = f"{source.id}.tokens", f"{asked.id}.tokens"
    tokens = flow.value(f"{id_}.tokens", "token", id_, "i64", "tokens", label=f"{shown}.tokens")
    flow.value(f"{id_}.lengths", "seq", id_, "i64", "lengths")
    flow.items.append(g.Derive(
        id=flow.unique(id_), reads=(prompts, own), writes=(tokens,), span=span, op="reprompt", source=source.id,
        frame=id_, values=((own, tokens),), also_reads=(prompts,), parts=parts))
    return frame
