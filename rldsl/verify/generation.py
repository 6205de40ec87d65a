"""Generations: what they read and write, their rows, turns and KV caches, and how old the tokens of training are.

In: tables with sound references, a Generate. Out: diagnostics RL0614 (reads and writes) and RL0615 (fields that
contradict each other); and of a plan that has passed all checks, how old the tokens are that a step trains on (`ages`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from rldsl.diag import Diagnostic, counted
from rldsl.plan.backends import described
from rldsl.plan.derive_ops import DERIVE_OPS, continued_frame
from rldsl.plan.events import Derive, Fetch, Generate, Loop, split_buffer
from rldsl.plan.model import CONVERSATION_VALUES
from rldsl.plan.spaces import IndexedFrame
from rldsl.verify.calls import check_call, own, reads, writes
from rldsl.verify.tables import Tables, name, problem

# what a generate with `per_step` writes besides: value -> extent, dtype
PARTS = {"ended": ("row", "bool"), "version": ("response", "f32")}


def check_generate(t: Tables, e: Generate) -> Iterator[Diagnostic]:
    yield from check_call(t, e)
    cache = {f"{e.cache_of}.cache"} if e.cache_of else set()
    columns = {v.id for v in t.plan.values if e.conversation is not None and v.extent == "columns"
               and t.frames[v.frame].row_space == t.frames[e.prompts].root_origin}
    yield from reads(t, e, {f"{e.prompts}.tokens"} | cache | columns, own(e.prompts), e.spread,
                     f"{e.model}@{e.layout}")
    made = {f"{e.frame}.tokens": ("tokens", "i64"), f"{e.frame}.logprobs": ("response", "f32"),
            f"{e.frame}.finished": ("row", "bool")}
    if e.conversation is not None:
        made |= {f"{e.frame}.turn_sizes": ("turn", "i64")}
        made |= {f"{e.frame}.{x}": ("turn" if level == "turn" else "row", "f32") for x, level in CONVERSATION_VALUES}
    if e.per_step:
        made |= {f"{e.frame}.{x}": of for x, of in PARTS.items()}
        known = described(t.layouts[e.layout].backend)
        wrong = _wrong_parts(t, e) or (
            "" if known is not None and known.per_step else f"the backend of layout {e.layout} does not")
        if wrong:
            yield problem("RL0615", f"{name(e)} continues responses in later steps, but {wrong}", e)
    yield from writes(t, e, {*made}, {f"{e.frame}.cache"}, e.spread)
    yield from _cache(t, e)
    if fault := _conversation(t, e):
        yield problem("RL0615", f"{name(e)}: {fault}", e)
    for id, (extent, dtype) in made.items():
        v = t.values.get(id)
        if v is not None and (v.frame, v.extent, v.dtype) != (e.frame, extent, dtype):
            yield problem("RL0615", f"{name(e)} writes {id}, which is not {extent} of {e.frame} in {dtype}", e)
    f, p, s = t.frames[e.frame], t.frames[e.prompts], e.sampling
    branches = e.conversation.branches if e.conversation is not None else 1
    present_in = f.id if e.per_step or branches > 1 else p.present_in
    if (f.chain[0].parent, f.chain[0].fan, f.data, f.present_in) != (p.row_space, s.n * branches, p.data, present_in):
        yield problem("RL0615", f"{name(e)}: frame {e.frame} is not {s.n * branches} completions for each row of "
                                f"{e.prompts}", e)
    fewer = f.max_response_tokens < s.max_new_tokens and e.conversation is None  # whose turns `max_tokens` limits too
    if f.temperature != s.logprob_temperature or fewer:
        yield problem(
            "RL0615", f"{name(e)}: frame {e.frame} records another temperature or fewer tokens than it samples", e
        )
    if not t.models[e.model].head.generates or t.spreads[e.spread].granularity != "prompt":
        yield problem("RL0615", f"{name(e)} needs a model that generates, and a spread by prompts", e)
    if t.frames[e.frame].tokenizer != p.tokenizer:
        yield problem("RL0615", f"{name(e)}: the tokens of {e.frame} and {e.prompts} have different tokenizers", e)
    of_data = t.data[p.data]
    if of_data.row_format != "prompts" and not of_data.answers and not p.tokenizer or _has_responses_of_data(t, p):
        yield problem("RL0615", f"{name(e)} continues {e.prompts}, whose rows have responses from data", e)
    if f.max_prompt_tokens != p.max_prompt_tokens + p.max_response_tokens:
        yield problem("RL0615", f"{name(e)}: the rows of {e.frame} begin with those of {e.prompts}, which have at most "
                                f"{p.max_prompt_tokens} + {p.max_response_tokens} tokens, not {f.max_prompt_tokens}", e)


def _wrong_parts(t: Tables, e: Generate) -> str:
    """What contradicts a generate with `per_step`, whose responses continue in later steps; "" if nothing does.

    - There are as many steps as the longest response takes, so a response that begins has ended when its prompt leaves:
      none is lost, and none waits longer.
    - It is at the top level of the step loop, as is the fetch of its prompts, so every step continues what the one
      before it left.
    - A response stays on the ranks that began it: its rows are divided by slots, the same in every step."""
    frame, prompts, spread = t.frames[e.frame], t.frames[e.prompts], t.spreads[e.spread]
    most = e.sampling.max_new_tokens
    if not any(isinstance(f, Fetch) and f.newest and e.prompts in f.frames for f, _ in t.events):
        return f"its prompts {e.prompts} are not those of several steps"
    if not 0 < e.per_step < most or prompts.iterations != -(-most // e.per_step):
        return (f"responses of up to {most} tokens, {e.per_step} in a step, do not take {prompts.iterations} steps")
    if frame.present_in != frame.id or frame.max_response_tokens != most:
        return f"frame {frame.id} does not say which of its rows there are, or has room for other than {most} tokens"
    if spread.balance_by != "slot" or spread.frames != (e.frame,):
        return f"spread {spread.id} may move a response to other ranks"
    if e.conversation is not None or e.cache_of or any(b.startswith(f"{e.frame}.cache@") for b in e.writes):
        return "it has an environment, or uses a KV cache of another step"
    return "" if t.at_top(e) else "it is in a block"


def _conversation(t: Tables, e: Generate) -> str:
    """What is wrong with the turns of a generate, or ""."""
    f, p, x, talk = t.frames[e.frame], t.frames[e.prompts], t.layouts[e.layout], e.conversation
    if talk is None:
        return f"{e.waiting} of slots that wait for an environment, without one" if e.waiting != "keep" else ""
    for id in talk.environments:
        if id not in t.functions or t.functions[id].returns != "env":
            return f"{id!r} is no environment"
    named = [t.functions[id].name for id in talk.environments]
    if not named or len({*named}) < len(named):
        return f"environments with the names {', '.join(named) or '(none)'}"
    if f.max_turns != talk.max_turns or f.max_prompt_tokens + f.max_response_tokens != talk.max_tokens:
        return (f"frame {f.id} has {f.max_turns} turns and {f.max_prompt_tokens} + {f.max_response_tokens} tokens, not "
                f"{talk.max_turns} and {talk.max_tokens}")
    if talk.max_turns < 1 or talk.branches < 1 or talk.turn_timeout <= 0 or p.max_turns or p.tokenizer:
        return (f"a conversation of {talk.max_turns} turns, {talk.turn_timeout:g} s for each, and {talk.branches} "
                f"branches, from {p.id}")
    known = described(x.backend)
    if known is None or not known.conversations:
        return f"the backend {x.backend!r} cannot talk with environments"
    if e.waiting not in known.waiting:
        return f"{e.waiting} of slots that wait for an environment, on the backend {x.backend!r}"
    return "it reads and writes KV caches" if e.cache_of or f"{e.frame}.cache" in t.values else ""


def check_turns(t: Tables) -> Iterator[Diagnostic]:
    """Only a conversation begins rows with turns."""
    for e, _ in t.events:
        for frame in e.new_rows:
            if t.frames[frame].max_turns and getattr(e, "conversation", None) is None:
                yield problem("RL0615", f"{name(e)}: frame {frame} has turns, but there is no environment", e)


def _has_responses_of_data(t: Tables, frame: IndexedFrame) -> bool:
    """Whether the rows have responses and were fetched, selected or not."""
    while frame.selected_from:
        frame = t.frames[frame.selected_from]
    return frame.max_response_tokens > 0 and any(
        isinstance(e, Fetch) and frame.id in e.new_rows for e, _ in t.events)


def _cache(t: Tables, e: Generate) -> Iterator[Diagnostic]:
    """The KV cache that it reads is that of its prompts, from the same model in the same places. `versions.py` checks
    that the model has not changed since."""
    kept = t.values.get(f"{e.frame}.cache")
    if f"{e.frame}.cache" in [split_buffer(b)[0] for b in e.writes] and (kept is None or kept.extent != "cache"):
        yield problem("RL0615", f"{name(e)} writes {e.frame}.cache, which is no KV cache", e)
    if not e.cache_of:
        return
    sources = {d.frame: (d.op, d.source) for d, _ in t.events if isinstance(d, Derive)
               and DERIVE_OPS[d.op].makes_rows}
    writer = next((w for w, _ in t.events if isinstance(w, Generate) and w.frame == e.cache_of), None)
    if writer is None or continued_frame(e.prompts, sources) != e.cache_of \
            or t.frames[e.cache_of].row_origin not in t.frames[e.frame].origins:
        yield problem("RL0615", f"{name(e)} reads the KV cache of {e.cache_of}, with whose rows its prompts do not "
                                "begin", e)
    elif (writer.model, writer.layout, writer.spread) != (e.model, e.layout, e.spread):
        yield problem("RL0615", f"{name(e)} reads the KV cache of {e.cache_of}, which another model wrote, or the same "
                                "one in other places", e)
    backend = described(t.layouts[e.layout].backend)
    if backend is None or not backend.reuses_cache:
        yield problem("RL0615", f"{name(e)}: the backend of layout {e.layout} keeps no KV cache", e)


@dataclass(frozen=True, slots=True)
class Age:
    """How many steps before the step that trains on it a token was sampled. In the first steps of a run, the parameters
    are those from before the first step."""

    generated: str  # the sequences, as the program names them
    least: int      # steps
    most: int       # steps; more than `least` with `per_step`

    def __str__(self) -> str:
        return f"tokens of {self.generated} are {_steps(self.least, self.most)} old"


def ages(t: Tables) -> tuple[Age, ...]:
    """Of each generation outside evaluations whose tokens are not all of their own step. The plan has been checked."""
    found = []
    for event, path in t.events:
        if isinstance(event, Generate) and not any(isinstance(x, Loop) and x.over for x in path):
            longest = t.frames[event.prompts].iterations if event.per_step else 1
            if age := event.ahead + longest - 1:
                found.append(Age(event.draws_as, event.ahead, age))
    return tuple(found)


def _steps(least: int, most: int) -> str:
    return counted(most, "step") if least == most else f"{least} to {counted(most, 'step')}"
