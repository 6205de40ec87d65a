"""Sums and gathers of small tensors over gloo, and through shared memory: as torch.distributed's, in one exchange, with equal bits on all ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from rldsl.runtime import collectives
from rldsl.runtime.collectives import MAX_EXCHANGED, all_gather, all_reduce, reduce_scatter
from rldsl.runtime.comm.machine_peers import share_memory
from rldsl.runtime.health import stack_trace
from tests.world import run_world

LARGE = MAX_EXCHANGED // 4 + 4  # elements
MADE: dict[str, Callable[[int], torch.Tensor]] = {  # by rank
    "vector": lambda r: torch.arange(5.0) / (r + 1), "scalar": lambda r: torch.tensor(r + 0.1),
    "columns": lambda r: torch.arange(12.0).view(3, 4).t() * 0.1 ** r, "counts": lambda r: torch.tensor([r, 7, -r]),
    "bytes": lambda r: torch.tensor([r, 9], dtype=torch.uint8), "half": lambda r: torch.tensor([0.1, r]).bfloat16(),
    "double": lambda r: torch.tensor([1e16, 1.0, -1e16]).double() * (r + 1),
    "large": lambda r: torch.full((LARGE,), 0.1 * r), "empty": lambda r: torch.zeros(2, 0)}


def shared(rank: int) -> dict[str, tuple[list[str], bytes]]:
    held = share_memory([(range(dist.get_world_size()), dist.group.WORLD)], None)
    assert held
    return combined(rank)


def combined(rank: int) -> dict[str, tuple[list[str], bytes]]:
    """Of each tensor: what torch was asked for, and the bits of its sum."""
    ranks, asked = dist.get_world_size(), list[str]()
    for owner, name in ((dist, "all_reduce"), (dist, "all_to_all_single"), (collectives, "ALL_GATHER"),
                        (collectives, "REDUCE_SCATTER")):
        plain = getattr(owner, name)
        setattr(owner, name, lambda *a, _name=name, _plain=plain, **k: (asked.append(_name), _plain(*a, **k))[1])
    found = {}
    for name, make in MADE.items():
        own, largest, every = make(rank), make(rank), torch.stack([make(r) for r in range(ranks)])
        expected, tolerance = every.double().sum(0), 1e-2 if name == "half" else 1e-6
        before = own.shape, own.stride(), own.data_ptr()
        asked.clear()
        all_reduce(own)
        all_reduce(largest, dist.ReduceOp.MAX)
        gathered = all_gather(make(rank))
        part = reduce_scatter(torch.stack([make(rank) * (1 + i) for i in range(ranks)]))
        assert (own.shape, own.stride(), own.data_ptr()) == before, "in place"
        torch.testing.assert_close(own.double(), expected, rtol=tolerance, atol=0.0)
        torch.testing.assert_close(part.double(), (1 + rank) * expected, rtol=tolerance, atol=0.0)
        assert torch.equal(largest, every.amax(0)) and torch.equal(gathered, every)
        assert own.dtype == part.dtype == gathered.dtype == every.dtype
        found[name] = [*asked], own.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    return found


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_sums_and_gathers(ranks: int) -> None:
    found = run_world(ranks, combined)
    assert all(x == found[0] for x in found), "equal bits"
    one = ["all_to_all_single"]
    # one rank has nothing to exchange; an empty tensor and a large one go to torch
    assert [found[0][name][0] for name in ("vector", "counts", "half")] == [one * (4 if ranks > 1 else 2)] * 3
    assert found[0]["large"][0] == ["all_reduce", "all_reduce", "ALL_GATHER", "REDUCE_SCATTER"]


@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_that_share_memory(ranks: int) -> None:
    found = run_world(ranks, shared)
    assert all(x == found[0] for x in found), "equal bits"
    asked = {name: calls for name, (calls, _) in found[0].items()}
    assert asked.pop("empty") == ["all_reduce", "all_reduce", "ALL_GATHER", "REDUCE_SCATTER"]
    assert set(map(tuple, asked.values())) == {()}, "torch was asked for nothing else"


def started(rank: int, size: int) -> None:
    """A gather and a sum that go on beside other work."""
    ranks = dist.get_world_size()
    each = [torch.arange(size) + 10.0 * r for r in range(ranks)]
    gathering, whole = collectives.start_all_gather(each[rank])
    summing, parts = collectives.start_reduce_scatter(torch.stack([each[rank] * i for i in range(ranks)]))
    summing.wait()
    gathering.wait()
    assert torch.equal(whole, torch.cat(each))
    torch.testing.assert_close(collectives.sum_of_parts(parts), rank * torch.stack(each).sum(0))


@pytest.mark.parametrize("size", [3, LARGE])
def test_one_that_is_waited_for_later(size: int) -> None:
    run_world(3, started, size)


@pytest.mark.parametrize("through_memory", [False, True])
def test_a_tensor_that_autograd_has_saved_may_not_change(through_memory: bool) -> None:
    assert run_world(2, saved, through_memory) == ["RuntimeError"] * 2


def saved(rank: int, through_memory: bool) -> str:
    held = share_memory([(range(2), dist.group.WORLD)], None) if through_memory else ()
    assert bool(held) == through_memory
    x = torch.ones(3, requires_grad=True)
    y = x * 2
    z = y * y
    all_reduce(y)
    try:
        z.sum().backward()
    except RuntimeError as error:
        return type(error).__name__
    return "it went through"


@pytest.mark.parametrize("call", [all_reduce, all_gather, reduce_scatter])
def test_a_rank_that_waits_is_in_what_was_asked_for(call: Callable[[torch.Tensor], Any],
                                                    monkeypatch: pytest.MonkeyPatch) -> None:
    """And not in how that is done."""
    inside: dict[str, Any] = {}
    exec(compile("def all_to_all_single(*_, **__): raise ConnectionError",
                 "/x/torch/distributed/distributed_c10d.py", "exec"), inside)
    monkeypatch.setattr(dist, "all_to_all_single", inside["all_to_all_single"])
    monkeypatch.setattr(dist, "get_world_size", lambda group=None: 2)
    with pytest.raises(ConnectionError) as raised:
        call(torch.ones(2, 1))
    assert stack_trace.of_error(raised.value.__traceback__).call == call.__name__
    with pytest.raises(ConnectionError) as raised:
        dist.all_to_all_single(torch.ones(2, 1), torch.ones(2, 1))
    assert stack_trace.of_error(raised.value.__traceback__).call == "all_to_all_single"
