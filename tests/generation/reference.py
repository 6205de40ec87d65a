"""Generation as one would write it down: transformers' own model over the whole sequence for every token, probabilities
in float64, filters by sorting, and the keyed draws."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, lru_cache
from typing import Any

import torch

from rldsl.backends.torch.generate.generate import generate
from rldsl.plan.events import Sampling
from rldsl.runtime.backend import GenerationOutput, PackedBatch
from rldsl.runtime.draws import uniform
from tests.backend_torch.shards import pack
from tests.tiny import EOS

SEED, STEP = 3, 5
Row = tuple[list[int], list[float], bool]  # tokens of the response, their log-probs, whether it ended by itself


@lru_cache(maxsize=8)
def whole_model(path: str) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


@lru_cache(maxsize=8)
def _tokenizer(path: str) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(path)


def expected(path: str, prompts: Sequence[list[int]], sampling: Sampling,
             rows: Sequence[int] | None = None) -> list[Row]:
    rows = range(len(prompts)) if rows is None else rows
    return [_row(path, tuple(prompt), sampling, row) for prompt, row in zip(prompts, rows)]


@cache
@torch.no_grad()
def _row(path: str, prompt: tuple[int, ...], sampling: Sampling, row: int) -> Row:
    model, tokenizer = whole_model(path), _tokenizer(path)
    end = tokenizer.convert_tokens_to_ids(EOS)
    tokens: list[int] = []
    found: list[float] = []
    for t in range(sampling.max_new_tokens):
        logits = model(torch.tensor([[*prompt, *tokens]])).logits[0, -1]
        logprobs = (logits / (1.0 if sampling.greedy else sampling.temperature)).log_softmax(-1)
        scores = logprobs.double().clone()
        if t < sampling.min_new_tokens:
            scores[end] = -torch.inf
        token = int(scores.argmax()) if sampling.greedy else _drawn(scores, sampling, row, t)
        tokens.append(token)
        found.append(float(logprobs[token]))
        text = tokenizer.decode(tokens)
        if token == end or t + 1 >= sampling.min_new_tokens and any(text.endswith(s) for s in sampling.stop):
            return tokens, found, True
    return tokens, found, False


def _drawn(scores: torch.Tensor, sampling: Sampling, row: int, t: int) -> int:
    order = scores.argsort(descending=True)
    kept = order[: sampling.top_k] if sampling.top_k else order
    mass = scores[kept].softmax(-1).cumsum(-1)
    kept = kept[: int((mass < sampling.top_p).sum()) + 1] if sampling.top_p < 1 else kept
    kept = kept[scores[kept].exp() >= sampling.min_p * scores[kept].exp().max()]
    weights = torch.zeros_like(scores).index_copy(0, kept, scores[kept].softmax(-1))
    draw = uniform(SEED, STEP, torch.tensor([row]), torch.tensor([t]))
    return int(torch.searchsorted(weights.cumsum(-1), draw * weights.sum(), right=True))


def made(shard: Any, prompts: Sequence[list[int]], sampling: Sampling, limit: int = 0,
         rows: Sequence[int] | None = None, **how: Any) -> GenerationOutput:
    """The shard's own, with its hidden switches. how: `poll_every` and `capture` of `generate`."""
    given = pack([(p, []) for p in prompts])
    if rows is not None:
        given = PackedBatch(torch.tensor(rows, dtype=torch.long), given.prompt_lens, given.response_lens, given.tokens)
    with shard._numerics():
        return generate(shard.stage, shard.axes, given, sampling, tokenizer_dir=shard.model.path, seed=SEED, step=STEP,
                        max_num_seqs=limit, **how)


def rows_of(found: GenerationOutput) -> list[Row]:
    """What was generated, sequence by sequence."""
    batch = found.batch
    sizes = batch.response_lens.tolist()
    whole = batch.tokens.split((batch.prompt_lens + batch.response_lens).tolist())
    each = [t[len(t) - n :].tolist() for t, n in zip(whole, sizes)]
    return list(zip(each, (x.tolist() for x in found.logprobs.split(sizes)), found.finished.tolist()))


def same(found: Sequence[Row], right: Sequence[Row], near: float = 1e-5) -> bool:
    """Equal tokens and ends, and log-probs within `near`."""
    return [(t, e) for t, _, e in found] == [(t, e) for t, _, e in right] and all(
        abs(a - b) <= near for (_, x, _), (_, y, _) in zip(found, right) for a, b in zip(x, y, strict=True))
