"""Tiny models and data under the names that the examples have by default, and how an example is shrunk to fit them."""

from __future__ import annotations

from pathlib import Path

from rldsl import api
from rldsl.syntax import ast
from rldsl.syntax.parse import parse
from tests.tiny import make_all

SMALL = {"steps": 2, "batch": 8, "tokens": 6, "wanted": 8, "buffer": 2, "part": 3, "k": 8}  # of an example's params


def make_data(root: Path) -> Path:
    """The models and data that the examples name. Prompts differ in length."""
    return make_all(root, num_hidden_layers=2)


def small(path: Path) -> dict[str, int]:
    """What --set makes a quick program of an example."""
    names = {i.name.name for i in parse(api.read_source(str(path))).items if isinstance(i, ast.Param)}
    return {n: v for n, v in SMALL.items() if n in names}
