"""`rlc graph`: the dataflow graph as a picture."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Mapping, Sequence
from typing import Literal

from rldsl import api
from rldsl.diag import fail
from rldsl.graph import picture
from rldsl.plan.expr import Scalar

Form = Literal["mermaid", "dot", "svg"]

def draw(form: Form, file: str, sets: Mapping[str, Scalar], place: str | None,
         overrides: Sequence[str] = (), reduce: bool = False) -> str:
    """The text of the picture. reduce: without edges that follow from others. Error: RL0095 SVG without Graphviz."""
    made = api.build_graph(api.read_source(file), sets, api.read_source(place) if place else None, overrides)
    if form == "mermaid":
        return picture.mermaid(made, reduce)
    if form == "dot":
        return picture.dot(made, reduce)
    program = shutil.which("dot")
    if program is None:
        raise fail("RL0095", "SVG needs Graphviz, but the program `dot` is not installed", place=file,
                   help="install Graphviz, or use --format mermaid or dot")
    return subprocess.run([program, "-Tsvg"], input=picture.dot(made, reduce), text=True, capture_output=True,
                          check=True).stdout
