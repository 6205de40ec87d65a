"""From how many others a rank hears where a model is divided over all ranks."""

from __future__ import annotations

from benchmarks.layouts import llama
from rldsl.plan.model import Layout, Mesh
from rldsl.reshard.planning import plan_reshard
from rldsl.reshard.rounds import num_buckets, rank_rounds


def test_a_device_hears_from_few_holders() -> None:
    """Of rows over all ranks, each device of a node gets those of its part of the ranks, and what is small with
    them."""
    every, made = Mesh("m", ((0, 64),)), llama(512, 4, 8, 8, 1024, 4096)
    src, dst = Layout("s", "m", dp=32, tp=2, zero=3), Layout("d", "m", dp=64)
    way = plan_reshard(made, src, every, dst, every, 8)
    parts = num_buckets(way, 2)
    most = max(len(r.sends) + len(r.receives) for rank in (0, 13, 63) for r in rank_rounds(way, rank, parts))
    assert 0 < most <= 2 * (64 // 8 + 7 + 2)  # holders, the node, a tree
