"""What the engine does with sequences that it continues: complete ones get no tokens, and the others what they would
get without them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.backend_torch.shards import make_shard, pack, plan_model, ragged
from tests.generation.reference import expected, made, rows_of, same
from tests.generation.test_reference import DRAWN
from tests.tiny import EOS, make_model

TEXTS = [p for p, _ in ragged(8, 46)]
COMPLETE = (1, 4, 5)


@pytest.fixture(scope="module")
def shard(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return make_shard(plan_model(str(make_model(tmp_path_factory.mktemp("m") / "qwen3"))), 0)


def with_ends(shard: Any, which: tuple[int, ...]) -> list[list[int]]:
    from transformers import AutoTokenizer

    end = AutoTokenizer.from_pretrained(shard.model.path).convert_tokens_to_ids(EOS)
    return [[*t, end] if i in which else [*t[:-1], 9] for i, t in enumerate(TEXTS)]


@pytest.mark.parametrize("limit", [0, 2])
@pytest.mark.parametrize("greedy", [False, True])
def test_complete_ones_get_no_tokens(shard: Any, limit: int, greedy: bool) -> None:
    texts, sampling = with_ends(shard, COMPLETE), replace(DRAWN, greedy=greedy)
    found = rows_of(made(shard, texts, sampling, limit, continues=True))
    right = expected(shard.model.path, texts, sampling)
    assert same(found, [([], [], True) if i in COMPLETE else right[i] for i in range(len(texts))])


def test_all_complete_and_none(shard: Any) -> None:
    everything = tuple(range(len(TEXTS)))
    out = made(shard, with_ends(shard, everything), DRAWN, continues=True)
    assert out.batch.response_lens.tolist() == [0] * len(TEXTS) and out.finished.all() and not out.logprobs.numel()
    assert torch.equal(out.batch.tokens, pack([(t, []) for t in with_ends(shard, everything)]).tokens)
    texts = with_ends(shard, ())
    one, two = (made(shard, texts, DRAWN, continues=c) for c in (True, False))
    assert rows_of(one) == rows_of(two)


def test_prompts_may_end_as_they_like(shard: Any) -> None:
    """A chat template may end a prompt with such a token."""
    texts = with_ends(shard, COMPLETE)
    assert same(rows_of(made(shard, texts, DRAWN)), expected(shard.model.path, texts, DRAWN))
