"""Golden files: `golden(name, text)` compares text with tests/golden/NAME; `pytest --update-golden` rewrites them.

Tests below the directories `NUMERIC` compare what kernels compute; they have the marker `numeric`, and `make test-isa`
runs them with another instruction set than the processor's best (`tests/isa.py`). `make test` leaves out those with the
marker `thorough`."""

from __future__ import annotations

import atexit
import gc
import os
import shutil
import signal
import sys
import tempfile
from pathlib import Path

import pytest

from tests.cpu import GARBAGE, Cpu
from tests.time_limit import TimeLimit

HERE = Path(__file__).parent
GOLDEN = HERE / "golden"
NUMERIC = frozenset({  # the directories of tests whose numbers come from kernels
    "backend_torch", "buffers", "carried", "checkpoint", "concat", "consistency", "context", "continued", "copies", "curriculum",
    "data", "derive", "distributions", "end_to_end", "environments", "evaluation", "fuzz", "generation", "images", "interleaved", "lag",
    "library", "lora",
    "megatron", "moe", "numbers", "offload", "optimizers", "oracles", "other_prompts", "papers", "prefixes", "relabelled", "runtime", "selection", "stop",
    "sync", "texts", "units", "vllm", "zero"})


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="rewrite the golden files from what the code says")
    parser.addoption("--cpu", type=int, metavar="N", help="print the N tests that used most of the processors")
    parser.addoption("--seconds", type=float, metavar="N", help="begin no test after N seconds")
    parser.addoption("--begin-at", default="", metavar="TEXT", help="with --seconds: decides which file is the first")


def pytest_configure(config: pytest.Config) -> None:
    # containers often say that no bytecode is kept; here hundreds of processes would compile the same files again
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    sys.dont_write_bytecode = False
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a shell's background job, whose programs would inherit it
        signal.signal(signal.SIGINT, signal.default_int_handler)
    # gloo's thread polls while another thread of its rank holds a connection's lock: for long where the peer that a
    # message wakes takes the processor of its sender, which a batch process does not; a fifth to a third less CPU time
    if hasattr(os, "SCHED_BATCH"):
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    if "PYTEST_XDIST_WORKER" not in os.environ:  # a cache of this run: models are described once, and nothing is left
        os.environ["XDG_CACHE_HOME"] = folder = tempfile.mkdtemp(prefix="rldsl-tests-")
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # a model that is not there is looked for in the cache only
    gc.disable()  # until all is imported and collected: it would find nothing
    config.addinivalue_line("markers", "numeric: compares numbers that kernels compute")
    config.addinivalue_line("markers", "many: one test of many runs, mutants or kills; their files begin first, so "
                                       "that no worker waits for one of them at the end")
    config.addinivalue_line("markers", "thorough: more samples, sizes, placements or kills of what another test shows; "
                                       "`make test-thorough` runs them")
    if (seconds := config.getoption("--seconds")) is not None:
        config.pluginmanager.register(TimeLimit(seconds, config.getoption("--begin-at")))
    if config.getoption("--cpu"):
        config.pluginmanager.register(Cpu(config.getoption("--cpu")))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.relative_to(HERE).parts[0] in NUMERIC:
            item.add_marker("numeric")
    first = {item.path for item in items if item.get_closest_marker("many")}  # and all of its file shares fixtures
    items.sort(key=lambda item: item.path not in first)


def pytest_collection_finish() -> None:
    """What all tests have imported lives as long as the process: no collection of garbage has to go through it, not
    even pytest's own at the end. That took seconds; xdist gives a worker five to end, and interrupts it after that."""
    gc.freeze()
    gc.set_threshold(*GARBAGE)
    gc.enable()
    atexit.register(gc.unfreeze)  # extension modules count what is left of theirs


@pytest.fixture
def golden(request: pytest.FixtureRequest):
    def compare(name: str, text: str) -> None:
        file = GOLDEN / name
        if request.config.getoption("--update-golden"):
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
        assert file.is_file(), f"no golden file {name}; run pytest --update-golden and read what it writes"
        assert text == file.read_text(), f"differs from {name}; if the new text is right, run pytest --update-golden"

    return compare
