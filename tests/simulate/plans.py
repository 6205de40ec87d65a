"""Plans to simulate: ReaL's PPO placed by hand, its ranks multiplied, and clusters whose numbers are round."""

from __future__ import annotations

from dataclasses import replace

from rldsl import api
from rldsl.clusters import Cluster
from rldsl.graph import model as g
from rldsl.passes import pipeline
from rldsl.placement.place import place_graph
from rldsl.plan.model import Plan, Ranges
from tests.compiler.graphs import family, on, ppo

ROUND = Cluster(gpus=8, nodes=64, name="round", bfloat16_tflops=1e-3, float32_tflops=1e-3, memory_gb_s=1.0,
                link_gb_s=0.1, network_gb_s=0.01, link_us=10.0, network_us=20.0, host_gb_s=1.0, disk_gb_s=1.0,
                kernel_us=1.0, event_us=10.0, row_us=1.0)
PLACES: dict[str, dict[str, g.Clause] | None] = {
    "real": None,
    "together": {},
    "tensors": {"gen": on(1, 0, 8, dp=4, tp=2), "actor.train": on(8, 0, 8, dp=2, tp=2, pp=2),
                "critic.train": on(7, 0, 4, tp=4)},
    "apart": {"gen": on(1, 0, 4, dp=4), "score": on(2, 4, 5), "ref_lp": on(3, 5, 6), "v": on(4, 6, 8, dp=2),
              "critic.train": on(7, 6, 8, dp=2), "actor.train": on(8, 0, 4, pp=4)},
}


def plan(name: str = "real") -> Plan:
    return api.finish(pipeline.run(place_graph(ppo(PLACES[name]), "", family))).plan


def scaled(found: Plan, k: int) -> Plan:
    """k times as many ranks and rows, all of them in dp."""
    def ranks(r: Ranges) -> Ranges:
        return tuple((a * k, b * k) for a, b in r)

    return replace(
        found, header=replace(found.header, world=found.header.world * k),
        meshes=tuple(replace(m, ranks=ranks(m.ranks)) for m in found.meshes),
        layouts=tuple(replace(x, dp=x.dp * k) for x in found.layouts),
        spaces=tuple(replace(s, count=s.count * k) for s in found.spaces),
        classes=tuple(replace(c, ranks=ranks(c.ranks)) for c in found.classes))
