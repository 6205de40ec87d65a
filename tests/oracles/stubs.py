"""Modules that a system imports for other purposes than its formulas (Ray, DeepSpeed, vLLM), replaced by empty ones, so
that the system's own modules load where only its formulas' requirements are installed.

    install("ray", "deepspeed")

Only what is named is replaced; the system under test and torch never are.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock


def _made(owner: Any, name: str) -> Any:
    """An attribute that does nothing: a class where the name is that of a class, so that one can inherit from it."""
    if name.startswith("__") and name.endswith("__"):
        raise AttributeError(name)
    value = _Class(name, (), {}) if name[0].isupper() else MagicMock(name=name)
    setattr(owner, name, value)
    return value


class _Class(type):
    def __getattr__(cls, name: str) -> Any:
        return _made(cls, name)


class _Empty(ModuleType):
    def __getattr__(self, name: str) -> Any:
        return _made(self, name)


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Answers for the named packages and everything below them."""

    def __init__(self, names: Sequence[str]):
        self.names = set(names)

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if name.partition(".")[0] not in self.names:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return _Empty(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


def install(*names: str) -> None:
    sys.meta_path.insert(0, _Finder(names))
