"""Optional kernel packages (flash-attn, Transformer Engine, Apex): which of them can be used here.

In: what a package is called, which of its modules are needed, and which versions fit. Out: a `Package`.
Invariant: a package that is missing, fails to import or has another version is never an error, since plain kernels
compute the same.
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
class PackageSpec:
    """What a backend needs of an optional package."""

    title: str                 # as people call it
    modules: Sequence[str]     # all that is imported, the top-level module first
    min_version: Version = ()  # inclusive
    max_version: Version = ()  # exclusive; () for both: any version
    required_by: str = ""      # who sets these bounds, for messages


@dataclass(frozen=True, slots=True)
class Package:
    """What was found of a package."""

    title: str         # as people call it
    version: str = ""  # "" if it is not installed
    problem: str = ""  # why it cannot be used although it is installed

    @property
    def usable(self) -> bool:
        return bool(self.version) and not self.problem


def probe(spec: PackageSpec) -> Package:
    """Import the package if it is installed, and check its version."""
    root = spec.modules[0]
    try:
        if find_spec(root) is None:
            return Package(spec.title)
        modules = [import_module(name) for name in spec.modules]
    except Exception as error:  # a package built for another CUDA, torch or Python may raise anything
        first_line = (str(error).splitlines() or [""])[0][:120]
        return Package(spec.title, problem=f"importing it fails ({type(error).__name__}: {first_line})")
    installed = str(getattr(modules[0], "__version__", "")) or _installed_version(spec.title)
    if not spec.min_version or spec.min_version <= release(installed) < (spec.max_version or (1 << 30,)):
        return Package(spec.title, installed or "of unknown version")
    bounds = f"{_dotted(spec.min_version)} or later"
    bounds += f", before {_dotted(spec.max_version)}" if spec.max_version else ""
    return Package(spec.title, installed, f"{spec.required_by or 'this backend'} needs {bounds}")


def _dotted(numbers: Version) -> str:
    return ".".join(map(str, numbers))


def _installed_version(title: str) -> str:
    try:
        return version(title.lower().replace(" ", "-"))
    except PackageNotFoundError:
        return ""


FLASH_ATTN = PackageSpec("flash-attn", ("flash_attn",), min_version=(2, 7), max_version=(3,))


@cache
def flash_attn() -> Package:
    """flash-attn as installed here; called only on CUDA."""
    return probe(FLASH_ATTN)
