"""`torch.cuda` of a machine without a GPU, for `device_guard.py`: streams, events and graphs that run at once and know
what waits for what, and kernels in plain torch where the program has some of its own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import count
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
import torch.utils.checkpoint
from torch.utils._python_dispatch import TorchDispatchMode

from rldsl.backends.torch.kernels import attention_kernels, nucleus_kernel, ordered_products
from rldsl.backends.torch.kernels.optional_packages import Package
from rldsl.backends.torch.model import fused_layers
from tests.cuda_paths.device_guard import SIDE, Guard, tensors, written
from tests.cuda_paths.device_streams import HOST


class Event:
    """A mark in a stream."""

    def __init__(self, guard: Guard):
        self.guard = guard
        self.mark: dict[str, int] | None = None  # what runs before it; None: it was not recorded

    def record(self, stream: Stream | None = None) -> None:
        self.mark = self.guard.order.now(stream.name if stream else self.guard.streams[-1])

    def wait(self, stream: Stream | None = None) -> None:
        self.guard.order.wait(stream.name if stream else self.guard.streams[-1], self._recorded())

    def synchronize(self) -> None:
        self.guard.cross("wait", "Event.synchronize")
        self.guard.order.wait(HOST, self._recorded())

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: Event) -> float:
        return 1.0

    def _recorded(self) -> dict[str, int]:
        assert self.mark is not None, "an event is waited for that was never recorded"
        return self.mark


class Stream:
    """A stream. Whatever is launched runs at once; a missing wait is a race all the same."""

    def __init__(self, guard: Guard, name: str):
        self.guard, self.name = guard, name

    def wait_stream(self, other: Stream) -> None:
        self.guard.order.wait(self.name, self.guard.order.now(other.name))

    def wait_event(self, event: Event) -> None:
        event.wait(self)

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event(self.guard)
        event.record(self)
        return event

    def synchronize(self) -> None:
        self.guard.cross("wait", "Stream.synchronize")
        self.guard.order.wait(HOST, self.guard.order.now(self.name))

    def query(self) -> bool:
        return True


class Recorder(TorchDispatchMode):
    """Keeps the operators of a capture; what they change is as before at its end."""

    def __init__(self, guard: Guard) -> None:
        super().__init__()
        self.guard = guard
        self.steps: list[tuple[Any, Any, Any, list[torch.Tensor]]] = []  # operator, arguments, results in new memory
        self.before: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # memory that existed: all of it, and a copy
        self.made: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        changed = written(func, args)
        for x in changed:
            key = x.untyped_storage()._cdata
            if key not in self.made | self.before.keys():
                with self.guard.mute():
                    whole = torch.empty(0, dtype=x.dtype).set_(x.untyped_storage())
                    self.before[key] = whole, whole.clone()
        out = func(*args, **kwargs)
        fresh = _new(out, args, kwargs)
        self.made |= {x.untyped_storage()._cdata for x in fresh}
        if fresh or changed:
            self.steps.append((func, args, kwargs, fresh))
        return out


def _new(out: Any, *given: Any) -> list[torch.Tensor]:
    """The results of an operator in other memory than its arguments."""
    there = {x.untyped_storage()._cdata for x in tensors(given)}
    return [x for x in tensors(out) if x.untyped_storage()._cdata not in there]


class Graph:
    """A captured graph: replaying it runs its operators, which read and write the memory of the capture."""

    def __init__(self, guard: Guard):
        self.guard = guard

    def capture_begin(self, pool: Any = None) -> None:
        self.guard.capturing, self.recorder = True, Recorder(self.guard)
        self.recorder.__enter__()

    def capture_end(self) -> None:
        self.recorder.__exit__(None, None, None)
        self.guard.capturing = False
        with self.guard.mute():
            for memory, before in self.recorder.before.values():
                memory.copy_(before)
        self.guard.graphs += 1

    @torch.no_grad()
    def replay(self) -> None:
        self.guard.replays += 1
        for func, args, kwargs, fresh in self.recorder.steps:
            out = func(*args, **kwargs)
            with self.guard.mute():
                for to, x in zip(fresh, _new(out, args, kwargs), strict=True):
                    to.copy_(x)


@contextmanager
def installed(guard: Guard) -> Iterator[None]:
    """`torch.cuda` is that of a machine with one GPU, and kernels for it are plain torch."""
    with ExitStack() as stack:
        for name, value in _functions(guard).items():
            stack.enter_context(mock.patch.object(torch.cuda, name, value))
        stack.enter_context(mock.patch.object(dist, "new_group", _new_group(guard)))
        # devices have another name below Python, where a hook that saves a tensor is called and autocast has its switch
        stack.enter_context(mock.patch.dict(torch.utils.checkpoint._allowed_determinism_checks_to_fns, {
            "default": lambda x: {"shape": x.shape, "dtype": x.dtype}}))
        stack.enter_context(mock.patch.object(torch.autograd, "has_torch_function", lambda *args: False))
        for name, value in _autocast().items():
            stack.enter_context(mock.patch.object(torch, name, value))
        stack.enter_context(mock.patch.object(torch.amp, "autocast", torch.autocast))
        stack.enter_context(mock.patch("torch.nn.attention.varlen.varlen_attn", varlen(guard)))
        for module, name, value in (
                (ordered_products, "products", products),
                (attention_kernels, "flash_attn", lambda: Package("flash-attn")),
                (attention_kernels, "_installed_decode_kernel", lambda device: decode),
                # kernels that replace what torch has, too
                (nucleus_kernel, "_installed", lambda device: None), (fused_layers, "find_spec", lambda name: None)):
            stack.enter_context(mock.patch.object(module, name, value))
        yield


def _new_group(guard: Guard) -> Any:
    plain = dist.new_group

    def new_group(*args: Any, backend: str | None = None, **kwargs: Any) -> Any:
        group = plain(*args, backend=backend, **kwargs)
        if backend == "gloo" and isinstance(group, dist.ProcessGroup):
            guard.host_groups.add(group.group_name)
        return group

    return new_group


def _functions(guard: Guard) -> dict[str, Any]:
    names = count(1)

    @contextmanager
    def entered(stream: Stream | None) -> Iterator[None]:
        guard.streams.append(stream.name if stream else guard.streams[-1])
        try:
            yield
        finally:
            guard.streams.pop()

    def synchronize(device: Any = None) -> None:
        guard.cross("wait", "torch.cuda.synchronize")
        for stream in list(guard.order.launched):
            guard.order.wait(HOST, guard.order.now(stream))

    def register(pointer: int, size: int, flags: int) -> int:
        guard.registered[pointer] = size
        return 0

    def unregister(pointer: int) -> int:
        del guard.registered[pointer]
        return 0

    runtime = SimpleNamespace(cudaHostRegister=register, cudaHostUnregister=unregister)
    free = {name: lambda device=None: 1 << 30 for name in ("memory_reserved", "max_memory_reserved",
                                                           "max_memory_allocated")}
    return free | {
        "Stream": lambda device=None, priority=0: Stream(guard, f"side {next(names)}"), "stream": entered,
        "Event": lambda enable_timing=False, **kwargs: Event(guard), "synchronize": synchronize,
        "current_stream": lambda device=None: Stream(guard, guard.streams[-1]),
        "default_stream": lambda device=None: Stream(guard, guard.streams[0]),
        "CUDAGraph": lambda: Graph(guard), "graph_pool_handle": object,
        "mem_get_info": lambda device=None: (60 << 30, 80 << 30), "reset_peak_memory_stats": lambda device=None: None,
        "get_device_name": lambda device=None: "stand-in", "get_device_capability": lambda device=None: (9, 0),
        "is_available": lambda: True, "device_count": lambda: 1, "current_device": lambda: 0,
        "set_device": lambda device: None, "empty_cache": lambda: None,
        "cudart": lambda: runtime, "check_error": lambda code: None}


def _autocast() -> dict[str, Any]:
    plain, asked, dtype = torch.autocast, torch.is_autocast_enabled, torch.get_autocast_dtype

    class Autocast(plain):  # type: ignore[misc, valid-type]
        def __init__(self, device_type: str, *args: Any, **kwargs: Any):
            super().__init__(device_type.replace("cuda", "cpu"), *args, **kwargs)

    return {"autocast": Autocast, "is_autocast_enabled": lambda d="cpu": asked(d.replace("cuda", "cpu")),
            "get_autocast_dtype": lambda d: dtype(d.replace("cuda", "cpu"))}


# ------------------------------------------------------------------------------------------------ kernels


def varlen(guard: Guard) -> Any:
    """torch's attention of packed sequences."""
    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, cu_seq_q: torch.Tensor,
               cu_seq_k: torch.Tensor, max_q: int, max_k: int, *, scale: float, window_size: tuple[int, int],
               enable_gqa: bool = False) -> torch.Tensor:
        assert all(guard.side(x) == SIDE for x in (query, key, value, cu_seq_q, cu_seq_k))
        with guard.mute():  # the kernel reads where sequences begin
            ends, key_ends = cu_seq_q.tolist(), cu_seq_k.tolist()
        parts = [_causal(query[a:b], key[c:d], value[c:d], scale, window_size[0])
                 for a, b, c, d in zip(ends, ends[1:], key_ends, key_ends[1:])]
        return torch.cat(parts) if parts else torch.zeros_like(query)

    return attend


