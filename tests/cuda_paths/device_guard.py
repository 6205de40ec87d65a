"""A device without host access: runs whose "GPU" is a part of the CPU's memory, in which every step across the border
between the two is seen, with the line of the program that takes it.

Within `guarded(...)` tensors that are made on `DEVICE` are on it, as far as Python can tell: `device`, `is_cuda` and
`to` say so. Their memory remembers it, and so does that of what is computed from them. What a GPU does implicitly is
then an event: the host waits for the device (`item`, `tolist`, a mask as an index, a copy to the host), memory that is
not pinned is copied to the device (`torch.tensor(..., device=)`, `to`), tensors of both sides meet in one operator,
which is an error on every GPU, or a stream does not wait for another one (`device_streams.py`). `torch.cuda` is the
stand-in of `device_cuda.py`; messages travel as on a CPU, and those of tensors on the device have no others.

What is not seen: what code in C++ does with memory without an operator, and how fast anything is.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from rldsl.backends.torch.generate.captured_step import _depends_on_data
from tests.cuda_paths.device_streams import HOST, Memory, Order

ROOT = Path(__file__).parents[2]
DEVICE, CPU = torch.device("cuda", 0), torch.device("cpu")
SIDE = "device"
# functions that read a tensor's memory without an operator; `item` and the like have one
READING = {"tolist", "numpy", "__array__", "__repr__", "__reduce_ex__", "__deepcopy__", "__format__"}
PLAIN = {"__set__", "dim", "size", "stride", "requires_grad_", "data_ptr", "untyped_storage", "is_contiguous", "numel",
         "is_floating_point", "element_size", "storage_offset", "device", "__hash__", "_parse_to", "register_hook"}
# operators of other kinds than element by element that take a number of the host as an argument
SCALAR_ARGUMENTS = {"masked_fill", "masked_fill_", "where", "index_fill", "index_fill_", "full_like"}


class Border(NamedTuple):
    """Something that crosses between the device and the host, or between streams."""

    # "wait": the host waits for the device; "copy": pageable memory is copied to the device, for which the host waits,
    # too; "mix": one operator for tensors of both; "race": a stream, or the host, is not waited for
    kind: str
    what: str  # the function or operator
    file: str  # relative to the repository
    function: str
    line: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line} ({self.function}): {self.kind}: {self.what}"


def frames() -> Iterator[Any]:
    """The frames of the program, the innermost first."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename.startswith(OWN) and not frame.f_code.co_name.startswith("__torch_"):
            yield frame
        frame = frame.f_back


OWN = (f"{ROOT}/rldsl/", f"{ROOT}/backends/")


def where() -> tuple[str, str, int]:
    """The innermost line of the program that is being run: file, function, line."""
    frame = next(frames(), None)
    if frame is None:
        return "", "", 0
    code = frame.f_code
    return code.co_filename.removeprefix(f"{ROOT}/"), code.co_qualname.split(".<locals>")[0], frame.f_lineno


class Guard:
    """What one rank's program does at the border. on_border: gets each crossing, and may raise."""

    def __init__(self, on_border: Callable[[Border], None]):
        self.on_border = on_border
        self.muted = 0  # > 0: what happens now is the instrument's own
        self.capturing = False  # a graph
        self.order = Order(lambda what: self.cross("race", what))
        self.streams = ["compute"]  # that were entered; the last one is current
        self.registered: dict[int, int] = {}  # address -> bytes of host memory that is pinned
        self.host_groups: set[str] = set()  # names of groups whose messages are on the host
        self.graphs = self.replays = 0
        self.sites: set[tuple[str, str, int]] = set()  # lines that make a tensor on the device
        self.forgotten: tuple[str, str, int] | None = None  # a line that makes it on the host, as if by mistake

    def cross(self, kind: str, what: str) -> None:
        if self.muted:
            return
        if self.capturing and kind in ("wait", "copy"):
            raise RuntimeError(f"{what} is not permitted when a stream is capturing")
        if kind in ("wait", "copy"):
            self.order.wait(HOST, self.order.now(self.streams[-1]))
        self.on_border(Border(kind, what, *where()))

    @contextmanager
    def mute(self) -> Iterator[None]:
        self.muted += 1
        try:
            yield
        finally:
            self.muted -= 1

    def memory(self, x: torch.Tensor) -> Memory | None:
        found: Memory | None = getattr(x.untyped_storage(), "memory", None)
        return found

    def side(self, x: torch.Tensor) -> str:
        memory = self.memory(x)
        return memory.side if memory else ""

    def place(self, x: torch.Tensor, side: str) -> Memory:
        """Say where a tensor's memory is."""
        memory = self.memory(x)
        if memory is None:
            home = "" if self.capturing else self.streams[-1]  # a graph's memory is not given to others
            memory = x.untyped_storage().memory = Memory(side, self.order, home)
        memory.side = side
        return memory

    def pinned(self, x: torch.Tensor) -> bool:
        memory, address = self.memory(x), x.data_ptr()
        return bool(memory and memory.pinned) or any(
            first <= address < first + size for first, size in self.registered.items())

    def shared(self, x: torch.Tensor) -> Memory | None:
        """A tensor's memory, if streams use it."""
        memory = self.memory(x)
        if memory is None or memory.side == SIDE:
            return memory
        return memory.part(x.storage_offset(), x.numel()) if self.pinned(x) else None


