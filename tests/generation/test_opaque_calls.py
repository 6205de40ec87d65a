"""Opaque calls in captured steps: a function that reads on the host is called again by each replay, once for each call
of the step that it is in."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from rldsl.backends.torch.generate.captured_step import CALLS_BEFORE_CAPTURE, CapturedSteps, HostReads
from rldsl.backends.torch.generate.op_trace import NotTraceable, OpTrace, trace
from rldsl.backends.torch.kernels.opaque_calls import CallLog, CallRecorder, RecordedCall, opaque
from rldsl.runtime.collectives import all_agree, all_reduce
from tests.world import run_world

CPU = torch.device("cpu")
SHAPE = 5, 6
X, WEIGHT = torch.randn(SHAPE), torch.randn(6, 6)
CALLS = CALLS_BEFORE_CAPTURE + 5
Outputs = tuple[torch.Tensor, ...]


@pytest.fixture(autouse=True)
def without_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


def split(x: torch.Tensor) -> torch.Tensor:
    """Rows multiplied by how many there are of their kind, in the order of kinds, which the host counts."""
    positive = (x[:, 0] > 0).long()
    sizes = torch.zeros(2, dtype=torch.long).scatter_add_(0, positive, torch.ones_like(positive)).tolist()
    parts = x[positive.argsort(stable=True)].split(sizes)
    return torch.cat([part * len(part) for part in parts])


class Counted:
    """`split`, and how often it was called."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return split(x)


def steps_of(function: Callable[[], Outputs], counted: Counted, expected: Callable[[], Outputs]) -> CapturedSteps:
    """Call the function again and again with other inputs: it gives what is expected, and calls `counted` once."""
    steps = CapturedSteps(CPU, True)
    for call in range(CALLS):
        X.copy_(torch.randn(SHAPE))
        found = steps("key", function)
        assert counted.calls == call + 1 and all(map(torch.equal, found, expected()))
    return steps


def test_a_replay_calls_the_function_again() -> None:
    counted = Counted()

    def step() -> Outputs:
        x = X * 2
        x = x + opaque(counted, x)
        return x + 1, opaque(split, x)

    def expected() -> Outputs:
        x = X * 2 + split(X * 2)
        return x + 1, split(x)

    steps = steps_of(step, counted, expected)
    assert steps.enabled and steps.verified and isinstance(steps.captures["key"], OpTrace)


def reads_before(counted: Counted) -> Outputs:
    """A trace of it calls with other numbers, though what it gives afterwards is what the function gave."""
    return (opaque(counted, X * ctypes.c_float.from_address(X.data_ptr()).value),)


def reads_outside(counted: Counted) -> Outputs:
    return (opaque(counted, X) * float(X[0, 0]),)


def branches_outside(counted: Counted) -> Outputs:
    return (opaque(counted, X) if X.sum() > 0 else opaque(counted, -X),)


def changes_input(counted: Counted) -> Outputs:
    def change(x: torch.Tensor) -> torch.Tensor:
        counted(x)
        return x.mul_(2) + 1

    x = X + 1
    return opaque(change, x), x


def changes_another_tensor(counted: Counted) -> Outputs:
    """Of which no input says anything: what is read after it shows it."""
    x = X + 1

    def change(y: torch.Tensor) -> torch.Tensor:
        counted(y)
        x.mul_(2)
        return y + 1

    return opaque(change, X * 3), x


def fills_memory(counted: Counted) -> Outputs:
    x = X.new_empty(SHAPE)
    x.numpy()[:] = X.numpy() * 3  # no operator of torch
    return (opaque(counted, x),)


def test_what_a_wrong_trace_writes_is_written_again_without_another_call() -> None:
    """Other ranks may take part in the call once."""
    counted, held = Counted(), torch.zeros(SHAPE)

    def step() -> Outputs:
        held.copy_(opaque(counted, X) * ctypes.c_float.from_address(X.data_ptr()).value)
        return (held + 1,)

    steps = CapturedSteps(CPU, True)
    for call in range(CALLS):
        X.copy_(torch.randn(SHAPE))
        found, right = steps("key", step)[0], split(X) * X[0, 0]
        assert counted.calls == call + 1 and torch.equal(held, right) and torch.equal(found, right + 1)
    assert not steps.enabled


REFUSED = [reads_before, reads_outside, branches_outside, changes_input, changes_another_tensor, fills_memory]


@pytest.mark.parametrize("function", REFUSED)
def test_what_a_trace_would_do_otherwise_is_not_replayed(function: Callable[[Counted], Outputs]) -> None:
    counted = Counted()
    steps = steps_of(lambda: function(counted), counted, lambda: function(Counted()))
    assert not steps.enabled


