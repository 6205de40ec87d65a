"""Each event runs on the mesh that its operation implies, and reads and writes what its fields say.

In: tables with sound references. Out: diagnostics RL0613 (mesh), RL0614 (reads and writes), RL0615 (fields that
contradict each other). Extra reads are allowed where they carry what the operation needs anyway (lengths, columns).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from rldsl.diag import Diagnostic
from rldsl.plan.events import (Checkpoint, Collect, Compute, Event, Fetch, Free, Generate, Infer, Lengths, Load, Log,
                               Loop, Offload, Onload, Realloc, Save, Select, Train, Transfer, split)
from rldsl.plan.heads import HEAD_OF
from rldsl.plan.model import Layout, Model, Value
from rldsl.plan.verify import evaluations, rows
from rldsl.plan.verify.tables import Tables, name, problem



def check(t: Tables) -> Iterator[Diagnostic]:
    for event, path in t.events:
        ranks = wanted_ranks(t, event)
        if t.event_ranks(event) != ranks:
            yield problem(
                "RL0613",
                f"{name(event)} is on mesh {event.mesh}, but its operation concerns other ranks",
                event,
                ranks=t.event_ranks(event) ^ ranks,
            )
        yield from _fields(t, event)
        if isinstance(event, Fetch):
            yield from _fetch(t, event, evaluations.over(path) == event.data)
    yield from _rows(t)
    yield from rows.loops(t.plan.body)
    yield from evaluations.check(t, t.plan.body)
    if stray := [e for e in t.plan.body if isinstance(e, Collect)]:
        yield problem("RL0519", "a collect outside every loop", *stray)


def wanted_ranks(t: Tables, e: Event) -> frozenset[int]:
    """The participants that the operation implies."""
    match e:
        case Load() | Offload() | Onload() | Generate() | Infer() | Train() | Save():
            return t.layout_ranks(e.layout)
        case Realloc():
            return t.layout_ranks(e.src) | t.layout_ranks(e.dst)
        case Transfer():
            return t.spread_ranks(e.src) | t.spread_ranks(e.dst)
        case Compute() | Select():
            return t.spread_ranks(e.spread)
        case Collect():
            return t.spread_ranks(e.dst)
        case Lengths():
            return _on(t, e.writes) | t.spread_ranks(e.spread)
        case Fetch():
            return _on(t, e.writes)
        case Free():
            return _on(t, e.buffers)
        case Checkpoint():
            return frozenset(range(t.plan.header.world))
        case Log():  # others of the buffers' meshes may be there too: they have nothing to do
            least = {e.to} | {t.meshes[_mesh_of(t, b)].members()[0] for _, b in e.metrics}
            most = _on(t, (b for _, b in e.metrics)) | {e.to}
            return t.event_ranks(e) & most | least
    raise AssertionError(f"no rule for {type(e).__name__}")


def _mesh_of(t: Tables, buffer: str) -> str:
    right = split(buffer)[1]
    return t.spreads[right].mesh if right in t.spreads else t.layouts[right].mesh


def _on(t: Tables, buffers: Iterable[str]) -> frozenset[int]:
    return frozenset().union(*(t.ranks[_mesh_of(t, b)] for b in buffers))


def _fields(t: Tables, e: Event) -> Iterator[Diagnostic]:
    match e:
        case Load():
            yield from _exactly(e, (), (f"{e.model}@{e.layout}",))
        case Save():
            yield from _exactly(e, (f"{e.model}@{e.layout}",), ())
        case Offload() | Onload():
            copy = {f"{e.model}@{e.layout}"}
            if not ({*e.reads} <= copy and {*e.writes} <= copy):
                yield problem("RL0614", f"{name(e)} may touch {e.model}@{e.layout} only", e)
        case Realloc():
            yield from _realloc(t, e)
        case Lengths():
            yield from _reads(t, e, {f"{e.frame}.tokens"} & {split(b)[0] for b in e.reads}, _own(e.frame), e.spread)
            if len(e.writes) != 1 or not _is_all(t, e.writes[0], f"{e.frame}.lengths"):
                yield problem("RL0614", f"{name(e)} must write {e.frame}.lengths for every row, not {e.writes}", e)
            if not e.reads or t.spreads[e.spread].unit == "all":
                yield problem("RL0614", f"{name(e)} must read {e.frame}.tokens in a spread that divides rows", e)
        case Transfer():
            yield from _transfer(t, e)
        case Generate():
            yield from _generate(t, e)
        case Infer():
            yield from _infer(t, e)
        case Train():
            yield from _train(t, e)
        case Compute():
            yield from _compute(t, e)
        case Select() | Collect():
            yield from rows.check(t, e)
        case Checkpoint():
            yield from _checkpoint(t, e)
        case Log():
            if {*e.reads} != {b for _, b in e.metrics} or e.writes or not e.metrics:
                yield problem("RL0614", f"{name(e)} must read exactly the buffers of its metrics", e)
            for _, buffer in e.metrics:
                v = t.values.get(split(buffer)[0])
                if v is None or v.level != "batch":
                    yield problem("RL0615", f"{name(e)} logs {buffer}, which is not a batch-level value", e)
        case Free():
            if not e.buffers or e.writes or e.reads not in ((), e.buffers) or len({*e.buffers}) != len(e.buffers):
                yield problem("RL0614", f"{name(e)} must free distinct buffers and touch no other", e)
            if models := [b for b in e.buffers if split(b)[0] in t.models]:
                yield problem("RL0615", f"{name(e)} frees parameters ({', '.join(models)}); use offload", e)


def _checkpoint(t: Tables, e: Checkpoint) -> Iterator[Diagnostic]:
    """It stands at the end of a step, and reads what the next step takes over: no more, no less."""
    steps = t.plan.body[-1] if t.plan.body else None
    if not isinstance(steps, Loop) or not steps.body or steps.body[-1] is not e:
        yield problem("RL0529", f"{name(e)} does not stand at the end of the step", e)
    if e.every < 1 or e.keep < 1:
        yield problem("RL0529", f"{name(e)} is due every {e.every} steps and keeps {e.keep}", e)
    must = {f"{m.name}@{m.home}" for m in t.plan.models if m.home}
    must |= {f"{s.value}@{s.spread}" for s in t.plan.states}
    follow = {m.name for m in t.plan.models if m.sources}
    copies = [split(b)[0] for b in e.reads if split(b)[0] in follow and split(b)[1] in t.layouts]
    if {b for b in e.reads if split(b)[0] not in follow} != must or sorted(copies) != sorted(follow) or e.writes:
        told = ", ".join(sorted(must | follow)) or "nothing"
        yield problem("RL0529", f"{name(e)} must read {told} and nothing else, but reads "
                      f"{', '.join(e.reads) or 'nothing'}", e)


def _realloc(t: Tables, e: Realloc) -> Iterator[Diagnostic]:
    source, copy = e.source or e.model, f"{e.model}@{e.dst}"
    yield from _exactly(e, (f"{source}@{e.src}", *([copy] if e.decay else [])), (copy,))
    if e.src == e.dst and not e.source:
        yield problem("RL0615", f"{name(e)} goes from layout {e.src} to itself", e)
    if e.source == e.model or not 0 <= e.decay <= 1 or not e.source and (e.decay or e.version):
        yield problem("RL0615", f"{name(e)} takes {e.source or 'no other model'} with decay {e.decay}, version "
                      f"{e.version!r}", e)
    mine, other = t.models[e.model], t.models[source]
    if _parts(mine) != _parts(other):
        yield problem("RL0615", f"{name(e)}: {e.model} has other parameters than {source}", e)


def _parts(m: Model) -> tuple[object, ...]:
    """What two models share between which parameters move."""
    return m.kind, m.layers, m.params, m.base, (m.path, m.lora.alpha) if m.lora else None


def _exactly(e: Event, reads: tuple[str, ...], writes: tuple[str, ...]) -> Iterator[Diagnostic]:
    if e.reads != reads or e.writes != writes:
        yield problem(
            "RL0614",
            f"{name(e)} must read {list(reads)} and write {list(writes)}, but reads {list(e.reads)} and "
            f"writes {list(e.writes)}",
            e,
        )


def _own(*frames: str) -> set[str]:
    """What a call may read of its frames beyond what it must."""
    return {f"{f}.{part}" for f in frames for part in ("tokens", "lengths", "columns", "finished")}


def _is_all(t: Tables, buffer: str, value: str) -> bool:
    left, right = split(buffer)
    return left == value and right in t.spreads and t.spreads[right].unit == "all"


def _reads(t: Tables, e: Event, must: set[str], may: set[str], spread: str, copy: str = "") -> Iterator[Diagnostic]:
    """Every value of `must` once, others of `may`, each in the event's own spread or for all rows; and `copy`."""
    values = [split(b)[0] for b in e.reads if b != copy]
    if copy and copy not in e.reads:
        yield problem("RL0614", f"{name(e)} does not read {copy}", e)
    if len({*e.reads}) != len(e.reads) or len({*values}) != len(values):
        yield problem("RL0614", f"{name(e)} reads something twice: {', '.join(e.reads)}", e)
    for value in sorted(must - {*values}):
        yield problem("RL0614", f"{name(e)} does not read {value}", e)
    for value in sorted({*values} - must - may):
        yield problem("RL0614", f"{name(e)} reads {value}, which its operation does not use", e)
    for buffer in e.reads:
        right = split(buffer)[1]
        if buffer != copy and (right not in t.spreads or right != spread and t.spreads[right].unit != "all"):
            yield problem(
                "RL0614",
                f"{name(e)} works on spread {spread} and cannot read {buffer}",
                e,
                help="a transfer must bring it there first",
            )


