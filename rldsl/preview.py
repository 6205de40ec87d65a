"""What `rlc compile` shows before anything happens: the placement, all that was inserted and why, memory, the verdict.

In: a compiled plan and its bytes. Out: text of lines that fit a screen. Frees of values are counted, not listed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from textwrap import wrap

from rldsl.diag import counted
from rldsl.memory.curve import each_rank, host_peak, left_out
from rldsl.memory.values import buffer_bound
from rldsl.passes.pipeline import Compiled
from rldsl.plan.codec import plan_id
from rldsl.plan.events import Compute, Event, Generate, ModelCall, Train, split_buffer
from rldsl.plan.model import Plan
from rldsl.plan.naming import describe_event
from rldsl.plan.notation import degrees_of, human, ranks_text
from rldsl.plan.projection import event_paths
from rldsl.plan.references import Role, named
from rldsl.plan.spaces import indexed_frames
from rldsl.plan.visible_plan import visible_plan

WIDTH = 120  # letters of a line; a longer one is continued on the next, and nothing is cut
INDENT = 14
NARROWEST = 30  # letters of a column of reasons


def preview(compiled: Compiled, source: str, target: str, data: bytes) -> str:
    """source: the program's path; target: where the plan went, "" for nowhere; data: its bytes."""
    plan = visible_plan(compiled.plan)
    every = [e for e, _ in event_paths(plan)]
    models = {m.name for m in plan.models}
    copies = [e for e in every if any(split_buffer(b)[0] in models for b in e.frees)]
    inserted = [e for e in every if e in copies or e.because and e.traits.family != "bookkeeping"]
    head = f"{source} -> {target}" if target else source
    frees = [e for e in every if e.frees and e not in copies]
    proof = compiled.proof
    above = [f"{head}    {counted(plan.header.world, 'rank')}, "
             f"{counted(sum(isinstance(e, ModelCall) for e in every), 'call')}, "
             f"{len(inserted)} inserted", *_meshes(compiled, plan, every)]
    below = [*(f"  memory      {line}" for line in left_out(plan)),
             f"  - free      {counted(sum(len(e.frees) for e in frees), 'buffer')} after their last use",
             f"  ok          {counted(proof.events, 'event')}, "
             f"{counted(proof.entries, 'entry')}: {', '.join(proof.checks)}",
             f"  plan        {plan_id(data)}  {human(len(data))}"]
    held = (*_lag(plan, every), *_parts(plan, every, _ages(compiled)), *first_passes(every),
            *_minibatches(plan, every), *_row_states(plan), *_buffers(plan))
    lines = *_wrapped(above), *held, *_inserted(plan, inserted), *_wrapped(below)
    return "\n".join(lines) + "\n"


def _wrapped(lines: Iterable[str]) -> Iterator[str]:
    """Lines of at most WIDTH letters: what is longer continues below its third column."""
    for line in lines:
        yield from wrap(line, WIDTH, subsequent_indent=" " * INDENT, break_long_words=False, break_on_hyphens=False,
                        replace_whitespace=False)


def _meshes(compiled: Compiled, plan: Plan, every: list[Event]) -> Iterator[str]:
    """plan: as people read it."""
    layouts, peaks = {x.id: x for x in plan.layouts}, compiled.peaks
    sizes = {id(c): host_peak(c) for c in compiled.curves}
    hosts = {rank: sizes[id(c)] for rank, c in each_rank(compiled.curves)}
    for mesh in plan.meshes:
        here = [e for e in every if e.mesh == mesh.id]
        calls = [f"{e.display_name} {degrees_of(layouts[e.layout])}" for e in here if isinstance(e, ModelCall)]
        calls += [e.display_name for e in here if isinstance(e, Compute)]
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


def _lag(plan: Plan, every: list[Event]) -> Iterator[str]:
    """What a lag makes possible: work for two steps at the same time, on ranks that have only one of them."""
    lag = plan.header.lag
    if not lag:
        return
    meshes = {m.id: frozenset(m.members()) for m in plan.meshes}
    calls = [e for e in every if isinstance(e, ModelCall)]
    ahead, own = (frozenset[int]().union(*(meshes[e.mesh] for e in calls if (e.ahead > 0) == early))
                  for early in (True, False))
    text = f"  lag {lag:<6}  step s trains on what was generated {counted(lag, 'step')} earlier"
    if ahead - own and own - ahead:
        text += f"; {_who(ahead - own, 'generate')} while {_who(own - ahead, 'work')}"
    elif not ahead - own:
        text += "; all ranks that generate do other work, too, so this saves no time: use disjoint meshes, or no lag"
    else:
        text += "; no other ranks work meanwhile, so this saves no time: use disjoint meshes, or no lag"
    yield from _wrapped([text])


