"""Measure this machine and the calls of models on it: what `rlc profile` starts, once for each rank of a machine.

    python -m rldsl.runtime.launch --standalone --nproc-per-node 2 -m rldsl.measure.profile wanted.json found.json

In: which models, under which tensor parallelism. Out: numbers by the names of a cluster's file. A model is built from
its config with random weights and a few layers, as one rank's shard; collectives inside it return at once, since
the simulator adds what they take. Nothing of this is a run: there is no plan and nothing is read but configs.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from functools import partial
from math import ceil, log2
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from rldsl.measure.call_costs import measure_calls, median_seconds, synchronize, training_step
from rldsl.measure.conversation_costs import measure_conversations
from rldsl.measure.environment_costs import measure_environments
from rldsl.plan.conversing import conversing_models, is_conversing
from rldsl.plan.events import Sampling
from rldsl.runtime.collectives import all_reduce, reduce_scatter
from rldsl.runtime.comm.exchange import post
from rldsl.runtime.comm.machine_peers import share_memory
from rldsl.runtime.metrics.run_record import PACKAGES, versions
from rldsl.runtime.parent import terminate_with
from rldsl.sharding.partition import partition


def device_rates(device: torch.device) -> dict[str, float]:
    """Rates of one device with nothing else on it."""
    size = 4096 if device.type == "cuda" else 768
    found: dict[str, float] = {}
    for name, dtype in (("float32", torch.float32), ("bfloat16", torch.bfloat16)):
        a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
        found[f"{name}_tflops"] = 2 * size**3 / median_seconds(partial(torch.matmul, a, b), device) / 1e12
    source = torch.ones(2**28 if device.type == "cuda" else 2**23, device=device)
    target = torch.empty_like(source)
    found["memory_gb_s"] = 2 * source.nbytes / median_seconds(lambda: target.copy_(source), device) / 1e9
    small = torch.ones(16, device=device)

    def hundred() -> None:
        for _ in range(100):
            small.add_(1.0)

    found["kernel_us"] = median_seconds(hundred, device) * 1e4
    weights = [i * 7919 % 512 for i in range(512)]
    found["row_us"] = median_seconds(lambda: partition(weights, 4, "tokens"), torch.device("cpu")) * 1e6 / len(weights)
    return found


def link_rates(device: torch.device) -> dict[str, float]:
    """Between the ranks of this machine; of a processor between two, since more share its cores, which the simulator
    adds. All of them call it.

    Latencies are what a message of a decoding step costs on top of computing, and not what it takes in a loop of
    nothing else: there threads and caches are warm and nobody comes late, which on a processor is several times as
    fast."""
    rank, world = dist.get_rank(), dist.get_world_size()
    if world < 2:
        return {}
    ranks = world if device.type == "cuda" else 2
    group = dist.new_group(list(range(ranks)))
    shared = share_memory([(range(world), dist.group.WORLD), (range(ranks), group)], None)  # as in a run
    most = 2**20 if device.type == "cpu" else 2**26
    small, large = (torch.ones(n // ranks * ranks, device=device) for n in (2**12, most))

    def there_and_back(x: torch.Tensor) -> None:
        for sender in (0, 1) if rank < 2 else ():  # as messages of a run are posted, over the same communicator
            (post({1 - rank: x}, {}, 0) if rank == sender else post({}, {1 - rank: x}, 0)).wait()

    found: dict[str, float] = {}
    if rank < ranks:
        latency = _added_seconds(lambda: there_and_back(small), device, 20, group) / 2
        whole = _added_seconds(lambda: there_and_back(large), device, 2, group) / 2
        summed = _added_seconds(lambda: all_reduce(small, group=group), device, 20, group)
        sums = _added_seconds(lambda: all_reduce(large, group=group), device, 2, group)
        scattered, scatters = (_added_seconds(partial(_scatter, x, ranks, group), device, n, group)
                               for x, n in ((small, 20), (large, 2)))
        ring = 2 * (ranks - 1) / ranks * large.nbytes
        found = {"link_us": latency * 1e6, "link_gb_s": large.nbytes / max(whole - latency, 1e-9) / 1e9,
                 "reduce_us": summed * 1e6 / ceil(log2(ranks)), "reduce_gb_s": ring / max(sums - summed, 1e-9) / 1e9,
                 "scatter_us": scattered * 1e6 / ceil(log2(ranks)),
                 "scatter_gb_s": ring / 2 / max(scatters - scattered, 1e-9) / 1e9}
    dist.barrier()
    del shared
    return found


def _scatter(x: torch.Tensor, ranks: int, group: dist.ProcessGroup) -> None:
    reduce_scatter(x.unflatten(0, (ranks, -1)), group)


def _added_seconds(message: Callable[[], Any], device: torch.device, times: int, group: dist.ProcessGroup) -> float:
    """Seconds that a message adds to work of about a millisecond on each side: the median of batches of `times`."""
    a = torch.randn(64, 256, device=device)
    b = torch.randn(256, 256, device=device)

    def seconds(also: Callable[[], Any]) -> float:
        dist.barrier(group=group)
        synchronize(device)
        begin = time.perf_counter()
        for _ in range(times):
            for _ in range(10):
                (a @ b).add_(1.0)
            also()
        synchronize(device)
        return (time.perf_counter() - begin) / times

    found = [seconds(message) - seconds(lambda: None) for _ in range(12)]
    return max(statistics.median(found[2:]), 1e-9)


# --------------------------------------------------------------------------------------------------- rank


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("plan", nargs="?")
    parser.add_argument("wanted", nargs="?",
                        help="JSON: shards as [model, tp, backend], and what else: the machine, environments")
    parser.add_argument("found", nargs="?", help="output file, written by rank 0")
    parser.add_argument("--device", choices=("cpu", "cuda"))
    parser.add_argument("--facts", action="store_true", help="only print what machine this is")
    given = parser.parse_args()
    if given.facts:
        print(json.dumps(machine_facts(given.device)))
        return
    if "TORCHELASTIC_RUN_ID" in os.environ:  # torchrun's agent started this process, and it ends with the agent
        terminate_with(os.getppid())
    rank, local = int(os.environ.get("RANK", 0)), int(os.environ.get("LOCAL_RANK", 0))
    device = torch.device("cuda", local) if given.device == "cuda" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    # as a run does: with the device, communicators of groups are made from that of the world
    dist.init_process_group(**({"backend": "nccl", "device_id": device} if device.type == "cuda" else
                               {"backend": "gloo"}))
    try:
        found = _measured(given, rank, device)
        if rank == 0:
            Path(given.found).write_text(json.dumps(found))
        dist.barrier()
    finally:
        dist.destroy_process_group()


def machine_facts(device: str | None) -> dict[str, Any]:
    """device: "cpu", or "cuda" (the default where there is one)."""
    there = 0 if device == "cpu" or not torch.cuda.is_available() else torch.cuda.device_count()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    name = torch.cuda.get_device_name(0) if there else _processor()
    found = versions()
    return {"device": name, "devices": there, "cores": cores, "versions": [f"{k} {found[k]}" for k in PACKAGES]}


def _processor() -> str:
    """The name of the processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _measured(given: argparse.Namespace, rank: int, device: torch.device) -> dict[str, Any]:
    """What rank 0 reports; the others help where ranks meet, and wait otherwise."""
    import transformers

    from rldsl.plan.codec import decode
    from rldsl.plan.events import Generate
    from rldsl.plan.projection import event_paths

    transformers.logging.set_verbosity_error()
    plan = decode(Path(given.plan).read_bytes(), given.plan)
    wanted = json.loads(Path(given.wanted).read_text())
    found: dict[str, Any] = {}
    models = {m.name: m for m in plan.models}
    images = any(d.images for d in plan.data)
    if wanted["machine"]:
        found |= link_rates(device)
        if device.type == "cpu":
            name, tp, backend = wanted["models"][0]
            work = training_step(models[name], tp, backend, device)
            alone = median_seconds(work, device) if rank == 0 else 0.0
            dist.barrier()
            found["core_speed"] = min(1.0, alone / median_seconds(work, device))
            dist.barrier()
        if rank == 0:
            found |= device_rates(device)
    dist.barrier()
    if rank == 0:
        sampling = next((e.sampling for e, _ in event_paths(plan) if isinstance(e, Generate)), Sampling())
        found["measured"] = [
            {"config": m.config_digest, "head": m.head_name, "dtype": m.dtype, "tp": tp,
             "threads": torch.get_num_threads(),
             **measure_calls(m, tp, backend, sampling, device, images),
             **(measure_conversations(m, tp, backend, sampling, device) if is_conversing(plan, m) else {})}
            for name, tp, backend in wanted["models"] for m in (models[name],)]
        if wanted["environments"]:
            found |= measure_environments(conversing_models(plan)[0].path)
    return found


if __name__ == "__main__":
    main()