def _causal(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, window: int) -> torch.Tensor:
    """Of one sequence, whose last query is at its last key. q: [T, H, D]; k, v: [R, K, D]."""
    at = torch.arange(len(k), device=k.device)
    last = at[len(k) - len(q):, None]
    seen = (at <= last) & ((at >= last - window) if window >= 0 else True)
    return F.scaled_dot_product_attention(*(x.transpose(0, 1) for x in (q, k, v)), attn_mask=seen, scale=scale,
                                          enable_gqa=True).transpose(0, 1)


def decode(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, first: int, positions: torch.Tensor, kv_len: int,
           scale: float, window: int | None) -> torch.Tensor:
    """As `attention_kernels.DecodeKernel`."""
    at = torch.arange(kv_len, device=q.device)
    seen = (at <= positions[:, None]) & (at > positions[:, None] - (window or kv_len + 1))
    k, v = (x[first : first + len(positions), :kv_len].transpose(1, 2) for x in (keys, values))
    return F.scaled_dot_product_attention(q[:, :, None], k, v, attn_mask=seen[:, None, None], scale=scale,
                                          enable_gqa=True)[:, :, 0]


def products(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """As `ordered_products.products`."""
    total = torch.zeros(*left.shape[:2], right.shape[2], device=left.device)
    for i in range(left.shape[2]):
        total += left[:, :, i, None] * right[:, i, None]
    return total.to(left.dtype)
