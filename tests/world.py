"""Real worlds for tests: n gloo processes started from a forkserver that has torch and transformers loaded.

Importing torch costs seconds, so it is paid once; after that a world of eight starts in a fraction of a second.
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing.connection import wait
from typing import Any

_PRELOAD = ["torch", "torch.distributed", "transformers", "transformers.models.qwen3.modeling_qwen3",
            "transformers.models.llama.modeling_llama", "transformers.tokenization_utils_tokenizers", "safetensors.torch",
            "rldsl.runtime.interpreter.interpreter", "rldsl.backends.torch", "rldsl.backends.torch.shard", "pytest", "tests.warm"]


def context() -> Any:
    """The forkserver context. The environment is read when the server starts, so set it before."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    made = multiprocessing.get_context("forkserver")
    made.set_forkserver_preload(_PRELOAD)
    return made


def run_world(size: int, function: Callable[..., Any], *args: Any, timeout: float = 120.0) -> list[Any]:
    """Run function(rank, *args) in `size` processes that share a gloo world; their results in rank order.

    Raises AssertionError with every rank's traceback when one fails, dies or the time is over."""
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
            return _collect(pipes, timeout)
        finally:
            for process in processes:
                process.kill()
            for process in processes:
                process.join()


def _collect(pipes: list[Any], timeout: float) -> list[Any]:
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
    assert not waiting, f"ranks {sorted(waiting.values())} gave no result within {timeout} s"
    return [results[rank] for rank in range(len(pipes))]


def _enter(rank: int, size: int, store: str, pipe: Any, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK=str(rank))
    try:
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
        result = function(rank, *args)
        dist.barrier()
        pipe.send((True, result))
    except BaseException:
        pipe.send((False, traceback.format_exc()))
    finally:
        pipe.close()
        if dist.is_initialized():
            dist.destroy_process_group()
