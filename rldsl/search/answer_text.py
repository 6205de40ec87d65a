"""An answer as text for a person, and as JSON for a program.

In: an answer. Out: a table of what is found: each call with what it costs and why it stands so; then the next best.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from rldsl.plan.notation import human, seconds_text
from rldsl.search.answer import Answer
from rldsl.search.call_costs import Candidate
from rldsl.search.compiled_placements import CompiledPlacement
from rldsl.search.evaluator import Assignment, Evaluator
from rldsl.search.space import Block

LISTED = 3  # placements, the best among them


@dataclass(frozen=True, slots=True)
class CallRow:
    """One call of a placement. because: what the nearest other strategy on the same ranks would make of the step."""

    call: str
    block: Block
    how: str
    seconds: float
    bytes: int
    because: str


def call_rows(i: Evaluator, a: Assignment, outcomes: Mapping[Assignment, str] = MappingProxyType({})
              ) -> Iterator[CallRow]:
    """outcomes: of `Answer`."""
    now = i.judge(a)
    for c, (job, block, e) in enumerate(zip(i.calls, a.blocks, a.entries, strict=True)):
        yield CallRow(job.name, block, e.strategy.text(), e.seconds, e.resident + e.active, 
                      _next_best_text(i, a, c, now.seconds, outcomes))


def _next_best_text(i: Evaluator, a: Assignment, c: int, now: float, outcomes: Mapping[Assignment, str]) -> str:
    """What the best of the other layouts would do instead."""
    job = i.calls[c]
    if job.number in i.problem.fixed and i.problem.fixed[job.number].strategy is not None:
        return "as in the program"
    neighbors = list(i.neighbors(a, c))
    others = [(then.seconds, e, then.assignment) for e, then in neighbors if i.fits(then.bytes)]
    if not others:
        full = len(neighbors)
        return f"{full} other layouts do not fit with the rest" if full else "the only layout that fits"
    least, e, assignment = min(others, key=lambda x: (x[0], x[1].strategy))
    longer = least - now
    if longer >= 0:
        return f"next: {e.strategy.text()}, +{seconds_text(longer)}"
    return (f"next: {e.strategy.text()}, estimated {seconds_text(-longer)} faster, but "
            f"{outcomes.get(assignment, 'not simulated')}")


def format_answer(answer: Answer, name: str, cluster: str, profile: str) -> str:
    """profile: from where the times are."""
    best, i = answer.best[0], answer.instance
    memory = f" of {human(answer.problem.memory)}" if answer.problem.memory else ""
    out = [f"{name} on {cluster}: {answer.problem.world} ranks", "",
           f"  step   {seconds_text(best.seconds):>10}      {best.timeline.tokens_per_second:,.0f} tokens/s      "
           f"{human(best.bytes)}{memory} peak per rank"]
    if answer.result.bound:
        out.append(f"  bound  {seconds_text(answer.bound):>10}      gap {answer.gap:.2%}      "
                   f"{answer.result.parts} parts of the space: {end_text(answer)}")
    out += [f"  times  {profile}", "", *table_lines(i, best, answer.outcomes), ""]
    if len(answer.best) > 1:
        out.append("  next best")
        for other in answer.best[1:LISTED]:
            out.append(f"  {seconds_text(other.seconds):>10}  {'; '.join(differences(best, other, i))}")
    return "\n".join(line.rstrip() for line in out) + "\n"


def end_text(answer: Answer) -> str:
    """Why the search ended, and why the gap may be larger than the one that was asked for."""
    if not answer.result.complete:
        return "stopped by --seconds or after the most parts that are searched"
    if answer.gap <= answer.accepted_gap:
        return f"within the accepted gap of {answer.accepted_gap:.2%}"
    return (f"within the accepted gap of {answer.accepted_gap:.2%} before simulation, which adds "
            f"{answer.gap - answer.result.gap:.2%}")


def table_lines(i: Evaluator, one: CompiledPlacement, outcomes: Mapping[Assignment, str] = MappingProxyType({})
                ) -> Iterator[str]:
    found = list(call_rows(i, one.judged.assignment, outcomes))
    width = max(len(x.call) for x in found)
    how = max(len(x.how) for x in found)
    yield f"  {'call':<{width}}  {'ranks':<11}  {'how':<{how}}  {'seconds':>9}  {'memory':>9}  why"
    for x in found:
        ranks = f"{x.block.start}:{x.block.stop}"
        yield (f"  {x.call:<{width}}  {ranks:<11}  {x.how:<{how}}  {seconds_text(x.seconds):>9}  {human(x.bytes):>9}  "
               f"{x.because}")
    moves = i.copies(one.judged.assignment.blocks, one.judged.assignment.entries)
    for c, move in ((c, m) for c, (m, _) in sorted(moves.items()) if m.bytes):
        yield (f"  {i.calls[c].name:<{width}}  new parameters: {human(move.bytes)} to the busiest rank in "
               f"{seconds_text(move.before + move.seconds + move.after)}")


def differences(best: CompiledPlacement, other: CompiledPlacement, i: Evaluator) -> list[str]:
    """The calls that stand elsewhere, or otherwise."""
    a, b = best.judged.assignment, other.judged.assignment
    return [f"{job.name} on {y.start}:{y.stop} {f.strategy.text()}"
            for job, x, e, y, f in zip(i.calls, a.blocks, a.entries, b.blocks, b.entries, strict=True)
            if (x, e.strategy) != (y, f.strategy)]


def to_json(answer: Answer, cluster: str) -> str:
    i = answer.instance
    return json.dumps({
        "format": 1, "cluster": cluster, "bound": answer.bound, "gap": answer.gap, "parts": answer.result.parts,
        "complete": answer.result.complete,
        "best": [{"seconds": one.seconds, "bytes": one.bytes, "calls": [
            {"call": x.call, "ranks": [x.block.start, x.block.stop], "how": x.how, "seconds": x.seconds,
             "bytes": x.bytes, "why": x.because} for x in call_rows(
                i, one.judged.assignment, answer.outcomes if one is answer.best[0] else {})]} for one in answer.best[:LISTED]],
    }, indent=1)
