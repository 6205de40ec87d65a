"""Rows of which several have the same prompt, packed so that a backend knows it, and so that it does not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from rldsl.plan.model import Layout, Model, Optimizer
from rldsl.runtime.backend import PackedBatch
from tests.backend_torch.shards import pack, plan_model, shard_of
from tests.backend_torch.test_train import share

SGD = Optimizer(lr=1.0, kind="sgd", clip_grad=0.0)  # whose update is the gradient


@dataclass(frozen=True)
class Row:
    group: int  # number of its prompt
    prompt: list[int]
    response: list[int]


def rows_of(shape: Sequence[tuple[int, Sequence[int]]], vocab: int = 46, seed: int = 0) -> list[Row]:
    """shape: (tokens of the prompt, tokens of each response) of each group."""
    g = torch.Generator().manual_seed(seed)

    def draw(n: int) -> list[int]:
        return torch.randint(2, vocab, (n,), generator=g).tolist()

    prompts = [draw(n) for n, _ in shape]
    return [Row(i, prompts[i], draw(n)) for i, (_, sizes) in enumerate(shape) for n in sizes]


# longer than the windows and chunks of the tiny configs; empty responses, one token, a prompt of its own, and one
# whose responses are all empty
ROWS = rows_of([(13, (5, 0, 12, 1)), (3, (7, 7)), (21, (2,)), (9, (0, 0)), (16, (30, 3, 9))])


def packed(rows: Sequence[Row], known: bool) -> PackedBatch:
    """known: whether it says which prompts are the same."""
    batch = pack([(r.prompt, r.response) for r in rows])
    host = [len(r.prompt) for r in rows], [len(r.response) for r in rows]
    return replace(batch, on_host=host, prompts=[("prompts", r.group) for r in rows] if known else None)


def computed(rank: int, path: str | Model, layouts: Sequence[tuple[Layout, bool]], rows: Sequence[Row],
             recompute: str = "none", what: str = "logprobs", cut: Sequence[int] = (), temperature: float = 0.7
             ) -> list[dict[str, torch.Tensor] | None]:
    """Of this rank, for each layout and whether prompts are known: an inference, what a train call reads, and its
    gradients by parameter; None on ranks without the layout. cut: where micro-batches of a dp rank begin."""
    model = plan_model(path, "causal_lm" if what == "logprobs" else "value_model", SGD) if isinstance(path, str) else path
    found: list[dict[str, torch.Tensor] | None] = []
    for layout, known in layouts:
        made = shard_of(model, layout, rank, True)
        if made is None:
            found.append(None)
            continue
        shard, mine = made
        own = list(rows[mine::layout.dp])
        parts = [own[a:b] for a, b in zip([0, *cut], [*cut, len(own)], strict=True)]
        inferred = torch.empty(0) if layout.zero else shard.infer([packed(p, known) for p in parts], what, temperature)
        seen: dict[int, torch.Tensor] = {}

        def loss(i: int, fresh: Sequence[Any]) -> torch.Tensor:
            seen[i] = fresh[0][what].detach()
            each = fresh[0][what].split([len(r.response) for r in parts[i]])
            return sum((share((f - 0.1 * k).square()) for k, f in enumerate(each)), torch.zeros(()))

        before = {n: x.clone() for n, x in shard.state_dict().items()}
        shard.train([(packed(p, known),) for p in parts], [(what,)], temperature, loss, None, recompute)
        grads = {n: before[n] - x for n, x in shard.state_dict().items()}
        found.append({"inferred": inferred, **({"fresh": torch.cat([seen[i] for i in sorted(seen)])} if seen else {}),
                      **grads})
    return found


def gap(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> dict[str, float]:
    """The largest difference of each tensor, relative to its largest number; of small gradients to 0.01, since updates
    are read from parameters."""
    assert one.keys() == other.keys()
    return {n: float((x - other[n]).abs().max() / other[n].abs().max().clamp(min=1e-2)) if x.numel() else 0.0
            for n, x in one.items()}


def gaps(rank: int, path: str, layouts: Sequence[Layout], rows: Sequence[Row], *more: Any) -> list[dict[str, float]]:
    """Of this rank, under each layout: `gap` between prompts that are known and prompts that are not."""
    found = computed(rank, path, [(x, known) for x in layouts for known in (True, False)], rows, *more)
    return [gap(one, other) for one, other in zip(found[::2], found[1::2], strict=True)
            if one is not None and other is not None]
