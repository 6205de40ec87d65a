"""What the dataflow graph of a plan shows, and how it is drawn."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from dataclasses import replace

from rldsl.pages import graph_svg
from rldsl.pages.colors import COUNT, hues
from rldsl.pages.dataflow import Dataflow, dataflow
from rldsl.plan.events import Free, Log, split_buffer
from rldsl.plan.model import Mesh, Plan
from rldsl.plan.notation import human
from rldsl.plan.projection import event_paths
from tests.plan.sample import grpo
from tests.plan_views.plans import change, drop

SVG = "{http://www.w3.org/2000/svg}"


def links(flow: Dataflow) -> set[tuple[str, str, tuple[str, ...], bool]]:
    return {(k.source, k.target, k.names, k.parameters) for k in flow.links}


SIZE = human(next(e.bytes for e, _ in event_paths(grpo()) if e.id == 4))


def test_the_sample() -> None:
    flow = dataflow(grpo())
    assert [(n.id, n.what, n.title, n.lines) for n in flow.nodes] == [
        ("before-e4-e14", "before", "actor", ("of the previous step",)),
        ("e3", "value", "tasks.next", ("prompt", "mesh(0:4)")),
        ("e4", "move", "actor", (SIZE,)),
        ("e5", "call", "actor.generate", ("gen", "mesh(0:4) dp=4")),
        ("e7", "move", "gen.tokens", ()),
        ("e8", "call", "ref.logprobs", ("ref_lp", "mesh(2:4) dp=2")),
        ("e9", "move", "gen.tokens", ()),
        ("e10", "value", "adv, reward", ("mesh(0:4)",)),
        ("e11", "move", "gen.tokens, gen.logprobs", ()),
        ("e12", "move", "adv", ()),
        ("e13", "move", "ref_lp", ()),
        ("e14", "call", "actor.train", ("mesh(0:2) tp=2",)),
        ("e17", "value", "save actor", ("mesh(0:2)",)),
    ]
    assert links(flow) == {
        ("before-e4-e14", "e4", ("actor",), True), ("e4", "e5", ("actor",), True), ("e14", "e17", ("actor",), True),
        ("e3", "e5", ("prompt.tokens",), False), ("e3", "e10", ("prompt.columns",), False),
        ("e5", "e7", ("gen.tokens",), False), ("e7", "e8", ("gen.tokens",), False),
        ("e5", "e9", ("gen.tokens",), False), ("e9", "e10", ("gen.tokens",), False),
        ("e5", "e11", ("gen.tokens", "gen.logprobs"), False), ("e11", "e14", ("gen.tokens", "gen.logprobs"), False),
        ("e10", "e12", ("adv",), False), ("e12", "e14", ("adv",), False),
        ("e8", "e13", ("ref_lp",), False), ("e13", "e14", ("ref_lp",), False)}
    assert [n.block for n in flow.nodes if n.block] == ["every 2"]


def test_every_read_that_an_event_of_the_step_writes_is_a_link() -> None:
    plan = grpo()
    flow = dataflow(plan)
    shown = {n.id for n in flow.nodes}
    names = {(k.target, name) for k in flow.links for name in k.names}
    made = {b for e, _ in event_paths(plan) if f"e{e.id}" in shown for b in e.writes}
    for event, _ in event_paths(plan):
        for buffer in event.reads:
            if f"e{event.id}" in shown and buffer in made and buffer not in event.writes:
                assert (f"e{event.id}", split_buffer(buffer)[0]) in names, (event.id, buffer)


def test_links_go_forward() -> None:
    flow = dataflow(grpo())
    order = {n.id: i for i, n in enumerate(flow.nodes)}
    assert all(order[k.source] < order[k.target] for k in flow.links)


def test_what_keeps_house_is_left_out() -> None:
    plan = grpo()
    shown = {n.event for n in dataflow(plan).nodes}
    assert not any(e.id in shown for e, _ in event_paths(plan) if isinstance(e, Free | Log))
    assert not any(e.id in shown for e, path in event_paths(plan) if not path)


def test_a_plan_without_a_movement_has_direct_links() -> None:
    plan = drop(change(grpo(), 5, reads=("actor@L1", "prompt.tokens@s0")), 4)
    assert ("before-e5-e14", "e5", ("actor",), True) in links(dataflow(plan))


def test_a_metric_is_called_by_its_name() -> None:
    plan = change(grpo(), 10, outputs=(("reward", "x#1"),), writes=("x#1@s4",))
    plan = change(plan, 15, metrics=(("reward", "x#1@s4"),))
    assert "metric reward" in [n.title for n in dataflow(plan).nodes]


def test_a_frozen_model_comes_from_nowhere() -> None:
    assert not any("ref" in k.names for k in dataflow(grpo()).links)


# ------------------------------------------------------------------------------------------------------ the picture


def test_the_picture_stands_alone() -> None:
    text = graph_svg(grpo())
    root = ET.fromstring(text)
    assert root.tag == f"{SVG}svg" and root.find(f"{SVG}style") is not None
    nodes = [g for g in root.iter(f"{SVG}g") if "node" in g.get("class", "").split()]
    assert len(nodes) == len(dataflow(grpo()).nodes)
    assert not list(root.iter(f"{SVG}a")) and "href" not in text
    assert text == graph_svg(grpo())


def test_every_node_says_what_it_is() -> None:
    root = ET.fromstring(graph_svg(grpo()))
    titles = [g.findtext(f"{SVG}title") for g in root.iter(f"{SVG}g") if g.get("data-event")]
    assert f"realloc actor, {SIZE}, mesh(0:2) tp=2 -> mesh(0:4) dp=4" in titles
    assert "transfer gen.tokens, mesh(0:4) dp=4 -> mesh(2:4) dp=2" in titles
    assert "actor.generate, gen, mesh(0:4) dp=4" in titles
    labels = ["".join(t.itertext()) for t in root.iter(f"{SVG}text")]
    assert f"reallocactor{SIZE}" in labels and "transfergen.tokens" in labels


def test_names_are_text_and_never_elements() -> None:
    plan = grpo()
    plan = change(plan, 7, values=('<script>alert("1")</script>',))
    plan = replace(plan, header=replace(plan.header, program='"><script>alert(2)</script>'))
    root = ET.fromstring(graph_svg(plan))
    assert not list(root.iter(f"{SVG}script")) and not list(root.iter("script"))
    assert any("<script>" in "".join(t.itertext()) for t in root.iter(f"{SVG}text"))


def test_a_long_name_is_cut() -> None:
    root = ET.fromstring(graph_svg(change(grpo(), 7, values=("x" * 500,))))
    labels = ["".join(t.itertext()) for t in root.iter(f"{SVG}text")]
    assert any(t.endswith("…") for t in labels) and max(map(len, labels)) < 60


def test_meshes_have_colors_in_the_order_of_their_ranks() -> None:
    found = hues(grpo())
    assert [(h.mesh, h.style, h.text) for h in found.values()] == [
        ("all", "hue0", "mesh(0:4)"), ("fit", "hue1", "mesh(0:2)"), ("ref", "hue2", "mesh(2:4)")]


def many(count: int) -> Plan:
    """A plan with a transfer of each of `count` meshes made a fetch of it."""
    plan = grpo()
    fetch = next(e for e, _ in event_paths(plan) if e.id == 3)
    loop = next(i for i in plan.body if not hasattr(i, "id") or hasattr(i, "body"))
    body = tuple(replace(fetch, id=100 + i, mesh=f"x{i}") for i in range(count))
    return replace(plan, meshes=(*plan.meshes, *(Mesh(f"x{i}", ((i % 4, i % 4 + 1),)) for i in range(count))),
                   body=(*(i for i in plan.body if i is not loop), replace(loop, body=(*loop.body, *body))))


def test_more_meshes_than_colors() -> None:
    styles = [h.style for h in hues(many(COUNT)).values()]
    assert len(set(styles)) == COUNT + 3 and sum("again" in s for s in styles) == 3
    root = ET.fromstring(graph_svg(many(COUNT)))
    used = {c for g in root.iter(f"{SVG}g") for c in re.findall(r"hue\d", g.get("class", ""))}
    assert used == {f"hue{i}" for i in range(COUNT)}


def test_a_computation_that_reads_only_lengths_hangs_on_its_sequences() -> None:
    plan = change(drop(grpo(), 9), 10, reads=())
    assert ("e5", "e10", ("gen",), False) in links(dataflow(plan))
