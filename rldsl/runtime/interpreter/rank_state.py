"""The state of a rank during a run, in four parts, so that functions can take only the parts that they need."""

from __future__ import annotations

from dataclasses import dataclass

from rldsl.runtime.health.event_ring import EventRing
from rldsl.runtime.metrics.reporter import Reporter
from rldsl.runtime.persist.checkpoint_reader import LoadedCheckpoint
from rldsl.runtime.persist.checkpoint_writer import CheckpointWriter
from rldsl.runtime.rewards.pool import RewardPool
from rldsl.runtime.state.context import RunContext
from rldsl.runtime.state.data_reader import DataReader
from rldsl.runtime.state.model_store import ModelStore
from rldsl.runtime.state.step import StepState


@dataclass(frozen=True, slots=True)
class Services:
    """What connects a rank to the outside: files, other processes, its watchdog."""

    # data sources and the run's position in them
    data: DataReader
    # calls users' Python functions
    rewards: RewardPool
    # metrics, samples and progress
    reporter: Reporter
    # what this rank did last, for the watchdog
    ring: EventRing
    # writes checkpoints; None if the plan makes none
    writer: CheckpointWriter | None = None
    # the checkpoint that the run resumes from; None if it starts anew
    resumed: LoadedCheckpoint | None = None


@dataclass(frozen=True, slots=True)
class RankState:
    """The state of one rank during a run."""

    context: RunContext  # the plan and the communicators; never changes
    models: ModelStore  # shards of models
    step: StepState  # rows and values of the step under way
    services: Services
