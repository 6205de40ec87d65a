"""torchrun --nproc-per-node N -m rldsl.run ppo.plan: one rank of a plan.

The only place of the runtime that reads the environment (what torchrun sets) and the command line.
"""

from __future__ import annotations

import argparse
import os
import sys
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from rldsl.diag import Failure, fail
from rldsl.report import render

if TYPE_CHECKING:
    import torch


def main() -> None:
    arguments = _arguments()
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    try:
        data = _read(arguments.plan)
        _check_world(data, arguments.plan, world)
    except Failure as failure:  # every rank finds the same; one of them says it
        _stop(failure, say=rank == 0)
    _run(arguments, data, rank, world)


def _stop(failure: Failure, say: bool) -> NoReturn:
    if say:
        print(render(failure.diagnostics, sys.stderr.isatty()), file=sys.stderr, flush=True)
    sys.exit(1)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="rldsl.run", description=__doc__)
    parser.add_argument("plan")
    parser.add_argument("--out", help="directory for metrics, checkpoints and the summary (default: runs/PLAN)")
    parser.add_argument("--resume", nargs="?", const="", metavar="DIR", help="go on from the newest checkpoint of --out, or "
                        "of another run, or from one checkpoint")
    parser.add_argument("--trace", help="write the recorded timeline to this file (Chrome trace JSON)")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda where there is one")
    parser.add_argument("--timeout", type=float, default=1800.0, help="seconds that a rank waits for another")
    return parser.parse_args()


def _read(path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise fail("RL0700", f"the plan cannot be read: {error.strerror}", place=path,
                   help="`rlc compile PROGRAM.rlf` writes plans") from None


def _check_world(data: bytes, name: str, world: int) -> None:
    from rldsl.plan.codec import decode

    plan = decode(data, name)
    if plan.header.world != world:
        from rldsl.runtime.world import check_size

        check_size(plan, world, name)


def _device(asked: str | None, local: int, ranks: int) -> torch.device:
    """local: number of this rank among the `ranks` of its machine; it takes the GPU of that number. RL0703: none."""
    import torch

    there = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if asked == "cpu" or (asked is None and not there):
        return torch.device("cpu")
    if ranks > there:
        raise fail("RL0703", f"{ranks} rank{'s' * (ranks > 1)} of this machine need a GPU each, and it has "
                   f"{there or 'none'}", place="--device cuda" if asked else "", help="run with `--device cpu`, or on "
                   "a machine with more GPUs" if there else "run with `--device cpu`")
    device = torch.device("cuda", local)
    torch.cuda.set_device(device)
    return device


def _meet(backend: str, rank: int, timeout: timedelta) -> None:
    """Join the other ranks where torchrun says; without torchrun, a world of one. RL0704: they cannot be reached."""
    import torch.distributed as dist

    from rldsl.runtime.meet import prefix

    try:
        if "MASTER_ADDR" in os.environ:
            found, _, world = next(dist.rendezvous("env://", timeout=timeout))
            start = dist.PrefixStore(prefix(dist.PrefixStore("rldsl", found), rank, world, timeout), found)
            dist.init_process_group(backend, store=start, rank=rank, world_size=world, timeout=timeout)
        else:
            dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    except (RuntimeError, ValueError, OSError) as error:  # the library's own errors are RuntimeErrors
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise fail("RL0704", f"rank {rank} cannot join the other ranks: {reason}",
                   place=f"{os.environ.get('MASTER_ADDR', '')}:{os.environ.get('MASTER_PORT', '')}",
                   help="check that every machine reaches this address and that all ranks were started") from None


def _run(arguments: argparse.Namespace, data: bytes, rank: int, world: int) -> None:
    import torch.distributed as dist
    import transformers

    from rldsl.runtime.executor import execute
    from rldsl.runtime.failure import Watch

    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    local = int(os.environ.get("LOCAL_RANK", 0))
    try:
        device = _device(arguments.device, local, int(os.environ.get("LOCAL_WORLD_SIZE", 1)))
    except Failure as failure:  # the ranks of a machine find the same
        _stop(failure, say=local == 0)
    try:
        _meet("nccl" if device.type == "cuda" else "gloo", rank, timedelta(seconds=arguments.timeout))
    except Failure as failure:  # no rank knows what another has found: each speaks for itself
        _stop(failure, say=True)
    watch = Watch(dist.distributed_c10d._get_default_store(), rank, world)
    out = arguments.out or Path("runs") / Path(arguments.plan).stem
    try:
        execute(data, arguments.plan, out, device, arguments.trace, watch,
                (arguments.resume or out) if arguments.resume is not None else None,
                int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)) > 0)
    except KeyboardInterrupt:
        os._exit(130)
    except BaseException as error:
        watch.fail(error)
    watch.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
