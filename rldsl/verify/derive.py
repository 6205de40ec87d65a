"""Derived frames: which rows and which values a `derive` event may make of those of another frame.

In: tables with sound references, a Derive. Out: diagnostics RL0614 (reads and writes) and RL0615 (fields that
contradict each other). Rules: it works on one spread that divides rows; it reads its values and its key there, and
writes what it makes there; new rows have tokens, from which their lengths are exchanged. `OPS` has what else holds for
each operation.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import get_args

from rldsl.diag import Diagnostic
from rldsl.plan.derive_ops import DERIVE_OPS, DeriveOpName, OverLong
from rldsl.plan.events import Collect, Derive, Generate, split_buffer
from rldsl.plan.model import SEQUENCE_VALUES
from rldsl.plan.spaces import IndexedFrame, common_parent, numberings, response_chain
from rldsl.verify.tables import Tables, name, problem

# What is wrong with the frame and the values that an operation makes, or "".
FrameRule = Callable[[Tables, Derive], str]


def check_derive(t: Tables, e: Derive) -> Iterator[Diagnostic]:
    yield from check_values(t, e)
    if any(t.values[v].extent in ("columns", "lengths", "cache") for v, _ in e.values):
        yield problem("RL0615", f"{name(e)} selects rows of a value that has no rows", e)
    if fault := OPS[e.op](t, e):
        yield problem("RL0615", f"{name(e)}: {fault}", e)
        return
    if not DERIVE_OPS[e.op].calls_python and (e.function or e.given or e.over_long != "error"):
        yield problem("RL0615", f"{name(e)}: {e.op} calls no function", e)
    if e.op not in ("whole", "concat", "reprompt") and e.parts:
        yield problem("RL0615", f"{name(e)}: {e.op} joins no frames", e)
    if e.op != "prefixes" and (e.cut_at or e.cut_every or e.cut_fractions):
        yield problem("RL0615", f"{name(e)}: {e.op} cuts nothing", e)
    if e.op != "text" and t.frames[e.frame].tokenizer != t.frames[e.source].tokenizer:
        yield problem("RL0615", f"{name(e)}: the tokens of {e.frame} and {e.source} have different tokenizers", e)
    yield from _key(t, e)
    if e.makes_rows and f"{e.frame}.tokens" not in [w for _, w in e.values]:
        yield problem("RL0614", f"{name(e)} must write {e.frame}.tokens", e)
    yield from _buffers(t, e)


def check_values(t: Tables, e: Derive | Collect) -> Iterator[Diagnostic]:
    """Each value becomes one of its own kind."""
    pairs = [(t.values[v], t.values[w]) for v, w in e.values]
    several = len(e.parts) if isinstance(e, Derive) and DERIVE_OPS[e.op].several else 1
    if not pairs or any(count != several for count in Counter(w for _, w in e.values).values()):
        yield problem("RL0614", f"{name(e)} must write at least one value, each only once", e)
    for v, w in pairs:
        if (v.level, v.extent, v.dtype) != (w.level, w.extent, w.dtype) or v.level == "batch":
            yield problem("RL0615", f"{name(e)} derives {w.id} from {v.id}, which is of another kind", e)
            continue  # a value of the batch has no frame
        turns = t.frames[v.frame].max_turns if not isinstance(e, Derive) or DERIVE_OPS[e.op].keeps_turns else 0
        if v.extent == "tokens" and (t.frames[w.frame].max_turns > 0) != (turns > 0):
            yield problem("RL0615", f"{name(e)}: {w.id} has {t.frames[w.frame].max_turns} turns, {v.id} {turns}", e)


def _key(t: Tables, e: Derive) -> Iterator[Diagnostic]:
    """What says which rows there are is a value of the rows of the source."""
    wanted = DERIVE_OPS[e.op].key
    if bool(e.key) != bool(wanted):
        yield problem("RL0615", f"{name(e)}: {e.op} " + ("needs a key" if wanted else "has no key"), e)
    elif e.key:
        key, source = t.values[e.key], t.frames[e.source]
        if (key.level, key.dtype) != ("seq", wanted) or t.frames[key.frame].row_space != source.row_space:
            what = "a condition" if wanted == "bool" else "a number"
            yield problem("RL0615", f"{name(e)}: {e.key} is not {what} per row of {e.source}", e)


def _buffers(t: Tables, e: Derive) -> Iterator[Diagnostic]:
    if t.spreads[e.spread].granularity == "all":
        yield problem("RL0615", f"{name(e)} uses spread {e.spread}, which does not divide rows", e)
    must = {v for v, _ in e.values} | ({e.key} if e.key else set()) | set(e.also_reads)
    read = [split_buffer(b) for b in e.reads]
    if {v for v, _ in read} != must or len(read) != len(must) or any(
            r != e.spread and (r not in t.spreads or t.spreads[r].granularity != "all") for _, r in read):
        yield problem("RL0614", f"{name(e)} must read {', '.join(sorted(must))} on spread {e.spread}", e)
    made = {f"{w}@{e.spread}" for _, w in e.values}
    if {*e.writes} != made or len(e.writes) != len(made):
        yield problem("RL0614", f"{name(e)} must write its values on spread {e.spread}", e)


# ------------------------------------------------------------------------------------------------- operations


def _where(t: Tables, e: Derive) -> str:
    frame = t.frames[e.frame]
    if frame.selected_from != e.source or frame.present_in != frame.id:
        return f"frame {e.frame} is not a selection of {e.source}, or does not record its rows"
    if fault := _same_kind(frame, t.frames[e.source]):
        return fault
    if wrong := [v for v, w in e.values if w == f"{e.frame}.tokens" and v != f"{e.source}.tokens"]:
        return f"{wrong[0]} is not the tokens of {e.source}"
    return _along(t, e, {f.id for f in _above(t, frame)})


def _restrict(t: Tables, e: Derive) -> str:
    frame = t.frames[e.frame]
    if not frame.selected_from or frame.selected_from != e.source:
        return f"frame {e.frame} is not a selection of {e.source}"
    return _along(t, e, {f.id for f in _above(t, frame)})


def _pick(t: Tables, e: Derive) -> str:
    frame, source = t.frames[e.frame], t.frames[e.source]
    if frame.picked_from != e.source or len(source.chain) < 2 or frame.row_space != source.prompt_space:
        return f"frame {e.frame} does not have a row for each prompt of {e.source}"
    if frame.present_in != (e.frame if _absent_by_row(t, source) else source.present_in):
        return f"frame {e.frame} does not record for which prompts of {e.source} it has a row"
    if fault := _same_kind(frame, source):
        return fault
    if wrong := [v for v, _ in e.values if t.values[v].level == "prompt" or t.values[v].frame != e.source]:
        return f"{wrong[0]} is not a value of each row of {e.source}"
    return _along(t, e, {e.source})


def _others(t: Tables, e: Derive) -> str:
    frame, source = t.frames[e.frame], t.frames[e.source]
    space = frame.chain[0]
    if frame.selected_from or frame.picked_from or len(source.chain) < 2 \
            or (space.parent, space.fan) != (source.row_space, source.per_prompt - 1):
        return f"frame {e.frame} does not have a row for each other row of the prompts of {e.source}"
    if frame.present_in != (e.frame if _absent_by_row(t, source) else source.present_in):
        return f"frame {e.frame} does not record which of its rows are present"
    if fault := _same_kind(frame, source):
        return fault
    if wrong := [v for v, _ in e.values if t.values[v].level == "prompt" or t.values[v].frame != e.source]:
        return f"{wrong[0]} is not a value of each row of {e.source}"
    return _along(t, e, {e.source})


def _whole(t: Tables, e: Derive) -> str:
    frame, source = t.frames[e.frame], t.frames[e.source]
    prompts_of = {g.frame: g.prompts for g, _ in t.events if isinstance(g, Generate)}
    if len(e.parts) < 2 or e.parts != response_chain(e.source, t.frames, prompts_of):
        return f"the parts of {e.frame} are not the continuations that lead to {e.source}"
    parts = [t.frames[p] for p in e.parts]
    if any(p.row_origin not in source.origins or p.temperature != frame.temperature for p in parts):
        return f"rows of {e.source} do not lie in all parts of {e.frame}, or these have different temperatures"
    if frame.row_space != source.row_space or frame.selected_from or frame.picked_from or frame.data != source.data \
            or frame.present_in != source.present_in:
        return f"frame {e.frame} does not have the rows of {e.source}"
    if frame.max_prompt_tokens != parts[0].max_prompt_tokens \
            or frame.max_response_tokens != sum(p.max_response_tokens for p in parts):
        return f"frame {e.frame} does not have the limits of its parts together"
    if e.also_reads != tuple(f"{p}.logprobs" for p in e.parts):
        return "it must read the log-probs of all parts"
    if wrong := [v for v, _ in e.values if v not in {f"{e.source}.{x}" for x in SEQUENCE_VALUES}]:
        return f"{wrong[0]} is not a value of whole sequences"
    return _along(t, e, {e.source})


def _same_kind(frame: IndexedFrame, source: IndexedFrame) -> str:
    """Whether the sequences of `frame` can be those of `source`: what is wrong, or ""."""
    kind = (source.data, source.temperature, source.max_prompt_tokens, source.max_response_tokens)
    if (frame.data, frame.temperature, frame.max_prompt_tokens, frame.max_response_tokens) == kind:
        return ""
    return f"frame {frame.id} has other limits, or another temperature or source of data, than {source.id}"


def _absent_by_row(t: Tables, frame: IndexedFrame) -> bool:
    """Whether some rows of a prompt may be absent and others not, so that a prompt may have none."""
    return bool(frame.present_in) and t.frames[frame.present_in].row_space == frame.row_space


def _text(t: Tables, e: Derive) -> str:
    frame, source, function = t.frames[e.frame], t.frames[e.source], t.functions.get(e.function)
    if function is None or not function.returns_text:
        return f"{e.function!r} is no function that returns prompts"
    if e.over_long not in get_args(OverLong):
        return f"over_long={e.over_long!r}"
    if frame.row_space != source.row_space or frame.data != source.data or frame.max_response_tokens \
            or frame.max_prompt_tokens < 1 or not frame.tokenizer or frame.selected_from or frame.temperature != 1:
        return f"frame {e.frame} is not one of prompts about the rows of {e.source}"
    partial = function.returns == "prompts?" or e.over_long == "drop"
    if frame.present_in != (frame.id if partial else source.present_in):
        return f"frame {e.frame} does not record which of its rows are present"
    if e.values != ((f"{e.source}.tokens", f"{e.frame}.tokens"),):
        return f"it derives more than {e.frame}.tokens"
    above = [s.id for s in source.chain]
    if not e.given or e.given[0][0] or any(not name for name, _ in e.given[1:]) \
            or any(t.frames[f].row_space not in above for _, f in e.given):
        return f"the rows of {e.source} do not lie in all that {e.function} gets"
    columns = [v.id for v in t.plan.values
               if v.extent == "columns" and t.frames[v.frame].row_space == source.root_origin]
    if sorted(e.also_reads) != sorted({*(f"{f}.tokens" for _, f in e.given if f != e.source), *columns}):
        return f"it must read the tokens of {', '.join(f for _, f in e.given)}, and the columns of their data"
    return ""


def _prefixes(t: Tables, e: Derive) -> str:
    frame, source = t.frames[e.frame], t.frames[e.source]
    if (frame.chain[0].parent, frame.selected_from, frame.picked_from) != (source.row_space, "", ""):
        return f"the rows of {e.frame} do not lie below those of {e.source}"
    most = source.max_prompt_tokens + source.max_response_tokens
    kind = (frame.data, frame.temperature, frame.max_prompt_tokens, frame.max_response_tokens)
    if not source.max_response_tokens or kind != (source.data, 1, most, 0):
        return f"frame {e.frame} is not one of the beginnings of the responses of {e.source}"
    if frame.present_in != e.frame:
        return f"frame {e.frame} does not record which of its rows are present"
    if e.values != ((f"{e.source}.tokens", f"{e.frame}.tokens"),):
        return f"it derives more than {e.frame}.tokens"
    fractions = e.cut_fractions
    if bool(e.cut_at) + (e.cut_every > 0) + bool(fractions) != 1 or e.cut_every < 0 \
            or any(not 0 < x < 1 for x in fractions) or list(fractions) != sorted({*fractions}):
        return f"it cuts at {e.cut_at!r}, every {e.cut_every} tokens and at {list(fractions)}"
    return ""


def _concat(t: Tables, e: Derive) -> str:
    if len({*e.parts}) != len(e.parts) or len(e.parts) < 2 or e.source != e.parts[0]:
        return f"it concatenates {', '.join(e.parts) or 'nothing'}, not at least two frames, the first {e.source}"
    frame, parts = t.frames[e.frame], [t.frames[p] for p in e.parts]
    if frame.selected_from or frame.picked_from or not _numbers_parts(frame, parts):
        return f"frame {e.frame} does not have the rows of all parts"
    if frame.present_in != (e.frame if any(p.present_in for p in parts) else ""):
        return f"frame {e.frame} does not record which of its rows are present"
    if len({(p.temperature, p.tokenizer or t.data[p.data].tokenizer) for p in (frame, *parts)}) > 1:
        return f"the parts of {e.frame} have different temperatures or tokenizers"
    if (frame.data, frame.max_prompt_tokens, frame.max_response_tokens) != (
            parts[0].data, max(p.max_prompt_tokens for p in parts), max(p.max_response_tokens for p in parts)):
        return f"frame {e.frame} does not have the limits of its parts"
    for made in dict.fromkeys(w for _, w in e.values):
        read = [v for v, w in e.values if w == made]
        own = [v for v in SEQUENCE_VALUES if made == f"{e.frame}.{v}"]
        if own and read != [f"{p}.{own[0]}" for p in e.parts]:
            return f"{made} is not made of the {own[0]} of each part, in order"
        if t.values[made].frame != e.frame or t.values[made].level not in ("seq", "turn", "token") or any(
                t.values[v].frame != p.id and (t.values[v].extent != "row"
                                               or t.frames[t.values[v].frame].row_space != p.row_space)
                for v, p in zip(read, parts, strict=False)):
            return f"{made} is not made of a value of the rows of each part, in order"
    return ""


def _reprompt(t: Tables, e: Derive) -> str:
    if len(e.parts) != 2 or e.parts[1] != e.source:
        return f"it has no frame of prompts, or other responses than those of {e.source}"
    frame, asked, source = t.frames[e.frame], t.frames[e.parts[0]], t.frames[e.source]
    if asked.max_response_tokens or asked.row_space not in [s.id for s in source.chain]:
        return f"the rows of {e.source} do not lie in {asked.id}, or this has responses"
    # a prompt that is absent where its response is present would be empty
    if asked.present_in not in ("", source.present_in):
        return f"{asked.id} may lack rows that {e.source} has"
    if source.max_turns or not source.max_response_tokens:
        return f"{e.source} has no responses, or its responses are in pieces"
    if frame.row_space != source.row_space or frame.selected_from or frame.picked_from or frame.data != source.data \
            or frame.present_in != source.present_in or frame.temperature != source.temperature:
        return f"frame {e.frame} does not have the rows of {e.source}"
    if (frame.max_prompt_tokens, frame.max_response_tokens) != (asked.max_prompt_tokens, source.max_response_tokens):
        return f"frame {e.frame} does not have the limits of its prompts and responses"
    if len({p.tokenizer or t.data[p.data].tokenizer for p in (asked, source)}) > 1:
        return f"the tokens of {asked.id} and {e.source} have different tokenizers"
    if e.also_reads != (f"{asked.id}.tokens",):
        return f"it must read {asked.id}.tokens"
    if e.values != ((f"{e.source}.tokens", f"{e.frame}.tokens"),):
        return f"it derives more than {e.frame}.tokens"
    return ""


def _numbers_parts(frame: IndexedFrame, parts: list[IndexedFrame]) -> bool:
    """Whether the space of a frame has the rows of all parts, where `numberings` says."""
    parent, space, root = common_parent(parts), frame.chain[0], frame.chain[-1]
    if parent:
        return (space.parent, space.fan) == (parent, sum(n.run for n in numberings(parts, parent)))
    fans = {p.per_prompt for p in parts}
    prompts = len(frame.chain) == 2 and fans == {space.fan}
    spaces = [p.prompt_space if prompts else p.row_space for p in parts]
    return (prompts or len(frame.chain) == 1) and [s for s, _ in root.parts] == spaces


OPS: Mapping[DeriveOpName, FrameRule] = {
    "where": _where, "restrict": _restrict, "pick": _pick, "others": _others, "whole": _whole, "text": _text,
    "prefixes": _prefixes, "concat": _concat, "reprompt": _reprompt,
}


def _along(t: Tables, e: Derive, frames: set[str]) -> str:
    """Whether all values go from one of `frames` to the frame that is made: what is wrong, or ""."""
    for v, w in e.values:
        if t.values[w].frame != e.frame or t.values[v].frame not in frames:
            return f"it derives {w} from {v}, but {e.frame} is not derived from its frame"
    return ""


def _above(t: Tables, frame: IndexedFrame) -> Iterator[IndexedFrame]:
    """Frames whose rows, or prompts, a selection's are among."""
    while frame.selected_from:
        frame = t.frames[frame.selected_from]
        yield from (f for f in t.frames.values()
                   if f.row_space == frame.row_space or f.prompt_space == frame.prompt_space)
