"""The same responses in runs that are compared, so that the last bit of a product decides nothing.

Sampling takes the first token at which the running sum of probabilities exceeds a random number. Where this number is
as near to the sum as rounding, which happens about once in 15,000 tokens, a run under another placement or on another
CPU takes the next token, and all that follows differs. `recorded(file)` keeps what one run draws; in a run under
`followed(file)` a random number that lies in the interval of the recorded token, or next to it by no more than `NEAR`,
takes that token again. One that lies elsewhere takes its own, so that wrong probabilities show in the comparison.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from rldsl.backends.torch.generate import sampling
from rldsl.backends.torch.shard import TorchShard

from rldsl.runtime.draws import uniform
from tests.gpu import shared_device

NEAR = 1e-3  # of a probability: rounding errors after some updates of a tiny model are a hundredth of it


@contextmanager
def recorded(file: Path) -> Iterator[None]:
    """Write what this rank samples in the block: `file`.PID holds random numbers and the tokens that they took."""
    found: list[tuple[torch.Tensor, torch.Tensor]] = []
    real = TorchShard.generate

    def generate(self: Any, *args: Any, seed: int, step: int, **more: Any) -> Any:
        made = real(self, *args, seed=seed, step=step, **more)
        batch, at = made.batch, 0
        before = args[0].response_lens  # that earlier calls sampled
        lens = zip(batch.rows.cpu(), batch.prompt_lens.tolist(), batch.response_lens.tolist(), before.cpu(), strict=True)
        for row, prompt, response, first in lens:
            draws = uniform(seed, step, row, first + torch.arange(response))
            found.append((draws, batch.tokens[at + prompt : at + prompt + response].cpu().clone()))
            at += prompt + response
        return made

    TorchShard.generate = generate  # type: ignore[method-assign]
    try:
        yield
    finally:
        TorchShard.generate = real  # type: ignore[method-assign]
    if found:
        file.parent.mkdir(parents=True, exist_ok=True)
        torch.save([torch.cat(x) for x in zip(*found, strict=True)], f"{file}.{os.getpid()}")


def forget(file: Path) -> None:
    """What an earlier run has written."""
    for old in file.parent.glob(f"{file.name}.*"):
        old.unlink()


@contextmanager
def followed(file: Path) -> Iterator[None]:
    """In the block, take the tokens that the ranks of another run wrote to `file`.*"""
    parts = [torch.load(x) for x in file.parent.glob(f"{file.name}.*")]
    assert parts, f"no run has written {file}"
    draws, tokens = (torch.cat(x) for x in zip(*parts, strict=True))
    draws, order = draws.sort()
    where = shared_device.device() or torch.device("cpu")
    draws, tokens = draws.to(where), tokens[order].to(where)
    real = sampling.inverse_cdf
    sampling.inverse_cdf = lambda weights, at: follow(weights, at, draws, tokens, real(weights, at))
    try:
        yield
    finally:
        sampling.inverse_cdf = real


def follow(weights: torch.Tensor, at: torch.Tensor, draws: torch.Tensor, tokens: torch.Tensor,
           own: torch.Tensor) -> torch.Tensor:
    """[S] the recorded token of each random number `at` [S] that is recorded and near the token's interval, else its
    `own`. weights: [S, V]. draws: sorted, and their tokens. Neither waits nor branches, so that it can be replayed."""
    place = torch.searchsorted(draws, at).clamp(max=len(draws) - 1)
    token = tokens[place]
    reached = weights.cumsum(-1, dtype=torch.float64)
    above = (reached.gather(1, token[:, None]) / reached[:, -1:])[:, 0]
    below = above - (weights.gather(1, token[:, None]).double() / reached[:, -1:])[:, 0]
    near = (at > below - NEAR) & (at < above + NEAR)
    return torch.where((draws[place] == at) & near, token, own)
