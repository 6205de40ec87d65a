"""What a rank really holds: every storage that an operation of torch makes is counted while it lives.

In: a plan. Out: for each rank and event, bytes before, at most while, and after it. A kernel's own scratch space is not
seen; what autograd keeps is.
"""

from __future__ import annotations

import os
import resource
import sys
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from rldsl.runtime.comm import machine_peers
from tests.world import run_world

SHARED: set[int] = set()  # addresses of the memory for messages between ranks of a machine, which no estimate counts


class Storages(TorchDispatchMode):
    """now: bytes that are alive; most: since the last `reset`."""

    def __init__(self) -> None:
        super().__init__()
        self.live: dict[int, int] = {}
        self.now = self.most = 0

    def reset(self) -> None:
        self.most = self.now

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.add.Tensor and _caller() == "_engine_run_backward":
            self.see_in_place(args[0].untyped_storage(), out.untyped_storage())
            return out
        for tensor in tree_iter(out):
            if isinstance(tensor, torch.Tensor) and not tensor.is_meta:
                self.see(tensor.untyped_storage())
        return out

    def see_in_place(self, first: torch.UntypedStorage, result: torch.UntypedStorage) -> None:
        """A sum of two gradients: autograd adds to the first one, but not where a mode sees it."""
        if first.nbytes() == result.nbytes():
            self._gone(first._cdata)
        self.see(result)

    def __enter__(self) -> Storages:
        """What is resized has another size from then on; torch tells no mode of it."""
        plain = self.plain = torch.UntypedStorage.resize_
        mapped = machine_peers._mapped

        def map_and_note(file: int, size: int) -> torch.Tensor:
            memory = mapped(file, size)
            SHARED.add(memory.data_ptr())
            return memory

        machine_peers._mapped = map_and_note

        def resized(storage: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
            self.see(storage)
            out = plain(storage, size)
            self.now += size - self.live[storage._cdata]
            self.live[storage._cdata] = size
            self.most = max(self.most, self.now)
            return out

        torch.UntypedStorage.resize_ = resized  # type: ignore[method-assign]
        return super().__enter__()

    def __exit__(self, *reason: Any) -> None:
        torch.UntypedStorage.resize_ = self.plain  # type: ignore[method-assign]
        super().__exit__(*reason)

    def see(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key not in self.live and storage.data_ptr() not in SHARED:
            self.live[key] = storage.nbytes()
            self.now += self.live[key]
            self.most = max(self.most, self.now)
            weakref.finalize(storage, self._gone, key)

    def _gone(self, key: int) -> None:
        self.now -= self.live.pop(key, 0)


def _caller() -> str:
    """The function whose operation a mode sees: torch calls the mode through two wrappers."""
    return sys._getframe(4).f_code.co_name


@dataclass(frozen=True)
class Measured:
    """events: id -> (before, during, after), the most of any step. peak: of the run. rss: by which the process grew."""

    events: dict[int, tuple[int, int, int]]
    peak: int
    rss: int


def measured(data: bytes, folder: Path, world: int, timeout: float = 240.0, kernels: bool = True) -> list[Measured]:
    """Run a plan and count; in rank order. kernels: those for CPUs, where a compiler can make them."""
    return run_world(world, _rank, data, str(folder), os.getcwd(), kernels, timeout=timeout)


def _rank(rank: int, data: bytes, out: str, cwd: str, kernels: bool) -> Measured:
    from rldsl.backends.torch.kernels import kernel_library, ordered_kernels
    from rldsl.runtime.interpreter import interpreter
    from rldsl.runtime.interpreter.options import Options
    from rldsl.runtime.persist.checkpoint_writer import CheckpointWriter
    from rldsl.runtime.plan_file import PlanFile

    os.chdir(cwd)
    if not kernels:  # the server that this process is forked from has its own environment, and may have loaded them
        kernel_library.library = ordered_kernels._library = lambda: None
    storages = Storages()
    seen: dict[int, tuple[int, int, int]] = {}
    peak = 0

    def counted(run: Callable[..., None]) -> Callable[..., None]:
        def wrapped(state: Any, event: Any) -> None:
            nonlocal peak
            before = storages.now
            storages.reset()
            run(state, event)
            now = before, storages.most, storages.now
            seen[event.id] = tuple(map(max, seen.get(event.id, now), now))  # type: ignore[assignment]
            peak = max(peak, storages.most)

        return wrapped

    _slow_disk(CheckpointWriter)
    interpreter.HANDLERS = {kind: counted(run) for kind, run in interpreter.HANDLERS.items()}
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with storages:
        interpreter.execute(PlanFile.from_bytes(data, "test.plan"), out,
                            options=Options(allow_write=(str(Path(out).parent),)))
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - grown
    return Measured(seen, peak, grown * 1024)


def _slow_disk(writer: Any) -> None:
    """A checkpoint is written no sooner than the next one has to wait for it: then its copies are held longest."""
    waited, write, join = threading.Event(), writer._write, writer.join

    def late(self: Any, *args: Any) -> None:
        waited.wait()
        write(self, *args)

    def asked(self: Any) -> None:
        waited.set()
        join(self)
        waited.clear()

    writer._write, writer.join = late, asked
