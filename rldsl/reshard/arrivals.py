"""The box classes that enter a node over the network, and through which of its devices.

In: lists of classes that the same devices want, and what nodes have already. Out: `Arrivals`, a mapping from the number
of a class to its `Arrival`. Where zero divides a model over all ranks there are thousands of classes, and as many nodes
that have different few of them. So the lists are one object for all nodes that want the same (`Wanted`), a node has
only the positions in them that it does not need, and an `Arrival` is computed when it is asked for.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import NamedTuple

from rldsl.reshard.load_balance import Share


class IntraNodeCopy(NamedTuple):
    """One device of a node sends a slice of a box class to another device of the same node."""

    step: int  # 0; 1 where the sender itself received the slice in step 0
    box_class: int  # number of the class in `ReshardPlan.classes`
    src: int  # device of the node
    dst: int  # device of the node
    start: int  # first element of the class
    stop: int  # past the last


@dataclass(frozen=True, slots=True)
class Arrival:
    """A box class that enters a node over the network."""

    needers: tuple[int, ...]  # all devices of the node that lack it
    received_parts: tuple[Share, ...]  # which device receives which part from outside; it then sends it to the others


@dataclass(frozen=True, slots=True)
class WantedList:
    """Classes that the same devices of a node want under the destination layout, in the order in which they arrive."""

    needers: tuple[int, ...]  # devices, ascending
    classes: tuple[int, ...]  # numbers in `ReshardPlan.classes`
    sizes: tuple[int, ...]  # elements of each
    ends: tuple[int, ...] = field(init=False, repr=False)  # 0, and the running totals of the sizes

    def __post_init__(self) -> None:
        object.__setattr__(self, "ends", tuple(accumulate(self.sizes, initial=0)))


@dataclass(frozen=True, slots=True)
class Wanted:
    """What the devices of a node want: one object for all nodes that want the same."""

    lists: tuple[WantedList, ...]  # of different needers
    places: Mapping[int, tuple[int, int]] = field(init=False, repr=False)  # class -> (list, position in it)
    divided: frozenset[int] = field(init=False, repr=False)  # the classes that several devices want

    def __post_init__(self) -> None:
        object.__setattr__(self, "places", {i: (at, position) for at, one in enumerate(self.lists)
                                            for position, i in enumerate(one.classes)})
        object.__setattr__(self, "divided", frozenset(i for one in self.lists if len(one.needers) != 1
                                                      for i in one.classes))


@dataclass(frozen=True, slots=True, eq=False)
class Arrivals(Mapping[int, Arrival]):
    """By number of the box class: those that the nodes of a group want and that none of their devices holds."""

    wanted: Wanted  # the lists of box classes that nodes of the group want
    held: tuple[tuple[int, ...], ...]  # per list: positions of the classes that a device of the node holds, ascending
    # Per list, with the classes that arrive laid end to end: where the part of each needer ends.
    bounds: tuple[tuple[int, ...], ...]
    held_ends: tuple[tuple[int, ...], ...] = field(init=False, repr=False)  # per list: 0, running totals of held sizes
    # Elements that each device receives over the network, summed over the classes that the same devices want: devices
    # that want them -> device -> elements.
    by_device: Mapping[tuple[int, ...], Mapping[int, int]] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "held_ends", tuple(
            tuple(accumulate((one.sizes[position] for position in positions), initial=0))
            for one, positions in zip(self.wanted.lists, self.held, strict=True)))
        object.__setattr__(self, "by_device", {
            one.needers: {device: stop - start for device, (start, stop)
                          in zip(one.needers, pairwise((0, *bounds)), strict=True) if start < stop}
            for one, bounds in zip(self.wanted.lists, self.bounds, strict=True)})

    def _offset(self, box_class: int) -> tuple[int, int, int] | None:
        """(list, position in it, where the class begins among those that arrive); None if it does not arrive."""
        if (place := self.wanted.places.get(box_class)) is None:
            return None
        at, position = place
        before = bisect_left(self.held[at], position)
        if before < len(self.held[at]) and self.held[at][before] == position:
            return None
        return at, position, self.wanted.lists[at].ends[position] - self.held_ends[at][before]

    def __contains__(self, box_class: object) -> bool:
        return isinstance(box_class, int) and self._offset(box_class) is not None

    def __getitem__(self, box_class: int) -> Arrival:
        if not (parts := self.parts(box_class)):
            raise KeyError(box_class)
        return Arrival(self.needers(box_class), parts)

    def needers(self, box_class: int) -> tuple[int, ...]:
        """All devices of a node that want a class."""
        return self.wanted.lists[self.wanted.places[box_class][0]].needers

    def parts(self, box_class: int) -> tuple[Share, ...]:
        """Which device receives which part of a class; nothing if it does not arrive."""
        if (found := self._offset(box_class)) is None:
            return ()
        at, position, first = found
        one, bounds = self.wanted.lists[at], self.bounds[at]
        if len(bounds) == 1:
            return Share(one.needers[0], 0, one.sizes[position]),
        who, past = bisect_right(bounds, first), first + one.sizes[position]
        if past <= bounds[who]:  # most classes go to one device
            return Share(one.needers[who], 0, one.sizes[position]),
        parts = []
        start = first
        while start < past:
            stop = min(past, bounds[who])
            if start < stop:
                parts.append(Share(one.needers[who], start - first, stop - first))
            start, who = stop, who + 1
        return tuple(parts)

    def all_parts(self) -> dict[int, tuple[Share, ...]]:
        """What `parts` says of each class that arrives, in one pass over the lists."""
        found: dict[int, tuple[Share, ...]] = {}
        for one, positions, bounds in zip(self.wanted.lists, self.held, self.bounds, strict=True):
            held, needers, at, who = {*positions}, one.needers, 0, 0
            for position, (box_class, size) in enumerate(zip(one.classes, one.sizes, strict=True)):
                if position in held:
                    continue
                past = at + size
                while bounds[who] <= at and who + 1 < len(bounds):
                    who += 1
                if past <= bounds[who]:
                    found[box_class] = Share(needers[who], 0, size),
                else:
                    found[box_class] = self.parts(box_class)
                at = past
        return found

    def __iter__(self) -> Iterator[int]:
        return iter(sorted(i for one, positions in zip(self.wanted.lists, self.held, strict=True)
                           for i in _without(one.classes, positions)))

    def __len__(self) -> int:
        return sum(len(one.classes) - len(positions)
                   for one, positions in zip(self.wanted.lists, self.held, strict=True))

    def __bool__(self) -> bool:
        return any(len(one.classes) != len(positions)
                   for one, positions in zip(self.wanted.lists, self.held, strict=True))

    def held_classes(self) -> Iterator[int]:
        """The wanted classes that do not arrive, since a device of the node holds them."""
        return (one.classes[position] for one, positions in zip(self.wanted.lists, self.held, strict=True)
                for position in positions)

    def elements(self) -> int:
        """In all classes that arrive."""
        return sum(one.ends[-1] - ends[-1] for one, ends in zip(self.wanted.lists, self.held_ends, strict=True))


def _without(classes: Sequence[int], positions: Sequence[int]) -> Iterable[int]:
    if not positions:
        return classes
    left_out = {*positions}
    return (i for position, i in enumerate(classes) if position not in left_out)


NO_ARRIVALS = Arrivals(Wanted(()), (), ())


def forwarded_by_device(arrived: Mapping[tuple[int, ...], Mapping[int, int]]) -> Counter[int]:
    """Elements that each device then sends to the other devices of its node. arrived: see `Arrivals`."""
    forwarded = Counter[int]()
    for needers, parts in arrived.items():
        for device, size in parts.items():
            forwarded[device] += size * (len(needers) - (device in needers))
    return forwarded


def fan_out(box_class: int, arrival: Arrival, step: int) -> Iterator[IntraNodeCopy]:
    """The copies from the devices that received a class to all others of the node that lack it."""
    for device, start, stop in arrival.received_parts:
        for needer in arrival.needers:
            if needer != device:
                yield IntraNodeCopy(step, box_class, device, needer, start, stop)
