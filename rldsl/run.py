"""torchrun --nproc-per-node N -m rldsl.run ppo.plan: one rank of a plan.

Reads the command line and what torchrun sets in the environment, and joins the ranks.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import sys
import time
from datetime import timedelta
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from rldsl import garbage_collection, threads
from rldsl.diag import Failure, counted, fail
from rldsl.plan.metrics_file import TRACKERS
from rldsl.report import render
from rldsl.runtime.files import refuse_links_out
from rldsl.runtime.health.failure_messages import tell_torchrun
from rldsl.runtime.message_file import report
from rldsl.runtime.metrics.run_lock import acquire
from rldsl.runtime.metrics.run_record import CONTRADICTION, WRITTEN, OutputClaim, claim_output, is_own_checkpoint
from rldsl.runtime.parent import terminate_with

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

    from rldsl.runtime.health.watchdog import Watchdog
    from rldsl.runtime.interpreter.emitted_program import Program
    from rldsl.runtime.metrics.reporter import ReportOptions
    from rldsl.runtime.plan_file import PlanFile

GRACE = 20.0  # seconds that other ranks wait so that one can report what all have found


def main(program: Program | None = None) -> None:
    """program: a script that `rlc emit` wrote, whose schedules are executed."""
    try:
        _main(program)
    except KeyboardInterrupt:  # the watchdog is not running yet; the launcher reports it
        os._exit(128 + signal.SIGINT)


def _main(program: Program | None) -> None:
    arguments, agent = _arguments(program), _agent()
    if agent is not None:
        try:
            terminate_with(agent)
        except Failure as failure:  # the limit may be reached in this rank alone
            _exit_with(failure, say=True)
    # Transfers run at the same time as collectives of calls. With this variable a GPU starts them in the order in which
    # a rank posts them, which is the plan's, so that no two wait for each other's room. Set before torch is imported
    if "+rocm" not in version("torch"):
        os.environ.setdefault("NCCL_LAUNCH_ORDER_IMPLICIT", "1")
    # When a rank ends, its peers' library prints a trace of its own for each try to reach it, hundreds of lines around
    # our message. Errors are still printed
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    # Batches and buffers have another size in each step, which fragments the default allocator
    if not {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"} & os.environ.keys():
        os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
    if arguments.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    # Tokenizers divide a batch among threads, which would wait for the cores of other ranks
    if _cores_of_rank() == 1:
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    try:
        file = _read(arguments.plan, world)
        if program is not None:
            program.check_plan(file)
    except Failure as failure:  # the ranks of a machine find the same; another machine may have another file, or none
        _exit_with(failure, say=int(os.environ.get("LOCAL_RANK", 0)) == 0)
    _run(arguments, file, rank, world, program, agent)


def _agent() -> int | None:
    """The process of torchrun's agent, which started this rank; None where another launcher or a shell did, which may
    exit before the run does."""
    return os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else None


def _exit_with(failure: Failure, say: bool) -> NoReturn:
    if say:
        report(failure.diagnostics)
        tell_torchrun(render(failure.diagnostics))
    else:  # torchrun ends all ranks as soon as one has failed: the one that speaks must be the first
        time.sleep(GRACE)
    sys.exit(1)


def _arguments(program: Program | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog=None if program else "rldsl.run",
                                     description="Run a plan: torchrun starts this module once per rank.")
    parser.add_argument("plan", nargs="?", default=program.file if program else None,
                        help="plan file, written by `rlc compile`")
    parser.add_argument("--out", metavar="DIR",
                        help="directory for metrics, checkpoints and the summary (default: runs/PLAN)")
    parser.add_argument("--resume", nargs="?", const="", metavar="DIR",
                        help="resume from the latest checkpoint in --out, from that of another run, or from a specific "
                             "checkpoint")
    parser.add_argument("--trace", metavar="FILE",
                        help="write the recorded timeline to this file (Chrome trace JSON); on GPUs this synchronizes "
                             "after every event")
    parser.add_argument("--profile", type=_count, nargs="?", const=1, default=0, metavar="STEPS",
                        help="record STEPS steps with torch's profiler, after the first one, to OUT/profile (without "
                             "a value: 1)")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="device to run on (default: cuda if available)")
    parser.add_argument("--deterministic", action="store_true",
                        help="on GPUs, use kernels that add in a fixed order where there are any, so that a resumed "
                             "run repeats the numbers of an uninterrupted one; slower")
    parser.add_argument("--timeout", type=float, default=1800.0, metavar="SECONDS",
                        help="seconds that a rank waits for another rank (default: 1800)")
    parser.add_argument("--reward-workers", type=_count, metavar="N",
                        help="worker processes per rank for Python functions; 0 runs them in the rank's own process "
                             "without a time limit (default: the cores available to the rank, at most 8)")
    parser.add_argument("--reward-timeout", type=_seconds, default=60.0, metavar="SECONDS",
                        help="time limit per row for Python functions (default: 60)")
    parser.add_argument("--allow-write", action="append", default=[], metavar="DIR",
                        help="also allow saves to this directory, outside --out and the working directory (repeatable)")
    parser.add_argument("--allow-changed-python", action="store_true",
                        help="run Python functions even if their files have changed since the plan was compiled")
    parser.add_argument("--check-images", action="store_true",
                        help="decode every image of the data before the first step, which finds damaged pixels")
    parser.add_argument("--overwrite", action="store_true", help="delete an earlier run in --out")
    parser.add_argument("--tensorboard", action="store_true", help="also write the metrics for TensorBoard")
    parser.add_argument("--wandb", nargs="?", const="online", default="", choices=("offline", "online"),
                        help="also log the metrics to Weights & Biases (without a value: online)")
    parser.add_argument("--report-to", action="append", default=[], choices=TRACKERS, metavar="TRACKER",
                        help=f"also log the metrics to this tracker: {', '.join(TRACKERS)} (repeatable)")
    parser.add_argument("--project", default="", help="project of the trackers (default: the flow)")
    parser.add_argument("--run-name", default="", metavar="NAME",
                        help="name of the run in the trackers (default: that of --out)")
    parser.add_argument("--tag", action="append", default=[], help="tag of the run in the trackers (repeatable)")
    parser.add_argument("--log-samples", type=_count, default=0, metavar="N",
                        help="write this many sampled sequences per step as text")
    parser.add_argument("--plain", action="store_true", help="print one line per step even on a terminal")
    parser.add_argument("--command", help=argparse.SUPPRESS)  # what the user typed, when it was not this
    found = parser.parse_args()
    if found.plan is None and (found.resume or "").endswith(".plan"):  # "--resume PLAN" names no directory
        found.plan, found.resume = found.resume, ""
    if found.plan is None:
        parser.error("pass the plan to run")
    found.out = Path(found.out or Path("runs") / Path(found.plan).stem)
    if found.resume is not None:
        found.resume = Path(found.resume or found.out)
        if found.overwrite and is_own_checkpoint(found.out, found.resume):
            parser.error(CONTRADICTION)
    return found


def _count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError("it must be 0, 1, 2, ...")
    return int(text)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise argparse.ArgumentTypeError("it must be a positive number")
    return seconds


def _cores_of_rank() -> int:
    """This rank's share of the cores that its process may use, at least 1."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, usable // int(os.environ.get("LOCAL_WORLD_SIZE", 1)))


