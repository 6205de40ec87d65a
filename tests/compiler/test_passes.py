"""Passes on hand-made graphs. The plan's verifier, which every compilation runs, is the strictest test of all."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rldsl import api
from rldsl.diag import Failure, InternalError
from rldsl.graph import model as g
from rldsl.passes import event_order, lengths, pipeline, reallocs, transfers, value_lifetimes
from rldsl.passes.draft import Draft, events
from rldsl.passes.node_events import node_events
from rldsl.placement.place import place_graph
from rldsl.plan import events as p
from rldsl.plan.codec import decode, encode
from rldsl.plan.model import Plan
from rldsl.plan.projection import walk
from rldsl.preview import preview
from tests.compiler.graphs import at, family, on, ppo


def drafted(graph: g.Graph) -> Draft:
    return pipeline.run(place_graph(graph, "", family))


def compiled(graph: g.Graph) -> Plan:
    return api.finish(drafted(graph)).plan


def of(plan: Plan, kind: type) -> list:
    return [e for e, _ in walk(plan.body) if isinstance(e, kind)]


def inserted(plan: Plan) -> list[p.Event]:
    return [e for e, _ in walk(plan.body) if e.because]


def test_reals_ppo() -> None:
    plan = compiled(ppo())
    assert [(e.model, e.bytes > 0) for e in of(plan, p.Realloc)] == [("actor", True), ("critic", True)]
    assert len(of(plan, p.Load)) == 4 and len(of(plan, p.Lengths)) == 1
    assert decode(encode(plan), "x") == plan
    assert {m.name: m.planned_updates for m in plan.models} == {"actor": 8, "critic": 8, "ref": 0, "judge": 0}
    kinds = (p.Load, p.Lengths, p.Transfer, p.Realloc, p.Free, p.Log, p.Offload, p.Onload)
    for e, _ in walk(plan.body):
        assert bool(e.because) == isinstance(e, kinds), e
    assert plan.header.world == 8 and all(c.peak_bytes > 0 for c in plan.classes)


def test_reallocs_stand_at_the_top_of_the_step() -> None:
    plan = compiled(ppo())
    step = next(i for i in plan.body if isinstance(i, p.Loop))
    kinds = [type(i).__name__ for i in step.body]
    assert kinds.index("Realloc") < kinds.index("Generate")
    assert [type(i) for i in step.body[-2:]] == [p.Log, p.Free]


def test_disjoint_meshes_are_not_serialised() -> None:
    """Between the first and the last of the three inferences stands no event that joins two of their meshes."""
    plan = compiled(ppo())
    step = [e for e, _ in walk(plan.body)]
    calls = [i for i, e in enumerate(step) if isinstance(e, p.Infer)]
    ranks = {m.id: set(m.members()) for m in plan.meshes}
    own = [ranks[step[i].mesh] for i in calls]
    assert len(calls) == 3 and not own[0] & own[1] and not own[1] & own[2]
    for e in step[calls[0] : calls[-1]]:
        assert sum(bool(ranks[e.mesh] & mine) for mine in own) < 2, e


def test_one_layout_needs_no_movement_of_parameters() -> None:
    place = on(1, 0, 8, dp=8)
    plan = compiled(ppo({n: place for n in ("gen", "score", "ref_lp", "v", "critic.train", "actor.train")}))
    assert not of(plan, p.Realloc)
    tokens = [e for e in of(plan, p.Transfer) if "gen.tokens" in e.values]
    infers = {e.spread for e in of(plan, p.Infer)}
    assert len(infers) == 1 and sum(e.dst in infers for e in tokens) == 1  # three calls share one transfer


def test_a_single_rank() -> None:
    plan = compiled(ppo({}, cluster=None))
    assert plan.header.world == 1 and plan.groups == () and not of(plan, p.Realloc)


def test_transfers_are_grouped() -> None:
    plan = compiled(ppo())
    assert ("gen.tokens", "gen.logprobs") in [e.values for e in of(plan, p.Transfer)]
    assert len({(e.values, e.src, e.dst) for e in of(plan, p.Transfer)}) == len(of(plan, p.Transfer))


def test_offload() -> None:
    plan = compiled(ppo(offload=True))
    assert len(of(plan, p.Onload)) == 1 and len(of(plan, p.Offload)) == 2
    assert {e.model for e in of(plan, p.Offload)} == {"ref"}


def test_blocks() -> None:
    graph = ppo()
    train = next(i for i in graph.items if isinstance(i, g.Train) and i.model == "actor")
    values = replace(next(i for i in graph.items if isinstance(i, g.Infer) and i.id == "v"), id="v2", writes=("v2",),
                     value="v2", clause=on(15, 4, 6, dp=2))
    graph = replace(
        graph, values=(*graph.values, replace(next(v for v in graph.values if v.id == "v"), id="v2")),
        items=(*(i for i in graph.items if i is not train), g.Repeat(iterations=3, body=(train,), span=at(12)),
               g.When(period=2, body=(values,), span=at(14))))
    plan = compiled(graph)
    repeat = next(i for i in next(x for x in plan.body if isinstance(x, p.Loop)).body if isinstance(i, p.Loop))
    assert repeat.trips == 3 and any(isinstance(e, p.Log) for e in repeat.body)
    assert {m.name: m.planned_updates for m in plan.models}["actor"] == 4 * 3 * 2
    every = [path for e, path in walk(plan.body) if isinstance(e, p.Realloc) and isinstance(path[-1], p.When)]
    assert every, "the second use of the critic is inside `every`, and so is its realloc"


def test_realloc_of_a_repeat_comes_once() -> None:
    graph = ppo()
    gen, *_ = (i for i in graph.items if isinstance(i, g.Infer) and i.id == "v")
    rest = tuple(i for i in graph.items if i is not gen)
    cut = next(n for n, i in enumerate(rest) if isinstance(i, g.Compute))
    # `v` is read later, so the repeat holds a second inference of its own
    again = replace(gen, id="w", writes=("w",), value="w")
    graph = replace(graph, values=(*graph.values, replace(next(v for v in graph.values if v.id == "v"), id="w")),
                    items=(*rest[:cut], g.Repeat(iterations=2, body=(again,), span=at(12)), gen, *rest[cut:]))
    plan = compiled(graph)
    assert [len(path) for e, path in walk(plan.body) if isinstance(e, p.Realloc) and e.model == "critic"] == [1]


def test_groups_are_what_events_need() -> None:
    plan = compiled(ppo())
    keys = [(x.axis, x.layout, x.mesh) for x in plan.groups]
    assert len(set(keys)) == len(keys)
    assert not any(x.axis == "tp" for x in plan.groups)


def test_preview_fits() -> None:
    done = api.finish(drafted(ppo()))
    text = preview(done, "ppo.rlf", "ppo.plan", encode(done.plan))
    assert all(len(line) <= 120 for line in text.splitlines()) and len(text.splitlines()) < 40
    for word in ("actor.generate dp=4 pp=2", "realloc", "ref.logprobs reads gen.tokens", "ppo.rlf:", "peak", "  ok"):
        assert word in text


def test_a_preview_cuts_nothing() -> None:
    """Every reason in full, in columns that line up, with ranks of four digits too."""
    meshes = {"gen": on(1, 0, 2048, dp=1024, tp=2), "score": on(2, 1024, 2048, dp=1024)}
    done = api.finish(drafted(ppo(meshes, cluster=g.Cluster(256, 8, 80.0))))
    text = preview(done, "ppo.rlf", "ppo.plan", encode(done.plan))
    flowing = " ".join(text.split())
    assert "…" not in text and max(map(len, text.splitlines())) <= 120
    rows = [line for line in text.splitlines() if line.startswith("  + ")]
    reasons = {e.because for e in events(done.plan.body) if e.because and e.traits.family != "bookkeeping"}
    for reason in reasons:
        assert reason.split()[0] in flowing and all(word in flowing for word in reason.split()), reason
    starts = {line.index(e.because.split()[0] + " " + e.because.split()[1]) for line in rows for e in events(done.plan.body)
              if e.because and " ".join(e.because.split()[:3]) in line}
    assert len(starts) == 1, "the reasons begin in one column"


def test_size_follows_the_program_and_not_the_ranks() -> None:
    def wide(n: int) -> Plan:
        meshes = {"gen": on(1, 0, n, tp=2, pp=2), "score": on(2, 0, 8, dp=8), "actor.train": on(8, 0, n // 2, pp=2)}
        return compiled(ppo(meshes, cluster=g.Cluster(n // 8, 8, 80.0)))
    small, large = encode(wide(16)), encode(wide(256))
    assert len(large) < 1.2 * len(small)


DEGREES = [(0, 8, dict(dp=4, tp=2)), (0, 8, dict(dp=2, tp=2, pp=2)), (0, 4, dict(tp=4)), (4, 8, dict(pp=4)),
           (2, 4, dict(dp=2)), (0, 1, dict()), (6, 8, dict(tp=2))]


@settings(max_examples=25, deadline=None)
@given(st.lists(st.sampled_from(DEGREES), min_size=6, max_size=6), st.booleans())
def test_every_placement_is_proved(chosen: list, offload: bool) -> None:
    names = ("gen", "score", "ref_lp", "v", "critic.train", "actor.train")
    places = {n: on(1, a, b, **(d | ({"offload": True} if offload and n in ("score", "ref_lp") else {})))
              for n, (a, b, d) in zip(names, chosen)}
    plan = compiled(ppo(places))
    moved = {e.model for e in of(plan, p.Realloc)}
    assert moved == {m for m, x, y in (("actor", 0, 5), ("critic", 3, 4)) if chosen[x] != chosen[y]}


# ---------------------------------------------------------------------------------------------------- negative


def test_a_wrong_plan_is_a_compiler_bug(monkeypatch: pytest.MonkeyPatch) -> None:
    draft = drafted(ppo())
    broken = replace(draft, body=tuple(i for i in draft.body if not isinstance(i, p.Realloc)))
    with pytest.raises(InternalError, match="RL05"):
        api.finish(broken)


def test_checks_between_passes_notice() -> None:
    low = node_events(place_graph(ppo(), "", family))
    with pytest.raises(InternalError, match="before it exists"):
        transfers.check_transfers(low)
    moved = transfers.transfers(low)
    with pytest.raises(InternalError, match="is in no spread or layout"):
        lengths.check_lengths(moved)  # spreads that are held in full have no record yet
    lengths.check_lengths(lengths.lengths(moved))
    done = drafted(ppo())
    with pytest.raises(InternalError, match="leak"):
        value_lifetimes.check_value_lifetimes(replace(done, body=tuple(i for i in done.body if not isinstance(i, p.Free))))
    with pytest.raises(InternalError, match="lost"):
        event_order.check_order(done, replace(done, body=done.body[1:]))
    with pytest.raises(InternalError, match="before an event that it needs"):
        event_order.check_order(done, replace(done, body=done.body[::-1]))
    train = next(e for e in events(done.body) if isinstance(e, p.Train))
    with pytest.raises(InternalError, match="outside its training layout"):
        reallocs.check_reallocs(replace(done, body=(replace(train, layout="0:8 dp=8"),)))


def test_order_of_jobs() -> None:
    job = lambda needs, makes, ranks, cost, kind=1: event_order._Job(  # noqa: E731
        frozenset(needs), frozenset(makes), frozenset(ranks), cost, kind)
    assert event_order.schedule([job("", "a", {0}, 9), job("a", "b", {0, 1}, 1, 0), job("", "c", {1}, 9)]) == [0, 2, 1]
    assert event_order.schedule([job("x", "", {0}, 1), job("", "x", {1}, 1, 0)]) == [0, 1]  # written only after it is read
    assert event_order.schedule([job("", "a", {0}, 5), job("", "b", {0}, 5, 0)]) == [1, 0]  # movement first


def test_saving_what_nothing_loads() -> None:
    graph = ppo()
    lone = g.Model("lone", "causal_lm", "sft", None, "float32", at(23))
    save = g.Save(id="lone.save", reads=(), writes=(), span=at(24), model="lone", path="lone")
    with pytest.raises(Failure) as caught:
        drafted(replace(graph, models=(*graph.models, lone), items=(*graph.items, save)))
    assert caught.value.diagnostics[0].code == "RL0319"
