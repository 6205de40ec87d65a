"""What a derived frame is: which rows it has, from which rows each of them comes, and its tokens.

In: a story at the moment of a `derive`. Out: `Derived`, or `Garbage` where the operation does not mean what the frame
says. Written from the meaning of the operations; it knows nothing of `rldsl.verify`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rldsl.plan.events import Derive
from rldsl.plan.spaces import IndexedFrame, common_parent, numberings
from tests.verify.arithmetic import need, term

if TYPE_CHECKING:
    from tests.verify.story import Story

Origin = tuple[str, int]  # a frame, and a row of it


@dataclass(frozen=True, slots=True)
class Derived:
    """The rows of a frame, and what is new about them."""

    of: Mapping[int, Origin]  # row -> where it comes from
    lens: Mapping[int, tuple[int, int]]  # row -> tokens of its prompt and its response
    tokens: Mapping[int, int] | None = None  # row -> term; None: those of the rows that it comes from
    logprobs: Mapping[int, int] | None = None  # likewise


def derived(story: Story, e: Derive) -> Derived:
    """The rows that an event makes."""
    frame, source = story.frames[e.frame], story.frames[e.source]
    made = OPS[e.op](story, e, frame, source)
    parts = [story.frames[f] for f in e.parts] if e.op == "concat" else [source]
    for part in parts if e.op != "restrict" else ():
        need(e.op == "text" or story.tokenizer(frame) == story.tokenizer(part), "tokens of another tokenizer")
        need(e.op in ("text", "prefixes") or frame.temperature == part.temperature, "another temperature")
        need(e.op == "concat" or frame.data == part.data, "columns of another source")
        if e.op not in ("text", "prefixes", "whole", "reprompt"):
            room = frame.max_prompt_tokens >= part.max_prompt_tokens and frame.max_response_tokens >= part.max_response_tokens
            need(room, "longer rows than there is room for")
    return made


def _same(story: Story, of: Mapping[int, int], source: IndexedFrame) -> Derived:
    """Rows as they are in the source."""
    lens = story.lens[source.id]
    return Derived({r: (source.id, s) for r, s in of.items()}, {r: (lens.prompt[s], lens.response[s]) for r, s in of.items()})


def _where(story: Story, e: Derive, frame: IndexedFrame, source: IndexedFrame) -> Derived:
    condition = story.values[e.key]
    need(condition.truth, "a condition that is a number")
    need(frame.selected_from == e.source, "a selection of another frame")
    need(story.space_of(e.key) == source.row_space, "a condition of other rows")
    need(frame.count == source.count and frame.present_in == frame.id, "a selection that cannot tell its rows")
    return _same(story, {r: r for r in story.rows(e.source) if condition.of[r] & 1}, source)


def _restrict(story: Story, e: Derive, frame: IndexedFrame, source: IndexedFrame) -> Derived:
    need(frame.selected_from == e.source, "a selection of another frame")
    return Derived({r: (e.source, r) for r in story.rows(e.frame)}, {})


def _families(story: Story, source: IndexedFrame) -> dict[int, list[int]]:
    need(len(source.chain) > 1, "rows without prompts")
    found: dict[int, list[int]] = {}
    for r in story.rows(source.id):
        found.setdefault(r // source.per_prompt, []).append(r)
    return found


def _pick(story: Story, e: Derive, frame: IndexedFrame, source: IndexedFrame) -> Derived:
    need(frame.picked_from == e.source and frame.row_space == source.prompt_space, "a row that is no prompt's")
    need(story.space_of(e.key) == source.row_space and not story.values[e.key].truth, "numbers of other rows")
    numbers = story.values[e.key].of
    best = {p: max(rows, key=lambda r: (numbers[r], -r)) for p, rows in _families(story, source).items()}
    return _same(story, best, source)


def _others(story: Story, e: Derive, frame: IndexedFrame, source: IndexedFrame) -> Derived:
    n = source.per_prompt
    need((frame.chain[0].parent, frame.chain[0].fan) == (source.row_space, n - 1), "rows that are no others")
    families = _families(story, source).values()
    pairs = [(one, other) for rows in families for one in rows for other in rows if one != other]
    return _same(story, {a * (n - 1) + b % n - (b > a): b for a, b in pairs}, source)


def _whole(story: Story, e: Derive, frame: IndexedFrame, source: IndexedFrame) -> Derived:
    need(frame.row_space == source.row_space and e.parts and e.parts[-1] == e.source, "rows of something else")
    parts = [story.frames[p] for p in e.parts]
    need(frame.max_response_tokens >= sum(p.max_response_tokens for p in parts), "no room for all parts")
    need(frame.max_prompt_tokens >= parts[0].max_prompt_tokens, "no room for the prompt")
    of, lens, joined = {}, {}, {}
    for r in story.rows(e.source):
        lines = [(p.id, r // (source.count // p.count)) for p in parts]
        for (a, i), (b, j) in zip(lines, lines[1:]):
            before, after = story.lens[a], story.lens[b]
            need(before.prompt[i] + before.response[i] == after.prompt[j], "a part that does not follow the one before")
            need(story.begins(story.values[f"{b}.tokens"].of[j], story.values[f"{a}.tokens"].of[i]), "another part")
        need(all(p.temperature == frame.temperature for p in parts), "log-probs at several temperatures")
        of[r] = e.source, r
        lens[r] = story.lens[lines[0][0]].prompt[lines[0][1]], sum(story.lens[p].response[i] for p, i in lines)
        joined[r] = term("joined", *(story.values[f"{p}.logprobs"].of[i] for p, i in lines))
    return Derived(of, lens, logprobs=joined)


def _text(story: Story, e: Derive, frame: IndexedFrame, source: IndexedFrame) -> Derived:
    function = story.functions[e.function]
    need(function.returns in ("prompts", "prompts?") and frame.row_space == source.row_space, "no prompts of these rows")
    need(frame.tokenizer and frame.max_prompt_tokens > 0 and not frame.max_response_tokens, "a text without tokens")
    need(e.given and e.over_long in ("error", "drop", "truncate"), "a function of nothing")
    what = function.path, function.name, function.sha256, frame.tokenizer, frame.max_prompt_tokens, e.over_long
    tokens = {}
    for r in story.rows(e.source):
        given = []
        for name, f in e.given:
            above = story.frames[f]
            need(above.row_space in [s.id for s in source.chain], f"an argument {name} of other rows")
            given.append((name, story.values[f"{f}.tokens"].of.get(r // (source.count // above.count), 0)))
        tokens[r] = term("text", what, tuple(given), r)
    if function.returns == "prompts?" or e.over_long == "drop":
        tokens = {r: x for r, x in tokens.items() if x % 3}
    return Derived({r: (e.source, r) for r in tokens}, {r: (1 + x % 3, 0) for r, x in tokens.items()}, tokens)


def _prefixes(story: Story, e: Derive, frame: IndexedFrame, source: IndexedFrame) -> Derived:
    need(frame.chain[0].parent == source.row_space and not frame.max_response_tokens, "rows that are no prefixes")
    need(frame.max_prompt_tokens >= source.max_prompt_tokens + source.max_response_tokens, "no room for the prefixes")
    need(bool(e.cut_at) + bool(e.cut_every) + bool(e.cut_fractions) == 1, "no cuts, or several kinds of them")
    most, lens, own = frame.per_prompt, story.lens[e.source], story.values[f"{e.source}.tokens"].of
    of, sizes, tokens = {}, {}, {}
    for r in story.rows(e.source):
        length = lens.response[r]
        wanted = [int(x * length) for x in e.cut_fractions] or [
            c for c in range(length) if (c % e.cut_every == 0 if e.cut_every else term(e.cut_at, own[r], c) % 2)]
        cuts = sorted({0, *(c for c in wanted if 0 < c < length)})
        for j, c in enumerate(cuts if len(cuts) <= most else [cuts[i * len(cuts) // most] for i in range(most)]):
            n = r * most + j
            of[n], sizes[n], tokens[n] = (e.source, r), (lens.prompt[r] + c, 0), term("prefix", own[r], c)
            story.contained[tokens[n]] = own[r]
    return Derived(of, sizes, tokens)


def _reprompt(story: Story, e: Derive, frame: IndexedFrame, source: IndexedFrame) -> Derived:
    need(len(e.parts) == 2 and e.parts[1] == e.source and frame.row_space == source.row_space, "other responses")
    asked = story.frames[e.parts[0]]
    need(asked.row_space in [s.id for s in source.chain] and not asked.max_response_tokens, "prompts of other rows")
    need(story.tokenizer(asked) == story.tokenizer(source), "prompts of another tokenizer")
    need(frame.max_prompt_tokens >= asked.max_prompt_tokens, "no room for the prompts")
    need(frame.max_response_tokens >= source.max_response_tokens and not source.max_turns, "no room for the responses")
    before, own, lens, tokens = story.lens[asked.id], story.lens[source.id], {}, {}
    for r in story.rows(e.source):
        above = r // (source.count // asked.count)
        need(above in story.rows(asked.id), "a response without a prompt")
        lens[r] = before.prompt[above], own.response[r]
        tokens[r] = term("reprompt", story.values[f"{asked.id}.tokens"].of[above], story.values[f"{e.source}.tokens"].of[r])
    story.behind[e.frame] = e.source
    return Derived({r: (e.source, r) for r in tokens}, lens, tokens)


def _concat(story: Story, e: Derive, frame: IndexedFrame, source: IndexedFrame) -> Derived:
    parts = [story.frames[p] for p in e.parts]
    need(len(parts) > 1 and len({*e.parts}) == len(parts) and parts[0] is source, "nothing to concatenate")
    parent = common_parent(parts)
    of: dict[int, Origin] = {}
    lens: dict[int, tuple[int, int]] = {}
    for part, x in zip(parts, numberings(parts, parent)):
        of_part = story.lens[part.id]
        for r in story.rows(part.id):
            n = r // x.run * x.stride + x.first + r % x.run
            need(n < frame.count and n not in of, "two rows with one number")
            of[n], lens[n] = (part.id, r), (of_part.prompt[r], of_part.response[r])
            need(not parent or any(n // (frame.count // s.count) == r // (part.count // t.count)
                                   for s in frame.chain if s.id == parent
                                   for t, o in zip(part.chain, part.origins) if parent in (t.id, o)), "another parent")
            roots = dict(frame.chain[-1].parts)
            need(parent or any(n // (frame.count // frame.chain[-1].count) == roots[s.id] + r // (part.count // s.count)
                               for s in part.chain if s.id in roots), "rows of another root")
            need(parent or len(frame.chain) == 1 or frame.per_prompt == part.per_prompt, "prompts that are cut")
    return Derived(of, lens)


OPS: Mapping[str, Callable[[Story, Derive, IndexedFrame, IndexedFrame], Derived]] = {
    "where": _where, "restrict": _restrict, "pick": _pick, "others": _others, "whole": _whole, "text": _text,
    "prefixes": _prefixes, "concat": _concat, "reprompt": _reprompt,
}
