"""Every CUDA path on one GPU, in stages that each leave a report; nothing is downloaded.

    python -m tests.gpu [--out DIR] [--seconds N] [STAGE ...]      # or: make gpu

Stages that only compare numbers share the GPU; those that measure have it for themselves. Each has a time limit, and
what it found before that is kept. DIR (default: runs/gpu) gets STAGE.log for each stage, and report.md. The exit status
is 0 if every stage passed, 1 if one failed, and 2 without a GPU.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

PYTEST = (sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "tests.gpu.live")
WORLDS = (  # what is executed in worlds of several ranks, or compares placements
    "tests/cuda_paths/test_late.py", "tests/end_to_end/test_reference.py", "tests/end_to_end/test_invariance.py",
    "tests/end_to_end/test_half.py", "tests/end_to_end/test_blocks.py", "tests/zero/test_programs.py",
    "tests/moe/test_programs.py", "tests/context/test_programs.py", "tests/offload/test_run.py",
    "tests/copies/test_run.py", "tests/sync/test_sync.py", "tests/lora/test_run.py", "tests/images/test_run.py",
    "tests/lag/test_reference.py", "tests/distributions/test_runs.py", "tests/interleaved/test_programs.py",
    "tests/environments/test_layouts.py", "tests/evaluation/test_runs.py", "tests/lag/test_bits.py")


@dataclass(frozen=True, slots=True)
class Stage:
    name: str                             # of its log
    what: str                             # for the report
    command: tuple[str, ...]
    seconds: int                          # its time limit
    alone: bool = False                   # whether it measures, and nothing else may run
    on_gpu: bool = True                   # whether ranks of test worlds compute on the GPU


def stages(workers: int) -> tuple[Stage, ...]:
    many = (*PYTEST, "-n", str(workers), "--dist", "worksteal")
    return (
        Stage("doctor", "what is installed", (sys.executable, "-m", "rldsl.cli", "doctor"), 60, on_gpu=False),
        Stage("kernels", "Triton, packed attention, captured steps, models against the CPU, offload",
              (*PYTEST, "-n", "3", "tests/gpu/test_kernels.py"), 600, on_gpu=False),
        Stage("runs", "torchrun over NCCL: the CPU's first step, resume, memory against the estimate, a profile",
              (*PYTEST, "-n", "4", "tests/gpu/test_runs.py"), 900, on_gpu=False),
        Stage("worlds", "placements on several ranks that share the GPU", (*many, *WORLDS), 1200),
        Stage("invariant", "one digest under every placement",
              (sys.executable, "-m", "tests.consistency.grid", "--steps", "2", "--every", "5"), 1200),
        Stage("learns", "a GRPO run that learns", (sys.executable, "-m", "tests.gpu.learns"), 600, on_gpu=False),
        Stage("bounds", "decoding, training and a GRPO step against their bounds",
              (sys.executable, "-m", "benchmarks.gpu"), 850, alone=True, on_gpu=False),
    )


@dataclass(frozen=True, slots=True)
class Result:
    stage: Stage
    status: str     # passed, failed, out of time
    seconds: float
    last: str       # its last line

    def row(self) -> str:
        return f"| {self.stage.name} | {self.stage.what} | {self.status} | {self.seconds:.0f} s | {self.last} |"


def run(stage: Stage, out: Path, deadline: float) -> Result:
    log, begin = out / f"{stage.name}.log", time.monotonic()
    environment = os.environ | {"OMP_NUM_THREADS": "1", "RLDSL_TEST_LINES": str(out / f"{stage.name}.tests"),
                                "PYTHONUNBUFFERED": "1",
                                "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}  # or the server that forks ranks could not
    environment.pop("RLDSL_TEST_DEVICE", None)
    if stage.on_gpu:
        environment["RLDSL_TEST_DEVICE"] = "cuda"
    limit = max(1.0, min(stage.seconds, deadline - begin))
    with log.open("wb") as file:
        process = subprocess.Popen(stage.command, stdout=file, stderr=subprocess.STDOUT, env=environment,
                                   start_new_session=True)
        try:
            status = "passed" if process.wait(limit) == 0 else "failed"
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)
            process.wait()
            status = f"out of time ({limit:.0f} s)"
    lines = log.read_text(errors="replace").strip().splitlines() or [""]
    return Result(stage, status, time.monotonic() - begin, lines[-1].strip()[:120].replace("|", "/"))


def report(results: Sequence[Result], out: Path) -> str:
    import torch

    name = torch.cuda.get_device_name(0)
    rows = "\n".join(result.row() for result in results)
    text = (f"{name}, torch {torch.__version__}, CUDA {torch.version.cuda}, NCCL "
            f"{'.'.join(map(str, torch.cuda.nccl.version()))}\n\n"
            f"| stage | what | result | time | last line |\n|---|---|---|---|---|\n{rows}\n")
    (out / "report.md").write_text(text)
    return text


def main(arguments: list[str]) -> int:
    import torch

    workers = max(2, min(12, (os.cpu_count() or 2) - 2))
    known = {stage.name: stage for stage in stages(workers)}
    parser = argparse.ArgumentParser(prog="python -m tests.gpu", description=__doc__.split("\n")[0])
    parser.add_argument("stages", nargs="*", metavar="STAGE", help=f"of {', '.join(known)} (default: all)")
    parser.add_argument("--out", type=Path, default=Path("runs/gpu"), metavar="DIR")
    parser.add_argument("--seconds", type=float, default=2100.0, metavar="N", help="for all of it (default: 2100)")
    asked = parser.parse_args(arguments)
    if unknown := [name for name in asked.stages if name not in known]:
        parser.error(f"there is no stage {unknown[0]!r}")
    if not torch.cuda.is_available():
        print("a CUDA GPU is needed, and torch sees none here", file=sys.stderr)
        return 2
    asked.out.mkdir(parents=True, exist_ok=True)
    for old in asked.out.glob("*.tests"):
        old.unlink()
    chosen = [known[name] for name in asked.stages or known]
    deadline = time.monotonic() + asked.seconds
    together = [stage for stage in chosen if not stage.alone]
    with ThreadPoolExecutor(max(len(together), 1)) as pool:
        results = list(pool.map(lambda stage: run(stage, asked.out, deadline), together))
    results += [run(stage, asked.out, deadline) for stage in chosen if stage.alone]
    print(report(results, asked.out))
    return int(any(result.status != "passed" for result in results))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
