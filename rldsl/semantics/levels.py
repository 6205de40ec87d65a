"""Levels and index sets: what a value ranges over and when two values may meet.

batch < prompt < seq < turn < token < entry. These words are read relative to a frame: `token` its tokens, `turn` the
turns of a conversation, `seq` its rows, `prompt` the parent of its rows (of a root: the rows themselves). The space of
a value is an entry space (`plan/entries.py`), a frame (token, turn), a space of the plan (seq, prompt) or "" (batch);
broadcasting follows the chain of parents.
"""

from __future__ import annotations

from dataclasses import dataclass

from rldsl.plan.entries import EntrySpace
from rldsl.plan.expr import LEVELS, Level
from rldsl.plan.model import Frame, Space
from rldsl.plan.payloads import WINDOW
from rldsl.plan.spaces import IndexedFrame, ancestors, indexed
from rldsl.semantics.terms import Term

FINE: tuple[Level, ...] = ("turn", "token", "entry")  # levels below the rows: their values belong to one frame
ANY = "any"  # a parameter or result of a fn that takes every level


def source_name(frame: Frame) -> str:
    """What a program calls the sequences of `frame`: after `repeat until`, `gen` stands for all that was collected.
    Those without a name are called by their source text."""
    if "#" in frame.id and frame.label:
        return frame.label.rpartition(" (")[0]
    return frame.id.removesuffix(".all")


def entries_shown(space: str, entries: EntrySpace) -> str:
    """The tokens of an entry space, for messages."""
    return f"the tokens of `{space.removesuffix('.ids')}`" if entries.width else f"the vocabulary at `{entries.frame}`"


def depth(level: Level) -> int:
    return LEVELS.index(level)


@dataclass(frozen=True, slots=True)
class Mismatch:
    """Two terms that elementwise arithmetic cannot combine: neither broadcasts to the other."""

    a: Term  # the left term
    b: Term  # the right term


