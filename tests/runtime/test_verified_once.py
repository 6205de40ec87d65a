"""A plan is verified by the first rank of each machine; where it is wrong, no rank continues."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from rldsl.diag import Failure
from rldsl.plan.codec import encode
from rldsl.plan.model import Plan
from tests.plan.sample import grpo
from tests.world import run_world


def began(rank: int, data: bytes, out: str, local_ranks: tuple[int, ...]) -> tuple[int, list[str]]:
    """How often this rank has verified the plan, and the codes of the failure that it ends with."""
    from rldsl.runtime.interpreter import startup
    from rldsl.runtime.interpreter.options import Options
    from rldsl.runtime.plan_file import PlanFile

    os.environ["LOCAL_RANK"] = str(local_ranks[rank])
    asked: list[Plan] = []
    plain = startup.verify
    startup.verify = lambda plan: (asked.append(plan), plain(plan))[1]  # type: ignore[assignment]
    startup.plan_as_run = _stop  # what comes next
    try:
        startup.prepare(PlanFile.from_bytes(data, "x.plan"), out, torch.device("cpu"), None, Options())
    except Failure as failure:
        return len(asked), [d.code for d in failure.diagnostics]
    except StopIteration:
        return len(asked), ["continued"]
    return len(asked), []


def _stop(*_: object) -> None:
    raise StopIteration


@pytest.mark.parametrize("local_ranks", [(0, 1, 2, 3), (0, 1, 0, 1)])
def test_by_one_rank_of_each_machine(local_ranks: tuple[int, ...], tmp_path: Path) -> None:
    found = run_world(4, began, encode(grpo()), str(tmp_path), local_ranks)
    assert found == [(int(local == 0), ["continued"]) for local in local_ranks]


def test_no_rank_goes_on_with_a_plan_that_is_refused(tmp_path: Path) -> None:
    plan = grpo()
    wrong = replace(plan, body=plan.body[1:])  # without an event that ranks have in their lists
    first, *others = run_world(4, began, encode(wrong), str(tmp_path), (0, 1, 2, 3))
    assert first[0] == 1 and set(first[1]) == {"RL0542"}
    assert others == [(0, [])] * 3
