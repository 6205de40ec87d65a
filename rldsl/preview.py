"""What `rlc compile` shows before anything happens: the placement, all that was inserted and why, memory, the verdict.

In: a compiled plan and its bytes. Out: text that fits a screen. Frees of values are counted, not listed.
"""

from __future__ import annotations

from collections.abc import Iterator

from rldsl.memory.curve import each_rank, host_peak
from rldsl.passes.pipeline import Compiled
from rldsl.plan.codec import plan_id
from rldsl.plan.events import Compute, Event, ModelCall, split
from rldsl.plan.model import Plan
from rldsl.plan.notation import cut, degrees_of, human, ranks_text
from rldsl.plan.projection import events
from rldsl.plan.references import Role, named

WIDTH = 120


def preview(compiled: Compiled, source: str, target: str, data: bytes) -> str:
    """source: the program's path; target: where the plan went, "" for nowhere; data: its bytes."""
    plan = compiled.plan
    every = [e for e, _ in events(plan)]
    models = {m.name for m in plan.models}
    copies = [e for e in every if any(split(b)[0] in models for b in e.frees)]
    inserted = [e for e in every if e in copies or e.because and e.traits.family != "bookkeeping"]
    head = f"{source} -> {target}" if target else source
    lines = [f"{head}    {plan.header.world} ranks, {sum(isinstance(e, ModelCall) for e in every)} calls, "
             f"{len(inserted)} inserted"]
    lines += _meshes(compiled, every)
    lines += _inserted(plan, inserted)
    frees = [e for e in every if e.frees and e not in copies]
    lines.append(f"  - free      {sum(len(e.frees) for e in frees)} buffers after their last use")
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
        calls = [f"{e.called} {degrees_of(layouts[e.layout])}" for e in here if isinstance(e, ModelCall)]
        calls += [e.called for e in here if isinstance(e, Compute)]
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
    places = {Role.LAYOUT: {x.id: meshes[x.mesh] for x in plan.layouts},
              Role.SPREAD: {s.id: meshes[s.mesh] for s in plan.spreads}}
    for e in found:
        ends = [places[r.role][r.id] for r in named(e, *e.traits.participants) if r.role in places]
        where = " -> ".join(ends) if e.traits.drawing == "move" else meshes[e.mesh]
        size = "" if e.traits.moves == "nothing" else human(e.bytes) if e.bytes >= 0 else "ragged"
        at = e.at.rsplit(":", 1)[0]
        text = f"  + {e.kind:<9} {cut(e.subject, 26):<26} {where:<12} {size:>9}  "
        room = WIDTH - len(text) - len(at) - 2
        yield f"{text}{cut(e.because, room):<{max(room, 0)}}  {at}"
