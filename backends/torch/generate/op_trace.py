"""Capture the torch operators that a function calls, and run them again without the function's Python.

In: a function of no arguments that reads tensors which stay where they are. Out: what it returns, and an `OpTrace` that
repeats its operators on whatever these tensors then hold.

A decode step of a small model is a few hundred short operators under the Python of its modules. The trace leaves that
Python out and calls the same kernels in the same order, so it gives the same numbers. Each result has a fixed tensor
that every run writes anew, so views of results need not be made again either. On CUDA, a captured graph is the same
idea.

Collectives are operators, too; the trace waits for each one before it runs the next operator. An opaque call
(`kernels/opaque_calls.py`) is one step, which calls its function again. A function that branches on values is not
traceable. It still runs to its end, since other ranks may take part in the rest of it. What the tracer cannot see
(Python that reads a tensor's memory) shows when the trace is compared with the function (`captured_step.py`).
Errors: NotTraceable.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, partial
from typing import Any, Literal

import torch

from rldsl.backends.torch.generate.releasable_storage import ReleasableStorage
from rldsl.backends.torch.kernels import (
    cpu_kernels,
    cpu_lookups,
    cpu_rotary,
    cpu_sampling,
    few_row_products,
    ordered_kernels,
    panel_products,
)
from rldsl.backends.torch.kernels.kernel_library import KernelRun, joined
from rldsl.backends.torch.kernels.opaque_calls import (
    CallRecorder,
    OpaqueFunction,
    OpaqueStep,
    RecordedCall,
    ThreadState,
    opaque,
)
from rldsl.runtime import shared_memory

Outputs = tuple[torch.Tensor, ...]
Op = Callable[..., Any]
Effect = Literal["view", "in place", "new", "collective", "unknown"]

NAMESPACES = ("aten", "mkldnn", "rldsl")  # of operators whose schemas say what they do
COLLECTIVES = "c10d"                          # the namespace of those of torch.distributed
UNDECLARED_VIEWS = ("_unsafe_view",)  # the result shares its argument's memory, though the schema does not say so


# of operators whose result a tensor that exists can take in one step, though they have no such variant: (result,
# arguments) -> the step
WRITERS: dict[Op, Callable[[torch.Tensor, Any], Callable[[], Any]]] = {
    torch.ops.aten._to_copy.default: lambda out, args: partial(out.copy_, args[0]),
    torch.ops.aten.zeros_like.default: lambda out, args: out.zero_,
    torch.ops.aten.new_zeros.default: lambda out, args: out.zero_,
    torch.ops.aten.new_full.default: lambda out, args: partial(out.fill_, args[2]),
    torch.ops.aten.scalar_tensor.default: lambda out, args: partial(out.fill_, args[0]),
} | cpu_kernels.INTO | cpu_rotary.INTO | cpu_sampling.INTO | few_row_products.INTO | ordered_kernels.INTO \
  | panel_products.INTO
PLAIN = cpu_kernels.PLAIN | ordered_kernels.PLAIN | shared_memory.PLAIN  # of our own operators
ALLOCATIONS = (torch.ops.aten.empty.memory_format, torch.ops.aten.new_empty.default)  # of memory that something fills


class NotTraceable(Exception):
    """The function cannot be captured."""

    def __init__(self, reason: str, out: Outputs):
        super().__init__(reason)
        self.out = out  # what it returned


class OpTrace:
    """A captured function: the operators that it ran."""

    def __init__(self, ops: Sequence[Callable[[], Any]], out: Outputs, made: Mapping[int, torch.Tensor]):
        """ops: operators with all of their arguments, in order. made: storage -> a tensor of it, of all that the
        operators make and each run writes anew."""
        self.ops = joined(ops, made.keys())
        self.out = out  # where the function's results are after each run
        self._made = ReleasableStorage(made.values())

    @property
    def has_memory(self) -> bool:
        """For what the operators make. Without it the trace cannot run."""
        return self._made.has_memory

    @property
    def bytes_made(self) -> int:
        """Of memory for what the operators make."""
        return sum(size for _, size in self._made.sizes)

    def release_memory(self) -> None:
        self._made.release_memory()

    def allocate_memory(self) -> None:
        self._made.allocate_memory()
        for op in self.ops:
            if isinstance(op, KernelRun):
                op.locate()

    def __call__(self) -> Outputs:
        _run(self.ops)
        return self.out

    def repeats(self, out: Outputs, calls: Sequence[RecordedCall]) -> bool:
        """Whether the trace computes what the function has just computed, bit for bit. out: its results. calls: its
        opaque calls, which are not made again, since other ranks may take part in each of them once. All other steps
        run in any case, since other ranks may take part in these."""
        remaining = [*calls]
        same = []

        def take(step: OpaqueStep) -> None:
            same.append(step.take(remaining.pop(0) if remaining else None))

        _run([partial(take, op) if isinstance(op, OpaqueStep) else op for op in self.ops])
        return not remaining and all(same) and all(map(torch.equal, self.out, out))


def _run(ops: Sequence[Callable[[], Any]]) -> None:
    # what was captured is below autocast, autograd and modes of functions, and must not meet them again
    with torch.inference_mode(), torch.autocast("cpu", enabled=False), torch._C.DisableTorchFunction():
        for op in ops:
            op()


def trace(function: Callable[[], Outputs]) -> tuple[Outputs, OpTrace]:
    """What the function returns, and its trace.
    Errors: NotTraceable, after the function has done all of its work."""
    tracer = _Tracer()
    with tracer:
        out = function()
    if tracer.refused:
        raise NotTraceable(tracer.refused, out)
    return out, OpTrace(tracer.ops, out, tracer.made)


class _Tracer(CallRecorder):
    def __init__(self) -> None:
        super().__init__()
        self.ops: list[Callable[[], Any]] = []
        self.made: dict[int, torch.Tensor] = {}  # by storage: a tensor of each storage that an operator made
        self.inputs: set[int] = set()            # storages that existed before
        self.unfilled: set[int] = set()          # storages that were allocated, and that no operator has written to
        self.refused = ""                        # why there is no trace

    def _note_storages(self, args: Any, kwargs: Any, out: Any) -> None:
        self.inputs |= {x.untyped_storage()._cdata for x in _tensors((args, kwargs))} - self.made.keys()
        results = {x.untyped_storage()._cdata: x for x in _tensors(out)}
        self.made |= {key: x for key, x in results.items() if key not in self.inputs}

    def _note_fillings(self, func: Any, effect: Effect, args: Any, kwargs: Any, out: Any) -> None:
        """What fills memory without being an operator (a Triton kernel in its interpreter) would be missing in the
        trace, whose results would stay as they were."""
        if func in ALLOCATIONS:
            self.unfilled |= {x.untyped_storage()._cdata for x in _tensors(out)}
        elif self.unfilled and effect != "view":
            given = dict(zip((a.name for a in func._schema.arguments), args, strict=False)) | kwargs
            # the schemas of collectives do not say what they write to
            written = [given.get(a.name) for a in func._schema.arguments
                       if effect == "collective" or a.alias_info and a.alias_info.is_write]
            self.unfilled -= {x.untyped_storage()._cdata for x in _tensors(written)}
            if self.unfilled & {x.untyped_storage()._cdata for x in _tensors((args, kwargs))}:
                self.refused = f"{func} reads memory that no operator filled"

    def record_call(self, function: OpaqueFunction, inputs: tuple[torch.Tensor, ...]) -> torch.Tensor:
        before, state = [x.clone() for x in inputs], ThreadState.current()
        out = opaque(function, *inputs).clone()  # the steps write to it, so nothing else may be there
        if not all(map(torch.equal, inputs, before)):
            self.refused = self.refused or "an opaque call changes its inputs"
        elif self.unfilled & {x.untyped_storage()._cdata for x in inputs}:
            self.refused = self.refused or "an opaque call reads memory that no operator filled"
        self._note_storages(inputs, {}, out)
        self.ops.append(OpaqueStep(function, inputs, out, state))
        return out

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        effect, op, out_variant = _classify(func)
        if effect == "unknown" or (func is torch.ops.aten.index.Tensor and _has_mask(args[1])):
            self.refused = self.refused or str(func)
        out = func(*args, **kwargs)
        if self.refused:
            return out
        if effect == "new":
            self._note_storages(args, kwargs, out)
        self._note_fillings(func, effect, args, kwargs, out)
        if effect != "view":  # a view of a tensor that stays is the same view in every run
            if any(y is None for x in args if isinstance(x, list) for y in x):
                op = func  # the indices of `index`: torch's Python binding wants them all to be tensors
            args = [[*x] if isinstance(x, list) else x for x in args]
            if func in ALLOCATIONS:
                pass
            elif effect == "collective":
                self.ops.append(partial(_communicate, func, args, kwargs))
            elif effect == "in place":
                self.ops.append(PLAIN[func](*args) if func in PLAIN else partial(op, *args, **kwargs))
            elif (write := WRITERS.get(func)) is not None:
                self.ops.append(write(out, args))
            elif not kwargs and func in cpu_lookups.CALLS and (call := cpu_lookups.CALLS[func](out, args)) is not None:
                self.ops.append(call)
            elif func is torch.ops.aten.embedding.default and args[1].is_contiguous():
                # its own variant with `out` takes ten times as long
                self.ops.append(partial(torch.index_select, args[0], 0, args[1].view(-1), out=out.flatten(0, -2)))
            elif out_variant is not None:
                self.ops.append(partial(out_variant, *args, **kwargs, out=out))
            else:
                self.ops.append(partial(_copy_into, out, op, args, kwargs))
        return out


@cache
def _classify(func: Any) -> tuple[Effect, Op, Op | None]:
    """What an operator does ("unknown" before it has run), how it is called, and how it is called so that it writes
    into an existing tensor, if it can. torch's own Python binding, where there is one, takes half the time."""
    name, reads_values = func._schema.name.partition("::")[2], torch.Tag.data_dependent_output in func.tags
    dynamic_shape = torch.Tag.dynamic_output_shape in func.tags and func is not torch.ops.aten.index.Tensor
    if func.namespace == COLLECTIVES:
        return "collective", func, None
    if func.namespace not in NAMESPACES or reads_values or dynamic_shape:
        return "unknown", func, None
    bindings = (getattr(owner, name, None) for owner in (torch, torch.Tensor))
    op: Op = next((x for x in bindings if x is not None and type(x) in (type(torch.add), type(torch.Tensor.add))), func)
    if func.is_view or name in UNDECLARED_VIEWS:
        return "view", op, None
    if func._schema.is_mutable:
        return "in place", op, None
    for overload in (getattr(func.overloadpacket, n) for n in func.overloadpacket.overloads()):
        inputs = [(a.name, str(a.type)) for a in overload._schema.arguments if not a.is_out]
        outputs = [a.name for a in overload._schema.arguments if a.is_out]
        if outputs == ["out"] and inputs == [(a.name, str(a.type)) for a in func._schema.arguments]:
            unbound = torch.Tag.generated in overload.tags or getattr(torch, name, None) is not op
            return "new", op, overload if unbound else op
    return "new", op, None


def _tensors(x: Any) -> Iterator[torch.Tensor]:
    if isinstance(x, torch.Tensor):
        yield x
    elif isinstance(x, tuple | list | dict):
        for y in x.values() if isinstance(x, dict) else x:
            yield from _tensors(y)


def _has_mask(indices: Any) -> bool:
    """Whether one of them is a boolean mask, so that the result's shape depends on values."""
    return any(x is not None and x.dtype in (torch.bool, torch.uint8) for x in indices)


def _communicate(collective: Op, args: Any, kwargs: Any) -> None:
    """Run a collective on the tensors with which it was captured, and wait for it. It returns its work, alone or after
    the tensors that it wrote."""
    results = collective(*args, **kwargs)
    (results[-1] if isinstance(results, tuple) else results).wait()


def _copy_into(out: Any, op: Op, args: Any, kwargs: Any) -> None:
    results = op(*args, **kwargs)
    pairs = zip((out,), (results,), strict=True) if isinstance(out, torch.Tensor) else zip(out, results, strict=True)
    for target, x in pairs:
        if isinstance(target, torch.Tensor):
            target.copy_(x)
