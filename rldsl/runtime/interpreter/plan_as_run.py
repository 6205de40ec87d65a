"""The plan as this run executes it, and what rank 0 prints of it: files, and machines that are not alike.

In: a plan, the options of the run. Out: the plan, with the Python functions as they are if the run allows that.
Errors: of `check_hosts` and `check_writes`.
"""

from __future__ import annotations

import socket
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from rldsl.plan.disk_paths import paths, text
from rldsl.plan.model import Plan
from rldsl.runtime.comm.agreement import gather_texts
from rldsl.runtime.comm.arithmetic import arithmetic, differences
from rldsl.runtime.comm.world import check_hosts, gather_hosts
from rldsl.runtime.interpreter.options import Options
from rldsl.runtime.persist.allowed_paths import check_writes, with_python_as_it_is


def plan_as_run(plan: Plan, name: str, out: str | Path, device: torch.device, options: Options) -> Plan:
    """The plan as this run executes it, after checking that it fits the machines and writes only to allowed paths; rank
    0 prints what it reads and writes."""
    found = [check_hosts(plan, gather_hosts(socket.gethostname(), device), name),
             differences(gather_texts(arithmetic(device, [x.backend for x in plan.layouts]), device))]
    check_writes(plan, Path(out), options.allow_write)
    changed: tuple[str, ...] = ()
    if options.changed_python:
        plan, changed = with_python_as_it_is(plan)
    if dist.get_rank() == 0:
        notes = [*filter(None, found), *(f"{path} changed since the plan was compiled" for path in changed)]
        print("\n".join([text(paths(plan), str(out)), *(f"note: {n}" for n in notes)]), file=sys.stderr, flush=True)
    return plan
