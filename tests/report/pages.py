"""Pages to look at, and reading them."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from html.parser import HTMLParser
from typing import Any

from rldsl.clusters import Cluster, preset
from rldsl.memory import curves
from rldsl.pages import Given, page
from rldsl.pages.recorded import Recorded
from rldsl.plan.model import Mesh, Plan
from rldsl.plan.projection import event_paths
from rldsl.plan.trace import document, span
from rldsl.simulate import simulate
from rldsl.verify import Proof
from tests.plan.sample import grpo


def h100(devices: int = 8) -> Cluster:
    found = preset(f"h100x{devices}")
    assert found is not None
    return found


H100 = h100()


def given(plan: Plan | None = None, cluster: Cluster = H100, recorded: Recorded | None = None, assumed: bool = False,
          **sources: str) -> Given:
    """sources: texts by path, with _ for the dot of it."""
    plan = plan or grpo()
    return Given(plan, "0123456789ab", Proof(18, 40, ("references",)), curves(plan), cluster, assumed,
                 simulate(plan, cluster), recorded=recorded, sources={path.replace("_", "."): text for path, text in sources.items()})


def made(plan: Plan | None = None, **more: Any) -> Outline:
    return Outline.of(page(given(plan, **more)))


def wide(times: int) -> Plan:
    """The sample plan on so many times its ranks, with as much more data parallelism."""
    plan = grpo()
    meshes = tuple(Mesh(m.id, tuple((a * times, b * times) for a, b in m.ranks)) for m in plan.meshes)
    classes = tuple(replace(c, ranks=tuple((a * times, b * times) for a, b in c.ranks)) for c in plan.classes)
    header = replace(plan.header, world=4 * times, devices_per_node=8)
    return replace(plan, header=header, meshes=meshes, classes=classes, layouts=tuple(
        replace(x, dp=x.dp * times) for x in plan.layouts))


def trace(plan: Plan, steps: int = 3, **about: Any) -> dict[str, Any]:
    """A recorded timeline as JSON: in step n every event takes n milliseconds on each of its ranks."""
    members = {m.id: m.members() for m in plan.meshes}
    spans = []
    for step in range(1, steps + 1):
        for rank in range(plan.header.world):
            at = 100.0 * step
            for event, path in event_paths(plan):
                if path and rank in members[event.mesh]:
                    spans.append(span(event, rank, plan.header.devices_per_node, step, at, step / 1e3, busy=step / 2e3))
                    at += step / 1e3
    found: dict[str, Any] = json.loads(document(plan, spans, "recorded"))
    found["otherData"] |= about
    return found


@dataclass
class Outline(HTMLParser):
    """The elements of a page: (name, attributes), and the text between them outside of scripts and styles."""

    text: str = ""
    source: str = ""
    elements: list[tuple[str, dict[str, str]]] = field(default_factory=list)
    inside: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__(convert_charrefs=True)

    @staticmethod
    def of(source: str) -> Outline:
        found = Outline(source=source)
        found.feed(source)
        found.close()
        found.text = " ".join(found.text.split())
        return found

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.text += " "
        self.elements.append((tag, {k: v or "" for k, v in attrs}))
        self.inside.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, {k: v or "" for k, v in attrs}))

    def handle_endtag(self, tag: str) -> None:
        while self.inside and self.inside.pop() != tag:
            pass

    def handle_data(self, data: str) -> None:
        if not {"script", "style"} & set(self.inside[-1:]):
            self.text += data

    def all(self, tag: str, **attributes: str) -> list[dict[str, str]]:
        """The elements of a name with these attributes (a word of the value is enough)."""
        return [found for name, found in self.elements if name == tag and all(
            v in found.get(k.rstrip("_").replace("_", "-"), "").split() for k, v in attributes.items())]
