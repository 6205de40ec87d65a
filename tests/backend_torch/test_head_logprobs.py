"""Log-probs by the kernels for heads, and their gradients, against torch in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from rldsl.backends.torch.kernels import kernel_library
from rldsl.backends.torch.kernels.head_logprobs import head_gradients, head_statistics, takes
from rldsl.backends.torch.model import logprobs
from rldsl.backends.torch.model.logprobs import token_logprobs
from rldsl.runtime.backend import SINGLE_RANK

pytestmark = [pytest.mark.skipif(not kernel_library.available(), reason="no C compiler"), pytest.mark.numeric]

# less than a block of rows, columns and terms, one, and several with a rest; one row, one column, one term
SHAPES = [(1, 1, 1), (5, 7, 3), (96, 528, 64), (97, 529, 16), (30, 1100, 600), (1100, 600, 40), (200, 512, 96)]


def given(rows: int, columns: int, size: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Hidden states, a head, targets of which some are elsewhere, and gradients of log-probs."""
    draw = torch.Generator().manual_seed(rows + columns + size)
    hidden, head = torch.randn(rows, size, generator=draw), torch.randn(columns, size, generator=draw) / size**0.5
    return hidden, head, torch.randint(-2, columns + 2, (rows,), generator=draw), torch.randn(rows, generator=draw)


@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_statistics_and_gradients(shape: tuple[int, int, int], temperature: float, kept: bool) -> None:
    hidden, head, targets, grads = given(*shape)
    exact = [x.double().requires_grad_() for x in (hidden, head)]
    logits = exact[0] @ exact[1].T / temperature
    is_here = (targets >= 0) & (targets < len(head))
    chosen = torch.where(is_here, logits.gather(1, targets.clamp(0, len(head) - 1)[:, None])[:, 0], 0)
    ((chosen - logits.logsumexp(-1)) * grads.double()).sum().backward()

    table = torch.empty(len(hidden) * len(head)) if kept else None
    found = head_statistics(hidden, head, targets, temperature, table)
    torch.testing.assert_close(found.peaks, logits.amax(-1).float(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found.chosen, chosen.float(), rtol=1e-5, atol=1e-5)
    normalizers = found.peaks + found.sums.log()
    torch.testing.assert_close(normalizers, logits.logsumexp(-1).float(), rtol=1e-5, atol=1e-5)

    total, before = torch.ones_like(head), [x.clone() for x in (hidden, head, normalizers, grads)]
    of_hidden = head_gradients(hidden, head, targets, temperature, normalizers, grads, total, table)
    for mine, theirs in ((of_hidden, exact[0].grad), (total - 1, exact[1].grad)):
        assert theirs is not None
        torch.testing.assert_close(mine, theirs.float(), rtol=1e-4, atol=1e-5)
    assert all(torch.equal(a, b) for a, b in zip(before, (hidden, head, normalizers, grads), strict=True))
    frozen = head_gradients(hidden, head, targets, temperature, normalizers, grads, None, table)
    assert torch.equal(frozen, of_hidden)


def all_of(hidden: torch.Tensor, head: torch.Tensor, targets: torch.Tensor, grads: torch.Tensor, kept: bool = False
           ) -> list[torch.Tensor]:
    """What the kernels give."""
    table = torch.empty(len(hidden) * len(head)) if kept else None
    found, total = head_statistics(hidden, head, targets, 0.9, table), torch.zeros_like(head)
    normalizers = found.peaks + found.sums.log()
    return [*found, head_gradients(hidden, head, targets, 0.9, normalizers, grads, total, table), total]


def test_kept_logits_change_no_bit() -> None:
    for mine, theirs in zip(all_of(*given(230, 1300, 48)), all_of(*given(230, 1300, 48), kept=True), strict=True):
        assert torch.equal(mine, theirs)


def test_a_row_has_the_same_bits_in_every_batch() -> None:
    hidden, head, targets, grads = given(300, 700, 40)
    whole = all_of(hidden, head, targets, grads)[:4]
    for rows in (slice(0, 1), slice(95, 193), slice(17, 300)):
        some = all_of(hidden[rows], head, targets[rows], grads[rows])[:4]
        assert all(torch.equal(a[rows], b) for a, b in zip(whole, some, strict=True))


def test_the_bits_are_the_same_on_any_number_of_threads() -> None:
    threads, found = torch.get_num_threads(), []
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            found.append(all_of(*given(1200, 900, 33)))
    finally:
        torch.set_num_threads(threads)
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


def test_infinities_and_nan() -> None:
    """A logit of -infinity has no weight, also where all of a block are; others give what torch gives."""
    hidden, head, targets, grads = given(8, 1200, 1)
    hidden, head = hidden.abs() + 0.1, head.abs()
    head[:600], head[700] = -torch.inf, -torch.inf
    found = head_statistics(hidden, head, targets, 1.0)
    torch.testing.assert_close(found.peaks + found.sums.log(), (hidden @ head.T).logsumexp(-1))
    for number in (torch.inf, torch.nan):
        head[5] = number
        found = head_statistics(hidden, head, targets, 1.0)
        assert (found.chosen - found.peaks - found.sums.log())[2:].isnan().all()


def test_nothing_to_compute() -> None:
    hidden, head, targets, grads = given(0, 5, 3)
    found = head_statistics(hidden, head, targets, 1.0)
    total = torch.ones_like(head)
    assert head_gradients(hidden, head, targets, 1.0, found.peaks, grads, total).shape == (0, 3)
    assert torch.equal(total, torch.ones_like(head)) and len(found.sums) == 0


def test_what_is_not_taken() -> None:
    hidden, head, *_ = given(4, 6, 8)
    assert takes(hidden, nn.Parameter(head))
    assert not takes(hidden.double(), head.double()) and not takes(hidden, head.bfloat16())
    assert not takes(hidden[:, ::2], head[:, :4]) and not takes(hidden, head[:, ::2])
    assert not takes(hidden.to("meta"), head.to("meta")) and not takes(hidden, head[:0])
    with torch.autocast("cpu", torch.bfloat16):
        assert not takes(hidden, head)


@pytest.mark.parametrize(("change", "says"), [
    (lambda g: g.update(targets=g["targets"][:3]), "as many targets"),
    (lambda g: g.update(targets=g["targets"].int()), "as many targets"),
    (lambda g: g.update(grads=g["grads"][:3]), "as many normalizers"),
    (lambda g: g.update(normalizers=g["normalizers"][:, None]), "as many normalizers"),
    (lambda g: g.update(total=torch.zeros(6, 7)), "does not take"),
    (lambda g: g.update(total=torch.zeros(6, 8).double()), "does not take"),
    (lambda g: g.update(total=torch.zeros(8, 6).T), "does not take")])
def test_wrong_arguments(change: Callable[[dict[str, Any]], None], says: str) -> None:
    hidden, head, targets, grads = given(4, 6, 8)
    others: dict[str, Any] = {"targets": targets, "normalizers": torch.zeros(4), "grads": grads, "total": None}
    change(others)
    with pytest.raises(ValueError, match=says):
        head_gradients(hidden, head, others["targets"], 1.0, others["normalizers"], others["grads"], others["total"])


@pytest.fixture
def no_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logprobs, "capped_logits", lambda *_: pytest.fail("a table was made"))


