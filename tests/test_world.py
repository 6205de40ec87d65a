"""The worlds of the tests: a run that failed ends, and one that hangs says where."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.forked import command
from tests.world import run_world


def _loaded(rank: int) -> bool:
    return "tests.warm" in sys.modules


def test_ranks_have_what_the_server_loads_wherever_it_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert run_world(1, _loaded) == [True]


def _drops_a_receive(rank: int) -> int:
    """As a run that fails does with what it has not yet waited for."""
    store = dist.distributed_c10d._get_default_store()
    if rank == 0:
        dist.irecv(torch.empty(1000), 1)
        store.set("dropped", "")
    else:
        store.wait(["dropped"])
        dist.send(torch.ones(1000), 0)
    return rank


def test_ranks_end_whose_connections_no_longer_deliver() -> None:
    assert run_world(2, _drops_a_receive) == [0, 1]


def _sleeps(rank: int) -> None:
    while rank == 1:
        time.sleep(0.01)


@pytest.mark.thorough
def test_a_rank_that_gives_no_result_says_where_it_is() -> None:
    with pytest.raises(AssertionError) as caught:
        run_world(2, _sleeps, timeout=2.0)
    said = str(caught.value)
    assert "ranks [1] gave no result within 2.0 s" in said and "in _sleeps" in said and "gloo_tcp_loop" in said, said


def test_a_rank_that_fails_is_not_waited_for() -> None:
    with pytest.raises(AssertionError, match=r"--- rank 1\n(.|\n)*math domain error"):
        run_world(2, _fails, timeout=60.0)


def _fails(rank: int) -> float:
    import math

    return math.sqrt(-rank)


def test_a_command_that_does_not_end_says_where_it_is(tmp_path) -> None:
    (tmp_path / "x.py").write_text("import time\ndef slow():\n    time.sleep(60)\nslow()\n")
    with pytest.raises(AssertionError, match=r"not ended after 1.0 s(.|\n)*in slow"):
        command(str(tmp_path / "x.py"), timeout=1.0)
