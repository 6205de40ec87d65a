"""`rlc search` and `rlc explain-placement`: the best placement of a program on a cluster, and why not another.

In: a program, a cluster's file or preset. Out: text or JSON; a placement file.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rldsl import api
from rldsl.clusters import Cluster, find
from rldsl.diag import fail
from rldsl.files import write
from rldsl.graph.model import Graph
from rldsl.models.families import describe
from rldsl.plan.expr import Scalar
from rldsl.progress import Interrupted
from rldsl.search import Answer, Options, PreparedProgram, prepare_program, unless_locked
from rldsl.search import find_placement as look
from rldsl.search.branch_and_bound import Result
from rldsl.simulate import Lengths


@dataclass(frozen=True, slots=True)
class SearchRequest:
    """Of a search. seconds: of CPU after which it ends; 0: none. memory: GB of a device; 0: as the cluster says."""

    file: str
    cluster: str
    sets: Mapping[str, Scalar]
    place: str | None
    overrides: Sequence[str]
    locks: Sequence[str]
    seconds: float
    memory: float
    gap: float
    lengths: Lengths


def search(asked: SearchRequest, target: str, as_json: bool) -> str:
    """Write the placement to `target`; returns what it is, as text or JSON."""
    from rldsl.search import answer_text
    from rldsl.search import placement_file as form

    cluster, p = _prepare(asked)
    answer, cut = _run_search(p, cluster, asked)
    text = form.format_placement_file(p, answer, compiler_version(), cluster.name, cut)
    write(target, text.encode(), "choose another path with -o")
    if as_json:
        return answer_text.to_json(answer, cluster.name)
    return answer_text.format_answer(answer, asked.file, cluster.name, cost_source_text(cluster)) + (
        f"\n  wrote {target}; next: rlc compile {asked.file} --place {target}\n")


def explain(asked: SearchRequest, as_json: bool) -> str:
    """The placement that the program, the file and the rules say, beside the best one."""
    from rldsl.search.comparison import compare_with_best, to_json

    cluster, p = _prepare(replace(asked, locks=()))
    own, fixed = _prepare(replace(asked, locks=("*",)))
    answer, _ = _run_search(p, cluster, asked)
    found = compare_with_best(answer, fixed, cluster, asked.lengths)
    return to_json(found) if as_json else found.text(asked.file, cluster.name)


def _prepare(asked: SearchRequest) -> tuple[Cluster, PreparedProgram]:
    cluster = find(asked.cluster)
    if missing := cluster.unknown():
        raise fail("RL0215", f"`{cluster.name}` does not give the speed of its devices", place=cluster.name,
                   notes=(f"missing: {', '.join(missing)}",),
                   help="start the file with a preset (`preset: h100x8`), add the numbers, or measure this machine "
                        "with `rlc profile`")
    if asked.memory:
        cluster = replace(cluster, memory_gb=asked.memory)
    graph = _graph(asked)
    memory = int(cluster.memory_gb * 1e9)
    return cluster, prepare_program(graph, asked.place or "", cluster, memory, unless_locked(graph, asked.locks), describe)


def _graph(asked: SearchRequest) -> Graph:
    rules = api.read_source(asked.place) if asked.place else None
    return api.build_graph(api.read_source(asked.file), asked.sets, rules, asked.overrides)


def _run_search(p: PreparedProgram, cluster: Cluster, asked: SearchRequest) -> tuple[Answer, bool]:
    """The answer, and whether time ended the search."""
    begin = time.process_time()
    cut = [False]

    def going(_: Result) -> bool:
        cut[0] = bool(asked.seconds) and time.process_time() - begin > asked.seconds
        return not cut[0]

    try:
        answer = look(p, cluster, p.placed.memory, Options(gap=asked.gap, lengths=asked.lengths, going=going))
    except KeyboardInterrupt:
        took = time.process_time() - begin
        raise Interrupted(f"interrupted after {took:.0f} s of CPU, nothing was written; with `--seconds "
                          f"{max(took, 1):.0f}` the search stops by then with the best placement found") from None
    return answer, cut[0]


def cost_source_text(cluster: Cluster) -> str:
    """Where the times are from."""
    return "measured by `rlc profile`" if cluster.measured else ("a roofline estimate from operation counts and the "
                                                                 "cluster's rates")


def compiler_version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("rldsl")
    except PackageNotFoundError:
        return "unknown"


def default_target(file: str) -> str:
    return str(Path(file).with_suffix(".place.rlf"))
