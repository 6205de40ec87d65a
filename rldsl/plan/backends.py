"""What there is to compute calls with: backends by name, and what each can express.

In: the name that a layout carries. Out: its `Description`, which the light module `rldsl.backends.NAME.describe` has as
`DESCRIPTION`; that module imports neither torch nor the library behind the backend. Compiler and verifier know backends
by their descriptions alone, and the runtime by the one function of `rldsl.runtime.backend.Build`.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import pkgutil
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Protocol

from rldsl.plan.model import Layout, ParamSpec

CALLS = ("generate", "infer", "train")
DIVISIONS = ("dp", "tp", "pp", "vpp", "cp", "ep")


class Facts(Protocol):
    """What is known of a model when its program is compiled. name: of its family. kind: of its head. config: (key,
    JSON) of its config.json."""

    @property
    def name(self) -> str: ...
    @property
    def kind(self) -> str: ...
    @property
    def params(self) -> Sequence[ParamSpec]: ...
    @property
    def config(self) -> Sequence[tuple[str, str]]: ...


def anything(facts: Facts, layout: Layout) -> str:
    """The `problem` of a backend that runs every model."""
    return ""


@dataclass(frozen=True, slots=True)
class Description:
    """What a backend can express.

    calls: kinds of call. divisions: the degrees that may be above 1. zero: the largest level; 0 without any. adapters:
    whether models may have them. needs: (module, line that installs it) of a package that it stands on. versions: (name
    of that package, the first version that will do, the first that will not), where not all will. issues: whose
    protocol of `verify/issue_order.py` its calls keep to. invariant: whether it can keep to that of a model. problem:
    what of a model, or of a model under a layout, it cannot express, by the feature's name; "" if nothing."""

    issues: str
    calls: tuple[str, ...] = CALLS
    divisions: tuple[str, ...] = DIVISIONS
    zero: int = 3
    adapters: bool = True
    needs: tuple[str, str] | None = None
    versions: tuple[str, str, str] | None = None
    invariant: bool = False
    problem: Callable[[Facts, Layout], str] = anything


def names() -> tuple[str, ...]:
    """The backends that there are, ascending."""
    package = importlib.import_module("rldsl.backends")
    return tuple(sorted(found.name for found in pkgutil.iter_modules(package.__path__) if found.ispkg))


@cache
def described(name: str) -> Description | None:
    """None where there is no backend of this name. Nothing is imported but the description of one that there is."""
    if name not in names():
        return None
    found = importlib.import_module(f"rldsl.backends.{name}.describe").DESCRIPTION
    assert isinstance(found, Description), f"rldsl.backends.{name}.describe has no DESCRIPTION"
    return found


def lacking(description: Description) -> str:
    """The line that installs what a backend stands on, where that is not there, or in a version that will not do; else
    ""."""
    if description.needs is None:
        return ""
    module, line = description.needs
    try:
        there = importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # the package around the module
        return line
    return "" if there and not unfit(description) else line


def unfit(description: Description) -> str:
    """Which version of its package is there that will not do; "" if none, or where nothing says its version. One that
    came before a release counts as it."""
    if description.versions is None:
        return ""
    name, first, end = description.versions
    try:
        found = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""
    return "" if not found or release(first) <= release(found) < release(end) else (
        f"{name} {found} is there, and it needs {first} or later, before {end}")


def release(version: str) -> tuple[int, ...]:
    """Its numbers alone: 0.17.0rc0 is (0, 17, 0); () where there are none."""
    return tuple(map(int, re.findall(r"\d+", re.split(r"[a-zA-Z+!-]", version)[0])))


def unable(description: Description, call: str, layout: Layout, adapters: bool) -> str:
    """What a backend cannot do of a call under a layout, whatever the model; "" if nothing."""
    if call not in description.calls:
        return f"it has no `{call}`"
    divided = next((d for d in DIVISIONS if getattr(layout, d) > 1 and d not in description.divisions), "")
    if divided:
        return f"it has no `{divided}`"
    if layout.zero > description.zero:
        return f"it has `zero` up to {description.zero}" if description.zero else "it has no `zero`"
    return "it has no adapters" if adapters and not description.adapters else ""
