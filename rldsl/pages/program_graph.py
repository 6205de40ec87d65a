"""The dataflow graph of a program, before anything is placed, as one SVG document.

In: boxes and links, in an order in which no link goes backwards. Out: SVG with its styles inside, which stands alone in
a file. The layout is that of the report's picture; no other program is needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from markupsafe import Markup

from rldsl.pages.dataflow import Link
from rldsl.pages.graph import BAR, LINE, LONGEST, MONO, PAD, SANS, link_element
from rldsl.pages.layered import Edge, Size, draw
from rldsl.pages.markup import element, number
from rldsl.pages.templates import template
from rldsl.plan.notation import cut


@dataclass(frozen=True, slots=True)
class Box:
    """A node of the graph."""

    id: str  # of the node
    title: str  # the first line
    line: str  # below the title; "" for none
    shape: Literal["call", "data", "value"]  # how it is drawn


def program_svg(title: str, boxes: Sequence[Box], links: Sequence[Link]) -> str:
    """links: names of the values that pass, dashed where they are parameters."""
    sizes = {box.id: _size(box) for box in boxes}
    drawing = draw(sizes, [Edge(link.source, link.target, 2) for link in links])
    drawn = [link_element(link, route) for link, route in zip(links, drawing.routes, strict=True)]
    nodes = [_box(box, sizes[box.id], drawing.centers[box.id]) for box in boxes]
    return str(element(
        "svg", element("title", title), element("style", Markup(template("graph.css"))),
        element("g", *drawn, class_="links"), element("g", *nodes, class_="nodes"), xmlns="http://www.w3.org/2000/svg",
        class_="rlf graph", view_box=f"0 0 {number(drawing.width)} {number(drawing.height)}",
        width=number(drawing.width), height=number(drawing.height), role="img", aria_label=title))


def _size(box: Box) -> Size:
    width = max(MONO * len(cut(box.title, LONGEST)), SANS * len(box.line)) + 2 * PAD + BAR
    return max(width, 84.0), 16.0 + LINE * (1 + bool(box.line))


def _box(box: Box, size: Size, center: tuple[float, float]) -> Markup:
    (width, height), (x, y) = size, center
    hue = {"call": "hue0", "data": "hue2", "value": "hue7"}[box.shape]
    return element(
        "g", element("title", ", ".join(text for text in (box.title, box.line) if text)),
        element("rect", class_="shape", width=width, height=height, rx=height / 2 if box.shape == "value" else 8.0),
        element("text", cut(box.title, LONGEST), x=width / 2, y=20, class_="name", text_anchor="middle"),
        *(element("text", line, x=width / 2, y=20 + LINE, class_="line", text_anchor="middle")
          for line in (box.line,) if line),
        class_=f"node {'value' if box.shape == 'value' else 'call'} {hue}",
        transform=f"translate({number(x - width / 2)} {number(y - height / 2)})")
