"""What one rank knows of a run before the first step, and what never changes afterwards.

In: a plan, this rank's `World`, the run's directory. Out: the plan's records by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch

from rldsl.plan.entries import EntrySpace, entry_spaces
from rldsl.plan.events import Collect, Derive, Event, Generate, Lengths, Load, Loop, Offload, split_buffer
from rldsl.plan.expr import Program
from rldsl.plan.function import Function
from rldsl.plan.model import Data, Model, Plan, Spread, Value
from rldsl.plan.projection import event_paths
from rldsl.plan.prompt_sources import PromptSource, prompt_sources, prompts_by_spread
from rldsl.plan.spaces import IndexedFrame, indexed_frames
from rldsl.runtime.comm.world import World

ShardKey = tuple[str, str]  # model, layout


@dataclass(frozen=True)
class RunContext:
    """What never changes during a run; one object, shared by everything that runs on a rank."""

    # the whole plan, of all ranks
    plan: Plan
    # this rank's number, device and communicators
    world: World
    # directory of what the run writes
    out: Path
    # directories besides `out` and the working directory in which models may be saved (`Options.allow_write`)
    allow_write: tuple[str, ...] = ()

    @property
    def rank(self) -> int:
        return self.world.rank

    @property
    def device(self) -> torch.device:
        return self.world.device

    @property
    def seed(self) -> int:
        return self.plan.header.seed

    @cached_property
    def models(self) -> Mapping[str, Model]:
        return {m.name: m for m in self.plan.models}

    @cached_property
    def data(self) -> Mapping[str, Data]:
        return {d.name: d for d in self.plan.data}

    @cached_property
    def frames(self) -> Mapping[str, IndexedFrame]:
        return indexed_frames(self.plan)

    @cached_property
    def values(self) -> Mapping[str, Value]:
        return {v.id: v for v in self.plan.values}

    @cached_property
    def entries(self) -> Mapping[str, EntrySpace]:
        return entry_spaces(self.plan.values)

    @cached_property
    def spreads(self) -> Mapping[str, Spread]:
        return {s.id: s for s in self.plan.spreads}

    @cached_property
    def programs(self) -> Mapping[str, Program]:
        return {p.id: p for p in self.plan.programs}

    @cached_property
    def functions(self) -> Mapping[str, Function]:
        return {f.id: f for f in self.plan.functions}

    @cached_property
    def offloaded(self) -> frozenset[ShardKey]:
        """The shards whose parameters the plan moves between device and host."""
        return frozenset((e.model, e.layout) for e, _ in event_paths(self.plan)
                         if isinstance(e, Offload) and e.part == "parameters")

    @cached_property
    def derived(self) -> frozenset[str]:
        """The frames whose sequences are copies of another frame's, so that their tokens count once."""
        own = {e.frame for e, _ in event_paths(self.plan) if isinstance(e, Derive)}
        return frozenset(own | {e.into for e, _ in event_paths(self.plan) if isinstance(e, Collect) and e.frame in own})

    @cached_property
    def prompt_sources(self) -> Mapping[str, PromptSource]:
        """See `plan/prompt_sources.py`."""
        return prompt_sources(self.plan)

    @cached_property
    def prompts_by_spread(self) -> Mapping[str, int]:
        """See `plan/prompt_sources.py`."""
        return prompts_by_spread(self.plan)

    @cached_property
    def known_ahead(self) -> frozenset[str]:
        """The frames whose lengths this rank gets ahead of their step, so that an exchange in it tells nothing new."""
        ahead = [e for e, _ in event_paths(self.plan)
                 if e.ahead > 0 and self.rank in self.world.meshes[e.mesh].members()]
        return frozenset((*(e.frame for e in ahead if isinstance(e, Lengths)),
                          *(e.into for e in ahead if isinstance(e, Collect)
                            if any(w.endswith(".lengths") for _, w in e.values))))

    @cached_property
    def continued(self) -> Mapping[str, Generate]:
        """Generated frame whose responses continue in later steps -> the call that makes it."""
        return {e.frame: e for e, _ in event_paths(self.plan) if isinstance(e, Generate) and e.per_step}

    @cached_property
    def changing_models(self) -> frozenset[str]:
        """The models whose parameters change during the run."""
        return frozenset(m.name for m in self.plan.models if m.train_layout or m.updated_from)

    def reads_states(self, event: Event) -> bool:
        """Whether an event reads a state of the run, or of rows."""
        return any(b in self.lasting for b in event.reads)

    @cached_property
    def lasting(self) -> frozenset[str]:
        """The values that persist over steps, as `value@spread`."""
        return frozenset(self.plan.lasting)

    @cached_property
    def conditions(self) -> frozenset[str]:
        """The values that end loops."""
        return frozenset(split_buffer(x.until)[0] for _, path in event_paths(self.plan) for x in path
                         if isinstance(x, Loop) and x.until)

    @cached_property
    def aliases(self) -> Mapping[ShardKey, str]:
        """Shard -> the layout of the same model whose parameters it uses, instead of its own."""
        return {(e.model, e.layout): e.alias_of for e, _ in event_paths(self.plan)
                if isinstance(e, Load) and e.alias_of}

    def holds(self, buffer: str) -> bool:
        """Whether this rank is on the mesh of a value's buffer (`value@spread`)."""
        mesh = self.spreads[split_buffer(buffer)[1]].mesh
        return self.rank in self.world.meshes[mesh].members()
