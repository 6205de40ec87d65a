"""Packages of kernels that are used where they are there: whether one can be used.

In: how a package is called, what of it is imported and which versions will do. Out: a `Package`. One that is missing,
that breaks while it is imported or that is of another version is never an error, since plain kernels compute the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

from rldsl.plan.backends import release

Version = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Wanted:
    """title: as people call it. modules: what is imported, its root first. first, end: the versions that will do, `end`
    being the first that will not; () where any will. asked: who says so."""

    title: str
    modules: Sequence[str]
    first: Version = ()
    end: Version = ()
    asked: str = ""


@dataclass(frozen=True, slots=True)
class Package:
    """What was found of it. version: "" where nothing is there. problem: why it cannot be used all the same."""

    title: str
    version: str = ""
    problem: str = ""

    @property
    def usable(self) -> bool:
        return bool(self.version) and not self.problem


def look(wanted: Wanted) -> Package:
    """Imports it, if it is there."""
    root = wanted.modules[0]
    try:
        if find_spec(root) is None:
            return Package(wanted.title)
        modules = [import_module(name) for name in wanted.modules]
    except Exception as error:  # what a package for another CUDA, torch or Python raises may be anything
        said = (str(error).splitlines() or [""])[0][:120]
        return Package(wanted.title, problem=f"its import fails ({type(error).__name__}: {said})")
    found = str(getattr(modules[0], "__version__", "")) or _installed(wanted.title)
    if not wanted.first or wanted.first <= release(found) < (wanted.end or (1 << 30,)):
        return Package(wanted.title, found or "of an unknown version")
    span = f"{text(wanted.first)} or later" + (f", before {text(wanted.end)}" if wanted.end else "")
    return Package(wanted.title, found, f"{wanted.asked or 'this backend'} asks for {span}")


def text(version: Version) -> str:
    return ".".join(map(str, version))


def _installed(title: str) -> str:
    try:
        return version(title.lower().replace(" ", "-"))
    except PackageNotFoundError:
        return ""


FLASH = Wanted("flash-attn", ("flash_attn",), first=(2, 7), end=(3,))


@cache
def flash() -> Package:
    """flash-attn as it is here; asked for on CUDA alone."""
    return look(FLASH)
