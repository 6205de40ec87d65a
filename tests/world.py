"""Real worlds for tests: n gloo processes started from a forkserver that has torch and transformers loaded.

Importing torch costs seconds, so it is paid once; after that a world of eight starts in a fraction of a second.
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Callable
from contextlib import chdir
from multiprocessing import forkserver
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from tests import stacks

ROOT = Path(__file__).parents[1]
_PRELOAD = ["tests.no_garbage", "torch", "torch.distributed", "transformers", "transformers.models.qwen3.modeling_qwen3",
            "transformers.models.llama.modeling_llama", "transformers.tokenization_utils_tokenizers", "safetensors.torch",
            "rldsl.runtime.interpreter.interpreter", "rldsl.backends.torch", "rldsl.backends.torch.shard", "pytest", "tests.warm"]


def context() -> Any:
    """The forkserver context, with its server running. The environment is read when the server starts, so set it
    before."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    # large pages for what malloc hands out: a fork copies a table of pages, which are then fewer; 30 instead of 37 ms of
    # the processor for a rank that does nothing
    os.environ.setdefault("GLIBC_TUNABLES", "glibc.malloc.hugetlb=1")
    made = multiprocessing.get_context("forkserver")
    made.set_forkserver_preload(_PRELOAD)
    # the server of Python 3.11 looks for modules in its own current directory, and says nothing of those that it does
    # not find: ranks would load `tests.warm` anew, a fifth of the CPU time of a short run
    with chdir(ROOT):
        forkserver.ensure_running()
    return made


def run_world(size: int, function: Callable[..., Any], *args: Any, timeout: float = 120.0) -> list[Any]:
    """Run function(rank, *args) in `size` processes that share a gloo world; their results in rank order.

    Raises AssertionError with every rank's traceback when one fails or dies, and with what the threads of the others do
    when the time is over."""
    ctx = context()
    with tempfile.TemporaryDirectory() as place:
        pipes, processes = [], []
        for rank in range(size):
            ours, theirs = ctx.Pipe(duplex=False)
            process = ctx.Process(target=_enter, args=(rank, size, f"{place}/store", theirs, function, args), daemon=True)
            process.start()
            theirs.close()
            pipes.append(ours)
            processes.append(process)
        try:
            return _collect(pipes, timeout, lambda rank: stacks.of(processes[rank].pid, Path(f"{place}/store.{rank}")))
        finally:
            for process in processes:
                process.kill()
            for process in processes:
                process.join()


def _collect(pipes: list[Any], timeout: float, stack: Callable[[int], str]) -> list[Any]:
    """stack: what the threads of a rank do."""
    results: dict[int, Any] = {}
    errors: dict[int, str] = {}
    waiting = {pipe: rank for rank, pipe in enumerate(pipes)}
    while waiting:
        ready = wait(list(waiting), timeout=2.0 if errors else timeout)
        if not ready:
            break
        for pipe in ready:
            rank = waiting.pop(pipe)
            try:
                ok, value = pipe.recv()
            except EOFError:
                ok, value = False, "process ended without a result"
            (results if ok else errors)[rank] = value
    assert not errors, "\n".join(f"--- rank {rank}\n{text}" for rank, text in sorted(errors.items()))
    late = sorted(waiting.values())
    assert not late, "\n".join([f"ranks {late} gave no result within {timeout} s", *map(stack, late)])
    return [results[rank] for rank in range(len(pipes))]


def _enter(rank: int, size: int, store: str, pipe: Any, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    import torch
    import torch.distributed as dist

    from tests.gpu import shared_device

    stacks.register(Path(f"{store}.{rank}"))
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK=str(rank))
    try:
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
        if (device := shared_device.device()) is not None:
            shared_device.use(device)
        pipe.send((True, function(rank, *args)))
        _wait_for_all(rank, size)
    except BaseException:
        pipe.send((False, traceback.format_exc()))
    finally:
        pipe.close()
        if dist.is_initialized():
            dist.destroy_process_group()


def _wait_for_all(rank: int, size: int) -> None:
    """A rank that ends would break the connections of those that still compute. By the store and not by a barrier: when
    a run fails, receives that nobody has waited for are dropped, and gloo delivers nothing more from these peers. Its
    thread then polls without end for a message that it cannot place."""
    import torch.distributed as dist

    store = dist.distributed_c10d._get_default_store()
    store.set(f"tests/done/{rank}", "")
    store.wait([f"tests/done/{other}" for other in range(size)])
