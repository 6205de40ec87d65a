"""Frames together with the spaces of their rows: the numbers of rows, and which rows belong together.

In: records of spaces and frames. Out: `IndexedFrame`s. Everything here is
derived from the records. Invariant: the chain of spaces ends even where records contradict each other (the verifier
refuses those).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import accumulate

from rldsl.plan.model import Frame, Plan, Space, Spread
from rldsl.plan.payloads import WINDOW

MAX_DEPTH = 1000  # spaces from one to its root, and selections of selections: bounds what a forged plan costs


@dataclass(frozen=True, slots=True)
class IndexedFrame(Frame):
    """A frame whose spaces are looked up."""

    chain: tuple[Space, ...] = ()  # the space of its rows, then parent by parent up to the root
    # for each of `chain` the space that its numbers come from: itself, or what was selected from, however often
    origins: tuple[str, ...] = ()

    @property
    def count(self) -> int:
        """Rows."""
        return self.chain[0].count

    @property
    def prompt_index(self) -> int:
        """Where the space of its prompts is in `chain`."""
        return min(1, len(self.chain) - 1)

    @property
    def prompt_space(self) -> str:
        """The space of its prompts: the parent of its rows. The rows of a root are their own prompts."""
        return self.chain[self.prompt_index].id

    @property
    def prompt_origin(self) -> str:
        """The space in which its prompts have the same numbers, selected or not."""
        return self.origins[self.prompt_index]

    @property
    def row_origin(self) -> str:
        """The space in which its rows have the same numbers, selected or not."""
        return self.origins[0]

    @property
    def root_origin(self) -> str:
        """The space in which the rows of data that its rows come from have the same numbers: that of their columns."""
        return self.origins[-1]

    @property
    def per_prompt(self) -> int:
        """Rows of each prompt."""
        return self.chain[0].fan

    @property
    def iterations(self) -> int:
        """How many batches a `repeat ... until` or an `eval` may collect into it; 1 for a frame that is not
        collected."""
        return self.chain[-1].iterations

    @property
    def steps_of_a_response(self) -> int:
        """The most steps over which a response is sampled: 1 without `per_step`."""
        return self.iterations if self.root_origin.endswith(WINDOW) else 1

    def among(self, whole: IndexedFrame) -> tuple[int, int] | None:
        """Where the rows of this frame are among those that the root of `whole` concatenates: the index in `chain` of
        the space that is a part of it, and the number that its row 0 has there; None if none is."""
        parts = dict(whole.chain[-1].parts)
        return next(((i, parts[s.id]) for i, s in enumerate(self.chain) if s.id in parts), None)

    @property
    def record(self) -> Frame:
        """The frame as the plan holds it."""
        return Frame(**{f.name: getattr(self, f.name) for f in fields(Frame)})


def indexed(frame: Frame, spaces: Mapping[str, Space]) -> IndexedFrame:
    """A frame with its spaces. An unknown space counts as a root of one row."""
    chain = ancestors(frame.row_space, spaces) or (Space(frame.row_space, 1),)
    origins = tuple((_walk(s.id, spaces, "of") or (s,))[-1].id for s in chain)
    return IndexedFrame(**{f.name: getattr(frame, f.name) for f in fields(Frame)}, chain=chain, origins=origins)


@dataclass(frozen=True, slots=True)
class Numbering:
    """The numbers that the rows of one part have in a concatenation: row r is row r // run * stride + first + r % run.
    """

    run: int  # rows of the part that follow one another
    stride: int  # from the first row of a run to that of the next
    first: int  # number of row 0


def common_parent(parts: Sequence[IndexedFrame]) -> str:
    """The finest space in which the prompts of all frames lie, selected or not, or "": each has different prompts."""
    first, *others = parts
    for i in range(first.prompt_index, len(first.chain)):
        own, origin = first.chain[i].id, first.origins[i]
        if all(own in [s.id for s in f.chain[f.prompt_index:]] for f in others):
            return own
        if all(origin in f.origins[f.prompt_index:] for f in others):
            return origin
    return ""


def numberings(parts: Sequence[IndexedFrame], parent: str) -> tuple[Numbering, ...]:
    """Of each part. parent: of `common_parent`. With one, all rows of each of its rows are together, in the order of
    the parts; without, all rows of the first part come first."""
    if not parent:
        ends = accumulate((f.count for f in parts), initial=0)
        return tuple(Numbering(f.count, f.count, first) for f, first in zip(parts, ends, strict=False))
    runs = [f.count // next(s.count for s, of in zip(f.chain, f.origins, strict=True) if parent in (s.id, of))
            for f in parts]
    return tuple(Numbering(run, sum(runs), first)
                 for run, first in zip(runs, accumulate(runs, initial=0), strict=False))


def unit_tokens(frames: Iterable[IndexedFrame], whole_prompts: bool) -> int:
    """The most tokens that a row of these frames has together, or all rows of a prompt."""
    return sum((f.per_prompt if whole_prompts else 1) * (f.max_prompt_tokens + f.max_response_tokens) for f in frames)


def most_minibatches(units: int, longest: int, tokens: int) -> int:
    """The most minibatches of `tokens` tokens that `units` rows or prompts of at most `longest` tokens can give, if a
    minibatch takes units in order until the next one does not fit, and a longer unit is alone: two
    neighbors have more than `tokens` together, and each but the last one has more than `tokens` - `longest`."""
    total = units * longest
    most = min(units, 2 * total // tokens + 1)
    return min(most, total // (tokens - longest + 1) + 1) if longest <= tokens else most


def units_of_minibatch(spread: Spread, units: int, longest: int) -> int:
    """The units of a minibatch where all have `longest` tokens, which bounds what it costs."""
    if spread.minibatch_tokens:
        return min(units, max(1, -(-spread.minibatch_tokens // max(longest, 1))))
    return -(-units // spread.minibatches)


def coarsest(frames: Iterable[IndexedFrame]) -> tuple[IndexedFrame, ...]:
    """Those whose prompts lie below no other's, selected or not: all frames can be divided by their prompts."""
    found = tuple(frames)
    prompts = {f.prompt_origin for f in found}
    return tuple(f for f in found if not prompts & {*f.origins[f.prompt_index + 1:]})


