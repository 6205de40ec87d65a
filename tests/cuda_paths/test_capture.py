"""CUDA graphs without a GPU: which functions are captured, and what a capture that fails leaves behind."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib import import_module
from typing import Any

import pytest
import torch

from rldsl.backends.torch.generate import captured_step
from rldsl.backends.torch.generate.captured_step import CapturedSteps, CaptureSwitch, HostReads, capture_graph
from rldsl.backends.torch.generate.decode_state import DecodeState
from rldsl.backends.torch.kernels import attention_kernels
from rldsl.backends.torch.generate.generate import generate
from rldsl.memory.decode_shapes import MAX_CAPTURES_WITH_MEMORY
from rldsl.plan.events import Sampling
from rldsl.runtime.backend import Axis
from tests.backend_torch.shards import make_shard, pack, plan_model
from tests.generation.reference import made
from tests.moe import shards as experts
from tests.samples import thorough_between
from tests.tiny import make_model

CUDA = torch.device("cuda")
generate_module = import_module("rldsl.backends.torch.generate.generate")  # its name is also that of a function
X = torch.randn(5, 6)


class FakeStream:
    """A stream of CUDA; `current` is the one that is entered."""

    current = "default"

    def __init__(self, name: str):
        self.name = name

    def wait_stream(self, other: FakeStream) -> None:
        assert other.name != self.name


class FakeGraph:
    """Captures by keeping the function's results, as `torch.cuda.CUDAGraph` does: `replay` writes them anew."""

    made: list[FakeGraph] = []
    failing: set[str] = set()  # of "begin", "function", "end"

    def __init__(self) -> None:
        self.pool: Any = None
        self.capturing = False
        self.replays = 0
        FakeGraph.made.append(self)

    def capture_begin(self, pool: Any) -> None:
        assert FakeStream.current != "default"
        if "begin" in self.failing:
            raise RuntimeError("CUDA error: operation not permitted")
        self.pool, self.capturing = pool, True

    def capture_end(self) -> None:
        assert FakeStream.current != "default" and self.capturing
        self.capturing = False
        if self.failing:
            raise RuntimeError("CUDA error: operation failed due to a previous error during capture")

    def replay(self) -> None:
        self.replays += 1


@pytest.fixture(autouse=True)
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    FakeGraph.made, FakeGraph.failing, FakeStream.current = [], set(), "default"
    count = iter(range(1000))

    @contextmanager
    def entered(stream: FakeStream) -> Iterator[None]:
        before, FakeStream.current = FakeStream.current, stream.name
        try:
            yield
        finally:
            FakeStream.current = before

    for name, value in (("CUDAGraph", FakeGraph), ("Stream", lambda device: FakeStream(f"side {next(count)}")),
                        ("current_stream", lambda: FakeStream("default")), ("synchronize", lambda: None),
                        ("stream", entered), ("graph_pool_handle", lambda: next(count))):
        monkeypatch.setattr(torch.cuda, name, value)
    yield


def double() -> tuple[torch.Tensor, ...]:
    return (X * 2,)


def test_the_second_call_is_captured_and_compared_once() -> None:
    steps, asked = CapturedSteps(CUDA, True), []
    for _ in range(6):
        assert torch.equal(steps("key", lambda: (asked.append(1), double())[1])[0], X * 2)
    # plain, captured, compared with the function
    assert len(asked) == 3 and [g.replays for g in FakeGraph.made] == [5] and steps.enabled and steps.verified


def test_a_graph_with_other_numbers_is_given_up() -> None:
    steps, calls = CapturedSteps(CUDA, True), []

    def changes() -> tuple[torch.Tensor, ...]:
        calls.append(1)
        return (X * len(calls),)  # a graph repeats what Python had when it was captured

    for _ in range(3):
        steps("key", changes)
    assert not steps.enabled
    assert torch.equal(steps("key", changes)[0], X * 4)


