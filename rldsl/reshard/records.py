"""How every line reaches every rank that lacks it, said once for each kind of node and each cell.

Records, which `routes.py` makes and `transfer_slices.py` reads; the same on every machine, of a size that depends on
degrees and kinds and not on ranks. """

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from rldsl.reshard.load_balance import Share
from rldsl.reshard.node_groups import Places, Side
from rldsl.reshard.shard_classes import Line
from rldsl.sharding.boxes import Cell


class Hop(NamedTuple):
    """[start, stop) of a line goes from device to device of a node. step: 0, or 1 for what came in step 0."""

    step: int
    line: int
    src: int
    dst: int
    start: int
    stop: int


class Supply(NamedTuple):
    """A cell serves `copies` trees of the nodes of `kind`, `amount` elements for each, from `start` of its line on."""

    kind: int
    copies: int
    amount: int
    start: int


@dataclass(frozen=True, slots=True)
class Entering:
    """A line that comes into a node over the network. shares: of the devices by which it comes. needers: all devices
    that lack it."""

    needers: tuple[int, ...]
    shares: tuple[Share, ...]


@dataclass(frozen=True, slots=True)
class Kind:
    """nodes: ascending. trees: into how many trees they are divided; as many as nodes if none passes anything on.
    hops: inside a node, of lines that some of it hold."""

    nodes: tuple[int, ...]
    places: Places
    entering: Mapping[int, Entering]
    hops: tuple[Hop, ...]
    trees: int

    def tree(self, i: int) -> tuple[int, int]:
        """The nodes [start, stop) of tree `i`, by their number in `nodes`."""
        return -(-i * len(self.nodes) // self.trees), -(-(i + 1) * len(self.nodes) // self.trees)


@dataclass(frozen=True, slots=True)
class Source:
    """What the ranks at a cell send over the network: a line of `size` elements, kind after kind and tree after tree,
    in equal stretches for `senders` of them."""

    size: int
    senders: int
    supplies: tuple[Supply, ...]


@dataclass(frozen=True, slots=True)
class Paths:
    """shares: of each line that crosses the network, the part that each cell sends, by its place among the line's
    `have`. busiest: the most elements that one rank sends or receives (where it sends for others too, a bound of
    that)."""

    devices: int
    src: Side
    dst: Side
    lines: tuple[Line, ...]
    kinds: tuple[Kind, ...]
    shares: Mapping[int, tuple[Share, ...]]
    sources: Mapping[Cell, Source]
    busiest: int = 0


def taken(entering: Iterable[Entering]) -> dict[tuple[int, ...], Counter[int]]:
    """What comes over the network to each device of a node, for those that lack it, of all their lines together."""
    found: dict[tuple[int, ...], Counter[int]] = {}
    for e in entering:
        if e.needers not in found:
            found[e.needers] = Counter()
        mine = found[e.needers]
        for who, start, stop in e.shares:
            mine[who] += stop - start
    return found


def handed(came: Mapping[tuple[int, ...], Mapping[int, int]]) -> Counter[int]:
    """What devices then give to others of what is `taken`."""
    found = Counter[int]()
    for needers, parts in came.items():
        for who, size in parts.items():
            found[who] += size * (len(needers) - (who in needers))
    return found


def fan(i: int, entering: Entering, step: int) -> Iterator[Hop]:
    """The parts of a line from the devices by which it came to all others that lack it."""
    for who, start, stop in entering.shares:
        for needer in entering.needers:
            if needer != who:
                yield Hop(step, i, who, needer, start, stop)
