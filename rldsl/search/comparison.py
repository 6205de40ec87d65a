"""Why not this placement: a placement that the user proposes, compared with the best.

In: an answer, and the program with all of its calls placed. Out: a `Comparison`: predicted time and memory of both, and
for each call the time that the step would gain if that call alone were placed as in the best.
"""

from __future__ import annotations

from dataclasses import dataclass

from rldsl.clusters import Cluster
from rldsl.plan.json_output import json_output
from rldsl.plan.notation import human, seconds_text
from rldsl.search.answer import Answer
from rldsl.search.compiled_placements import compile_program
from rldsl.search.evaluator import Assignment, Evaluator
from rldsl.search.prepared_program import PreparedProgram
from rldsl.search.settings import known_families
from rldsl.search.space import Block
from rldsl.simulate import Lengths, simulate


@dataclass(frozen=True, slots=True)
class PlacedCall:
    """A call in one placement."""

    block: Block  # its ranks
    strategy: str  # as in a clause
    seconds: float  # of the call, per step


@dataclass(frozen=True, slots=True)
class Change:
    """The effect of placing one call, with all trainings of its model, as in the best placement."""

    call: str  # its name
    proposed: PlacedCall  # as the program places it
    best: PlacedCall  # as in the best placement
    gain_seconds: float  # by which the step becomes shorter
    fits: bool  # with all other calls as proposed


@dataclass(frozen=True, slots=True)
class Comparison:
    """A proposed placement and the best one."""

    seconds: float  # of a step as proposed, simulated
    bytes: int  # peak of the fullest rank as proposed
    memory: int  # bytes per device; 0: unknown
    best: float  # seconds of a step of the best
    best_bytes: int  # peak of its fullest rank
    bound: float  # seconds that no placement of the space is faster than
    changes: tuple[Change, ...]  # of single calls

    def text(self, name: str, cluster: str) -> str:
        slower = self.seconds / self.best - 1
        over = " (does not fit)" if self.memory and self.bytes > self.memory else ""
        out = [f"{name} on {cluster}", "",
               f"  proposed  {seconds_text(self.seconds):>10}  {human(self.bytes):>9} peak per rank{over}",
               f"  best      {seconds_text(self.best):>10}  {human(self.best_bytes):>9}",
               f"  bound     {seconds_text(self.bound):>10}", ""]
        verdict = f"{slower:.1%} slower than the best" if slower > 0 else (f"{-slower:.1%} faster than the best "
                                                                          "placement found")
        out += ["  as good as the best" if abs(slower) < 0.002 else f"  {verdict}", ""]
        changed = [c for c in self.changes
                   if (c.proposed.block, c.proposed.strategy) != (c.best.block, c.best.strategy)]
        if not changed:
            return "\n".join([*out[:-1], "  this is the same placement"]) + "\n"
        width = max(len(c.call) for c in changed)
        out.append("  if only this call were placed as in the best placement")
        for c in sorted(changed, key=lambda c: (-c.gain_seconds, c.call)):
            proposed, best = _placed_call_text(c.proposed), _placed_call_text(c.best)
            out.append(f"  {c.call:<{width}}  {proposed} -> {best}: {_gain_text(c)}")
            before, after = seconds_text(c.proposed.seconds), seconds_text(c.best.seconds)
            out.append(f"  {'':<{width}}  the call itself: {before} -> {after}")
        return "\n".join(out) + "\n"


def _gain_text(c: Change) -> str:
    if not c.fits:
        return "does not fit with the rest"
    if not c.gain_seconds:
        return "no difference"
    return f"{seconds_text(abs(c.gain_seconds))} {'faster' if c.gain_seconds > 0 else 'slower'}"


def _placed_call_text(s: PlacedCall) -> str:
    return f"{s.block.start}:{s.block.stop} {s.strategy}"


def compare_with_best(answer: Answer, fixed: PreparedProgram, cluster: Cluster, lengths: Lengths) -> Comparison:
    """fixed: the program with no call left free."""
    plan, bytes = compile_program(fixed.placed.graph, known_families(fixed.placed))
    evaluator, best = answer.evaluator, answer.best[0]
    proposed = _assignment(evaluator, fixed)
    now = evaluator.evaluate(proposed)
    optimum = best.evaluation.assignment
    return Comparison(simulate(plan, cluster, lengths).seconds, bytes, fixed.placed.memory, best.seconds, best.bytes,
                      answer.bound,
                      tuple(_call_change(evaluator, proposed, optimum, c, now.seconds)
                            for c in range(len(evaluator.calls))))


def _assignment(evaluator: Evaluator, fixed: PreparedProgram) -> Assignment:
    given = [fixed.fixed[j.node.id] for j in evaluator.calls]
    blocks = tuple(f.block for f in given if f.block is not None)
    entries = tuple(evaluator.table.candidate(j, f.strategy, b.size)
                    for j, f, b in zip(evaluator.calls, given, blocks, strict=True) if f.strategy)
    return Assignment(blocks, evaluator.resolve_copies(blocks, entries))


def _call_change(evaluator: Evaluator, proposed: Assignment, best: Assignment, c: int, now: float) -> Change:
    job, tied = evaluator.calls[c], evaluator.tied_calls(c)
    entries = tuple(best.candidates[k] if k in tied else e for k, e in enumerate(proposed.candidates))
    blocks = tuple(best.blocks[k] if k in tied else b for k, b in enumerate(proposed.blocks))
    then = evaluator.evaluate(Assignment(blocks, entries))
    a, b = proposed.candidates[c], best.candidates[c]
    return Change(job.name, PlacedCall(proposed.blocks[c], a.strategy.text(), a.seconds),
                  PlacedCall(best.blocks[c], b.strategy.text(), b.seconds), now - then.seconds,
                  evaluator.fits(then.bytes))


def to_json(c: Comparison) -> str:
    def side(s: PlacedCall) -> dict[str, object]:
        return {"ranks": [s.block.start, s.block.stop], "how": s.strategy, "seconds": s.seconds}

    calls = [{"call": x.call, "proposed": side(x.proposed), "best": side(x.best), "gain": x.gain_seconds,
              "fits": x.fits} for x in c.changes]
    return json_output({"format": 1, "seconds": c.seconds, "bytes": c.bytes, "best": c.best, "best_bytes": c.best_bytes,
                       "bound": c.bound, "calls": calls})