def _read(path: str, world: int) -> PlanFile:
    """The plan, which must be one for `world` ranks: a wrong world can neither run nor agree on anything."""
    from rldsl.runtime.plan_file import PlanFile

    file = PlanFile.read(path)
    needed = file.plan.header.world
    if needed != world:
        raise fail("RL0701", f"the plan needs {counted(needed, 'rank')}, but torchrun started {world}", place=path,
                   help=f"run `torchrun --nproc-per-node {needed} -m rldsl.run {path}`, or compile for another cluster")
    return file


def _device(asked: str | None, local: int, ranks: int) -> torch.device:
    """local: number of this rank among the `ranks` of its machine; it takes the GPU of that number, or the only one
    that it sees, as where a scheduler gives each rank its own (`_claim_device`). RL0703: none."""
    import torch

    there = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if asked == "cpu" or (asked is None and not there):
        return torch.device("cpu")
    if there == 1:
        local = 0
    elif ranks > there:
        raise fail("RL0703",
                   f"{ranks} rank{'s' * (ranks > 1)} on this machine need one GPU each, but it has {there or 'none'}",
                   place="--device cuda" if asked else "",
                   help="use `--device cpu`, or a machine with more GPUs" if there else "use `--device cpu`")
    device = torch.device("cuda", local)
    torch.cuda.set_device(device)
    return device


def _claim_device(store: dist.Store, device: torch.device, rank: int) -> None:
    """Check that no other rank has this GPU: NCCL's own message would not say which. RL0703: one has."""
    import torch

    uuid = getattr(torch.cuda.get_device_properties(device), "uuid", None)
    if uuid is None:
        return
    owner = int(store.compare_set(f"gpu/{socket.gethostname()}/{uuid}", "", str(rank)))
    if owner != rank:
        raise fail("RL0703", f"ranks {owner} and {rank} see the same GPU, and only that one",
                   place=f"CUDA_VISIBLE_DEVICES={os.environ.get('CUDA_VISIBLE_DEVICES', '')}",
                   help="start one rank per GPU, or let every rank see all GPUs of its machine")


