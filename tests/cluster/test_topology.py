"""The machines that ranks are on, against those of the plan."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from rldsl.diag import Failure
from rldsl.plan.model import Plan
from rldsl.runtime.comm.world import check_hosts, gather_hosts
from tests.world import run_world


def of(devices: int) -> Plan:
    return cast(Plan, cast(Any, SimpleNamespace(header=SimpleNamespace(devices_per_node=devices))))


@pytest.mark.parametrize("devices, found", [(2, "aabb"), (2, "bbaa"), (4, "aaaa"), (8, "aa"), (2, "aab"), (1, "abc")])
def test_as_planned(devices: int, found: str) -> None:
    assert check_hosts(of(devices), list(found), "p.plan") == ""


@pytest.mark.parametrize("devices, found, notes", [
    (4, "aabb", ["node 0: ranks 0-1 on a, ranks 2-3 on b"]),
    (2, "abab", ["node 0: rank 0 on a, rank 1 on b", "node 1: rank 2 on a, rank 3 on b"]),
    (2, "aabc", ["node 1: rank 2 on b, rank 3 on c"]),
    (2, "ab" * 8, [*(f"node {i}: rank {2 * i} on a, rank {2 * i + 1} on b" for i in range(4)), "and 4 more"]),
])
def test_torn_nodes(devices: int, found: str, notes: list[str]) -> None:
    with pytest.raises(Failure) as error:
        check_hosts(of(devices), list(found), "p.plan")
    said = error.value.diagnostics[0]
    assert said.code == "RL0711" and list(said.notes) == notes and f"--nproc-per-node {devices}" in said.help


def test_shared_machines_are_notes() -> None:
    assert "all 2 nodes of the plan run on one machine, a" in check_hosts(of(2), list("aaaa"), "p")
    assert "nodes 0-1 are all on a" in check_hosts(of(1), list("aab"), "p")


def test_ranks_tell_each_other() -> None:
    first, second = run_world(2, _tell)
    assert first == second and first[0] == "höst-0" and len(first[1].encode()) <= 64 and first[1].startswith("long")


def _tell(rank: int) -> list[str]:
    return gather_hosts(["höst-0", "long" * 40][rank], torch.device("cpu"))
