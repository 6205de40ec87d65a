"""Arithmetic of the plan: typed straight-line programs over ragged batches.

A `Program` is what remains of `fn`s, `loss`es and flow expressions after the compiler has inlined them. The compiler
writes it, `runtime/interpreter/expression_programs.py` runs it with torch, and it travels inside the plan as JSON.

Levels, coarse to fine: `batch` < `prompt` < `seq` < `token`. A node's `space` says which index set it ranges over:
"" at batch level, a prompt space at prompt level, a row space at seq level, a frame at token level. Arithmetic
broadcasts a coarser argument to the finer level through the frame's row and prompt indices; it never goes coarser
without a reduction.

Token-level arrays hold one entry for each *response* token (generated, or supervised), sequence after sequence.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Level = Literal["batch", "prompt", "seq", "token"]
LEVELS: tuple[Level, ...] = ("batch", "prompt", "seq", "token")

Scalar = float | int | bool | str

# Every operator: name -> (number of arguments, meaning). The evaluator implements exactly these.
ELEMENTWISE: dict[str, tuple[int, str]] = {
    "add": (2, "a + b"), "sub": (2, "a - b"), "mul": (2, "a * b"), "div": (2, "a / b"), "neg": (1, "-a"),
    "pow": (2, "a ** b"),
    "lt": (2, "a < b"), "le": (2, "a <= b"), "gt": (2, "a > b"), "ge": (2, "a >= b"), "eq": (2, "a == b"),
    "ne": (2, "a != b"), "and": (2, "both"), "or": (2, "either"), "not": (1, "negation"),
    "exp": (1, "e ** a"), "log": (1, "natural logarithm"), "expm1": (1, "e ** a - 1, exact near 0"),
    "log1p": (1, "log(1 + a), exact near 0"), "sqrt": (1, "square root"), "abs": (1, "magnitude"),
    "min": (2, "the smaller"), "max": (2, "the larger"),
    "sigmoid": (1, "1 / (1 + exp(-a))"), "logsigmoid": (1, "log(sigmoid(a)), stable"),
    "where": (3, "b where a else c"), "stop_gradient": (1, "a as a constant"),
}
# Reductions: attribute `to` is the level reached ("batch" reduces over all ranks).
REDUCTIONS: dict[str, tuple[int, str]] = {
    "sum": (1, "sum of a over what is finer than `to`"), "mean": (1, "mean over the elements of a"),
    "amax": (1, "largest"), "amin": (1, "smallest"), "count": (1, "number of elements of a"),
    "quantile": (2, "to batch alone: the number below which the share b of the elements of a lies, between neighbours "
                    "by linear interpolation"),
}
# Sequence operators work inside each sequence.
SEQUENCE: dict[str, tuple[int, str]] = {
    "next": (1, "token -> token: the following token's value, 0 at the last"),
    "prev": (1, "token -> token: the preceding token's value, 0 at the first"),
    "last": (1, "token -> seq: the value at the last token, 0 for an empty sequence"),
    "at_end": (1, "seq -> token: the value at the last token, 0 elsewhere; attribute `frame`"),
    "cumsum": (1, "token -> token: inclusive running sum"),
    "discount": (2, "token, batch -> token: y_t = x_t + g * y_{t+1}"),
    "len": (0, "seq: number of response tokens; attribute `frame`"),
}
# Random: a number in (0, 1) for each element, drawn from the seed, the step, `call` (which call of the program), the
# row and the position of the element. attributes `call`, `frame` (at token level).
RANDOM = ("uniform",)
# What a loss cannot use: it is not a sum over micro-batches.
FLOW_ONLY = ("py", "quantile", "uniform")
# Leaves: `input` (attribute `name`), `const` (attribute `value`), and `py` (a user's Python function;
# attributes `function` = a key of Plan.functions, `frame` = the sequences whose rows it is called with).
LEAVES = ("input", "const", "py")


@dataclass(frozen=True, slots=True)
class Node:
    """One value of a program. `args` are indices of earlier nodes."""

    op: str
    args: tuple[int, ...] = ()
    level: Level = "batch"
    space: str = ""
    attrs: tuple[tuple[str, Scalar], ...] = ()

    def attr(self, name: str, default: Scalar | None = None) -> Scalar | None:
        return dict(self.attrs).get(name, default)


@dataclass(frozen=True, slots=True)
class Program:
    """Nodes in an order in which arguments come first, and the named results.

    For a loss, outputs are "loss" (batch level; affine in batch-level reductions, checked by the compiler, so that
    each micro-batch may add its local sum over the global count), one per `metric`, and, if the loss can stop
    training early, "stop": a condition at batch level, over the whole minibatch.
    """

    id: str
    nodes: tuple[Node, ...]
    outputs: tuple[tuple[str, int], ...]
    at: str = ""

    def inputs(self) -> tuple[str, ...]:
        return tuple(str(n.attr("name")) for n in self.nodes if n.op == "input")
