"""Capture a function that is called again and again with the same shapes, and replay it without its Python.

In: a key for everything that the function's Python depends on, and a function that reads tensors which stay where they
are; called twice in one state it gives the same. Out: its results.

The first calls run the function, then one call captures it: as an `OpTrace` on the CPU, as a CUDA graph on a GPU. The
first capture is compared with the function once more, in a later state: bit for bit on the CPU, within
`GRAPH_TOLERANCE` on a GPU. If it does not match, nothing is replayed. A function that cannot be captured runs as it is.
Captures that were not used for a while have no memory until they are used again.

A size that may belong to the key is given apart from it (`DynamicSize`). If no run of the function's Python reads it,
on the CPU one capture serves all sizes. The first one that is used at another size than that of its capture is compared
with the function once more. If a run reads it, captures are specialized: each serves one size. So does a CUDA graph.

A function with collectives is captured by all ranks that run it together, or by none (`all_agree`): to compare a
capture, all of them run it once more. What is inside an opaque call (`kernels/opaque_calls.py`) is excepted: it runs
once for each call of the function, whether that is run, captured, compared or replayed. So other ranks may take part in
opaque calls that capture at other calls, or never, as those that share experts do.

A function that reads numbers on the host is never captured: an operator trace would repeat what Python made of them,
and a CUDA graph cannot hold what makes the host wait for the device. The calls before a capture look for such reads
(`HostReads`), since a capture of a graph that fails leaves the allocator of the process damaged. If one fails all the
same, `CaptureSwitch` makes it the last one. Inside an opaque call an operator trace allows such reads, since a replay
makes them again.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from rldsl.backends.torch.generate.dynamic_size import DynamicSize
from rldsl.backends.torch.generate.op_trace import NotTraceable, OpTrace, Outputs, trace
from rldsl.backends.torch.kernels.opaque_calls import (
    AnsweredCalls,
    CallLog,
    CallRecorder,
    OpaqueFunction,
    RecordedCall,
    opaque,
)
from rldsl.memory.decode_shapes import MAX_CAPTURES_WITH_MEMORY

CALLS_BEFORE_CAPTURE = 1  # a capture takes as long as a few calls
MAX_CAPTURES = 64  # per micro-batch group, most of them without memory
GRAPH_TOLERANCE = 1e-3  # of floats, relative and absolute: inside a graph, cuBLAS may choose another kernel
READING_METHODS = ("item", "tolist", "numpy", "cpu", "__bool__", "__int__", "__float__", "__index__")
COPIES = (torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default)


@dataclass
class CaptureSwitch:
    """Whether functions of a shard may still be captured: not after a capture of a CUDA graph has failed."""

    enabled: bool = True


@dataclass
class CapturedSteps:
    """The pool of captured graphs (CUDA) or operator traces (CPU) of one function."""

    device: torch.device     # on which the function runs
    enabled: bool            # False: every call runs the function
    repeatable: bool = True  # whether the function may run twice in one state: then a capture is compared with it
    num_groups: int = 1      # how many micro-batch groups take turns; each has its own keys
    # key, with the size if that belongs to it (`_full_key`) -> its graph or operator trace, or how often the function
    # was called while there is none
    captures: dict[Hashable, Callable[[], Outputs] | int] = field(default_factory=dict)
    with_memory: dict[Hashable, OpTrace] = field(default_factory=dict)  # least recently used first
    specialized: dict[Hashable, bool] = field(default_factory=dict)  # key -> whether a run of some rank reads the size
    captured_at: dict[Hashable, int] = field(default_factory=dict)  # key -> the size at which its capture was made
    verified: bool = False   # a capture has been compared with its function
    verified_across_sizes: bool = False  # one has been, at another size than that of its capture
    switch: CaptureSwitch = field(default_factory=CaptureSwitch)  # of the shard
    graph_pool: GraphPool | None = None  # memory of all graphs, where no two groups take turns
    all_agree: Callable[[bool], bool] = bool  # whether all ranks that run the function together say yes

    def __call__(self, key: Hashable, function: Callable[[], Outputs], size: DynamicSize | None = None) -> Outputs:
        """size: what the function may depend on besides its key; new for each call."""
        if not (self.enabled and self.switch.enabled):
            return function()
        full_key = self._full_key(key, size)
        captured = self.captures.get(full_key, 0)
        if isinstance(captured, int):
            if captured == CALLS_BEFORE_CAPTURE:
                return self._capture(key, function, size)
            self.captures[full_key] = captured + 1
            limit = MAX_CAPTURES if self.device.type == "cpu" else MAX_CAPTURES_WITH_MEMORY  # a graph always has memory
            if len(self.captures) > limit * self.num_groups:
                oldest = next(iter(self.captures))
                del self.captures[oldest]
                self.with_memory.pop(oldest, None)
            out = self._run_watched(function)
            if (found := self._full_key_after_run(key, size)) != full_key:
                self.captures.pop(full_key, None)
                self.captures[found] = captured + 1
            return out
        if isinstance(captured, OpTrace):
            self._allocate_memory(full_key, captured)
        compares = not self.verified or self._is_other_size(key, size) and not self.verified_across_sizes
        if not compares or not self.repeatable:
            return captured()
        return self._compare(key, captured, function, size)

    def _full_key(self, key: Hashable, size: DynamicSize | None) -> Hashable:
        """The key of the function's capture. Until a run has shown that it does not read the size, and always on a GPU,
        the size belongs to it."""
        if size is None or not self.specialized.get(key, True):
            return key
        return key, size.value

    def _full_key_after_run(self, key: Hashable, size: DynamicSize | None) -> Hashable:
        """The same, after a run of the function's Python. One run that reads the size is enough, on any rank: all
        ranks must look for a capture under one key, also where only some have a kernel that does not read it."""
        if size is not None and self.device.type == "cpu" and not self.specialized.get(key, False):
            self.specialized[key] = not self.all_agree(not size.is_read)
        return self._full_key(key, size)

    def _is_other_size(self, key: Hashable, size: DynamicSize | None) -> bool:
        """Whether the capture for this call was made at another size."""
        return size is not None and self._full_key(key, size) == key and self.captured_at[key] != size.value

    def _compare(self, key: Hashable, captured: Callable[[], Outputs], function: Callable[[], Outputs],
                 size: DynamicSize | None) -> Outputs:
        """Run the function, and compare the capture with it."""
        full_key, is_other = self._full_key(key, size), self._is_other_size(key, size)
        with (log := CallLog()) if isinstance(captured, OpTrace) else nullcontext():
            out = function()
        if self._full_key_after_run(key, size) != full_key:  # the capture may be specialized on another size
            del self.captures[full_key]
            self.with_memory.pop(full_key, None)
            return out
        if isinstance(captured, OpTrace):
            self.verified = self._is_verified(captured, out, function, log.calls)
        else:
            self.verified = self.all_agree(all(map(self._equal, out, captured())))
        self.enabled = self.verified
        self.verified_across_sizes |= is_other
        return out

    def _is_verified(self, captured: OpTrace, out: Outputs, function: Callable[[], Outputs],
                     calls: Sequence[RecordedCall]) -> bool:
        """Whether the trace repeats, on all ranks, what the function has just computed. If not, the trace may have
        written something else (to the KV cache), so the function writes it once more. calls: its opaque calls."""
        same = self.all_agree(captured.repeats(out, calls))
        if not same:
            with AnsweredCalls(calls):  # other ranks take part in each call once
                function()
        return same

    def _equal(self, a: torch.Tensor, b: torch.Tensor) -> bool:
        """Of a graph's results."""
        if not a.is_floating_point():
            return torch.equal(a, b)
        return torch.allclose(a, b, rtol=GRAPH_TOLERANCE, atol=GRAPH_TOLERANCE, equal_nan=True)

    def _run_watched(self, function: Callable[[], Outputs]) -> Outputs:
        with HostReads(inside_calls=self.device.type != "cpu") as reads:
            out = function()
        self.enabled = self.all_agree(not reads.found)
        return out

    def release_memory(self) -> None:
        """Give the memory of all captures back until they are used again."""
        for captured in self.with_memory.values():
            captured.release_memory()
        self.with_memory.clear()

    def _allocate_memory(self, full_key: Hashable, captured: OpTrace) -> None:
        if self.with_memory.pop(full_key, None) is None and not captured.has_memory:
            captured.allocate_memory()
        self.with_memory[full_key] = captured
        # the last result of each group is still read: with several captures per group it is never the oldest
        if len(self.with_memory) > MAX_CAPTURES_WITH_MEMORY * self.num_groups:
            self.with_memory.pop(next(iter(self.with_memory))).release_memory()

    def _capture(self, key: Hashable, function: Callable[[], Outputs], size: DynamicSize | None) -> Outputs:
        full_key = self._full_key(key, size)
        if self.device.type != "cpu":
            return self._capture_graph(full_key, function)
        captured: OpTrace | None = None
        compares, log = self.repeatable and not self.verified, CallLog()
        try:
            with log if compares else nullcontext():
                out, captured = trace(function)
        except NotTraceable as error:
            out = error.out
        self.enabled = self.all_agree(captured is not None)
        if captured is None or not self.enabled:
            return out
        if compares:
            expected = tuple(x.clone() for x in out)  # each run of the trace writes its results anew
            self.enabled = self._is_verified(captured, expected, function, log.calls)
            if not self.enabled:
                return expected
        if (found := self._full_key_after_run(key, size)) != full_key:  # it is specialized
            del self.captures[full_key]
        elif size is not None and found == key:
            self.captured_at[key] = size.value
        self.captures[found] = captured
        self._allocate_memory(found, captured)
        return out

    def _capture_graph(self, full_key: Hashable, function: Callable[[], Outputs]) -> Outputs:
        if self.graph_pool is None:
            self.graph_pool = GraphPool.allocate(self.device)
        # graphs that take turns must not share memory: a replay would overwrite what another group still reads
        pool = self.graph_pool if self.num_groups == 1 else GraphPool.allocate(self.device)
        try:
            self.captures[full_key] = replay = capture_graph(function, pool)
        except RuntimeError as error:  # nothing of the function has run
            self.switch.enabled = False
            warnings.warn(f"a CUDA graph of decoding could not be captured ({str(error).splitlines()[0]}), so decode "
                          "steps are launched one kernel at a time", stacklevel=2)
            return function()
        return replay()


