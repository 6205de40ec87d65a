"""Arithmetic of the plan: typed straight-line programs over ragged batches.

A `Program` is what remains of `fn`s, `loss`es and flow expressions after the compiler has inlined them. The compiler
writes it, and it travels inside the plan as JSON. In `runtime/interpreter`, `expression_programs.py` runs those of flow
expressions, `minibatch_loss.py` and `whole_minibatch.py` those of losses.

Levels, coarse to fine: `batch` < `prompt` < `seq` < `turn` < `token` < `entry`. A node's `space` says which index set
it ranges over: "" at batch level, a prompt space at prompt level, a row space at seq level, a frame at turn and token
level, and at entry level what `plan/entries.py` says.
Arithmetic broadcasts a coarser argument to the finer level through the frame's row and prompt indices; it never goes
coarser without a reduction. The operators are those of `operators.py`.

Token-level arrays hold one entry for each *response* token (generated, or supervised), sequence after sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

Level = Literal["batch", "prompt", "seq", "turn", "token", "entry"]
LEVELS: tuple[Level, ...] = ("batch", "prompt", "seq", "turn", "token", "entry")

Scalar = float | int | bool | str


@dataclass(frozen=True, slots=True)
class Node:
    """One value of a program."""

    op: str  # its operator, of `operators.py`
    args: tuple[int, ...] = ()  # indices of earlier nodes
    level: Level = "batch"  # of its value
    space: str = ""  # the index set that it ranges over; "" at batch level
    attrs: tuple[tuple[str, Scalar], ...] = ()  # (name, value), as the operator defines them

    def attr(self, name: str, default: Scalar | None = None) -> Scalar | None:
        return dict(self.attrs).get(name, default)


@dataclass(frozen=True, slots=True)
class Program:
    """Nodes in an order in which arguments come first, and the named results.

    For a loss, outputs are "loss" (batch level), one per `metric`, and, if the loss can stop training early, "stop": a
    condition at batch level, over the whole minibatch. Without a first pass (`payloads.TrainSpec`), "loss" is affine in
    batch-level reductions, so that each micro-batch may add its local sum over the global count.
    """

    id: str  # unique in a plan
    nodes: tuple[Node, ...]  # arguments come before the nodes that use them
    outputs: tuple[tuple[str, int], ...]  # (name, index of a node)
    at: str = ""  # where it is in the source, "file:line:column"

    def inputs(self) -> tuple[str, ...]:
        return tuple(str(n.attr("name")) for n in self.nodes if n.op == "input")


def nodes_under(nodes: Sequence[Node], roots: Iterable[int], args: Callable[[Node], Sequence[int]] = lambda n: n.args
                ) -> set[int]:
    """`roots` and all that they are made of. args: the arguments of a node that count."""
    found: set[int] = set()
    waiting = list(roots)
    while waiting:
        if (i := waiting.pop()) not in found:
            found.add(i)
            waiting += args(nodes[i])
    return found
