"""Replay buffers: rows are stored and sampled as the record of the buffer says, in the order of the program.

In: tables with sound references. Out: diagnostics RL0614 (reads and writes), RL0615 (fields that contradict each
other), RL0528 (out of order, or nothing is ever stored). Rules: a buffer is on every rank; what is stored and sampled
has its fields, limits, temperature and tokenizer, and whole rows; each event names the one that stored rows before it;
nothing else reads or writes a buffer.
"""

from __future__ import annotations

from collections.abc import Iterator

from rldsl.diag import Diagnostic
from rldsl.plan.events import Checkpoint, Sample, Store, When, split_buffer
from rldsl.plan.model import ReplayBuffer
from rldsl.plan.spaces import IndexedFrame
from rldsl.verify.tables import Tables, name, problem

LEVELS = {"tokens": "token", "response": "token", "row": "seq"}
STANDARD = {"tokens": ("tokens", "i64"), "logprobs": ("response", "f32"), "finished": ("row", "bool")}


def check_buffers(t: Tables) -> Iterator[Diagnostic]:
    """The records, the order of stores and samples, and that nothing else uses a buffer."""
    known = {b.value: b for b in t.plan.buffers}
    world = t.plan.header.world
    for b in known.values():
        if fault := _record(t, b, world):
            yield problem("RL0612", f"replay buffer {b.value} {fault}")
    stored = {v.id for v in t.plan.values if v.extent == "stored"}
    if stray := sorted(stored - known.keys()):
        yield problem("RL0612", f"value {stray[0]} stands for stored rows, but there is no such replay buffer")
    made: dict[str, str] = {}  # buffer -> position of what stored rows last
    for e, path in t.events:
        if isinstance(e, Store | Sample) and e.buffer in known:
            if e.version != made.get(e.buffer, ""):
                yield problem(
                    "RL0528", f"{name(e)} must come after the rows from {e.version or 'before the step'}, but comes "
                    f"after those from {made.get(e.buffer) or 'before the step'}", e, ranks=t.event_ranks(e))
            if any(not isinstance(block, When) for block in path[1:]) or not path:
                yield problem("RL0615", f"{name(e)} runs several times in a step, or outside the steps", e)
        if isinstance(e, Store):
            made[e.buffer] = e.at
        elif not isinstance(e, Sample | Checkpoint) and (
                used := [b for b in (*e.reads, *e.writes, *e.frees) if split_buffer(b)[0] in stored]):
            yield problem("RL0615", f"{name(e)} uses {used[0]}, which only stores and samples may", e)
    for b in known.values():
        if b.value not in made:
            yield problem("RL0528", f"no event stores rows in replay buffer {b.value}")


def _record(t: Tables, b: ReplayBuffer, world: int) -> str:
    if len(t.spread_ranks(b.spread)) != world:
        return "is not on every rank"
    names = [f.name for f in b.fields]
    if b.capacity < 1 or min(b.max_prompt_tokens, b.max_response_tokens) < 0:
        return f"has capacity {b.capacity} and limits of {b.max_prompt_tokens} and {b.max_response_tokens} tokens"
    if len({*names}) != len(names) or "tokens" not in names or any(not n or "|" in n or n == "lengths" for n in names):
        return f"has the fields {', '.join(names) or 'none'}"
    for f in b.fields:
        wanted = STANDARD.get(f.name)
        if wanted and (f.extent, f.dtype) != wanted or not wanted and (f.dtype == "i64" or f.extent == "tokens"):
            return f"has a field {f.name} of extent {f.extent} in {f.dtype}"
    return ""


def check_store(t: Tables, e: Store) -> Iterator[Diagnostic]:
    b = next((b for b in t.plan.buffers if b.value == e.buffer), None)
    if b is None:
        yield problem("RL0615", f"{name(e)}: {e.buffer} is no replay buffer", e)
        return
    frame = t.frames[e.frame]
    if fault := _unlike(frame, b):
        yield problem("RL0615", f"{name(e)} stores rows of {e.frame}, {fault}", e)
    if [f for _, f in e.values] != [f.name for f in b.fields]:
        yield problem("RL0615", f"{name(e)} must store {', '.join(f.name for f in b.fields)}", e)
        return
    yield from _kinds(t, e, b, {f: v for v, f in e.values}, own_rows=False)
    buffer = f"{b.value}@{b.spread}"
    if e.writes != (buffer,):
        yield problem("RL0614", f"{name(e)} must write {buffer}", e)
    must = [*(v for v, _ in e.values), b.value]
    read = [split_buffer(x) for x in e.reads]
    if [v for v, _ in read] != must or any(t.spreads[s].granularity != "all" for _, s in read) \
            or e.reads[-1] != buffer:
        yield problem("RL0614", f"{name(e)} must read {', '.join(must)}, each on every rank", e)


