"""Rows are divided as the operation that works on them needs, so that each counts once.

In: tables with sound references. Out: diagnostics RL0538. Rules: a spread that divides rows names frames with the same
number of them; lengths come from spreads that have each row on one dp rank; a computation works on rows that lie in
those that its spread divides. If it reduces over the batch, or calls Python, it has each row on one rank, and one that
works with prompts has all sequences of a prompt there; generation divides prompts and does not need the lengths that it
makes; training divides rows, or prompts for losses that need whole ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from rldsl.diag import Diagnostic
from rldsl.plan.derive_ops import DERIVE_OPS
from rldsl.plan.events import Compute, Derive, Event, Generate, Infer, Lengths, Train
from rldsl.plan.expr import Node, Program
from rldsl.plan.model import Spread
from rldsl.plan.operators import in_family
from rldsl.plan.spaces import IndexedFrame, most_minibatches, unit_tokens
from rldsl.plan.traits import rule_for
from rldsl.sharding.gradient_leaves import LEAVES, divides
from rldsl.verify.programs import well_formed
from rldsl.verify.tables import Tables, name, problem


def check_row_division(t: Tables) -> Iterator[Diagnostic]:
    for s in t.plan.spreads:
        if fault := _spread(t, s):
            yield problem("RL0538", f"spread {s.id} {fault}")
    for e, _ in t.events:
        if fault := _event(t, e):
            yield problem("RL0538", f"{name(e)} {fault}", e, ranks=t.event_ranks(e))


def _spread(t: Tables, s: Spread) -> str:
    if s.granularity == "all":
        return ""
    frames = [t.frames[f] for f in s.frames]
    if not frames:
        return "divides rows but has no frame"
    if len({_units(f, s) for f in frames}) > 1 or len({*s.frames}) != len(frames):
        return f"divides frames with different numbers of {s.granularity}s: {', '.join(s.frames)}"
    if s.leaves and (s.leaves != LEAVES or not s.layout or not divides(t.layouts[s.layout].dp)):
        return f"has {s.leaves} leaves, which the dp ranks of its layout cannot share"
    if s.minibatch_tokens and s.balance_by != "tokens":
        return f"has minibatches of {s.minibatch_tokens} tokens, but divides rows by {s.balance_by}"
    if s.balance_by == "slot" and (len(frames) > 1 or s.minibatches * s.epochs > 1):
        return "has slots for several frames or minibatches"
    return ""


def _units(f: IndexedFrame, s: Spread) -> int:
    return f.count // (f.per_prompt if s.granularity == "prompt" else 1)


def _event(t: Tables, e: Event) -> str:
    return rule_for(RULES, e, "the verifier")(t, e) if e.traits.divides_rows else ""


def _has_whole_prompts(t: Tables, s: Spread, frame: IndexedFrame) -> bool:
    """Whether the units of a spread are the prompts of `frame`, or coarser."""
    if t.layouts[s.layout].dp == 1:
        return True
    divided = t.frames[s.frames[0]]
    unit = divided.prompt_index if s.granularity == "prompt" else 0
    return divided.origins[unit] in frame.origins[frame.prompt_index:]


def _each_row_once(t: Tables, e: Lengths | Derive) -> str:
    return "" if t.spreads[e.spread].epochs == 1 else "uses rows that are repeated over several epochs"


def _derive(t: Tables, e: Derive) -> str:
    s = t.spreads[e.spread]
    if DERIVE_OPS[e.op].whole_prompts and not _has_whole_prompts(t, s, t.frames[e.source]):
        return f"needs all rows of a prompt, but spread {e.spread} divides them"
    if DERIVE_OPS[e.op].several and (s.balance_by != "slot" or s.frames != (e.frame,) or s.granularity != "prompt"):
        return f"does not have the rows of {e.frame} in slots, with those of all parts"
    if DERIVE_OPS[e.op].calls_python and s.layout and t.layouts[s.layout].dp != len(t.spread_ranks(e.spread)):
        return f"must call Python once per row, but spread {e.spread} has rows on several ranks"
    return _each_row_once(t, e)


def _infer(t: Tables, e: Infer) -> str:
    return ""  # each row on its own, however they are divided


def _generate(t: Tables, e: Generate) -> str:
    s = t.spreads[e.spread]
    if (s.balance_by == "tokens" or s.minibatch_tokens) and e.frame in s.frames:
        return "divides its rows by lengths that do not exist yet"
    return "" if s.epochs == 1 else "uses rows that are repeated over several epochs"


def _train(t: Tables, e: Train) -> str:
    s = t.spreads[e.spread]
    if s.granularity == "all" or s.granularity == "prompt" and not e.first_pass or s.balance_by == "slot":
        return f"makes minibatches of {s.granularity}s by {s.balance_by}"
    if len({t.frames[f].row_space for f in e.frames}) > 1:
        return f"pairs rows of different spaces: {', '.join(e.frames)}"
    if len(e.frames) > 1 and len({_presence(t, f) for f in e.frames}) > 1:
        return f"pairs frames of which different rows are present: {', '.join(e.frames)}"
    if set(s.frames) != set(e.frames):
        return f"makes minibatches of frames {', '.join(s.frames)}"
    frames, whole = [t.frames[f] for f in s.frames], s.granularity == "prompt"
    units = frames[0].count // (frames[0].per_prompt if whole else 1)
    if s.minibatch_tokens > 0 and \
            s.minibatches != most_minibatches(units, max(1, unit_tokens(frames, whole)), s.minibatch_tokens):
        return f"makes {s.minibatches} minibatches of {s.minibatch_tokens} tokens"
    return ""


def _presence(t: Tables, frame: str) -> tuple[str, ...]:
    """What decides which rows of a frame are present: the values that select them, and the frame where that begins."""
    made = {e.frame: e for e, _ in t.events if isinstance(e, Derive) and e.makes_rows}
    keys: list[str] = []
    id = t.frames[frame].present_in
    while id in made and len(keys) <= len(made):
        event = made[id]
        keys.append(event.key if event.op == "where" else f"{event.op} {t.frames[event.frame].row_space}")
        id = t.frames[event.source].present_in
    return (*keys, t.frames[id].row_space if id else "")


def _compute(t: Tables, e: Compute) -> str:
    s, program = t.spreads[e.spread], t.programs[e.program]
    own = [t.frames[f] for f in s.frames if s.granularity != "all"]
    if stray := [f for f in e.frames if own and not _lies_in(t.frames[f], own[0], s)]:
        return f"uses rows of {stray[0]}, but spread {e.spread} divides those of {own[0].id}"
    ranks = len(t.spread_ranks(e.spread))
    counts_rows = any(n.op == "py" or "batch" in (n.attr("to"), n.attr("within")) for n in program.nodes)
    if counts_rows and ranks > 1 and (s.granularity == "all" or t.layouts[s.layout].dp != ranks or s.epochs > 1):
        return f"must count each row once, but spread {e.spread} has rows on several ranks"
    divided = s.frames and s.granularity != "all" and t.layouts[s.layout].dp > 1
    if divided and well_formed(t, program) and any(not _whole(t, s, space) for space in _reduced_to(t, program)):
        return f"needs whole prompts, but spread {e.spread} divides them"
    return ""


def _lies_in(frame: IndexedFrame, divided: IndexedFrame, s: Spread) -> bool:
    """Whether each row of a frame lies in a unit of a spread that divides another one, or the same."""
    return (divided.prompt_origin if s.granularity == "prompt" else divided.row_origin) in frame.origins


def beyond_rows(t: Tables, nodes: Sequence[Node], n: Node) -> bool:
    """Whether a reduction or an order is about more than one row: those of a prompt, or of a row that these continue.
    One over the batch is not."""
    of = nodes[n.args[0]]
    to, space = (n.attr("within"), n.attr("of")) if in_family(n.op, "order") else (n.attr("to"), n.space)
    if to != "seq":
        return to == "prompt"
    frame = t.frames.get(t.entries[of.space].frame if of.space in t.entries else of.space)
    return space != (frame.row_space if frame and of.level in ("turn", "token", "entry") else of.space)


def _reduced_to(t: Tables, program: Program) -> set[str]:
    """The spaces of which a program needs everything that belongs to one row: prompts, and what rows are reduced to."""
    found = {n.space for n in program.nodes if n.level == "prompt"}
    for n in program.nodes:
        if n.attr("to") == "seq" and beyond_rows(t, program.nodes, n):
            found.add(n.space)
        elif in_family(n.op, "order") and beyond_rows(t, program.nodes, n):
            found.add(str(n.attr("of")))
        elif n.op == "along":  # all prefixes of a response, next to its tokens
            found.add(t.frames[n.space].row_space)
        elif in_family(n.op, "rows") and n.op != "over":  # all siblings
            rows = program.nodes[n.args[0]].space
            found |= {f.prompt_space for f in t.frames.values() if f.row_space == rows and len(f.chain) > 1}
    return found


def _whole(t: Tables, s: Spread, space: str) -> bool:
    """Whether all that belongs to a row of `space` is on one dp rank."""
    divided = t.frames[s.frames[0]]
    unit = divided.prompt_origin if s.granularity == "prompt" else divided.row_origin
    for f in t.frames.values():
        ids = [x.id for x in f.chain]
        if space in ids and unit in f.origins[ids.index(space):]:
            return True
    return False


RULES: Mapping[type[Event], Callable[[Tables, Any], str]] = {
    Lengths: _each_row_once, Derive: _derive, Infer: _infer, Generate: _generate, Train: _train,
    Compute: _compute,
}
