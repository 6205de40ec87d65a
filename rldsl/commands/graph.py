"""`rlc graph`: the dataflow graph of a program as a picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal, cast

from rldsl import api
from rldsl.commands import Usage
from rldsl.graph import model as g
from rldsl.graph import picture
from rldsl.plan.expr import Scalar

Form = Literal["mermaid", "dot", "svg"]
ENDINGS: Mapping[str, Form] = {".mmd": "mermaid", ".mermaid": "mermaid", ".dot": "dot", ".gv": "dot", ".svg": "svg"}


def form_of(asked: str | None, target: str | None) -> Form:
    """The form that `--format` names, or the ending of the output file, or else Mermaid."""
    if asked is not None:
        return cast(Form, asked)
    if target is None:
        return "mermaid"
    form = ENDINGS.get(Path(target).suffix.lower())
    if form is None:
        raise Usage(f"{target} has an unknown image extension: use one of {', '.join(ENDINGS)}, or pass --format")
    return form


def draw(form: Form, file: str, sets: Mapping[str, Scalar], place: str | None,
         overrides: Sequence[str] = (), reduce: bool = False) -> str:
    """The text of the picture. reduce: without edges that follow from others."""
    made = api.build_graph(api.read_source(file), sets, api.read_source(place) if place else None, overrides)
    match form:
        case "mermaid":
            return picture.mermaid(made, reduce)
        case "dot":
            return picture.dot(made, reduce)
        case "svg":
            return svg(made, reduce)


def svg(graph: g.Graph, reduce: bool = False) -> str:
    """One SVG document. Parameter versions that reach the next step are left out, so that all links lead down."""
    from rldsl.pages.dataflow import Link
    from rldsl.pages.program_graph import Box, program_svg

    nodes = list(g.nodes(graph.items))
    boxes, labels = [], picture.labels_of(graph)
    for node in nodes:
        first, *rest = picture.label_lines(node, labels)
        shape: Literal["call", "data", "value"] = (
            "value" if isinstance(node, g.Compute) else "data" if isinstance(node, picture.STORES) else "call")
        boxes.append(Box(node.id, first, "; ".join(rest), shape))
    place = {node.id: i for i, node in enumerate(nodes)}
    links: dict[tuple[str, str, bool], list[str]] = {}
    for source, target, label, version in picture.edges(graph, reduce):
        if place[source] < place[target]:
            links.setdefault((source, target, version), []).append(label)
    return program_svg(f"Dataflow of {graph.flow}", boxes,
                       [Link(a, b, tuple(labels), version) for (a, b, version), labels in links.items()])
