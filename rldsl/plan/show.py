"""A plan as text for people. In: a plan, and the rank or event of interest. Out: lines; nothing is recomputed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rldsl.diag import fail
from rldsl.plan.events import Event, Every, Item, Loop
from rldsl.plan.model import Model, Plan
from rldsl.plan.project import class_of, events, participants, schedule
from rldsl.plan.texts import ranks_text

OWN = ("id", "mesh", "reads", "writes", "at", "because", "bytes")


def human(bytes: int) -> str:
    """Bytes in binary units: 1536 -> "1.5 KiB". -1, known at run time only, is "?"."""
    if bytes < 0:
        return "?"
    size = float(bytes)
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if size < 1024 or unit == "TiB":
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    raise AssertionError("unreachable")


def show(plan: Plan, rank: int | None = None, event: int | None = None) -> str:
    """The whole plan, one rank's schedule, or one event in full. Raises RL0608 for a rank or event it does not have."""
    if event is not None:
        return "\n".join(_one(plan, event))
    body: Sequence[Item] = plan.body
    if rank is not None:
        if not 0 <= rank < plan.header.world:
            raise fail(
                "RL0608", f"the plan has no rank {rank}", place="--rank", help=f"ranks are 0 to {plan.header.world - 1}"
            )
        body = schedule(plan.body, plan.meshes, rank)
    return "\n".join([*_head(plan, rank), "", *_items(plan, body, "")])


def _head(plan: Plan, rank: int | None) -> Iterator[str]:
    h = plan.header
    yield f"{h.program}  flow {h.flow}  {h.world} ranks  {h.steps} steps  seed {h.seed}"
    mine = {m.id for m in plan.meshes if rank is None or rank in m.members()}
    for m in plan.meshes:
        if m.id in mine:
            yield f"mesh {m.id}  ranks {ranks_text(m.members())}"
    for x in plan.layouts:
        if x.mesh in mine:
            degrees = " ".join(f"{d}={n}" for d in ("dp", "tp", "pp", "cp", "ep") if (n := getattr(x, d)) > 1)
            yield f"layout {x.id}  mesh {x.mesh}  {degrees or 'one rank'}" + (f" zero={x.zero}" if x.zero else "")
    for m in plan.models:
        yield f"model {m.name}  {m.kind}  {m.path}  {m.dtype}  " + _life(m)
    if rank is not None:
        c = class_of(plan, rank)
        yield (
            f"rank {rank}  class of ranks {', '.join(f'{a}-{b - 1}' if b > a + 1 else str(a) for a, b in c.ranks)}  "
            f"{len(c.events)} events  peak {human(c.peak_bytes)}"
        )
    else:
        for c in plan.classes:
            ranks = [r for a, b in c.ranks for r in range(a, b)]
            yield f"class  ranks {ranks_text(ranks)}  {len(c.events)} events  peak {human(c.peak_bytes)}"


def _life(m: Model) -> str:
    """How the parameters of a model change in a run."""
    if m.home:
        return f"trained on {m.home}" + (f", adapters of rank {m.lora.r}" if m.lora else "")
    return f"follows {', '.join(dict.fromkeys(m.sources))}" if m.sources else "frozen"


def _items(plan: Plan, items: Sequence[Item], indent: str) -> Iterator[str]:
    for item in items:
        if isinstance(item, Loop | Every):
            yield (
                f"{indent}loop {item.id} x{item.trips}{f' until {item.until}' if item.until else ''}"
                f"{f' over {item.over}' if item.over else ''} {{"
                if isinstance(item, Loop)
                else f"{indent}every {item.period} {{"
            )
            yield from _items(plan, item.body, indent + "  ")
            yield indent + "}"
        else:
            yield indent + line(item)


def line(event: Event) -> str:
    """One event on one line: id, kind, mesh, reads -> writes, bytes, reason, position."""
    touched = event.reads or tuple(getattr(event, "buffers", ()))
    flow = ", ".join(touched) + (" -> " + ", ".join(event.writes) if event.writes else "")
    parts = [f"e{event.id}", f"{kind(event):<8}", f"{event.mesh:<6}", flow]
    if event.bytes:
        parts.append(f"[{human(event.bytes)}]" if event.bytes > 0 else "[size known at run time]")
    if event.because:
        parts.append(f"because {event.because}")
    if event.at:
        parts.append(event.at)
    return "  ".join(parts).rstrip()


def kind(event: Event) -> str:
    return type(event).__name__.lower()


def _one(plan: Plan, id: int) -> Iterator[str]:
    for event, path in events(plan):
        if event.id == id:
            yield line(event)
            yield f"  participants: ranks {ranks_text(participants(plan, event))}"
            if path:
                yield "  inside: " + " > ".join(
                    f"loop {p.id} x{p.trips}" if isinstance(p, Loop) else f"every {p.period}" for p in path
                )
            for name in type(event).__dataclass_fields__:
                if name not in OWN:
                    yield f"  {name}: {getattr(event, name)}"
            return
    raise fail("RL0608", f"the plan has no event {id}", place="--event", help="`rlc show` lists the events")
