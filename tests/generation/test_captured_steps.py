"""Functions that are recorded and asked again: equal numbers, other inputs; and those that must not be."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from rldsl.backends.torch.generate.captured_step import CALLS_BEFORE_CAPTURE, CapturedSteps
from rldsl.backends.torch.generate.op_trace import NotTraceable, trace
from rldsl.memory.decode_shapes import MAX_CAPTURES_WITH_MEMORY

X, TABLE = torch.randn(5, 6), torch.randn(9, 6)
WEIGHT, PLACES = torch.randn(6, 6), torch.tensor([3, 1, 4, 0, 2])
CPU = torch.device("cpu")


def norm() -> tuple[torch.Tensor, ...]:
    return (X * torch.rsqrt(X.pow(2).mean(-1, keepdim=True) + 1e-6),)


def lists() -> tuple[torch.Tensor, ...]:
    left, right = X.chunk(2, -1)
    return torch.cat((-right, left), -1), torch.stack([X, X], 1), TABLE[PLACES, 2]


def in_place() -> tuple[torch.Tensor, ...]:
    made = X.clone()
    made.mul_(2)[1:3].add_(1)
    made[:, 2] = 7
    made[:, PLACES] = made[:, PLACES] * 2
    made.index_copy_(0, PLACES, X)
    return made, made.sum(0)


def several() -> tuple[torch.Tensor, ...]:
    values, places = X.topk(3, -1)
    return values, places, X.max(0).indices


def layer() -> tuple[torch.Tensor, ...]:
    q = F.linear(X, WEIGHT).view(1, 5, 2, 3).transpose(1, 2)
    out = F.scaled_dot_product_attention(q, q, q, is_causal=True).transpose(1, 2).reshape(5, 6)
    return (F.silu(F.layer_norm(out + X, (6,))),)


def constant_view() -> tuple[torch.Tensor, ...]:
    return WEIGHT.T @ X[2:4].T.flip(0), X[0]


def casts_and_constants() -> tuple[torch.Tensor, ...]:
    half = X.bfloat16()
    made = torch.zeros_like(half)
    made += half  # what is made anew is written anew
    full = X.new_full((5,), 3.0)
    full.mul_(X[:, 0])
    rest = X.new_zeros(2, 3)
    rest += X[:2, :3]
    return half.float(), made, full, rest, X.T.to(torch.bfloat16), X[:, ::2].double()


RECORDED = [norm, lists, in_place, several, layer, constant_view, casts_and_constants]


@pytest.mark.parametrize("function", RECORDED)
def test_a_trace_gives_what_the_function_gives(function: Callable[[], tuple[torch.Tensor, ...]]) -> None:
    with torch.no_grad():
        first = [x.clone() for x in function()]
        out, traced = trace(function)
        assert all(map(torch.equal, out, first))
        for _ in range(2):
            X.normal_()  # constants are read where they lie
            assert all(map(torch.equal, traced(), function()))


def test_a_trace_runs_outside_modes_of_functions() -> None:
    class Counted(TorchFunctionMode):
        calls = 0

        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.calls += 1
            return func(*args, **(kwargs or {}))

    with torch.no_grad(), Counted() as mode:
        out, traced = trace(norm)
        before = mode.calls
        again = traced()
        assert mode.calls == before > 0
    assert torch.equal(again[0], out[0])


def test_a_trace_writes_where_the_function_does() -> None:
    total = torch.zeros(5, 6)

    def add() -> tuple[torch.Tensor, ...]:
        total[1:] = X[1:] * 3
        total[0] = total[1] * 2
        return (total.sum(),)

    with torch.no_grad():
        _, traced = trace(add)
        X.normal_()
        traced()
    right = X * 3
    right[0] = right[1] * 2
    assert torch.equal(total, right)


def test_what_is_not_the_same_twice_in_one_state_is_not_recorded() -> None:
    total = torch.zeros(())

    def count() -> tuple[torch.Tensor, ...]:
        return (total.add_(1).clone(),)

    steps = CapturedSteps(CPU, True)
    with torch.no_grad():
        for calls in range(1, 6):
            found = steps("key", count)[0]
            assert calls <= found and steps.enabled == (calls == 1)


def numbers() -> tuple[torch.Tensor, ...]:
    return (X * 2 if X.sum() > 0 else X,)


def item() -> tuple[torch.Tensor, ...]:
    return (X * float(X[0, 0]),)


def ragged() -> tuple[torch.Tensor, ...]:
    return (X[X > 0],)


def by_name() -> tuple[torch.Tensor, ...]:
    return (F.embedding_bag(PLACES[None], TABLE, per_sample_weights=torch.ones(1, 5), mode="sum"),)


def filled_elsewhere() -> tuple[torch.Tensor, ...]:
    made = X.new_empty(len(X))
    made.numpy()[:] = X.detach().numpy().sum(1)  # no operator of torch
    return (made + 1,)


def filled_by_operators() -> tuple[torch.Tensor, ...]:
    made = X.new_empty(len(X))
    return (torch.sum(X, 1, out=made) + 1,)


def test_memory_that_something_else_fills_is_not_recorded() -> None:
    """Replayed, it would stay as it was."""
    with torch.no_grad(), pytest.raises(NotTraceable, match="reads memory that no operator filled"):
        trace(filled_elsewhere)
    with torch.no_grad():
        _, captured = trace(filled_by_operators)
        X.normal_()
        assert torch.equal(captured()[0], X.sum(1) + 1)


@pytest.mark.parametrize("function", [numbers, item, ragged])
def test_what_depends_on_numbers_is_not_recorded(function: Callable[[], tuple[torch.Tensor, ...]]) -> None:
    with torch.no_grad(), pytest.raises(NotTraceable):
        trace(function)


@pytest.mark.parametrize("function", [numbers, item, ragged, by_name])
def test_and_goes_on_as_it_is(function: Callable[[], tuple[torch.Tensor, ...]]) -> None:
    steps = CapturedSteps(CPU, True)
    with torch.no_grad():
        for _ in range(5):
            X.normal_()
            assert all(map(torch.equal, steps("key", function), function()))


def test_python_that_reads_memory_is_found_out() -> None:
    """Nothing in the trace says so; replaying it gives other numbers, and on inputs that are alike for a while it even
    gives the same."""
    steps = CapturedSteps(CPU, True)

    def read() -> tuple[torch.Tensor, ...]:
        return (TABLE * X.tolist()[0][0],)

    with torch.no_grad():
        for _ in range(4):
            steps("alike", read)
    assert not steps.enabled and not callable(steps.captures["alike"])
    steps = CapturedSteps(CPU, True)

    with torch.no_grad():
        for _ in range(6):
            X.normal_()
            assert all(map(torch.equal, steps("key", read), read()))
    assert not steps.enabled


def test_a_captured_step_is_used_for_its_key_alone() -> None:
    asked = 0

    def double(size: int) -> tuple[torch.Tensor, ...]:
        nonlocal asked
        asked += 1
        return (X[:size] * 2,)

    steps = CapturedSteps(CPU, True)
    with torch.no_grad():
        for _ in range(10):
            for size in (2, 4):
                assert torch.equal(steps(size, lambda: double(size))[0], X[:size] * 2)
    assert asked == 2 * CALLS_BEFORE_CAPTURE + 2 + 1 and steps.enabled  # plain, recorded; the first is compared


@pytest.mark.parametrize("groups", [1, 3, 9])
def test_groups_that_take_turns_all_have_their_captured_step(groups: int) -> None:
    """None throws out what another has begun, however many there are."""
    asked = 0

    def double(group: int) -> tuple[torch.Tensor, ...]:
        nonlocal asked
        asked += 1
        return (X[: group % 5] * 2,)

    steps = CapturedSteps(CPU, True, num_groups=groups)
    with torch.no_grad():
        for _ in range(6):
            for group in range(groups):
                steps(group, lambda group=group: double(group))
    assert asked == groups * (CALLS_BEFORE_CAPTURE + 1) + 1 and steps.enabled


def test_old_captures_go() -> None:
    """Shapes that change leave no more behind than a few."""
    steps = CapturedSteps(CPU, True)
    with torch.no_grad():
        for key in range(20):
            for _ in range(CALLS_BEFORE_CAPTURE + 2):
                steps(key, lambda: (X * 2,))
    assert len(steps.with_memory) == MAX_CAPTURES_WITH_MEMORY and len(steps.captures) == 20


def test_it_may_be_left_out() -> None:
    steps, asked = CapturedSteps(CPU, False), []
    for _ in range(5):
        steps("key", lambda: (asked.append(1), X)[1:])
    assert len(asked) == 5 and not steps.captures


def test_mistakes_of_the_function_are_its_own() -> None:
    def wrong() -> tuple[torch.Tensor, ...]:
        return (X @ X,)

    steps = CapturedSteps(CPU, True)
    for _ in range(3):
        with torch.no_grad(), pytest.raises(RuntimeError, match="mat1 and mat2"):
            steps("key", wrong)
