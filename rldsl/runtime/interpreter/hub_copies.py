"""A plan whose models, adapters and data of the Hub are directories of this machine.

In: a plan. Out: the same with the directories of the cache; the first rank of a machine downloads what is missing.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace
from typing import cast

import torch.distributed as dist

from rldsl.models import hub, hub_adapters, hub_data
from rldsl.plan.model import Plan
from rldsl.runtime.health.watchdog import Watchdog


def with_local_copies(plan: Plan, watchdog: Watchdog | None) -> Plan:
    """Models, adapters and data of the Hub by their directories in the cache of this node; its first rank downloads
    what is missing there."""
    models, data = sorted({m.path for m in plan.models}), sorted({d.path for d in plan.data if d.format == "hf"})
    adapters = sorted({m.lora.path for m in plan.models if m.lora is not None and m.lora.path})
    if not any(path.startswith(hub.PREFIX) for path in (*models, *adapters, *data)):
        return plan
    if watchdog is not None:
        watchdog.ring.begin_startup("downloading from the Hub")

    def local() -> dict[str, str]:
        return {path: str(hub_adapters.directory(path)) for path in adapters} | {
            path: hub.download(path) for path in models} | {path: hub_data.download(path) for path in data}

    if is_first_of_machine():
        local()
    if dist.get_world_size() > 1:
        dist.barrier()
    return cast(Plan, _with_paths(plan, local()))


def _with_paths(part: object, new: Mapping[str, str]) -> object:
    """A part of a plan with other paths, wherever it has them: data and buffers name the tokenizers of models."""
    if isinstance(part, str):
        return new.get(part, part)
    if isinstance(part, tuple):
        return tuple(_with_paths(x, new) for x in part)
    if is_dataclass(part) and not isinstance(part, type):
        return replace(part, **{f.name: _with_paths(getattr(part, f.name), new) for f in fields(part) if f.init})
    return part


def is_first_of_machine() -> bool:
    return os.environ.get("LOCAL_RANK", "0") == "0"
