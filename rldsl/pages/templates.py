"""The files of rldsl/templates, as text."""

from __future__ import annotations

from importlib import resources


def template(name: str) -> str:
    return resources.files("rldsl").joinpath("templates", name).read_text(encoding="utf-8")
