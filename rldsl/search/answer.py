"""A complete search: from a prepared program to a placement that compiles, or to the cluster that it would need.

In: a program, a cluster, options. Out: an `Answer`. Errors: RL0402 where no placement of the space fits a device.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from rldsl.clusters import Cluster
from rldsl.diag import Failure, fail
from rldsl.plan.notation import human
from rldsl.progress import garbage_collection_paused, stage
from rldsl.search.branch_and_bound import GAP, MAX_NODES, WIDE_GAP, BranchAndBound, Result, ShouldContinue
from rldsl.search.compiled_placements import CompiledPlacement, compile_assignment
from rldsl.search.evaluator import Assignment, Evaluation, Evaluator
from rldsl.search.greedy import greedy_evaluation
from rldsl.search.parallel import fill
from rldsl.search.prepared_program import PreparedProgram
from rldsl.search.problem import Problem, build_problem
from rldsl.simulate import Lengths
from rldsl.verify import verify

NUM_COMPILED = 3  # best placements that are compiled, simulated and compared
MAX_TRIES = 4  # with a growing reserve of memory, where the estimate was too low
MAX_PROOFS = 3  # times that a search continues after simulation
MAX_NEIGHBORS = 8  # neighbors of the best that are compiled, where the estimate says that they are faster
MAX_CLUSTER_NODES = 1 << 11
MOST_MEMORY = 1 << 6  # times that of a device: up to here the memory is sought that would be enough
MEMORY_STEP = 1.05  # ratio of it to what is not enough
Mode = Literal["heuristic", "search"]


@dataclass(frozen=True, slots=True)
class Options:
    """Options of a search."""

    mode: Mode = "search"  # who chooses, and by what
    gap: float = GAP  # relative gap at which the search ends
    max_nodes: int = MAX_NODES  # search nodes explored
    lengths: Lengths = Lengths()  # expected tokens per prompt and response
    should_continue: ShouldContinue = lambda _: True  # called at every search node; false ends the search
    num_processes: int = 1  # that work out the costs of calls; the answer does not depend on it


@dataclass(frozen=True, slots=True)
class Answer:
    """The outcome of a search that found a placement."""

    problem: Problem  # what was searched
    evaluator: Evaluator  # by which placements were judged
    result: Result  # of the search
    best: tuple[CompiledPlacement, ...]  # compiled and simulated, the fastest first; at least one
    accepted_gap: float = GAP  # relative gap at which the search was to end
    refused: tuple[Assignment, ...] = ()  # need too much memory once compiled, though the estimate says they fit

    @property
    def bound(self) -> float:
        """Seconds that no placement of the space is faster than; 0 with mode "heuristic"."""
        return min(self.result.bound, self.best[0].seconds)

    @property
    def outcomes(self) -> Mapping[Assignment, str]:
        """What became of the other assignments that were compiled."""
        return dict.fromkeys(self.refused, "needs too much memory once compiled") | {
            other.evaluation.assignment: "slower when simulated" for other in self.best[1:]}

    @property
    def gap(self) -> float:
        return self.best[0].seconds / self.bound - 1 if self.bound else 0.0


def find_placement(p: PreparedProgram, cluster: Cluster, memory: int, options: Options = Options()) -> Answer:
    """memory: bytes per device; 0: unknown."""
    problem = build_problem(p.placed, cluster, options.lengths, memory, p.fixed)
    reserve = memory // 100
    stage("searching placements")
    for _ in range(MAX_TRIES):
        evaluator, result, search = _search(problem, reserve, options)
        if not result.best:
            raise nothing_fits_error(problem, cluster)
        best, over = _compile_best(p, evaluator, result, cluster, options.lengths)
        if best:
            more, refused = _compile_faster_neighbors(p, evaluator, best, cluster, options.lengths)
            answer = Answer(problem, evaluator, result, _sorted([*best, *more]), options.gap, tuple(refused))
            return _prove_simulated_gap(p, cluster, options, answer, search) if search is not None else answer
        reserve += over + memory // 200
    raise nothing_fits_error(problem, cluster)


def _sorted(best: list[CompiledPlacement]) -> tuple[CompiledPlacement, ...]:
    return tuple(sorted(best, key=lambda b: b.seconds))


def _prove_simulated_gap(p: PreparedProgram, cluster: Cluster, options: Options, answer: Answer,
                         search: BranchAndBound) -> Answer:
    """Where the best placement takes longer when simulated than the search estimated, so that the gap is wide: the
    search continues until the gap to the simulated step is not, if a bound below its estimates can prove that. What it
    finds on the way is compiled, too. If no bound can, the neighbors of the best are simulated whose estimates are
    below its simulated step."""
    accepted = max(options.gap, WIDE_GAP)
    for _ in range(MAX_PROOFS):
        wanted = answer.best[0].seconds / (1 + accepted)
        if answer.result.bound >= wanted:
            break
        if wanted >= answer.result.best[0].seconds:
            more, refused = _compile_faster_neighbors(p, answer.evaluator, list(answer.best), cluster, options.lengths,
                                                      than_simulated=True)
            return replace(answer, best=_sorted([*answer.best, *more]), refused=(*answer.refused, *refused))
        with garbage_collection_paused():
            result = search.prove(wanted)
        known = {b.evaluation.assignment for b in answer.best} | {*answer.refused}
        new = replace(result, best=tuple(e for e in result.best if e.assignment not in known
                                         and e.seconds < answer.best[0].evaluation.seconds))
        best, _ = _compile_best(p, answer.evaluator, new, cluster, options.lengths)
        if not best:
            return replace(answer, result=result)
        more, refused = _compile_faster_neighbors(p, answer.evaluator, [*answer.best, *best], cluster, options.lengths)
        answer = replace(answer, result=result, best=_sorted([*answer.best, *best, *more]),
                         refused=tuple(dict.fromkeys([*answer.refused, *refused])))
    return answer


def run_search(problem: Problem, reserve: int, options: Options) -> tuple[Evaluator, Result]:
    evaluator, result, _ = _search(problem, reserve, options)
    return evaluator, result


def _search(problem: Problem, reserve: int, options: Options) -> tuple[Evaluator, Result, BranchAndBound | None]:
    """The last: a search that can continue."""
    with garbage_collection_paused():
        evaluator = Evaluator(problem, reserve)
        fill(evaluator.table, reserve, options.num_processes)
        if options.mode == "heuristic":
            found = greedy_evaluation(evaluator)
            return evaluator, Result((found,) if found else (), 0.0, 0, False), None
        search = BranchAndBound(evaluator, options.gap, options.max_nodes, _reporting(options.should_continue))
        return evaluator, search.run(), search


def _reporting(should_continue: ShouldContinue) -> ShouldContinue:
    """`should_continue`, which also reports the state of the search."""
    def report_and_ask(result: Result) -> bool:
        if result.best:
            stage("searching placements", detail=f"best {result.best[0].seconds:.4g} s, bound {result.bound:.4g} s, "
                                                 f"gap {result.gap:.2%}")
        return should_continue(result)

    return report_and_ask


def _compile_best(p: PreparedProgram, evaluator: Evaluator, result: Result, cluster: Cluster,
              lengths: Lengths) -> tuple[list[CompiledPlacement], int]:
    """(the best placements that fit, verified; by how many bytes the others exceed a device)."""
    found: list[CompiledPlacement] = []
    over = 0
    for evaluation in distinct_evaluations(result.best):
        stage("compiling the best placements", len(found), NUM_COMPILED)
        one = compile_assignment(p, evaluator, evaluation, cluster, lengths)
        if p.placed.memory and one.bytes > p.placed.memory:
            over = max(over, one.bytes - p.placed.memory)
            continue
        verify(one.plan)
        found.append(one)
        if len(found) == NUM_COMPILED:
            break
    return found, over


def _compile_faster_neighbors(p: PreparedProgram, evaluator: Evaluator, best: list[CompiledPlacement], cluster: Cluster,
                              lengths: Lengths, than_simulated: bool = False
                              ) -> tuple[list[CompiledPlacement], list[Assignment]]:
    """(compiled neighbors of the best, assignments that need too much memory once compiled).

    The best after simulation need not be the one that the estimate calls fastest. Its neighbors that should be faster
    are simulated, too, so that the answer is faster than every neighbor that the report names. than_simulated: faster
    than the simulated step, not than its estimate."""
    more: list[CompiledPlacement] = []
    refused: list[Assignment] = []
    while len(more) + len(refused) < MAX_NEIGHBORS:
        fastest_now = min([*best, *more], key=lambda b: b.seconds)
        now = fastest_now.evaluation
        known = {one.evaluation.assignment for one in [*best, *more]} | {*refused}
        limit = fastest_now.seconds if than_simulated else now.seconds
        faster = evaluator.fastest_neighbor(evaluator.free_neighbors(now.assignment), limit, known)
        if faster is None:
            break
        fastest = faster[1]
        one = compile_assignment(p, evaluator, fastest, cluster, lengths)
        if p.placed.memory and one.bytes > p.placed.memory:
            refused.append(fastest.assignment)
        else:
            verify(one.plan)
            more.append(one)
    return more, refused


def distinct_evaluations(best: tuple[Evaluation, ...]) -> tuple[Evaluation, ...]:
    """Without evaluations whose time is within 0.01 % of the one before, which the estimate cannot tell apart."""
    return tuple(j for k, j in enumerate(best) if not k or j.seconds > best[k - 1].seconds * 1.0001)


def nothing_fits_error(problem: Problem, cluster: Cluster) -> Failure:
    """RL0402, with the smallest number of nodes on which something fits, or other help where nothing does, and with the
    memory that devices would need."""
    many = f"{problem.cluster.world} device{'s' * (problem.cluster.world > 1)} of {human(problem.memory)}"
    span = problem.graph.cluster.span if problem.graph.cluster else None
    help = "use larger devices or shorter sequences"
    if cluster.cache_gb:
        help += f", or state more for a serving engine than `cache_gb: {cluster.cache_gb:g}`"
    if problem.fixed and fits_on_nodes(problem, problem.cluster.nodes):
        names = dict.fromkeys(j.name for j in problem.calls if j.number in problem.fixed)
        help = f"a placement exists if the search may also place {', '.join(names)}"
    elif nodes := smallest_num_nodes(problem):
        help = f"the smallest cluster that fits: {nodes} nodes of this type, {nodes * cluster.gpus} devices"
    if needed := enough_memory(problem):
        help += f". With about {human(needed)} on each device a placement fits"
    if span is not None:
        return fail("RL0402", f"no placement fits {many}", span, "every placement needs more memory", help=help)
    return fail("RL0402", f"no placement fits {many}", place=cluster.name, help=help)


def fits_on_nodes(problem: Problem, nodes: int) -> bool:
    """Whether something fits on this number of nodes if the program fixes no call."""
    return _fits(replace(problem, cluster=replace(problem.cluster, nodes=nodes), fixed={}))


def _fits(problem: Problem) -> bool:
    """Whether the greedy search finds something."""
    return greedy_evaluation(Evaluator(problem, problem.memory // 100)) is not None


def enough_memory(problem: Problem) -> int:
    """Bytes per device with which something fits on these ranks, at most `MEMORY_STEP` times what is not enough; 0:
    none up to `MOST_MEMORY` times what there is."""
    low, high = float(problem.memory), 2.0 * problem.memory
    while not _fits(replace(problem, memory=int(high))):
        low, high = high, 2 * high
        if high > MOST_MEMORY * problem.memory:
            return 0
    while high > MEMORY_STEP * low:
        middle = (low * high) ** 0.5
        low, high = (low, middle) if _fits(replace(problem, memory=int(middle))) else (middle, high)
    return int(high)


def smallest_num_nodes(problem: Problem) -> int:
    """The smallest number of nodes on which something fits, above those there are; 0: none up to
    `MAX_CLUSTER_NODES`."""
    low, high = problem.cluster.nodes, 2 * problem.cluster.nodes
    while not fits_on_nodes(problem, high):
        low, high = high, 2 * high
        if high > MAX_CLUSTER_NODES:
            return 0
    while low + 1 < high:
        middle = (low + high) // 2
        low, high = (low, middle) if fits_on_nodes(problem, middle) else (middle, high)
    return high