def tensors(*trees: Any) -> list[torch.Tensor]:
    """Those that have memory."""
    return [x for x in tree_leaves(trees) if isinstance(x, torch.Tensor) and x.layout is torch.strided
            and torch._C._dispatch_keys(x).has(torch._C.DispatchKey.CPU)]


def _is_device(x: Any) -> bool:
    return isinstance(x, torch.device) and x.type == "cuda" or isinstance(x, str) and x.split(":")[0] == "cuda"


def _is_host(x: Any) -> bool:
    return isinstance(x, torch.device) and x.type == "cpu" or isinstance(x, str) and x == "cpu"


def _on_cpu(x: Any) -> Any:
    return CPU if _is_device(x) else x


class Functions(TorchFunctionMode):
    """What Python calls: devices as arguments and as answers."""

    def __init__(self, guard: Guard):
        super().__init__()
        self.guard = guard

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        if isinstance(func, torch._ops.OpOverload) or name in PLAIN:  # operators: called by a mode in a backward pass
            return func(*args, **kwargs)
        if name == "__get__":
            return self._attribute(func, args)
        if func is torch.Tensor.backward:
            with self:  # the hooks and functions of the program that run inside are seen, too
                gradient = kwargs.pop("gradient", None)
                return torch.autograd.backward(args[0], *(args[1:] or (gradient,)), **kwargs)
        if name in ("is_pinned", "pin_memory", "record_stream", "get_device", "cuda", "cpu"):
            return getattr(self, f"_{name}")(*args, **kwargs)
        given = [x for x in (*args, *kwargs.values()) if _is_device(x) or _is_host(x)]
        if name == "to" and isinstance(args[0], torch.Tensor) and (
                given or any(isinstance(x, torch.Tensor) for x in (*args[1:], *kwargs.values()))):
            return self._moved(func, args, kwargs)
        if name in READING and args and isinstance(args[0], torch.Tensor) and self.guard.side(args[0]) == SIDE:
            self.guard.cross("wait", name)
            with self.guard.mute():
                return func(*args, **kwargs)
        pinned = kwargs.pop("pin_memory", False)
        out = func(*map(_on_cpu, args), **{k: _on_cpu(x) for k, x in kwargs.items()})
        self._made(name, args, given, out)
        self._settle(args, kwargs, out)
        if pinned:
            self.guard.place(out, HOST).pinned = True
        return out

    def _made(self, name: str, args: Any, given: list[Any], out: Any) -> None:
        """Place what a function was asked to make on a device."""
        guard, from_numbers = self.guard, name in ("tensor", "as_tensor", "asarray", "new_tensor")
        if given and isinstance(out, torch.Tensor):
            on_device = any(map(_is_device, given))
            if on_device:
                site = where()
                if out.dim():  # one number of the host is an argument of any kernel
                    guard.sites.add(site)
                on_device = site != guard.forgotten
            if on_device and from_numbers:
                guard.cross("copy", f"{name}(device=)")
            if tensors(out) and (on_device or not from_numbers or guard.memory(out) is None):
                memory = guard.place(out, SIDE if on_device else HOST)
                if on_device:
                    guard.order.launch(guard.streams[-1], [], [memory])
        elif name == "new_tensor" and guard.side(args[0]) == SIDE:
            guard.cross("copy", name)
            guard.place(out, SIDE)
        elif name in ("__getitem__", "__setitem__") and guard.side(args[0]) == SIDE and _has_list(args[1]):
            guard.cross("copy", f"{name} of a list")

    def _settle(self, args: Any, kwargs: Any, out: Any) -> None:
        """Results that no operator has placed: where the arguments are, or the host."""
        if loose := [x for x in tensors(out) if self.guard.memory(x) is None]:
            side = SIDE if any(self.guard.side(x) == SIDE for x in tensors(args, kwargs)) else HOST
            for x in loose:
                self.guard.place(x, side)

    def _attribute(self, func: Any, args: Any) -> Any:
        name, x = func.__self__.__name__, args[0]
        if name in ("device", "is_cuda", "is_cpu") and tensors(x):
            there = self.guard.side(x) == SIDE
            return {"device": DEVICE if there else CPU, "is_cuda": there, "is_cpu": not there}[name]
        return func(*args)

    def _moved(self, func: Any, args: Any, kwargs: Any) -> Any:
        """`to`: what lies on the other side is copied."""
        guard, x = self.guard, args[0]
        with guard.mute():
            out = func(*map(_on_cpu, args), **{k: _on_cpu(a) for k, a in kwargs.items()})
        if not tensors(out) or not tensors(x):
            return out  # from or to "meta"
        asked = [*args[1:], *kwargs.values()]
        others = [a for a in asked if isinstance(a, torch.Tensor)]
        before = guard.side(x) or HOST
        after = SIDE if any(map(_is_device, asked)) else HOST if any(map(_is_host, asked)) else \
            guard.side(others[0]) or HOST if others else before
        if before == after:
            if guard.memory(out) is None:
                guard.place(out, after)
            return out
        asynchronous = kwargs.get("non_blocking", False)
        if after == HOST:
            guard.cross("wait", "to the host")
        elif not (asynchronous and guard.pinned(x)):
            guard.cross("copy", "to the device")
        with guard.mute():
            if out.untyped_storage()._cdata == x.untyped_storage()._cdata:
                out = out.clone()
            memory = guard.place(out, after)
        if after == SIDE:
            guard.order.launch(guard.streams[-1], [m for m in [guard.shared(x)] if m], [memory])
        return out

    def _cpu(self, x: torch.Tensor, **kwargs: Any) -> Any:
        return self._moved(torch.Tensor.to, (x, CPU), kwargs)

    def _cuda(self, x: torch.Tensor, **kwargs: Any) -> Any:
        return self._moved(torch.Tensor.to, (x, DEVICE), kwargs)

    def _is_pinned(self, x: torch.Tensor, *args: Any) -> bool:
        return self.guard.pinned(x)

    def _pin_memory(self, x: torch.Tensor, *args: Any) -> torch.Tensor:
        out = x.clone()
        self.guard.place(out, HOST).pinned = True
        return out

    def _record_stream(self, x: torch.Tensor, stream: Any) -> None:
        self.guard.place(x, SIDE).recorded = True

    def _get_device(self, x: torch.Tensor) -> int:
        return 0 if self.guard.side(x) == SIDE else -1