def _nccl_note(version: tuple[int, ...]) -> str:
    """A warning if an NCCL of this version ignores the launch order that messages rely on, else ""."""
    if version >= (2, 26):
        return ""
    return (f"warning: NCCL {'.'.join(map(str, version))} ignores NCCL_LAUNCH_ORDER_IMPLICIT, which exists since 2.26: "
            "transfers at the same time as collectives may wait for each other; use a torch with a newer NCCL")


def _cpu_note(asked: str | None, built_for: str | None, torch_version: str, gpus: int, visible: str | None) -> str:
    """What to say of a run on the CPU whose machine has GPUs that nobody has declined; "" if there is nothing to say.
    asked: `--device`. built_for: the CUDA version of this torch. gpus: of the machine. visible:
    CUDA_VISIBLE_DEVICES."""
    if asked is not None or not gpus or visible in ("", "-1"):
        return ""
    why = "sees none of them: see `rlc doctor`, and the driver" if built_for else "is built without CUDA"
    return (f"warning: this machine has {counted(gpus, 'GPU')}, but torch {torch_version} {why}; all ranks run on the "
            "CPU, and communicate over gloo (CUDA_VISIBLE_DEVICES=\"\" omits this warning)")


def _say_if_fallen_back(asked: str | None) -> None:
    """Print that the run is on the CPU, and so over gloo, where the user may expect GPUs."""
    import torch

    note = _cpu_note(asked, torch.version.cuda, torch.__version__, len(list(Path("/dev").glob("nvidia[0-9]*"))),
                     os.environ.get("CUDA_VISIBLE_DEVICES"))
    if note:
        print(note, file=sys.stderr, flush=True)


def _join_ranks(device: torch.device, rank: int, timeout: timedelta) -> tuple[dist.Store, bool]:
    """Join the other ranks where torchrun says; without torchrun, a world of one. Returns the store of all starts of
    this run, and whether an earlier one began it. RL0704: the others cannot be reached. RL0707: no thread can be
    started. RL0703: ranks on GPUs cannot communicate."""
    import torch
    import torch.distributed as dist

    from rldsl.runtime.comm.rendezvous import start_prefix, started_before

    backend: dict[str, Any] = {"backend": "gloo"}
    if device.type == "cuda" and not dist.is_nccl_available():
        raise fail("RL0703", f"torch {torch.__version__} has no NCCL, over which ranks on GPUs communicate",
                   help="install a torch that has it (`rlc doctor` shows what is there), or use `--device cpu`")
    if device.type == "cuda":  # `device_id` creates communicators now, and those of groups are split from them
        backend = {"backend": "nccl", "device_id": device}
    try:
        if device.type == "cuda" and rank == 0 and (note := _nccl_note(torch.cuda.nccl.version())):
            print(note, file=sys.stderr, flush=True)
        if "MASTER_ADDR" not in os.environ:
            dist.init_process_group(**backend, store=dist.HashStore(), rank=0, world_size=1)
            return dist.HashStore(), False
        found, _, world = next(dist.rendezvous("env://", timeout=timeout))
        run = dist.PrefixStore("rldsl", found)
        name = start_prefix(run, rank, world, timeout)
        restarted = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)) > 0
        again = started_before(run, dist.PrefixStore(f"{name}/start", run), rank, world, restarted)
        if device.type == "cuda":
            _claim_device(dist.PrefixStore(name, run), device, rank)
        dist.init_process_group(**backend, store=dist.PrefixStore(name, found), rank=rank, world_size=world,
                                timeout=timeout)
        return run, again
    except (RuntimeError, ValueError, OSError) as error:  # the library's own errors are RuntimeErrors
        if threads.is_refused(error):
            raise Failure([threads.refused(f"rank {rank}")]) from None
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise fail("RL0704", f"rank {rank} cannot join the other ranks: {reason}",
                   place=f"{os.environ.get('MASTER_ADDR', '')}:{os.environ.get('MASTER_PORT', '')}",
                   help="check that every machine can reach this address and that all ranks were started") from None


