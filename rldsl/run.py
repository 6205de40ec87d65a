"""torchrun --nproc-per-node N -m rldsl.run ppo.plan: one rank of a plan.

The only place of the runtime that reads the environment (what torchrun sets) and the command line.
"""

from __future__ import annotations

import argparse
import os
import sys
from datetime import timedelta
from pathlib import Path

from rldsl.diag import Failure, fail
from rldsl.report import render


def main() -> None:
    arguments = _arguments()
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    try:
        data = _read(arguments.plan)
        _check_world(data, arguments.plan, world)
    except Failure as failure:  # every rank finds the same; one of them says it
        if rank == 0:
            print(render(failure.diagnostics, sys.stderr.isatty()), file=sys.stderr, flush=True)
        sys.exit(1)
    _run(arguments, data, rank, world)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="rldsl.run", description=__doc__)
    parser.add_argument("plan")
    parser.add_argument("--out", help="directory for metrics, checkpoints and the summary (default: runs/PLAN)")
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


def _run(arguments: argparse.Namespace, data: bytes, rank: int, world: int) -> None:
    import torch
    import torch.distributed as dist
    import transformers

    from rldsl.runtime.executor import execute
    from rldsl.runtime.failure import Watch

    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    kind = arguments.device or ("cuda" if torch.cuda.is_available() else "cpu")
    device = torch.device(kind, int(os.environ.get("LOCAL_RANK", 0))) if kind == "cuda" else torch.device("cpu")
    if kind == "cuda":
        torch.cuda.set_device(device)
    timeout = timedelta(seconds=arguments.timeout)
    if "MASTER_ADDR" in os.environ:
        dist.init_process_group("nccl" if kind == "cuda" else "gloo", timeout=timeout)
    else:  # started without torchrun: a world of one
        dist.init_process_group("nccl" if kind == "cuda" else "gloo", store=dist.HashStore(), rank=0, world_size=1)
    watch = Watch(dist.distributed_c10d._get_default_store(), rank, world)
    out = arguments.out or Path("runs") / Path(arguments.plan).stem
    try:
        execute(data, arguments.plan, out, device, arguments.trace, watch)
    except KeyboardInterrupt:
        os._exit(130)
    except BaseException as error:
        watch.fail(error)
    watch.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
