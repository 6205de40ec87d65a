"""Values of a flow and the computations that make them.

In: Terms. Out: Value, Program and Compute records. Invariant: a Compute reads values of one prompt space and of spaces
below it, so that its rows can be divided in one way; what ranges over several is made of reductions that are separate
values.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace

from rldsl.graph import model as g
from rldsl.plan import arrays
from rldsl.plan.expr import Node, Program
from rldsl.plan.function import frames_of_call
from rldsl.plan.model import Value
from rldsl.plan.naming import line_suffix
from rldsl.plan.spaces import IndexedFrame, coarsest
from rldsl.semantics.levels import FINE, Spaces, depth
from rldsl.semantics.terms import Term, input_, program, walk
from rldsl.source import Span

LONGEST = 40  # letters of source text in a label
EXTENT = {"entry": "entry", "token": "response", "turn": "turn", "seq": "row", "prompt": "prompt", "batch": "batch"}


class Computations:
    """Makes Values, Programs and the nodes that compute them, in the block that is being built."""

    def __init__(self, spaces: Spaces, states: Iterable[str]):
        self.spaces = spaces
        self.states = frozenset(states)
        self.values: dict[str, Value] = {}  # by id, in program order
        self.programs: list[Program] = []
        self.columns: dict[str, str] = {}  # space of rows of data -> the value that holds their columns
        self.items: list[g.Item] = []  # of the block being built
        self._counts: Counter[str] = Counter()  # how often each base of an id was used
        for state in states:
            self.value(state, "batch", "")

    def unique(self, base: str) -> str:
        """base, then base#2, base#3, ..."""
        self._counts[base] += 1
        return base if self._counts[base] == 1 else f"{base}#{self._counts[base]}"

    def anonymous(self, hint: str) -> str:
        """hint#1, hint#2, ..."""
        self._counts[f"{hint}#"] += 1
        return f"{hint}#{self._counts[f'{hint}#']}"

    def materialize(self, term: Term, hint: str, span: Span, force: bool = False, text: str = "") -> Term:
        """`term` as an input. A value or a constant stays as it is; anything else becomes the value "hint#k", which a
        Compute makes. force: also a constant, or a state that is overwritten. text: what people call it, where that is
        not the text of `span`."""
        if term.op == "input" and not (force and term.name in self.states) or term.constant and not force:
            return term
        name = self.anonymous(hint)
        return self.compute([(name, term)], name, span, force=force, labels={name: full_label(span, text)})[name]

    def value(self, id_: str, level: str, frame: str, dtype: str = "f32", extent: str = "", label: str = "",
              width: int = 1, entries: str = "") -> str:
        """Record a value, and return its id. level, dtype, extent, width, entries: as of `plan.model.Value`; extent "":
        that of the level."""
        # callers pass words of the `Literal`s, as text
        self.values[id_] = Value(id_, frame, level, extent or EXTENT[level], dtype, label,  # type: ignore[arg-type]
                                 width, entries)
        return id_

    def compute(self, terms: list[tuple[str, Term]], id_: str, span: Span, force: bool = False,
                labels: Mapping[str, str] | None = None) -> dict[str, Term]:
        """One Compute for all terms that are not yet values; what each name now stands for. labels: full labels of
        the names that are the compiler's."""
        work = [(n, t) for n, t in terms
                if (t.op != "input" or t.name in self.states) and (force or not t.constant)]
        if not work:
            return dict(terms)
        if len({f.prompt_space for f in coarsest(self._frames(walk([t for _, t in work])))}) > 1:
            work = [(n, self._hoist_inner_reductions(t)) for n, t in work]
        made = program(id_, work, str(span))
        below = walk([t for _, t in work])
        frames = self._frames(below)
        inputs = made.inputs()
        reads = list(inputs)
        for t in below:
            if t.op == "py":
                reads += [f"{frame}.tokens" for _, frame in frames_of_call(t.attrs)]
                reads.append(self.columns[self.spaces.frames[str(dict(t.attrs)["frame"])].chain[-1].id])
            if t.op == arrays.ROWS:
                reads.append(f"{dict(t.attrs)['frame']}.tokens")
            if t.level == "turn":
                reads.append(f"{t.space}.turn_sizes")
        out = dict(terms)
        for name, t in work:
            entries = self.spaces.entries.get(t.space)
            over = [f for f in frames if t.space and not entries and self.spaces.of(f, t.level) == t.space]
            frame = entries.frame if entries else over[0].id if over else ""
            several = arrays.width(Node(t.op, attrs=t.attrs), self.spaces.frames)
            self.value(name, t.level, frame, t.dtype, arrays.EXTENT if t.op in arrays.ARRAYS else "",
                       elided((labels or {}).get(name, "")), entries.width if entries else several,
                       t.space if entries else "")
            out[name] = input_(name, t.level, t.space, span, t.dtype, t.unit)
        self.programs.append(made)
        source = (labels or {}).get(work[0][0], "")
        self.items.append(g.Compute(
            id=id_, reads=tuple(dict.fromkeys(reads)), writes=tuple(n for n, _ in work), span=span, program=id_,
            frames=tuple(f.id for f in frames), inputs=tuple((i, i) for i in inputs),
            outputs=tuple((n, n) for n, _ in work), label=elided(source), source=source))
        return out

    def _hoist_inner_reductions(self, term: Term) -> Term:
        """`term`, with what its arguments reduce to batch as separate values. Its own reduction to batch stays: it may
        range over a selection and over what that was selected from, which are divided alike."""
        known: dict[int, Term] = {}
        if not _to_batch(term):
            return self._hoist_batch_reductions(term, known)
        return replace(term, args=tuple(self._hoist_batch_reductions(a, known) for a in term.args))

    def _hoist_batch_reductions(self, term: Term, known: dict[int, Term]) -> Term:
        """`term` with each reduction to batch as a separate value. Rows of unrelated prompts are divided among the
        ranks independently, so one Compute cannot read both. known: id(term) -> the result, for shared terms."""
        if id(term) not in known:
            args = tuple(self._hoist_batch_reductions(a, known) for a in term.args)
            made = term if all(a is b for a, b in zip(args, term.args, strict=True)) else replace(term, args=args)
            known[id(term)] = self.materialize(made, "expr", term.span) if _to_batch(term) else made
        return known[id(term)]

    def _frames(self, terms: list[Term]) -> list[IndexedFrame]:
        """Frames whose rows the terms range over: each token space, then one frame for each space left."""
        named = [str(dict(t.attrs)["frame"]) for t in terms if dict(t.attrs).get("frame")]
        named += [frame for t in terms if t.op == "py" for _, frame in frames_of_call(t.attrs)]
        named += [self.spaces.frame_of(t) for t in terms if t.level in FINE]
        frames = [f for f in self.spaces.frames.values() if f.id in named]
        for t in sorted(terms, key=lambda t: -depth(t.level)):
            if t.level in ("seq", "prompt") and not any(self.spaces.of(f, t.level) == t.space for f in frames):
                frames.append(self.spaces.frames_with_space(t.level, t.space)[0])
        return frames

    def broadcast(self, term: Term, name: str, span: Span, label: str = "") -> str:
        """A Broadcast of the value `term` as `name`."""
        if name not in self.states:
            self.value(name, "batch", "", term.dtype, label=label)
        made = program(self.unique(f"{name} ="), [(name, term)], str(span))
        self.programs.append(made)
        self.items.append(g.Broadcast(id=made.id, reads=(term.name,), writes=(name,), span=span, program=made.id))
        return name


def _to_batch(term: Term) -> bool:
    return dict(term.attrs).get("to") == "batch"


def full_label(span: Span, text: str = "") -> str:
    """The source text of an expression, or `text`, with its line; white space is normalized."""
    words = " ".join(text.split() or re.sub(r"#[^\n]*\n", " ", span.text).split())
    return words + line_suffix(f"{span.file.name}:{span.line}")


def elided(label: str) -> str:
    """A full label as people read it: the middle of a long text left out, the line kept."""
    words, bracket, line = label.rpartition(" (")
    if len(words) > LONGEST:
        words = f"{words[:LONGEST // 2]}…{words[len(words) - LONGEST // 2 + 1:]}"
    return words + bracket + line


def label(span: Span, text: str = "") -> str:
    """What people call the value of an expression: its source text, or `text`, with its line."""
    return elided(full_label(span, text))
