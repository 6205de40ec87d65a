"""Why not this placement: one that the user proposes, beside the best.

In: an answer, and the program with all of its calls placed. Out: a `Comparison`: predicted time and memory of both, and
for each call what the step would gain if it alone stood as in the best.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

from rldsl.clusters import Cluster
from rldsl.plan.notation import human, seconds_text
from rldsl.search.answer import Answer
from rldsl.search.compiled_placements import compile_program
from rldsl.search.evaluator import Assignment, Evaluator
from rldsl.search.prepared_program import PreparedProgram, known_families
from rldsl.search.space import Block
from rldsl.simulate import Lengths, simulate


@dataclass(frozen=True, slots=True)
class PlacedCall:
    """A call as one placement has it."""

    block: Block
    how: str
    seconds: float


@dataclass(frozen=True, slots=True)
class Change:
    """mine: as proposed. gain: seconds of a step, if this call (with all trainings of its model) stood as in the
    best."""

    call: str
    mine: PlacedCall
    best: PlacedCall
    gain: float
    fits: bool


@dataclass(frozen=True, slots=True)
class Comparison:
    """seconds: simulated, of the proposed placement; bytes: of its fullest rank."""

    seconds: float
    bytes: int
    memory: int
    best: float
    best_bytes: int
    bound: float
    changes: tuple[Change, ...]

    def text(self, name: str, cluster: str) -> str:
        slower = self.seconds / self.best - 1
        over = " (does not fit)" if self.memory and self.bytes > self.memory else ""
        out = [f"{name} on {cluster}", "",
               f"  proposed  {seconds_text(self.seconds):>10}  {human(self.bytes):>9} peak per rank{over}",
               f"  best      {seconds_text(self.best):>10}  {human(self.best_bytes):>9}",
               f"  bound     {seconds_text(self.bound):>10}", ""]
        judged = f"{slower:.1%} slower than the best" if slower > 0 else (f"{-slower:.1%} faster than the best "
                                                                          "placement found")
        out += ["  as good as the best" if abs(slower) < 0.002 else f"  {judged}", ""]
        changed = [c for c in self.changes if (c.mine.block, c.mine.how) != (c.best.block, c.best.how)]
        if not changed:
            return "\n".join([*out[:-1], "  it is the same placement"]) + "\n"
        width = max(len(c.call) for c in changed)
        out.append("  if one call were placed as in the best")
        for c in sorted(changed, key=lambda c: (-c.gain, c.call)):
            out.append(f"  {c.call:<{width}}  {_placed_call_text(c.mine)} -> {_placed_call_text(c.best)}: {_gain_text(c)}")
            before, after = seconds_text(c.mine.seconds), seconds_text(c.best.seconds)
            out.append(f"  {'':<{width}}  the call itself: {before} -> {after}")
        return "\n".join(out) + "\n"


def _gain_text(c: Change) -> str:
    if not c.fits:
        return "does not fit with the rest"
    return f"{seconds_text(abs(c.gain))} {'faster' if c.gain > 0 else 'slower'}" if c.gain else "no difference"


def _placed_call_text(s: PlacedCall) -> str:
    return f"{s.block.start}:{s.block.stop} {s.how}"


def compare_with_best(answer: Answer, fixed: PreparedProgram, cluster: Cluster, lengths: Lengths) -> Comparison:
    """fixed: the program with no call left free."""
    plan, bytes = compile_program(fixed.placed.graph, known_families(fixed.placed))
    i, best = answer.instance, answer.best[0]
    mine = _assignment(i, fixed)
    now = i.judge(mine)
    there = best.judged.assignment
    return Comparison(simulate(plan, cluster, lengths).seconds, bytes, fixed.placed.memory, best.seconds, best.bytes,
                      answer.bound, tuple(_call_change(i, mine, there, c, now.seconds) for c in range(len(i.calls))))


def _assignment(i: Evaluator, fixed: PreparedProgram) -> Assignment:
    asked = [fixed.fixed[j.node.id] for j in i.calls]
    blocks = tuple(f.block for f in asked if f.block is not None)
    entries = tuple(i.table.cost(j, f.strategy, b.size)
                    for j, f, b in zip(i.calls, asked, blocks, strict=True) if f.strategy)
    return Assignment(blocks, i.resolved(blocks, entries))


def _call_change(i: Evaluator, mine: Assignment, best: Assignment, c: int, now: float) -> Change:
    job, alike = i.calls[c], i.alike(c)
    entries = tuple(best.entries[k] if k in alike else e for k, e in enumerate(mine.entries))
    blocks = tuple(best.blocks[k] if k in alike else b for k, b in enumerate(mine.blocks))
    then = i.judge(Assignment(blocks, entries))
    a, b = mine.entries[c], best.entries[c]
    return Change(job.name, PlacedCall(mine.blocks[c], a.strategy.text(), a.seconds),
                  PlacedCall(best.blocks[c], b.strategy.text(), b.seconds), now - then.seconds, i.fits(then.bytes))


def to_json(c: Comparison) -> str:
    side = lambda s: {"ranks": [s.block.start, s.block.stop], "how": s.how, "seconds": s.seconds}  # noqa: E731
    return json.dumps({"format": 1, "seconds": c.seconds, "bytes": c.bytes, "best": c.best, "best_bytes": c.best_bytes,
                       "bound": c.bound, "calls": [{"call": x.call, "proposed": side(x.mine), "best": side(x.best),
                                                    "gain": x.gain, "fits": x.fits} for x in c.changes]}, indent=1)
