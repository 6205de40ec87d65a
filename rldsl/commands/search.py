"""`rlc search` and `rlc explain-placement`: the best placement of a program on a cluster, and why not another.

In: a program, a cluster's file or preset. Out: text or JSON; a placement file.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from rldsl import api
from rldsl.clusters import Cluster, find
from rldsl.commands import Usage
from rldsl.diag import fail
from rldsl.files import keep_inputs, write
from rldsl.graph.model import Graph
from rldsl.models.families import describe
from rldsl.plan.expr import Scalar
from rldsl.progress import Interrupted, stage
from rldsl.search import Answer, Options, PreparedProgram, find_placement, prepare_program, unless_locked
from rldsl.search.branch_and_bound import Result
from rldsl.search.modes import is_mode
from rldsl.simulate import Lengths, check_lengths
from rldsl.source import COMMAND_LINE


@dataclass(frozen=True, slots=True)
class SearchRequest:
    """The arguments of a search."""

    file: str  # of the program
    cluster: str  # file or preset
    sets: Mapping[str, Scalar]  # parameters of the program
    place: str | None  # placement file
    overrides: Sequence[str]  # rules, as of `--on`
    locks: Sequence[str]  # selectors of calls that stay as the program has them
    seconds: float  # of CPU time, after which the search ends; 0: no limit
    memory: float  # GB per device; 0: as the cluster has it
    gap: float  # relative, at which the search ends
    lengths: Lengths  # expected tokens per prompt and response
    jobs: int = 1  # processes that work out the costs of calls


def search(request: SearchRequest, target: str, as_json: bool) -> str:
    """Write the placement to `target`, which may be the placement file that was read; returns its description, as text
    or JSON."""
    from rldsl.search import answer_text, placement_file

    keep_inputs(target, (request.file, request.cluster))
    cluster, p = _prepare(request)
    answer, stopped_by = _run_search(p, cluster, request)
    text = placement_file.format_placement_file(p, answer, compiler_version(), cluster.name, stopped_by)
    write(target, text.encode(), "choose another path with -o")
    if as_json:
        return answer_text.to_json(answer, cluster.name)
    profile = cost_source_text(cluster, answer)
    return answer_text.format_answer(answer, request.file, cluster.name, profile, stopped_by) + (
        f"\n  wrote {target}; next: rlc compile {request.file} --place {target}\n")


def explain(request: SearchRequest, as_json: bool) -> str:
    """The placement of the program, the file and the rules, compared with the best one."""
    from rldsl.search.comparison import compare_with_best, to_json

    cluster, p = _prepare(replace(request, locks=()), keeps_rules=False)
    _, fixed = _prepare(replace(request, locks=("*",)))
    answer, _ = _run_search(p, cluster, request)
    found = compare_with_best(answer, fixed, cluster, request.lengths)
    return to_json(found) if as_json else found.text(request.file, cluster.name)


def _prepare(request: SearchRequest, keeps_rules: bool = True) -> tuple[Cluster, PreparedProgram]:
    """keeps_rules: calls that a rule of the command line puts on a mesh stay there, as in `rlc compile`."""
    cluster = find(request.cluster)
    if missing := cluster.unknown():
        raise fail("RL0215", f"`{cluster.name}` does not give the speed of its devices", place=request.cluster,
                   notes=(f"missing, or 0: {', '.join(missing)}",),
                   help="start the file with a preset (`preset: h100x8`), add the numbers, or measure this machine "
                        "with `rlc profile`")
    if request.memory:
        cluster = replace(cluster, memory_gb=request.memory)
    graph = _graph(request)
    check_lengths(request.lengths, graph.frames, request.file)
    memory = int(cluster.memory_gb * 1e9)
    kept = [r for r in graph.rules if r.span.file.name == COMMAND_LINE and r.clause.mesh] if keeps_rules else []
    free = unless_locked(graph, api.read_selectors(request.locks), kept)
    return cluster, prepare_program(graph, request.place or "", cluster, memory, free, describe)


def _graph(request: SearchRequest) -> Graph:
    if request.place and is_mode(request.place) and not os.path.exists(request.place):
        raise Usage(f"--place takes a file of rules here: `{request.place}` is a mode of `rlc compile` and `rlc sim`")
    rules = api.read_source(request.place) if request.place else None
    from rldsl.placement.place import with_commits_of_the_hub

    return with_commits_of_the_hub(
        api.build_graph(api.read_source(request.file), request.sets, rules, request.overrides))


def _run_search(p: PreparedProgram, cluster: Cluster, request: SearchRequest) -> tuple[Answer, str]:
    """(the answer, "--seconds" or "Ctrl-C" if that ended the search)."""
    begin, stopped_by, interrupted = time.process_time(), "", False

    def interrupt() -> None:
        nonlocal interrupted
        interrupted = True

    def should_continue(_: Result) -> bool:
        nonlocal stopped_by
        if interrupted:
            stopped_by = "Ctrl-C"
        elif request.seconds and time.process_time() - begin > request.seconds:
            stopped_by = "--seconds"
        return not stopped_by

    options = Options(gap=request.gap, lengths=request.lengths, should_continue=should_continue,
                      num_processes=request.jobs)
    try:
        with _first_interrupt(interrupt):
            return find_placement(p, cluster, p.placed.memory, options), stopped_by
    except KeyboardInterrupt:
        took = time.process_time() - begin
        raise Interrupted(f"the search was interrupted after {took:.0f} s of CPU time; nothing was written. After one "
                          "Ctrl-C, it writes the best placement as soon as it has found one") from None


@contextmanager
def _first_interrupt(interrupt: Callable[[], None]) -> Iterator[None]:
    """The first Ctrl-C in the block calls `interrupt`, and the second one raises KeyboardInterrupt. Other threads than
    the main one cannot handle signals: for them nothing changes."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def handle(*_: object) -> None:
        signal.signal(signal.SIGINT, before)
        interrupt()
        stage("stopping with the best placement so far; another Ctrl-C stops without one")

    before = signal.getsignal(signal.SIGINT) or signal.default_int_handler
    signal.signal(signal.SIGINT, handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def cost_source_text(cluster: Cluster, answer: Answer) -> str:
    """Where the times come from. A profile may have measured other models."""
    estimate = "a roofline estimate from operation counts and the cluster's rates"
    if not cluster.measured:
        return estimate
    if not (estimated := answer.best[0].timeline.estimated):
        return "measured by `rlc profile`"
    return f"measured by `rlc profile`; of {', '.join(m for m, _ in estimated)}, which it did not measure, {estimate}"


def compiler_version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("rldsl")
    except PackageNotFoundError:
        return "unknown"


def default_target(file: str) -> str:
    return f"{os.path.splitext(file)[0]}.place.rlf"
