"""What each event does on each rank of its mesh. In: the world and a moment. Out: changed ranks, or `Garbage`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

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
    Offload,
    Onload,
    Realloc,
    Sample,
    Save,
    Store,
    Train,
    Transfer,
    Update,
    split_buffer,
)
from rldsl.plan.expr import Node, Program
from rldsl.plan.function import frames_of_call
from rldsl.plan.model import Value
from rldsl.sharding import partition
from tests.verify.arithmetic import ROWS, need
from tests.verify.moment import Moment, kept, lasting_models

if TYPE_CHECKING:
    from tests.verify.stepper import Rank, World

NUMBERS = ("f32", "i64", "bool")


def act(w: World, e: Event, now: Moment) -> None:
    ACTS[type(e)](w, e, now)


def _here(w: World, e: Event) -> list[Rank]:
    return [w.ranks[r] for r in w.members[e.mesh]]


def _fetch(w: World, e: Fetch, now: Moment) -> None:
    spreads = dict(split_buffer(b) for b in e.writes)
    for rank in _here(w, e):
        if e.reads:
            w.holds(rank, e.reads[0], frozenset(range(w.story.data[e.data].batch)), now)
        elif now.stamp not in w.story.moments_over:
            need(rank.fetched[e.data] == now.times, f"rank {rank.number} reads another batch of {e.data}")
            rank.fetched[e.data] += 1
        for f in e.frames:
            rank.lens[f] = (now.stamp, None)
        for value, spread in spreads.items():
            if (value, now.stamp) in w.story.made:
                rank.buffers[f"{value}@{spread}"] = (now.stamp, frozenset(w.story.made[value, now.stamp].of))


def _draw(w: World, e: Draw, now: Moment) -> None:
    w.communicates(w.members[e.mesh])
    for rank in _here(w, e):
        for _, v in e.inputs:
            w.reads(rank, e, v, frozenset({0}), now)
        (drawn,) = e.writes
        rank.buffers[drawn] = (now.stamp, frozenset(range(w.story.frames[e.frame].count)))


def _lookup(w: World, e: Lookup, now: Moment) -> None:
    ids = frozenset(w.story.made[e.value, now.stamp].of)
    for rank in _here(w, e):
        w.reads(rank, e, f"{e.frame}.row_numbers", ids, now)
        w.reads(rank, e, e.state, frozenset({0}), now)
        (made,) = e.writes
        need(split_buffer(made)[0] == e.value, "a number under the name of another")
        rank.buffers[made] = (now.stamp, ids)


def _update(w: World, e: Update, now: Moment) -> None:
    ids = frozenset(now.values[e.value].of)
    for rank in _here(w, e):
        w.reads(rank, e, e.value, ids, now)
        w.reads(rank, e, f"{e.frame}.row_numbers", ids, now)
        w.reads(rank, e, e.state, frozenset({0}), now)
        (own,) = e.writes
        need(split_buffer(own)[0] == e.state, "another state")
        rank.buffers[own] = (now.stamp, frozenset({0}))


def _store(w: World, e: Store, now: Moment) -> None:
    f = w.story.frames[e.frame]
    rows = frozenset(w.story.rows(e.frame, now.lens))
    for rank in _here(w, e):
        w.knows(rank, e.frame, None, now)
        if f.present_in:
            w.knows(rank, f.present_in, None, now)
        for v, _ in e.values:
            w.reads(rank, e, v, rows, now)
        w.reads(rank, e, e.buffer, frozenset({0}), now)
        (own,) = e.writes
        need(split_buffer(own)[0] == e.buffer, "another buffer")
        rank.buffers[own] = (now.stamp, frozenset({0}))
    need({r for r in range(len(w.ranks)) if any(split_buffer(b)[0] == e.buffer for b in w.ranks[r].buffers)}
         <= set(w.members[e.mesh]), "a rank whose buffer lacks rows")


def _sample(w: World, e: Sample, now: Moment) -> None:
    spreads = dict(split_buffer(b) for b in e.writes)
    for rank in _here(w, e):
        w.reads(rank, e, e.buffer, frozenset({0}), now)
        rank.lens[e.frame] = (now.stamp, None)
        for _, v in e.values:
            rank.buffers[f"{v}@{spreads[v]}"] = (now.stamp, frozenset(w.story.made[v, now.stamp].of))


def _lengths(w: World, e: Lengths, now: Moment) -> None:
    s = w.story.spreads[e.spread]
    if s.granularity == "all":  # of what a loop has collected: the first rank tells
        first = w.members[s.mesh][0]
        need(first in w.members[e.mesh], "lengths of ranks that do not take part")
        w.knows(w.ranks[first], e.frame, w.story.rows(e.frame, now.lens), now)
        w.communicates(w.members[e.mesh])
        for rank in _here(w, e):
            rank.lens[e.frame] = (now.lens[e.frame].stamp, None)
        return
    x = w.story.layouts[s.layout]
    mesh = w.story.meshes[x.mesh]
    need(set(mesh.members()) <= set(w.members[e.mesh]), "lengths of ranks that do not take part")
    told: list[int] = []
    for group in w.lines(s.layout, "dp"):
        if group[0] == mesh.members()[0]:  # the first rank of each shard
            for r in group:
                rows = w.my_rows(w.ranks[r], s, e.frame, now)
                w.knows(w.ranks[r], e.frame, rows, now)
                told += rows
    need(sorted(told) == sorted(w.story.rows(e.frame, now.lens)), "lengths that are told twice, or never")
    w.communicates(w.members[e.mesh])
    for rank in _here(w, e):
        rank.lens[e.frame] = (now.lens[e.frame].stamp, None)


def _transfer(w: World, e: Transfer, now: Moment) -> None:
    src, dst = w.story.spreads[e.src], w.story.spreads[e.dst]
    a, b, here = w.members[src.mesh], w.members[dst.mesh], set(w.members[e.mesh])
    need(set(a) | set(b) <= here, "a rank would send to one that does not take part")
    for name in e.values:
        v = w.story.records[name]
        need(v.dtype in NUMBERS, f"{name} cannot travel")
        if v.level != "batch":
            for rank in _here(w, e):
                w.knows_division(rank, src, v.frame, now)
                w.knows_division(rank, dst, v.frame, now)
        have = {r: w.ids(r, src, v, now) for r in a}
        want = {r: w.ids(r, dst, v, now) for r in b}
        for r in a:
            w.holds(w.ranks[r], f"{name}@{e.src}", have[r], now)
        moves = partition.row_moves(have, want, w.plan.header.devices_per_node)
        if v.extent in ("tokens", "response"):
            for m in moves:
                w.knows(w.ranks[m.dst], v.frame, frozenset(m.rows), now)
        for r in b:
            w.ranks[r].buffers[f"{name}@{e.dst}"] = (now.values[name].stamp, want[r])


def _generate(w: World, e: Generate, now: Moment) -> None:
    s, f = w.story.spreads[e.spread], w.story.frames[e.frame]
    need(w.story.layouts[e.layout].cp == 1, "a token that is divided")
    rows = _model_call(w, e, e.frame, now)
    need(e.mbs >= 0, "a negative number of sequences")
    for rank in _here(w, e):
        asked = frozenset(r // f.per_prompt for r in rows[rank.number])
        w.knows(rank, e.prompts, asked, now)
        w.reads(rank, e, f"{e.prompts}.tokens", asked, now)
        rank.lens[e.frame] = (now.stamp, rows[rank.number])
        if e.cache_of:
            of, mine = w.story.frames[e.cache_of], w.my_rows(rank, s, e.cache_of, now)
            w.reads(rank, e, f"{e.cache_of}.cache", frozenset(r // (f.count // of.count) for r in rows[rank.number]), now)
            cached = next(rank.buffers[b][1] for b in e.reads if b.startswith(f"{e.cache_of}.cache@"))
            need(cached == mine, "a cache whose rows are counted differently")
        for part in ("tokens", "logprobs", "finished", *(["cache"] if f"{e.frame}.cache@{s.id}" in e.writes else [])):
            rank.buffers[f"{e.frame}.{part}@{s.id}"] = (now.stamp, rows[rank.number])


def _fits(w: World, budget: int, *frames: str) -> None:
    """Rows are not cut."""
    found = [w.story.frames[f] for f in frames]
    longest = sum(f.max_prompt_tokens + f.max_response_tokens for f in found)
    need(budget == 0 or budget >= longest, "a micro-batch that a row does not fit into")


def _infer(w: World, e: Infer, now: Moment) -> None:
    rows = _model_call(w, e, e.frame, now)
    need(e.mbs >= 0, "a negative number of sequences")
    _fits(w, e.mbt, e.frame)
    for rank in _here(w, e):
        w.knows(rank, e.frame, rows[rank.number], now)
        w.reads(rank, e, f"{e.frame}.tokens", rows[rank.number], now)
        rank.buffers[f"{e.value}@{e.spread}"] = (now.stamp, rows[rank.number])


def _train(w: World, e: Train, now: Moment) -> None:
    s, x = w.story.spreads[e.spread], w.story.layouts[e.layout]
    model = w.story.owners[e.model]
    need(e.layout == model.train_layout and e.mbs >= 0, "a copy that cannot be trained")
    need(s.layout and w.story.layouts[s.layout].dp == x.dp and s.granularity == "row", "minibatches of other shards")
    _fits(w, e.mbt, *e.frames)
    rows = _model_call(w, e, e.frames[0], now)
    for f in e.frames:
        for rank in _here(w, e):
            w.knows(rank, f, None, now)  # counts of the whole minibatch
            mine = w.my_rows(rank, s, f, now)
            need(mine == rows[rank.number], "frames that are divided apart")
            w.reads(rank, e, f"{f}.tokens", mine, now)
    need(not any((e.model, e.layout) in r.parked for r in _here(w, e)), "an optimizer's state that is elsewhere")
    for rank in _here(w, e):
        for v in (*(v for _, v in e.data_inputs), *([e.rate] if e.rate else [])):
            record, f = w.story.records[v], w.story.frames[e.frames[0]]
            mine = frozenset(kept(record, tuple(rows[rank.number]), f))
            w.reads(rank, e, v, mine, now)
        rank.shards[e.model, e.layout] = now.stamp
        for _, v in e.outputs:
            need(w.story.records[v].extent == "batch", "a metric of training has one number")
            rank.buffers[f"{v}@{s.id}"] = (now.stamp, frozenset({0}))


def _model_call(w: World, e: Any, frame: str, now: Moment) -> dict[int, frozenset[int]]:
    """The rows of each rank; those that hold parts of one copy of the model have the same."""
    w.on_layout(e, e.layout)
    s = w.story.spreads[e.spread]
    rows = {r.number: w.my_rows(r, s, frame, now) for r in _here(w, e)}
    for group in w.lines(e.layout, "dp"):
        need(s.granularity != "all" or len(group) == 1, "every shard would work on every row")
    for axis in ("tp", "pp", "cp"):
        for group in w.lines(e.layout, axis):
            need(len({rows[r] for r in group}) == 1, "parts of one copy work on different rows")
    for rank in _here(w, e):
        w.uses(rank, e.model, e.layout, now)
    return rows


def _compute(w: World, e: Compute, now: Moment) -> None:
    s, program = w.story.spreads[e.spread], w.story.programs[e.program]
    ranks = _here(w, e)
    need(set(w.members[e.mesh]) == set(w.members[s.mesh]), "a computation of other ranks")
    own = {f: [w.my_rows(r, s, f, now) for r in ranks] for f in e.frames}
    over_batch = [n for n in program.nodes if n.attr("to") == "batch" or n.op == "quantile"]
    if over_batch or any(n.op == "py" for n in program.nodes):
        for f, mine in own.items():
            need(sum(map(len, mine)) == len(frozenset().union(*mine)), "a row on several ranks would count twice")
    if over_batch:
        w.communicates(w.members[s.mesh])
    for i, rank in enumerate(ranks):
        views = {f: own[f][i] for f in e.frames}
        if s.granularity != "all":
            _groups(w, program, rank, views, now)
        for f, rows in views.items():
            w.knows(rank, f, rows, now)
        for _, v in e.inputs:
            w.reads(rank, e, v, _ids(w, w.story.records[v], views), now)
        for n in program.nodes:
            if n.op == "table_rows":
                w.reads(rank, e, f"{n.attr('frame')}.tokens", views[str(n.attr("frame"))], now)
            if n.op == "py":
                frame = str(n.attr("frame"))
                _python(w, e, rank, frame, views[frame], frames_of_call(n.attrs), now)
        for output, v in e.outputs:
            need(w.story.records[v].width == _numbers(w, program.nodes[dict(program.outputs)[output]]), "too few numbers")
            rank.buffers[f"{v}@{s.id}"] = (now.stamp, _ids(w, w.story.records[v], views))


def _numbers(w: World, n: Node) -> int:
    """How many numbers a value of a node has for each of its elements."""
    attrs = dict(n.attrs)
    if n.op == "histogram":
        return 5 + int(attrs["bins"])
    if n.op == "table_column":
        return int(attrs["rows"])
    if n.op == "table_rows":
        f = w.story.frames[str(attrs["frame"])]
        return int(attrs["rows"]) * (3 + f.max_prompt_tokens + f.max_response_tokens)
    return 1


def _groups(w: World, program: Program, rank: Rank, views: dict[str, frozenset[int]], now: Moment) -> None:
    """All rows that one number is made of are at hand: what is reduced, siblings, prefixes."""
    known = w.story.frames
    wanted: set[tuple[str, str]] = set()  # frame, space
    for n in program.nodes:
        args = [program.nodes[a] for a in n.args]
        space = n.space if n.attr("to") in ("seq", "prompt") or n.op == "last_row" else ""
        if n.op in ROWS and n.op not in ("over", "last_row"):
            space = next(known[f].prompt_space for f in views if known[f].row_space == args[0].space)
        if n.op == "along":
            space = known[n.space].row_space
        if n.op == "over":
            space = next(o for f in views for x, o in zip(known[f].chain, known[f].origins) if x.id == n.space)
        if space and not (args[0].level == "token" and args[0].space in views and space == known[args[0].space].row_space):
            fine = {f for f in views if args[0].space in (f if args[0].level == "token" else known[f].row_space,)}
            wanted |= {(f, space) for f in fine}
    for f, space in wanted:
        ids: set[int] = set()
        for other, rows in views.items():
            for x, o in zip(known[other].chain, known[other].origins):
                if space in (x.id, o):
                    ids |= {r // (known[other].count // x.count) for r in rows}
        w.all_below(rank, f, space, views[f], now, ids)


def _python(w: World, e: Compute | Derive, rank: Rank, frame: str, rows: frozenset[int],
            given: tuple[tuple[str, str], ...], now: Moment) -> None:
    """What a function gets: the sequences that rows lie in, those that there are, and the columns of their data."""
    f = w.story.frames[frame]
    for _, of in given:
        above = w.story.frames[of]
        need(above.row_space in [s.id for s in f.chain], "an argument of other rows")
        wanted = frozenset(r // (f.count // above.count) for r in rows) & {*w.story.rows(of, now.lens)}
        w.knows(rank, of, wanted, now)
        w.reads(rank, e, f"{of}.tokens", wanted, now)
    columns = [v for v in w.plan.values if v.extent == "columns" and w.story.frames[v.frame].row_space == f.root_origin]
    for v in columns[:1]:
        w.reads(rank, e, v.id, frozenset(r // (f.count // f.chain[-1].count) for r in rows), now)


def _ids(w: World, v: Value, views: dict[str, frozenset[int]]) -> frozenset[int]:
    if v.extent in ("batch", "array"):
        return frozenset({0})
    known = w.story.frames
    of = known[v.frame]
    f = v.frame if v.frame in views else next(
        f for f in views if (known[f].prompt_space == of.prompt_space if v.extent == "prompt" else known[f].row_space == of.row_space))
    return frozenset(kept(v, tuple(views[f]), known[f]))


def _derive(w: World, e: Derive, now: Moment) -> None:
    s, f = w.story.spreads[e.spread], w.story.frames[e.frame]
    made = w.story.derived[e.frame, now.stamp].of
    need(set(w.members[e.mesh]) == set(w.members[s.mesh]), "a selection of other ranks")
    parts = e.parts if e.op in ("concat", "whole") else (e.source,)
    calls: list[int] = []
    for rank in _here(w, e):
        if e.op == "restrict":
            mine, own = w.my_rows(rank, s, e.frame, now), {}
        else:
            own = {p: w.my_rows(rank, s, p, now) for p in parts}
            mine = frozenset(n for n, (p, r) in made.items() if r in own[p])
            for p in parts:
                w.knows(rank, p, own[p], now)
            rank.lens[e.frame] = (now.stamp, mine)
        if e.op in ("pick", "others"):
            w.all_below(rank, e.source, w.story.frames[e.source].prompt_space, own[e.source], now)
        if e.key:
            w.reads(rank, e, e.key, own[e.source], now)
        if e.op == "text":
            calls += own[e.source]
            _python(w, e, rank, e.source, own[e.source], e.given, now)
        if e.op in ("prefixes", "reprompt"):
            w.reads(rank, e, f"{e.source}.tokens", own[e.source], now)
        if e.op == "reprompt":
            each = f.count // w.story.frames[e.parts[0]].count
            w.reads(rank, e, f"{e.parts[0]}.tokens", frozenset(r // each for r in own[e.source]), now)
        for p in e.parts if e.op == "whole" else ():
            each = f.count // w.story.frames[p].count
            w.reads(rank, e, f"{p}.logprobs", frozenset(r // each for r in own[e.source]), now)
        sources = {new: [v for v, x in e.values if x == new] for _, new in e.values}
        for new, held in sources.items():
            ids = frozenset(kept(w.story.records[new], tuple(mine), f))
            if e.op not in ("text", "prefixes", "reprompt"):
                for v, p in zip(held, e.parts if e.op == "concat" else (e.source,)):
                    w.reads(rank, e, v, ids if w.story.records[v].extent == "prompt" or e.op == "restrict" else
                            frozenset(r for n in mine for x, r in (made[n],) if x == p), now)
            rank.buffers[f"{new}@{s.id}"] = (now.stamp, ids)
    need(len(calls) == len({*calls}), "a function that is called twice for a row")
    if e.op != "restrict":
        have = {n for r in _here(w, e) for n in r.lens[e.frame][1] or ()}
        need(have == made.keys(), "rows that no rank makes")


def _collect(w: World, e: Collect, now: Moment) -> None:
    f = w.story.frames[e.frame]
    for rank in _here(w, e):
        for v, collected in e.values:
            record, buffer = w.story.records[v], f"{collected}@{e.dst}"
            if record.extent == "lengths":
                w.knows(rank, e.frame, None, now)
                w.knows(rank, e.into, None, now)
                rank.lens[e.into] = (now.stamp, None)
                continue
            stamp, mine = rank.buffers[buffer]
            need(stamp == now.values[collected].stamp, "appended to something else")
            _, more = rank.buffers[f"{v}@{e.src}"]
            w.holds(rank, f"{v}@{e.src}", more, now)
            shift = now.turn * (f.count // f.per_prompt if record.extent == "prompt" else f.count)
            rank.buffers[buffer] = (now.stamp, mine | {i + shift for i in more})


def _load(w: World, e: Load, now: Moment) -> None:
    w.on_layout(e, e.layout)
    for rank in _here(w, e):
        rank.shards.setdefault((e.model, e.layout), -1)
        if e.alias_of:
            need((e.model, e.alias_of) in rank.shards, "the same as what is not there")
            rank.one[e.model, e.layout] = e.model, e.alias_of


def _realloc(w: World, e: Realloc, now: Moment) -> None:
    src, dst = (w.members[w.story.layouts[x].mesh] for x in (e.src, e.dst))
    source, target = w.story.owners[e.source or e.model], w.story.owners[e.model]
    need(source.params == target.params and source.layers == target.layers, "parameters of other shapes")
    need(0 <= e.decay <= 1 and (e.source or not e.decay), "a mean of one version")
    need(e.source or e.src != e.dst, "parameters that would be sent to where they are")
    need({*src, *dst} <= {*w.members[e.mesh]}, "a rank would send to one that does not take part")
    for r in src:
        w.uses(w.ranks[r], source.name, e.src, now)
    stamp = now.stamp if e.source else now.models[e.model][0]
    for r in dst:
        rank = w.ranks[r]
        if e.decay:
            w.uses(rank, e.model, e.dst, now)
        need((e.model, e.dst) not in rank.away, "parameters arrive where there is no room for them")
        rank.shards[e.model, e.dst] = stamp


def _save(w: World, e: Save, now: Moment) -> None:
    w.on_layout(e, e.layout)
    w.communicates(w.members[e.mesh])
    for rank in _here(w, e):
        w.uses(rank, e.model, e.layout, now)


def _checkpoint(w: World, e: Checkpoint, now: Moment) -> None:
    need(len(w.members[e.mesh]) == len(w.ranks), "a rank that does not know that the run ends")
    w.communicates(w.members[e.mesh])
    kept_models = set()
    for b in e.reads:
        name, where = split_buffer(b)
        if where in w.story.layouts:
            for r in w.members[w.story.layouts[where].mesh]:
                w.uses(w.ranks[r], name, where, now, anywhere=True)
            if not w.story.owners[name].train_layout or w.story.owners[name].train_layout == where:
                kept_models.add(name)
        else:
            for r in w.members[w.story.spreads[where].mesh]:
                w.holds(w.ranks[r], b, frozenset({0}), now)
    need(set(lasting_models(w.plan)) <= kept_models, "a model that a restart would lose")
    need({f"{s.value}@{s.spread}" for s in (*w.plan.states, *w.plan.buffers)} <= {*e.reads}, "a state that a restart would lose")


def _log(w: World, e: Log, now: Moment) -> None:
    here = w.members[e.mesh]
    need(e.to in here and e.metrics, "nobody listens")
    for _, b in e.metrics:
        first = w.members[w.story.spreads[split_buffer(b)[1]].mesh][0]
        need(first in here, "a rank that would be waited for does not take part")
        need(w.story.records[split_buffer(b)[0]].level == "batch", "a metric of many numbers")
        w.holds(w.ranks[first], b, frozenset({0}), now)


def _free(w: World, e: Free, now: Moment) -> None:
    for rank in _here(w, e):
        for b in e.buffers:
            rank.buffers.pop(b, None)
            if (copy := split_buffer(b)) in rank.shards:
                need(copy not in rank.away, "parameters are dropped that are elsewhere")
                del rank.shards[copy]


def _side(w: World, e: Offload | Onload, now: Moment) -> None:
    for rank in _here(w, e):
        key = (e.model, e.layout)
        need(key in rank.shards, f"rank {rank.number} has no {e.model}@{e.layout}")
        away = rank.away if e.part == "parameters" else rank.parked
        need(e.part == "parameters" or key not in rank.away, "gradients without parameters")
        (away.add if isinstance(e, Offload) else away.discard)(key)


ACTS: dict[type[Event], Callable[[Any, Any, Moment], None]] = {
    Fetch: _fetch, Draw: _draw, Lookup: _lookup, Update: _update, Store: _store, Sample: _sample,
    Lengths: _lengths, Transfer: _transfer, Generate: _generate, Infer: _infer, Train: _train,
    Compute: _compute, Derive: _derive, Collect: _collect, Load: _load, Realloc: _realloc, Save: _save,
    Checkpoint: _checkpoint, Log: _log, Free: _free, Offload: _side, Onload: _side,
}