def _claim_output(arguments: argparse.Namespace, again: bool, file: PlanFile, watchdog: Watchdog,
                  device: torch.device) -> OutputClaim:
    """Rank 0 owns the run's directory and looks at it: what machines see of a shared one may differ for a while."""
    from rldsl.runtime.comm.agreement import broadcast_text

    mine = OutputClaim(None, False)
    if watchdog.rank == 0:
        claim_output(arguments.out, arguments.resume, again, arguments.overwrite)  # what needs no waiting
        watchdog.lock = acquire(arguments.out, file.plan.header.program, watchdog.disown)
        mine = claim_output(arguments.out, arguments.resume, again, arguments.overwrite, owned=True)
    found = json.loads(broadcast_text(json.dumps([str(mine.resume) if mine.resume else "", mine.continues]), device))
    return OutputClaim(Path(found[0]) if found[0] else None, bool(found[1]))


def _reporting(arguments: argparse.Namespace) -> ReportOptions:
    from rldsl.runtime.metrics.reporter import ReportOptions

    command = (arguments.command,) if arguments.command else tuple(sys.argv)
    asked = dict.fromkeys(arguments.report_to)
    wandb = arguments.wandb or (os.environ.get("WANDB_MODE") or "online" if "wandb" in asked else "")
    return ReportOptions(
        tensorboard=arguments.tensorboard or "tensorboard" in asked, wandb=wandb, samples=arguments.log_samples,
        plain=arguments.plain, command=command, project=arguments.project or os.environ.get("WANDB_PROJECT", ""),
        run_name=arguments.run_name, tags=tuple(arguments.tag),
        trackers=tuple(name for name in asked if name not in ("tensorboard", "wandb")))


def _run(arguments: argparse.Namespace, file: PlanFile, rank: int, world: int, program: Program | None,
         agent: int | None) -> None:
    with garbage_collection.importing():
        import torch
        import torch.distributed as dist
        import transformers

        from rldsl.runtime.comm.rendezvous import mark_begun
        from rldsl.runtime.health.watchdog import Watchdog
        from rldsl.runtime.interpreter.interpreter import Interpreter, execute
        from rldsl.runtime.interpreter.options import Options
        from rldsl.runtime.metrics.tee import tee

    if arguments.deterministic:
        torch.use_deterministic_algorithms(True, warn_only=True)  # an operator without a deterministic kernel warns
    # parts of a bfloat16 product are added in float32, in generation as in training
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    local = int(os.environ.get("LOCAL_RANK", 0))
    try:
        device = _device(arguments.device, local, int(os.environ.get("LOCAL_WORLD_SIZE", 1)))
    except Failure as failure:  # the ranks of a machine find the same
        _exit_with(failure, say=local == 0)
    late = device.type == "cuda"  # NCCL aborts the process at its own timeout: the watchdog must fire first
    limit = timedelta(seconds=arguments.timeout + (GRACE if late else 0.0))
    try:
        run, again = _join_ranks(device, rank, limit)
    except Failure as failure:  # no rank knows what another has found: each speaks for itself
        _exit_with(failure, say=True)
    try:
        watchdog = Watchdog(dist.distributed_c10d._get_default_store(), rank, world, file, arguments.timeout, late,
                            agent, speaks=local == 0)
    except Failure as failure:  # the others notice that this rank has ended
        report(failure.diagnostics)
        tell_torchrun(render(failure.diagnostics))
        os._exit(1)  # the library's threads may wait for the others
    workers = arguments.reward_workers
    if workers is None:
        workers = min(8, _cores_of_rank())
    screen = sys.stderr
    try:
        claimed = _claim_output(arguments, again, file, watchdog, device)
        refuse_links_out(arguments.out, WRITTEN)  # of this machine, where rank 0 is on another one
        sys.stderr = tee(screen, arguments.out, rank, claimed.continues)
        if rank == 0 and device.type == "cpu":
            _say_if_fallen_back(arguments.device)
        options = Options(
            trace=arguments.trace, profile=arguments.profile, resume=claimed.resume, continues=claimed.continues,
            overwrite=not claimed.continues,
            reward_workers=workers, reward_seconds=arguments.reward_timeout, allow_write=tuple(arguments.allow_write),
            changed_python=arguments.allow_changed_python, check_images=arguments.check_images,
            reporting=_reporting(arguments), timeout=limit)
        execute(file, arguments.out, device, watchdog, options, program.run if program else Interpreter.run,
                lambda: mark_begun(run))
    except BaseException as error:
        watchdog.fail(error)
    watchdog.close()
    if watchdog.lock is not None:
        watchdog.lock.release()
    sys.stderr = screen
    dist.destroy_process_group()


if __name__ == "__main__":
    with garbage_collection.ending_quickly():
        main()
