"""`mesh(8)`: ranks in the order in which most bytes stay, HybridFlow's grouping among them, and what may not be
said."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

from rldsl import api
from rldsl.diag import Failure
from rldsl.graph.build import build
from rldsl.inspect.show import show
from rldsl.memory.parameters import Copy, resting
from rldsl.placement.place import placements_of
from rldsl.plan.events import Generate, Realloc
from rldsl.plan.model import Plan
from rldsl.plan.projection import event_paths
from rldsl.sharding.boxes import cell_of
from rldsl.source import SourceFile
from rldsl.syntax.parse import parse
from tests.checked import check_graph
from tests.relabelled.programs import program
from tests.samples import thorough_between
from tests.verify.faults import codes, row
from tests.verify.plans import folder


@cache
def plan(train: str, generate: str, mesh: str, ranks: int = 4, more: str = "") -> Plan:
    with folder() as here:
        (here / "p.rlf").write_text(program(train, generate, mesh, ranks, more))
        return api.compile("p.rlf")


def realloc(p: Plan) -> Realloc:
    return next(e for e, _ in event_paths(p) if isinstance(e, Realloc))


def order(p: Plan) -> tuple[int, ...]:
    """The ranks of generation."""
    at = next(e.layout for e, _ in event_paths(p) if isinstance(e, Generate))
    mesh = next(x.mesh for x in p.layouts if x.id == at)
    return next(m.members() for m in p.meshes if m.id == mesh)


def without_redundancy(p: Plan) -> int:
    """Bytes where each rank keeps the whole of its old shard and gets what its new one has beyond it: the sum over
    ranks of new - old (Sheng et al. 2024, table 2), for parameters of which each has its own division."""
    model, e = p.models[0], realloc(p)
    layouts, meshes = {x.id: x for x in p.layouts}, {m.id: m for m in p.meshes}

    def shard(layout: str, rank: int) -> int:
        x = layouts[layout]
        return resting(Copy(model, x, cell_of(x, meshes[x.mesh], rank)))

    return 4 * sum(shard(e.dst, r) - shard(e.src, r) for r in order(p))


GROUPED = [("tp=4", "dp=2 tp=2"), ("tp=4", "dp=4"), ("dp=2 tp=2", "dp=4"), ("pp=2 tp=2", "dp=2 tp=2"),
           ("pp=2 tp=2", "dp=4"), ("dp=2 pp=2", "dp=4")]


@pytest.mark.parametrize("train, generate", thorough_between(GROUPED))
def test_hybridflows_grouping_comes_out(train: str, generate: str) -> None:
    """Generation with smaller tp and pp: no redundancy, in closed form."""
    free, fixed = plan(train, generate, "mesh(4)"), plan(train, generate, "mesh(0:4)")
    assert realloc(free).bytes == without_redundancy(free) <= realloc(fixed).bytes
    assert sorted(order(free)) == [0, 1, 2, 3] and order(fixed) == (0, 1, 2, 3)


def test_a_stride_moves_less_than_neighbors() -> None:
    """Training tp=4, generation tp=2: groups at a stride of two. Neighbors would hold a quarter that they do not
    need."""
    free, fixed = plan("tp=4", "dp=2 tp=2", "mesh(4)"), plan("tp=4", "dp=2 tp=2", "mesh(0:4)")
    assert order(free) == (0, 2, 1, 3) and realloc(free).bytes < 0.7 * realloc(fixed).bytes


def test_larger_tp_moves_nothing() -> None:
    """A quarter lies inside a half."""
    free, fixed = plan("dp=2 tp=2", "tp=4", "mesh(4)"), plan("dp=2 tp=2", "tp=4", "mesh(0:4)")
    assert realloc(free).bytes == 0 < realloc(fixed).bytes


def test_the_plan_says_why() -> None:
    free, fixed = plan("tp=4", "dp=2 tp=2", "mesh(4)"), plan("tp=4", "dp=2 tp=2", "mesh(0:4)")
    assert "mesh(4) are free to choose, and " in realloc(free).because and "would move to 0:4" in realloc(free).because
    assert "free" not in realloc(fixed).because
    assert "ranks 0,2,1,3" in show(free) and "are free to choose" in show(free, event=realloc(free).id)


def test_an_order_that_is_good_stays() -> None:
    same = plan("dp=2 tp=2", "dp=4", "mesh(4)")
    assert order(same) == (0, 1, 2, 3) and "free" not in realloc(same).because
    alike = plan("tp=4", "tp=4", "mesh(4)")
    assert not [e for e, _ in event_paths(alike) if isinstance(e, Realloc)], "the training layout: nothing to copy"


def test_fewer_ranks_are_those_of_the_training() -> None:
    free = plan("tp=2 pp=2", "tp=2", "mesh(2)")
    assert set(order(free)) < {0, 1, 2, 3} and len(order(free)) == 2
    assert realloc(free).bytes <= realloc(plan("tp=2 pp=2", "tp=2", "mesh(0:2)")).bytes


def test_a_named_mesh_and_a_rule_may_be_free() -> None:
    more = "mesh some = mesh(2 * 2)\nplace @gen on some dp=2 tp=2\n"
    text = program("tp=4", "", "mesh(0:4)", more=more).replace(" on mesh(0:4) \n", "\n")
    with folder() as here:
        (here / "p.rlf").write_text(text)
        assert order(api.compile("p.rlf")) == (0, 2, 1, 3)


def test_the_size_may_be_reckoned() -> None:
    assert order(plan("tp=4", "dp=4", "mesh(n - 1)", more="param n = 5")) == order(plan("tp=4", "dp=4", "mesh(4)"))


# ------------------------------------------------------------------------------------------------------- mistakes


def checked(mesh: str, cluster: str = "cluster nodes=2 gpus=4", generate: str = "dp=4") -> None:
    text = program("tp=4", generate, mesh).replace("cluster nodes=1 gpus=4", cluster)
    check_graph(build(parse(SourceFile("p.rlf", text)), {}))


@pytest.mark.parametrize("mesh, code, under", [
    ("mesh(0)", "RL0205", "0"), ("mesh(-4)", "RL0205", "-4"), ("mesh(2.5)", "RL0205", "2.5"),
    ('mesh("4")', "RL0205", '"4"'), ("mesh(4 tokens)", "RL0205", "4 tokens"), ("mesh(true)", "RL0205", "true"),
    ("mesh(4, 0:2)", "RL0203", "4"), ("mesh(0:2, 4)", "RL0203", "4"), ("mesh(4, 4)", "RL0203", "4"),
    ("mesh(size=4)", "RL0203", "size=4"), ("mesh()", "RL0204", "mesh()"), ("mesh(many)", "RL0101", "many"),
    ("mesh(count(prompt))", "RL0211", "count(prompt)"), ("mesh(16)", "RL0305", "mesh(16)"),
    ("mesh(0-4)", "RL0203", "0-4"), ("mesh(3)", "RL0306", "mesh(3)"), ("mesh(6)", "RL0306", "mesh(6)"),
])
def test_mistakes(mesh: str, code: str, under: str) -> None:
    with pytest.raises(Failure) as caught:
        checked(mesh)
    d = caught.value.diagnostics[0]
    assert (d.code, d.span.text if d.span else "") == (code, under)


def test_degrees_must_fill_it() -> None:
    checked("mesh(8)", generate="dp=4 tp=2")
    with pytest.raises(Failure) as caught:
        checked("mesh(8)", generate="dp=4 tp=4")
    assert caught.value.diagnostics[0].code == "RL0304"


def test_without_a_cluster_it_says_how_large_one_is() -> None:
    text = program("tp=2", "dp=4", "mesh(4)", 2).replace("cluster nodes=1 gpus=2", "")
    found = placements_of(build(parse(SourceFile("p.rlf", text)), {}))
    assert found["gen"].mesh.members() == (0, 1, 2, 3)


def test_a_rank_twice_or_another_order_is_noticed() -> None:
    """The verifier finds the paths of a realloc again: an order that was edited has others."""
    p = plan("tp=4", "dp=2 tp=2", "mesh(4)")
    at = next(i for i, m in enumerate(p.meshes) if m.members() == (0, 2, 1, 3))
    assert codes(row(p, "meshes", at, ranks=((0, 1), (2, 3), (2, 3), (3, 4))))
    assert codes(row(p, "meshes", at, ranks=((0, 1), (1, 2), (2, 3), (3, 4))))
    assert codes(replace(p, meshes=tuple(m for i, m in enumerate(p.meshes) if i != at)))
