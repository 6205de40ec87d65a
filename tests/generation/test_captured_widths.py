"""A captured decode step serves all widths of the KV cache where its Python does not read the width, and one otherwise.
Which of the two it is never changes a token."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from rldsl.backends.torch.generate import engine
from rldsl.backends.torch.generate.captured_step import CapturedSteps, CaptureSwitch
from rldsl.backends.torch.generate.decode_state import DecodeState
from rldsl.backends.torch.generate.dynamic_size import DynamicSize
from rldsl.backends.torch.generate.op_trace import OpTrace
from rldsl.backends.torch.kernels import cpu_kernels
from rldsl.plan.events import Sampling
from rldsl.runtime.backend import Prefix
from rldsl.runtime.collectives import all_agree, all_reduce
from tests.backend_torch.shards import make_shard, plan_model
from tests.backend_torch.test_forward import _partial
from tests.generation.reference import expected, made, rows_of, same
from tests.tiny import make_model
from tests.world import run_world

CPU = torch.device("cpu")
X = torch.randn(5, 6)
compiled = pytest.mark.skipif(not cpu_kernels.available(), reason="no C compiler")
Outputs = tuple[torch.Tensor, ...]
Body = Callable[[DynamicSize, int], Outputs]  # of the size, and of how often the function was called before

# ------------------------------------------------------------------------------------------------------- functions


def called(body: Body, numbers: list[int]) -> tuple[CapturedSteps, list[int]]:
    """One function at these sizes, on other inputs each time. Returns the calls that ran its Python, too."""
    steps, runs = CapturedSteps(CPU, True), []
    with torch.no_grad():
        for i, number in enumerate(numbers):
            X.normal_()
            size = DynamicSize(number)

            def function(i: int = i, size: DynamicSize = size) -> Outputs:
                runs.append(i)
                return body(size, len(runs) - 1)

            out = steps("key", function, size)
            assert all(map(torch.equal, out, body(DynamicSize(number), len(runs)))), i
    return steps, runs


def reads_nothing(size: DynamicSize, runs: int) -> Outputs:
    return (X * 2,)


def reads_it(size: DynamicSize, runs: int) -> Outputs:
    return (X[: size.read()] * 2,)


def test_one_capture_serves_all_sizes_that_are_not_read() -> None:
    steps, runs = called(reads_nothing, [2, 2, 2, 3, 4, 2, 1, 4])
    assert list(steps.captures) == ["key"] and steps.enabled
    assert runs == [0, 1, 2, 3]  # plain, captured, compared, compared at another size


def test_one_comparison_may_be_both() -> None:
    steps, runs = called(reads_nothing, [2, 3, 4, 3, 2])
    assert list(steps.captures) == ["key"] and runs == [0, 1, 2]


def test_a_size_that_is_read_has_its_own_capture() -> None:
    steps, runs = called(reads_it, [2, 2, 2, 3, 3, 3, 2, 3, 4])
    assert [k for k, x in steps.captures.items() if isinstance(x, OpTrace)] == [("key", 2), ("key", 3)]
    assert steps.enabled and runs == [0, 1, 2, 3, 4, 8]


@pytest.mark.parametrize("numbers, captured", [([2, 2, 2, 3, 2, 3, 4, 3], [2, 3]), ([2, 3, 3, 3, 2, 2, 2], [3, 2])])
def test_a_size_that_the_captured_run_reads_has_its_own_capture(numbers: list[int], captured: list[int]) -> None:
    """What the first run did not read."""
    steps, _ = called(lambda size, runs: (X[: size.read() if runs else size.value] * 2,), numbers)
    found = [k for k, x in steps.captures.items() if isinstance(x, OpTrace)]
    assert found == [("key", n) for n in captured] and steps.enabled


def test_a_size_that_only_the_compared_run_reads_counts_too() -> None:
    """The capture goes, since it may be one of another size."""
    steps, _ = called(lambda size, runs: (X[: size.read()] * 2,) if runs > 1 else (X[: size.value] * 2,),
                      [2, 2, 3, 3, 3, 2, 2, 2, 4])
    found = [k for k, x in steps.captures.items() if isinstance(x, OpTrace)]
    assert found == [("key", 3), ("key", 2)] == list(steps.with_memory) and steps.enabled


@pytest.mark.parametrize("numbers", [[2, 2, 2, 2, 3, 4, 2], [2, 3, 4, 2], [2, 2, 3, 2, 4]])
def test_a_size_that_is_used_without_a_read_is_found_out(numbers: list[int]) -> None:
    """The capture is compared where it is first used at another size: then nothing is replayed any more."""
    steps, _ = called(lambda size, runs: (X[: size.value] * 2,), numbers)
    assert not steps.enabled


@pytest.mark.parametrize("body", [reads_nothing, reads_it])
def test_a_graph_is_one_of_its_size(body: Body) -> None:
    """On a GPU, whatever was read."""
    steps, size = CapturedSteps(torch.device("cuda"), True), DynamicSize(3)
    body(size, 0)
    assert steps._full_key("key", size) == steps._full_key_after_run("key", size) == ("key", 3)


def test_what_a_wrong_trace_writes_is_written_again() -> None:
    """A size that is used without a read, in what the function leaves for the next one."""
    held, steps = torch.zeros(5, 6), CapturedSteps(CPU, True)

    def write(number: int) -> Outputs:
        held.copy_(X * number)
        return (held.sum(),)

    with torch.no_grad():
        for number in (2, 2, 2, 3, 4):
            X.normal_()
            out = steps("key", lambda number=number: write(number), DynamicSize(number))
            assert torch.equal(held, X * number) and torch.equal(out[0], held.sum())
    assert not steps.enabled


def test_what_is_known_of_one_key_is_not_said_of_another() -> None:
    steps = CapturedSteps(CPU, True)
    with torch.no_grad():
        for number in (2, 2, 2, 3, 3, 3):
            for key, body in (("reads", reads_it), ("does not", reads_nothing)):
                size = DynamicSize(number)
                out = steps(key, lambda body=body, size=size: body(size, 0), size)
                assert all(map(torch.equal, out, body(DynamicSize(number), 0)))
    assert set(steps.captures) == {("reads", 2), ("reads", 3), "does not"}


def _one_reads(rank: int, reading: tuple[int, ...]) -> list[Any]:
    steps = CapturedSteps(CPU, True, all_agree=lambda yes: all_agree(yes, dist.group.WORLD, CPU))
    x, faults = torch.zeros(6), []
    with torch.no_grad():
        for call, number in enumerate((2, 2, 3, 3, 3, 2, 3, 4)):
            x.copy_(torch.linspace(-1, 2, 6) + call + rank)
            size = DynamicSize(number)

            def step(size: DynamicSize = size) -> Outputs:
                total = x * 2
                if rank in reading:
                    total[: size.read()] += 1
                all_reduce(total)
                return (total,)

            out = steps("key", step, size)[0].clone()
            if not torch.equal(out, step(DynamicSize(number))[0]):
                faults.append(call)
    return [faults, steps.enabled, [k for k, x in steps.captures.items() if isinstance(x, OpTrace)]]


@pytest.mark.parametrize("reading", [(), (1,), (0, 1)])
def test_a_size_that_one_rank_reads_counts_for_all(reading: tuple[int, ...]) -> None:
    """As where one rank has no C compiler: each collective has its partner."""
    keys = [("key", 2), ("key", 3)] if reading else ["key"]
    assert run_world(2, _one_reads, reading) == [[[], True, keys]] * 2


# ------------------------------------------------------------------------------------------------------ generation

SIZES = dict(hidden_size=64, num_attention_heads=4, num_key_value_heads=2)  # heads of 16, which the kernel takes
LONG = Sampling(max_new_tokens=50, min_new_tokens=50, temperature=1.3)  # widths 16, 32, 48, 56
FREE = replace(LONG, min_new_tokens=0)
PROMPTS = [[2 + (i * j) % 40 for j in range(3 + i % 4)] for i in range(6)]


def model(tmp_path: Any, family: str = "llama", **sizes: Any) -> str:
    return str(make_model(tmp_path / "m", family, **SIZES | sizes))


def captured_keys(shard: Any, prompts: list[list[int]], sampling: Sampling, limit: int = 0, calls: int = 1,
                  states: dict[Any, DecodeState] | None = None) -> list[Any]:
    """The keys of all traces. The calls give what generation without captures gives, bit for bit."""
    states = {} if states is None else states
    plain = rows_of(made(shard, prompts, sampling, limit, capture=CaptureSwitch(False)))
    for _ in range(calls):
        assert rows_of(made(shard, prompts, sampling, limit, states=states)) == plain
    (state,) = states.values()
    assert state.decode_steps.enabled
    return [k for k, x in state.decode_steps.captures.items() if isinstance(x, OpTrace)]


@compiled
@pytest.mark.parametrize("family, sizes", [
    ("llama", {}), ("qwen3", dict(head_dim=16)), ("mistral", dict(sliding_window=9))])
def test_a_batch_size_has_one_capture(family: str, sizes: dict[str, Any], tmp_path: Any) -> None:
    path = model(tmp_path, family, **sizes)
    shard = make_shard(plan_model(path), 0)
    assert captured_keys(shard, PROMPTS, LONG) == [(0, 6)]
    assert same(rows_of(made(shard, PROMPTS, LONG)), expected(path, PROMPTS, LONG))


@compiled
def test_sequences_that_end_early_have_one_for_each_batch_size(tmp_path: Any) -> None:
    keys = captured_keys(make_shard(plan_model(model(tmp_path)), 0), PROMPTS * 3, FREE, calls=2)
    assert len(keys) > 1 and len(set(keys)) == len(keys) and all(first == 0 and type(n) is int for first, n in keys)


@compiled
def test_slots_that_are_filled_again_change_nothing(tmp_path: Any) -> None:
    keys = captured_keys(make_shard(plan_model(model(tmp_path)), 0), PROMPTS * 3, FREE, limit=4, calls=2)
    assert (0, 4) in keys and all(type(n) is int for _, n in keys)


@compiled
def test_a_wider_cache_has_its_own_captures(tmp_path: Any) -> None:
    """A later call whose prompts need more room gets another state, with nothing captured; a call with short ones uses
    the wide cache, and captures of longer prompts."""
    shard, states = make_shard(plan_model(model(tmp_path)), 0), {}
    wide = [p * 12 for p in PROMPTS]
    for prompts in (PROMPTS, wide, PROMPTS, wide):
        assert captured_keys(shard, prompts, LONG, states=states) == [(0, 6)]


@compiled
def test_continued_sequences_use_one_capture(tmp_path: Any) -> None:
    """Their keys and values come from a kept cache."""
    shard, states = make_shard(plan_model(model(tmp_path)), 0), {}
    begun = made(shard, PROMPTS, LONG, keep_cache=True)
    lengths = begun.batch.prompt_lens + begun.batch.response_lens
    texts = [x.tolist() for x in begun.batch.tokens.split(lengths.tolist())]
    prefix = Prefix(begun.cache, torch.arange(len(texts)))
    plain, *found = [rows_of(made(shard, texts, LONG, continues=True, prefix=prefix, **how))
                     for how in ({"capture": CaptureSwitch(False)}, {"states": states}, {"states": states})]
    assert found == [plain] * 2
    assert all(type(n) is int for state in states.values() for _, n in state.decode_steps.captures)


def widths_of(keys: list[Any]) -> list[int]:
    assert all(batch == (0, 6) for batch, _ in keys)
    return [width for _, width in keys]


ALL_WIDTHS = [16, 32, 48, 56]


@compiled
@pytest.mark.parametrize("layer", [1, 2])
def test_one_layer_that_reads_the_width_is_enough(layer: int, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    numbers: set[int] = set()

    class OneReads(engine.DecodeAttention):
        def attend(self, index: int, *given: Any) -> torch.Tensor:
            numbers.add(index)
            self.by_products, products = self.by_products and index != layer, self.by_products
            out = super().attend(index, *given)
            self.by_products = products
            return out

    monkeypatch.setattr(engine, "DecodeAttention", OneReads)
    shard = make_shard(plan_model(model(tmp_path, num_hidden_layers=2)), 0)
    assert widths_of(captured_keys(shard, PROMPTS, LONG, calls=2)) == ALL_WIDTHS
    assert layer in numbers and len(numbers) == 2


def test_without_a_compiler_each_width_has_a_capture(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_kernels, "attends", lambda *_: False)
    assert widths_of(captured_keys(make_shard(plan_model(model(tmp_path)), 0), PROMPTS, LONG, calls=2)) == ALL_WIDTHS


@pytest.mark.parametrize("family, sizes", [("gemma2", dict(head_dim=16, attn_logit_softcapping=20.0)),
                                           ("qwen3", dict(head_dim=8))])
def test_models_that_the_kernel_does_not_take(family: str, sizes: dict[str, Any], tmp_path: Any) -> None:
    """Capped scores, and heads of another size: masks are as wide as what is read."""
    shard = make_shard(plan_model(model(tmp_path, family, **sizes)), 0)
    assert widths_of(captured_keys(shard, PROMPTS, LONG, calls=2)) == ALL_WIDTHS


def test_invariant_models_read_the_width(tmp_path: Any) -> None:
    """Their kernels have weights of as many keys."""
    shard = make_shard(replace(plan_model(model(tmp_path, hidden_size=256)), invariant=True), 0)
    prompts = [p * 10 for p in PROMPTS]  # 30 to 60 tokens, in widths of 64
    assert widths_of(captured_keys(shard, prompts, LONG, calls=2)) == [64, 110]


@compiled
def test_an_attention_that_hides_what_it_reads_is_found_out(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    class Hidden(engine.DecodeAttention):
        def attend(self, index: int, *given: Any) -> torch.Tensor:
            return super().attend(index, *given) * self._kv_len.value

    monkeypatch.setattr(engine, "DecodeAttention", Hidden)
    shard, states = make_shard(plan_model(model(tmp_path)), 0), {}
    plain = rows_of(made(shard, PROMPTS, LONG, capture=CaptureSwitch(False)))
    assert [rows_of(made(shard, PROMPTS, LONG, states=states)) for _ in range(2)] == [plain] * 2
    (state,) = states.values()
    assert not state.decode_steps.enabled


def _generated(rank: int, path: str, layout: tuple[int, int, int], without: tuple[int, ...]) -> list[Any]:
    """without: ranks that have no kernel."""
    if rank in without:
        cpu_kernels.attends = lambda *_: False
    shard: Any = _partial(plan_model(path), rank, *layout)
    states: dict[Any, DecodeState] = {}
    how = [{"capture": CaptureSwitch(False)}, {"states": states}, {"states": states}]
    plain, *found = [rows_of(made(shard, PROMPTS, LONG, 0, range(len(PROMPTS)), **given)) for given in how]
    (state,) = states.values()
    keys = [k for k, x in state.decode_steps.captures.items() if isinstance(x, OpTrace)]
    return [found == [plain] * 2 and state.decode_steps.enabled, keys]


@compiled
@pytest.mark.parametrize("layout, without, keys", [
    ((1, 2, 1), (), [(0, 6)]), ((1, 2, 1), (1,), [((0, 6), w) for w in ALL_WIDTHS]),
    ((1, 1, 2), (), [(0, 3), (3, 3)])], ids=str)
def test_ranks_agree(layout: tuple[int, int, int], without: tuple[int, ...], keys: list[Any], tmp_path: Any) -> None:
    """Of tp on one place for each capture; each stage of pp finds its own."""
    for same_rows, found in run_world(2, _generated, model(tmp_path), layout, without):
        assert same_rows and sorted(found) == keys