def check_sample(t: Tables, e: Sample) -> Iterator[Diagnostic]:
    b = next((b for b in t.plan.buffers if b.value == e.buffer), None)
    if b is None:
        yield problem("RL0615", f"{name(e)}: {e.buffer} is no replay buffer", e)
        return
    frame = t.frames[e.frame]
    if fault := _unlike(frame, b):
        yield problem("RL0615", f"{name(e)} makes rows of {e.frame}, {fault}", e)
    if len(frame.chain) != 1 or frame.iterations != 1 or frame.present_in != e.frame or frame.selected_from \
            or frame.picked_from or not 1 <= frame.count <= b.capacity:
        yield problem("RL0615", f"{name(e)} makes frame {e.frame}, which is not one of at most {b.capacity} sampled "
                      "rows", e)
    if [f for f, _ in e.values] != [f.name for f in b.fields]:
        yield problem("RL0615", f"{name(e)} must sample {', '.join(f.name for f in b.fields)}", e)
        return
    yield from _kinds(t, e, b, dict(e.values), own_rows=True)
    if wrong := [v for f, v in e.values if v != f"{e.frame}.{f}"]:
        yield problem("RL0615", f"{name(e)} writes {wrong[0]} as a field of {e.frame}", e)
    states = {s.value: s for s in t.plan.states if not s.data}
    if wrong := [f for _, f in e.fields if (f, "row") not in {(x.name, x.extent) for x in b.fields}]:
        yield problem("RL0615", f"{name(e)} draws by {wrong[0]}, which is not a number of the rows of {b.value}", e)
    if wrong := [v for _, v in e.inputs if v not in states] or ([] if e.program else [v for v, _ in e.fields]):
        yield problem("RL0615", f"{name(e)} draws by {wrong[0]}, which is no state, or by no program", e)
        return
    must = (f"{b.value}@{b.spread}", *dict.fromkeys(f"{v}@{states[v].spread}" for _, v in e.inputs))
    if e.reads != must:
        yield problem("RL0614", f"{name(e)} must read {', '.join(must)}", e)
    made = [split_buffer(x) for x in e.writes]
    if [v for v, _ in made] != [*(v for _, v in e.values), f"{e.frame}.lengths"] or len({s for _, s in made}) != 1 \
            or any(t.spreads[s].granularity != "all" or t.spread_ranks(s) != t.event_ranks(e) for _, s in made):
        yield problem("RL0614", f"{name(e)} must write tokens, lengths and fields of {e.frame} on every rank of its "
                      "mesh", e)


def _unlike(frame: IndexedFrame, b: ReplayBuffer) -> str:
    """How the rows of a frame differ from those of a buffer; "" if they do not."""
    if (frame.max_prompt_tokens, frame.max_response_tokens) != (b.max_prompt_tokens, b.max_response_tokens):
        return f"whose limits are not those of {b.value}"
    if (frame.data, frame.tokenizer, frame.temperature) != (b.data, b.tokenizer, b.temperature):
        return f"whose data, tokenizer or temperature are not those of {b.value}"
    return ""


def _kinds(t: Tables, e: Store | Sample, b: ReplayBuffer, of: dict[str, str], own_rows: bool) -> Iterator[Diagnostic]:
    """Each value is of the rows of the event's frame, and of the kind of its field. own_rows: and of that frame."""
    frame = t.frames[e.frame]
    for f in b.fields:
        v = t.values[of[f.name]]
        mine = v.frame == e.frame or not own_rows and f.extent == "row" and v.frame in t.frames \
            and t.frames[v.frame].row_space == frame.row_space
        if not mine or (v.extent, v.dtype, v.level) != (f.extent, f.dtype, LEVELS.get(f.extent)):
            yield problem("RL0615", f"{name(e)}: {v.id} is not the field {f.name} of the rows of {e.frame}", e)
    if not own_rows and of["tokens"] != f"{e.frame}.tokens":
        yield problem("RL0615", f"{name(e)} stores {of['tokens']} as the tokens of {e.frame}", e)
