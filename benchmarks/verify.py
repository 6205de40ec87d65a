"""The verifier's cost: PPO on a 70-billion-parameter model (ReaL's six calls) from 64 ranks to 10,240, and a plan
whose every rank is in a separate class. Prints entries (ranks times events), CPU seconds, entries a second, and the
growth exponent: 1 would be a cost in proportion to the entries, 0 none that depends on them.

    python -m benchmarks.verify
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import replace

from benchmarks.layouts import LLAMA_70B
from rldsl import api
from rldsl.graph import model as g
from rldsl.models.families import Family
from rldsl.passes import pipeline
from rldsl.placement.place import place_graph
from rldsl.plan.events import Fetch, Free, Item, Loop
from rldsl.plan.model import Mesh, ParamSpec, Plan, Spread
from rldsl.plan.projection import rank_classes
from rldsl.verify import verify
from tests.compiler.graphs import at, family, ppo
from tests.plan.sample import grpo

SIZES = (64, 256, 1024, 4096, 10240)


def big(path: str = "sft", kind: str = "causal_lm", span: object = None, trained: bool = False) -> Family:
    """A 70-billion-parameter model of the Llama family, by its shapes alone."""
    m = LLAMA_70B
    styles = {None: "replicated", 0: "colwise", 1: "rowwise"}
    params = tuple(p if p.style != "replicated" else replace(p, style=styles[p.split.dim if p.split else None])
                   for p in m.params)
    if kind != "causal_lm":
        params = (*params[:-1], ParamSpec("score.weight", (1, params[0].shape[1]), "last"))
    return replace(family(path, kind), params=params, layers=m.layers, heads=64, kv_heads=8, hidden=8192)


def places(ranks: int) -> dict[str, g.Clause]:
    """Generation on all nodes; critic and reference on one half of them, actor and judge on the other."""
    nodes, half = ranks // 8, ranks // 16

    def on(line: int, first: int, past: int, **degrees: int) -> g.Clause:
        count = 8 * (past - first)
        degrees["dp"] = count // math.prod(degrees.values())
        return g.Clause(g.MeshRef((first, past), (0, 8), at(line, 10, 9)),
                        tuple((k, v, at(line, 20 + 5 * i)) for i, (k, v) in enumerate(degrees.items())),
                        at(line, 7, 40))

    return {"gen": on(1, 0, nodes, tp=8), "score": on(2, 0, half, tp=4), "ref_lp": on(3, half, nodes, tp=4, pp=2),
            "v": on(4, 0, half, tp=8), "critic.train": on(7, half, nodes, tp=8, pp=2),
            "actor.train": on(8, 0, half, tp=8, pp=4)}


def ppo_70b(ranks: int, where: Callable[[int], dict[str, g.Clause]] = places) -> Plan:
    graph = ppo(where(ranks), cluster=g.Cluster(ranks // 8, 8, 1e6))
    grown = replace(graph, frames=tuple(replace(f, chain=tuple(
        replace(s, count=s.count * ranks) for s in f.chain)) for f in graph.frames), data=tuple(
        replace(d, options=tuple((k, v * ranks if k == "batch" else v) for k, v in d.options)) for d in graph.data))
    return api.finish(pipeline.run(place_graph(grown, "", big))).plan


def no_two_alike(ranks: int, events: int = 98) -> Plan:
    """Every rank in a separate class (its peak is another), with as many events as a step of PPO has."""
    p, buffers = grpo(), ("prompt.tokens@s", "prompt.lengths@s")
    body: list[Item] = []
    for i in range(0, events, 2):
        body += [Fetch(id=i, mesh="m", writes=buffers, data="tasks", frames=("prompt",)),
                 Free(id=i + 1, mesh="m", buffers=buffers)]
    mesh, loop = (Mesh("m", ((0, ranks),)),), (Loop("step", p.header.steps, tuple(body)),)
    return replace(p, header=replace(p.header, world=ranks, memory=0), meshes=mesh, layouts=(), models=(), groups=(),
                   functions=(), programs=(), spreads=(Spread("s", "m", granularity="all"),), body=loop,
                   classes=rank_classes(mesh, loop, ranks, {r: r for r in range(ranks)}))


def timed(plan: Plan, times: int) -> tuple[int, float]:
    """Entries of the plan, and the least CPU time of a few proofs."""
    found = []
    for _ in range(times):
        begin = time.process_time()
        entries = verify(plan).entries
        found.append((entries, time.process_time() - begin))
    return min(found)


def measure(make: Callable[[int], Plan], sizes: tuple[int, ...] = SIZES, times: int = 3
            ) -> tuple[list[tuple[int, int, float]], float]:
    """(ranks, entries, CPU seconds) of each size, and the growth exponent between the first and the last."""
    rows = [(ranks, *timed(make(ranks), times)) for ranks in sizes]
    (_, few, first), (_, many, last) = rows[0], rows[-1]
    return rows, math.log(last / first) / math.log(many / few)


def main() -> None:
    for name, make in (("PPO, 70B", ppo_70b), ("no two ranks alike", no_two_alike)):
        rows, exponent = measure(make)
        print(f"{name}: growth exponent {exponent:.2f}")
        for ranks, entries, cpu in rows:
            print(f"  {ranks:6} ranks {entries:9} entries {cpu:8.3f} s CPU {entries / cpu:12,.0f} entries/s")


if __name__ == "__main__":
    main()