def ancestors(space: str, spaces: Mapping[str, Space]) -> tuple[Space, ...]:
    """A space, its parent, and so on up to the root."""
    return _walk(space, spaces, "parent")


def indexed_frames(plan: Plan) -> dict[str, IndexedFrame]:
    """The frames of a plan by id."""
    spaces = {s.id: s for s in plan.spaces}
    return {f.id: indexed(f, spaces) for f in plan.frames}


def spaces_of(frames: Iterable[IndexedFrame]) -> tuple[Space, ...]:
    """The spaces of some frames, parents first."""
    return tuple({s.id: s for f in frames for s in reversed(f.chain)}.values())


def response_chain(frame: str, frames: Mapping[str, IndexedFrame], prompts_of: Mapping[str, str]) -> tuple[str, ...]:
    """The frames whose responses follow one another in the sequences of a frame, the first one first. Each continues
    the one before; the prompts of the first are data, text, or a part of a sequence.

    prompts_of: generated frame -> the frame that it was generated from."""
    chain = [frame]
    while len(chain) <= MAX_DEPTH:
        of = frames[chain[0]]
        for _ in range(MAX_DEPTH):
            if of.id in prompts_of or not (of.selected_from or of.picked_from):
                break
            of = frames[of.selected_from or of.picked_from]
        before = prompts_of.get(of.id, "")
        if not before or not frames[before].max_response_tokens:
            break
        chain.insert(0, before)
    return tuple(chain)


def _walk(id: str, spaces: Mapping[str, Space], link: str) -> tuple[Space, ...]:
    """A space and those that it leads to by `link`, each once."""
    found: dict[str, Space] = {}
    while id in spaces and id not in found and len(found) <= MAX_DEPTH:
        found[id] = spaces[id]
        id = getattr(spaces[id], link)
    return tuple(found.values())
