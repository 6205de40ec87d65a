"""Placements that need less memory, found by compiling them.

In: a `PlacedGraph` that needs more memory than a device has. Out: the mildest change that fits, as rules for `--on`; or
the device memory, or the number of nodes, that would be enough. From mild to drastic: smaller micro-batches, sharding
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
from rldsl.placement.model import Call, PlacedGraph
from rldsl.placement.rules import names_of
from rldsl.plan.expr import Scalar
from rldsl.search.compiled_placements import SettingCompiler
from rldsl.search.settings import Setting, difference_text, on_all_ranks, with_min_degrees, with_options
from rldsl.search.space import can_tp

LIMIT = 64  # the largest factor for the number of nodes, and the largest tp or pp degree, that are tried
Change = tuple[Collection[str], str, Scalar]  # ids of calls, an option, its value


@dataclass(frozen=True, slots=True)
class MemoryAdvice:
    """A change of the placement, with the memory that it was found to need by compiling it."""

    rules: tuple[str, ...]  # for `--on`
    bytes: int  # peak of the fullest rank
    nodes: int  # of the cluster


class MemoryAdvisor:
    """Tries changes of a placement that does not fit."""

    def __init__(self, placed: PlacedGraph):
        self.placed, self._compiler = placed, SettingCompiler(placed)
        self.calls, self.old, self.bytes = self._compiler.calls, self._compiler.first, self._compiler.bytes
        self.trained = sorted(m.name for m in placed.models if m.train_layout)

    def best(self) -> MemoryAdvice | None:
        """The mildest change that fits this cluster, reduced to what is needed; None if nothing fits.

        The order follows what a user gives up: (1) one option of one call or model, so that the message is one
        rule; (2) several options together, still on the same ranks and with the same degrees; (3) other degrees on the
        same ranks, which change the communication of every call; (4) every call on all ranks, which gives up the
        user's meshes."""
        for settings in (self._single_changes(), self._combined_changes(),
                         self._larger_degrees(lambda: self._all_changes),
                         self._larger_degrees(lambda: on_all_ranks(self._all_changes, self.placed.world))):
            for setting in settings:
                if self._fits(setting):
                    return self._advice(self._pruned(setting))
        return None

    def least(self) -> MemoryAdvice | None:
        """The setting that needs the least memory on this cluster; None if nothing can be tried."""
        settings = [self.old, *self._combined_changes(), *self._degrees(self._all_changes)[-4:],
                    *self._degrees(on_all_ranks(self._all_changes, self.placed.world))[-4:]]
        bounds = sorted((bound, i) for i, s in enumerate(settings) if (bound := self._compiler.bound(s)) is not None)
        best: tuple[int, int] | None = None  # bytes, and the number of the setting
        for bound, i in bounds:
            if best is not None and bound > best[0]:
                break  # so do all others
            if (size := self.bytes(settings[i])) is not None:
                best = min((size, i), best or (size, i))
        return self._advice(settings[best[1]]) if best is not None else None

    def larger(self) -> MemoryAdvice | None:
        """The setting that fits on the smallest number of nodes (a power of two times those there are); None if none
        does. Memory falls as nodes are added, so bisection finds it."""
        def fitting(nodes: int) -> Setting | None:
            settings = self._degrees(on_all_ranks(self._all_changes, nodes * self.placed.devices_per_node))[-4:]
            return next((setting for setting in settings if self._fits(setting, nodes)), None)

        counts = [self._nodes * 2**k for k in range(1, LIMIT.bit_length())]
        at = bisect_left(counts, True, key=lambda nodes: fitting(nodes) is not None)
        if at < len(counts) and (setting := fitting(counts[at])) is not None:
            return self._advice(setting, counts[at])
        return None

    # ------------------------------------------------------------------------------------------- changes

    def _single_changes(self) -> Iterator[Setting]:
        """One change of one call or model."""
        for n in self._names:
            if self._fits(with_options(self.old, self._calls_named(n), mbs=1)):
                yield self._with_largest_micro_batches(with_options(self.old, self._calls_named(n), mbs=1), n)
        for ids, name, value in self._changes():
            yield with_options(self.old, ids, **{name: value})

    def _changes(self) -> Iterator[Change]:
        """The changes besides micro-batches, from mild to drastic: by what a step loses.

        zero 1 and 2 move the bytes that dp moves anyway; recomputation adds a forward pass; zero 3 gathers parameters
        in every pass. A dropped copy is sent again in each step. Offloading a frozen model copies parameters
        over the host link; a trained one moves its moments too, twelve bytes per parameter instead of two."""
        yield from ((self._trainings_of(m), "zero", z) for z in (1, 2) for m in self._may_zero(z))
        yield from ((self._trainings_of(m), "recompute", "full") for m in self.trained)
        yield from ((self._trainings_of(m), "zero", 3) for m in self._may_zero(3))
        yield from ((self._calls_named(n), "keep", False) for n in self._uses_copy)
        yield from ((self._calls_of(m), "offload", True) for m in self._frozen)
        yield from ((self._trainings_of(m), "offload", True) for m in self.trained)

    def _combined_changes(self) -> Iterator[Setting]:
        """The same changes, each on top of those before. A change that is impossible, or needs more, is skipped."""
        setting = with_options(self.old, self.old, mbs=1)
        yield setting
        for (name, value), changes in groupby(self._changes(), key=lambda change: change[1:]):
            each = [calls for calls, _, _ in changes]
            for ids in ([i for calls in each for i in calls], *(each if len(each) > 1 else ())):
                more = with_options(setting, ids, **{name: value})
                if more != setting and self._needs_no_more(more, setting):
                    yield (setting := more)

    def _needs_no_more(self, new: Setting, old: Setting) -> bool:
        before = self.bytes(old)
        return self.bytes(new) is not None if before is None else self._compiler.fits(new, before)

    @cached_property
    def _all_changes(self) -> Setting:
        return list(self._combined_changes())[-1]

    def _larger_degrees(self, base: Callable[[], Setting]) -> Iterator[Setting]:
        """`base` with the smallest degrees that fit. Memory falls as degrees grow, so bisection finds them."""
        settings = self._degrees(base())
        at = bisect_left(settings, True, key=self._fits)
        yield from settings[at : at + 1]

    def _degrees(self, setting: Setting) -> list[Setting]:
        """Every call with at least (tp, pp), for all degrees that a node and the models allow; the smallest first."""
        gpus, families = self.placed.devices_per_node, [self._compiler.families[n.model] for n in self.calls]
        tps = [t for t in _powers_of_two(gpus) if gpus % t == 0 and all(can_tp(f, t) for f in families)]
        pps = [p for p in _powers_of_two(LIMIT) if all(p == 1 or p <= f.layers and not f.pp_problem for f in families)]
        degrees = sorted(product(tps, pps), key=lambda x: (x[0] * x[1], x[1]))
        return [with_min_degrees(setting, tp, pp) for tp, pp in degrees]

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
    def _uses_copy(self) -> list[str]:
        """Calls of trained models that use a copy."""
        train_layouts = {m.name: m.train_layout for m in self.placed.models if m.train_layout and not m.base}
        return list(dict.fromkeys(_selector(n) for n in self.calls
                                  if n.model in train_layouts and not isinstance(n, g.Train)
                                  and self.old[n.id].layout.id != train_layouts[n.model]))

    def _may_zero(self, level: int) -> list[str]:
        """Trained models with data parallelism, below this level of `zero`."""
        layouts = {m: self.old[self._trainings_of(m)[0]].layout for m in self.trained}
        return [m for m, x in layouts.items() if x.dp > 1 and x.zero < level]

    def _calls_named(self, name: str) -> list[str]:
        return [n.id for n in self.calls if _selector(n) == name]

    def _calls_of(self, model: str) -> list[str]:
        return [n.id for n in self.calls if n.model == model]

    def _trainings_of(self, model: str) -> list[str]:
        return [n.id for n in self.calls if n.model == model and isinstance(n, g.Train)]

    # ------------------------------------------------------------------------------------------ judging

    def _fits(self, setting: Setting, nodes: int = 0) -> bool:
        return self._compiler.fits(setting, self.placed.memory, nodes)

    def _pruned(self, setting: Setting) -> Setting:
        """Without the changes that are not needed; the most drastic are reverted first."""
        for model in sorted({n.model for n in self.calls}):
            setting = self._revert(setting, self._calls_of(model), "mesh", "layout", "given")
        for name in self._names:
            for field in ("offload", "keep", "recompute"):
                setting = self._revert(setting, self._calls_named(name), field)
        for model in self.trained:
            setting = self._with_lowest_zero(setting, self._trainings_of(model))
        for name in self._names:
            setting = self._revert(setting, self._calls_named(name), "mbs")
        for name in self._names:
            if setting[self._calls_named(name)[0]].mbs == 1 != self.old[self._calls_named(name)[0]].mbs:
                setting = self._with_largest_micro_batches(setting, name)
        return setting

    def _revert(self, setting: Setting, ids: list[str], *fields: str) -> Setting:
        """With the first values of these fields of the calls `ids`, if that fits."""
        reverted = {i: replace(p, **{f: getattr(self.old[i], f) for f in fields}) if i in ids else p
                    for i, p in setting.items()}
        return reverted if reverted != setting and self._fits(reverted) else setting

    def _with_lowest_zero(self, setting: Setting, ids: list[str]) -> Setting:
        """With the lowest level of `zero` that fits."""
        for level in range(self.old[ids[0]].layout.zero, setting[ids[0]].layout.zero):
            if self._fits(less := with_options(setting, ids, zero=level)):
                return less
        return setting

    def _with_largest_micro_batches(self, setting: Setting, name: str) -> Setting:
        """With the largest micro-batch size of one call that fits: a power of two."""
        size, old = 1, self.old[self._calls_named(name)[0]].mbs
        while (not old or 2 * size < old) and size < 1 << 16:
            if not self._fits(with_options(setting, self._calls_named(name), mbs=2 * size)):
                break
            size *= 2
        return with_options(setting, self._calls_named(name), mbs=size)

    def _advice(self, setting: Setting, nodes: int = 0) -> MemoryAdvice:
        changes: dict[str, str] = {}  # selector -> options
        for n in self.calls:
            if text := difference_text(self.old[n.id], setting[n.id]):
                changes[_selector(n)] = text
        for model in {n.model for n in self.calls}:  # one rule for all calls of a model that change in the same way
            mine = [_selector(n) for n in self.calls if n.model == model]
            texts = {changes.get(s) for s in mine}
            if len(set(mine)) > 1 and len(texts) == 1 and None not in texts:
                changes = {s: t for s, t in changes.items() if s not in mine} | {f"{model}.*": changes[mine[0]]}
        rules = tuple(f"{s} {t}" for s, t in changes.items())
        return MemoryAdvice(rules, self.bytes(setting, nodes) or 0, nodes or self._nodes)


def _powers_of_two(limit: int) -> Iterator[int]:
    return (2**k for k in range(limit.bit_length()) if 2**k <= limit)


def _selector(n: Call) -> str:
    model, methods = names_of(n)
    return f"{model}.{methods[0]}"

