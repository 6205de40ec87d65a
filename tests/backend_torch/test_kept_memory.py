"""The heap after `keep_freed_memory`, each in a process of its own: freed memory stays, and pages are large."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from rldsl.backends.torch.kernels import products

# for large pages by the fork server, and by shards in this process
SET_BY_TESTS = ("GLIBC_TUNABLES", "LRU_CACHE_CAPACITY", "ONEDNN_PRIMITIVE_CACHE_CAPACITY")
ENABLED = Path("/sys/kernel/mm/transparent_hugepage/enabled")
START = """
import resource, sys
import torch
from rldsl.backends.torch.kernels import kept_memory

def used(what="Rss"):  # MiB
    lines = dict(line.split(":") for line in open("/proc/self/smaps_rollup") if "kB" in line)
    return int(lines[what].split()[0]) / 1024

def tensors():  # 200 MiB
    return [torch.ones(512, 512) for _ in range(200)]
"""
pytestmark = pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="the system does not tell")


def run(code: str) -> list[float]:
    without = {name: text for name, text in os.environ.items() if name not in SET_BY_TESTS}
    done = subprocess.run([sys.executable, "-c", START + code], capture_output=True, text=True, timeout=100, env=without)
    assert done.returncode == 0, done.stderr
    return [float(x) for x in done.stdout.split()]


def test_nothing_is_in_use_before_there_are_tensors() -> None:
    before, after = run("print(used()); assert kept_memory.keep_freed_memory(); print(used())")
    assert after - before < 8


def test_what_tensors_have_given_back_stays() -> None:
    held, freed, again = run("kept_memory.keep_freed_memory(); held = tensors(); print(used()); del held; "
                             "print(used()); held = tensors(); print(used())")
    assert abs(held - freed) < 8 and abs(held - again) < 8


@pytest.mark.skipif("[never]" in ENABLED.read_text() if ENABLED.exists() else True, reason="a kernel without")
def test_pages_are_large() -> None:
    """Of tensors that are smaller than a page, too."""
    pages, = run("kept_memory.keep_freed_memory(); held = tensors(); print(used('AnonHugePages'))")
    assert pages > 100


@pytest.mark.parametrize("what", ["kept_memory._may_reserve = lambda: False", "kept_memory.HUGEPAGE = None",
                                  "resource.setrlimit(resource.RLIMIT_DATA, (2 << 30, 2 << 30))",
                                  "resource.setrlimit(resource.RLIMIT_DATA, (1 << 40, 1 << 40))",
                                  "resource.setrlimit(resource.RLIMIT_AS, (1 << 40, 1 << 40))"])
def test_where_none_may_be_had(what: str) -> None:
    """A system that promises only memory that it has; another system; limits of the process, which may be needed for
    else."""
    pages, held, freed = run(f"{what}\nassert kept_memory.keep_freed_memory(); held = tensors(); "
                             "print(used('AnonHugePages'), used()); del held; print(used())")
    assert pages < 100 and abs(held - freed) < 8


def test_a_system_whose_memory_is_promised(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from rldsl.backends.torch.kernels import kept_memory

    for text, expected in (("0\n", True), ("1\n", True), ("2\n", False)):
        (tmp_path / "overcommit").write_text(text)
        monkeypatch.setattr(kept_memory, "OVERCOMMIT", tmp_path / "overcommit")
        assert kept_memory._may_reserve() == expected
    monkeypatch.setattr(kept_memory, "OVERCOMMIT", tmp_path / "none")
    assert not kept_memory._may_reserve()


PRODUCTS = """

w = torch.randn(96, 64)
def multiplied(rows):
    for n in rows:
        torch.ops.mkldnn._linear_pointwise(torch.randn(n, 64), w, None, "none", [], "")
    return used("Private_Dirty")
"""


@pytest.mark.skipif(not products.has_onednn(), reason="this torch has no oneDNN")
def test_few_compiled_products_are_kept() -> None:
    """oneDNN makes one for each number of rows. Those of the first pass are the ones that it may keep."""
    grown = {}
    for name, call in (("few", "kept_memory.keep_few_compiled_products()"), ("all", "")):
        first, last = run(f"{PRODUCTS}{call}\nprint(multiplied(range(100, 250))); print(multiplied(range(250, 550)))")
        grown[name] = last - first
    assert grown["few"] < 0.3 * grown["all"]


def test_limits_of_the_environment_stay() -> None:
    found = run("import os; os.environ['LRU_CACHE_CAPACITY'] = '7'; kept_memory.keep_few_compiled_products(); "
                "print(os.environ['LRU_CACHE_CAPACITY'], os.environ['ONEDNN_PRIMITIVE_CACHE_CAPACITY'])")
    assert found == [7, 128]
