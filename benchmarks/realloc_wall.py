"""Reallocations carried out by gloo ranks on this machine, against a bare exchange of the same bytes in the same run.

    python -m benchmarks.realloc_wall [TURNS]

Bare: for each pair of ranks one message of all its bytes, from and into tensors that are there already, all posted at
once, and one copy of the bytes that stay on a rank; no packing, no rounds. The two take turns, so that both meet the
same neighbors on the machine; the ratios of their median and of their least times are shown, and that of the CPU time
of all ranks; a copy in memory before and after (canary) tells how steady the machine was. Gate: 1.25, of the median
times or of CPU time (on a machine that others use, only the second says something). extra: the most bytes beyond the
parameters that one rank has at once, in buckets (gate 2). """

from __future__ import annotations

import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import torch
import torch.distributed as dist

from benchmarks.layouts import case as make
from benchmarks.layouts import llama
from rldsl.reshard.rounds import ROUNDS_IN_FLIGHT, Round
from rldsl.runtime.comm.exchange import post
from rldsl.runtime.comm.reshard import RankReshard, reshard
from rldsl.runtime.comm.side_stream import SideStream
from tests.realloc.cases import Case
from tests.realloc.test_run import place, tensors
from tests.world import run_world

SMALL = replace(llama(2048, 2, 16, 8, 8192, 16384), dtype="float32")
CPU = torch.device("cpu")
CASES = {
    "tp2 -> dp2, same 2 ranks": make(SMALL, 8, (0, 2, 2, 1), (0, 2, 1, 1)),
    "pp2 -> tp2, same 2 ranks": make(SMALL, 8, (0, 2, 1, 2), (0, 2, 2, 1)),
    "rank 0 -> rank 1": make(SMALL, 8, (0, 1, 1, 1), (1, 1, 1, 1)),
}


def timed(work: Callable[[], object]) -> tuple[float, float]:
    """Seconds, and CPU seconds of this rank."""
    dist.barrier()
    start, used = time.perf_counter(), time.process_time()
    work()
    dist.barrier()
    return time.perf_counter() - start, time.process_time() - used


def by_peer(rounds: tuple[Round, ...]) -> tuple[Counter[int], Counter[int]]:
    """Elements to and from each peer."""
    sends: Counter[int] = Counter()
    receives: Counter[int] = Counter()
    for ops in rounds:
        for side, found in ((ops.sends, sends), (ops.receives, receives)):
            for message in side:
                found[message.peer] += message.size()
    return sends, receives


def measure(rank: int, case: Case, turns: int, bucket: int) -> dict[str, float]:
    way = RankReshard.plan(case.model, case.src, case.src_mesh, case.dst, case.dst_mesh, case.devices, rank, bucket)
    held = {name: torch.zeros_like(t) for name, t in tensors(case, "dst", rank, torch.float32).items()}
    src = place(case, "src", rank, tensors(case, "src", rank, torch.float32))
    dst = place(case, "dst", rank, held)
    sends, receives = by_peer(tuple(way.rounds))
    out = {peer: torch.ones(n) for peer, n in sends.items()}
    into = {peer: torch.ones(n) for peer, n in receives.items()}
    here = sum(src[name][at].numel() for (name, at), _ in way.copies) if src else 0
    stays, stayed = torch.ones(here), torch.ones(here)

    def bare() -> None:
        stayed.copy_(stays)
        post(out, into, 7).wait()

    def ours() -> None:
        reshard(way, src, dst, torch.float32, SideStream(CPU), 9).finish()

    def canary() -> float:
        return min(timed(lambda: stayed.copy_(stays))[0] for _ in range(5))

    before = canary()
    found = [(*timed(bare), *timed(ours)) for _ in range(turns + 1)][1:]
    one, used, other, spent = zip(*found)
    room = sum(4 * sum(max((sum(m.size() for m in side) for side in sides[i::ROUNDS_IN_FLIGHT]), default=0) for i in range(ROUNDS_IN_FLIGHT))
               for sides in zip(*((r.sends, r.receives) for r in way.rounds)))
    return {"least": min(other) / min(one), "median": statistics.median(other) / statistics.median(one),
            "bare CPU": statistics.median(used), "CPU": statistics.median(spent), "drift": canary() / before,
            "bytes": 4.0 * sum(sends.values()), "rounds": len(way.rounds), "extra": room / bucket,
            "messages": sum(len(r.sends) for r in way.rounds)}


def main(turns: int) -> int:
    """0 where every gate is kept."""
    good = True
    for name, case in CASES.items():
        for bucket in (128 << 20, 32 << 20):
            ranks = run_world(2, measure, case, turns, bucket, timeout=600)
            worst = {key: max(r[key] for r in ranks) for key in ranks[0]}
            used = sum(r["CPU"] for r in ranks) / sum(r["bare CPU"] for r in ranks)
            good &= min(worst["median"], used) <= 1.25 and worst["extra"] <= 2.1
            print(f"{name:26} bucket {bucket >> 20:3} MiB  {worst['bytes'] / 2**20:6.1f} MiB in {worst['messages']:.0f} "
                  f"messages, {worst['rounds']:.0f} rounds  / bare: time {worst['median']:.2f} median, {worst['least']:.2f} "
                  f"least, CPU {used:.2f}  extra {worst['extra']:.2f} buckets  (canary {worst['drift']:.2f})", flush=True)
    return int(not good)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]) if len(sys.argv) > 1 else 9))
