"""megatron-core's planner (0.16.1, `megatron.core.resharding`) on layouts of ours.

In: a case. Out: (sender, receiver, elements) of every transfer that it plans between two ranks. Its functions are
called with the metadata that its ranks would gather; modules and process groups are not needed for that. """

from __future__ import annotations

import importlib.metadata
from collections import defaultdict
from collections.abc import Iterator

import torch
from megatron.core.resharding import planner
from megatron.core.resharding.utils import ParameterMetadata, select_src_metadata_balanced

from rldsl.plan.model import Layout, Mesh
from rldsl.sharding.boxes import local_shape, parameters, pieces_of_rank
from rldsl.sharding.layout import axis_ranks
from tests.realloc.cases import Case

VERSION = importlib.metadata.version("megatron-core")


def _metadata(case: Case, at: Layout, on: Mesh) -> dict[int, dict[str, ParameterMetadata]]:
    """What each rank would tell of its parameters."""
    tp = {r: list(group) for group in axis_ranks(at, on, "tp") for r in group}
    dp = {r: list(group) for group in axis_ranks(at, on, "dp") for r in group}
    out: dict[int, dict[str, ParameterMetadata]] = defaultdict(dict)
    for p in parameters(case.model):
        for rank in on.members():
            if found := pieces_of_rank(p, case.model.layers, at, on, rank):
                split = p.spec.split
                out[rank][p.name] = ParameterMetadata(
                    name=p.name, shape=local_shape(p, found), dtype=torch.bfloat16, element_size=2,
                    is_tp=split is not None, partition_dim=split.dim if split else 0, owner_rank=rank,
                    tensor_parallel_group_ranks=tp[rank] if split else None, data_parallel_group_ranks=dp[rank],
                    resolved_name=p.name)
    return out


def moves(case: Case) -> Iterator[tuple[int, int, int]]:
    """As the loop of `build_centralized_reshard_plan`, which runs on one rank for all."""
    src, dst = _metadata(case, case.src, case.src_mesh), _metadata(case, case.dst, case.dst_mesh)
    of: dict[str, list[ParameterMetadata]] = defaultdict(list)
    for found in src.values():
        for name, meta in found.items():
            of[name].append(meta)
    for rank, wanted in dst.items():
        for name, meta in wanted.items():
            source = select_src_metadata_balanced(of[name], meta, rank)
            for sender, _, mine in planner._determine_source_ranks_for_dst_param(name, source, meta, rank):
                if sender != rank:
                    yield sender, rank, torch.Size(len(range(*s.indices(n))) for s, n in zip(mine, meta.shape)).numel()
