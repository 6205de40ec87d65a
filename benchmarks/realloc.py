"""How well and how fast reallocations are planned. Exact integers, and CPU time; nothing is sent.

    python -m benchmarks.realloc             # all parts python -m benchmarks.realloc time        # planning, 64 to
    10,240 ranks python -m benchmarks.realloc quality     # a grid of more than 200 layout pairs; needs scipy python -m
    benchmarks.realloc megatron    # the planner of megatron-core 0.16.1 on layouts of the grid, where installed

Gates: bytes received / bytes lacking 1.000; bytes between nodes / bytes that some rank of a node lacks and none has
1.000; busiest rank / optimum 1.02; messages for each peer and bucket 2; planning for one rank at 10,240 ranks 20 ms
more than at
64. What is sent and how long that takes: `benchmarks/realloc_wall.py`.
"""

from __future__ import annotations

import math
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial

from benchmarks.layouts import TOY, at_scale, grid
from benchmarks.layouts import case as make
from rldsl.reshard.rounds import num_buckets, rank_rounds
from rldsl.reshard.summary import summary
from rldsl.reshard.transfer_slices import rank_slices
from tests.realloc.cases import Case

RANKS = (64, 256, 1024, 4096, 10240)


def cpu(work: Callable[[], object], times: int = 5) -> float:
    """Milliseconds of CPU time: the least of several."""
    found = []
    for _ in range(times):
        start = time.process_time()
        work()
        found.append((time.process_time() - start) * 1e3)
    return min(found)


def exponent(sizes: Sequence[int], costs: Sequence[float]) -> float:
    """Of the power of the size by which the cost grows: the slope of the logarithms."""
    return statistics.linear_regression([math.log(x) for x in sizes], [math.log(x) for x in costs]).slope


# ------------------------------------------------------------------------------------------------------- time


def planning() -> bool:
    print("planning a 70B model, CPU ms: paths (once), then what the plan says of them, then the lanes of one rank")
    good = True
    for name in at_scale(64):
        whole = []
        for ranks in RANKS:
            case = at_scale(ranks)[name]
            p = case.paths()
            rank = ranks // 2 + 3
            parts = (cpu(case.paths), cpu(partial(summary, p, case.model)), cpu(partial(rank_slices, p, rank)))
            whole.append(sum(parts))
            sends, receives = rank_slices(p, rank)
            ops = rank_rounds(p, rank, num_buckets(p, 2))
            most = max(len(side) for r in ops for side in (r.sends, r.receives))
            print(f"  {name:34} {ranks:6} ranks  {parts[0]:6.1f} + {parts[1]:5.1f} + {parts[2]:5.2f}  lanes "
                  f"{len(sends)}/{len(receives)}, at most {most} messages in a round, {len(ops)} rounds")
        grown = exponent(RANKS, whole)
        good &= whole[-1] <= whole[0] + 20
        print(f"  {name:34} grows by the power {grown:.2f} of the ranks")
    return good


# ---------------------------------------------------------------------------------------------------- quality


def lacking(case: Case) -> tuple[int, int]:
    """(elements that ranks lack, elements that come into nodes), from the cells of all ranks."""
    p = case.paths()
    have = {r: p.src.cell(r) for r in case.ranks()}
    want = {r: p.dst.cell(r) for r in case.ranks()}
    total = entering = 0
    for line in p.classes:
        hold = {r for r in have if have[r] in line.holders}
        lack = [r for r in want if want[r] in line.needers and r not in hold]
        near = {r // case.devices for r in hold}
        total += line.size * len(lack)
        entering += line.size * len({r // case.devices for r in lack} - near)
    return total, entering


def quality() -> bool:
    from tests.realloc.program import busiest, links, optimum

    cases = list(grid(TOY))
    worst: Counter[str] = Counter()
    count = 0
    for case in cases:
        total, entering = lacking(case)
        if not total:
            continue
        count += 1
        _, came, _, got = links(case)
        received = sum(came.values()) + sum(got.values())
        worst["bytes received / lacking"] = max(worst["bytes received / lacking"], received / total)
        if entering:
            crossing = sum(came.values()) / entering
            worst["bytes between nodes / bound"] = max(worst["bytes between nodes / bound"], crossing)
        worst["busiest rank / optimum"] = max(worst["busiest rank / optimum"], busiest(case) / optimum(case))
        p = case.paths()
        for rank in case.ranks():
            for side in rank_slices(p, rank):
                peers: Counter[tuple[int, int]] = Counter({(x.peer, x.step): 1 for x in side})
                most = max(Counter(peer for peer, _ in peers).values(), default=0)
                worst["messages for a peer and bucket"] = max(worst["messages for a peer and bucket"], most)
    gates = {"bytes received / lacking": 1.0, "bytes between nodes / bound": 1.0, "busiest rank / optimum": 1.02,
             "messages for a peer and bucket": 2}
    print(f"worst of {count} layout pairs of 16 to 32 ranks")
    for name, gate in gates.items():
        print(f"  {name:34} {worst[name]:.4f}  gate {gate}")
    return all(worst[name] <= gate for name, gate in gates.items())


# --------------------------------------------------------------------------------------------------- megatron


def megatron() -> bool:
    """The planner of megatron-core on the same layouts: bytes, the busiest rank, and CPU time for all ranks."""
    try:
        from benchmarks.megatron_planner import VERSION, moves
    except ImportError as error:
        print(f"megatron-core: not here ({error})")
        return True
    from tests.realloc.program import optimum

    ratios, crossed, ours = [], [], []
    for case in list(grid(TOY))[::7]:
        total, entering = lacking(case)
        if not total:
            continue
        out: Counter[int] = Counter()
        came: Counter[int] = Counter()
        far = near = 0
        for src, dst, amount in moves(case):
            if src // case.devices == dst // case.devices:
                near += amount
            else:
                out[src] += amount
                came[dst] += amount
                far += amount
        best = optimum(case)
        ratios.append((max([*out.values(), *came.values()], default=0)) / best)
        crossed.append(far / entering if entering else 1.0)
        ours.append((far + near) / total)
    print(f"planner of megatron-core {VERSION} on {len(ratios)} of these: bytes / lacking {max(ours):.3f}, between nodes / bound "
          f"{max(crossed):.2f} at most, busiest rank of the network / optimum {statistics.median(ratios):.2f} median, "
          f"{max(ratios):.2f} at most")
    times = []
    for ranks in (16, 32, 64, 128):
        big = make(TOY, 8, (0, ranks, 8, 2), (0, ranks, 4, 1))
        times.append(cpu(partial(lambda x: list(moves(x)), big), 1))
        own = cpu(partial(lambda x: rank_slices(x.paths(), 0), big))
        print(f"  {ranks:4} ranks: {times[-1]:9.1f} ms CPU, here {own:5.1f} ms")
    print(f"  grows by the power {exponent((16, 32, 64, 128), times):.2f} of the ranks")
    return True


PARTS = {"time": planning, "quality": quality, "megatron": megatron}


def main(names: list[str]) -> int:
    """The number of the named parts that miss a gate."""
    return sum(not PARTS[name]() for name in names or PARTS)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
