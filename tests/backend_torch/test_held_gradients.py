"""Gradients added where they are kept: those of torch, and hooks still see their own."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from rldsl.backends.torch.kernels.embeddings import CpuEmbedding, use_cpu_embedding
from rldsl.backends.torch.kernels.held_gradients import add_gradient, held_gradient, parameter_of
from rldsl.backends.torch.model.autocast import round_parameter
from rldsl.backends.torch.model.logprobs import token_logprobs
from rldsl.runtime.backend import Axis

pytestmark = pytest.mark.numeric

ALONE = Axis((0,), 0, None)
VOCAB, HIDDEN = 70, 24


@pytest.mark.parametrize("rows, columns", [(1, 1), (7, 33), (16, 16), (64, 48), (33, 100)])
def test_sums(rows: int, columns: int) -> None:
    total = torch.randn(rows, columns)
    for grad in (torch.randn(rows, columns), torch.randn(columns, rows).T, torch.randn(columns, 2 * rows)[:, ::2].T):
        expected = total + grad
        assert add_gradient(total, grad) is total
        assert torch.equal(total, expected)


def test_sums_without_compiled_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rldsl.backends.torch.kernels.held_gradients.available", lambda: False)
    total, grad = torch.randn(5, 8), torch.randn(8, 5).T
    assert torch.equal(add_gradient(total.clone(), grad), total + grad)


def test_what_holds_a_gradient() -> None:
    p = nn.Parameter(torch.randn(3, 4))
    with torch.no_grad():
        assert held_gradient(p) is None and held_gradient(None) is None
        p.grad = torch.zeros(3, 4)
        assert held_gradient(p) is p.grad
        p.grad = torch.zeros(4, 3).T
        assert held_gradient(p) is None, "not in the order of rows"
        half = nn.Parameter(torch.randn(3, 4).bfloat16())
        half.grad = torch.zeros(3, 4).bfloat16()
        assert held_gradient(half) is None
    p.grad = torch.zeros(3, 4)
    assert held_gradient(p) is None, "a backward pass that is differentiated itself"
    for register in (p.register_hook, p.register_post_accumulate_grad_hook):
        handle = register(lambda _: None)
        with torch.no_grad():
            assert held_gradient(p) is None
        handle.remove()
    assert parameter_of(p) is p and parameter_of(p * 1) is None and parameter_of(p.detach()) is None


def grads(function: Callable[[], torch.Tensor], weight: nn.Parameter, start: torch.Tensor | None) -> torch.Tensor:
    """The weight's gradient after two backward passes. start: what it holds before."""
    weight.grad = None if start is None else start.clone()
    kept = weight.grad
    for _ in range(2):
        function().backward()
    assert weight.grad is not None and (kept is None or weight.grad is kept)
    return weight.grad.clone()


@pytest.mark.parametrize("padding", [None, 3])
@pytest.mark.parametrize("shape", [(9,), (4, 5)])
@pytest.mark.parametrize("starts", [True, False])
def test_embeddings(padding: int | None, shape: tuple[int, ...], starts: bool) -> None:
    layer = nn.Embedding(VOCAB, HIDDEN, padding_idx=padding)
    ids, factor = torch.randint(5, shape), torch.randn(*shape, HIDDEN)  # ids come several times
    start = torch.randn(VOCAB, HIDDEN) if starts else None

    def loss() -> torch.Tensor:
        return (layer(ids) * factor).sum()

    expected, rows = grads(loss, layer.weight, start), layer(ids)
    use_cpu_embedding(layer)
    assert type(layer) is CpuEmbedding and torch.equal(layer(ids), rows)
    torch.testing.assert_close(grads(loss, layer.weight, start), expected, rtol=1e-6, atol=1e-5)


def test_hooks_see_the_gradient_of_their_pass() -> None:
    layer, seen = CpuEmbedding(VOCAB, HIDDEN), list[torch.Tensor]()
    layer.weight.grad = torch.ones(VOCAB, HIDDEN)
    layer.weight.register_hook(lambda grad: seen.append(grad.clone()))
    layer(torch.tensor([1, 1])).sum().backward()
    assert [x.sum().item() for x in seen] == [2 * HIDDEN] and layer.weight.grad.sum() == (VOCAB + 2) * HIDDEN


def test_a_frozen_embedding_and_one_of_another_kind() -> None:
    class Scaled(nn.Embedding):
        pass

    layers = nn.ModuleList([nn.Embedding(4, 2), Scaled(4, 2), nn.Embedding(4, 2, max_norm=1.0)])
    layers[0].weight.requires_grad_(False)
    use_cpu_embedding(layers)
    assert [type(x) for x in layers] == [CpuEmbedding, Scaled, CpuEmbedding]
    ids = torch.tensor([0, 2])
    assert not layers[0](ids).requires_grad
    assert layers[2](ids).norm(dim=-1).max() <= 1.0 + 1e-6, "left to torch"


def test_a_rounded_lookup() -> None:
    layer = CpuEmbedding(VOCAB, HIDDEN)
    round_parameter(layer, "weight")
    ids = torch.tensor([1, 2])
    assert torch.equal(layer(ids), layer._parameters["weight"][ids].bfloat16().float())


@pytest.mark.parametrize("entropy", [True, False])
@pytest.mark.parametrize(("words", "chunk"), [(VOCAB, 16), (VOCAB, 1024), (5000, 1024)])
def test_heads(entropy: bool, words: int, chunk: int) -> None:
    """A head that an embedding shares, as of tied models. Where it has many rows, its gradient is made in the order of
    columns on some machines. Some targets are there more than once."""
    weight = nn.Parameter(torch.randn(words, HIDDEN))
    ids, targets = torch.randint(words, (40,)), torch.randint(words, (40,))
    targets[20:] = targets[:20]
    embedding = CpuEmbedding(words, HIDDEN)
    embedding.weight = weight

    def loss() -> torch.Tensor:
        found = token_logprobs(embedding(ids), weight, targets, 0.7, ALONE, 0, entropy, chunk)
        return found.logprobs.sum() + (found.entropy.sum() if found.entropy is not None else 0.0)

    def plain() -> torch.Tensor:
        logprobs = (F.embedding(ids, weight) @ weight.T / 0.7).log_softmax(-1)
        total = logprobs.gather(1, targets[:, None]).sum()
        return total - (logprobs.exp() * logprobs).sum() if entropy else total

    start = torch.randn(words, HIDDEN)
    for before in (None, start):
        torch.testing.assert_close(grads(loss, weight, before), grads(plain, weight, before), rtol=1e-4, atol=1e-4)
