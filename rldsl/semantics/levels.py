"""Levels and index sets: what a value ranges over and when two values may meet.

batch < prompt < seq < token. The space of a value is a frame (token), a row space (seq), a prompt space (prompt) or
"" (batch). Each frame lies over one row space and one prompt space; broadcasting follows that line.
"""

from __future__ import annotations

from dataclasses import dataclass

from rldsl.plan.expr import LEVELS, Level
from rldsl.plan.model import Frame
from rldsl.semantics.terms import Term

ANY = "any"  # a parameter or result of a fn that takes every level


def source_name(frame: Frame) -> str:
    """What a program calls the sequences of `frame`: after `repeat until`, `gen` stands for all that was collected."""
    return frame.id.removesuffix(".all")


def depth(level: Level) -> int:
    return LEVELS.index(level)


@dataclass(frozen=True, slots=True)
class Mismatch:
    """Two terms that elementwise arithmetic cannot combine: neither broadcasts to the other."""

    a: Term
    b: Term


class Spaces:
    """The frames of a program, in the order in which they appear."""

    def __init__(self) -> None:
        self.frames: dict[str, Frame] = {}

    def add(self, frame: Frame) -> Frame:
        self.frames[frame.id] = frame
        return frame

    def of(self, frame: Frame, level: Level) -> str:
        """The space that values of `level` over this frame have."""
        return {"token": frame.id, "seq": frame.row_space, "prompt": frame.prompt_space, "batch": ""}[level]

    def frames_with_space(self, level: Level, space: str) -> tuple[Frame, ...]:
        """The frames that have `space` at `level`."""
        return tuple(f for f in self.frames.values() if level != "batch" and self.of(f, level) == space)

    def coarser(self, level: Level, space: str, to: Level) -> str:
        """The space at `to` below which `space` lies."""
        return "" if to == "batch" else self.of(self.frames_with_space(level, space)[0], to)

    def join(self, terms: tuple[Term, ...]) -> tuple[Level, str] | Mismatch:
        """The level and space that elementwise arithmetic on `terms` has."""
        finest = max(terms, key=lambda t: depth(t.level))
        for term in terms:
            if self.coarser(finest.level, finest.space, term.level) != term.space:
                return Mismatch(finest, term)
        return finest.level, finest.space

    def parent_space(self, level: Level, space: str) -> str | None:
        """The space that `space` was selected from; None if it is not a selection."""
        chosen = next((f for f in self.frames.values() if f.selected_from and self.of(f, level) == space), None)
        return self.of(self.frames[chosen.selected_from], level) if chosen is not None else None

    def selected(self, level: Level, space: str, of: str) -> bool:
        """Whether `space` is a selection of `of`, directly or through other selections."""
        parent = self.parent_space(level, space)
        return parent is not None and (parent == of or self.selected(level, parent, of))

    def source(self, frame: Frame, other: Frame) -> bool:
        """Whether the rows of `frame` come from those of `other`: its prompts, or what either was selected from."""
        parent = self.frames.get(frame.selected_from or frame.prompt_space)
        if parent is None or parent.id == frame.id:
            return False
        return parent.id == other.id or self.source(parent, other)

    def counted(self, term: Term) -> str:
        """What `count` counts in a value: its tokens, its prompts, or its rows, which are pairs where two frames share
        them and prompts where they have no response. "" for the rows of a function that is checked on its own."""
        if term.level != "seq":
            return {"token": "tokens", "prompt": "prompts", "batch": ""}[term.level]
        frames = self.frames_with_space("seq", term.space)
        if not frames or not frames[0].data:
            return ""
        return "pairs" if len(frames) > 1 else "sequences" if frames[0].max_response_tokens else "prompts"

    def shown(self, term: Term) -> str:
        """The frame or frames that a value ranges over, for messages."""
        frames = self.frames_with_space(term.level, term.space)
        return " or ".join(f"`{source_name(f)}`" for f in frames) if frames else "the whole batch"
