"""What ranks note while they run: the ring, the stack, the signs of life."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace

import pytest
import torch.distributed as dist

from rldsl.postmortem.dumps import EventRun, RankPosition
from rldsl.runtime.health.event_ring import SIZE, EventRing
from rldsl.runtime.health.failure_messages import describe_other_ranks, describe_own_error, lost_contact
from rldsl.runtime.health.heartbeats import Heartbeats, machine_name, process_state
from rldsl.runtime.health.stack_trace import of_error, of_main
from tests.effort import calls
from tests.postmortem.hand import PLAN, at

LOOP = PLAN.body[0]
GENERATE = LOOP.body[1]


def filled(steps: int) -> EventRing:
    ring = EventRing()
    for step in range(1, steps + 1):
        ring.enter_iteration(0, step)
        for number in (1, 2):
            ring.enter_iteration(1, number)
            ring.begin_event(GENERATE)
            ring.end_event()
        ring.leave_loop(1)
    ring.leave_loop(0)
    return ring


def test_it_begins_empty() -> None:
    ring = EventRing()
    assert ring.position().at is None and ring.position().phase == "start-up"
    assert ring.event is None and ring.current_run() is None
    assert ring.entries() == ()


def test_the_way_of_a_rank() -> None:
    ring = filled(1)
    ring.enter_iteration(0, 2)
    ring.begin_event(GENERATE)
    assert ring.current_run() == EventRun(1, (2,))
    ring.begin_wait(EventRun(1, (1, 2)))
    assert ring.position("wait").awaits == EventRun(1, (1, 2)) and ring.position("wait").call == "wait"
    ring.resume()
    ring.begin_call("judge")
    now = ring.position()
    assert (now.phase, now.function, now.at) == ("calls", "judge", EventRun(1, (2,)))
    assert [(e.at.turns if e.at else (), e.phase) for e in ring.entries()] == [
        ((1, 1), "begins"), ((1, 1), "ends"), ((1, 2), "begins"), ((1, 2), "ends"), ((2,), "begins"), ((2,), "waits"),
        ((2,), "resumes"), ((2,), "calls")]
    ring.finish()
    assert ring.position().phase == "over"


@pytest.mark.parametrize("steps", [0, 1, 31, 32, 33, 500])
def test_it_does_not_grow(steps: int) -> None:
    entries = filled(steps).entries()
    assert len(entries) == min(4 * steps, SIZE)
    assert [e.ago for e in entries] == sorted((e.ago for e in entries), reverse=True)
    if steps:
        assert entries[-1].at == EventRun(1, (steps, 2)) and entries[-1].phase == "ends"


def test_it_is_cheap() -> None:
    """Eight calls of functions for an event, which take under 2 µs on an ordinary machine."""
    ring, count = filled(100), 1000

    def write() -> None:
        for _ in range(count):
            ring.begin_event(GENERATE)
            ring.end_event()

    assert calls(write) < 10 * count


def test_it_is_read_while_it_is_written() -> None:
    ring, done = filled(100), threading.Event()

    def write() -> None:
        while not done.is_set():
            ring.begin_event(GENERATE)
            ring.end_event()

    thread = threading.Thread(target=write)
    thread.start()
    try:
        for _ in range(200):
            entries = ring.entries()
            assert len(entries) == SIZE
            phases = [e.phase for e in entries]
            assert sum(a == b for a, b in zip(phases, phases[1:])) <= 1  # where the writer was
    finally:
        done.set()
        thread.join()


# ---------------------------------------------------------------------------------------------------- stack


def test_where_the_main_thread_is() -> None:
    found = []
    thread = threading.Thread(target=lambda: found.append(of_main()))
    thread.start()
    thread.join()
    assert found[0].lines and found[0].lines[-1].rpartition(":")[0].endswith(".py")
    thread = threading.Thread(target=lambda: (time.sleep(0.05), found.append(of_main(all_lines=False))))
    thread.start()
    event = threading.Event()
    event.wait(0.3)
    assert len(found[1].lines) == 1


def test_where_an_error_came_from() -> None:
    def wrong() -> None:
        raise ValueError

    try:
        wrong()
    except ValueError as error:
        stack = of_error(error.__traceback__)
    assert stack.call == "" and stack.lines[-1].endswith(" wrong")
    try:
        dist.all_reduce(None)
    except Exception as error:
        assert of_error(error.__traceback__).call
    assert of_error(None).lines == ()


@pytest.mark.parametrize("error, gone", [
    (RuntimeError("Connection closed by peer"), True), (RuntimeError("[..] Timed out waiting 5000ms for recv"), True),
    (ConnectionResetError("connection reset"), True), (RuntimeError("shapes cannot be multiplied"), False),
    (ValueError("timeout"), False), (KeyError("peer"), False),
    (RuntimeError("NCCL error in: ... unhandled cuda error. Cuda failure 2 'out of memory'"), False),
    (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`, socket"), False),
    (RuntimeError("NCCL error: unhandled cuda error (run with NCCL_DEBUG=INFO for details)"), False),
    (type("AcceleratorError", (RuntimeError,), {})("CUDA error: peer access is not supported"), False),
    (RuntimeError("NCCL error: remote process exited or there was a network error"), True)])
def test_an_error_that_means_a_lost_peer(error: BaseException, gone: bool) -> None:
    assert lost_contact(error) is gone


@pytest.mark.parametrize("error, code", [
    (MemoryError(), "RL0707"), (RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB"), "RL0707"),
    (RuntimeError("NCCL error: Cuda failure 2 'out of memory'"), "RL0707"),
    (RuntimeError("unable to mmap 65060200 bytes from file <m.safetensors>: Cannot allocate memory (12)"), "RL0707"),
    (RuntimeError("CUBLAS_STATUS_ALLOC_FAILED"), "RL0707"), (RuntimeError("unhandled cuda error, nccl"), "RL0799"),
    (ValueError("out of memory"), "RL0799"),
    (OSError(24, "Too many open files"), "RL0707"), (OSError(23, "Too many open files in system"), "RL0707"),
    (RuntimeError("[enforce fail at gloo/transport/tcp] epoll_create: Too many open files"), "RL0707"),
    (OSError(2, "No such file"), "RL0799")])
def test_a_full_device_is_not_another_rank_s_death(error: BaseException, code: str) -> None:
    assert [d.code for d in describe_own_error(error, 3, "train")] == [code]


# ---------------------------------------------------------------------------------------------------- signs


def test_signs_of_two_ranks() -> None:
    store = dist.HashStore()
    zero, one = Heartbeats(store, 0, 3), Heartbeats(store, 1, 3)
    assert zero.start == one.start and zero.all() == {}
    zero.beat(RankPosition())
    one.beat(RankPosition(EventRun(1, (2,)), "begins"))
    assert set(zero.all()) == {0, 1} and zero.all()[1].position.at == EventRun(1, (2,))
    before = zero.all()
    zero.beat(RankPosition())
    assert zero.mark_silent(before, 2.5)[1].silent == 2.5 and zero.mark_silent(before, 2.5)[1].process == "running"
    one.beat(RankPosition(EventRun(1, (2,)), "begins"))
    assert not zero.mark_silent(before, 2.5)[1].silent
    assert not one.mark_silent({0: replace(before[0], beat=99)}, 2.5)[0].silent


def test_each_word_is_claimed_once() -> None:
    store = dist.HashStore()
    zero, one = Heartbeats(store, 0, 2), Heartbeats(store, 1, 2)
    assert zero.first_failure() == ""
    assert zero.claim_search() and not one.claim_search()
    assert one.claim_search(1) and not zero.claim_search(1), "if the rank that searched ends too, another one searches"
    assert zero.claim_search(2)
    here, there = at(GENERATE.id, 3), at(GENERATE.id, 4)
    assert zero.claim_overdue_search(here, 0) and not one.claim_overdue_search(here, 0)
    assert one.claim_overdue_search(here, 1) and one.claim_overdue_search(there, 0)
    before = RankPosition()  # before the first event
    assert zero.claim_overdue_search(before, 0) and not one.claim_overdue_search(before, 0)
    assert one.report_failure("event 3") and not zero.report_failure("event 4") and zero.first_failure() == "1|event 3"
    assert zero.claim_stop_message() and not one.claim_stop_message()


def test_a_store_that_holds_something_else() -> None:
    store = dist.HashStore()
    signs = Heartbeats(store, 0, 1)
    store.set("rldsl/alive/0", "not a sign")
    assert signs.all() == {}


@pytest.mark.skipif(not os.path.exists("/proc/self/stat"), reason="the system does not tell")
def test_what_became_of_a_process() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        assert process_state(child.pid) == "running"
        os.kill(child.pid, signal.SIGSTOP)
        end = time.monotonic() + 20
        while process_state(child.pid) != "stopped":
            assert time.monotonic() < end
    finally:
        child.kill()
    while process_state(child.pid) != "gone":  # not yet waited for
        assert time.monotonic() < end
    child.wait()
    assert process_state(child.pid) == "gone"
    assert machine_name() == machine_name()


@pytest.mark.parametrize("requested", [False, True])
def test_a_first_rank_that_ended_with_the_store_is_named_unless_the_run_was_asked_to_stop(requested: bool) -> None:
    asked = "the run was asked to stop (SIGTERM)"
    found = describe_other_ranks(None, asked, "event 3", "", requested, "", is_first_gone=True)
    assert found.title == (asked if requested else "rank 0 exited without an error message")
    assert ("it was killed" in found.help) == (not requested)
    assert describe_other_ranks(None, "another rank", "event 3", "", False, "").title == "another rank"
