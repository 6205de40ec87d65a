"""Memory is a hard constraint: what a search returns compiles, whatever the device; or nothing does, and it says so."""

from __future__ import annotations

import pytest

from rldsl import api
from rldsl.diag import Failure
from rldsl.passes.pipeline import planned, run
from rldsl.placement.place import place_graph
from rldsl.search import Options, find_placement, memory_check
from rldsl.search.placement_file import format_placement_file
from rldsl.source import SourceFile
from tests.samples import thorough_between
from tests.search.programs import PROGRAMS, cluster, describe, ready

SAVING = {name: text[: text.rindex("}")] + "  every 5 { save actor }\n  checkpoint every 5\n}\n"
          for name, text in PROGRAMS.items()}


def outcome(name: str, memory: float, mode: str) -> str:
    """"fits" when it does, by the compiler that reads the file; else the code of the refusal."""
    machines = cluster(1, 2, memory)
    p = ready(name, "1B", machines, text=SAVING[name])
    try:
        answer = find_placement(p, machines, p.placed.memory, Options(mode, max_nodes=200))  # type: ignore[arg-type]
    except Failure as failure:
        return ", ".join(d.code for d in failure.diagnostics)
    for one in answer.best:
        assert one.bytes <= p.placed.memory == int(memory * 1e9)
    rules = SourceFile("p.place.rlf", format_placement_file(p, answer, "0", machines.name, False))
    graph = api.build_graph(SourceFile("p.rlf", SAVING[name]), {}, rules)
    draft = run(place_graph(graph, "p.place.rlf", describe("1B")))
    memory_check.check_memory(draft.placed, planned(draft, "")[1])
    return "fits"


@pytest.mark.parametrize("name", thorough_between(PROGRAMS))
@pytest.mark.parametrize("memory", [12.5, 15.3, 19.7, 40.0])
def test_what_is_found_compiles(name: str, memory: float) -> None:
    assert outcome(name, memory, "search") in ("fits", "RL0402")


@pytest.mark.parametrize("name", ["grpo", "remax"])
def test_more_memory_never_makes_it_refuse(name: str) -> None:
    found = [outcome(name, memory, "heuristic") for memory in (8.0, 13.0, 15.0, 18.0, 22.0, 80.0)]
    assert found[0] == "RL0402" and found[-1] == "fits"
    assert found == sorted(found, key=lambda f: f == "fits")
