"""Collectives of ranks on one machine: the numbers of torch.distributed, in the order of the ranks, whatever fails."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from functools import reduce
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from rldsl.runtime import shared_memory
from rldsl.runtime.collectives import all_gather, all_reduce, reduce_scatter
from rldsl.runtime.comm import machine_peers
from rldsl.runtime.comm.machine_peers import share_memory
from rldsl.runtime.health import stack_trace
from rldsl.runtime.health.failure_messages import lost_contact
from rldsl.runtime.shared_memory import ONE_ROUND, SLOT_BYTES, SharedMemoryGroup, shared_memory_name
from tests.world import run_world

SIZES = (1, 3, ONE_ROUND // 4 - 1, ONE_ROUND // 4 + 1, SLOT_BYTES // 4, SLOT_BYTES // 4 + 1, SLOT_BYTES // 4 * 2 + 5)
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.uint8)


def share(*ranks: tuple[int, ...], timeout: float | None = 20.0) -> tuple[tuple[SharedMemoryGroup, ...], list[Any]]:
    """What must be held, and the groups: the world, and some of its ranks each."""
    groups = [dist.group.WORLD, *(dist.new_group(list(r), sort_ranks=False) for r in ranks)]
    every = [range(dist.get_world_size()), *ranks]
    return share_memory(list(zip(every, groups, strict=True)),
                        None if timeout is None else timedelta(seconds=timeout)), groups


def given(rank: int, size: int, dtype: torch.dtype) -> torch.Tensor:
    """Any bits that are no NaN."""
    draw = torch.Generator().manual_seed(1000 * rank + size)
    if dtype.is_floating_point:
        return (torch.randn(size, generator=draw) * 10.0 ** torch.randint(-3, 4, (size,), generator=draw)).to(dtype)
    return torch.randint(0, 100, (size,), generator=draw).to(dtype)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def numbers(rank: int) -> None:
    held, (world,) = share()
    assert shared_memory_name(None) == shared_memory_name(world) == held[0].group().group_name
    ranks = dist.get_world_size()
    for size in SIZES:
        for dtype in DTYPES if size < 10 else DTYPES[:1 + (ranks == 3)]:
            each = [given(r, size, dtype) for r in range(ranks)]
            total, most = each[rank].clone(), each[rank].clone()
            all_reduce(total)
            all_reduce(most, dist.ReduceOp.MAX)
            assert same(total, reduce(torch.add, each)), f"the sum of {size} {dtype}"
            assert same(most, reduce(torch.maximum, each)), f"the maximum of {size} {dtype}"
            assert same(all_gather(each[rank]), torch.stack(each))
            rows = [torch.stack([x * (i + 1) for i in range(ranks)]) for x in each]
            assert same(reduce_scatter(rows[rank]), reduce(torch.add, [x[rank] for x in rows]))


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_numbers(ranks: int) -> None:
    run_world(ranks, numbers)


def edge_cases(rank: int) -> None:
    held, _ = share()
    assert held
    zeros = torch.tensor([-0.0, float("inf"), float("nan")]) * (1 if rank else -1)
    all_reduce(zeros)
    assert zeros[0].signbit() == 0 and zeros[1:].isnan().all()
    columns = torch.arange(12.0).view(3, 4).t()
    kept, stride = columns.data_ptr(), columns.stride()
    all_reduce(columns)
    assert (columns.data_ptr(), columns.stride()) == (kept, stride)
    assert torch.equal(columns, 2 * torch.arange(12.0).view(3, 4).t())
    one = torch.tensor(rank + 1.0)
    all_reduce(one)
    assert float(one) == 3.0
    assert all_gather(torch.tensor(rank)).tolist() == [0, 1]
    flags = torch.tensor([rank == 0, False])
    assert all_gather(flags).tolist() == [[True, False], [False, False]]
    every = torch.zeros(2, 0)
    all_reduce(every)
    assert all_gather(every).shape == (2, 2, 0)
    part = torch.ones(6)[1:4]
    all_reduce(part)
    assert part.tolist() == [2.0] * 3
    with torch.inference_mode():
        mine = torch.ones(3)
        all_reduce(mine)
        assert mine.tolist() == [2.0] * 3


def very_patient(rank: int) -> float:
    held, _ = share(timeout=1e9)
    assert held
    time.sleep(0.05 * rank)  # so that the other one sleeps
    total = torch.tensor(1.0)
    all_reduce(total)
    return float(total)


def inside_and_outside(rank: int) -> None:
    """Each of the two slots is first used in inference mode, as by a trace, and then outside it."""
    held, _ = share()
    for inside in (True, True, False, False, True, False):
        for size in (3, ONE_ROUND):
            x = torch.full((size,), rank + 1.0)
            with torch.inference_mode(inside):
                all_reduce(x)
                assert all_gather(torch.full((size,), float(rank))).shape == (2, size)
            assert x.eq(3).all()
    assert held


def test_inference_mode() -> None:
    run_world(2, inside_and_outside)


def test_a_timeout_may_be_long() -> None:
    assert run_world(2, very_patient) == [2.0, 2.0]


def test_edge_cases() -> None:
    run_world(2, edge_cases)


GROUPS = ((0, 1), (2, 3), (0, 2, 3), (3, 1))


def many_calls(rank: int, seed: int) -> None:
    """Calls of several groups after one another, with ranks that are late at any of them."""
    held, groups = share(*GROUPS)
    assert len(held) == 1 + sum(rank in g for g in GROUPS)
    members, calls, late = [(0, 1, 2, 3), *GROUPS], random.Random(seed), random.Random(rank)
    for call in range(250):
        at, kind = calls.randrange(len(members)), calls.choice(("sum", "gather", "scatter"))
        size = calls.choice((1, 5, 1000, ONE_ROUND // 4 + 7)) if call % 25 else SLOT_BYTES // 4 + 3
        if rank not in members[at]:
            continue
        if late.random() < 0.05:
            time.sleep(late.random() * 0.005)
        each = [torch.full((size,), call + 0.1 * r) for r in members[at]]
        own, me = each[members[at].index(rank)], members[at].index(rank)
        if kind == "sum":
            all_reduce(own, group=groups[at])
            assert same(own, reduce(torch.add, [torch.full((size,), call + 0.1 * r) for r in members[at]]))
        elif kind == "gather":
            assert same(all_gather(own, groups[at]), torch.stack(each))
        else:
            rows = [torch.stack([x + i for i in range(len(each))]) for x in each]
            assert same(reduce_scatter(rows[me], groups[at]), reduce(torch.add, [x[me] for x in rows]))


@pytest.mark.parametrize("seed", range(2))
def test_many_calls(seed: int) -> None:
    run_world(4, many_calls, seed)


def failure(call: Callable[[], Any]) -> tuple[str, bool, str]:
    """Its text, whether it means that a rank is gone, and the operation that it is of."""
    try:
        call()
    except (RuntimeError, ConnectionError) as error:
        return str(error), lost_contact(error), stack_trace.of_error(error.__traceback__).call
    return "it went through", False, ""


def without_the_other(rank: int, how: str) -> Any:
    held, _ = share(timeout=1.0 if how == "late" else None)
    assert held
    all_reduce(torch.ones(1))
    if rank == 1:
        if how == "late":
            time.sleep(3.0)
            return None
        for peer in held[0].others:  # as the system does for a process that is killed
            peer.socket.close()
        return None
    return failure({"gone": lambda: all_reduce(torch.ones(3)), "late": lambda: all_gather(torch.ones(3))}[how])


@pytest.mark.parametrize(("how", "text", "call"), [("gone", "connection closed by rank 1", "all_reduce"),
                                                   ("late", "timed out after 1 s of waiting for rank 1", "all_gather")])
def test_without_the_other(how: str, text: str, call: str) -> None:
    found = run_world(2, without_the_other, how)[0]
    assert found[0].startswith(text) and found[1:] == (True, call)


def other_call(rank: int, call: str) -> Any:
    held, groups = share((0, 1), (0, 1))
    assert held
    x = torch.ones(2, 4)
    mine = {"size": lambda: all_reduce(torch.ones(4 + rank)), "kind": lambda: (all_reduce, all_gather)[rank](x),
            "op": lambda: all_reduce(x, (dist.ReduceOp.SUM, dist.ReduceOp.MAX)[rank]),
            "group": lambda: all_reduce(x, group=groups[1 + rank])}[call]
    return failure(mine)


@pytest.mark.parametrize(("call", "texts"), [
    ("size", ("sum of 16 bytes", "sum of 20 bytes")), ("kind", ("sum of 32 bytes", "gather of 32 bytes")),
    ("op", ("sum of 32 bytes", "max of 32 bytes")), ("group", ("sum of 32 bytes", "sum of 32 bytes"))])
def test_another_call_of_another_rank(call: str, texts: tuple[str, str]) -> None:
    for rank, (text, gone, _) in enumerate(run_world(2, other_call, call)):
        theirs, own = (f"number 1 in group {int(call == 'group') * (1 + r)}, {texts[r]}" for r in (1 - rank, rank))
        assert text == f"rank {1 - rank} makes another call: {theirs}, and this rank {own}" and not gone


DIVIDED = ((0, 1), (2, 3), (0, 3))


def divided(rank: int, case: str) -> tuple[int, list[bool], float]:
    """How many groups share memory, which, and a sum over all ranks. Ranks 0 and 1 are on another machine, or rank 2
    cannot do something, or there are too many."""
    patch: Any = {
        "machines": mock.patch.object(machine_peers, "machine_digest", lambda: bytes([rank // 2] * 16)),
        "files": mock.patch.object(os, "memfd_create", mock.Mock(side_effect=OSError)),
        "sockets": mock.patch.object(machine_peers.socket.socket, "bind", mock.Mock(side_effect=OSError)),
        "many": mock.patch.object(machine_peers, "MAX_RANKS", 3),
        "calls": mock.patch.object(machine_peers, "_call", mock.Mock(side_effect=OSError))}[case]
    with mock.patch.object(machine_peers, "SETUP_SECONDS", 600.0):  # longer than a test may take
        with patch if case in ("machines", "many") or rank == 2 else nullcontext():
            held, groups = share(*DIVIDED)
    total = torch.tensor(float(rank))
    all_reduce(total)
    shared = [shared_memory_name(g) is not None for g in groups if g is not dist.GroupMember.NON_GROUP_MEMBER]
    return len(held), shared, float(total)


@pytest.mark.parametrize(("case", "shared"), [("machines", [(0, 1), (2, 3)]), ("files", [(0, 1), (0, 3)]),
                                              ("sockets", [(0, 1), (0, 3)]), ("many", []), ("calls", [])])
def test_ranks_that_share_no_memory(case: str, shared: list[tuple[int, ...]]) -> None:
    """shared: the groups that do, of three; the world does not."""
    for rank, found in enumerate(run_world(4, divided, case)):
        own = [ranks in shared for ranks in DIVIDED if rank in ranks]
        assert found == (sum(own), [False, *own], 6.0)


def dropped(rank: int) -> list[bool]:
    held, _ = share()
    found = [shared_memory_name(None) is not None]
    del held
    found.append(shared_memory_name(None) is not None)
    total = torch.ones(1)
    all_reduce(total)
    assert float(total) == 2.0
    again, _ = share()
    return [*found, shared_memory_name(None) is not None]


def test_a_group_that_is_dropped() -> None:
    assert run_world(2, dropped) == [[True, False, True]] * 2


def left_behind(rank: int) -> tuple[int, int]:
    """Files of this process before and after."""
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        held, _ = share()
        all_reduce(torch.ones(3))
        del held
    return before, len(os.listdir("/proc/self/fd"))


def test_nothing_is_left_behind() -> None:
    for before, after in run_world(2, left_behind):
        assert after <= before + 1


def strangers(rank: int) -> str:
    """Who connects must be a rank of the run, of the same user, with memory of the same size."""
    ours, theirs = machine_peers.socket.socketpair(machine_peers.socket.AF_UNIX, machine_peers.socket.SOCK_SEQPACKET)
    file = os.memfd_create("test")
    os.ftruncate(file, 4096)
    machine_peers.socket.send_fds(theirs, [machine_peers.HELLO.pack(1)], [file])
    try:
        machine_peers._take(ours, {}, 8192)
    except ValueError as error:
        return str(error)
    return "taken"


def test_strangers() -> None:
    assert strangers(0) == "a rank gave no memory of this size"
    with mock.patch.object(os, "geteuid", lambda: -5):
        assert strangers(0).endswith("has connected")


def test_a_name_that_another_group_has_now() -> None:
    """Groups of torch get the names of earlier ones."""
    class Group:
        group_name = "7"

    first, second = Group(), Group()
    made: Any = mock.Mock(spec=SharedMemoryGroup, group=lambda: first)
    shared_memory.register(made)
    assert shared_memory_name(first) == "7" and shared_memory_name(second) is None
