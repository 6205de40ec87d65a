"""The events of two plans, paired by what they mean: name, place in the program, who reads what they bring.

In: a plan -> what is known of each event, in words (`found`). Two of these -> pairs, and what only one has (`pairs`).
Ids never count, nor do the numbers and lines of results that the program gives no name (`expr#1`).
"""

from __future__ import annotations

import re
from collections import defaultdict, deque
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from rldsl.plan.events import Event, Log, Realloc, Sampling, When, split_buffer
from rldsl.plan.model import Plan, Spread
from rldsl.plan.naming import PlaceTexts, label_text, line_of
from rldsl.plan.projection import Path, event_paths
from rldsl.plan.references import Role, references

OWN = frozenset(f.name for f in fields(Event))  # what every event has


@dataclass(frozen=True, slots=True)
class Found:
    """An event of one plan, as a comparison sees it."""

    kind: str  # of event
    name: str  # what messages call it
    about: str  # its subject: "gen = actor.generate"
    result_names: tuple[str, ...]  # that the program gives to what it returns
    readers: tuple[str, ...]  # the subjects of the events that read what it writes
    block: str  # the blocks around it
    facts: Mapping[str, str]  # its options, where it runs, what it moves, as text; a computation in full
    inserted: bool  # by the compiler
    because: str  # as of `Event`
    at: str  # as of `Event`
    bytes: int  # as of `Event`

    @property
    def where(self) -> str:
        return self.facts["where"]


@dataclass(frozen=True, slots=True)
class Pair:
    before: Found | None  # None: the event was added
    after: Found | None  # None: the event was removed


def found(plan: Plan) -> tuple[Found, ...]:
    """Every event but `log` and the frees of values, in order."""
    every, models = list(event_paths(plan)), {m.name for m in plan.models}
    read_by: dict[str, dict[str, None]] = defaultdict(dict)
    for event, _ in every:
        for buffer in () if event.traits.family == "bookkeeping" else event.reads:
            read_by[buffer][event.subject] = None
    places, spreads = PlaceTexts.of(plan), {s.id: s for s in plan.spreads}
    computations = {p.id: plain(repr((p.nodes, p.outputs))) for p in plan.programs}
    return tuple(
        Found(event.kind, event.display_name, event.subject, event.result_names,
              tuple(dict.fromkeys(about for b in event.writes for about in read_by[b])), _block(path),
              {name: text for name, text in _facts(event, path, places, spreads, computations) if text},
              bool(event.because) or event.traits.family == "residency", event.because, line_of(event.at), event.bytes)
        for event, path in every if not isinstance(event, Log) and not _of_values(event, models))


def _of_values(event: Event, models: set[str]) -> bool:
    return bool(event.frees) and not any(split_buffer(b)[0] in models for b in event.frees)


def pairs(before: Sequence[Found], after: Sequence[Found]) -> Iterator[Pair]:
    """In the order of `after`, then what is gone. Where what a call returns has another name now, its readers are
    matched as if it had that before."""
    first = _matched(before, after)
    names = {old: new for i, j in first for old, new in zip(before[i].result_names, after[j].result_names, strict=False)
             if old != new and len(before[i].result_names) == len(after[j].result_names) and not before[i].inserted}
    shown = [_renamed(e, names) for e in before] if names else list(before)
    mine = {j: i for i, j in (_matched(shown, after) if names else first)}
    yield from (Pair(shown[mine[j]] if j in mine else None, event) for j, event in enumerate(after))
    yield from (Pair(before[i], None) for i in sorted(set(range(len(before))) - set(mine.values())))


def _matched(before: Sequence[Found], after: Sequence[Found]) -> list[tuple[int, int]]:
    """Positions in `before` and `after`. The sameness asked for is let down step by step."""
    mine: dict[int, int] = {}
    left = set(range(len(before)))
    for key in (_same, _place, _result, _route, _reader, _call, _made):
        there: dict[Hashable, deque[int]] = defaultdict(deque)
        for i in sorted(left):
            there[key(before[i])].append(i)
        for j, event in enumerate(after):
            name = key(event)
            if j not in mine and name is not None and there[name]:
                mine[j] = there[name].popleft()
                left.discard(mine[j])
    return [(i, j) for j, i in mine.items()]


