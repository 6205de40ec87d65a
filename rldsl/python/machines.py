"""Which cluster a user means.

In: a preset, a file or a `Cluster`; or a number of ranks, where nobody named one. Out: a `Cluster`. Errors: those of
reading a cluster's file.
"""

from __future__ import annotations

import os

from rldsl.clusters import Cluster, find, preset

Machines = str | os.PathLike[str] | Cluster
ASSUMED = "h100x8"


def machine_of(cluster: Machines) -> Cluster:
    """A cluster by its preset or file, or as it is."""
    return cluster if isinstance(cluster, Cluster) else find(os.fspath(cluster))


def assumed(ranks: int) -> Cluster:
    """As many nodes of the preset `ASSUMED` as so many ranks need."""
    kind, _, gpus = ASSUMED.rpartition("x")
    found = preset(f"{kind}x{-(-ranks // int(gpus)) * int(gpus)}")
    assert found is not None
    return found