def _writes(t: Tables, e: Event, must: set[str], may: set[str], spread: str, copy: str = "") -> Iterator[Diagnostic]:
    """Every value of `must` once, others of `may`, in the event's own spread; at batch level also for all rows."""
    values = [split(b)[0] for b in e.writes if b != copy]
    if copy and copy not in e.writes or len({*values}) != len(values) or not must <= {*values} <= must | may:
        wanted = sorted(must) + ([copy] if copy else [])
        yield problem(
            "RL0614", f"{name(e)} must write {', '.join(wanted)}, but writes {', '.join(e.writes) or 'nothing'}", e
        )
    for buffer in e.writes:
        left, right = split(buffer)
        whole = (
            left in t.values
            and t.values[left].level == "batch"
            and right in t.spreads
            and (t.spreads[right].unit == "all" and t.spread_ranks(right) == t.spread_ranks(spread))
        )
        if buffer != copy and right != spread and not whole:
            yield problem("RL0614", f"{name(e)} works on spread {spread} and cannot write {buffer}", e)


def _fetch(t: Tables, e: Fetch, once: bool) -> Iterator[Diagnostic]:
    """once: it goes over its source once; the rows beyond the end are then not there."""
    must = {f"{f}.{part}" for f in e.frames for part in ("tokens", "lengths")}
    values = [split(b)[0] for b in e.writes]
    more = {f"{f}.{part}" for f in e.frames for part in ("columns", *t.data[e.data].numbers)}
    if e.reads or not must <= {*values} <= must | more or len({*values}) != len(values):
        yield problem("RL0614", f"{name(e)} must read nothing and write tokens and lengths of {', '.join(e.frames)}", e)
    if any(
        split(b)[1] not in t.spreads
        or t.spreads[split(b)[1]].unit != "all"
        or t.spread_ranks(split(b)[1]) != t.event_ranks(e)
        for b in e.writes
    ):
        yield problem("RL0614", f"{name(e)} must write all rows on every rank of its mesh", e)
    for f in e.frames:
        frame = t.frames[f]
        if (frame.partial, frame.data, frame.count) != (f if once else "", e.data, t.data[e.data].batch):
            yield problem("RL0615", f"{name(e)} fetches frame {f}, which is not a batch of {e.data}", e)


