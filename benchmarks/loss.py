"""The loss head against full logits: memory and time of log-probs, forward and backward.

    python -m benchmarks.loss [--large]      # --large: 152k words too, which takes some gigabytes

Ours: `backends/torch/model/logprobs.py`. Theirs: torch's own `log_softmax` and `gather` on the logits of all tokens, in
one piece. memory: the most bytes that exist at once beyond what goes in and what comes out (gradients of hidden states
and of the weight), every storage that torch makes counted while it lives, over the bytes of the logits in float32 (gate
0.15, goal 0.03; of theirs for comparison). It falls with the number of tokens, as ours does not grow with them. time:
CPU seconds of ours over theirs, least of some turns, taken alternately (gate 1.15: the logits are made twice). """

from __future__ import annotations

import sys
import time
from collections.abc import Callable

import torch

from rldsl.backends.torch.model.logprobs import token_logprobs
from rldsl.memory.logits import rows_at_once
from rldsl.runtime.backend import SINGLE_RANK
from tests.memory.accounting import Storages

# (tokens, words, size of hidden states, entropy)
CASES = ((2048, 32000, 64, False), (2048, 32000, 64, True), (8192, 32000, 32, False))
LARGE = ((2048, 151936, 64, False),)
MEMORY_GATE, MEMORY_GOAL, TIME_GATE = 0.15, 0.03, 1.15
Head = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, bool], torch.Tensor]


def ours(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, entropy: bool) -> torch.Tensor:
    found, spread, _ = token_logprobs(hidden, weight, targets, 1.0, SINGLE_RANK, 0, entropy,
                                   rows_at_once(len(weight), hidden.device.type))
    return found.sum() if spread is None else found.sum() + 0.1 * spread.sum()


def theirs(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, entropy: bool) -> torch.Tensor:
    """As trainers write it: all log-probs, one of each taken."""
    logprobs = (hidden @ weight.T).float().log_softmax(-1)
    found = logprobs.gather(1, targets[:, None]).sum()
    return found - 0.1 * (logprobs.exp() * logprobs).sum() if entropy else found


def given(tokens: int, words: int, size: int, device: torch.device, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """Hidden states, weight and targets."""
    draw = torch.Generator(device=device).manual_seed(0)
    hidden, weight = (torch.randn(n, size, device=device, dtype=dtype, generator=draw) for n in (tokens, words))
    targets = torch.randint(words, (tokens,), device=device, generator=draw)
    return hidden.requires_grad_(), (weight / size**0.5).detach().requires_grad_(), targets


def peak(head: Head, hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, entropy: bool) -> int:
    """Bytes beyond what goes in and comes out."""
    hidden.grad = weight.grad = None
    given = [t.untyped_storage() for t in (hidden, weight, targets)]
    with Storages() as storages:
        for one in given:
            storages.see(one)
        head(hidden, weight, targets, entropy).backward()
    hidden.grad = weight.grad = None
    return storages.most - sum(x.nbytes() for x in given) - hidden.nbytes - weight.nbytes


def seconds(head: Head, hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, entropy: bool) -> float:
    hidden.grad = weight.grad = None
    begin = time.process_time()
    head(hidden, weight, targets, entropy).backward()
    return time.process_time() - begin


def main(arguments: list[str]) -> int:
    """The number of gates that are missed."""
    torch.set_num_threads(1)
    missed, cpu = 0, torch.device("cpu")
    print(f"{'tokens':>8}{'words':>8}{'entropy':>9}{'MiB':>9}{'/ logits':>10}{'theirs':>8}{'time':>7}", flush=True)
    for tokens, words, size, entropy in CASES + (LARGE if "--large" in arguments else ()):
        tensors = given(tokens, words, size, cpu, torch.float32)
        full = 4 * tokens * words
        mine, other = (peak(head, *tensors, entropy) for head in (ours, theirs))
        turns = [(seconds(ours, *tensors, entropy), seconds(theirs, *tensors, entropy)) for _ in range(2)]
        spent = min(a for a, _ in turns) / min(b for _, b in turns)
        memory = mine / full
        said = "" if memory <= MEMORY_GOAL else "over the goal" if memory <= MEMORY_GATE else "MISSED"
        missed += (memory > MEMORY_GATE) + (spent > TIME_GATE)
        print(f"{tokens:8}{words:8}{str(entropy).lower():>9}{mine / 2**20:9.1f}{memory:10.3f}{other / full:8.2f}"
              f"{spent:7.2f}  {said}{' time MISSED' if spent > TIME_GATE else ''}", flush=True)
    print(f"memory: gate {MEMORY_GATE}, goal {MEMORY_GOAL}; time: gate {TIME_GATE}; {missed} missed")
    return missed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]) > 0)
