"""Rows are divided as the operation that works on them needs, so that each counts once.

In: tables with sound references. Out: diagnostics RL0538. Rules: a spread that divides rows names frames with equally
many of them; lengths are told by spreads that have each row in one shard; a computation that reduces over the batch,
or calls Python, has each row on one rank, and one that works with prompts has all sequences of a prompt there;
generation divides prompts and does not need the lengths that it makes; training divides rows.
"""

from __future__ import annotations

from collections.abc import Iterator

from rldsl.diag import Diagnostic
from rldsl.plan.events import Compute, Event, Generate, Infer, Lengths, Select, Train
from rldsl.plan.expr import Program
from rldsl.plan.model import Frame, Spread
from rldsl.verify.tables import Tables, name, problem


def check(t: Tables) -> Iterator[Diagnostic]:
    for s in t.plan.spreads:
        if fault := _spread(t, s):
            yield problem("RL0538", f"spread {s.id} {fault}")
    for e, _ in t.events:
        if fault := _event(t, e):
            yield problem("RL0538", f"{name(e)} {fault}", e, ranks=t.event_ranks(e))


def _spread(t: Tables, s: Spread) -> str:
    if s.unit == "all":
        return ""
    frames = [t.frames[f] for f in s.frames]
    if not frames:
        return "divides the rows of no frame"
    if len({_units(f, s) for f in frames}) > 1 or len({*s.frames}) != len(frames):
        return f"divides frames with different numbers of {s.unit}s: {', '.join(s.frames)}"
    if s.weigh == "slot" and (len(frames) > 1 or s.minibatches * s.epochs > 1):
        return "has slots of several frames or minibatches"
    return ""


def _units(f: Frame, s: Spread) -> int:
    return f.count // (f.per_prompt if s.unit == "prompt" else 1)


def _event(t: Tables, e: Event) -> str:
    match e:
        case Lengths() | Select():
            return "" if t.spreads[e.spread].epochs == 1 else "works on rows that come in several epochs"
        case Infer():
            return ""
        case Generate():
            s = t.spreads[e.spread]
            if s.weigh == "tokens" and e.frame in s.frames:
                return "divides its rows by lengths that it has yet to make"
            return "" if s.epochs == 1 else "works on rows that come in several epochs"
        case Train():
            s = t.spreads[e.spread]
            if s.unit != "row" or s.weigh == "slot":
                return f"makes minibatches of {s.unit}s by {s.weigh}"
            return "" if set(s.frames) == set(e.frames) else f"makes minibatches of frames {', '.join(s.frames)}"
        case Compute():
            return _compute(t, e, t.programs[e.program])
    return ""


def _compute(t: Tables, e: Compute, program: Program) -> str:
    s = t.spreads[e.spread]
    ranks = len(t.spread_ranks(e.spread))
    once = any(n.op in ("py", "quantile") or n.attr("to") == "batch" for n in program.nodes)
    if once and ranks > 1 and (s.unit == "all" or t.layouts[s.layout].dp != ranks or s.epochs > 1):
        return f"counts each row once, but spread {e.spread} has rows on several ranks"
    if any(n.level == "prompt" for n in program.nodes) and s.unit == "row" and t.layouts[s.layout].dp > 1:
        return f"works with whole prompts, but spread {e.spread} divides rows"
    return ""
