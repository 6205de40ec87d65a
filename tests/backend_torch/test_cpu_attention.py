"""`kernels/cpu_attention.c` against products and a softmax in float64, and in the places that use it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from rldsl.backends.torch.kernels import cpu_attention, cpu_kernels, kernel_library
from rldsl.backends.torch.kernels.cpu_attention import Segment, Segments
from rldsl.backends.torch.model.attention import Scores, VarlenAttention
from rldsl.backends.torch.model.shared_prompts import SharedPrompts
from rldsl.plan.events import Sampling
from rldsl.plan.model import Optimizer
from tests.backend_torch.shards import make_shard, pack, plan_model
from tests.tiny import make_model

pytestmark = pytest.mark.skipif(not kernel_library.available(), reason="no C compiler")

# two prompts with responses of 1 and more tokens, one without, and one of a single token
GROUPS = [[(0, 37, 0, 0), (90, 1, 0, 37), (91, 55, 0, 37)], [(37, 1, 0, 0)], [(38, 52, 0, 0), (146, 100, 38, 52)]]
TOKENS = 246


def expected_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, groups: list[list[Segment]], scores: Scores
                       ) -> torch.Tensor:
    """One segment and one head after the other."""
    out = q.new_zeros(q.shape[1], q.shape[0], v.shape[2])
    repeat = q.shape[0] // k.shape[0]
    for first, count, prefix, prefixed in (s for group in groups for s in group):
        rows = torch.cat([torch.arange(prefix, prefix + prefixed), torch.arange(first, first + count)])
        at = torch.arange(prefixed, prefixed + count)[:, None]
        hidden = ~scores.visible(at, torch.arange(prefixed + count))
        for h in range(q.shape[0]):
            keys, values = k[h // repeat, rows], v[h // repeat, rows]
            products = (q[h, first : first + count] @ keys.T * scores.scale).masked_fill(hidden, -torch.inf)
            out[first : first + count, h] = products.softmax(-1) @ values
    return out


def drawn(heads: int, kv_heads: int, size: int, value_size: int, tokens: int) -> list[torch.Tensor]:
    """Queries, keys and values, tokens before heads in memory, and in float64."""
    torch.manual_seed(0)
    return [torch.randn(tokens, n, d, dtype=torch.float64).requires_grad_()
            for n, d in ((heads, size), (kv_heads, size), (kv_heads, value_size))]


def check(groups: list[list[Segment]], given: list[torch.Tensor], window: int | None) -> None:
    scores = Scores(0.3, window)
    expected = expected_attention(*(x.transpose(0, 1) for x in given), groups, scores)
    above = torch.randn_like(expected)
    single = [x.detach().float().requires_grad_() for x in given]
    found = cpu_attention.attend(*(x.transpose(0, 1) for x in single), Segments.of(groups), 0.3, window)
    assert found.shape == expected.shape and found.is_contiguous()
    grads = torch.autograd.grad(found, single, above.float())
    for a, b in zip((found, *grads), (expected, *torch.autograd.grad(expected, given, above)), strict=True):
        torch.testing.assert_close(a.double(), b, rtol=2e-5, atol=4e-5)


@pytest.mark.parametrize("window", [None, 1, 5, 30, 1000])
@pytest.mark.parametrize(("heads", "kv_heads", "size", "value_size"), [
    (4, 2, 16, 16), (3, 1, 40, 24), (2, 2, 64, 64), (5, 1, 8, 33), (2, 2, 1, 1), (4, 1, 128, 96)])
def test_attention_and_its_gradient(heads: int, kv_heads: int, size: int, value_size: int, window: int | None) -> None:
    check(GROUPS, drawn(heads, kv_heads, size, value_size, TOKENS), window)


@pytest.mark.parametrize("lengths", [[1], [2, 1, 5], [6, 0, 7], [16, 17, 47, 48, 49], [97, 300]])
def test_sequences_of_any_length(lengths: list[int]) -> None:
    starts = [sum(lengths[:i]) for i in range(len(lengths))]
    groups = [[(start, n, 0, 0)] for start, n in zip(starts, lengths, strict=True) if n]
    check(groups, drawn(4, 2, 16, 16, sum(lengths)), None)
    table = Segments.of_lengths(lengths)
    assert torch.equal(table.table, Segments.of(groups).table) and table.tokens == sum(lengths)


def test_large_scores_overflow_nothing() -> None:
    given = drawn(2, 2, 16, 16, 40)
    with torch.no_grad():
        given[0].mul_(300)
    single = [x.detach().float().requires_grad_() for x in given]
    found = cpu_attention.attend(*(x.transpose(0, 1) for x in single), Segments.of_lengths([40]), 1.0, None)
    expected = expected_attention(*(x.transpose(0, 1) for x in given), [[(0, 40, 0, 0)]], Scores(1.0))
    torch.testing.assert_close(found.double(), expected, rtol=1e-3, atol=1e-3)
    assert all(bool(x.isfinite().all()) for x in torch.autograd.grad(found.sum(), single))


def test_a_number_that_is_none_stays_in_its_sequence() -> None:
    q, k, v = (x.detach().float() for x in drawn(2, 2, 16, 16, 40))
    q[30, 1] = torch.nan
    found = cpu_attention.attend(*(x.transpose(0, 1) for x in (q, k, v)), Segments.of_lengths([25, 15]), 0.3, None)
    bad = found.isnan().any(-1)
    assert bad.nonzero().tolist() == [[30, 1]]


def test_other_sequences_change_no_bit() -> None:
    q, k, v = (x.detach().float() for x in drawn(4, 2, 32, 32, 90))
    whole = cpu_attention.attend(*(x.transpose(0, 1) for x in (q, k, v)), Segments.of_lengths([50, 40]), 0.3, 20)
    alone = cpu_attention.attend(*(x[50:].transpose(0, 1) for x in (q, k, v)), Segments.of_lengths([40]), 0.3, 20)
    assert torch.equal(whole[50:], alone)


def test_heads_before_tokens_and_gradients_with_other_distances() -> None:
    base = drawn(4, 2, 16, 16, 30)
    results = []
    for move in (lambda x: x, lambda x: x.transpose(0, 1).contiguous().transpose(0, 1)):
        given = [move(x.detach().float()).requires_grad_() for x in base]
        out = cpu_attention.attend(*(x.transpose(0, 1) for x in given), Segments.of_lengths([30]), 0.3, None)
        above = torch.linspace(0, 1, out.numel()).view(30, 16, 4).transpose(1, 2) if results else \
            torch.linspace(0, 1, out.numel()).view(30, 16, 4).transpose(1, 2).contiguous()
        results.append((out, *torch.autograd.grad(out, given, above)))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_rows_and_segments_must_agree() -> None:
    x = torch.randn(2, 10, 16)
    with pytest.raises(ValueError, match="9 tokens, the row has 10"):
        cpu_attention.attend(x, x, x, Segments.of_lengths([4, 5]), 1.0, None)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many tokens each call of the kernel had."""
    found: list[int] = []
    attend = cpu_attention.attend

    def counted(q: torch.Tensor, *rest: object) -> torch.Tensor:
        found.append(q.shape[1])
        return attend(q, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(cpu_attention, "attend", counted)
    return found


@pytest.mark.parametrize("window", [None, 4])
def test_in_place_of_padded_sequences(calls: list[int], window: int | None) -> None:
    q, k, v = (x.detach().float().transpose(0, 1) for x in drawn(4, 2, 16, 16, 30))
    lengths = torch.tensor([11, 0, 1, 18])
    found, plain = (VarlenAttention(lengths).attend(0, q, k, v, Scores(0.3, window, compiled=c)) for c in (True, False))
    torch.testing.assert_close(found, plain, rtol=1e-5, atol=1e-6)
    assert calls == [30]


def test_in_place_of_padded_responses(calls: list[int]) -> None:
    shared = SharedPrompts([0, 0, 1, 2, 2], [7, 7, 3, 1, 1], [5, 0, 4, 1, 9], torch.device("cpu"))
    given = [x.detach().float() for x in drawn(4, 2, 16, 16, 30)]
    results = []
    for compiled in (True, False):
        own = [x.clone().requires_grad_() for x in given]
        out = shared.attention.attend(0, *(x.transpose(0, 1) for x in own), Scores(0.3, 6, compiled=compiled))
        results.append((out, *torch.autograd.grad(out.square().sum(), own)))
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    assert calls == [30]


@pytest.mark.parametrize("scores", [
    Scores(0.3), Scores(0.3, compiled=True, chunk=4), Scores(0.3, compiled=True, softcap=2.0),
    Scores(0.3, compiled=True, sinks=torch.zeros(4))], ids=str)
def test_what_it_does_not_compute(calls: list[int], scores: Scores) -> None:
    q, k, v = (x.detach().float().transpose(0, 1) for x in drawn(4, 2, 16, 16, 12))
    VarlenAttention(torch.tensor([12])).attend(0, q, k, v, scores)
    assert calls == []


def test_numbers_that_it_does_not_take(calls: list[int]) -> None:
    x = torch.randn(2, 6, 16)
    assert cpu_attention.takes(x, x, x) and not cpu_attention.takes(x, x, x.bfloat16())
    assert not cpu_attention.takes(x.double(), x, x) and not cpu_attention.takes(x, x.to("meta"), x)
    assert not cpu_attention.takes(x, x, x.transpose(1, 2))
    both = VarlenAttention(torch.tensor([6]))
    both.blocks = torch.full((6,), -1)
    both.attend(0, x, x, x, Scores(0.3, compiled=True))
    assert calls == []


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("family", ["qwen3", "mistral"])
def test_a_models_generation_and_gradients(calls: list[int], tmp_path: Path, family: str, recompute: str,
                                           monkeypatch: pytest.MonkeyPatch) -> None:
    more = {"sliding_window": 6} if family == "mistral" else {}
    # that of AdamW would clear the gradients
    model = plan_model(str(make_model(tmp_path / family, family, **more)), optimizer=Optimizer(kind="sgd", lr=1e-3))
    given = pack([([2 + i, 5, 7 + i, 3, 4, 2], []) for i in (0, 0, 1, 1)])
    shard: Any = make_shard(model, 0)
    made = shard.generate(given, Sampling(n=2, max_new_tokens=8), seed=1, step=0, max_num_seqs=0).batch
    assert calls, "a prefill uses it, too"
    grads = []
    for own in (True, False):
        calls.clear()
        monkeypatch.setattr(cpu_attention, "takes", cpu_attention.takes if own else lambda *_: False)
        fresh: Any = make_shard(model, 0)
        fresh.train([(made,)], [("logprobs",)], 1.0, lambda _, out: out[0]["logprobs"].mean(), recompute=recompute)
        grads.append(fresh.trainer.grad_buffer.clone())
        assert bool(calls) == own
    assert float(grads[0].abs().max()) > 0
    torch.testing.assert_close(*grads, rtol=1e-3, atol=1e-6)


def test_invariant_models_do_without(calls: list[int], tmp_path: Path) -> None:
    plain = plan_model(str(make_model(tmp_path / "model", "qwen3")), optimizer=Optimizer(lr=1e-3))
    model = replace(plain, invariant=True)
    shard: Any = make_shard(model, 0)
    made = shard.generate(pack([([2, 5, 7], [])]), Sampling(max_new_tokens=4), seed=1, step=0, max_num_seqs=0)
    shard.train([(made.batch,)], [("logprobs",)], 1.0, lambda _, out: out[0]["logprobs"].mean())
    assert calls == []