class HostReads:
    """Looks for what makes the host wait for the device, while it is entered: methods that read a tensor's memory,
    operators that copy between the two, and operators whose shape or value depends on data."""

    def __init__(self, inside_calls: bool = True) -> None:
        """inside_calls: whether to look inside opaque calls, which an operator trace makes again and a graph cannot."""
        self.inside_calls = inside_calls
        self.found = ""  # the name of the first one

    def __enter__(self) -> HostReads:
        self._modes = ExitStack()
        for mode in (_WatchedMethods(), _WatchedOperators()):
            mode.reads = self
            self._modes.enter_context(mode)
        return self

    def __exit__(self, *raised: object) -> None:
        self._modes.close()


class _WatchedMethods(TorchFunctionMode):
    reads: HostReads

    def __torch_function__(self, func: Any, types: Sequence[Any], args: Sequence[Any] = (),
                           kwargs: Mapping[str, Any] | None = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in READING_METHODS:
            self.reads.found = self.reads.found or name
        return func(*args, **(kwargs or {}))


class _WatchedOperators(CallRecorder):
    reads: HostReads

    def record_call(self, function: OpaqueFunction, inputs: tuple[torch.Tensor, ...]) -> torch.Tensor:
        if self.reads.inside_calls:
            with self:
                return function(*inputs)
        before = self.reads.found
        out = opaque(function, *inputs)
        self.reads.found = before  # methods have been seen all the same
        return out

    def __torch_dispatch__(self, func: Any, types: Sequence[Any], args: Sequence[Any] = (),
                           kwargs: Mapping[str, Any] | None = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if not self.reads.found and (_depends_on_data(func, args, kwargs or {}) or _crosses_devices(func, args, out)):
            self.reads.found = str(func)
        return out


def _depends_on_data(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether the host must know numbers of a tensor before it can launch what follows."""
    name = func.__name__.partition(".")[0]
    if name in ("index", "index_put", "index_put_"):  # a mask is turned into places first
        return any(i is not None and i.dtype in (torch.bool, torch.uint8) for i in args[1])
    if name == "repeat_interleave" and kwargs.get("output_size") is not None:
        return False
    return torch.Tag.dynamic_output_shape in func.tags or torch.Tag.data_dependent_output in func.tags


def _crosses_devices(func: Any, args: Sequence[Any], out: Any) -> bool:
    """Whether a tensor is read that lies on another device than the result. A kernel takes a single number of the host
    as an argument, so only a copy of one counts."""
    devices = {x.device.type for x in tree_leaves(out) if isinstance(x, torch.Tensor)}
    if func is torch.ops.aten.lift_fresh.default:  # all that is seen of torch.tensor(...)
        return devices != {"cpu"}
    read = [x for x in tree_leaves(args) if isinstance(x, torch.Tensor)]
    return any(x.device.type not in devices and (x.dim() > 0 or func in COPIES) for x in read if devices)


@dataclass(frozen=True, slots=True)
class GraphPool:
    """Where the kernels of CUDA graphs find memory, and the stream on which they are captured."""

    handle: Any
    stream: torch.cuda.Stream

    @staticmethod
    def allocate(device: torch.device) -> GraphPool:
        return GraphPool(torch.cuda.graph_pool_handle(), torch.cuda.Stream(device))


def capture_graph(function: Callable[[], Outputs], pool: GraphPool) -> Callable[[], Outputs]:
    """A CUDA graph of the function, which has run before, so that everything its kernels set up at their first launch
    exists. Nothing is computed. Unlike `torch.cuda.graph`, it does not empty the allocator's cache, and leaves the
    current stream as it was if the capture fails. Errors: RuntimeError."""
    graph = torch.cuda.CUDAGraph()
    current = torch.cuda.current_stream()
    torch.cuda.synchronize()
    pool.stream.wait_stream(current)
    with torch.cuda.stream(pool.stream):
        graph.capture_begin(pool=pool.handle)
        try:
            out = function()
        except BaseException:
            with suppress(RuntimeError):  # it fails, since the capture has
                graph.capture_end()
            raise
        graph.capture_end()
    current.wait_stream(pool.stream)

    def replay() -> Outputs:
        graph.replay()
        return out

    return replay
