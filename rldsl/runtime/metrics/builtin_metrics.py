"""What every run measures, without a separate message: time and tokens of each phase, bytes moved, memory, lengths.

In: the events that one rank executed, with their durations. Out: numbers by name, once per step. Durations are those of
this rank; tokens are those of all ranks that share the call; bytes are those of the plan, for all ranks, and of ragged
transfers those that this rank sent and received.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from rldsl.plan.events import Event, Fetch, Generate, Infer, Item, Lengths, Loop, Train
from rldsl.plan.model import Plan
from rldsl.plan.payloads import ROLLOUTS
from rldsl.runtime.metrics.phase_times import PhaseTimes
from rldsl.runtime.state.step import StepState, TalkTotals

PHASES: Mapping[type[Event], str] = {Generate: "generate", Infer: "infer", Train: "train"}


@dataclass(frozen=True, slots=True)
class Measured:
    """What a rank measured in a step."""

    times: PhaseTimes  # perhaps not over for the device
    tokens: Mapping[str, int]  # of each phase
    rest: Mapping[str, float]  # by the names of the metrics

    def numbers(self) -> dict[str, float]:
        """By name. Waits for what is not over."""
        phases = self.times.seconds()
        found = {f"time/{phase}": round(s, 4) for phase, s in phases.items()}
        for phase, tokens in self.tokens.items():
            if tokens and phases.get(phase):
                found[f"tokens_per_second/{phase}"] = round(tokens / phases[phase], 1)
        return {**found, **self.rest}


class Meter:
    """The usual metrics of the step under way."""

    def __init__(self, plan: Plan):
        self._times = PhaseTimes()
        self._tokens: dict[str, int] = defaultdict(int)
        # step -> tokens and rows of responses whose lengths are known, perhaps before the step begins
        self._responses: dict[int, int] = defaultdict(int)
        self._rows: dict[int, int] = defaultdict(int)
        # loop -> how many iterations it made, each time it was entered
        self._iterations: dict[str, list[int]] = defaultdict(list)
        self._talked = TalkTotals()  # of the conversations of this step
        self._generated: set[str] = set()  # frames that this rank has helped to generate, whose lengths come next
        loop = next((x for x in plan.body if isinstance(x, Loop)), None)
        self._priced = _priced(loop.body) if loop is not None else ()
        self._world = plan.header.world

    def begins(self, step: StepState, event: Event) -> None:
        """An event is about to be executed. step: for which."""
        if type(event) in PHASES:
            self._times.begin(step.context.device)

    def took(self, step: StepState, event: Event, seconds: float) -> None:
        """An event was executed. step: for which."""
        phase = PHASES.get(type(event))
        if phase is not None:
            self._times.end(phase, seconds)
        if isinstance(event, Generate):
            self._generated.add(event.frame)
            self._talked = sum(step.talked, self._talked)
            step.talked.clear()
        elif isinstance(event, Infer):
            self._tokens["infer"] += _tokens(step, event.frame)
        elif isinstance(event, Train):
            epochs = step.context.spreads[event.spread].epochs
            self._tokens["train"] += epochs * sum(_tokens(step, frame) for frame in event.frames)
        elif isinstance(event, Lengths | Fetch):
            for frame in (event.frame,) if isinstance(event, Lengths) else event.frames:
                self._lengths(step, frame)

    def _lengths(self, step: StepState, frame: str) -> None:
        record = step.context.frames[frame]
        # a selection's rows are those of its frame; or prompts alone
        ended = record.selected_from.endswith(ROLLOUTS)  # of responses that several steps sample
        made_before = (record.selected_from or frame in step.context.derived) and not ended
        if made_before or not record.max_response_tokens:
            return
        lens = step.rows.lens[frame]
        total = sum(lens.to_list("response"))
        if frame in self._generated:  # another rank's call takes none of this one's time
            self._generated.remove(frame)
            self._tokens["generate"] += step.sampled.get(frame, total)
        if frame in step.sampled:
            return
        if not step.evaluated_source:  # the lengths of training are those of its own rows
            self._responses[step.number] += total
            # a row that a selection left out has no tokens at all
            self._rows[step.number] += sum(n > 0 for n in lens.to_list("tokens"))

    def entered(self, loop: str) -> None:
        """An inner loop begins."""
        self._iterations[loop].append(0)

    def iterated(self, loop: str) -> None:
        """It begins one more iteration."""
        self._iterations[loop][-1] += 1

    def finish(self, step: StepState) -> Measured:
        """The numbers of the step, then begin the next."""
        numbers: dict[str, float] = {}
        responses, rows = self._responses.pop(step.number, 0), self._rows.pop(step.number, 0)
        if rows:
            numbers["length/response"] = responses / rows
        if talked := self._talked.conversations:
            numbers |= {"conversation/turns": self._talked.turns / talked,
                        "conversation/tool_seconds": round(self._talked.waited / talked, 4),
                        "conversation/waiting": round(self._talked.waited / max(self._talked.lasted, 1e-9), 4),
                        "conversation/slots_given_away": self._talked.given_away / talked,
                        "conversation/errors": float(self._talked.errors)}
        self._talked = TalkTotals()
        if self._world > 1:
            iterations = {loop: list(counts) for loop, counts in self._iterations.items()}
            numbers["moved/bytes"] = _bytes(self._priced, step.number, iterations) + step.ragged_bytes
        numbers["memory/peak_bytes"] = peak_bytes(step.context.device)
        measured = Measured(self._times, dict(self._tokens), numbers)
        self._times = PhaseTimes()
        self._tokens.clear()
        self._iterations.clear()
        step.ragged_bytes = 0
        return measured


def _tokens(step: StepState, frame: str) -> int:
    return sum(step.rows.lens[frame].to_list("tokens"))


def _priced(items: Sequence[Item]) -> tuple[Item, ...]:
    """Only what moves a known number of bytes, and the blocks around it."""
    moving: list[Item] = []
    for item in items:
        if isinstance(item, Event):
            if item.bytes > 0:
                moving.append(item)
        elif inner := _priced(item.body):
            moving.append(replace(item, body=inner))
    return tuple(moving)


def _bytes(items: Sequence[Item], number: int, iterations: Mapping[str, list[int]]) -> int:
    """Bytes of iteration `number` of a loop's body. iterations: how many each inner loop made, each time that it was
    entered; removed from the front as they are counted. A loop that this rank takes no part in counts as often as the
    plan fixes it, and not at all if its number of iterations is only known at run time."""
    total = 0
    for item in items:
        if isinstance(item, Event):
            total += item.bytes
        elif isinstance(item, Loop):
            fixed = 0 if item.until or item.over else item.trips
            count = iterations[item.id].pop(0) if iterations.get(item.id) else fixed
            total += sum(_bytes(item.body, i, iterations) for i in range(1, count + 1))
        elif item.runs(number):
            total += _bytes(item.body, number, iterations)
    return total


def peak_bytes(device: torch.device) -> int:
    """The most bytes that this rank has used so far, on its GPU or by the process on the CPU. On a GPU: what torch's
    allocator has reserved at most, and what lies outside of it now (kernels, communicators)."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        outside = max(total - free - torch.cuda.memory_reserved(device), 0)
        return torch.cuda.max_memory_reserved(device) + outside
    import resource

    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
