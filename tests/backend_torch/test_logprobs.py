"""The loss head in chunks against torch on all logits: values, gradients, and what exists at once."""

from __future__ import annotations

import pytest
import torch
from rldsl.backends.torch.model.logprobs import token_logprobs

from benchmarks import loss
from rldsl.backends.torch.model import logprobs
from rldsl.memory import logits
from rldsl.memory.logits import (
    KEPT_LOGITS,
    MAX_ROWS,
    MIN_ROWS,
    Head,
    Read,
    are_kept,
    backward,
    forward,
    rows_at_once,
)
from rldsl.runtime.backend import SINGLE_RANK

Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def given(dtype: torch.dtype = torch.float64, tokens: int = 37, words: int = 50) -> Tensors:
    return loss.given(tokens, words, 8, torch.device("cpu"), dtype)  # type: ignore[return-value]


def whole(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor,
          temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs and entropies, from all logits."""
    every = (hidden @ weight.T / temperature).log_softmax(-1)
    return every.gather(1, targets[:, None])[:, 0], -(every.exp() * every).sum(-1)


def slopes(found: tuple[torch.Tensor, torch.Tensor | None], tensors: Tensors) -> list[torch.Tensor]:
    """Gradients of sums in which every token weighs differently."""
    hidden, weight, _ = tensors
    hidden.grad = weight.grad = None
    share = torch.linspace(-1, 2, len(hidden), dtype=found[0].dtype)
    total = (found[0] * share).sum()
    if found[1] is not None:
        total = total + (found[1] * share.flip(0)).sum()
    total.backward()
    return [hidden.grad, weight.grad]  # type: ignore[list-item]


@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("chunk", [1, 8, 37, 1024])
def test_values_and_gradients_are_exact(chunk: int, temperature: float, entropy: bool) -> None:
    tensors = given()
    mine = token_logprobs(*tensors, temperature, SINGLE_RANK, 0, entropy, chunk)
    theirs = whole(*tensors, temperature)
    assert torch.allclose(mine[0], theirs[0], rtol=0, atol=1e-12)
    if not entropy:
        assert mine[1] is None
        theirs = theirs[0], None  # type: ignore[assignment]
    else:
        assert torch.allclose(mine[1], theirs[1], rtol=0, atol=1e-12)  # type: ignore[arg-type]
    got = [x.clone() for x in slopes(mine, tensors)]
    for a, b in zip(got, slopes(theirs, tensors)):
        assert torch.allclose(a, b, rtol=0, atol=1e-12)


def test_no_tokens() -> None:
    hidden, weight, targets = given()
    found = token_logprobs(hidden[:0], weight, targets[:0], 1.0, SINGLE_RANK, 0).logprobs
    found.sum().backward()
    assert found.shape == (0,) and not weight.grad.any()  # type: ignore[union-attr]


def test_a_head_that_is_not_trained_gets_no_gradient() -> None:
    hidden, weight, targets = given()
    weight.requires_grad_(False)
    token_logprobs(hidden, weight, targets, 1.0, SINGLE_RANK, 0)[0].sum().backward()
    assert weight.grad is None and hidden.grad is not None


def test_other_numbers_are_seen() -> None:
    """A shifted target, another temperature: the comparison above would see both."""
    hidden, weight, targets = given()
    right = whole(hidden, weight, targets, 1.0)[0]
    others = (targets + 1) % 50
    assert not torch.allclose(token_logprobs(hidden, weight, others, 1.0, SINGLE_RANK, 0)[0], right, atol=1e-3)
    assert not torch.allclose(token_logprobs(hidden, weight, targets, 0.9, SINGLE_RANK, 0)[0], right, atol=1e-3)


@pytest.fixture
def small_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    """An eighth and a quarter of the usual ones, which would need many tokens."""
    monkeypatch.setattr(logits, "CPU_LOGITS", 1 << 20)
    monkeypatch.setattr(logits, "KEPT_LOGITS", 1 << 24)


@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_memory_is_that_of_the_estimate(dtype: torch.dtype, entropy: bool, small_tables: None) -> None:
    """And a small part of the logits; without chunks it is several times as much."""
    tokens, words = 1536, 16384
    tensors = given(dtype, tokens, words)
    assert not are_kept(words, tokens, 4, "cpu")
    most, full = loss.peak(loss.ours, *tensors, entropy), 4 * tokens * words
    head = Head(words, 8, dtype.itemsize, dtype.itemsize)
    read = Read(entropy)
    said = max(forward(head, tokens, read, "cpu", True), backward(head, tokens, False, read, "cpu"))
    said += head.compute * words * 8 if dtype == torch.bfloat16 else 0  # each chunk's part of the weight's gradient
    assert said == pytest.approx(most, rel=0.1)
    assert loss.peak(loss.theirs, *tensors, entropy) > full > most


@pytest.fixture
def tables(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rows of each table of logits that is made, without the kernels that make none."""
    made: list[int] = []
    monkeypatch.setattr(logprobs.head_logprobs, "takes", lambda *_: False)
    plain = logprobs.capped_logits

    def counted(hidden: torch.Tensor, *rest: object) -> torch.Tensor:
        made.append(len(hidden))
        return plain(hidden, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(logprobs, "capped_logits", counted)
    return made


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_few_logits_are_made_once(tables: list[int], temperature: float, compiled: bool,
                                  monkeypatch: pytest.MonkeyPatch) -> None:
    if not compiled:
        monkeypatch.setattr(logprobs.cpu_kernels, "takes", lambda *_: False)
    tensors = given(torch.float32)
    mine = token_logprobs(*tensors, temperature, SINGLE_RANK, 0, chunk=16)
    got = [x.clone() for x in slopes(mine[:2], tensors)]
    assert tables == [16, 16, 5]
    theirs = whole(*tensors, temperature)[0]
    torch.testing.assert_close(mine[0], theirs, rtol=1e-5, atol=1e-5)
    for a, b in zip(got, slopes((theirs, None), tensors), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_those_for_several_tokens_of_each_distribution_are_made_once(tables: list[int]) -> None:
    hidden, weight, targets = given(torch.float32)
    chosen = torch.stack((targets, (targets + 7) % 50, targets), 1)
    found = token_logprobs(hidden, weight, chosen, 0.7, SINGLE_RANK, 0, chunk=16)[0]
    expected = (hidden @ weight.T / 0.7).log_softmax(-1).gather(1, chosen)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    share = torch.linspace(-1, 2, found.numel()).view(found.shape)
    got = torch.autograd.grad((found * share).sum(), (hidden, weight))
    assert tables == [16, 16, 5]
    for a, b in zip(got, torch.autograd.grad((expected * share).sum(), (hidden, weight)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_they_are_made_again_for_a_second_gradient(tables: list[int]) -> None:
    tensors = given(torch.float32)
    found = token_logprobs(*tensors, 1.0, SINGLE_RANK, 0)[0]
    first, second = (torch.autograd.grad(found.sum(), tensors[:2], retain_graph=True) for _ in range(2))
    assert tables == [37, 37]
    for a, b in zip(first, second, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("options", [{"want_entropy": True}, {"want_squares": True}, {"cap": 3.0}], ids=str)
def test_what_else_is_read_makes_them_again(tables: list[int], options: dict[str, float]) -> None:
    tensors = given(torch.float32)
    token_logprobs(*tensors, 1.0, SINGLE_RANK, 0, **options)[0].sum().backward()  # type: ignore[arg-type]
    assert tables == [37, 37]


def test_many_logits_and_those_without_a_gradient_are_not_kept(tables: list[int], monkeypatch: pytest.MonkeyPatch
                                                               ) -> None:
    tensors = given(torch.float32)
    with torch.no_grad():
        assert not token_logprobs(*tensors, 1.0, SINGLE_RANK, 0)[0].requires_grad
    monkeypatch.setattr(logprobs, "are_kept", lambda *_: False)
    token_logprobs(*tensors, 1.0, SINGLE_RANK, 0)[0].sum().backward()
    assert tables == [37, 37, 37]
    assert are_kept(KEPT_LOGITS // 64, 64, 4, "cpu") and not are_kept(KEPT_LOGITS // 64, 65, 4, "cpu")
    assert not are_kept(50, 37, 2, "cpu") and not are_kept(50, 37, 4, "cuda")


@pytest.mark.parametrize("kept", [True, False])
def test_memory_of_few_logits_is_that_of_the_estimate(kept: bool, small_tables: None) -> None:
    tokens, words = 900 if kept else 1100, 16384
    most = loss.peak(loss.ours, *given(torch.float32, tokens, words), False)
    head = Head(words, 8, 4, 4)
    said = max(forward(head, tokens, Read(), "cpu", True), backward(head, tokens, False, Read(), "cpu"))
    assert said == pytest.approx(most, rel=0.1) and are_kept(words, tokens, 4, "cpu") == kept


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens", [600, 2048])
@pytest.mark.parametrize("cap, entropy, several", [(3.0, False, 1), (3.0, True, 1), (0.0, False, 3), (3.0, False, 3)])
def test_memory_where_kernels_compute_no_blocks(cap: float, entropy: bool, several: int, tokens: int,
                                                dtype: torch.dtype, small_tables: None) -> None:
    """With a cap of logits, or for several tokens of each distribution. 600: as few logits as are kept where no cap
    forbids it."""
    words = 16384

    def head(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, entropy: bool) -> torch.Tensor:
        chosen = targets if several == 1 else torch.stack([targets] * several, 1)
        found = token_logprobs(hidden, weight, chosen, 0.7, SINGLE_RANK, 0, entropy, rows_at_once(words, "cpu"),
                               cap=cap)
        return found.logprobs.sum() + (0.0 if found.entropy is None else found.entropy.sum())

    most = loss.peak(head, *given(dtype, tokens, words), entropy)
    of, read = Head(words, 8, dtype.itemsize, dtype.itemsize, capped=cap > 0), Read(entropy, several > 1)
    said = max(forward(of, tokens, read, "cpu", True), backward(of, tokens, False, read, "cpu"))
    said += of.compute * words * 8 if dtype == torch.bfloat16 else 0  # each chunk's part of the weight's gradient
    assert said == pytest.approx(most, rel=0.1)
    assert are_kept(words, tokens, dtype.itemsize, "cpu") == (tokens == 600 and dtype == torch.float32)


@pytest.mark.parametrize("words, device, rows", [
    (151936, "cuda", MAX_ROWS), (151936, "cpu", 55), (1 << 20, "cpu", MIN_ROWS), (32000, "cpu", 262), (46, "cpu", MAX_ROWS), (0, "cpu", MAX_ROWS)])
def test_rows_at_once(words: int, device: str, rows: int) -> None:
    assert rows_at_once(words, device) == rows
