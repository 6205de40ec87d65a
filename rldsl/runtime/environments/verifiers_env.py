"""Environments of verifiers (0.4), in the conversation's process: their agent asks the model at the endpoint.

A row of the data is a task: its columns are the fields of the task data, as the library's own server takes them. The
reward is that of the one trace which the episode has.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from rldsl.diag import fail
from rldsl.plan.function import Function

KEY = "RLDSL_API_KEY"  # of this process, where the library's client reads it


class VerifiersEnv:
    """An `Env` of verifiers as an agent. Nothing of verifiers is imported that its file has not."""

    def __init__(self, function: Function, env: Any):
        self.function, self.env = function, env

    async def run(self, row: Mapping[str, Any], base_url: str, api_key: str) -> float:
        """Play one episode. What goes wrong in it is raised."""
        from verifiers.v1.clients import EvalClientConfig, ModelContext  # type: ignore[import-not-found]  # an extra

        os.environ[KEY] = api_key
        context = ModelContext(model="policy", client=EvalClientConfig(base_url=base_url, api_key_var=KEY))
        kind, tasks = type(self.env.taskset).task_type(), self.env.config.taskset
        task = kind(kind.data_type().model_validate(row), tasks.task)
        async with self.env.serving():
            (slot,) = self.env.slots(task)
            episode = await self.env.run_slot(slot, context)
        if not episode.ok:
            raise RuntimeError(self._error(episode))
        traces = [trace for trace in episode.traces if trace.agent.trainable]
        if len(traces) != 1:
            raise fail("RL0715", f"`{self.function.name}`: its episode has {len(traces)} trainable agents, not one",
                       place=self.function.path, help="a conversation has one agent: use an environment with one seat")
        return float(traces[0].reward)

    @staticmethod
    def _error(episode: Any) -> str:
        errors = [*episode.errors, *(trace.last_error for trace in episode.traces)]
        return next((f"{error.type}: {error.message}" for error in errors if error is not None), "the episode failed")
