"""Calls of functions that a recorder of operators takes as one step, whatever operators they run.

In: a function of tensors, and a recorder (a dispatch mode) if one is entered. Out: the function's result. A recorder of
operators cannot record a function that reads numbers on the host, such as how many rows each expert gets; it can
record the call. `opaque` hands the call to the recorder that was entered last. A recorder's `record_call` hands it on
by `opaque`, to the recorder that was entered before.

Contract: the shape and dtype of the result depend only on those of the inputs, the function changes none of its inputs,
and whatever else it reads (weights) stays where it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode, _pop_mode_temporarily

OpaqueFunction = Callable[..., torch.Tensor]


class CallRecorder(TorchDispatchMode):
    """A mode that sees operators, and opaque calls as a whole. This one does nothing about either."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's has no types

    def __torch_dispatch__(self, func: Any, types: Sequence[Any], args: Sequence[Any] = (),
                           kwargs: Mapping[str, Any] | None = None) -> Any:
        return func(*args, **(kwargs or {}))

    def record_call(self, function: OpaqueFunction, inputs: tuple[torch.Tensor, ...]) -> torch.Tensor:
        """The result of an opaque call. The mode is not entered meanwhile."""
        return opaque(function, *inputs)


def opaque(function: OpaqueFunction, *inputs: torch.Tensor) -> torch.Tensor:
    """function(*inputs), of which the recorder that was entered last sees nothing but this call."""
    mode = _get_current_dispatch_mode()
    if not isinstance(mode, CallRecorder):
        return function(*inputs)
    with _pop_mode_temporarily():
        return mode.record_call(function, inputs)


def opaque_on_cpu(function: OpaqueFunction, *inputs: torch.Tensor) -> torch.Tensor:
    """`opaque` on a CPU without gradients, as in decoding. Otherwise function(*inputs): a CUDA graph can hold no read
    on the host, so those who look for them must see it."""
    if torch.is_grad_enabled() or not all(x.is_cpu for x in inputs):
        return function(*inputs)
    return opaque(function, *inputs)


@dataclass(frozen=True, slots=True, eq=False, repr=False)  # tensors are long to print
class RecordedCall:
    """What an opaque call read and returned."""

    inputs: tuple[torch.Tensor, ...]  # copies
    result: torch.Tensor              # a copy


class CallLog(CallRecorder):
    """Keeps what opaque calls read and returned, while it is entered."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[RecordedCall] = []  # in their order

    def record_call(self, function: OpaqueFunction, inputs: tuple[torch.Tensor, ...]) -> torch.Tensor:
        copies = tuple(x.clone() for x in inputs)
        out = opaque(function, *inputs)
        self.calls.append(RecordedCall(copies, out.clone()))
        return out


class AnsweredCalls(CallRecorder):
    """While it is entered, opaque calls get the results of earlier ones, in their order. Only one more than these is
    made."""

    def __init__(self, calls: Sequence[RecordedCall]) -> None:
        super().__init__()
        self._remaining = iter(calls)

    def record_call(self, function: OpaqueFunction, inputs: tuple[torch.Tensor, ...]) -> torch.Tensor:
        call = next(self._remaining, None)
        return opaque(function, *inputs) if call is None else call.result.clone()


@dataclass(frozen=True, slots=True)
class ThreadState:
    """What torch keeps for a thread and what decides how functions compute on a CPU without gradients."""

    autocast: bool            # whether it is on
    dtype: torch.dtype        # of autocast
    disables_functions: bool  # whether modes of functions are left out (`kernels/autograd.py`)

    @staticmethod
    def current() -> ThreadState:
        return ThreadState(torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu"),
                           torch._C._is_torch_function_all_disabled())

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Inside it, the state is this one. What is made there is no inference tensor, since it may be kept for passes
        with gradients."""
        functions = torch._C.DisableTorchFunction() if self.disables_functions else torch._C._EnableTorchFunction()
        with (torch.inference_mode(False), torch.no_grad(), functions,
              torch.autocast("cpu", dtype=self.dtype, enabled=self.autocast)):
            yield


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class OpaqueStep:
    """An opaque call in a trace: each run calls the function again and writes its result to the same tensor."""

    function: OpaqueFunction
    inputs: tuple[torch.Tensor, ...]  # which the steps before write anew
    out: torch.Tensor
    state: ThreadState                # in which the function was called

    def __call__(self) -> None:
        with self.state.restored():
            result = self.function(*self.inputs)
        self.out.copy_(result)

    def take(self, call: RecordedCall | None) -> bool:
        """Instead of a call, take the result of an earlier one. Returns whether that one read the same numbers; if it
        does not fit, nothing is taken. None: there is no earlier one."""
        if call is None or call.result.shape != self.out.shape or call.result.dtype != self.out.dtype:
            return False
        self.out.copy_(call.result)
        return len(self.inputs) == len(call.inputs) and all(
            x.dtype == y.dtype and torch.equal(x, y) for x, y in zip(self.inputs, call.inputs, strict=True))
