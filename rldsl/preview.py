"""What `rlc compile` shows before anything happens: the placement, all that was inserted and why, memory, the verdict.

In: a compiled plan and its bytes. Out: text that fits a screen. Frees of values are counted, not listed.
"""

from __future__ import annotations

from collections.abc import Iterator

from rldsl.memory.curve import each_rank, host_peak
from rldsl.passes.pipeline import Compiled
from rldsl.plan.codec import plan_id
from rldsl.plan.events import (
    Collect,
    Compute,
    Event,
    Free,
    Generate,
    Infer,
    Lengths,
    Load,
    Log,
    Offload,
    Onload,
    Realloc,
    Train,
    Transfer,
    split,
)
from rldsl.plan.model import Plan
from rldsl.plan.naming import call_name, subject
from rldsl.plan.notation import cut, degrees_of, human, ranks_text
from rldsl.plan.projection import events

WIDTH = 120
Call = Generate | Infer | Train


def preview(compiled: Compiled, source: str, target: str, data: bytes) -> str:
    """source: the program's path; target: where the plan went, "" for nowhere; data: its bytes."""
    plan = compiled.plan
    every = [e for e, _ in events(plan)]
    models = {m.name for m in plan.models}
    copies = [e for e in every if isinstance(e, Free) and any(split(b)[0] in models for b in e.buffers)]
    inserted = [e for e in every if e in copies or e.because and not isinstance(e, Free | Log)]
    head = f"{source} -> {target}" if target else source
    lines = [f"{head}    {plan.header.world} ranks, {sum(isinstance(e, Call) for e in every)} calls, "
             f"{len(inserted)} inserted"]
    lines += _meshes(compiled, every)
    lines += _inserted(plan, inserted)
    frees = [e for e in every if isinstance(e, Free) and e not in copies]
    lines.append(f"  - free      {sum(len(e.buffers) for e in frees)} buffers after their last use")
    proof = compiled.proof
    lines.append(f"  ok          {proof.events} events, {proof.entries} entries: {', '.join(proof.checks)}")
    lines.append(f"  plan        {plan_id(data)}  {human(len(data))}")
    return "\n".join(line if len(line) <= WIDTH else line[: WIDTH - 1] + "…" for line in lines) + "\n"


def _meshes(compiled: Compiled, every: list[Event]) -> Iterator[str]:
    plan = compiled.plan
    layouts, peaks = {x.id: x for x in plan.layouts}, compiled.peaks
    sizes = {id(c): host_peak(c) for c in compiled.curves}
    hosts = {rank: sizes[id(c)] for rank, c in each_rank(compiled.curves)}
    for mesh in plan.meshes:
        here = [e for e in every if e.mesh == mesh.id]
        calls = [f"{call_name(e)} {degrees_of(layouts[e.layout])}" for e in here if isinstance(e, Call)]
        calls += [call_name(e) for e in here if isinstance(e, Compute)]
        if not calls:
            continue
        members = mesh.members()
        peak, host = max(peaks[r].bytes for r in members), max(hosts[r] for r in members)
        head = f"  {ranks_text(members):<10}  "
        tail = f"   peak {human(peak)}" + (f", host {human(host)}" if host else "")
        text, room = "", WIDTH - len(head) - len(tail)
        for call in calls:
            joined = f"{text} | {call}" if text else call
            if len(joined) > room:
                yield head + text
                head, joined = " " * len(head), call
            text = joined
        yield head + text + tail


def _inserted(plan: Plan, found: list[Event]) -> Iterator[str]:
    meshes = {m.id: ranks_text(m.members()) for m in plan.meshes}
    layouts = {x.id: meshes[x.mesh] for x in plan.layouts}
    spreads = {s.id: meshes[s.mesh] for s in plan.spreads}
    for e in found:
        match e:
            case Load() | Offload() | Onload():
                what, where, size = e.model, layouts[e.layout], ""
            case Free():
                what, where, size = subject(e), meshes[e.mesh], ""
            case Realloc():
                what = f"{e.source} -> {e.model}" if e.source else e.model
                where, size = f"{layouts[e.src]} -> {layouts[e.dst]}", human(e.bytes)
            case Transfer():
                what, where = ", ".join(e.values), f"{spreads[e.src]} -> {spreads[e.dst]}"
                size = human(e.bytes) if e.bytes >= 0 else "ragged"
            case Lengths():
                what, where, size = f"{e.frame}.lengths", meshes[e.mesh], human(e.bytes)
            case Collect():
                what, where, size = ", ".join(w for _, w in e.values), meshes[e.mesh], ""
            case _:
                what, where, size = "", meshes[e.mesh], ""
        at = e.at.rsplit(":", 1)[0]
        text = f"  + {type(e).__name__.lower():<9} {cut(what, 26):<26} {where:<12} {size:>9}  "
        room = WIDTH - len(text) - len(at) - 2
        yield f"{text}{cut(e.because, room):<{max(room, 0)}}  {at}"
