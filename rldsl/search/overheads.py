"""The overheads of a step: reading data, dividing rows, computations, exchanging lengths.

In: a problem. Out: seconds, by the constants of the simulator (`simulate/program.py`).
"""

from __future__ import annotations

from rldsl.graph import model as g
from rldsl.search.problem import Job, Problem
from rldsl.simulate.machine import Machine
from rldsl.simulate.program import CALL_ROWS, FETCH_KERNELS, FETCH_ROWS, MOVE_KERNELS


class Overheads:
    """All in seconds per step, on every rank that takes part."""

    def __init__(self, problem: Problem, machine: Machine):
        self.problem, self.machine = problem, machine
        self._cache: dict[tuple[int, int], float] = {}
        fetches = [n for n in g.nodes(problem.graph.items) if isinstance(n, g.Fetch)][:1]
        self.fetch_seconds = sum(machine.event() + machine.rows(FETCH_ROWS * problem.frames[n.frames[0]].count)
                                 + machine.kernels(FETCH_KERNELS) for n in fetches)
        fetched = {v for n in g.nodes(problem.graph.items) if isinstance(n, g.Fetch) for v in n.writes}
        values = {v.id for v in problem.graph.values}
        self.num_moved_values = {j.number: len([v for v in dict.fromkeys(j.node.reads) if v in values - fetched])
                                 for j in problem.jobs}

    def job_seconds(self, job: Job, size: int) -> float:
        """A job on `size` ranks, besides the work of a call: moving its rows, and running a computation or a Python
        function."""
        key = (job.number, size)
        if key not in self._cache:
            self._cache[key] = self._job(job, size)
        return self._cache[key]

    def _job(self, job: Job, size: int) -> float:
        machine = self.machine
        rows = max((self.problem.frames[f].count / size for f in job.frames), default=1.0)
        kernels = self.num_moved_values[job.number] * machine.kernels(MOVE_KERNELS)
        moved = kernels + 2 * machine.event() + machine.rows(rows)
        computed = 0.0
        if isinstance(job.node, g.Compute):
            computed = self._compute_seconds(job, job.node, size)
        elif isinstance(job.node, g.Derive):  # as `simulate/program._OpBuilder.derive`
            computed = machine.rows(rows) + machine.rows(CALL_ROWS * rows)
        return (moved + computed) * job.times_per_step

    def _compute_seconds(self, job: Job, node: g.Compute, size: int) -> float:
        """As `simulate/program._OpBuilder.compute`."""
        machine, program = self.machine, self.problem.programs[node.program]
        frames = [self.problem.frames[f] for f in job.frames]
        rows = max((f.count / size for f in frames), default=1.0)
        entries = max((rows * self.problem.lengths.of(f).response for f in frames), default=1.0)
        calls = sum(n.op == "py" for n in program.nodes)
        summed = sum("batch" in (n.attr("to"), n.attr("within")) for n in program.nodes)
        own = machine.rows(rows) + machine.compute(len(program.nodes), entries)
        return (own + calls * machine.rows(CALL_ROWS * rows)
                + summed * machine.all_reduce(16.0, size, size > self.problem.cluster.gpus))

    def length_exchange_seconds(self, job: Job, ranks: int) -> float:
        """Exchanging the lengths of the rows that a `generate` made, among `ranks` ranks."""
        count = self.problem.frames[job.frames[0]].count
        return (self.machine.event() + self.machine.rows(count)
                + self.machine.all_reduce(16.0 * count, ranks, ranks > self.problem.cluster.gpus)) * job.times_per_step
