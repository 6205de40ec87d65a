"""All that a rank carries through a run, in the four parts that functions take what they need from."""

from __future__ import annotations

from dataclasses import dataclass

from rldsl.runtime.health.event_ring import Ring
from rldsl.runtime.metrics.reporter import Report
from rldsl.runtime.persist.checkpoint_reader import Resume
from rldsl.runtime.persist.checkpoint_writer import Writer
from rldsl.runtime.rewards.pool import Pool
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
    rewards: Pool
    # metrics, samples and progress
    reporter: Report
    # what this rank did last, for the watchdog
    ring: Ring
    # of checkpoints; None where the plan makes none
    writer: Writer | None = None
    # the checkpoint that the run resumes from
    resumed: Resume | None = None


@dataclass(frozen=True, slots=True)
class RankState:
    """One rank's."""

    context: RunContext
    models: ModelStore
    step: StepState
    services: Services
