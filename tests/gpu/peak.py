"""Execute a plan of one rank on the GPU, and print how many bytes torch's allocator had given out at most. Unlike the
metric of a run, it counts nothing of other processes on this GPU.

    python -m tests.gpu.peak FILE.plan
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from rldsl.runtime.interpreter.interpreter import execute
from rldsl.runtime.interpreter.options import Options
from rldsl.runtime.plan_file import PlanFile


def main(file: str) -> None:
    device, folder = torch.device("cuda", 0), Path(file).parent
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1, device_id=device)
    os.chdir(folder)
    execute(PlanFile.read(file), folder / "out", device, options=Options(allow_write=(str(folder),)))
    dist.destroy_process_group()
    print(torch.cuda.max_memory_allocated(device))


if __name__ == "__main__":
    main(sys.argv[1])
