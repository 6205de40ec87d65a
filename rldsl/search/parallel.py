"""The candidates of all calls, worked out by several processes.

In: a table, its calls, a number of processes. Out: the same table with the candidates of every call on every number of
ranks that it may have, which are those that one process finds. They take most of the time of a search; the branch and
bound that follows is one process.
"""

from __future__ import annotations

import multiprocessing
import sys
import threading
from concurrent.futures import ProcessPoolExecutor

from rldsl import threads
from rldsl.diag import Failure
from rldsl.search.call_costs import Candidate
from rldsl.search.candidates import CandidateTable
from rldsl.search.problem import Problem

COMMAND = "this command"
Task = tuple[Problem, int, int, int]  # the problem, the reserve, a job number, ranks


def fill(table: CandidateTable, reserve: int, num_processes: int) -> None:
    """reserve: bytes per device that are kept free, as the table was made with. Errors: RL0707."""
    problem = table.problem
    tasks = [(problem, reserve, job.number, size) for job in problem.calls
             for size in sorted({b.size for b in problem.blocks(job, ())})]
    if num_processes < 2 or len(tasks) < 2:
        return
    tasks.sort(key=lambda t: -t[3])  # the largest first: they take longest
    # a forked process has the compiler loaded already
    context = multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")
    before = multiprocessing.active_children()
    threads.start(threading.Thread(target=len, args=((),)), COMMAND)  # the pool needs one, and starts it too late
    try:
        with ProcessPoolExecutor(min(num_processes, len(tasks)), mp_context=context) as pool:
            table.take(dict(zip([t[2:] for t in tasks], pool.map(_candidates, tasks), strict=True)))
    except OSError as error:
        if not threads.is_refused(error):
            raise
        for child in multiprocessing.active_children():  # those that did start wait for work, and this process for them
            if child not in before:
                child.terminate()
        raise Failure([threads.refused(COMMAND)]) from None


def _candidates(task: Task) -> tuple[Candidate, ...]:
    problem, reserve, number, size = task
    return CandidateTable(problem, reserve).fitting_alone(problem.jobs[number], size)
