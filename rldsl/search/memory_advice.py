"""Placements that need less memory, found by compiling them.

In: a `Placed` that needs more memory than a device has. Out: the mildest change found that fits, as rules for `--on`;
or the least memory, or the number of nodes, that would be enough. From mild to hard: smaller micro-batches, sharding
optimizer state and gradients over dp (zero 1, 2), recomputation, sharding parameters too (zero 3), dropping copies
after their last use, offloading frozen models, then trained ones, more tensor or pipeline parallelism, more ranks.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby, product

from rldsl.graph import model as g
from rldsl.models.families import Family
from rldsl.placement.model import Call, Placed
from rldsl.placement.rules import names_of
from rldsl.plan.expr import Scalar
from rldsl.search.settings import Setting, difference_text, on_all_ranks, with_min_degrees, with_options
from rldsl.search.trials import Trials

MOST = 64  # the largest factor by which nodes are multiplied, and the largest tp or pp degree, that are tried
Step = tuple[Collection[str], str, Scalar]  # calls, an option of theirs, its value


@dataclass(frozen=True, slots=True)
class MemoryAdvice:
    """A change that was compiled."""

    rules: tuple[str, ...]  # for `--on`
    bytes: int  # the most that a rank then needs
    nodes: int  # of the cluster


class MemoryAdvisor:
    """Tries changes of a placement that does not fit."""

    def __init__(self, placed: Placed):
        self.placed, self._trials = placed, Trials(placed)
        self.calls, self.old, self.bytes = self._trials.calls, self._trials.old, self._trials.bytes
        self.trained = sorted(m.name for m in placed.models if m.home)

    def best(self) -> MemoryAdvice | None:
        """The mildest change that fits this cluster, without what it does not need; None if nothing fits.

        The order is a ladder of what a user gives up: (1) one option of one call or model, so that the message is one
        rule; (2) several options together, still on the same ranks and with the same degrees; (3) other degrees on the
        same ranks, which change the communication of every call; (4) every call on all ranks, which gives up the
        user's meshes."""
        for ways in (self._mild(), self._together(), self._divided(lambda: self._hard),
                     self._divided(lambda: on_all_ranks(self._hard, self.placed.world))):
            for setting in ways:
                if self._fits(setting):
                    return self._advice(self._pruned(setting))
        return None

    def least(self) -> MemoryAdvice | None:
        """What needs least of everything that can be tried on this cluster; None if nothing can be tried."""
        every = [self.old, *self._together(), *self._degrees(self._hard)[-4:],
                 *self._degrees(on_all_ranks(self._hard, self.placed.world))[-4:]]
        sizes = [(size, i) for i, s in enumerate(every) if (size := self.bytes(s)) is not None]
        return self._advice(every[min(sizes)[1]]) if sizes else None

    def larger(self) -> MemoryAdvice | None:
        """What fits on the smallest multiple of the nodes (a power of two); None if nothing does."""
        for nodes in (self._nodes * 2**k for k in range(1, MOST.bit_length())):
            for setting in self._degrees(on_all_ranks(self._hard, nodes * self.placed.devices_per_node))[-4:]:
                if self._fits(setting, nodes):
                    return self._advice(setting, nodes)
        return None

    # ------------------------------------------------------------------------------------------- changes

    def _mild(self) -> Iterator[Setting]:
        """One change of one call or model."""
        for n in self._names:
            if self._fits(with_options(self.old, self._of(n), mbs=1)):
                yield self._loosened(with_options(self.old, self._of(n), mbs=1), n)
        for ids, name, value in self._steps():
            yield with_options(self.old, ids, **{name: value})

    def _steps(self) -> Iterator[Step]:
        """The changes besides micro-batches, from mild to hard: by what a step loses.

        zero 1 and 2 move the bytes that dp moves anyway; recomputation adds a forward pass; zero 3 gathers parameters
        in every pass. A copy that is dropped is sent again in each step. Offloading a frozen model copies parameters
        over the host link; a trained one moves its moments too, twelve bytes per parameter instead of two."""
        yield from ((self._trains(m), "zero", z) for z in (1, 2) for m in self._may_zero(z))
        yield from ((self._trains(m), "recompute", "full") for m in self.trained)
        yield from ((self._trains(m), "zero", 3) for m in self._may_zero(3))
        yield from ((self._of(n), "keep", False) for n in self._copied)
        yield from ((self._of_model(m), "offload", True) for m in self._frozen)
        yield from ((self._trains(m), "offload", True) for m in self.trained)

    def _together(self) -> Iterator[Setting]:
        """The same changes, each on top of those before. A change that cannot be placed, or needs more, is skipped."""
        setting = with_options(self.old, self.old, mbs=1)
        yield setting
        for (name, value), steps in groupby(self._steps(), key=lambda step: step[1:]):
            each = [calls for calls, _, _ in steps]
            for ids in ([i for calls in each for i in calls], *(each if len(each) > 1 else ())):
                more = with_options(setting, ids, **{name: value})
                if more != setting and self._no_more(more, setting):
                    yield (setting := more)

    def _no_more(self, new: Setting, old: Setting) -> bool:
        size, before = self.bytes(new), self.bytes(old)
        return size is not None and (before is None or size <= before)

    @cached_property
    def _hard(self) -> Setting:
        return list(self._together())[-1]

    def _divided(self, base: Callable[[], Setting]) -> Iterator[Setting]:
        """The smallest degrees that fit on top of all mild changes. Needs shrink as degrees grow, so bisect."""
        ways = self._degrees(base())
        at = bisect_left(ways, True, key=self._fits)
        yield from ways[at : at + 1]

    def _degrees(self, setting: Setting) -> list[Setting]:
        """Every call with at least tp and pp, as far as a node and its model allow; the smallest degrees first."""
        gpus, families = self.placed.devices_per_node, [self._trials.families[n.model] for n in self.calls]
        tps = [t for t in _powers_of_two(gpus) if gpus % t == 0 and all(_can_tp(f, t) for f in families)]
        pps = [p for p in _powers_of_two(MOST) if all(p == 1 or p <= f.layers and not f.pp_problem for f in families)]
        return [with_min_degrees(setting, tp, pp) for tp, pp in sorted(product(tps, pps), key=lambda x: (x[0] * x[1], x[1]))]

    # --------------------------------------------------------------------------------------------- names

    @property
    def _nodes(self) -> int:
        return self.placed.world // self.placed.devices_per_node

    @cached_property
    def _names(self) -> list[str]:
        return list(dict.fromkeys(_selector(n) for n in self.calls))

    @cached_property
    def _frozen(self) -> list[str]:
        return sorted({n.model for n in self.calls} - {*self.trained})

    @cached_property
    def _copied(self) -> list[str]:
        """Calls of trained models that have copies of their own."""
        homes = {m.name: m.home for m in self.placed.models if m.home and not m.base}
        return list(dict.fromkeys(_selector(n) for n in self.calls if n.model in homes and not isinstance(n, g.Train)
                                  and self.old[n.id].layout.id != homes[n.model]))

    def _may_zero(self, level: int) -> list[str]:
        """Trained models that are replicated, and below this level of `zero`."""
        return [m for m in self.trained for x in (self.old[self._trains(m)[0]].layout,) if x.dp > 1 and x.zero < level]

    def _of(self, name: str) -> list[str]:
        return [n.id for n in self.calls if _selector(n) == name]

    def _of_model(self, model: str) -> list[str]:
        return [n.id for n in self.calls if n.model == model]

    def _trains(self, model: str) -> list[str]:
        return [n.id for n in self.calls if n.model == model and isinstance(n, g.Train)]

    # ------------------------------------------------------------------------------------------ judging

    def _fits(self, setting: Setting, nodes: int = 0) -> bool:
        size = self.bytes(setting, nodes)
        return size is not None and size <= self.placed.memory

    def _pruned(self, setting: Setting) -> Setting:
        """Without the changes that it does not need; the hardest are taken back first."""
        for model in sorted({n.model for n in self.calls}):
            setting = self._without(setting, self._of_model(model), "mesh", "layout", "given")
        for name in self._names:
            for field in ("offload", "keep", "recompute"):
                setting = self._without(setting, self._of(name), field)
        for model in self.trained:
            setting = self._less_zero(setting, self._trains(model))
        for name in self._names:
            setting = self._without(setting, self._of(name), "mbs")
        for name in self._names:
            if setting[self._of(name)[0]].mbs == 1 != self.old[self._of(name)[0]].mbs:
                setting = self._loosened(setting, name)
        return setting

    def _without(self, setting: Setting, ids: list[str], *fields: str) -> Setting:
        back = {i: replace(p, **{f: getattr(self.old[i], f) for f in fields}) if i in ids else p
                for i, p in setting.items()}
        return back if back != setting and self._fits(back) else setting

    def _less_zero(self, setting: Setting, ids: list[str]) -> Setting:
        """With the lowest level of `zero` that fits."""
        for level in range(self.old[ids[0]].layout.zero, setting[ids[0]].layout.zero):
            if self._fits(less := with_options(setting, ids, zero=level)):
                return less
        return setting

    def _loosened(self, setting: Setting, name: str) -> Setting:
        """With the largest micro-batches of one call that fit: a power of two."""
        size, old = 1, self.old[self._of(name)[0]].mbs
        while (not old or 2 * size < old) and size < 1 << 16:
            if not self._fits(with_options(setting, self._of(name), mbs=2 * size)):
                break
            size *= 2
        return with_options(setting, self._of(name), mbs=size)

    def _advice(self, setting: Setting, nodes: int = 0) -> MemoryAdvice:
        said: dict[str, str] = {}
        for n in self.calls:
            if text := difference_text(self.old[n.id], setting[n.id]):
                said[_selector(n)] = text
        for model in {n.model for n in self.calls}:  # one rule for all calls of a model that change in the same way
            mine = [_selector(n) for n in self.calls if n.model == model]
            texts = {said.get(s) for s in mine}
            if len(set(mine)) > 1 and len(texts) == 1 and None not in texts:
                said = {s: t for s, t in said.items() if s not in mine} | {f"{model}.*": said[mine[0]]}
        rules = tuple(f"{s} {t}" for s, t in said.items())
        return MemoryAdvice(rules, self.bytes(setting, nodes) or 0, nodes or self._nodes)


def _powers_of_two(most: int) -> Iterator[int]:
    return (2**k for k in range(most.bit_length()) if 2**k <= most)


def _selector(n: Call) -> str:
    model, methods = names_of(n)
    return f"{model}.{methods[0]}"


def _can_tp(f: Family, tp: int) -> bool:
    return tp == 1 or not (f.tp_problem or f.heads % tp or f.kv_heads % tp and tp % f.kv_heads)