def _who(ranks: frozenset[int], does: str) -> str:
    """"rank 0 works", "ranks 0-3 work"."""
    text = ranks_text(sorted(ranks))
    return f"rank {text} {does}s" if len(ranks) == 1 else f"ranks {text} {does}"


def _ages(compiled: Compiled) -> dict[int, str]:
    """How old the tokens of a step are, by the ids of the events that generate them; nothing where all are new."""
    ages = {age.generated: str(age) for age in compiled.proof.ages}
    generates = [e for e, _ in event_paths(compiled.plan) if isinstance(e, Generate)]
    return {e.id: ages[e.draws_as] for e in generates if e.draws_as in ages}


def _parts(plan: Plan, every: list[Event], ages: Mapping[int, str]) -> Iterator[str]:
    """Responses that continue in later steps: for how long, and how many wait. ages: as of `_ages`."""
    meshes, frames = {m.id: m for m in plan.meshes}, indexed_frames(plan)
    for e in every:
        if isinstance(e, Generate) and e.per_step:
            prompts, ranks = frames[e.prompts], ranks_text(meshes[e.mesh].members())
            steps = prompts.iterations
            waiting = prompts.count - prompts.count // steps
            yield from _wrapped([f"  {ranks:<10}  per_step: up to {counted(e.per_step, 'token')} of a response in a "
                                 f"step, which ends after at most {counted(steps, 'step')}; {ages[e.id]}; at most "
                                 f"{counted(waiting, 'prompt')} {'waits' if waiting == 1 else 'wait'}"])


def _minibatches(plan: Plan, every: list[Event]) -> Iterator[str]:
    """The train calls whose minibatches have a size in tokens."""
    spreads = {s.id: s for s in plan.spreads}
    for e in every:
        if isinstance(e, Train) and (size := spreads[e.spread].minibatch_tokens):
            yield from _wrapped([f"  minibatches {e.display_name}: of at most {size:,} tokens; their number depends on "
                                 f"the lengths of the rows, and is at most {spreads[e.spread].minibatches}"])


def first_passes(every: list[Event]) -> Iterator[str]:
    """The train calls whose losses need a pass without gradient first, and why."""
    for e in every:
        if isinstance(e, Train) and e.first_pass:
            yield from _wrapped([f"  two passes  {e.display_name}: a forward pass without gradient comes before each "
                                 f"minibatch, because {e.first_pass}"])


def _row_states(plan: Plan) -> Iterator[str]:
    """The states of rows: their size follows from a file that the compiler does not read."""
    spreads, meshes = {s.id: s for s in plan.spreads}, {m.id: m for m in plan.meshes}
    paths = {d.name: d.path for d in plan.data}
    for s in plan.states:
        if s.data:
            ranks = ranks_text(meshes[spreads[s.spread].mesh].members())
            yield from _wrapped([f"  {ranks:<10}  state {s.value}: 4 B per row of {paths[s.data]}, in host memory"])


def _buffers(plan: Plan) -> Iterator[str]:
    """The replay buffers: what they may grow to."""
    spreads, meshes = {s.id: s for s in plan.spreads}, {m.id: m for m in plan.meshes}
    for b in plan.buffers:
        ranks = ranks_text(meshes[spreads[b.spread].mesh].members())
        bound = human(buffer_bound(b))
        yield from _wrapped([f"  {ranks:<10}  buffer {b.value}: at most {bound} of rows, in host memory"])


def _inserted(plan: Plan, found: list[Event]) -> Iterator[str]:
    meshes = {m.id: ranks_text(m.members()) for m in plan.meshes}
    places = {Role.LAYOUT: {x.id: meshes[x.mesh] for x in plan.layouts},
              Role.SPREAD: {s.id: meshes[s.mesh] for s in plan.spreads}}
    rows = []
    for e in found:
        ends = [places[r.role][r.id] for r in named(e, *e.traits.participants) if r.role in places]
        where = " -> ".join(ends) if e.traits.drawing == "move" else meshes[e.mesh]
        size = "" if e.traits.bytes_moved == "none" else human(e.bytes) if e.bytes >= 0 else "ragged"
        text = describe_event(e)
        rows.append((e.kind, text.subject, where, size, e.because, text.line))
    widths = [max((len(row[i]) for row in rows), default=0) for i in range(4)]
    for kind, subject, where, size, because, at in rows:
        start = f"  + {kind:<{widths[0]}} {subject:<{widths[1]}} {where:<{widths[2]}} {size:>{widths[3]}}  "
        room = max(WIDTH - len(start) - len(at) - 2, NARROWEST)
        first, *rest = wrap(because, room, break_long_words=False, break_on_hyphens=False) or [""]
        yield f"{start}{first:<{room}}  {at}".rstrip()
        yield from (" " * len(start) + line for line in rest)
