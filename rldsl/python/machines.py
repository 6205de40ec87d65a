"""Which cluster a user means.

In: a preset, a file or a `Cluster`; or the shape of a plan, where nobody named one. Out: a `Cluster`. Errors: those of
reading a cluster's file.
"""

from __future__ import annotations

import os
from dataclasses import replace

from rldsl.clusters import Cluster, find, preset
from rldsl.diag import present

Machines = str | os.PathLike[str] | Cluster
ASSUMED = "h100x8"


def machine_of(cluster: Machines) -> Cluster:
    """A cluster by its preset or file, or as it is."""
    return cluster if isinstance(cluster, Cluster) else find(os.fspath(cluster))


def assumed(ranks: int, devices: int) -> Cluster:
    """As many nodes of the preset `ASSUMED` as `ranks` ranks need, `devices` of which share a node; with more devices
    in each where a node of the plan has more."""
    cluster = present(preset(ASSUMED), f"preset {ASSUMED}")
    size = min(devices, ranks)
    nodes, gpus = -(-ranks // size), max(cluster.gpus, size)
    return replace(cluster, nodes=nodes, gpus=gpus, name=f"{ASSUMED.rpartition('x')[0]}x{nodes * gpus}")