def _transfer(t: Tables, e: Transfer) -> Iterator[Diagnostic]:
    must = tuple(f"{v}@{e.src}" for v in e.values)
    extra = [b for b in e.reads if b not in must]
    if (
        not e.values
        or not {*must} <= {*e.reads}
        or len({*e.reads}) != len(e.reads)
        or any(
            t.spreads[split(b)[1]].unit != "all" or not b.startswith(f"{v}.lengths@")
            for b in extra
            for v in {t.values[x].frame for x in e.values}
        )
        or len({*e.values}) != len(e.values)
    ):
        yield problem("RL0614", f"{name(e)} must read {', '.join(must)} and may read lengths only besides", e)
    if {*e.writes} != {f"{v}@{e.dst}" for v in e.values} or len(e.writes) != len(e.values):
        yield problem("RL0614", f"{name(e)} must write its values in spread {e.dst}", e)
    if e.src == e.dst:
        yield problem("RL0615", f"{name(e)} goes from spread {e.src} to itself", e)
    if len({t.values[v].frame for v in e.values}) > 1:
        yield problem("RL0615", f"{name(e)} moves values of several frames", e)


def _call(t: Tables, e: Generate | Infer | Train) -> Iterator[Diagnostic]:
    s = t.spreads[e.spread]
    if (
        s.unit == "all"
        or _degrees(t.layouts[s.layout]) != _degrees(t.layouts[e.layout])
        or (t.meshes[t.layouts[s.layout].mesh].members() != t.meshes[t.layouts[e.layout].mesh].members())
    ):
        yield problem("RL0615", f"{name(e)}: spread {e.spread} does not divide rows as layout {e.layout} does", e)
    if e.mbs < 0:
        yield problem("RL0615", f"{name(e)} has mbs {e.mbs}", e)


def _degrees(x: Layout) -> tuple[int, ...]:
    return x.dp, x.tp, x.pp, x.cp


