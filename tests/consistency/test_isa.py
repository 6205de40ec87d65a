"""`tests/isa.py`: which instruction set, and that processes of a test have it too."""

from __future__ import annotations

import os
import subprocess

import pytest
import torch

from tests import isa
from tests.conftest import HERE, NUMERIC
from tests.world import run_world


@pytest.mark.parametrize("best, name", [("AVX512", "AVX2"), ("AVX2", None), ("DEFAULT", None), ("SVE256", None)])
def test_the_next_smaller_one(best: str, name: str | None) -> None:
    assert isa.smaller(best) == name


@pytest.mark.parametrize("best, arguments, code, said", [
    ("DEFAULT", ["-m", "numeric"], 0, "no smaller instruction set"), ("NEON", [], 0, "no smaller instruction set"),
    ("AVX2", ["-m", "numeric"], 0, "no smaller instruction set"),
    ("AVX2", ["avx512"], 2, "not AVX512"), ("DEFAULT", ["avx2", "-x"], 2, "not AVX2")])
def test_a_processor_without_it(best: str, arguments: list[str], code: int, said: str,
                                monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: best)
    assert isa.main(arguments) == code
    assert said in "".join(capsys.readouterr())


@pytest.mark.parametrize("best, arguments, name, rest", [
    ("AVX512", ["-m", "numeric"], "avx2", ["-m", "numeric"]), ("AVX512", ["default", "-x"], "default", ["-x"]),
    ("AVX2", ["default"], "default", []), ("AVX2", ["avx2"], "avx2", [])])
def test_pytest_gets_it(best: str, arguments: list[str], name: str, rest: list[str],
                        monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[list[str], dict[str, str]]] = []

    def call(line: list[str], env: dict[str, str]) -> int:
        seen.append((line, env))
        return 3

    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: best)
    monkeypatch.setattr(subprocess, "call", call)
    assert isa.main(arguments) == 3
    [(line, env)] = seen
    assert line[1:] == ["-m", "pytest", *rest] and env["ATEN_CPU_CAPABILITY"] == name
    assert {"DNNL_MAX_CPU_ISA", "MKL_ENABLE_INSTRUCTIONS", "PATH"} <= env.keys()


def _set(rank: int) -> str:
    return str(torch.backends.cpu.get_cpu_capability())


def test_ranks_have_that_of_the_test() -> None:
    mine = torch.backends.cpu.get_cpu_capability()
    assert run_world(1, _set) == [mine]
    if "ATEN_CPU_CAPABILITY" in os.environ:
        assert mine == os.environ["ATEN_CPU_CAPABILITY"].upper()


def test_numeric_directories_exist_and_their_tests_are_marked(request: pytest.FixtureRequest) -> None:
    assert all([*(HERE / name).glob("test_*.py")] for name in NUMERIC)
    for item in request.session.items:
        assert (item.get_closest_marker("numeric") is not None) == (item.path.parent.name in NUMERIC)
