"""Ranks that compute with different things: what a run says of them."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import torch

from rldsl.backends import torch as backend
from rldsl.runtime.comm import arithmetic as module
from rldsl.runtime.comm.arithmetic import arithmetic, differences

CPU = torch.device("cpu")


@pytest.mark.parametrize("found", ["a", "aa", "aaaa"])
def test_alike(found: str) -> None:
    assert differences(list(found)) == ""


@pytest.mark.parametrize(("found", "says"), [
    ("ab", "(rank 0: a; rank 1: b)"),
    ("aabb", "(ranks 0-1: a; ranks 2-3: b)"),
    ("abca", "(ranks 0,3: a; rank 1: b; rank 2: c)"),
])
def test_unlike(found: str, says: str) -> None:
    note = differences(list(found))
    assert note.endswith(says) and "round differently" in note


@pytest.mark.parametrize(("library", "says"), [(None, "no kernels in C"), (object(), "kernels in C")])
def test_the_torch_backend_says_whether_kernels_run(monkeypatch: pytest.MonkeyPatch, library: object, says: str) -> None:
    from rldsl.backends.torch.kernels import kernel_library

    monkeypatch.setattr(kernel_library, "library", lambda: library)
    assert backend.arithmetic(CPU) == says and backend.arithmetic(torch.device("meta")) == ""
    found = arithmetic(CPU, ["torch", "torch"])
    assert found == f"cpu with {torch.backends.cpu.get_cpu_capability()}, torch {torch.__version__}, {says}"


def test_a_backend_need_not_say_anything(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "silent", SimpleNamespace())
    monkeypatch.setattr(module.backends, "package", lambda name: name)
    assert arithmetic(CPU, ["silent"]).endswith(torch.__version__)
