"""How many minibatches a `train` call makes: given as `minibatches=`, or by the size of one, `minibatch=`.

In: the options of the call and the batch. Out: a count that divides the rows of the batch evenly. A size is in rows:
sequences, or pairs for pairs; given in prompts, it means all sequences of that many. Of generated pairs it is the
most that a minibatch has: some may be absent, and those that are there are divided evenly. In tokens it is the most
that a minibatch has, and how many there are depends on the lengths of the rows (`plan/spaces.py` bounds it).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isqrt
from typing import cast

from rldsl.diag import counted
from rldsl.plan.spaces import IndexedFrame, most_minibatches, unit_tokens
from rldsl.semantics.errors import Bad
from rldsl.semantics.expressions import ExpressionBuilder
from rldsl.semantics.levels import source_name
from rldsl.semantics.options import Value, unit_of
from rldsl.semantics.scope import Scope
from rldsl.semantics.units import differ
from rldsl.semantics.values import FrameRef
from rldsl.syntax import ast

# contents -> units of a size; several answers to each prompt count as generated ones
UNITS = {"generated": ("sequences", "prompts"), "answers": ("sequences",), "pairs": ("pairs",)}  # the first is a row


@dataclass(frozen=True, slots=True)
class Minibatches:
    """Into what the rows of a `train` call are divided."""

    count: int  # how many there are; 0: it follows from their size in tokens
    tokens: int = 0  # of each, at most; 0: any number

    def most(self, frames: Sequence[IndexedFrame], whole_prompts: bool) -> int:
        """How many there are, at most."""
        if not self.tokens:
            return self.count
        units = frames[0].count // (frames[0].per_prompt if whole_prompts else 1)
        return most_minibatches(units, max(1, unit_tokens(frames, whole_prompts)), self.tokens)


def minibatches(call: ast.Call, given: Mapping[str, Value], batch: FrameRef, exprs: ExpressionBuilder,
                scope: Scope) -> Minibatches | Bad:
    """Errors: RL0205 does not divide, RL0213 the size of the batch is not known, RL0215 both options, RL0218 unit."""
    size = cast("int | None", given["minibatch"])
    args = {a.name.name: a for a in call.args if a.name is not None}
    frame, add = batch.frame, exprs.errors.add
    if size is None:
        count = cast(int, given["minibatches"])
        if count > frame.count and not frame.present_in:
            return add("RL0205", f"`{source_name(frame)}` has {counted(frame.count, 'row')}, "
                       f"too few for {count} minibatches", args["minibatches"].value.span,
                       help=f"`minibatches` is at most {frame.count} here")
        return Minibatches(count)
    tree = args["minibatch"]
    if "minibatches" in args:
        return add("RL0215", "`minibatch` and `minibatches` cannot be combined", tree.span,
                   help="give one of them: `minibatch` is the size, `minibatches` the number")
    if unit_of(tree.value, exprs, scope) == "tokens":
        return Minibatches(0, size)
    legal = UNITS["pairs" if batch.paired else "generated" if len(frame.chain) > 1 else batch.contents]
    if exprs.spaces.ungrouped_by(frame.row_space):
        legal = legal[:1]
    unit = unit_of(tree.value, exprs, scope) or legal[0]
    if all(differ(unit, u) for u in legal):
        return add("RL0218", f"`minibatch` of `{source_name(frame)}` counts {', '.join(legal)} or tokens, not {unit}",
                   tree.value.span, f"this is in {unit}", help=f"give it in {legal[0]}")
    if frame.present_in and not batch.paired:
        return add("RL0213", "`minibatch` needs a batch of known size", tree.value.span,
                   f"the number of sequences in `{source_name(frame)}` is known only at run time",
                   help="give the number of minibatches instead: `minibatches=4`")
    rows = frame.count // frame.per_prompt if unit == "prompts" else frame.count
    if rows % size:
        return add("RL0205",
                   f"a minibatch of {size} {unit} does not divide the {rows} {unit} of `{source_name(frame)}`",
                   tree.value.span, help=f"nearest divisors: {' or '.join(map(str, _nearest(rows, size)))}")
    return Minibatches(rows // size)


def whole_prompts(call: ast.Call, count: int, batch: FrameRef, why: str, exprs: ExpressionBuilder) -> bool:
    """Whether the prompts of a batch can be divided into `count` minibatches (0: by tokens), each with all of its
    sequences; else an error. why: what of the loss needs that."""
    frame = batch.frame
    prompts = frame.count // frame.per_prompt
    by_size = next((a for a in call.args if a.name is not None and a.name.name in ("minibatch", "minibatches")), None)
    if not count or by_size is None or count <= prompts and (not prompts % count or frame.present_in):
        return True
    exprs.errors.add("RL0205", f"{count} minibatches of {counted(prompts, 'prompt')} cannot have all sequences of each "
                     "prompt", by_size.value.span, f"this loss needs them: {why}",
                     help=f"the number of minibatches must divide the {counted(prompts, 'prompt')} of "
                          f"`{source_name(frame)}`")
    return False


def _nearest(rows: int, size: int) -> list[int]:
    """The largest divisor of `rows` below `size` and the smallest above it (exact up to 10^12 rows)."""
    small = [d for d in range(1, min(isqrt(rows), 1_000_000) + 1) if rows % d == 0]
    divisors = sorted({*small, *(rows // d for d in small)})
    return [d for d in divisors if d < size][-1:] + [d for d in divisors if d > size][:1]
