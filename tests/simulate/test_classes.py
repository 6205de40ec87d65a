"""Classes of ranks where the calls' pipelines and groups are of many sizes."""

from __future__ import annotations

import pytest

from benchmarks.verify import ppo_70b
from rldsl.clusters import preset
from rldsl.graph import model as g
from rldsl.plan.events import Log
from rldsl.plan.projection import event_paths
from rldsl.simulate import Lengths
from rldsl.simulate import classes as module
from rldsl.simulate.classes import build_classes
from rldsl.simulate.simulate import run
from rldsl.simulate.world import World
from tests.compiler.graphs import at


def mixed(ranks: int) -> dict[str, g.Clause]:
    """Two halves, on which stages are of many sizes."""
    half, nodes = ranks // 2, ranks // 8

    def on(line: int, first: int, past: int, **degrees: int) -> g.Clause:
        return g.Clause(g.MeshRef((first, past), (0, 8), at(line, 10, 9)),
                        tuple((k, v, at(line, 20 + 5 * i)) for i, (k, v) in enumerate(degrees.items())), at(line, 7, 40))

    return {"gen": on(1, 0, nodes, dp=half, tp=2), "score": on(2, 0, nodes, dp=ranks // 16, tp=2, pp=8),
            "ref_lp": on(3, nodes // 2, nodes, dp=half // 8, tp=2, pp=4), "v": on(4, 0, nodes // 2, dp=half // 16, pp=16),
            "critic.train": on(7, 0, nodes // 2, dp=half // 4, tp=4, zero=3),
            "actor.train": on(8, nodes // 2, nodes, dp=half // 4, tp=4, zero=3)}


def test_ranks_that_log_do_not_tell_all_others_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step takes the same time, to a thousandth, as when every rank is looked at."""
    plan, cluster = ppo_70b(64, mixed), preset("h100x64")
    assert cluster is not None and any(isinstance(e, Log) for e, _ in event_paths(plan))
    every = len(build_classes(plan).first)
    monkeypatch.setattr(module, "MAX_CLASSES", every - 1)
    assert 2 * len(build_classes(plan).first) <= every
    one, all_ = (run(World(plan, cluster, Lengths(), per_rank=per_rank)) for per_rank in (False, True))
    assert one.seconds == pytest.approx(all_.seconds, rel=1e-3)
