"""A few sequences of each step as text, with what is known of them: OUT/samples/FRAME.jsonl, one line per sequence.

In: the buffers of one rank, seen just before they are freed. Out: lines {step, row, prompt, completion, VALUE: number};
of a conversation also what ended it and its turns (`sampled_turns.py`).
No message is sent for it: of each generated frame one rank writes rows that it holds. That rank, and the spread, are
those where most values of sequences (rewards, scores) are held together with the tokens. Every rank derives the same
from the plan.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from rldsl.plan.events import Event, Generate, Train, split_buffer
from rldsl.plan.metrics_file import SAMPLES
from rldsl.plan.model import Plan
from rldsl.plan.payloads import ROLLOUTS
from rldsl.plan.projection import event_paths
from rldsl.plan.spaces import IndexedFrame, indexed_frames
from rldsl.runtime.data.tokens import Tokens
from rldsl.runtime.image_tokens import plain_ids
from rldsl.runtime.metrics.json_lines import LineFiles
from rldsl.runtime.metrics.sampled_turns import REASONS, turns_of
from rldsl.runtime.state.context import RunContext
from rldsl.runtime.state.data_reader import DataReader
from rldsl.runtime.state.step import StepState
from rldsl.runtime.state.turns import unmarked
from rldsl.runtime.store import RaggedRows

ANONYMOUS = re.compile(r"(expr|where)#\d+")  # values that the program gives no name


@dataclass(frozen=True, slots=True)
class SampleSource:
    """Where the samples of a frame are taken from."""

    frame: str   # its id
    spread: str  # under which its tokens are held
    rank: int    # who writes them


def sample_sources(plan: Plan) -> tuple[SampleSource, ...]:
    """One for each frame that the run's loop generates; with `per_step`, for the responses of it that have ended,
    where the program uses them."""
    buffers = dict.fromkeys(b for e, _ in event_paths(plan) for b in e.writes)
    made = {split_buffer(b)[0] for b in buffers}
    names = {e.frame: e.frame.removesuffix(ROLLOUTS) for e, _ in event_paths(plan) if isinstance(e, Generate)}
    generated = dict.fromkeys(name if f"{name}.tokens" in made else frame for frame, name in names.items())
    meshes, spreads = {m.id: m for m in plan.meshes}, {s.id: s for s in plan.spreads}
    frames, values = indexed_frames(plan), {v.id: v for v in plan.values}
    sources = []
    for frame in generated:
        where = [split_buffer(b)[1] for b in buffers if split_buffer(b)[0] == f"{frame}.tokens"]
        row_spreads = [split_buffer(b)[1] for b in buffers if (v := values.get(split_buffer(b)[0])) is not None
                       and v.extent == "row" and frames[v.frame].row_space == frames[frame].row_space]
        best = max(where, key=row_spreads.count)  # the first of those with as many
        sources.append(SampleSource(frame, best, meshes[spreads[best].mesh].members()[0]))
    return tuple(sources)


def value_names(plan: Plan, spaces: set[str]) -> dict[str, str]:
    """Value of a sequence -> what a line calls it: its name, or the input of the loss that it is. spaces: rows whose
    values are wanted."""
    inputs = {v: f"{e.model}/{name}" for e, _ in reversed(list(event_paths(plan))) if isinstance(e, Train)
              for name, v in e.data_inputs}
    rows = {f.id: f.row_space for f in plan.frames}
    values = (v.id for v in plan.values if v.extent == "row" and v.dtype != "text" and rows.get(v.frame) in spaces)
    return {v: inputs[v] if ANONYMOUS.fullmatch(v) else v for v in values if v in inputs or not ANONYMOUS.fullmatch(v)}


class Samples:
    """The samples that this rank writes."""

    def __init__(self, context: RunContext, data: DataReader, max_samples: int):
        """max_samples: rows of each frame and step."""
        self._context, self._data, self._max_samples = context, data, max_samples
        self._mine = [s for s in sample_sources(context.plan) if s.rank == context.rank]
        # by step: what is taken of steps that events run ahead for, too
        self._tokens: dict[int, dict[str, tuple[RaggedRows, Any]]] = defaultdict(dict)
        # value -> spread -> what this rank held there last; spreads may divide rows differently
        self._values: dict[int, dict[str, dict[str, RaggedRows]]] = defaultdict(lambda: defaultdict(dict))
        self._files = LineFiles()
        self._lines: dict[int, dict[str, list[dict[str, Any]]]] = defaultdict(dict)  # by step, for `take`
        self._names = value_names(context.plan, {context.frames[s.frame].row_space for s in self._mine})
        self._turn_values = {f"{s.frame}.turn_reward" for s in self._mine}
        for source in self._mine:
            data.tokens(context.frames[source.frame])  # its tokenizer; what is wrong with it is found now

    def frees(self, step: StepState, event: Event) -> None:
        """Take samples from the buffers that the event is about to free."""
        for buffer in event.frees:
            self._keep(step, buffer)

    def _keep(self, step: StepState, buffer: str) -> None:
        value, spread = split_buffer(buffer)
        if value in self._names or value in self._turn_values:
            if self._context.holds(buffer):
                self._values[step.number][value][spread] = step.buffers.get(buffer)
            return
        for source in self._mine:
            if value == f"{source.frame}.tokens" and spread == source.spread:
                self._tokens[step.number][source.frame] = step.buffers.get(buffer), step.rows.lens[source.frame]

    def take(self, step: int) -> Mapping[str, list[dict[str, Any]]]:
        """What this rank has written for a step: name of the sequences -> lines. To be called once for each step."""
        return self._lines.pop(step, {})

    def end_step(self, step: StepState) -> None:
        """Write the rows of this step."""
        values = self._values.pop(step.number, {})
        for frame, (tokens, lens) in self._tokens.pop(step.number, {}).items():
            self._write(step.number, self._context.frames[frame], tokens, lens, values)

    def _write(self, step: int, frame: IndexedFrame, tokens: RaggedRows, lens: Any,
               values: Mapping[str, Mapping[str, RaggedRows]]) -> None:
        rows = tokens.ids[lens.of("tokens")[tokens.ids] > 0][: self._max_samples]
        source = self._data.tokens(frame)
        tokenizer = source.tokenizer
        row_spaces = {v: self._context.frames[self._context.values[v].frame].row_space for v in values}
        numbers = {self._names[value]: _numbers(columns, rows) for value, columns in sorted(values.items())
                   if value in self._names and row_spaces[value] == frame.row_space}
        lines = []
        for i, row in enumerate(rows.tolist()):
            stored = tokens.select(rows[i : i + 1]).data
            prompt = int(lens.prompt[row])
            talk: dict[str, Any] = {}
            if frame.max_turns:  # the completion begins with the first turn
                talk = _talk(frame, row, stored, source, values)
                stored, own = unmarked(stored)
                prompt = own.tolist().index(True) if prompt < len(own) else prompt
            ids = plain_ids(stored.tolist())
            text = {"step": step, "row": row, "prompt": tokenizer.decode(ids[:prompt], skip_special_tokens=True),
                    "completion": tokenizer.decode(ids[prompt:], skip_special_tokens=True)}
            lines.append(text | {v: n[row] for v, n in numbers.items() if row in n} | talk)
        file = samples_file(self._context.out, frame.id)
        self._files.append(file, step, lines)
        self._lines[step][file.stem] = lines


def _talk(frame: IndexedFrame, row: int, stored: torch.Tensor, tokens: Tokens,
          values: Mapping[str, Mapping[str, RaggedRows]]) -> dict[str, Any]:
    """What ended a conversation, where that is known, and its turns."""
    at = torch.tensor([row], device=stored.device)

    def of(name: str) -> list[float]:
        columns = values.get(f"{frame.id}.{name}", {}).values()
        return next((c.gather(at).data.tolist() for c in columns if row in c.ids), [])

    stopped = of("stopped")
    return {"conversation": ({"stopped": REASONS[int(stopped[0])]} if stopped else {}) | {
        "turns": turns_of(stored, tokens, of("turn_reward"))}}


def samples_file(out: Path, frame: str) -> Path:
    return out / SAMPLES / f"{re.sub(r'[^A-Za-z0-9_.-]', '_', frame)}.jsonl"


def _numbers(columns: Mapping[str, RaggedRows], rows: torch.Tensor) -> Mapping[int, float]:
    """The values of those rows that the columns have."""
    wanted = set(rows.tolist())
    return {i: x for column in columns.values()
            for i, x in zip(column.ids.tolist(), column.data.reshape(-1).tolist(), strict=True) if i in wanted}
