"""All that a rank carries through a run, in the four parts that functions take what they need from."""

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
    """What a rank uses that reaches outside of it: files, other processes, its watchdog."""

    # data sources and the run's position in them
    data: DataReader
    # calls users' Python functions
    rewards: RewardPool
    # metrics, samples and progress
    reporter: Reporter
    # what this rank did last, for the watchdog
    ring: EventRing
    # of checkpoints; None where the plan makes none
    writer: CheckpointWriter | None = None
    # the checkpoint that the run resumes from
    resumed: LoadedCheckpoint | None = None


@dataclass(frozen=True, slots=True)
class RankState:
    """One rank's."""

    context: RunContext
    models: ModelStore
    step: StepState
    services: Services
