"""Communicators of NCCL: one split of the world per axis in large worlds, one group per set of ranks in small ones."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist

from rldsl.diag import Failure
from rldsl.plan.model import Layout, Plan
from rldsl.runtime.comm import world

CUDA = torch.device("cuda")


class Dist:
    """torch.distributed as one rank sees it; every rank makes the same calls."""

    def __init__(self, rank: int):
        self.rank, self.calls = rank, list[Any]()

    def new_group(self, ranks: list[int], timeout: Any = None, sort_ranks: bool = True, backend: Any = None) -> Any:
        self.calls.append(("new", tuple(ranks), sort_ranks))
        return tuple(ranks) if self.rank in ranks else None

    def split_group(self, split_ranks: list[list[int]], timeout: Any = None) -> Any:
        assert len({r for ranks in split_ranks for r in ranks}) == sum(map(len, split_ranks)), "sets overlap"
        self.calls.append(("split", tuple(map(tuple, split_ranks))))
        return next((tuple(ranks) for ranks in split_ranks if self.rank in ranks), None)


def plan(devices: tuple[tuple[int, ...], ...], world_size: int) -> Plan:
    """Layouts dp=2 tp=2 pp=2 and dp=8 over the same mesh."""
    mesh = SimpleNamespace(id="m", members=lambda: tuple(r for node in devices for r in node))
    layouts = [Layout(id=i, mesh="m", dp=dp, tp=tp, pp=pp, cp=1, ep=1, zero=0, vpp=1, backend="torch")
               for i, dp, tp, pp in (("a", 2, 2, 2), ("b", 8, 1, 1))]
    groups = [SimpleNamespace(axis=axis, layout=x.id, mesh="") for x in layouts for axis in ("mesh", "dp", "tp", "pp")]
    return cast(Plan, SimpleNamespace(header=SimpleNamespace(world=world_size), meshes=[mesh], layouts=layouts,
                                      groups=groups, body=()))


@pytest.fixture
def sets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of ranks 0 to 7: pp changes slowest, then dp, then tp."""
    def axis_ranks(layout: Layout, mesh: Any, axis: str) -> tuple[tuple[int, ...], ...]:
        members = mesh.members()
        size = getattr(layout, axis)
        stride = {"tp": 1, "dp": layout.tp, "pp": layout.tp * layout.dp}[axis]
        starts = [i for i in range(8) if i // stride % size == 0]
        return tuple(tuple(members[i + j * stride] for j in range(size)) for i in starts)

    monkeypatch.setattr(world, "axis_ranks", axis_ranks)
    monkeypatch.setattr(world, "event_paths", lambda plan: ())


@pytest.mark.parametrize("rank", range(8))
def test_a_large_world_is_split_once_per_axis(rank: int, sets: None, monkeypatch: pytest.MonkeyPatch) -> None:
    found: dict[int, Dist] = {}
    for size, limit in ((8, 4), (8, 64)):
        found[limit] = Dist(rank)
        monkeypatch.setattr(world, "SPLIT_ABOVE", limit)
        for name in ("new_group", "split_group"):
            monkeypatch.setattr(dist, name, getattr(found[limit], name))
        groups = world.join(plan(((0, 1, 2, 3), (4, 5, 6, 7)), size), rank, CUDA).groups
        own = {ranks: group for ranks, group in groups.items() if rank in ranks}
        assert all(group == ranks for ranks, group in own.items()) and len(own) == 4  # mesh, dp, tp, pp of "a"
    assert [kind for kind, *_ in found[4].calls] == ["new", "split", "split", "split"]
    assert [kind for kind, *_ in found[64].calls] == ["new"] * 13


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_meshes_with_an_order_of_their_own_keep_it(device: str, sets: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """`split_group` sorts ranks."""
    calls = Dist(0)
    monkeypatch.setattr(world, "SPLIT_ABOVE", 4)
    for name in ("new_group", "split_group"):
        monkeypatch.setattr(dist, name, getattr(calls, name))
    monkeypatch.setattr(world, "share_memory", lambda groups, timeout: ())
    world.join(plan(((0, 2, 1, 3), (7, 6, 5, 4)), 8), 0, torch.device(device))
    assert all(kind == "new" or list(map(sorted, sets)) == list(map(list, sets)) for kind, sets, *_ in calls.calls)
    assert ("new", (7, 6), False) in calls.calls and ("new", (0, 2), True) in calls.calls


def test_a_torch_that_sorts_ranks_is_refused_for_them(sets: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch 2.11 has no `sort_ranks`; meshes whose ranks ascend need none."""
    calls = Dist(0)
    monkeypatch.setattr(dist, "new_group", lambda ranks, timeout=None, backend=None: calls.new_group(ranks))
    world.join(plan(((0, 1, 2, 3), (4, 5, 6, 7)), 8), 0, CUDA)
    with pytest.raises(Failure) as raised:
        world.join(plan(((0, 2, 1, 3), (7, 6, 5, 4)), 8), 0, CUDA)
    (found,) = raised.value.diagnostics
    assert found.code == "RL0710" and "torch 2.12" in found.title
