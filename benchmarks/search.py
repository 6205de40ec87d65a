"""Placement by search: how good it is proved to be, and how long it takes, beside an MCMC at equal time.

    python -m benchmarks.search [most ranks]     # PPO with models of 7B to 70B on 16 to 1,024 H100s
    python -m benchmarks.search 128 34B 70B      # these models alone
    python -m benchmarks.search measured         # tiny models on this machine, a quarter of an hour: nothing else may run

The first prints for each case the predicted step of the plan that was compiled for what was found, the proven bound
and the gap between them (gate 2 %), the CPU seconds of the search (gates: of 128 ranks 3, of 1,024 ranks 10), what an
MCMC of ReaL's kind (Mei et al. 2024, arXiv:2406.14088) finds in the same time, and how far the evaluation that the
search uses is from the simulated plan. The MCMC: a state is an option of every call; it begins with every call at its
fastest, proposes another option of one call, accepts what is better, or worse with a probability that falls with the
loss, and takes what does not fit as three times as slow. It has the same options, costs and evaluation.

The second draws placements, ranks them as the search does, with this machine's profile, runs them, and prints Kendall's
tau of the two orders (gate 0.8). They are drawn among all that may run, so steps differ tenfold and the slowest take
half a minute with models of any width: the model is small, and of few steps the first two do not count.
"""

from __future__ import annotations

import math
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from benchmarks.scale import LLAMA, PPO, directory
from benchmarks.simulate import PROMPT, make, measured, tau
from rldsl import api
from rldsl.clusters import Cluster, preset, read
from rldsl.diag import Failure
from rldsl.models.families import Family, describe
from rldsl.passes.pipeline import finish
from rldsl.plan.codec import encode
from rldsl.search import Options, PreparedProgram, find_placement, prepare_program, unless_locked
from rldsl.search.answer import run_search
from rldsl.search.call_costs import Candidate
from rldsl.search.compiled_placements import compile_assignment
from rldsl.search.evaluator import Assignment, Evaluator
from rldsl.search.problem import build_problem
from rldsl.search.space import Block
from rldsl.simulate import Lengths
from rldsl.source import SourceFile

RANKS = (16, 32, 64, 128, 256, 512, 1024)
SIZES = {"7B": dict(hidden_size=4096, num_hidden_layers=32, num_attention_heads=32, intermediate_size=11008),
         "13B": dict(hidden_size=5120, num_hidden_layers=40, num_attention_heads=40, intermediate_size=13824),
         "34B": dict(hidden_size=8192, num_hidden_layers=48, num_attention_heads=64, intermediate_size=22016),
         "70B": {name: LLAMA[name] for name in ("hidden_size", "num_hidden_layers", "num_attention_heads",
                                                "num_key_value_heads", "intermediate_size")}}
GATES = {"gap": 0.02, "seconds": {128: 3.0, 1024: 10.0}, "tau": (0.8,)}


@dataclass(frozen=True, slots=True)
class Row:
    """Seconds: of a predicted step; cpu: of the search alone; mcmc: of the step that it finds, inf where nothing fits.
    off: of the evaluation against the simulated plan. parts: of the space looked at."""

    size: str
    ranks: int
    seconds: float
    bound: float
    cpu: float
    mcmc: float
    off: float
    num_nodes: int
    how: str

    @property
    def gap(self) -> float:
        return self.seconds / self.bound - 1