@pytest.mark.parametrize("function, why", [(changes_input, "changes its inputs"), (fills_memory, "no operator filled")])
def test_the_tracer_says_why(function: Callable[[Counted], Outputs], why: str) -> None:
    with pytest.raises(NotTraceable, match=why) as raised:
        trace(lambda: function(Counted()))
    assert all(map(torch.equal, raised.value.out, function(Counted())))


def test_a_comparison_without_the_same_calls_fails() -> None:
    """And it runs to its end: other ranks may take part in its collectives."""
    _, captured = trace(lambda: (opaque(split, X) + 1, X * 2))
    right = RecordedCall((X.clone(),), split(X))
    out = split(X) + 1, X * 2
    assert captured.repeats(out, [right])
    X.normal_()
    out = split(X) + 1, X * 2
    calls = RecordedCall((X.clone(),), split(X)), RecordedCall((X.clone(),), split(X)[:2]), RecordedCall((), split(X))
    assert captured.repeats(out, calls[:1])
    for others in ([], [right], [*calls[:1], right], [calls[1]], [calls[2]]):
        assert not captured.repeats(out, others) and torch.equal(captured.out[1], X * 2)


class Negated(TorchFunctionMode):
    """Takes the place of a product, as the mode of an invariant model."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        return -out if func is F.linear else out


@pytest.mark.parametrize("around, inside", [
    (torch.autocast("cpu", torch.bfloat16), nullcontext()), (Negated(), nullcontext()),
    (torch.autocast("cpu", torch.bfloat16), torch.autocast("cpu", enabled=False)),
    (Negated(), torch._C.DisableTorchFunction())], ids=["autocast", "functions", "no autocast", "no functions"])
def test_a_replay_computes_in_the_state_of_the_call(around: AbstractContextManager[Any],
                                                    inside: AbstractContextManager[Any]) -> None:
    def product(x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, WEIGHT)

    def step() -> Outputs:
        x = X * 2
        with inside:
            return (opaque(product, x),)

    with around:
        _, captured = trace(step)
        X.normal_()
        found, right = captured()[0].clone(), step()[0]
        assert found.dtype == right.dtype and torch.equal(found, right)


def test_what_a_replay_makes_may_be_kept_for_gradients() -> None:
    kept: list[torch.Tensor] = []

    def keeps(x: torch.Tensor) -> torch.Tensor:
        assert not torch.is_grad_enabled()
        kept.append(x * 2)
        return x + 1

    _, captured = trace(lambda: (opaque(keeps, X),))
    captured()
    assert len(kept) == 2 and not any(x.is_inference() for x in kept)


def test_reads_inside_a_call_count_for_graphs_alone() -> None:
    for inside, expected in ((True, "tolist"), (False, "")):
        with HostReads(inside_calls=inside) as reads:
            opaque(split, X)
        assert reads.found == expected
    with HostReads(inside_calls=False) as reads:
        opaque(split, X)
        X.tolist()
        opaque(split, X)
    assert reads.found == "tolist"


def test_recorders_below_one_another_all_see_a_call() -> None:
    with CallRecorder(), CallLog() as first, CallRecorder(), CallLog() as second:
        out = opaque(split, X)
    for log in (first, second):
        (call,) = log.calls
        assert torch.equal(call.result, out) and torch.equal(call.inputs[0], X)
    assert torch.equal(opaque(split, X), out)


def together(rank: int, tp: bool) -> list[Any]:
    """Ranks 0 and 1 have other keys than 2 and 3, and all take part in each opaque call. tp: whether ranks with the
    same keys have collectives outside opaque calls, too."""
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    group = groups[rank // 2]
    x, faults = torch.zeros(SHAPE), []

    def of_all(given: torch.Tensor) -> torch.Tensor:
        total = given.clone()
        all_reduce(total)
        return total * split(given).sum()

    def step() -> Outputs:
        y = x * 2
        if tp:
            all_reduce(y, group=group)
        y = y + opaque(of_all, y)
        if tp:
            all_reduce(y, group=group)
        return (y + opaque(of_all, y + 1),)

    agree = (lambda yes: all_agree(yes, group, CPU)) if tp else bool
    steps = CapturedSteps(CPU, True, all_agree=agree)
    for call in range(3 * CALLS):
        x.copy_(torch.linspace(-1, 2, x.numel()).view(SHAPE) + call + rank)
        key = call % 3 if rank < 2 else call // 5  # rank 0 replays while rank 2 runs a new step
        found = steps(key, step)[0].clone()
        if not torch.equal(found, step()[0]):
            faults.append(call)
    return [faults, steps.enabled, sum(isinstance(c, OpTrace) for c in steps.captures.values())]


@pytest.mark.parametrize("tp", [False, True])
def test_ranks_with_other_keys_take_part_in_the_same_calls(tp: bool) -> None:
    for faults, enabled, traces in run_world(4, together, tp):
        assert not faults and enabled and traces > 2