def _generate(t: Tables, e: Generate) -> Iterator[Diagnostic]:
    yield from _call(t, e)
    yield from _reads(t, e, {f"{e.prompts}.tokens"}, _own(e.prompts), e.spread, f"{e.model}@{e.layout}")
    yield from _writes(
        t, e, {f"{e.frame}.tokens"}, {f"{e.frame}.{x}" for x in ("logprobs", "finished", "lengths")}, e.spread
    )
    f, p, s = t.frames[e.frame], t.frames[e.prompts], e.sampling
    if (f.count, f.per_prompt, f.prompts, f.data, f.partial) != (p.count * s.n, p.per_prompt * s.n, p.prompts, p.data,
                                                                p.partial):
        yield problem("RL0615", f"{name(e)}: frame {e.frame} is not {s.n} completions for each row of {e.prompts}", e)
    if f.temperature != s.temperature or f.max_response_tokens < s.max_new_tokens:
        yield problem(
            "RL0615", f"{name(e)}: frame {e.frame} records another temperature or fewer tokens than it samples", e
        )
    if t.models[e.model].kind != "causal_lm" or t.spreads[e.spread].unit != "prompt":
        yield problem("RL0615", f"{name(e)} needs a causal_lm and a spread by prompts", e)


def _infer(t: Tables, e: Infer) -> Iterator[Diagnostic]:
    yield from _call(t, e)
    yield from _reads(t, e, {f"{e.frame}.tokens"}, _own(e.frame), e.spread, f"{e.model}@{e.layout}")
    yield from _writes(t, e, {e.output}, set(), e.spread)
    v = t.values[e.output]
    extent = "row" if e.what == "scores" else "response"
    if v.frame != e.frame or v.extent != extent or v.dtype != "f32":
        yield problem(
            "RL0615",
            f"{name(e)}: {e.what} of frame {e.frame} do not fit value {v.id} ({v.frame}, {v.extent}, {v.dtype})",
            e,
        )
    if t.models[e.model].kind != HEAD_OF[e.what]:
        yield problem(
            "RL0615", f"{name(e)}: {e.what} need a {HEAD_OF[e.what]}, but {e.model} is a {t.models[e.model].kind}", e
        )
    if HEAD_OF[e.what] == "causal_lm" and e.temperature != t.frames[e.frame].temperature:
        yield problem(
            "RL0615",
            f"{name(e)} runs at temperature {e.temperature}, frame {e.frame} was sampled at "
            f"{t.frames[e.frame].temperature}",
            e,
        )


def _train(t: Tables, e: Train) -> Iterator[Diagnostic]:
    yield from _call(t, e)
    copy = f"{e.model}@{e.layout}"
    must = {f"{f}.tokens" for f in e.frames} | {v for _, v in e.data}
    yield from _reads(t, e, must, _own(*e.frames), e.spread, copy)
    yield from _writes(t, e, {v for _, v in e.outputs}, set(), e.spread, copy)
    for _, frame, what in e.fresh:
        if frame not in e.frames or HEAD_OF.get(what) != t.models[e.model].kind:
            yield problem("RL0615", f"{name(e)}: {e.model} has no fresh {what} of frame {frame}", e)
    if not e.frames or any(t.values[v].level != "batch" for _, v in e.outputs):
        yield problem("RL0615", f"{name(e)} needs a frame, and outputs at batch level", e)


def _compute(t: Tables, e: Compute) -> Iterator[Diagnostic]:
    must = {v for _, v in e.inputs}
    sources = {t.frames[f].data for f in e.frames}
    for node in t.programs[e.program].nodes:
        if node.op == "py":
            of = rows.origin(t, str(node.attr("frame")))
            must |= {f"{node.attr('frame')}.tokens"}
            must |= {v.id for v in t.plan.values if v.extent == "columns" and t.frames[v.frame].prompts == of}
    kin = {f.id for f in t.plan.frames if f.data in sources}
    yield from _reads(t, e, must, _own(*kin), e.spread)
    yield from _writes(t, e, {v for _, v in e.outputs}, set(), e.spread)


def _rows(t: Tables) -> Iterator[Diagnostic]:
    """A value stands only in spreads that divide its own rows."""
    for event, _ in t.events:
        for buffer in event.writes:
            left, right = split(buffer)
            if left in t.values and not _divides(t, t.values[left], right):
                yield problem("RL0615", f"{name(event)} writes {buffer}, but spread {right} divides other rows", event)


def _divides(t: Tables, v: Value, spread: str) -> bool:
    s = t.spreads[spread]
    if s.unit == "all" or v.level == "batch" or not s.frames:
        return True
    if rows.root(t, v.frame).rows == rows.root(t, s.frames[0]).rows:
        return True
    return (s.unit == "prompt" or v.level == "prompt") and rows.origin(t, v.frame) == rows.origin(t, s.frames[0])