def _renamed(e: Found, names: Mapping[str, str]) -> Found:
    """With the names of the other plan; its fact `result` says what it returns."""
    longest = "|".join(re.escape(name) for name in sorted(names, key=len, reverse=True))
    pattern = re.compile(rf"(?<![\w.#])({longest})(?![\w#])")

    def new(text: str) -> str:
        return pattern.sub(lambda found: names[found[1]], text)

    facts = {name: text if name == "result" else new(text) for name, text in e.facts.items()}
    return replace(e, about=new(e.about), result_names=tuple(map(new, e.result_names)),
                   readers=tuple(map(new, e.readers)), facts=facts)


def _same(e: Found) -> Hashable:
    return e.kind, plain(e.about), plain(e.readers), e.block, tuple(e.facts.items())


def _place(e: Found) -> Hashable:
    return e.kind, plain(e.about), plain(e.readers) if e.inserted else (), e.block


def _result(e: Found) -> Hashable:
    return e.kind, plain(e.about), plain(e.readers) if e.inserted else ()


def _route(e: Found) -> Hashable:
    """A transfer that serves other events than before."""
    return (plain(e.about), e.where) if e.kind == "transfer" else None


def _reader(e: Found) -> Hashable:
    return (plain(e.about), plain(e.readers[:1])) if e.kind == "transfer" else None


def _call(e: Found) -> Hashable:
    """The same call, whatever becomes of it. A transfer for somebody else is another transfer."""
    return None if e.kind == "transfer" else (e.kind, plain(e.about) if e.inserted else plain(e.name))


def _made(e: Found) -> Hashable:
    """Another model's call in its place."""
    return (e.kind, plain(e.result_names)) if e.result_names and not e.inserted else None


def plain(value: Any) -> Any:
    """Without what distinguishes unnamed results: the numbers of "expr#1", the lines of labels; in lists too."""
    if isinstance(value, str):
        return label_text(re.sub(r"#\d+", "#", value))
    return tuple(map(plain, value)) if isinstance(value, tuple) else value


def _block(path: Path) -> str:
    return " > ".join("when" if isinstance(p, When) else p.id for p in path)


def _facts(event: Event, path: Path, places: PlaceTexts, spreads: Mapping[str, Spread],
           computations: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """(option, its text); "" for none. What is inserted has no options."""
    yield "where", places.where(event)
    yield "inside", _block(path)
    if event.because or event.traits.family == "residency":
        yield "bytes", str(event.bytes) if event.bytes else ""
        yield "decay", str(event.decay) if isinstance(event, Realloc) and event.decay else ""
        return
    yield "ahead", str(event.ahead or "")
    yield "result", ", ".join(plain(event.result_names))
    yield "call", plain(event.display_name)
    if isinstance(sampling := getattr(event, "sampling", None), Sampling):
        yield from ((f.name, str(getattr(sampling, f.name))) for f in fields(sampling))
    if isinstance(spread := spreads.get(getattr(event, "spread", "")), Spread):
        yield "rows", f"by {spread.granularity}, {spread.balance_by}"
        size = f" of {spread.minibatch_tokens:,} tokens" if spread.minibatch_tokens else ""
        yield "minibatches", f"{spread.minibatches}{size} x {spread.epochs}{' shuffled' if spread.shuffle else ''}"
    for reference in references(event):
        if reference.role is Role.PROGRAM:
            yield "operations", computations.get(reference.id, "")
    for field in fields(event):
        if field.name not in OWN and field.name not in event.traits.not_diffed:
            yield field.name, text(plain(getattr(event, field.name)))


def text(value: Any) -> str:
    """A value of a record for people: true and false as the language writes them, pairs as a=b, or a where both are."""
    if isinstance(value, tuple):
        return ", ".join(_pair(v) if isinstance(v, tuple) else text(v) for v in value)
    return str(value).lower() if isinstance(value, bool) else str(value)


def _pair(values: tuple[Any, ...]) -> str:
    first, *more = map(text, values)
    return first if all(v == first for v in more) else "=".join([first, ":".join(more)])
