"""The ragged rows at hand: which tokens belong to which sequence, and which sequences to which prompt.

In: of each frame the numbers and lengths of the rows that a rank has. Out: index tensors from one level to a coarser
one, each computed once. Invariant: nothing here waits for the device where the number of tokens is known on the host.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from rldsl.diag import internal_error
from rldsl.plan.entries import EntrySpace
from rldsl.plan.expr import Level
from rldsl.plan.spaces import IndexedFrame


@dataclass(frozen=True, slots=True)
class FrameRows:
    """The rows of one frame at hand."""

    rows: Tensor  # [S] int64, row numbers
    prompts: Tensor  # [S] int64, prompt numbers
    lens: Tensor  # [S] int64, response lengths
    tokens: int | None = None  # the sum of lens, if it is known without synchronizing with the device
    prompt_lens: Tensor | None = None  # [S] int64, tokens before the response; None: not needed
    # [S, most turns] int64: tokens of each turn, 0 after the last one; None: not needed
    turn_sizes: Tensor | None = None

    @property
    def total(self) -> int:
        return int(self.lens.sum()) if self.tokens is None else self.tokens


@dataclass(frozen=True, slots=True)
class RaggedIndex:
    """Row offsets and index maps of the ragged rows at hand: which tokens belong to which sequence, and which
    sequences to which prompt, which may be a sequence of another frame."""

    frame_rows: Mapping[str, FrameRows]  # frame -> its rows at hand
    frames: Mapping[str, IndexedFrame]  # frame -> its record in the plan
    entries: Mapping[str, EntrySpace] = field(default_factory=dict)  # by name
    without_rows: torch.device = torch.device("cpu")  # where numbers are if there are no rows
    _cache: dict[tuple[str, ...], Tensor] = field(default_factory=dict)  # what `_once` has computed

    @property
    def device(self) -> torch.device:
        return next((v.lens.device for v in self.frame_rows.values()), self.without_rows)

    def frame(self, level: Level, space: str) -> str:
        """A frame that ranges over `space` at `level`."""
        if level == "entry":
            return self.entries[space].frame
        return next(f for f in self.frame_rows if self.space(f, level) == space)

    def space(self, frame: str, level: Level) -> str:
        """The index set over which values of `level` of a frame range."""
        record = self.frames[frame]
        return {"token": record.id, "turn": record.id, "seq": record.row_space, "prompt": record.prompt_space,
                "batch": "", "entry": ""}[level]

    def size(self, level: Level, space: str) -> int:
        """The number of elements at hand."""
        if level == "entry":
            return self.frame_rows[self.entries[space].frame].total * self.entries[space].width
        if level == "token":
            return self.frame_rows[self.frame(level, space)].total
        if level == "turn":
            return int(self.turn_counts(space).sum())
        return self.rows(level, space).numel()

    def turn_sizes(self, frame: str) -> Tensor:
        """[S, most turns]: see `FrameRows`."""
        sizes = self.frame_rows[frame].turn_sizes
        if sizes is None:
            raise internal_error(f"the turns of {frame} are not at hand", "run")
        return sizes

    def turn_counts(self, frame: str) -> Tensor:
        """[S]: turns of each row."""
        return self._once((frame, "turns"), lambda: (self.turn_sizes(frame) > 0).sum(1))

    def prompts(self, space: str) -> Tensor:
        """The distinct prompt ids of a prompt space, ascending."""
        return self.rows("prompt", space)

    def rows(self, level: Level, space: str) -> Tensor:
        """The numbers of the elements of a seq or prompt space at hand, ascending: the rows of a frame, or those that
        rows of frames below belong to."""
        own = next((v.rows for f, v in self.frame_rows.items() if self.frames[f].row_space == space), None)
        if level == "seq" and own is not None:
            return own
        below = [(f, v) for f, v in self.frame_rows.items() if any(s.id == space for s in self.frames[f].chain)]
        return self._once(("", "rows", space), lambda: torch.cat(
            [v.rows // (self.frames[f].count // self._count(f, space)) for f, v in below]).unique())

    def index(self, level: Level, space: str, to: Level, target: str = "") -> Tensor:
        """For each element of `level`, the number of the element of `to` that it lies in. target: the space of the
        latter; "": that of the frame of the former."""
        if level == "entry":
            return self._of_entries(space, to, target)
        frame = self.frame_below(level, space)
        target = target or self.space(frame, to)
        if to == "turn":  # of tokens: turns of all rows are numbered one after another
            sizes = self.turn_sizes(frame)
            sizes = sizes[sizes > 0]
            return self._once((frame, "turn of token"), lambda: torch.arange(
                sizes.numel(), device=sizes.device).repeat_interleave(sizes))
        if level == "turn":
            counts, row_space = self.turn_counts(frame), self.frames[frame].row_space
            row = torch.arange(counts.numel(), device=counts.device).repeat_interleave(counts)
            return row if (to, target) == ("seq", row_space) else self.index("seq", row_space, to, target)[row]
        if level == "token":
            lens = self.frame_rows[frame].lens
            seqs = torch.arange(lens.numel(), device=lens.device)
            seq_of_token = self._once((frame, "seq"), lambda: seqs.repeat_interleave(
                lens, output_size=self.frame_rows[frame].total))
            row_space = self.frames[frame].row_space
            if (to, target) == ("seq", row_space):
                return seq_of_token
            return self.index("seq", row_space, to, target)[seq_of_token]
        if to not in ("seq", "prompt"):
            raise internal_error(f"no index from {level} to {to}", "run")
        per_row = self._count(frame, space) // self._count(frame, target)
        return self._once((frame, level, space, to, target), lambda: torch.searchsorted(
            self.rows(to, target), self.rows(level, space) // per_row))

    def _of_entries(self, space: str, to: Level, target: str) -> Tensor:
        """`index` for the entries of a space: those of a token are next to each other."""
        frame, width = self.entries[space]
        tokens = self.frame_rows[frame].total
        token = self._once(("", "entries", space), lambda: torch.arange(
            tokens, device=self.device).repeat_interleave(width, output_size=tokens * width))
        return token if to == "token" else self.index("token", frame, to, target)[token]

    def frame_below(self, level: Level, space: str) -> str:
        """A frame that ranges over `space` at `level`, or else one whose rows lie below."""
        own = (f for f in self.frame_rows if self.space(f, level) == space)
        below = (f for f in self.frame_rows if any(s.id == space for s in self.frames[f].chain))
        found = next(own, None) or next(below, None)
        if found is None:
            raise internal_error(f"no frame ranges over the {level} space {space!r}", "run")
        return found

    def _count(self, frame: str, space: str) -> int:
        """Rows of a space that the rows of `frame`, or those that they were selected from, lie in."""
        record = self.frames[frame]
        own = next((s.count for s in record.chain if s.id == space), None)
        if own is not None:
            return own
        origin = next(self.frames[f].origins[i] for f in self.frame_rows
                      for i, s in enumerate(self.frames[f].chain) if s.id == space)
        return next(s.count for s, o in zip(record.chain, record.origins, strict=True) if o == origin)

    def ends(self, frame: str) -> Tensor:
        """[S]: the number of the token after each sequence."""
        return self._once((frame, "ends"), lambda: self.frame_rows[frame].lens.cumsum(0))

    def _once(self, key: tuple[str, ...], make: Callable[[], Tensor]) -> Tensor:
        if key not in self._cache:
            self._cache[key] = make()
        return self._cache[key]
