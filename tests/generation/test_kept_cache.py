"""Keys and values that one call keeps and another one continues: the same tokens, and no second prefill."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from rldsl.runtime.backend import GenerationOutput, Prefix
from tests.backend_torch.shards import make_shard, plan_model, ragged
from tests.generation.reference import made, rows_of, same
from tests.generation.test_reference import DRAWN
from tests.samples import thorough_between
from tests.tiny import make_model

PROMPTS = [p for p, _ in ragged(6, 46) for _ in range(2)]  # two samples of each prompt
MORE = replace(DRAWN, max_new_tokens=5)


@pytest.fixture(scope="module")
def shard(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return make_shard(plan_model(str(make_model(tmp_path_factory.mktemp("m") / "qwen3"))), 0)


def texts_of(found: GenerationOutput) -> list[list[int]]:
    batch = found.batch
    return [x.tolist() for x in batch.tokens.split((batch.prompt_lens + batch.response_lens).tolist())]


def begun(shard: Any, limit: int = 0, **how: Any) -> tuple[GenerationOutput, list[list[int]]]:
    found = made(shard, PROMPTS, DRAWN, limit, keep_cache=True, **how)
    return found, texts_of(found)


def bitwise(one: GenerationOutput, two: GenerationOutput) -> bool:
    return torch.equal(one.batch.tokens, two.batch.tokens) and torch.equal(one.logprobs, two.logprobs) \
        and torch.equal(one.finished, two.finished)


@pytest.mark.parametrize("first, second", thorough_between([(0, 0), (3, 2), (5, 0), (1, 4)]))
def test_continuations_need_no_second_prefill(shard: Any, first: int, second: int) -> None:
    """first, second: how many sequences decode at the same time."""
    found, texts = begun(shard, first)
    whole = [t for t in texts for _ in range(2)]
    prefix = Prefix(found.cache, torch.arange(len(texts)).repeat_interleave(2))
    reused = made(shard, whole, MORE, second, continues=True, prefix=prefix)
    naive = made(shard, whole, MORE, second, continues=True)
    assert same(rows_of(reused), rows_of(naive))
    incomplete = sum(not done or found.batch.response_lens[i] == 0 for i, done in enumerate(found.finished.tolist()))
    assert 0 < incomplete <= len(texts) and reused.num_prefilled == 2 * incomplete
    assert naive.num_prefilled >= sum(len(t) for t, done in zip(texts, found.finished.tolist()) if not done)


def test_what_is_kept(shard: Any) -> None:
    found, texts = begun(shard, 4)
    sizes = [len(t) - 1 for t in texts]
    assert found.cache.lengths.tolist() == sizes
    sample, _ = next(iter(found.cache.layers.values()))
    each = 2 * len(found.cache.layers) * sample[0].numel() * sample.element_size()
    kept = (x for pair in found.cache.layers.values() for x in pair)
    assert sum(x.numel() * x.element_size() for x in kept) == sum(sizes) * each
    assert made(shard, PROMPTS, DRAWN).cache is None


def test_prefixes_of_a_sequence(shard: Any) -> None:
    found, texts = begun(shard)
    at = [(i, len(PROMPTS[i]) + k) for i in range(len(texts)) for k in (0, 1, 2)
          if len(PROMPTS[i]) + k <= len(texts[i])]
    cuts = [texts[i][:p] for i, p in at]
    prefix = Prefix(found.cache, torch.tensor([i for i, _ in at]))
    reused, naive = made(shard, cuts, MORE, prefix=prefix), made(shard, cuts, MORE)
    assert same(rows_of(reused), rows_of(naive)) and reused.num_prefilled == len(cuts)


def test_a_chain_of_three(shard: Any) -> None:
    found, texts = begun(shard)
    prefix = Prefix(found.cache, torch.arange(len(texts)))
    second = made(shard, texts, MORE, 3, continues=True, keep_cache=True, prefix=prefix)
    longer = texts_of(second)
    third = made(shard, longer, MORE, continues=True, prefix=Prefix(second.cache, torch.arange(len(longer))))
    assert same(rows_of(third), rows_of(made(shard, longer, MORE, continues=True)))
    assert third.num_prefilled == int((third.batch.response_lens > 0).sum())


@pytest.mark.thorough
def test_invariant_is_bitwise(shard: Any) -> None:
    invariant: Any = make_shard(replace(shard.model, invariant=True), 0)
    with invariant.stage.invariant_mode():
        found, texts = begun(invariant, 5)
        prefix = Prefix(found.cache, torch.arange(len(texts)))
        reused = made(invariant, texts, MORE, 4, continues=True, prefix=prefix)
        naive = made(invariant, texts, MORE, 7, continues=True)
    assert bitwise(reused, naive) and int(reused.batch.response_lens.sum()) > 0


def test_keeping_changes_nothing(shard: Any) -> None:
    assert bitwise(begun(shard, 5)[0], made(shard, PROMPTS, DRAWN, 5))


def test_more_than_was_kept_is_refused(shard: Any) -> None:
    found, texts = begun(shard)
    longer = [[*t, 9, 9] for t in texts]
    with pytest.raises(RuntimeError, match="more tokens than were kept"):
        made(shard, longer, MORE, prefix=Prefix(found.cache, torch.arange(len(texts))))
