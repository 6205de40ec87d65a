"""Log-probs, generation and gradients of a family under some layouts against plain transformers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from rldsl.diag import Failure
from rldsl.plan.events import Sampling
from rldsl.plan.model import Layout, Optimizer
from tests.backend_torch.shards import pack, plan_model, ragged, shard_of
from tests.backend_torch.steps import difference
from tests.backend_torch.test_train import share

ROWS = ragged(6, 46, longest=14)  # longer than the windows and chunks of the tiny configs
SGD = Optimizer(lr=1.0, kind="sgd", clip_grad=0.0)  # whose update is the gradient
NEW = 6  # tokens that are generated


@dataclass(frozen=True)
class Expected:
    """What plain transformers computes."""

    logprobs: torch.Tensor  # of the response tokens of ROWS
    stepped: dict[str, torch.Tensor]  # parameters and buffers after one update
    stored: dict[str, torch.Tensor]  # and before

    @property
    def largest(self) -> float:
        """The largest number of a gradient."""
        return max(float((x - self.stored[n]).abs().max()) for n, x in self.stepped.items() if x.numel())


def model_of(path: str) -> Any:
    """In float32. transformers draws some rows of what it has read anew; here the directory decides."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    there = {k: v for k, v in load_file(Path(path) / "model.safetensors").items() if k in model.state_dict()}
    model.load_state_dict(there, strict=False)
    return model


def logprobs_of(model: Any, prompt: list[int], response: list[int]) -> torch.Tensor:
    logits = model(torch.tensor([prompt + response]), use_cache=False).logits[0]
    picked = logits.float().log_softmax(-1)[len(prompt) - 1 : -1]
    return picked.gather(1, torch.tensor(response, dtype=torch.long)[:, None])[:, 0]


def expected(path: str) -> Expected:
    model = model_of(path)
    stored = {n: x.detach().clone() for n, x in model.state_dict().items()}
    found = [logprobs_of(model, *row) for row in ROWS]
    for one in found:
        share(one.square()).backward()
    with torch.no_grad():
        for p in model.parameters():
            if p.grad is not None:
                p -= p.grad
    return Expected(torch.cat(found).detach(), {n: x.detach() for n, x in model.state_dict().items()}, stored)


def check(rank: int, path: str, layouts: Sequence[Layout], right: Expected, generate: bool = True
          ) -> list[tuple[Layout, str, float]]:
    """(layout, what, error) on this rank; what: load, logprobs, generate, train. Errors of gradients are relative to the
    largest number of one, if that is above 1."""
    found: list[tuple[Layout, str, float]] = []
    for layout in layouts:
        made = shard_of(plan_model(path, "causal_lm", SGD), layout, rank, True)
        if made is None:
            continue
        shard, mine = made
        found.append((layout, "load", difference(shard, right.stored)))
        rows = list(range(mine, len(ROWS), layout.dp))
        own = right.logprobs.split([len(r) for _, r in ROWS])
        got = shard.infer([pack([ROWS[i] for i in rows])], "logprobs", 1.0)
        found.append((layout, "logprobs", float((got - torch.cat([own[i] for i in rows])).abs().max())))
        if generate:
            out = shard.generate(pack([(ROWS[i // 2][0], []) for i in range(2 * len(ROWS))]),
                                 Sampling(max_new_tokens=NEW, greedy=True), seed=3, step=5, max_num_seqs=4)
            again = shard.infer([out.batch], "logprobs", 1.0)
            found.append((layout, "generate", float((again - out.logprobs).abs().max())))

        def loss(i: int, fresh: Sequence[Any], rows: list[int] = rows) -> torch.Tensor:
            each = fresh[0]["logprobs"].split([len(ROWS[r][1]) for r in rows[i::2]])
            return sum((share(f.square()) for f in each), torch.zeros(()))

        shard.train([(pack([ROWS[r] for r in rows[i::2]]),) for i in range(2)], [("logprobs",)], 1.0, loss, None, "full")
        found.append((layout, "train", difference(shard, right.stepped) / max(1.0, right.largest)))
    return found


def refusal(error: Exception) -> str:
    """One line of why something does not run."""
    if isinstance(error, Failure):
        (d, *_) = error.diagnostics
        return f"{d.title}: {d.label}" if d.label else d.title
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"