@pytest.mark.parametrize("near", [True, False])
def test_floats_of_a_graph_agree_within_rounding_and_integers_exactly(near: bool) -> None:
    steps, calls = CapturedSteps(CUDA, True), []

    def drifts() -> tuple[torch.Tensor, ...]:
        calls.append(1)
        return (X + len(calls) * 1e-5,) if near else (torch.arange(4) + len(calls),)

    for _ in range(3):
        steps("key", drifts)
    assert steps.enabled == near


def read(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return (x * float(x[0, 0]),)


def bincounts(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return ((x > 0).long().flatten().bincount(minlength=2),)


def boolean_index(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return (x[x > 0],)


@pytest.mark.parametrize("function", [read, bincounts, boolean_index])
def test_what_reads_on_the_host_is_never_captured(function: Callable[..., Any]) -> None:
    steps = CapturedSteps(CUDA, True)
    for _ in range(4):
        steps("key", lambda: function(X))
    assert not FakeGraph.made and not steps.enabled


def test_copies_between_devices_are_seen() -> None:
    """`meta` stands for the GPU: another device than the host's."""
    far = torch.ones(3, device="meta")
    for copies in (lambda: X.to("meta"), lambda: far.copy_(X[0, :3]), lambda: far.copy_(torch.tensor(2.0)),
                   lambda: far[torch.tensor([1])],
                   lambda: torch.ops.aten.lift_fresh(far)):  # all that torch.tensor(..., device="cuda") shows
        with HostReads() as reads:
            copies()
        assert reads.found, copies


def test_numbers_as_arguments_are_no_copies() -> None:
    far = torch.ones(3, device="meta")
    for stays in (lambda: far + torch.tensor(2.0), lambda: far * 3, lambda: torch.full((), 2.0, device="meta"),
                  lambda: far[1:], lambda: torch.where(far > 0, far, 0.0), lambda: torch.zeros(4, device="meta")):
        with HostReads() as reads:
            stays()
        assert not reads.found


@pytest.mark.parametrize("where", ["begin", "function", "end"])
def test_a_capture_that_fails_is_the_last_one(where: str) -> None:
    """The stream is the one from before, nothing is tried again, and the numbers are there."""
    FakeGraph.failing = {where}
    switch = CaptureSwitch()
    first, second = (CapturedSteps(CUDA, True, switch=switch) for _ in range(2))

    def fails() -> tuple[torch.Tensor, ...]:
        if where == "function" and FakeStream.current != "default":
            raise RuntimeError("CUDA error: operation not permitted when stream is capturing")
        return double()

    first("key", fails)
    with pytest.warns(UserWarning, match="could not be captured"):
        assert torch.equal(first("key", fails)[0], X * 2)
    assert FakeStream.current == "default" and not switch.enabled
    for steps in (first, second):
        for _ in range(4):
            assert torch.equal(steps("other", fails)[0], X * 2)
    assert len(FakeGraph.made) == 1


def test_the_function_s_own_error_is_not_hidden() -> None:
    steps = CapturedSteps(CUDA, True)
    for _ in range(3):
        with pytest.raises(ZeroDivisionError):
            steps("key", lambda: (torch.ones(1 // 0),))
    with pytest.raises(ZeroDivisionError):
        capture_graph(lambda: (torch.ones(1 // 0),), captured_step.GraphPool.allocate(CUDA))
    assert FakeStream.current == "default"


@pytest.mark.parametrize("groups", [1, 2])
def test_graphs_share_memory_where_nobody_takes_turns(groups: int) -> None:
    steps = CapturedSteps(CUDA, True, num_groups=groups)
    for _ in range(4):
        for key in range(3):
            steps(key, double)
    assert len({g.pool for g in FakeGraph.made}) == (1 if groups == 1 else 3) and len(FakeGraph.made) == 3


def test_graphs_are_few() -> None:
    steps = CapturedSteps(CUDA, True)
    for key in range(20):
        for _ in range(4):
            steps(key, double)
    assert len(steps.captures) == MAX_CAPTURES_WITH_MEMORY


# ------------------------------------------------------------------------------------------- steps of real models


def reads_of(shard: Any, monkeypatch: pytest.MonkeyPatch, sampling: Sampling) -> set[str]:
    """What decode steps of a shard read on the host, or copy from it: on a GPU, `torch.tensor` is such a copy."""
    found: set[str] = set()
    crosses = captured_step._crosses_devices

    def copies(func: Any, args: Any, out: Any) -> bool:
        return func is torch.ops.aten.lift_fresh.default or crosses(func, args, out)

    monkeypatch.setattr(captured_step, "_crosses_devices", copies)

    def watched(self: CapturedSteps, key: Any, function: Any, *_: Any) -> Any:
        with HostReads() as reads:
            out = function()
        found.update({reads.found} - {""})
        return out

    monkeypatch.setattr(CapturedSteps, "__call__", watched)
    made(shard, [[3, 4, 5], [6, 7]], sampling)
    return found


DRAWN = Sampling(max_new_tokens=6, temperature=1.3, top_p=0.9)


@pytest.mark.parametrize("family", thorough_between(["llama", "qwen2", "qwen3", "mistral", "phi3", "gemma"]))
@pytest.mark.parametrize("sampling", [DRAWN, Sampling(max_new_tokens=6, greedy=True),
                                      Sampling(max_new_tokens=6, temperature=1.0, top_k=4, min_p=0.1)])
def test_decode_steps_of_dense_models_can_be_captured(family: str, sampling: Sampling, tmp_path: Any,
                                                      monkeypatch: pytest.MonkeyPatch) -> None:
    shard = make_shard(plan_model(str(make_model(tmp_path / "m", family))), 0)
    assert reads_of(shard, monkeypatch, sampling) == set()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_decode_steps_with_experts(dtype: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """In bfloat16 experts are one grouped product, without a look at how many rows each has."""
    shard = make_shard(plan_model(experts.make(tmp_path / "m", "qwen3_moe"), dtype=dtype), 0)
    found = reads_of(shard, monkeypatch, DRAWN)
    assert found == (set() if dtype == "bfloat16" else {"tolist"})


def test_decode_steps_whose_rotary_embedding_looks_at_positions(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers chooses frequencies by the largest position, on the host."""
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    shard = make_shard(plan_model(str(make_model(tmp_path / "m", "llama", rope_parameters=rope))), 0)
    assert reads_of(shard, monkeypatch, DRAWN)


def test_the_kernel_of_decoding_is_tried_before_the_first_step(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step in which it is tried reads the result of the trial, and would not be captured."""
    tried: list[torch.device] = []
    monkeypatch.setattr(attention_kernels, "_installed_decode_kernel", tried.append)
    for device, dtype in ((CUDA, torch.float32), (torch.device("cpu"), torch.bfloat16), (CUDA, torch.bfloat16)):
        attention_kernels.prepare_decode_kernel(device, dtype)
    assert tried == [CUDA]
    order: list[str] = []
    monkeypatch.setattr(generate_module, "prepare_decode_kernel", lambda *_: order.append("tried"))
    monkeypatch.setattr(generate_module, "run_to_completion", lambda *_: order.append("run"))
    shard = make_shard(plan_model(str(make_model(tmp_path / "m"))), 0)
    made(shard, [[3, 4, 5]], DRAWN)
    assert order == ["tried", "run"]


@pytest.mark.parametrize("axis", ["ep", "tp", ""])
def test_what_is_captured_where_steps_communicate(axis: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A trace on a CPU holds the collectives of tp, and those of ep inside opaque calls. A graph holds none."""
    shard = make_shard(plan_model(str(make_model(tmp_path / "m"))), 0)
    axes = replace(shard.axes, **{axis: Axis((0, 1), 0, None)}) if axis else shard.axes

    def allocate(*args: Any, capture: CaptureSwitch, **rest: Any) -> None:
        raise InterruptedError(str(capture.enabled))

    monkeypatch.setattr(DecodeState, "allocate", allocate)
    assert generate_module._may_capture(axes, CUDA) == (not axis)
    with pytest.raises(InterruptedError, match="True"):
        generate(shard.stage, axes, pack([([3, 4], [])]), DRAWN, tokenizer_dir=shard.model.path, seed=1, step=1,
                 max_num_seqs=0)