def _has_list(index: Any) -> bool:
    parts = index if isinstance(index, tuple) else (index,)
    return any(isinstance(p, list | range) and len(p) > 0 for p in parts)


def written(func: Any, args: Any) -> list[torch.Tensor]:
    """The arguments that an operator changes."""
    if func.namespace == "c10d":  # (what it changes, what it reads, ...)
        return [] if func.__name__.startswith("send") else tensors(args[0])
    return [x for a, given in zip(func._schema.arguments, args) if a.alias_info and a.alias_info.is_write
            for x in tensors(given)]


class Operators(TorchDispatchMode):
    """What operators do: where their results are, what they wait for, and which memory they read and write."""

    def __init__(self, guard: Guard):
        super().__init__()
        self.guard = guard

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, guard = kwargs or {}, self.guard
        given = tensors(args, kwargs)
        sides = [guard.side(x) for x in given]
        if func.namespace == "c10d" and HOST in sides and not self._among_hosts(args):
            guard.cross("mix", f"{func.__name__} of a message on the host")
        elif SIDE in sides and not guard.muted:
            for x, side in zip(given, sides):
                if not side:  # made inside an operator
                    guard.place(x, SIDE)
            self._check(func, args, kwargs, given, sides)
        out = func(*args, **kwargs)
        fresh = [x for x in tensors(out) if guard.memory(x) is None]
        if side := SIDE if SIDE in sides else HOST if HOST in sides else "":
            for x in fresh:
                guard.place(x, side)
        if not guard.muted and not any(r.alias_info and not r.alias_info.is_write for r in func._schema.returns):
            self._launch(SIDE in sides, given, [*written(func, args), *fresh])
        return out

    def _among_hosts(self, args: Any) -> bool:
        """Whether the messages are those of a group of hosts."""
        groups = [dist.ProcessGroup.unbox(x) for x in tree_leaves(args) if isinstance(x, torch.ScriptObject)
                  and "ProcessGroup" in str(x._type())]
        return any(group.group_name in self.guard.host_groups for group in groups)

    def _launch(self, on_device: bool, given: Iterable[torch.Tensor], changed: Iterable[torch.Tensor]) -> None:
        """Note what is read and written; of the host's memory, only what is pinned may be used by a stream."""
        reads, writes = ([m for m in map(self.guard.shared, xs) if m] for xs in (given, changed))
        writes = list({id(m): m for m in writes}.values())
        if reads or writes:
            self.guard.order.launch(self.guard.streams[-1] if on_device else HOST, reads, writes)

    def _check(self, func: Any, args: Any, kwargs: Any, given: list[torch.Tensor], sides: list[str]) -> None:
        name, cross = func.__name__.partition(".")[0], self.guard.cross
        if name in ("copy_", "_foreach_copy_"):
            self._copy(args)
        elif name in ("index", "index_put", "index_put_", "_index_put_impl_"):
            self._index(name, args)
        else:
            scalars = torch.Tag.pointwise in func.tags or name in SCALAR_ARGUMENTS or name.startswith("_foreach")
            if any(side == HOST and (x.dim() > 0 or not scalars) for x, side in zip(given, sides)):
                cross("mix", f"{name} of {', '.join(f'{list(x.shape)} on the {s}' for x, s in zip(given, sides) if s)}")
            if _depends_on_data(func, args, kwargs):
                cross("wait", name)

    def _index(self, name: str, args: Any) -> None:
        guard = self.guard
        places = [i for i in args[1] if i is not None]
        if guard.side(args[0]) == HOST:
            guard.cross("mix", f"{name} of a tensor on the host by places on the device")
        elif any(guard.side(i) == HOST for i in places):
            guard.cross("mix", f"{name} by places on the host")  # CUDA copies them, and waits
        masks = any(i.dtype in (torch.bool, torch.uint8) for i in places)
        if masks and (name == "index" or args[2].numel() != 1):  # one number is written by a kernel
            guard.cross("wait", f"{name} by a mask")
        if name != "index" and guard.side(args[2]) == HOST and args[2].dim():
            guard.cross("mix", f"{name} of numbers on the host")

    def _copy(self, args: Any) -> None:
        guard, asynchronous = self.guard, len(args) > 2 and args[2]
        targets, sources = ((a,) if isinstance(a, torch.Tensor) else a for a in args[:2])
        for to, x in zip(targets, sources):
            if guard.side(to) == HOST and guard.side(x) == SIDE and not (asynchronous and guard.pinned(to)):
                guard.cross("wait", "copy_ to the host")
            elif guard.side(to) == SIDE and guard.side(x) == HOST and not (asynchronous and guard.pinned(x)):
                guard.cross("copy", "copy_ to the device")


@contextmanager
def guarded(on_border: Callable[[Border], None]) -> Iterator[Guard]:
    """A block in which `DEVICE` exists. on_border: gets each crossing, and may raise."""
    from tests.cuda_paths.device_cuda import installed

    guard = Guard(on_border)
    with installed(guard), Operators(guard), Functions(guard):
        yield guard
    guard.order.active = False
