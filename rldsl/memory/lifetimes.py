"""When a rank holds what: parameters from their load on, values from the event that writes them to their free.

In: a plan and a class of ranks that hold the same. Out: their `Curve`. It shows a step in the middle of the run, in
which copies of parameters and the optimizer state exist from the beginning.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from rldsl.memory.call_memory import call_bytes, gradient_bytes, optimizer_bytes
from rldsl.memory.curve import Curve, Holding
from rldsl.memory.generate_memory import carried_bytes, kept_cache_bytes, offloaded_cache_bytes
from rldsl.memory.holder_classes import HolderClass
from rldsl.memory.parameters import FLOAT, Copy, base_bytes, largest, new_bytes, resting_bytes
from rldsl.memory.reshard_buffers import ReallocKey, realloc_bytes, realloc_key, saved_bytes
from rldsl.memory.values import Tables, buffer_bytes, first_pass_bytes, flow_gather_bytes, loss_gather_bytes
from rldsl.plan.events import (
    AnyCall,
    Checkpoint,
    Compute,
    CopyPart,
    Event,
    Generate,
    Infer,
    Item,
    Load,
    Loop,
    Offload,
    Onload,
    Realloc,
    Save,
    Train,
    Transfer,
    split_buffer,
)
from rldsl.plan.model import Layout, Plan
from rldsl.plan.naming import Labels
from rldsl.plan.notation import degrees_of
from rldsl.plan.traits import rule_for
from rldsl.reshard.records import ReshardPlan
from rldsl.sharding.boxes import num_zero_shards

ReshardPlans = Mapping[ReallocKey, tuple[ReshardPlan, ...]]  # of each realloc, one for each dtype that travels


def lifetimes(plan: Plan, ranks: HolderClass, device: str, reshards: ReshardPlans) -> Curve:
    """The curve of a class of ranks. reshards: from `reshard_buffers.reshard_plans`; reallocs that are not among them
    need no buffers."""
    return _Lifetimes(plan, ranks, device, reshards).curve()


@dataclass
class _Lifetimes:
    """Collects the holdings of one class. A moment is an index as in `curve.py`: event i runs at 2i + 1."""

    plan: Plan  # the plan
    ranks: HolderClass  # the class
    device: str  # "cpu" or "cuda"
    reshards: ReshardPlans  # how parameters move
    events: list[Event] = field(default_factory=list)  # of these ranks, in order
    holdings: list[Holding] = field(default_factory=list)  # found so far

    def __post_init__(self) -> None:
        self.t = Tables.of(self.plan)
        self.labels = Labels.of(self.plan.values, self.plan.frames)
        self.models = {m.name: m for m in self.plan.models}
        self.programs = {p.id: p for p in self.plan.programs}
        self.layouts: dict[str, Layout] = {x.id: x for x in self.plan.layouts}
        self.spans = list(self._flat(self.plan.body))
        steps = [2 * first for loop, first, _ in self.spans if any(loop is x for x in self.plan.body)]
        self.uses: dict[str, list[int]] = {}  # buffer -> indices of the events that read or free it, ascending
        for i, e in enumerate(self.events):
            for b in {*e.reads, *e.frees}:
                self.uses.setdefault(b, []).append(i)
        self.end = 2 * len(self.events)
        self.top = steps[0] if steps else self.end  # the moment at which a step begins

    def curve(self) -> Curve:
        self._parameters()
        self._values()
        for i, e in enumerate(self.events):
            self._during(i, e)
        return Curve(self.ranks.ranks, tuple(e.id for e in self.events), tuple(self.holdings))

    def _flat(self, items: Iterable[Item]) -> Iterator[tuple[Loop, int, int]]:
        """(loop, index of its first event, index after its last), counting only the events of these ranks."""
        for item in items:
            if isinstance(item, Event):
                if item.mesh in self.ranks.meshes:
                    self.events.append(item)
                continue
            first = len(self.events)
            inner = list(self._flat(item.body))
            if isinstance(item, Loop):
                yield item, first, len(self.events)
            yield from inner

    def _hold(self, what: str, size: int, start: int, stop: int, host: bool = False) -> None:
        if start <= stop and (size or what.startswith("parameters")):
            self.holdings.append(Holding(what, size, start, stop, host and self.device != "cpu"))

    # ------------------------------------------------------------------------------------------- parameters

    def _parameters(self) -> None:
        """Parameters, gradients and optimizer state.

        A copy written inside the step loop counts from the start of the step, because it survives from the step before,
        unless it is freed (`keep=false`) or offloaded in between."""
        first: dict[str, int] = {}  # copy -> index of the first event that writes it
        trained: dict[str, int] = {}  # copy -> index of its first training
        for i, e in enumerate(self.events):
            for buffer in e.writes:
                # a load with `alias_of` needs no memory: that belongs to the copy that it names
                if split_buffer(buffer)[0] in self.models and not (isinstance(e, Load) and e.alias_of):
                    first.setdefault(buffer, i)
            if isinstance(e, Train):
                trained.setdefault(f"{e.model}@{e.layout}", i)
        offloads = [e for e in self.events if isinstance(e, Offload)]
        parameters_offloaded = {f"{e.model}@{e.layout}" for e in offloads if e.part == "parameters"}
        optimizer_offloaded = {f"{e.model}@{e.layout}" for e in offloads if e.part == "optimizer"}
        freed = {b for e in self.events for b in e.frees}
        counted: list[Copy] = []
        copies = [(b, self._copies(b)) for b in first]
        # models with a base (LoRA) first: read-only parameters that several models share count once, as theirs
        for buffer, mine in sorted(copies, key=lambda x: not self.models[split_buffer(x[0])[0]].base):
            if not mine:
                continue
            start = min(2 * first[buffer] + 1, self.top)
            if buffer in parameters_offloaded:
                self._offloaded_parameters(buffer, mine)
            elif buffer in freed:
                self._freed_copy(buffer, mine)
            else:
                self._copy(mine, counted, start)
            if buffer in optimizer_offloaded:
                self._offloaded_optimizer(buffer, mine, trained)
            elif mine[0].trained:
                name = mine[0].model.name
                self._hold(f"gradients of {name}", max(map(gradient_bytes, mine)), start, self.end)
                if buffer in trained:  # the optimizer state is allocated by the first optimizer step
                    begins = self.top if self._many_steps() else 2 * trained[buffer] + 1
                    self._hold(f"optimizer state of {name}", max(map(optimizer_bytes, mine)), begins, self.end)

    def _copy(self, mine: tuple[Copy, ...], counted: list[Copy], start: int) -> None:
        """A copy that stays. counted: copies whose read-only parameters are counted already."""
        model, layout = mine[0].model, mine[0].layout
        own = max(resting_bytes(c) for c in mine)
        if mine[0].shared:
            alone = max(new_bytes(Copy(model, layout, cells[layout.id]),
                                  [replace(c, cell=cells[c.layout.id]) for c in counted]) for cells in self.ranks.cells)
            counted.append(mine[0])
            if model.base:
                self._hold(f"base of {_name(mine[0])}", alone, start, self.end)
            else:
                own = alone
        self._hold(f"parameters of {_name(mine[0])}", own, start, self.end)

    def _offloaded_parameters(self, buffer: str, mine: tuple[Copy, ...]) -> None:
        """On the device from an onload (or the load) to the offload after it, and in host memory otherwise."""
        what = f"parameters of {_name(mine[0])}"
        size = max(resting_bytes(c) + base_bytes(c) for c in mine)
        for on_device, start, stop in self._residency(buffer, "parameters"):
            self._hold(what, size, start, stop, host=not on_device)

    def _offloaded_optimizer(self, buffer: str, mine: tuple[Copy, ...], trained: Mapping[str, int]) -> None:
        """Optimizer state is on the device from an onload to the offload after it, and in host memory otherwise;
        gradients exist only while it is on the device. trained: copy -> index of its first training."""
        name = mine[0].model.name
        begins = self.top if self._many_steps() else 2 * trained.get(buffer, len(self.events)) + 1
        for on_device, start, stop in self._residency(buffer, "optimizer"):
            if on_device:
                self._hold(f"gradients of {name}", max(map(gradient_bytes, mine)), start, stop)
            if stop >= begins:
                self._hold(f"optimizer state of {name}", max(map(optimizer_bytes, mine)), max(start, begins), stop,
                           host=not on_device)

    def _residency(self, buffer: str, part: CopyPart) -> Iterator[tuple[bool, int, int]]:
        """(whether it is on the device, from, to) of the parameters or the optimizer state of a copy."""
        on_device, since = False, -1
        for i, e in enumerate(self.events):
            arrives = isinstance(e, Load) and not e.alias_of or isinstance(e, Onload) and e.part == part
            leaves = isinstance(e, Offload) and e.part == part
            if not isinstance(e, Load | Onload | Offload) or not (arrives or leaves):
                continue
            if f"{e.model}@{e.layout}" != buffer:
                continue
            if on_device != arrives:
                if since >= 0:
                    yield on_device, since, 2 * i + 1
                on_device, since = not on_device, 2 * i + 1
        yield on_device, since, self.end

    def _freed_copy(self, buffer: str, mine: tuple[Copy, ...]) -> None:
        """A copy that exists from each realloc to the free after it."""
        what, size, since = f"parameters of {_name(mine[0])}", max(resting_bytes(c) for c in mine), -1
        for i, e in enumerate(self.events):
            if buffer in e.writes and since < 0:
                since = 2 * i + 1
            elif since >= 0 and buffer in e.frees:
                self._hold(what, size, since, 2 * i + 1)
                since = -1

    def _many_steps(self) -> bool:
        """Whether the run has more than one step."""
        return self.plan.header.steps > 1

    def _copies(self, buffer: str) -> tuple[Copy, ...]:
        """A model under a layout at each cell of these ranks; none if they are not part of the layout."""
        name, layout = split_buffer(buffer)
        return tuple(Copy(self.models[name], self.layouts[layout], cell) for cell in self.ranks.at(layout))

    # ----------------------------------------------------------------------------------------------- values

    def _values(self) -> None:
        """From the event that writes a buffer to its free; what a loop collects, from the beginning of the loop."""
        lasting = {*self.plan.lasting}
        collected = {b: 2 * first for loop, first, _ in self.spans for b in loop.collects}
        until = {loop.until: 2 * last for loop, _, last in self.spans if loop.until}
        for buffer in sorted(lasting):
            self._value(buffer, 0, self.end)
        for e in self.events:
            if isinstance(e, Generate) and e.per_step:
                self._hold(f"responses of {self.labels.name(e.frame)}", carried_bytes(self.t, e), 0, self.end)
        ahead = self._values_of_later_steps(collected) if self.plan.header.lag else set()
        live = {b: start for b, start in collected.items() if self._holds(b) and b not in ahead}
        for i, e in enumerate(self.events):
            for b in e.writes:
                if b not in ahead and b not in live and b not in lasting and self._holds(b):
                    live[b] = 2 * i + 1
            for b in e.frees:
                if b in live:
                    self._value(b, live.pop(b), 2 * i + 1)
        for b, start in live.items():
            self._value(b, start, until.get(b, self.end))

    def _values_of_later_steps(self, collected: Mapping[str, int]) -> set[str]:
        """Buffers that are freed in a later iteration of the step loop than the one that writes them: of some steps all
        of an iteration, of one from its write, and of one up to its free. collected: what loops collect, and the moment
        from which on. What a block writes that runs in some steps counts as if it ran in all."""
        freed = {b: (i, e.ahead) for i, e in enumerate(self.events) for b in e.frees}
        found: set[str] = set()
        for i, e in enumerate(self.events):
            for b in (b for b in e.writes if b in freed and b not in found and self._holds(b)):
                last, ahead = freed[b]
                if e.ahead > ahead:
                    found.add(b)
                    self._value(b, self.top, self.end, e.ahead - ahead - 1)
                    self._value(b, collected.get(b, 2 * i + 1), self.end)
                    self._value(b, self.top, 2 * last + 1)
        return found

    def _holds(self, buffer: str) -> bool:
        value, spread = split_buffer(buffer)
        return value in self.t.values and self.t.spreads[spread].mesh in self.ranks.meshes

    def _value(self, buffer: str, start: int, stop: int, times: int = 1) -> None:
        """times: of how many steps it is held."""
        value, spread = split_buffer(buffer)
        size = self._cache(value) if self.t.values[value].extent == "cache" else buffer_bytes(self.t, value, spread)
        self._hold(self.labels.name(value), size * times, start, stop)

    def _cache(self, value: str) -> int:
        """The KV cache that a generate keeps."""
        writers = [e for e in self.events if isinstance(e, Generate) and value == f"{e.frame}.cache"]
        return max((kept_cache_bytes(self.t, e, c) for e in writers for c in self._copies(f"{e.model}@{e.layout}")),
                   default=0)

    # ----------------------------------------------------------------------------------------------- events

    def _during(self, i: int, e: Event) -> None:
        if e.traits.scratch:
            rule_for(RULES, e, "the memory estimate")(self, i, e)

    def _call(self, i: int, e: AnyCall) -> None:
        now = 2 * i + 1
        by_cell = [call_bytes(self.t, e, c, self.device) for c in self._copies(f"{e.model}@{e.layout}")]
        for what, size in max(by_cell, key=lambda needs: sum(needs.values())).items():
            self._hold(what, size, now, now)
        if isinstance(e, Generate):  # a layer of it at a time is joined from parts, or copied to the slots
            kept = [self._cache(v) for v, _ in map(split_buffer, (*e.reads, *e.writes))
                    if v in self.t.values and self.t.values[v].extent == "cache"]
            layers = max(1, min((c.layers for c in self._copies(f"{e.model}@{e.layout}")), default=1))
            self._hold(f"a layer of the KV cache of {self.labels.name(e.frame)}", max(kept, default=0) // layers, now,
                       now)
            away = max((offloaded_cache_bytes(self.t, e, c) for c in self._copies(f"{e.model}@{e.layout}")), default=0)
            self._hold(f"KV cache of waiting conversations of {e.display_name}", away, now, now, host=True)
        if isinstance(e, Train):
            size = loss_gather_bytes(self.t, self.programs[e.loss], self.t.spreads[e.spread])
            self._hold(f"medians and quantiles of {e.model}.train", size, now, now)
            if e.first_pass:
                size = first_pass_bytes(self.t, self.programs[e.loss], self.t.spreads[e.spread], e.frames)
                self._hold(f"the whole minibatch of {e.model}.train", size, now, now)

    def _compute(self, i: int, e: Compute) -> None:
        size = flow_gather_bytes(self.t, self.programs[e.program], self.t.spreads[e.spread])
        self._hold(f"medians and quantiles of {self.labels.name(e.display_name)}", size, 2 * i + 1, 2 * i + 1)

    def _load(self, i: int, e: Load) -> None:
        if not e.alias_of:
            now, size = 2 * i + 1, FLOAT * max(map(largest, self._copies(f"{e.model}@{e.layout}")))
            self._hold(f"weights of {e.model} being loaded", size, now, now, host=True)

    def _save(self, i: int, e: Save) -> None:
        now, copies = 2 * i + 1, self._copies(f"{e.model}@{e.layout}")
        self._hold(f"parameters gathered to save {e.model}", max(map(saved_bytes, copies)), now, now)

    def _transfer(self, i: int, e: Transfer) -> None:
        """Send buffers are kept until the transfer is waited for, at the first read; then the received rows are joined
        in one tensor."""
        what = f"transfer of {', '.join(map(self.labels.name, e.values))}"
        received = [f"{v}@{e.dst}" for v in e.values]
        sends = sum(buffer_bytes(self.t, v, e.src) for v in e.values if self._holds(f"{v}@{e.src}"))
        joined = sum(buffer_bytes(self.t, *split_buffer(b)) for b in received if self._holds(b))
        self._until_read(what, sends, i, 2 * i + 1, received)
        reader = self._reader(i + 1, received)
        joined_at = self.end if reader is None else reader
        self._hold(what, joined, joined_at, joined_at)

    def _realloc(self, i: int, e: Realloc) -> None:
        """The buffers of the last rounds live until the new copy is first used; a rank that only sends waits
        at once."""
        model = self.models[e.model]
        reshards = self.reshards.get(realloc_key(e), ())
        buffers = realloc_bytes(self.plan, reshards, e, self.ranks) if reshards else 0
        what, now = f"realloc of {e.display_name if e.source else e.model}", 2 * i + 1
        # an `ema`, parameter by parameter: the old one, the new one and their mean
        mean = 3 * FLOAT * max((largest(c) for c in self._copies(f"{model.name}@{e.dst}")), default=0)
        self._hold(what, buffers + (mean if e.decay else 0), now, now)
        if self.ranks.at(e.dst):
            self._until_read(what, buffers, i, now + 1, [f"{model.name}@{e.dst}"], before=1)

    def _until_read(self, what: str, size: int, i: int, start: int, buffers: list[str], before: int = 0) -> None:
        """Held from event i until one of the buffers is first read or freed, less `before` moments. If that happens
        only in the next step, the holding wraps around: to the end of the step, and from its beginning."""
        reader = self._reader(i + 1, buffers)
        if reader is not None:
            self._hold(what, size, start, reader - before)
            return
        self._hold(what, size, start, self.end)
        if self._many_steps():
            reader = self._reader(self.top // 2, buffers)
            self._hold(what, size, self.top, min(start - 1, start if reader is None else reader - before))

    def _reader(self, first: int, buffers: list[str]) -> int | None:
        """The moment of the first event, from index `first` on, that reads or frees one of the buffers."""
        at = [self.uses.get(b, ()) for b in buffers]
        later = [js[k] for js in at if (k := bisect_left(js, first)) < len(js)]
        return 2 * min(later) + 1 if later else None

    def _checkpoint(self, i: int, e: Checkpoint) -> None:
        """A share of each model: ranks that hold the same divide it. It is written while the next steps run."""
        size = 0
        for buffer in e.reads:
            if split_buffer(buffer)[0] in self.models and (copies := self._copies(buffer)):
                parts = 3 if copies[0].trained else 1
                complete = max(resting_bytes(c) * num_zero_shards(c.layout) for c in copies)
                size += parts * complete // (copies[0].layout.dp * copies[0].layout.cp)
        if size:
            start = self.top if self._many_steps() else 2 * i + 1
            self._hold("checkpoint being written", size, start, self.end, host=True)


def _name(copy: Copy) -> str:
    return f"{copy.model.name} ({degrees_of(copy.layout)})"


# What a kind of event needs while it runs, of the kinds whose traits say `scratch`.
RULES: Mapping[type[Event], Callable[[_Lifetimes, int, Any], None]] = {
    Generate: _Lifetimes._call,
    Infer: _Lifetimes._call,
    Train: _Lifetimes._call,
    Compute: _Lifetimes._compute,
    Transfer: _Lifetimes._transfer,
    Realloc: _Lifetimes._realloc,
    Load: _Lifetimes._load,
    Save: _Lifetimes._save,
    Checkpoint: _Lifetimes._checkpoint,
}