@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.parametrize("trained", ["both", "held", "hidden", "head"])
def test_log_probs_of_one_token_use_them(no_tables: None, trained: str, kept: bool, monkeypatch: pytest.MonkeyPatch
                                         ) -> None:
    """Twice, so that gradients add up; those of the head where they are held."""
    monkeypatch.setattr(logprobs, "are_kept", lambda *_: kept)
    hidden, head, targets, grads = given(70, 900, 24)
    targets = targets.clamp(0, 899)
    results = []
    for mine in (True, False):
        x, weight = hidden.clone().requires_grad_(trained != "head"), nn.Parameter(head.clone(), trained != "hidden")
        held = weight.grad = torch.zeros_like(head) if trained == "held" else None
        for _ in range(2):
            out = token_logprobs(x, weight, targets, 0.8, SINGLE_RANK, 0)[0] if mine else \
                (x @ weight.T / 0.8).log_softmax(-1).gather(1, targets[:, None])[:, 0]
            out.backward(grads)
        assert held is None or weight.grad is held
        results.append([out.detach(), *(t.grad for t in (x, weight) if t.grad is not None)])
    assert len(results[0]) == len(results[1])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_a_second_gradient_is_the_first(no_tables: None) -> None:
    hidden, head, targets, _ = given(20, 60, 8)
    x, weight = hidden.requires_grad_(), nn.Parameter(head)
    out = token_logprobs(x, weight, targets.clamp(0, 59), 1.0, SINGLE_RANK, 0)[0].sum()
    first, second = (torch.autograd.grad(out, (x, weight), retain_graph=True) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
