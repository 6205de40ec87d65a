"""The phases of a step as rldsl and as transformers run them, in CPU seconds, for `benchmarks/bound.py`."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from benchmarks.bound_least import Lengths
from rldsl.backends.torch.generate.engine import Engine
from rldsl.backends.torch.generate.scheduler import PrefillBatch
from rldsl.plan.events import Sampling
from rldsl.plan.model import Optimizer
from rldsl.runtime.backend import PackedBatch
from tests.backend_torch.shards import make_shard, pack, plan_model

Phases = dict[str, float]
NOW = time.process_time


@dataclass(frozen=True, slots=True)
class Turn:
    """One measurement of all phases. tokens: sampled."""

    phases: Phases
    tokens: int


class Ours:
    """A shard of the torch backend, called as the runtime calls it."""

    def __init__(self, path: str):
        self.shard: Any = make_shard(plan_model(path, optimizer=Optimizer(lr=1e-6), updates=100), 0)
        self.made: PackedBatch | None = None

    def turn(self, prompts: Sequence[list[int]], n: int, tokens: int) -> Turn:
        phases: Phases = {"prefill": 0.0}
        given = pack([(p, []) for p in prompts for _ in range(n)])
        run = Engine.run

        def timed_run(engine: Engine, group: Any, batch: Any, received: Any) -> Any:
            start = NOW()
            out = run(engine, group, batch, received)
            phases["prefill"] += NOW() - start if isinstance(batch, PrefillBatch) else 0.0
            return out

        Engine.run = timed_run  # type: ignore[method-assign]  # put back below
        try:
            start = NOW()
            made = self.shard.generate(given, Sampling(n=n, max_new_tokens=tokens, temperature=1.0), seed=1, step=0,
                                       max_num_seqs=0)
            phases["decode"] = NOW() - start - phases["prefill"]
        finally:
            Engine.run = run  # type: ignore[method-assign]
        batch = self.made = _as_the_runtime_packs(made.batch, n)
        start = NOW()
        self.shard.infer([batch], "logprobs", 1.0)
        phases["logprobs"] = NOW() - start
        return Turn(phases | self._train(batch), int(batch.response_lens.sum()))

    def _train(self, batch: PackedBatch) -> Phases:
        marks = [NOW()]
        step = self.shard.trainer.step

        def loss(_: int, outputs: Sequence[Any]) -> torch.Tensor:
            marks.append(NOW())
            total: torch.Tensor = -outputs[0]["logprobs"].mean()
            return total

        def timed_step(*args: Any) -> Any:
            marks.append(NOW())
            out = step(*args)
            marks.append(NOW())
            return out

        self.shard.trainer.step = timed_step
        try:
            self.shard.train([(batch,)], [("logprobs",)], 1.0, loss)
        finally:
            self.shard.trainer.step = step
        return _differences(marks)

    def lengths(self, n: int) -> Lengths:
        """Of the sequences of the last turn."""
        if self.made is None:
            raise RuntimeError("nothing was generated")
        return Lengths(tuple(self.made.prompt_lens.tolist()[::n]), n, tuple(self.made.response_lens.tolist()))


class Transformers:
    """`generate` with a static cache, and a plain loop: padded batches, full logits, torch's AdamW."""

    def __init__(self, path: str):
        from transformers import AutoModelForCausalLM

        self.model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        self.adam = torch.optim.AdamW(self.model.parameters(), lr=1e-6, weight_decay=0.0)

    def turn(self, prompts: Sequence[list[int]], n: int, tokens: int, batch: PackedBatch) -> Turn:
        """batch: whose log-probs are computed and which is trained on."""
        width, phases = max(map(len, prompts)), {}
        ids = torch.tensor([[0] * (width - len(p)) + p for p in prompts])
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
        with torch.no_grad():
            rows = ids.repeat_interleave(n, 0), mask.repeat_interleave(n, 0)
            start = NOW()
            self.model(rows[0], attention_mask=rows[1], logits_to_keep=1)
            phases["prefill"] = NOW() - start
            start = NOW()
            out = self.model.generate(ids, attention_mask=mask, max_new_tokens=tokens, do_sample=True, top_k=0,
                                      cache_implementation="static", num_return_sequences=n, pad_token_id=0,
                                      eos_token_id=1)[:, width:]
            phases["decode"] = NOW() - start - phases["prefill"]
            start = NOW()
            self._logprobs(batch)
            phases["logprobs"] = NOW() - start
        ended = (out == 1).int()
        return Turn(phases | self._train(batch), int((ended.cumsum(1) - ended == 0).sum()))

    def _train(self, batch: PackedBatch) -> Phases:
        marks = [NOW()]
        logprobs, mask = self._logprobs(batch)
        marks.append(NOW())
        (-(logprobs * mask).sum() / mask.sum()).backward()
        marks.append(NOW())
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.adam.step()
        self.adam.zero_grad()
        marks.append(NOW())
        return _differences(marks)

    def _logprobs(self, batch: PackedBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """[S, W - 1] each: log-probs, and 1 at response tokens. Sequences are padded on the right."""
        lengths = batch.prompt_lens + batch.response_lens
        rows = [x.tolist() for x in batch.tokens.split(lengths.tolist())]
        width = max(map(len, rows))
        tokens = torch.tensor([row + [0] * (width - len(row)) for row in rows])
        at = torch.arange(width)
        first = int(batch.prompt_lens.min())  # nobody needs logits before
        logits = self.model(tokens, attention_mask=(at < lengths[:, None]).long(),
                            logits_to_keep=width - first + 1).logits[:, :-1]
        chosen = logits.log_softmax(-1).gather(-1, tokens[:, first:, None])[..., 0]
        return chosen, ((at >= batch.prompt_lens[:, None]) & (at < lengths[:, None]))[:, first:].float()


def _as_the_runtime_packs(batch: PackedBatch, n: int) -> PackedBatch:
    """The batch with what the runtime tells `infer` and `train` besides the tokens: the lengths on the host, and that
    n rows in a row have the same prompt, so that it is computed once."""
    lengths = (tuple(batch.prompt_lens.tolist()), tuple(batch.response_lens.tolist()))
    return replace(batch, on_host=lengths, prompts=tuple(i // n for i in range(len(lengths[0]))))


def _differences(marks: Sequence[float]) -> Phases:
    return dict(zip(("forward", "backward", "update"), (b - a for a, b in zip(marks, marks[1:])), strict=True))
