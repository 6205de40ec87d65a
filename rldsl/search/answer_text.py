"""An answer as text, and as JSON.

In: an answer. Out: a table of the best placement, each call with its cost and the reason for its strategy; then the
next best placements."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from rldsl.diag import counted
from rldsl.plan.json_output import json_output
from rldsl.plan.notation import human, seconds_text
from rldsl.search.answer import Answer
from rldsl.search.branch_and_bound import NUM_NODES, WIDE_GAP
from rldsl.search.compiled_placements import CompiledPlacement
from rldsl.search.evaluator import Assignment, Evaluation, Evaluator
from rldsl.search.space import Block

NUM_LISTED = 3  # placements, the best among them
NO_OUTCOMES: Mapping[Assignment, str] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class CallRow:
    """One call of a placement."""

    call: str  # its name
    block: Block  # its ranks
    strategy: str  # as in a clause
    seconds: float  # of the call, per step
    bytes: int  # resident and active
    reason: str  # what the step would take with the next best strategy on the same ranks, as estimated; "": not asked


def call_rows(evaluator: Evaluator, a: Assignment, outcomes: Mapping[Assignment, str] | None = NO_OUTCOMES
              ) -> Iterator[CallRow]:
    """outcomes: as `Answer.outcomes`; None: without reasons."""
    now = evaluator.evaluate(a)
    for c, (job, block, e) in enumerate(zip(evaluator.calls, a.blocks, a.candidates, strict=True)):
        yield CallRow(job.name, block, e.strategy.text(), e.seconds, e.resident_bytes + e.active_bytes,
                      "" if outcomes is None else _next_best_text(evaluator, a, c, now, outcomes))


def _next_best_text(evaluator: Evaluator, a: Assignment, c: int, now: Evaluation,
                    outcomes: Mapping[Assignment, str]) -> str:
    """The step with the best of the other layouts of one call. now: the step as it is."""
    job = evaluator.calls[c]
    if job.number in evaluator.problem.fixed and evaluator.problem.fixed[job.number].strategy is not None:
        return "as in the program"
    neighbors = list(evaluator.neighbors(a, c))
    fastest = evaluator.fastest_neighbor(sorted(neighbors, key=lambda n: n.candidate.strategy))
    if fastest is None:
        return f"{len(neighbors)} other layouts do not fit with the rest" if neighbors else "the only layout that fits"
    e, found = fastest[0].candidate, fastest[1]
    longer, how = found.seconds - now.seconds, e.strategy.text()
    if now.keeps_copies and not found.keeps_copies:
        how += ", with keep=false for every copy"
    if longer >= 0:
        return f"next: {how}, +{seconds_text(longer)}"
    return (f"next: {how}, estimated {seconds_text(-longer)} faster, but "
            f"{outcomes.get(found.assignment, 'not simulated')}")


def format_answer(answer: Answer, name: str, cluster: str, profile: str, stopped_by: str = "") -> str:
    """name, cluster: of the program and the cluster. profile: where the times come from. stopped_by: "--seconds" or
    "Ctrl-C", which ended the search."""
    best, evaluator = answer.best[0], answer.evaluator
    memory = f" of {human(answer.problem.memory)}" if answer.problem.memory else ""
    out = [f"{name} on {cluster}: {counted(answer.problem.world, 'rank')}", "",
           f"  step   {seconds_text(best.seconds):>10}      {best.timeline.tokens_per_second:,.0f} tokens/s      "
           f"{human(best.bytes)}{memory} peak per rank"]
    if answer.result.bound:
        out.append(f"  bound  {seconds_text(answer.bound):>10}      gap {answer.gap:.2%}      "
                   f"{answer.result.num_nodes} search nodes: {end_text(answer, stopped_by)}")
    out += [f"  times  {profile}", "", *table_lines(evaluator, best, answer.outcomes), ""]
    if len(answer.best) > 1:
        out.append("  other placements that were simulated")
        for other in answer.best[1:NUM_LISTED]:
            out.append(f"  {seconds_text(other.seconds):>10}  {'; '.join(differences(best, other, evaluator))}")
    return "\n".join(line.rstrip() for line in out) + "\n"


def end_text(answer: Answer, stopped_by: str = "") -> str:
    """Why the search ended, and why the gap may be larger than the accepted one."""
    if not answer.result.complete and answer.result.num_nodes >= NUM_NODES and answer.result.gap <= WIDE_GAP:
        return f"within {WIDE_GAP:.0%} after {NUM_NODES:,} search nodes"
    if not answer.result.complete:
        return f"stopped {f'by {stopped_by}' if stopped_by else 'at the maximum number of search nodes'}"
    if answer.gap <= answer.accepted_gap:
        return f"within the accepted gap of {answer.accepted_gap:.2%}"
    if answer.result.gap > answer.accepted_gap:
        return f"within {WIDE_GAP:.0%} by the bounds that take longer"
    return (f"within the accepted gap of {answer.accepted_gap:.2%} before simulation, which adds "
            f"{answer.gap - answer.result.gap:.2%}")


def table_lines(evaluator: Evaluator, one: CompiledPlacement,
                outcomes: Mapping[Assignment, str] = NO_OUTCOMES) -> Iterator[str]:
    """outcomes: as `Answer.outcomes`."""
    found = list(call_rows(evaluator, one.evaluation.assignment, outcomes))
    width = max(len(x.call) for x in found)
    how = max(len(x.strategy) for x in found)
    yield f"  {'call':<{width}}  {'ranks':<11}  {'how':<{how}}  {'seconds':>9}  {'memory':>9}  why"
    for x in found:
        ranks = f"{x.block.start}:{x.block.stop}"
        yield (f"  {x.call:<{width}}  {ranks:<11}  {x.strategy:<{how}}  {seconds_text(x.seconds):>9}  "
               f"{human(x.bytes):>9}  {x.reason}")
    reshards = evaluator.reshards_of_copies(one.evaluation.assignment.blocks, one.evaluation.assignment.candidates)
    for c, (cost, _) in sorted(reshards.items()):
        if cost.received_bytes:
            seconds = cost.pack_seconds + cost.transfer_seconds + cost.unpack_seconds
            name = evaluator.calls[c].name
            yield (f"  {name:<{width}}  reshard: {human(cost.received_bytes)} to the busiest rank in "
                   f"{seconds_text(seconds)}")


def differences(best: CompiledPlacement, other: CompiledPlacement, evaluator: Evaluator) -> list[str]:
    """The calls with another block or strategy."""
    a, b = best.evaluation.assignment, other.evaluation.assignment
    return [f"{job.name} on {y.start}:{y.stop} {f.strategy.text()}"
            for job, x, e, y, f in zip(evaluator.calls, a.blocks, a.candidates, b.blocks, b.candidates, strict=True)
            if (x, e.strategy) != (y, f.strategy)]


def to_json(answer: Answer, cluster: str) -> str:
    evaluator, best = answer.evaluator, []
    for n, one in enumerate(answer.best[:NUM_LISTED]):
        rows = call_rows(evaluator, one.evaluation.assignment, answer.outcomes if n == 0 else None)
        best.append({"seconds": one.seconds, "bytes": one.bytes, "calls": [
            {"call": x.call, "ranks": [x.block.start, x.block.stop], "how": x.strategy, "seconds": x.seconds,
             "bytes": x.bytes} | ({"why": x.reason} if n == 0 else {}) for x in rows]})
    return json_output({"format": 1, "cluster": cluster, "bound": answer.bound, "gap": answer.gap,
                       "parts": answer.result.num_nodes, "complete": answer.result.complete, "best": best})
