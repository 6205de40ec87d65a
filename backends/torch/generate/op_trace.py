"""What a function asks of torch, operator by operator, to be asked again without the function.

In: a function of no arguments that reads tensors which stay where they are. Out: what it returns, and a `Tape` that
does the same operations on what these tensors then hold. A decoding step of a small model is a few hundred short
operators under the Python of its modules; the tape leaves the Python out, and asks the same kernels in the same order,
so that it gives the same numbers. Results have their place, where each turn writes them anew, so that views of them
need not be made again either. On CUDA a captured graph is the same idea.

A function whose way depends on numbers, or which talks to other ranks, is not recorded. What such a check cannot see
(Python that reads a tensor's memory) shows when the tape is first compared with the function (`captured_step.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any

import torch
from rldsl.backends.torch.generate.storage_parking import Rest
from torch.utils._python_dispatch import TorchDispatchMode

Out = tuple[torch.Tensor, ...]
Call = Callable[..., Any]

SHARED = ("_unsafe_view",)  # what it gives lies where its argument does, though its schema does not say so


class Unrecorded(Exception):
    """The function cannot be recorded."""


class Tape:
    """steps: operators with all of their arguments. out: where the function's results are after each turn. rest: the
    memory of what the operators make, each turn anew."""

    def __init__(self, steps: list[Callable[[], Any]], out: Out, rest: Rest):
        self.steps, self.out, self.rest = steps, out, rest

    def __call__(self) -> Out:
        # what was recorded stands below autocast and autograd, and must not meet them again
        with torch.inference_mode(), torch.autocast("cpu", enabled=False):
            for step in self.steps:
                step()
        return self.out


def record(function: Callable[[], Out], twice: bool = True) -> tuple[Out, Tape]:
    """What the function returns, and its tape, tried where what it does may be done twice in the same state.
    Errors: Unrecorded, after a part of its work or all of it."""
    recorder = _Recorder()
    with recorder:
        out = function()
    tape = Tape(recorder.steps, out, Rest(recorder.made.values()))
    if twice:
        right = [x.clone() for x in out]
        if not all(map(torch.equal, tape(), right)):
            raise Unrecorded("it gives other numbers in the same state")
    return out, tape


class _Recorder(TorchDispatchMode):
    """made: by storage, a tensor of each that an operator made; given: the storages that were there."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[Callable[[], Any]] = []
        self.made: dict[int, torch.Tensor] = {}
        self.given: set[int] = set()

    def _note(self, args: Any, kwargs: Any, out: Any) -> None:
        self.given |= {x.untyped_storage()._cdata for x in _tensors((args, kwargs))} - self.made.keys()
        found = {x.untyped_storage()._cdata: x for x in _tensors(out)}
        self.made |= {key: x for key, x in found.items() if key not in self.given}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        kind, again, into = _way(func)
        if kind == "unknown" or func is torch.ops.aten.index.Tensor and _masked(args[1]):
            raise Unrecorded(str(func))
        out = func(*args, **kwargs)
        if kind == "new":
            self._note(args, kwargs, out)
        if kind != "view":
            if any(y is None for x in args if isinstance(x, list) for y in x):
                again = func  # places of `index`, which the binding wants to be tensors
            args = [[*x] if isinstance(x, list) else x for x in args]
            self.steps.append(partial(again, *args, **kwargs) if kind == "in place" else
                              partial(into, *args, **kwargs, out=out) if into is not None else
                              partial(_refill, out, again, args, kwargs))
        return out


@cache
def _way(func: Any) -> tuple[str, Call, Call | None]:
    """What an operator does ("view", "in place", "new", or "unknown" before it has run), how it is asked, and how it
    writes into a tensor that is there, if it can. torch's own binding, where there is one, takes half the time."""
    name, number = func._schema.name.partition("::")[2], torch.Tag.data_dependent_output
    ragged = torch.Tag.dynamic_output_shape in func.tags and func is not torch.ops.aten.index.Tensor
    if func.namespace != "aten" or number in func.tags or ragged:
        return "unknown", func, None
    bound = (getattr(place, name, None) for place in (torch, torch.Tensor))
    quick = next((x for x in bound if type(x) in (type(torch.add), type(torch.Tensor.add))), func)
    if func.is_view or name in SHARED:
        return "view", quick, None
    if func._schema.is_mutable:
        return "in place", quick, None
    for overload in (getattr(func.overloadpacket, n) for n in func.overloadpacket.overloads()):
        given = [(a.name, str(a.type)) for a in overload._schema.arguments if not a.is_out]
        places = [a.name for a in overload._schema.arguments if a.is_out]
        if places == ["out"] and given == [(a.name, str(a.type)) for a in func._schema.arguments]:
            bare = torch.Tag.generated in overload.tags or getattr(torch, name, None) is not quick
            return "new", quick, overload if bare else quick
    return "new", quick, None


def _tensors(x: Any) -> Iterator[torch.Tensor]:
    if isinstance(x, torch.Tensor):
        yield x
    elif isinstance(x, tuple | list | dict):
        for y in x.values() if isinstance(x, dict) else x:
            yield from _tensors(y)


def _masked(places: Any) -> bool:
    """Whether something is taken by masks, so that its shape depends on numbers."""
    return any(x is not None and x.dtype in (torch.bool, torch.uint8) for x in places)


def _refill(out: Any, again: Call, args: Any, kwargs: Any) -> None:
    made = again(*args, **kwargs)
    for place, x in zip((out,), (made,)) if isinstance(out, torch.Tensor) else zip(out, made):
        if isinstance(place, torch.Tensor):
            place.copy_(x)
