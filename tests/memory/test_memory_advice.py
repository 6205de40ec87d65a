"""What the search for a fix tries is what the user has: every option of a placement, written and placed again, needs the
same bytes; `zero` is tried as well."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from rldsl.diag import Failure
from rldsl.graph import model as g
from rldsl.passes import pipeline
from rldsl.placement.degrees import OPTIONS
from rldsl.placement.model import Placement, PlacedGraph, layout_of, mesh_of
from rldsl.placement.place import place_graph
from rldsl.plan.model import Mesh
from rldsl.preview import preview
from rldsl.search import memory_check
from rldsl.search.compiled_placements import SettingCompiler
from rldsl.search.memory_advice import MemoryAdvisor
from rldsl.search.settings import clause, difference_text, options, with_options
from tests.compiler.graphs import at, family, on, ppo
from tests.memory.test_fit import followed, held, needs, rows, wide

ALL = dict(gen=on(1, 0, 8, dp=8), score=on(2, 0, 8, dp=8), ref_lp=on(3, 0, 8, dp=8), v=on(4, 0, 8, dp=8))
# an option, and two values of it: each must be there in what is tried
VALUES = {"dp": (4, 2), "tp": (2, 4), "pp": (2, 4), "vpp": (2, 1), "cp": (2, 1), "zero": (3, 1), "mbs": (1, 2), "mbt": (4096, 8192),
          "recompute": ("full", "none"), "offload": (True, False), "keep": (False, True), "backend": ("torch", "torch")}


def placed(memory: float = 80.0, count: int = 16, **more: g.Clause) -> PlacedGraph:
    trains = {"critic.train": on(7, 0, 8, dp=8), "actor.train": on(8, 0, 8, dp=8)}
    graph = rows(ppo({**ALL, **trains, **more}, cluster=g.Cluster(1, 8, memory, at(22))), count)
    return place_graph(graph, "", wide)


@pytest.mark.parametrize("option", [o for o in OPTIONS if o in VALUES])
def test_an_option_of_the_program_is_in_all_that_is_tried(option: str) -> None:
    for value in VALUES[option]:
        said = {option: value}
        if option not in ("tp", "pp", "cp"):
            said = {"dp": 4, "tp": 8 // value if option == "dp" else 2, **said}
        if option == "vpp":
            said |= {"dp": 2, "tp": 2, "pp": 2}
        call = "gen" if option == "keep" else "actor.train"
        line, stop = (1, 8) if call == "gen" else (8, 8)
        x = placed(**{call: on(line, 0, stop, **said)})
        assert MemoryAdvisor(x).bytes(MemoryAdvisor(x).old) == needs(x), (option, value)


def test_experts_and_ranks_that_are_free_are_kept_too() -> None:
    def experts(path="sft", kind="causal_lm", span=None, trained=False):
        return replace(wide(path, kind), experts=8, chosen=2, expert_width=64)

    graph = rows(ppo({**ALL, "critic.train": on(7, 0, 8, dp=8, ep=4), "actor.train": on(8, 0, 8, dp=4, tp=2, ep=2)},
                     cluster=g.Cluster(1, 8, 80.0, at(22))), 16)
    x = place_graph(graph, "", experts)
    assert {dict(x.placements)[n].layout.ep for n in ("critic.train", "actor.train")} == {4, 2}
    assert MemoryAdvisor(x).bytes(MemoryAdvisor(x).old) == needs(x)
    free = replace(on(1, 0, 4, dp=4), mesh=g.MeshRef(None, (0, 4), at(1), True))
    y = placed(gen=free, **{"actor.train": on(8, 4, 8, dp=2, tp=2)})
    assert dict(y.placements)["gen"].given is not None
    assert MemoryAdvisor(y).bytes(MemoryAdvisor(y).old) == needs(y)


def test_zero_is_proposed_for_the_state_of_replicated_models() -> None:
    """A wide model on eight replicas, with few rows: what is trained is nearly all that there is."""
    x = placed(count=8)
    x = placed(memory=needs(x) * 0.7 / 1e9, count=8)
    with pytest.raises(Failure) as caught:
        memory_check.check_memory(x, held(x))
    (d,) = caught.value.diagnostics
    assert re.search(r"\.train (dp=8 tp=1 pp=1 )?zero=[12]\b", d.help), d.help
    assert "offload" not in d.help and followed(x, d) <= x.memory


def test_a_program_with_zero_is_not_accused_of_what_it_does_not_need() -> None:
    with_zero = {"critic.train": on(7, 0, 8, dp=8, zero=3), "actor.train": on(8, 0, 8, dp=8, zero=3)}
    x, without = placed(**with_zero), placed()
    advisor, other = MemoryAdvisor(x), MemoryAdvisor(without)
    assert advisor.bytes(advisor.old) == needs(x) < other.bytes(other.old)
    for setting in (MemoryAdvisor(x)._all_changes, *MemoryAdvisor(x)._degrees(MemoryAdvisor(x)._all_changes)):
        zeros = {p.layout.zero for i, p in setting.items() if i.endswith(".train") and p.layout.dp > 1}
        assert zeros <= {3}


def test_zero_is_not_proposed_where_nothing_is_replicated() -> None:
    trains = {"critic.train": on(7, 0, 8, dp=1, tp=4, pp=2), "actor.train": on(8, 0, 8, tp=4, pp=2)}
    x = placed(**trains)
    assert MemoryAdvisor(x)._may_zero(3) == []


# ------------------------------------------------------------------------------------------- settings as clauses


def place(**said: object) -> Placement:
    mesh = mesh_of(range(8))
    layout = {k: v for k, v in said.items() if k in ("dp", "tp", "pp", "vpp", "cp", "ep", "zero")}
    return Placement(mesh, layout_of(mesh, **layout), **{k: v for k, v in said.items() if k not in layout})


@pytest.mark.parametrize("old, new, said", [
    (dict(dp=8), dict(dp=8), ""),
    (dict(dp=8), dict(dp=4, tp=2), "dp=4 tp=2 pp=1"),
    (dict(dp=8), dict(dp=8, zero=2), "zero=2"),
    (dict(dp=8, zero=2), dict(dp=8), "zero=0"),
    (dict(dp=8), dict(dp=8, mbs=2, offload=True, keep=False), "mbs=2 offload=true keep=false"),
    (dict(dp=8, zero=3, recompute="full"), dict(dp=4, tp=2, zero=3, recompute="full"), "dp=4 tp=2 pp=1 zero=3"),
    (dict(dp=4, pp=2), dict(dp=4, pp=2, vpp=2), "vpp=2"),
    (dict(dp=8, ep=2), dict(dp=4, pp=2, ep=2), "dp=4 tp=1 pp=2 ep=2"),
])
def test_a_difference_says_what_is_new(old: dict, new: dict, said: str) -> None:
    assert difference_text(place(**old), place(**new)) == said


def test_with_a_mesh_all_is_said() -> None:
    x = Placement(mesh_of(range(4)), layout_of(mesh_of(range(4)), dp=4), mbs=2, keep=False)
    y = Placement(mesh_of(range(8)), layout_of(mesh_of(range(8)), dp=8), mbs=2, keep=False)
    assert difference_text(x, y) == "on mesh(0:8) dp=8 tp=1 pp=1 mbs=2 keep=false"


def test_a_clause_has_every_option() -> None:
    made = clause(place(dp=4, pp=2, zero=1, mbs=3, keep=False), at(1))
    assert made is not None and [name for name, _, _ in made.options] == list(OPTIONS)
    assert {name: value for name, value, _ in made.options} == options(place(dp=4, pp=2, zero=1, mbs=3, keep=False))


def test_ranks_that_are_not_one_run_cannot_be_written() -> None:
    """Then nothing is known of that setting, and RL0401 comes without a fix, not a traceback."""
    holes = Mesh("0:2+4:6", ((0, 2), (4, 6)))
    p = Placement(holes, layout_of(holes, dp=4))
    assert clause(p, at(1)) is None
    x = placed(memory=0.0001)
    broken = replace(x, placements=tuple((i, p if i == "actor.train" else q) for i, q in x.placements))
    assert SettingCompiler(broken).bytes(SettingCompiler(broken).first) is None
    assert MemoryAdvisor(broken).best() is None


def test_nothing_can_be_tried_is_said_without_a_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    x = placed(memory=0.0001)
    monkeypatch.setattr(SettingCompiler, "_graph", lambda self, setting, nodes: None)
    assert MemoryAdvisor(x).least() is None and MemoryAdvisor(x).larger() is None
    with pytest.raises(Failure) as caught:
        memory_check.check_memory(x, held(x))
    assert caught.value.diagnostics[0].code == "RL0401" and "--on" not in caught.value.diagnostics[0].help


def test_changes_name_places_and_layouts() -> None:
    setting = {"a": place(dp=8), "b": place(dp=8)}
    made = with_options(setting, ["a"], zero=2, mbs=4)
    assert (made["a"].layout.zero, made["a"].mbs) == (2, 4) and made["b"] == setting["b"]
    assert family().path  # the families of the tests have a path, by which they are found again


# ------------------------------------------------------------------------------------------- what is shown of a host


def host(graph: g.Graph) -> tuple[str, float]:
    """What the preview tells of the ranks of ref.logprobs, and the MiB of host memory in it."""
    plan, found = pipeline.planned(pipeline.run(place_graph(graph, "", wide)), "")
    text = preview(pipeline.finish(plan, found), "p.rlf", "", b"")
    line = next(line for line in text.splitlines() if "ref.logprobs" in line and "peak" in line)
    return line, max([float(x) for x in re.findall(r", host ([\d.]+) MiB", line)], default=0.0)


def test_the_preview_tells_what_offload_takes_of_the_host() -> None:
    """A quarter of the frozen model on each of four ranks."""
    line, size = host(ppo(offload=True))
    assert ", host " in line and size > host(ppo(offload=False))[1]
