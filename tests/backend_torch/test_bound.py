"""The arithmetic of `benchmarks/bound.py` against counted operations and bytes. No time is asserted."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from benchmarks import bound_measure as bound
from benchmarks.bound_least import ADAMW_TRANSFERS, WAYS, Decoder, Lengths, Machine, decode_time, least_times
from benchmarks.bound_ranks import least_of_ranks, shares
from benchmarks.bound_shapes import LARGEST, SMALLEST, Shape, drawn, parameters, prompt_lengths
from benchmarks.bound_sides import Turn
from tests.tiny import make_model

FAMILIES = {"qwen3": dict(head_dim=8), "llama": {}, "gpt2": {}}
LONG = 13


@pytest.fixture(scope="module", params=FAMILIES)
def model(request: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Decoder, Any]:
    from transformers import AutoModelForCausalLM

    path = str(make_model(tmp_path_factory.mktemp("bound"), request.param, **FAMILIES[request.param]))
    return Decoder.of(path), AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager")


def counted(function: Any) -> dict[str, int]:
    """Operator -> its multiplications and additions."""
    with FlopCounterMode(display=False) as counter:
        function()
    return {str(op): count for op, count in counter.get_flop_counts()["Global"].items()}


def test_operations_are_those_of_a_real_pass(model: tuple[Decoder, Any]) -> None:
    decoder, hf = model
    tokens = torch.arange(2, 2 + LONG)[None]
    forward = counted(lambda: hf(tokens, use_cache=False))
    attention = forward.pop("aten.bmm")
    assert sum(forward.values()) == decoder.product_flops(LONG, LONG)
    # eager attention computes the square, of which a token sees what is before it
    assert attention == 4 * decoder.layers * decoder.heads * decoder.head_dim * LONG**2
    assert decoder.causal_flops([LONG]) * 2 * LONG == attention * (LONG + 1)
    few = counted(lambda: hf(tokens, use_cache=False, logits_to_keep=2))
    few.pop("aten.bmm")
    assert sum(few.values()) == decoder.product_flops(LONG, 2)


def test_a_backward_pass_has_twice_as_many(model: tuple[Decoder, Any]) -> None:
    decoder, hf = model
    loss = hf(torch.arange(2, 2 + LONG)[None], use_cache=False).logits.logsumexp(-1).sum()
    backward = counted(loss.backward)
    attention = backward.pop("aten.bmm")
    assert sum(backward.values()) == 2 * decoder.product_flops(LONG, LONG)
    assert attention == 8 * decoder.layers * decoder.heads * decoder.head_dim * LONG**2


def test_bytes_are_those_of_a_real_cache(model: tuple[Decoder, Any]) -> None:
    decoder, hf = model
    cache = hf(torch.arange(2, 2 + LONG)[None], use_cache=True).past_key_values
    assert decoder.cache_bytes(LONG) == sum(x.nbytes for layer in cache.layers for x in (layer.keys, layer.values))
    assert decoder.parameters == sum(p.numel() for p in hf.parameters())


def test_decoding_token_by_token_sees_what_a_whole_pass_sees(model: tuple[Decoder, Any]) -> None:
    decoder = model[0]
    assert sum(decoder.decode_flops(i + 1) for i in range(LONG)) == decoder.causal_flops([LONG])


def test_steps_of_ragged_responses() -> None:
    lengths = Lengths((5, 2), 2, (1, 4, 3, 0))
    steps: dict[int, list[int]] = {}
    for i, response in enumerate(lengths.responses):  # one sequence after the other: token t + 1 is made of t before
        for t in range(1, response):
            steps.setdefault(t, []).append(lengths.prompts[i // 2] + t)
    assert lengths.decode_steps() == [(len(steps[t]), sum(steps[t])) for t in sorted(steps)]
    assert lengths.sequences == [6, 9, 5, 2]
    assert Lengths((3,), 1, (1,)).decode_steps() == []


@pytest.mark.thorough
def test_measured_products_are_those_that_are_counted(model: tuple[Decoder, Any],
                                                      monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = model[0]
    machine, ran = Machine(decoder), []

    def run(products: Any) -> float:
        ran.append(counted(lambda: [WAYS["mm"](p.a, p.b, p.out) for p in products])["aten.mm"])
        return 0.0

    assert machine.forward(3, 2) > 0 and machine.backward(3, 2) > 0
    monkeypatch.setattr(machine, "_all", run)
    machine.forward(3, 2), machine.backward(3, 2), machine.forward(0, 2)
    assert ran == [decoder.product_flops(3, 2), 2 * decoder.product_flops(3, 2), decoder.product_flops(0, 2)]


@pytest.mark.parametrize("name", WAYS)
def test_every_way_computes_the_product(name: str) -> None:
    a, b, out = torch.randn(5, 7), torch.randn(3, 7), torch.empty(5, 3)
    result = WAYS[name](a, b, out)
    assert isinstance(result, torch.Tensor)
    found = result.T if name.endswith("transposed") else result
    torch.testing.assert_close(found, a @ b.T)


def test_least_times_add_up(model: tuple[Decoder, Any]) -> None:
    """With a machine of 1 operation a second, 1 byte a second: every phase is its count."""
    decoder = model[0]

    class Unit(Machine):
        peak = 1.0  # type: ignore[assignment]

        def forward(self, rows: int, head_rows: int) -> float:
            return float(self.decoder.product_flops(rows, head_rows))

        def backward(self, rows: int, head_rows: int) -> float:
            return 2 * self.forward(rows, head_rows)

        def read(self, size: float, working_set: float) -> float:
            assert working_set > 4 * decoder.parameters
            return size

        def update(self) -> float:
            return ADAMW_TRANSFERS * 4.0 * decoder.parameters

    lengths = Lengths((5, 2), 2, (1, 4, 3, 3))
    found = least_times(Unit(decoder), lengths)
    whole = decoder.causal_flops([6, 9, 5, 5]) - decoder.causal_flops([5, 2])  # what two share is computed once
    assert found["forward"] == found["logprobs"] == decoder.product_flops(18, 11) + whole
    assert found["backward"] == 2 * found["forward"]
    assert found["prefill"] == decoder.product_flops(7, 2) + decoder.causal_flops([5, 2])
    assert found["update"] == 32 * decoder.parameters
    seen = 6 + 7 + 8 + 2 * (3 + 4)
    assert decode_time(Unit(decoder), lengths) == found["decode"] == decoder.product_flops(7, 7) + max(
        decoder.cache_bytes(seen), decoder.decode_flops(seen))


def test_experts_are_refused(tmp_path: Path) -> None:
    path = make_model(tmp_path, "mixtral", num_local_experts=4)
    with pytest.raises(ValueError, match="experts"):
        Decoder.of(str(path))


def test_shapes_are_drawn_over_the_whole_range() -> None:
    shapes = drawn(1, 10)
    sizes = [parameters(s.model) for s in shapes]
    assert len(shapes) == 10 and sizes == sorted(sizes) and SMALLEST <= sizes[0] < 1e6 and 3e7 < sizes[-1] <= LARGEST
    assert all(2 * p * s.prompts * s.n * (s.prompt + s.tokens) <= 6e10 and 16 <= s.tokens <= 512
               for p, s in zip(sizes, shapes, strict=True))
    assert shapes == drawn(1, 10) != drawn(2, 10)
    assert all(1 <= n <= s.prompt for s in shapes for n in prompt_lengths(s, 0))
    assert len({s.model["num_attention_heads"] // s.model["num_key_value_heads"] for s in shapes}) > 1
    assert {s.model["tie_word_embeddings"] for s in shapes} == {True, False}


def test_estimated_parameters_are_those_of_the_model(tmp_path: Path) -> None:
    shape = drawn(0, 10)[0]
    decoder = Decoder.of(bound.directory(shape, tmp_path))
    assert 0 <= decoder.parameters - parameters(shape.model) < 0.01 * decoder.parameters  # norms


def test_fractions_and_gates(capsys: pytest.CaptureFixture[str]) -> None:
    phases = dict(decode=2.0, prefill=1.0, logprobs=1.0, forward=1.0, backward=2.0, update=1.0)
    row = bound.Row({k: v / 2 for k, v in phases.items()}, Turn(phases, 100), Turn(phases, 50),
                    Lengths((5,), 1, (1,)), {"ours": 0.9, "TRL": 0.3, "2 ranks": 0.7})
    assert row.fraction(row.ours, "decode") == row.fraction(row.ours, "training") == 0.5
    assert row.fraction(row.theirs, "decode") == 0.25 and row.fraction(row.theirs, "backward") == 0.5
    found = bound.medians([row])
    assert found["decode"] == (0.5, 0.25, 0) and found["training"] == (0.5, 0.5, 1) and found["step"] == (0.9, 0.3, 0)
    assert found["2 ranks"] == (0.7, None, None)
    other = replace(row, steps={"ours": 0.7, "2 ranks": 0.3, "TRL, 2 ranks": 0.4})
    assert list(bound.medians([row, other])) == [*bound.COLUMNS, "step", "2 ranks"]
    assert bound.medians([row, other])["2 ranks"] == (0.5, 0.4, 1)  # TRL's of those that have one
    assert bound.medians([row, other])["step"] == (0.8, 0.3, 0)
    trl = row.steps.pop("TRL")
    assert bound.medians([row])["step"] == (0.9, None, None)
    assert bound.show_medians([row]) == 3  # decode and training 0.5, two ranks 0.7
    row.steps = {"ours": 0.9, "TRL": trl}
    table = capsys.readouterr().out
    assert "step          0.90     -       -       gate 0.8\n" in table and "2 ranks       0.70     -       -" in table
    assert bound.least_of([dict(a=1.0, b=3.0), dict(a=2.0, b=2.0)]) == dict(a=1.0, b=2.0)
    row.steps |= {"2 ranks": 0.7, "TRL, 2 ranks": 0.2}
    bound.show(Shape({}, 1, 1, 1, 1), 10, row)
    bound.show_medians([row])
    shown = capsys.readouterr().out
    assert "ours 0.90   TRL 0.30   2 ranks 0.70   TRL, 2 ranks 0.20\n" in shown
    assert "2 ranks       0.70  0.20       0       gate 0.8 MISSED" in shown


def test_shares_of_ranks() -> None:
    """Each prompt with all its responses is in one."""
    lengths = Lengths((5, 2, 7), 2, (1, 4, 3, 0, 2, 6))
    assert shares(lengths, 1) == [lengths]
    assert shares(lengths, 2) == [Lengths((5,), 2, (1, 4)), Lengths((2, 7), 2, (3, 0, 2, 6))]
    assert sum(s.tokens for s in shares(lengths, 3)) == lengths.tokens


@pytest.mark.thorough
def test_ranks_measure_at_once(tmp_path: Path) -> None:
    path = str(make_model(tmp_path, "llama"))
    found = least_of_ranks(path, Lengths((6, 5), 2, (5, 5, 5, 5)), 2)
    assert found.keys() == {"decode", "prefill", "logprobs", "forward", "backward", "update"}
    assert all(seconds > 0 for seconds in found.values())


@pytest.mark.thorough
def test_a_shape_is_measured_whole(tmp_path: Path) -> None:
    path = str(make_model(tmp_path, "llama"))
    row = bound.measure(Shape({}, 2, 2, 6, 5), path, 1)
    assert 4 <= row.ours.tokens <= 20 and {*row.least} == {*row.ours.phases} == {*row.theirs.phases}
    assert all(row.fraction(side, column) > 0 for side in (row.ours, row.theirs) for column in bound.COLUMNS)