def ready(cluster: Cluster, batch: int, known: Callable[..., Family]) -> PreparedProgram:
    """PPO as `benchmarks/scale.py` has it, with all calls free."""
    half = max(cluster.nodes // 2, 1)
    text = PPO.format(nodes=cluster.nodes, half=half, batch=batch, keep="", offload="", train="")
    graph = api.build_graph(SourceFile("ppo.rlf", text))
    return prepare_program(graph, "", cluster, int(cluster.memory_gb * 1e9), unless_locked(graph, ()), known)


def case(size: str, ranks: int, known: Callable[..., Family]) -> Row | None:
    """None where nothing fits."""
    cluster = preset(f"h100x{ranks}")
    assert cluster is not None
    p = ready(cluster, max(512, 4 * ranks), known)
    begin = time.process_time()
    asked = build_problem(p.placed, cluster, Lengths(), p.placed.memory, p.fixed)
    instance, result = run_search(asked, p.placed.memory // 100, Options())
    cpu = time.process_time() - begin
    if not result.best:
        return None
    best = compile_assignment(p, instance, result.best[0], cluster, Lengths())
    bound = result.bound
    if best.bytes > p.placed.memory:  # more of a device is kept free
        try:
            answer = find_placement(p, cluster, p.placed.memory)
        except Failure:
            return None
        best, bound = answer.best[0], answer.result.bound
    finish(best.plan, ())  # the plan is verified
    ways = "; ".join(f"{j.name} {b.size}: {e.strategy.text()}" for j, b, e in zip(
        instance.calls, best.evaluation.assignment.blocks, best.evaluation.assignment.candidates))
    off = best.evaluation.seconds / best.seconds - 1
    return Row(size, ranks, best.seconds, min(bound, best.seconds), cpu, mcmc(instance, cpu), off, result.num_nodes,
               ways)


# ------------------------------------------------------------------------------------------------ the baseline


def options(i: Evaluator, most: int = 1000) -> list[list[tuple[Block, Candidate]]]:
    """Of each call, the fastest first."""
    return [sorted(((b, e) for b in i.tree.all_blocks for e in i.table.candidates(job, b.size)),
                   key=lambda o: o[1].seconds)[:most] for job in i.calls]


def mcmc(i: Evaluator, seconds: float, beta: float = 100.0) -> float:
    """Seconds of the best step found in so much CPU time, tables not counted. beta: of a loss, as a share of a step."""
    draw, every = random.Random(0), options(i)
    if not all(every):
        return math.inf

    def cost(at: list[int]) -> tuple[float, bool]:
        picked = [every[c][k] for c, k in enumerate(at)]
        judged = i.evaluate(Assignment(tuple(b for b, _ in picked), tuple(e for _, e in picked)))
        return judged.seconds * (1 if i.fits(judged.bytes) else 3), i.fits(judged.bytes)

    at = [0] * len(every)
    now, fits = cost(at)
    best = now if fits else math.inf
    end = time.process_time() + seconds
    while time.process_time() < end:
        c = draw.randrange(len(at))
        new = at[:c] + [draw.randrange(len(every[c]))] + at[c + 1 :]
        then, fits = cost(new)
        if then <= now or draw.random() < math.exp(-beta * (then - now) / now):
            at, now = new, then
            best = min(best, now) if fits else best
    return best


# --------------------------------------------------------------------------------------------- real steps


def real(folder: Path, count: int = 24, steps: int = 4) -> None:
    """Placements of PPO with a tiny model on up to four ranks of this machine's processor."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    folder.mkdir(parents=True, exist_ok=True)
    make(folder)
    os.chdir(folder)
    source = "cluster nodes=1 gpus=4\n" + Path("ppo.rlf").read_text()
    Path("ppo4.rlf").write_text(source)
    sets = {"size": "s", "steps": steps, "batch": 16}
    graph = api.build_graph(SourceFile("ppo4.rlf", source), sets)
    first = Path("first.plan")
    first.write_bytes(encode(api.compile("ppo4.rlf", sets, None, ("*.* on mesh(0:4) dp=2 tp=2",))))
    subprocess.run([sys.executable, "-m", "rldsl.cli", "profile", str(first), "-o", "profile.yaml", "--device", "cpu",
                    "--fresh", "--tp", "1", "--tp", "4"], check=True, capture_output=True)
    cluster = replace(read("profile.yaml"), nodes=1, gpus=4)
    p = prepare_program(graph, "", cluster, 0, unless_locked(graph, ()), describe)
    lengths = Lengths(PROMPT, 0.0)
    i = Evaluator(build_problem(p.placed, cluster, lengths, 0, p.fixed))
    draw, every, found = random.Random(0), options(i), []
    print(f"{'predicted':>10} {'measured':>10}  placement")
    while len(found) < count:
        picked = [draw.choice(o) for o in every]
        judged = i.evaluate(Assignment(tuple(b for b, _ in picked), tuple(e for _, e in picked)))
        one = compile_assignment(p, i, judged, cluster, lengths)
        file = Path("case.plan")
        file.write_bytes(encode(one.plan))
        took = measured(file, one.plan.header.world, steps).seconds
        found.append((one.seconds, took))
        print(f"{one.seconds:>9.3f}s {took:>9.3f}s  " + "; ".join(
            f"{j.name} {b.start}:{b.stop} {e.strategy.text()}" for j, (b, e) in zip(i.calls, picked)), flush=True)
    errors = [abs(a / b - 1) for a, b in found]
    print(f"\n{count} placements: Kendall's tau {tau(found):.3f} (gate {GATES['tau'][0]}), median error "
          f"{statistics.median(errors):.1%}")


def table(rows: list[Row]) -> Iterator[str]:
    yield "  model  ranks      step     bound    gap   CPU s    parts  MCMC/found  evaluated/simulated"
    for r in rows:
        yield (f"  {r.size:>5}  {r.ranks:5,} {r.seconds:>8.2f}s {r.bound:>8.2f}s {r.gap:>6.2%} {r.cpu:>7.2f} "
               f"{r.num_nodes:>8,} {r.mcmc / r.seconds:>11.3f} {1 + r.off:>12.4f}")
    gap = max(r.gap for r in rows)
    yield f"  largest gap {gap:.2%}: / gate ({GATES['gap']:.0%}) {gap / GATES['gap']:.2f}"
    for ranks, gate in GATES["seconds"].items():
        slow = [r.cpu for r in rows if r.ranks == ranks]
        if slow:
            yield f"  CPU at {ranks:,} ranks: most {max(slow):.2f} s, / gate ({gate:g} s) {max(slow) / gate:.2f}"


def main() -> None:
    if sys.argv[1:2] == ["measured"]:
        return real(Path("runs/search"))
    most = int(sys.argv[1]) if len(sys.argv) > 1 else RANKS[-1]
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as place:
        for size, shape in SIZES.items():
            if sys.argv[2:] and size not in sys.argv[2:]:
                continue
            folder = Path(place) / size
            sizes = {"vocab_size": 128256, "max_position_embeddings": 8192, "tie_word_embeddings": False} | shape
            directory(folder / "actor", "llama", sizes, False)
            directory(folder / "judge", "llama", sizes, True)
            known = cache(lambda path, kind, span=None, trained=False, at=folder: describe(
                str(at / path), kind, span, trained))
            for ranks in RANKS:
                if ranks > most:
                    continue
                if (row := case(size, ranks, known)) is None:
                    print(f"  {size:>5}  {ranks:5}  nothing fits", flush=True)
                    continue
                rows.append(row)
                print(f"  {size:>5}  {ranks:5}  {row.seconds:.2f} s, bound {row.bound:.2f}, CPU {row.cpu:.2f} s, "
                      f"{row.how}", flush=True)
    print("\n".join(table(rows)))


if __name__ == "__main__":
    main()
