"""What the passes of conversations cost on this machine, feature by feature (`clusters/model.py`).

In: a model's record, one rank's place in its tensor parallelism. Out: microseconds. The engine of conversations itself
is timed, with environments that answer at once inside its process: what real ones add is measured by
`environment_costs.py`. Its passes differ from those of other calls: none is captured, each slot of the KV cache attends
on its own when an answer is prefilled, and the host decides after each pass what the next one is.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch

from rldsl.measure.call_costs import (
    FEW,
    GPU,
    MOST,
    PROCESSOR,
    attending_layers,
    build,
    fit_costs,
    layer_features,
    layer_kinds,
    mean_of_kinds,
    seconds_once,
    timed_layers,
    with_each_kind,
)
from rldsl.plan.events import Sampling
from rldsl.plan.model import Model
from rldsl.plan.payloads import Conversation
from rldsl.runtime.backend import SINGLE_RANK, Shard
from rldsl.runtime.environments import Arrival, Stopped

TURNS = 4  # of a conversation whose answers are timed, besides the first one
PROCESSOR_ANSWERS = ((2, 1, 32), (2, 8, 32), (2, 32, 32), (2, 8, 96), (2, 32, 8), (1, 8, 32), (1, 32, 16))
GPU_ANSWERS = ((2, 1, 128), (2, 32, 128), (2, 128, 128), (2, 32, 512), (2, 128, 32), (1, 32, 128), (1, 128, 64))


@dataclass(slots=True)
class AnswersAtOnce:
    """Environments that answer each turn at once, with the same tokens (`rldsl.runtime.backend.Talk`)."""

    tokens: tuple[int, ...]  # of each answer
    turns: int  # of a conversation
    said_so_far: dict[int, int] = field(default_factory=dict)  # row -> turns
    ready: list[Arrival] = field(default_factory=list)  # not yet asked for

    def begin(self, row: int) -> None:
        self.said_so_far[row] = 0
        self.ready.append(Arrival(row, self.tokens, False, None, None, None))

    def said(self, row: int, ids: Sequence[int], ended_by_limit: bool, logprobs: Sequence[float]) -> None:
        self.said_so_far[row] += 1
        ended = self.said_so_far[row] == self.turns
        self.ready.append(Arrival(row, () if ended else self.tokens, ended, "done" if ended else None,
                                  0.0 if ended else None, None))

    def finish(self, row: int, why: Stopped) -> None:
        self.ready.append(Arrival(row, (), True, why, 0.0, None))

    def arrivals(self, wait: bool) -> list[Arrival]:
        arrived, self.ready = self.ready, []
        return arrived


@dataclass(frozen=True, slots=True)
class Spoken:
    """Conversations of equal lengths."""

    count: int  # conversations
    answer: int  # tokens of the environment before each turn
    turns: int  # of the model
    own: int  # tokens of the model in each turn


def measure_conversations(model: Model, tp: int, backend: str, sampling: Sampling,
                          device: torch.device) -> dict[str, dict[str, float]]:
    """Microseconds of "reply" and "turn" by feature (`clusters/model.py`)."""
    gpu = device.type == "cuda"
    kinds, many = layer_kinds(model), (GPU if gpu else PROCESSOR).many
    timed = timed_layers(model, tp, device)
    replies = with_each_kind(GPU_ANSWERS if gpu else PROCESSOR_ANSWERS, kinds, timed)
    decodes = with_each_kind((GPU if gpu else PROCESSOR).decodes, kinds, timed)
    found: dict[str, list[tuple[dict[str, float], float]]] = {"reply": [], "turn": []}
    for layers in sorted({s[0] for s in (*replies, *decodes)}):
        shard = alone(build(model, layers, tp, backend, device, False))
        for _, count, tokens in (s for s in replies if s[0] == layers):
            one = Spoken(count, tokens, 1, 1)
            more = _between(shard, one, replace(one, turns=1 + TURNS), sampling, model, device)
            # a pass of an answer runs the token before it, too
            new, held = TURNS * count * (tokens + 1), tokens + (TURNS + 1) / 2 * (tokens + 1)
            found["reply"].append(({
                "call": TURNS, **layer_features(kinds, layers, TURNS, new), "slot": layers * TURNS * count,
                "pair": new * attending_layers(model, layers) * held, "output": TURNS * count}, more))
        for _, count, tokens in (s for s in decodes if s[0] == layers):
            few = Spoken(count, tokens, 1, FEW)
            later = _between(shard, few, replace(few, own=many), sampling, model, device)
            steps, width = many - FEW, tokens + (many + FEW) / 2
            each = steps * count
            found["turn"].append(({"call": steps, **layer_features(kinds, layers, steps, each),
                                   "pair": each * attending_layers(model, layers) * width, "output": each}, later))
    return {name: mean_of_kinds(fit_costs(samples), kinds) for name, samples in found.items()}


def _between(shard: Shard, less: Spoken, more: Spoken, sampling: Sampling, model: Model,
             device: torch.device) -> float:
    """Seconds that some conversations take beyond others; timed in turn, so that what changes the machine's speed from
    moment to moment changes both."""
    def made(spoken: Spoken) -> float:
        return seconds_once(lambda: converse(shard, spoken, sampling, model.sizes.vocab or 64, device), device)

    made(more)
    return max(statistics.median([made(more) - made(less) for _ in range(MOST)]), 1e-9)


def converse(shard: Shard, spoken: Spoken, sampling: Sampling, vocab: int, device: torch.device) -> None:
    """Hold conversations with environments that answer at once."""
    draw = torch.Generator(device="cpu").manual_seed(spoken.answer)
    tokens = torch.randint(min(4, vocab - 1), vocab, (spoken.answer,), generator=draw, device="cpu")
    talk = AnswersAtOnce(tuple(tokens.tolist()), spoken.turns)
    limits = Conversation(("profile",), spoken.turns, spoken.turns * (spoken.answer + spoken.own) + 1, 60.0)
    asked = replace(sampling, n=1, max_new_tokens=spoken.own, min_new_tokens=spoken.own, stop=())
    shard.converse(torch.arange(spoken.count, device=device), asked, limits, talk, seed=1, step=0, max_num_seqs=0)


def alone(shard: Shard) -> Shard:
    """The shard of one tensor-parallel rank that tells no other what environments said."""
    shard.axes = replace(shard.axes, tp=SINGLE_RANK)  # type: ignore[attr-defined]  # of the usual backend
    return shard
