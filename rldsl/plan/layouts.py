"""Meshes, and how parameters and rows are divided over their ranks: the tables of a plan that say who holds what.

A *layout* shards the parameters of a model. A *spread* shards rows: it says which rows each dp rank of a layout works
on (a dp rank is the tp * cp * pp ranks that work on the same rows). The partition is a pure function of the spread and
the row lengths (`sharding/partition.py`), so that every rank computes the same one.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain
from typing import Literal

DEFAULT_BACKEND = "torch"  # of a layout that names none

Ranges = tuple[tuple[int, int], ...]  # half-open [start, stop), in order


@dataclass(frozen=True, slots=True)
class Mesh:
    """An ordered set of ranks."""

    id: str  # unique in a plan
    ranks: Ranges  # in the order of the mesh

    def members(self) -> tuple[int, ...]:
        return tuple(chain.from_iterable(range(start, stop) for start, stop in self.ranks))

    @property
    def size(self) -> int:
        """Number of ranks."""
        return sum(stop - start for start, stop in self.ranks)


@dataclass(frozen=True, slots=True)
class Layout:
    """Parallel degrees on a mesh; dp * tp * pp * cp = size of the mesh. Coordinates run pp slowest, then dp, cp, and tp
    fastest (`sharding/layout.py`).

    The levels of `zero` are those of Rajbhandari et al. 2020 (arXiv:1910.02054). Between minibatches every level shards
    parameters, gradients and optimizer state over dp (`sharding/boxes.py`). During a minibatch gradients are whole with
    1 and sharded with 2 and 3; parameters are whole with 1 and 2, and gathered layer by layer with 3."""

    id: str  # unique in a plan
    mesh: str  # id
    dp: int = 1  # data parallelism
    tp: int = 1  # tensor parallelism
    pp: int = 1  # pipeline stages
    cp: int = 1  # context parallelism
    # divides dp: ep neighboring ranks along dp share the experts of each layer, and together have all of them
    ep: int = 1
    # of a layout that a model is trained under: what is sharded over dp during a minibatch (see above). 0: nothing is
    # sharded at any time
    zero: int = 0
    # of a layout that a model is trained under: chunks of layers per stage (`sharding/pipeline_schedule.py`)
    vpp: int = 1
    backend: str = DEFAULT_BACKEND  # that computes (`plan/backends.py`); what a rank holds does not depend on it

    def __hash__(self) -> int:
        """Cheap: layouts are the keys of many caches."""
        return hash((self.id, self.zero))


@dataclass(frozen=True, slots=True)
class Spread:
    """How the rows of frames are divided over the dp ranks of a layout. A buffer `value@spread` is held, for the rows
    of a dp rank, by each of its ranks.

    A training spread first divides rows into minibatches by (seed, step, call, epoch, row), and by the lengths of rows
    where minibatches have a size in tokens, then each minibatch over the dp ranks."""

    id: str  # unique in a plan
    mesh: str  # id
    layout: str = ""  # id; "" with granularity "all"
    # ids; the rows of all of them are divided alike, balanced by all their lengths. They share a prompt space
    # (granularity "prompt") or a row space (granularity "row")
    frames: tuple[str, ...] = ()
    # what stays together: a sequence, all sequences of a prompt, or everything (every rank of the mesh holds every row)
    granularity: Literal["row", "prompt", "all"] = "row"
    # count: equal numbers in contiguous runs; tokens: balanced by the cost of sequences, a function of their token
    # counts (`sharding/balance.py`); slot: equal numbers of the row numbers 0..count-1, whether a row is present or
    # not (the same in each iteration of a frame with several)
    balance_by: Literal["count", "tokens", "slot"] = "tokens"
    minibatches: int = 1  # per epoch
    epochs: int = 1  # per call
    shuffle: bool = False  # rows are divided into minibatches at random
    call: int = 0  # which of the `train` calls of its model, from 0: each divides at random in its own way
    # 0: each minibatch is divided over the dp ranks. Else into how many leaves it is divided first, the same number
    # under every degree, of which a dp rank has consecutive ones (`sharding/gradient_leaves.py`)
    leaves: int = 0
    # the most tokens of a minibatch, which takes rows in order until the next one does not fit; then `minibatches` is
    # the most there can be (`plan/spaces.py`), and the last ones are empty. 0: all have the same number of rows
    minibatch_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Group:
    """A communicator. The runtime creates them at start-up, in the order of these records."""

    id: str  # unique in a plan
    # of a layout: one group for each combination of the other coordinates. ep: ranks along dp that divide the experts
    # among themselves; expert_dp: ranks along dp that hold the same experts; mesh: all ranks of `mesh`
    axis: Literal["tp", "pp", "dp", "cp", "ep", "expert_dp", "mesh"]
    layout: str = ""  # id; "" for axis "mesh"
    mesh: str = ""  # id; "" for the axes of a layout
