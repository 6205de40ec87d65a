"""The instrument of `device_guard.py`: what it sees, and what it does not take for a crossing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from tests.cuda_paths.device_guard import DEVICE, Border, guarded
from tests.world import run_world

CPU = torch.device("cpu")


def kinds(function: Callable[[torch.Tensor], Any]) -> list[str]:
    """What a function of a tensor [4, 3] on the device does at the border."""
    seen: list[Border] = []
    with guarded(seen.append):
        x = torch.ones(4, 3, device=DEVICE)
        function(x)
    return [b.kind for b in seen]


CROSSING: dict[str, tuple[Callable[[torch.Tensor], Any], str]] = {
    "item": (lambda x: x[0, 0].item(), "wait"),
    "tolist": (lambda x: x.tolist(), "wait"),
    "int": (lambda x: int(x.sum()), "wait"),
    "bool": (lambda x: bool((x > 0).all()), "wait"),
    "numpy": (lambda x: x.numpy(), "wait"),
    "print": (lambda x: f"{x}", "wait"),
    "cpu": (lambda x: x.cpu(), "wait"),
    "to": (lambda x: x.to("cpu"), "wait"),
    "to another": (lambda x: x.to(torch.zeros(2)), "wait"),
    "copy to the host": (lambda x: torch.empty(4, 3).copy_(x), "wait"),
    "asynchronous copy to memory that is not pinned": (lambda x: torch.empty(4, 3).copy_(x, True), "wait"),
    "mask": (lambda x: x[x > 0], "wait"),
    "nonzero": (lambda x: x.nonzero(), "wait"),
    "unique": (lambda x: x.unique(), "wait"),
    "bincount": (lambda x: x.long().flatten().bincount(), "wait"),
    "repeat": (lambda x: x.repeat_interleave(torch.ones(4, dtype=torch.long, device=DEVICE), 0), "wait"),
    "equal": (lambda x: torch.equal(x, x), "wait"),
    "wait": (lambda x: torch.cuda.synchronize(), "wait"),
    "numbers": (lambda x: torch.tensor([1.0, 2.0], device=DEVICE), "copy"),
    "new_tensor": (lambda x: x.new_tensor(2.0), "copy"),
    "to the device": (lambda x: torch.zeros(3).to(DEVICE), "copy"),
    "copy_": (lambda x: x.copy_(torch.zeros(4, 3)), "copy"),
    "one number": (lambda x: x[0, 0].copy_(torch.tensor(2.0)), "copy"),
    "list of places": (lambda x: x[[0, 1]], "copy"),
    "places": (lambda x: x[torch.tensor([0, 1])], "mix"),
    "sum of both": (lambda x: x + torch.zeros(4, 3), "mix"),
    "one number times a vector of the host": (lambda x: x[0, 0] * torch.zeros(3), "mix"),
    "concatenation": (lambda x: torch.cat([x, torch.zeros(1, 3)]), "mix"),
    "rows": (lambda x: x.index_select(0, torch.tensor([1])), "mix"),
    "table of the host": (lambda x: torch.zeros(4)[x.long()[:, 0]], "mix"),
}
STAYING: dict[str, Callable[[torch.Tensor], Any]] = {
    "arithmetic": lambda x: (x * 2 + torch.tensor(1.0)).softmax(-1),
    "where": lambda x: torch.where(x > 0, x, 0.0),
    "fill": lambda x: x.masked_fill(x > 0, 3.0),
    "mask of one number": lambda x: x.__setitem__(x > 0, 0.0),
    "slices": lambda x: x[1:, None, 0].expand(3, 2).contiguous(),
    "rows": lambda x: x[torch.arange(2, device=DEVICE)],
    "constants": lambda x: [torch.zeros(3, device=DEVICE), torch.full((), 2.0, device=DEVICE), torch.zeros_like(x)],
    "like": lambda x: x + torch.ones(4, 3, device=x.device),
    "repeat": lambda x: x.repeat_interleave(torch.ones(4, dtype=torch.long, device=DEVICE), 0, output_size=4),
    "sizes": lambda x: [x.shape, len(x), x.numel(), x.dtype, x.is_cuda, x.stride()],
    "cast": lambda x: x.to(torch.float64).to(x).float(),
    "the same device": lambda x: x.to(DEVICE),
    "pinned": lambda x: torch.zeros(3).pin_memory().to(DEVICE, non_blocking=True),
    "the host alone": lambda x: torch.tensor([1, 2]).tolist() + [int(torch.zeros(3).sum())],
}


@pytest.mark.parametrize("name", CROSSING)
def test_what_crosses_is_seen(name: str) -> None:
    function, kind = CROSSING[name]
    assert kind in kinds(function)


@pytest.mark.parametrize("name", STAYING)
def test_what_stays_is_not(name: str) -> None:
    assert kinds(STAYING[name]) == []


def test_results_are_on_a_device_and_gradients_with_them() -> None:
    with guarded(lambda border: pytest.fail(str(border))):
        layer = torch.nn.Linear(3, 2, device=DEVICE)
        seen: list[torch.device] = []
        out = layer(torch.ones(4, 3, device=DEVICE))
        out.register_hook(lambda grad: seen.append(grad.device))
        F.mse_loss(out, torch.zeros_like(out)).backward()
        assert {out.device, layer.weight.grad.device, *seen} == {DEVICE} and out.is_cuda
        assert torch.zeros(3).device == CPU and not torch.zeros(3).is_cuda


def test_a_backward_pass_is_watched() -> None:
    seen: list[Border] = []

    class Reads(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            return grad * grad.sum().item()

    with guarded(seen.append):
        x = torch.ones(3, device=DEVICE, requires_grad=True)
        Reads.apply(x).sum().backward()
    assert [b.kind for b in seen] == ["wait"]


# ------------------------------------------------------------------------------------------------ streams


def onload(waits: bool, joins: bool) -> list[str]:
    """Copy to the device on a stream of its own, as an onload does."""
    seen: list[Border] = []
    with guarded(seen.append):
        there, here = torch.ones(3).pin_memory(), torch.zeros(3, device=DEVICE)
        side, current = torch.cuda.Stream(), torch.cuda.current_stream()
        if waits:
            side.wait_stream(current)
        with torch.cuda.stream(side):
            here.copy_(there, non_blocking=True)
        if joins:
            current.wait_event(side.record_event())
        here * 2
    return [b.kind for b in seen]


def test_streams_wait_for_each_other() -> None:
    assert onload(True, True) == []
    assert {*onload(False, True)} == {"race"}, "memory is written while it may still be in use"
    assert {*onload(True, False)} == {"race"}, "what has not come yet is read"


@pytest.mark.parametrize("waits", [True, False])
def test_the_host_waits_for_what_it_gets(waits: bool) -> None:
    seen: list[Border] = []
    with guarded(seen.append):
        x, there = torch.ones(3, device=DEVICE), torch.zeros(3).pin_memory()
        there.copy_(x, non_blocking=True)
        if waits:
            torch.cuda.current_stream().synchronize()
        there + 1
    assert [b.kind for b in seen] == (["wait"] if waits else ["race"])


@pytest.mark.parametrize("waits", [True, False])
def test_memory_is_not_freed_while_a_stream_uses_it(waits: bool) -> None:
    seen: list[Border] = []
    with guarded(seen.append):
        x, side, current = torch.ones(3, device=DEVICE), torch.cuda.Stream(), torch.cuda.current_stream()
        side.wait_stream(current)
        with torch.cuda.stream(side):
            y = x * 2
        if waits:
            current.wait_stream(side)
        del x
        with torch.cuda.stream(side):
            del y
    assert [b.kind for b in seen] == ([] if waits else ["race"])


# ------------------------------------------------------------------------------------------------ messages


def _sent(rank: int) -> list[list[str]]:
    found = []
    for device, backend in ((DEVICE, None), ("cpu", None), ("cpu", "gloo")):
        seen: list[Border] = []
        with guarded(seen.append):
            group = dist.new_group([0], backend=backend)
            dist.all_reduce(torch.ones(2, device=device), group=group)
        found.append([b.kind for b in seen])
    return found


def test_messages_are_on_the_device() -> None:
    """But for those of a group that is made for the host's."""
    assert run_world(1, _sent) == [[[], ["mix"], []]]


# ------------------------------------------------------------------------------------------------ graphs


def test_a_graph_repeats_its_operators_in_its_own_memory() -> None:
    with guarded(lambda border: pytest.fail(str(border))) as guard:
        x, total = torch.ones(3, device=DEVICE), torch.zeros(3, device=DEVICE)
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin()
        total += x
        out = total[1:] * 2
        graph.capture_end()
        assert guard.graphs == 1
        for _ in range(2):
            graph.replay()
            x += 1
        expected = torch.full((2,), 6.0, device=DEVICE)
        with guard.mute():
            assert torch.equal(out, expected) and torch.equal(total, torch.full((3,), 3.0, device=DEVICE))


@pytest.mark.parametrize("name", ["item", "numbers", "mask", "to"])
def test_what_waits_cannot_be_captured(name: str) -> None:
    with guarded(lambda border: None):
        x = torch.ones(4, 3, device=DEVICE)
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin()
        with pytest.raises(RuntimeError, match="not permitted when a stream is capturing"):
            CROSSING[name][0](x)
        graph.capture_end()
