"""Each event runs on the mesh that its operation implies, and reads and writes what its fields say.

In: tables with sound references. Out: diagnostics RL0613 (mesh), RL0614 (reads and writes), RL0615 (fields that
contradict each other). Extra reads are allowed where they carry what the operation needs anyway (lengths, columns).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from rldsl.diag import Diagnostic
from rldsl.plan.events import (
    Checkpoint,
    Collect,
    Compute,
    Derive,
    Draw,
    Event,
    Fetch,
    Free,
    Generate,
    Infer,
    Lengths,
    Load,
    Log,
    Lookup,
    Loop,
    Offload,
    Onload,
    Realloc,
    Sample,
    Store,
    Train,
    Transfer,
    Update,
    split_buffer,
)
from rldsl.plan.model import INDEX, PROMPTS, Model, Value
from rldsl.plan.references import Reference, Role, named
from rldsl.plan.traits import expand, rule_for
from rldsl.sharding.rank_sets import Ranks, union
from rldsl.verify import calls, collect, derive, evaluations, generation, replay, row_states
from rldsl.verify.tables import Tables, name, problem
from rldsl.verify.transfer_slices import MeshCells

NEVER_SENT = ("columns", "lengths", "row_numbers", "table", "cache")  # extents of values that stay on their ranks


def check_operations(t: Tables) -> Iterator[Diagnostic]:
    for event, _ in t.events:
        ranks = wanted_ranks(t, event)
        if t.event_ranks(event) != ranks:
            yield problem(
                "RL0613",
                f"{name(event)} is on mesh {event.mesh}, but involves other ranks",
                event,
                ranks=t.event_ranks(event) ^ ranks,
            )
        yield from _fields(t, event)
    yield from _rows(t)
    yield from collect.loops(t.plan.body)
    yield from evaluations.check_evaluations(t, t.plan.body)
    yield from replay.check_buffers(t)
    if stray := [e for e in t.plan.body if isinstance(e, Collect)]:
        yield problem("RL0519", "a collect outside of any loop", *stray)


def wanted_ranks(t: Tables, e: Event) -> Ranks:
    """The participants that the operation implies."""
    if e.traits.all_ranks:
        return Ranks.of([(0, t.plan.header.world)], t.plan.header.world)
    ends = named(e, *e.traits.first_rank_of)
    least = union([*(_ranks(t, r) for r in named(e, *e.traits.participants)),
                   *(Ranks.one(t.meshes[_mesh_of(t, r.id)].ranks[0][0]) for r in ends)])
    if not ends:
        return least
    # others of the buffers' meshes may be there too: they have nothing to do
    return t.event_ranks(e) & union(_ranks(t, r) for r in ends) | least


def _ranks(t: Tables, r: Reference) -> Ranks:
    """The ranks of what a field names."""
    if r.role is Role.RANK:
        return Ranks.one(r.id)
    if r.role is Role.BUFFER:
        return t.ranks[_mesh_of(t, r.id)]
    if r.role is Role.MESH:
        return t.ranks[r.id]
    return t.layout_ranks(r.id) if r.role is Role.LAYOUT else t.spread_ranks(r.id)


def _mesh_of(t: Tables, buffer: str) -> str:
    right = split_buffer(buffer)[1]
    return t.spreads[right].mesh if right in t.spreads else t.layouts[right].mesh


def _fields(t: Tables, e: Event) -> Iterator[Diagnostic]:
    """What it reads and writes, by its traits where they say it all; then what is particular to its kind."""
    if e.traits.buffers is not None:
        yield from _exactly(e, expand(e, e.traits.buffers.reads), expand(e, e.traits.buffers.writes))
    if e.traits.buffers is None or type(e) in RULES:
        yield from rule_for(RULES, e, "the verifier")(t, e)


def _load(t: Tables, e: Load) -> Iterator[Diagnostic]:
    if e.alias_of and not _may_alias(t, e):
        yield problem("RL0615", f"{name(e)} reuses {e.model}@{e.alias_of} as {e.model}@{e.layout}, "
                      "but their contents differ",
                      e)


def _move(t: Tables, e: Offload | Onload) -> Iterator[Diagnostic]:
    copy = {f"{e.model}@{e.layout}"}
    if e.part == "optimizer" and t.models[e.model].train_layout != e.layout:
        yield problem("RL0615", f"{name(e)} moves an optimizer state, but {e.model}@{e.layout} has none", e)
    if not ({*e.reads} <= copy and {*e.writes} <= copy):
        yield problem("RL0614", f"{name(e)} may use only {e.model}@{e.layout}", e)
    if e.part == "parameters" and any(isinstance(x, Load) and x.alias_of and x.model == e.model
                                      and e.layout in (x.alias_of, x.layout) for x, _ in t.events):
        yield problem("RL0615", f"{name(e)} moves {e.model}@{e.layout}, which another layout also uses", e)


def _exchange(t: Tables, e: Lengths) -> Iterator[Diagnostic]:
    read = {split_buffer(b)[0] for b in e.reads}
    if len(e.writes) != 1 or not _is_all(t, e.writes[0], f"{e.frame}.lengths"):
        yield problem("RL0614", f"{name(e)} must write {e.frame}.lengths for every row, not {e.writes}", e)
    if e.reads == (f"{e.frame}.lengths@{e.spread}",):  # of what a loop has collected, from the ranks that know them all
        if t.spreads[e.spread].granularity != "all" or e.reads == e.writes:
            yield problem("RL0614", f"{name(e)} must read the lengths of all rows of {e.frame}, and write them in "
                          "another spread", e)
        return
    yield from calls.reads(t, e, {f"{e.frame}.tokens"} & read, calls.own(e.frame), e.spread)
    if not e.reads or t.spreads[e.spread].granularity == "all":
        yield problem("RL0614", f"{name(e)} must read {e.frame}.tokens in a spread that divides rows", e)


def _log(t: Tables, e: Log) -> Iterator[Diagnostic]:
    if {*e.reads} != {b for _, b in e.metrics} or e.writes or not e.metrics:
        yield problem("RL0614", f"{name(e)} must read exactly the buffers of its metrics", e)
    for _, buffer in e.metrics:
        v = t.values.get(split_buffer(buffer)[0])
        if v is None or v.level != "batch":
            yield problem("RL0615", f"{name(e)} logs {buffer}, which is not a batch-level value", e)


def _free(t: Tables, e: Free) -> Iterator[Diagnostic]:
    if not e.buffers or e.writes or e.reads not in ((), e.buffers) or len({*e.buffers}) != len(e.buffers):
        yield problem("RL0614", f"{name(e)} must free distinct buffers and use no others", e)
    if lost := [b for b in e.buffers if split_buffer(b)[0] in t.models and not _can_be_restored(t, *split_buffer(b))]:
        yield problem("RL0615", f"{name(e)} frees parameters that no realloc restores ({', '.join(lost)}); use offload",
                      e)


def _can_be_restored(t: Tables, model: str, layout: str) -> bool:
    """Whether a realloc can restore a freed copy: it is not the trained one, is no alias, and has no base, which is on
    disk only."""
    m = t.models[model]
    is_alias = any(isinstance(e, Load) and e.alias_of and (e.model, e.layout) == (model, layout) for e, _ in t.events)
    return m.train_layout not in ("", layout) and not m.base and not is_alias


def _may_alias(t: Tables, e: Load) -> bool:
    """Whether the two layouts of a load may share the trained copy: each rank has the same cell in both (`MeshCells` is
    derived by the verifier, not taken from the compiler), and computes in the same dtype with the same backend."""
    m, layouts = t.models[e.model], t.layouts
    if e.alias_of not in layouts or e.alias_of != m.train_layout or e.layout == e.alias_of or m.base:
        return False
    a, b = layouts[e.alias_of], layouts[e.layout]
    if a.zero or b.zero or (a.pp, a.vpp, a.ep, a.tp, a.backend) != (b.pp, b.vpp, b.ep, b.tp, b.backend):
        return False
    rounded = m.dtype != "float32" and m.ema_layout != b.id
    return not rounded and MeshCells.of(a, t.meshes[a.mesh]) == MeshCells.of(b, t.meshes[b.mesh])


def _checkpoint(t: Tables, e: Checkpoint) -> Iterator[Diagnostic]:
    """It is at the end of a step, and reads exactly what the next step needs of this one."""
    steps = t.plan.body[-1] if t.plan.body else None
    if not isinstance(steps, Loop) or not steps.body or steps.body[-1] is not e:
        yield problem("RL0529", f"{name(e)} is not at the end of the step", e)
    if e.every < 1 or e.keep_last < 1:
        yield problem("RL0529", f"{name(e)} runs every {e.every} steps and keeps {e.keep_last}", e)
    must = {f"{m.name}@{m.train_layout}" for m in t.plan.models if m.train_layout}
    until = steps.until if isinstance(steps, Loop) else ""
    if e.until != until:
        yield problem("RL0529", f"{name(e)} is the last one where {e.until or 'nothing'} is true, but the steps end on "
                                f"{until or 'nothing'}", e)
    must |= {*t.plan.lasting, *([until] if until else [])}
    follow = {m.name for m in t.plan.models if m.updated_from}
    copies = [split_buffer(b)[0] for b in e.reads if split_buffer(b)[0] in follow and split_buffer(b)[1] in t.layouts]
    if {b for b in e.reads if split_buffer(b)[0] not in follow} != must or sorted(copies) != sorted(follow) or e.writes:
        expected = ", ".join(sorted(must | follow)) or "nothing"
        found = ", ".join(e.reads) or "nothing"
        yield problem("RL0529", f"{name(e)} must read exactly {expected}, but reads {found}", e)


def _realloc(t: Tables, e: Realloc) -> Iterator[Diagnostic]:
    source, copy = e.source or e.model, f"{e.model}@{e.dst}"
    yield from _exactly(e, (f"{source}@{e.src}", *([copy] if e.decay else [])), (copy,))
    if e.src == e.dst and not e.source:
        yield problem("RL0615", f"{name(e)} moves from layout {e.src} to itself", e)
    if e.source == e.model or not 0 <= e.decay <= 1 or not e.source and (e.decay or e.source_version):
        yield problem("RL0615", f"{name(e)} takes {e.source or 'no other model'} with decay {e.decay}, version "
                      f"{e.source_version!r}", e)
    average = t.models[e.model].ema_layout
    if e.decay and average != e.dst:
        yield problem("RL0615", f"{name(e)} averages under {e.dst}, but {e.model} keeps "
                      f"{'its average under ' + average if average else 'no average'}", e)
    mine, other = t.models[e.model], t.models[source]
    if _parts(mine) != _parts(other):
        yield problem("RL0615", f"{name(e)}: {e.model} and {source} have different parameters", e)


def _parts(m: Model) -> tuple[object, ...]:
    """What two models share between which parameters move."""
    return m.head_name, m.layers, m.params, m.base, (m.path, m.lora.alpha) if m.lora else None


def _exactly(e: Event, reads: tuple[str, ...], writes: tuple[str, ...]) -> Iterator[Diagnostic]:
    if e.reads != reads or e.writes != writes:
        yield problem(
            "RL0614",
            f"{name(e)} must read {list(reads)} and write {list(writes)}, but reads {list(e.reads)} and "
            f"writes {list(e.writes)}",
            e,
        )


def _is_all(t: Tables, buffer: str, value: str) -> bool:
    left, right = split_buffer(buffer)
    return left == value and right in t.spreads and t.spreads[right].granularity == "all"


def _fetch(t: Tables, e: Fetch) -> Iterator[Diagnostic]:
    # in a loop over its source it goes over it once: the rows beyond the end are then not there
    once = any(evaluations.over(path) == e.data for x, path in t.events if x is e)
    must = {f"{f}.{part}" for f in e.frames for part in ("tokens", "lengths")}
    values = [split_buffer(b)[0] for b in e.writes]
    data = t.data[e.data]
    more = {f"{f}.{part}" for f in e.frames for part in ("columns", *data.numbers, *([INDEX] if data.answers else ()))}
    drawn = {d.writes for d, _ in t.events if isinstance(d, Draw) and d.data == e.data}
    more |= set() if e.reads else {f"{e.frames[0]}.row_numbers"} if e.frames else set()
    if e.newest and (wrong := _wrong_batches(t, e)):
        yield problem("RL0615", f"{name(e)} reads batches of earlier steps, but {wrong}", e)
    if not e.newest and e.reads and (once or e.reads not in drawn) or not must <= {*values} <= must | more \
            or len({*values}) != len(values):
        yield problem("RL0614", f"{name(e)} must read nothing but drawn row numbers, and write tokens and lengths of "
                      f"{', '.join(e.frames)}", e)
    if any(
        split_buffer(b)[1] not in t.spreads
        or t.spreads[split_buffer(b)[1]].granularity != "all"
        or t.spread_ranks(split_buffer(b)[1]) != t.event_ranks(e)
        for b in e.writes
    ):
        yield problem("RL0614", f"{name(e)} must write all rows on every rank of its mesh", e)
    ends = (".chosen", ".rejected") if data.row_format == "pairs" else (f".{PROMPTS}", "") if data.answers else ("",)
    if len(e.frames) != len(ends) or not all(f.endswith(end) for f, end in zip(e.frames, ends, strict=True)):
        yield problem("RL0615", f"{name(e)}: {e.data} has no frames {', '.join(e.frames)}", e)
    for i, f in enumerate(e.frames):
        frame, of_each = t.frames[f], data.answers if i else 0  # answers to each prompt, which the first frame has
        shape = (frame.tokenizer, frame.present_in, frame.selected_from or frame.picked_from, frame.data,
                 frame.chain[0].parent, frame.count, frame.iterations)
        parent, rows = (t.frames[e.frames[0]].row_space, data.batch * of_each) if of_each else ("", data.batch)
        if not e.newest and shape != ("", f if once else "", "", e.data, parent, rows, 1):
            yield problem("RL0615", f"{name(e)} fetches frame {f}, which is not a batch of {e.data}", e)
        longest = 0 if data.answers and not i else data.max_answer_tokens
        if (frame.max_prompt_tokens, frame.max_response_tokens) != (data.max_prompt_tokens, longest):
            yield problem("RL0615", f"{name(e)} fetches frame {f}, whose limits are not those of {e.data}", e)
        for part in ("tokens", "lengths", "columns"):
            v = t.values.get(f"{f}.{part}")
            if v is not None and (v.frame, v.extent) != (f, part):
                yield problem("RL0615", f"{name(e)} writes {v.id}, which is not the {part} of {f}", e)


def _wrong_batches(t: Tables, e: Fetch) -> str:
    """What contradicts a fetch of the batches of several steps (`newest`); "" if nothing does. They are those of this
    step and of the steps before it, one for each iteration of their frame: the newest is what a fetch of the same step
    reads, and the stride is the number of batches that each step reads."""
    newest = t.frames[e.newest]
    source = [f for f, path in t.events if isinstance(f, Fetch) and e.newest in f.frames and not f.newest
              and f.data == e.data and len(path) == 1]
    if len(source) != 1 or len(e.frames) != 1 or newest.count != t.data[e.data].batch:
        return f"{e.newest} is not a batch of {e.data} that a step reads"
    if [split_buffer(b)[0] for b in e.reads] != [f"{e.newest}.lengths"]:
        return f"it must read the lengths of {e.newest} alone"
    plain = [path for f, path in t.events if isinstance(f, Fetch) and f.data == e.data and not f.newest
             and not any(isinstance(x, Loop) and x.over == e.data for x in path)]
    if any(len(path) != 1 for path in plain) or e.stride != len(plain):
        return f"its stride is {e.stride}, but a step reads {len(plain)} batches of {e.data}, or not the same number"
    frame = t.frames[e.frames[0]]
    shape = (frame.row_space, frame.present_in, frame.tokenizer, frame.chain[0].parent, frame.data,
             frame.selected_from or frame.picked_from, frame.count)
    if shape != (frame.id, frame.id, "", "", e.data, "", newest.count * frame.iterations):
        return f"frame {frame.id} does not have {frame.iterations} batches of {e.data}"
    return "" if t.at_top(e) else "it is in a block"


def _transfer(t: Tables, e: Transfer) -> Iterator[Diagnostic]:
    must = tuple(f"{v}@{e.src}" for v in e.values)
    extra = [b for b in e.reads if b not in must]
    if (
        not e.values
        or not {*must} <= {*e.reads}
        or len({*e.reads}) != len(e.reads)
        or any(
            split_buffer(b)[1] not in t.spreads or t.spreads[split_buffer(b)[1]].granularity != "all"
            or not b.startswith(f"{v}.lengths@")
            for b in extra
            for v in {t.values[x].frame for x in e.values}
        )
        or len({*e.values}) != len(e.values)
    ):
        yield problem("RL0614", f"{name(e)} must read {', '.join(must)}, and may read only lengths otherwise", e)
    if {*e.writes} != {f"{v}@{e.dst}" for v in e.values} or len(e.writes) != len(e.values):
        yield problem("RL0614", f"{name(e)} must write its values in spread {e.dst}", e)
    if e.src == e.dst:
        yield problem("RL0615", f"{name(e)} moves from spread {e.src} to itself", e)
    if len({t.values[v].frame for v in e.values}) > 1:
        yield problem("RL0615", f"{name(e)} moves values of several frames", e)
    if local := [v for v in e.values if t.values[v].extent in NEVER_SENT]:
        yield problem("RL0615", f"{name(e)} moves {', '.join(local)}, which is local to each rank", e)


def _rows(t: Tables) -> Iterator[Diagnostic]:
    """A value exists only in spreads that divide its own rows."""
    for event, _ in t.events:
        for buffer in event.writes:
            left, right = split_buffer(buffer)
            if left in t.values and not _divides(t, t.values[left], right):
                yield problem("RL0615", f"{name(event)} writes {buffer}, but spread {right} divides other rows", event)


def _divides(t: Tables, v: Value, spread: str) -> bool:
    s = t.spreads[spread]
    if s.granularity == "all" or v.level == "batch" or not s.frames:
        return True
    frame, divided = t.frames[v.frame], t.frames[s.frames[0]]
    unit = divided.prompt_origin if s.granularity == "prompt" else divided.row_origin
    if frame.among(divided) is not None:  # the rows of its parts are on their way into a concatenation
        return unit == divided.root_origin and v.level != "prompt"
    rows = frame.origins[frame.prompt_index if v.level == "prompt" else 0:]
    return unit in rows or v.level == "prompt" and rows[0] == divided.prompt_origin


# What is particular to a kind: every kind whose traits do not say what it reads and writes is here.
RULES: Mapping[type[Event], Callable[[Tables, Any], Iterator[Diagnostic]]] = {
    Load: _load, Offload: _move, Onload: _move, Realloc: _realloc, Lengths: _exchange, Transfer: _transfer,
    Generate: generation.check_generate, Infer: calls.check_infer, Train: calls.check_train,
    Compute: calls.check_compute, Derive: derive.check_derive, Collect: collect.check_collect,
    Checkpoint: _checkpoint, Log: _log, Free: _free, Fetch: _fetch, Draw: row_states.check_draw,
    Lookup: row_states.check_lookup, Update: row_states.check_update, Store: replay.check_store,
    Sample: replay.check_sample,
}
