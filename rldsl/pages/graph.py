"""The dataflow graph as SVG: a node for each call, computation and movement, colored by mesh; links lead down.

In: a plan. Out: an SVG element; `graph_svg` has its styles inside and stands alone, in a notebook or a file.
"""

from __future__ import annotations

from collections.abc import Mapping

from markupsafe import Markup

from rldsl.pages.colors import Hue, hues
from rldsl.pages.dataflow import Dataflow, Link, Node, dataflow
from rldsl.pages.layered import Drawing, Edge, Point, Size, draw
from rldsl.pages.markup import element, number
from rldsl.pages.templates import template
from rldsl.plan.model import Plan
from rldsl.plan.notation import cut
from rldsl.plan.visible_plan import visible_plan

MONO, SANS = 7.55, 6.6  # width of a letter of a title, and of a line below it
PAD, BAR, LINE = 14.0, 5.0, 15.0
LONGEST = 30  # letters of a title
ARROW = 5.0


def graph_svg(plan: Plan) -> str:
    """The dataflow graph of a plan as one SVG document."""
    plan = visible_plan(plan)
    return str(graph(plan, dataflow(plan), element("style", Markup(template("graph.css"))), linked=False))


def graph(plan: Plan, flow: Dataflow, *before: Markup, linked: bool = True) -> Markup:
    """The picture of the dataflow of a plan. before: elements that stand before all others. linked: nodes lead to
    `#eN`, where their event is."""
    colors = hues(plan)
    sizes = {n.id: _size(n) for n in flow.nodes}
    what = {n.id: n.what for n in flow.nodes}
    edges = [Edge(k.source, k.target, 1 if "move" in (what[k.source], what[k.target]) else 2) for k in flow.links]
    drawing = draw(sizes, edges, frozenset(n.id for n in flow.nodes if n.late))
    links = [link_element(link, route) for link, route in zip(flow.links, drawing.routes, strict=True)]
    nodes = [_node(n, colors, sizes[n.id], drawing.centers[n.id], linked) for n in flow.nodes]
    return _frame(plan, drawing, *before, element("g", *links, class_="links"), element("g", *nodes, class_="nodes"))


def _frame(plan: Plan, drawing: Drawing, *inside: Markup) -> Markup:
    title = f"Dataflow of a step of {plan.header.program}"
    return element("svg", element("title", title), *inside, xmlns="http://www.w3.org/2000/svg", class_="rlf graph",
                   view_box=f"0 0 {number(drawing.width)} {number(drawing.height)}", width=number(drawing.width),
                   height=number(drawing.height), style=f"--wide: {number(drawing.width)}px", role="group",
                   aria_label=title)


def _size(node: Node) -> Size:
    title, lines = cut(node.title, LONGEST), _lines(node)
    if node.what == "move":
        return MONO * 0.87 * len(title) + SANS * sum(len(x) + 1 for x in (_word(node), *lines)) + 22, 24.0
    width = max([MONO * len(title), *(SANS * len(x) for x in lines)]) + 2 * PAD + BAR
    return max(width, 84.0), 16.0 + LINE * (1 + len(lines))


def _lines(node: Node) -> tuple[str, ...]:
    return tuple(x for x in (*node.lines, node.block if node.what != "move" else "") if x)


def _node(node: Node, colors: Mapping[str, Hue], size: Size, center: Point, linked: bool) -> Markup:
    (width, height), (x, y) = size, center
    shape = element("rect", class_="shape", width=width, height=height, rx=height / 2 if node.what == "move" else 8.0)
    parts = _movement(node, size) if node.what == "move" else _work(node, height)
    hue = colors[node.mesh].style if node.mesh in colors and node.what in ("call", "value") else ""
    kind = _word(node) if node.what == "move" else node.what
    return element("a" if linked else "g", element("title", _tooltip(node)), shape, *parts,
                   class_=" ".join(x for x in ("node", kind, hue) if x), data_event=node.event,
                   href=f"#e{node.event}" if linked else None,
                   transform=f"translate({number(x - width / 2)} {number(y - height / 2)})")


def _movement(node: Node, size: Size) -> list[Markup]:
    """One line: "realloc actor 16.7 GiB"."""
    spans = [element("tspan", _word(node), class_="size"),
             element("tspan", cut(node.title, LONGEST), class_="name", dx=6),
             *(element("tspan", line, class_="size", dx=6) for line in node.lines)]
    return [element("text", *spans, x=size[0] / 2, y=size[1] / 2 + 4, text_anchor="middle")]


def _work(node: Node, height: float) -> list[Markup]:
    """The title and the lines below it, next to the color of the mesh."""
    before, h = node.what == "before", number(height)
    bar = f"M8 0Q0 0 0 8V{number(height - 8)}Q0 {h} 8 {h}H{number(BAR)}V0Z"
    left = PAD + (2 if before else BAR)
    return [*([] if before else [element("path", class_="bar", d=bar)]),
            element("text", cut(node.title, LONGEST), x=left, y=20, class_="name"),
            *(element("text", line, x=left, y=20 + LINE * i, class_="block" if line == node.block else "line")
              for i, line in enumerate(_lines(node), 1))]


def _word(node: Node) -> str:
    return "realloc" if node.realloc else "transfer"


def _tooltip(node: Node) -> str:
    """A node in a sentence, for a pointer and for a screen reader."""
    head = f"{_word(node)} {node.title}" if node.what == "move" else node.title
    return ", ".join(dict.fromkeys(x for x in (head, *node.lines, node.about, node.block) if x))


def link_element(link: Link, route: tuple[Point, ...]) -> Markup:
    """A way down that bends between layers, with a tip at its end."""
    (x, y), *rest = route
    end_x, end_y = rest.pop()
    d = f"M{_at(x, y)}"
    for i, (to_x, to_y) in enumerate((*rest, (end_x, end_y - ARROW))):
        middle = (y + to_y) / 2
        bent = i % 2 == 0 and abs(to_x - x) > 0.5
        d += f"C{_at(x, middle)} {_at(to_x, middle)} {_at(to_x, to_y)}" if bent else f"L{_at(to_x, to_y)}"
        x, y = to_x, to_y
    tip = f"M{_at(end_x - 4, end_y - 7)}L{_at(end_x, end_y)}L{_at(end_x + 4, end_y - 7)}Z"
    return element("g", element("title", ", ".join(link.names)), element("path", d=d, class_="way"),
                   element("path", d=tip, class_="tip"), class_="link" + (" parameters" if link.parameters else ""),
                   data_from=link.source, data_to=link.target)


def _at(x: float, y: float) -> str:
    return f"{number(x, 1)} {number(y, 1)}"