class Spaces:
    """The frames of a program, in the order in which they appear, and the tree of spaces that their rows are."""

    def __init__(self) -> None:
        self.frames: dict[str, IndexedFrame] = {}
        self.tree: dict[str, Space] = {}
        self.without_columns: dict[str, str] = {}  # root without columns of data -> where its rows come from
        # row space of a `concat` whose rows have no prompts in common -> how many rows of a prompt each part has
        self.ungrouped: dict[str, str] = {}
        self.entries: dict[str, EntrySpace] = {}  # by name

    def add(self, frame: Frame, *spaces: Space) -> IndexedFrame:
        """A frame, and the spaces that come with it."""
        self.tree |= {s.id: s for s in spaces}
        self.frames[frame.id] = made = indexed(frame, self.tree)
        return made

    def of(self, frame: IndexedFrame, level: Level) -> str:
        """The space that values of `level` over this frame have; at entry level, where there may be several, the frame
        (see `rows_of`)."""
        return {"token": frame.id, "turn": frame.id, "seq": frame.row_space, "prompt": frame.prompt_space,
                "batch": "", "entry": frame.id}[level]

    def frames_with_space(self, level: Level, space: str) -> tuple[IndexedFrame, ...]:
        """The frames that have `space` at `level`."""
        if level == "entry":
            return (self.frames[self.entries[space].frame],)
        return tuple(f for f in self.frames.values() if level != "batch" and self.of(f, level) == space)

    def with_responses(self, level: Level, space: str) -> tuple[IndexedFrame, ...]:
        """Those of `frames_with_space` that have responses, if any has: texts about sequences share their rows."""
        found = self.frames_with_space(level, space)
        return tuple(f for f in found if f.max_response_tokens) or found

    def coarser(self, level: Level, space: str, to: Level) -> str:
        """The space at `to` below which `space` lies."""
        return "" if to == "batch" else self.of(self.frames_with_space(level, space)[0], to)

    def level_of(self, to: Level, space: str) -> Level:
        """The level of the result of a reduction to `to`, whose elements are those of `space`. That is `to` itself,
        but for prompts that are themselves responses, as in `more = actor.generate(gen)`: a mean by prompt of `more`
        has one element for each sequence of `gen`. What a selection of continuations continues has no frame."""
        responses = to == "prompt" and self.tree[space].parent
        return "seq" if responses and any(not f.picked_from for f in self.frames_with_space("seq", space)) else to

    def ungrouped_by(self, space: str) -> str:
        """Why the rows of a space have no prompts in common: it is that of a `concat`, or selected from one, and this
        is how many rows of a prompt each of its parts has, as text. "" if its rows have prompts."""
        while space not in self.ungrouped and space in self.tree and self.tree[space].of:
            space = self.tree[space].of
        return self.ungrouped.get(space, "")

    def frame_of(self, term: Term) -> str:
        """The frame of a value of a level in `FINE`."""
        return self.entries[term.space].frame if term.level == "entry" else term.space

    def data_prompts(self, fetched: str) -> IndexedFrame | None:
        """The prompts of a fetched frame with several answers to each, in the rows of its data; None for others."""
        frame = self.frames.get(fetched)
        if frame is None or len(frame.chain) == 1:
            return None
        return next((f for f in self.frames.values() if f.row_space == frame.chain[-1].id and not f.selected_from
                     and not f.max_response_tokens), None)

    def beyond_rows(self, term: Term) -> bool:
        """Whether a reduction or an order is about more than one sequence: those of a prompt, or of a sequence that
        these continue."""
        attrs, x = dict(term.attrs), term.args[0]
        to, space = (attrs["within"], attrs["of"]) if "within" in attrs else (attrs.get("to"), term.space)
        return to == "prompt" or to == "seq" and space != (
            x.space if x.level == "seq" else self.coarser(x.level, x.space, "seq"))

    def chain(self, term: Term) -> tuple[str, ...]:
        """The spaces from that of a value up to the root, for a token value from that of its rows; () at batch
        level."""
        if term.level == "batch":
            return ()
        if term.level in FINE:
            return tuple(s.id for s in self.frames[self.frame_of(term)].chain)
        return tuple(s.id for s in ancestors(term.space, self.tree))

    def join(self, terms: tuple[Term, ...]) -> tuple[Level, str] | Mismatch:
        """The level and space that elementwise arithmetic on `terms` has: those of the finest term, if all others
        broadcast to it. For example, a value of the prompts of `gen` and one of its tokens make one of its tokens."""
        finest = max(terms, key=self._fineness)
        other = next((t for t in terms if not self._broadcasts(t, finest)), None)
        return (finest.level, finest.space) if other is None else Mismatch(finest, other)

    def _fineness(self, term: Term) -> tuple[int, ...]:
        """Larger for finer terms. What is finer than rows comes last; of rows and prompts, those with more spaces above
        them."""
        below_rows = [term.level == level for level in reversed(FINE)]
        return (*below_rows, len(self.chain(term)), depth(term.level))

    def _broadcasts(self, term: Term, finest: Term) -> bool:
        """Whether each element of `finest` belongs to one element of `term`, which is no finer."""
        if term.level == "batch":
            return True
        if term.level == finest.level == "entry":
            return term.space == finest.space
        if term.level in FINE:
            return self.frame_of(term) == self.frame_of(finest)
        return term.space in self.chain(finest)

    def rows_of(self, term: Term) -> str:
        """The space of a value, by which selections are found: of an entry value its frame."""
        return self.frame_of(term) if term.level == "entry" else term.space

    def selected_space(self, level: Level, space: str) -> str:
        """The space that `space`, as of `rows_of`, was selected from; "" if it is not a selection."""
        if level in FINE:
            return self.frames[space].selected_from
        return self.tree[space].of if level != "batch" else ""

    def is_selection_of(self, level: Level, space: str, of: str) -> bool:
        """Whether `space` is a selection of `of`, directly or through other selections."""
        above = self.selected_space(level, space)
        return above != "" and (above == of or self.is_selection_of(level, above, of))

    def is_made_from(self, frame: IndexedFrame, other: IndexedFrame) -> bool:
        """Whether the rows of `frame` come from those of `other`: its prompts, or what either was selected from."""
        parent = self.frames.get(frame.selected_from or frame.prompt_space)
        if parent is None or parent.id == frame.id:
            return False
        return parent.id == other.id or self.is_made_from(parent, other)

    def counted(self, term: Term) -> str:
        """What `count` counts in a value: its tokens, its prompts, or its rows, which are pairs where two frames share
        them and prompts where they have no response. "" for the rows of a function that is checked on its own."""
        if term.level != "seq":
            return {"entry": "", "token": "tokens", "turn": "", "prompt": "prompts", "batch": ""}[term.level]
        frames = self.frames_with_space("seq", term.space)
        frames = tuple(f for f in frames if not f.picked_from) or frames  # picks share the space of their prompts
        frames = tuple(f for f in frames if f.max_response_tokens) or frames
        if not frames or not frames[0].data:
            return ""
        return "pairs" if len(frames) > 1 else "sequences" if frames[0].max_response_tokens else "prompts"

    def carried(self, term: Term) -> str:
        """The generated frame with `per_step` to whose prompts a value belongs; "" if to none."""
        roots = self.chain(term)[-1:]
        frames = (f for f in self.frames.values() if f.steps_of_a_response > 1 and f.chain[-1].id in roots)
        return next((f.root_origin.removesuffix(WINDOW) for f in frames), "")

    def shown(self, term: Term) -> str:
        """The frame or frames that a value ranges over, for messages."""
        if term.level == "batch":
            return "the whole batch"
        if term.level == "entry":
            return entries_shown(term.space, self.entries[term.space])
        frames = self.frames_with_space(term.level, term.space)
        if not frames:  # above a selection
            below = next(f for f in self.frames.values() if any(s.id == term.space for s in f.chain))
            return f"what `{source_name(below)}` continues"
        return " or ".join(f"`{source_name(f)}`" for f in frames)
