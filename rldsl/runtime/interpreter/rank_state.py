"""The state of a rank during a run, in four parts, so that functions can take only the parts that they need."""

from __future__ import annotations

from dataclasses import dataclass, field

from rldsl.runtime.health.event_ring import EventRing
from rldsl.runtime.interpreter.conversations import Environments
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

    data: DataReader                         # data sources and the run's position in them
    rewards: RewardPool                      # calls users' Python functions
    reporter: Reporter                       # metrics, samples and progress
    ring: EventRing                          # what this rank did last, for the watchdog
    writer: CheckpointWriter | None = None   # writes checkpoints; None if the plan makes none
    resumed: LoadedCheckpoint | None = None  # the checkpoint that the run resumes from; None if it starts anew
    environments: Environments = field(default_factory=Environments)  # that models talk with


@dataclass(frozen=True, slots=True)
class RankState:
    """The state of one rank during a run."""

    context: RunContext  # the plan and the communicators; never changes
    models: ModelStore   # shards of models
    step: StepState      # rows and values of the step under way
    services: Services   # files, other processes, the watchdog
