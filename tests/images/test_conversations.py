"""Conversations that begin with the images of their rows: every family, layout and way to wait says and scores what plain
transformers computes of the whole conversation."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from rldsl.plan.events import Sampling
from rldsl.plan.model import Data
from rldsl.plan.payloads import Conversation, Waiting
from rldsl.runtime.backend import PackedBatch
from rldsl.runtime.data.image_prompts import RowImages
from rldsl.runtime.data.source import Source, open_source
from rldsl.runtime.environments import Arrival, Stopped
from rldsl.runtime.environments.chat import ChatTemplate
from rldsl.runtime.image_tokens import ids_of, image_of
from tests.backend_torch.shards import layout_of, plan_model, shard_of
from tests.images.checks import VisionRow, inputs_of, model_of
from tests.images.models import MAKERS, make
from tests.images.pictures import data_of, make_rows, run_images
from tests.world import run_world

LAYOUTS = [dict(), dict(tp=2), dict(pp=2), dict(dp=2)]
WAYS: list[tuple[int, Waiting]] = [(0, "keep"), (1, "offload"), (1, "recompute")]  # slots, and what those that wait do
LIMITS = Conversation(("Guess",), max_turns=3, max_tokens=140, turn_timeout=60.0)
SAMPLING = Sampling(max_new_tokens=4, temperature=1.0)
ROWS = 6


def chat_of(source: Source) -> ChatTemplate:
    tokens = source.tokens
    return ChatTemplate(tokens.tokenizer, tokens.ends, tokens.directory, [], "user", in_parts=True)


class Questions:
    """An environment in the rank's own process, which asks twice."""

    def __init__(self, source: Source):
        self.source, self.chat = source, chat_of(source)
        self.heard: dict[int, int] = {}
        self.found: list[Arrival] = []

    def begin(self, row: int) -> None:
        whole = self.source.whole([row])[0]
        images = RowImages(self.source.tokens.images, whole.columns, whole.number, whole.place)
        self.heard[row] = 0
        tokens = self.chat.first(images.messages(whole.columns["prompt"]), images)
        self.found.append(Arrival(row, tokens, False, None, None, None))

    def said(self, row: int, ids: Sequence[int], ended_by_limit: bool, logprobs: Sequence[float]) -> None:
        self.heard[row] += 1
        if self.heard[row] + row % 2 > 2:
            return self.found.append(Arrival(row, (), True, "done", 1.0, None))
        asked = [{"role": "user", "content": "why " * (row + 1)}]
        return self.found.append(Arrival(row, self.chat.reply(asked, ended_by_limit), False, None, None, None))

    def finish(self, row: int, why: Stopped) -> None:
        self.found.append(Arrival(row, (), True, why, 0.0, None))

    def arrivals(self, wait: bool) -> list[Arrival]:
        found, self.found = self.found, []
        return found


def converse(rank: int, sources: Sequence[Data]) -> list[tuple[str, str, int, list[int], list[bool], list[float], float]]:
    """(family, way, row, stored tokens, which are the model's, their log-probs, error of `infer`) of this rank."""
    found = []
    for data in sources:
        for degrees in LAYOUTS:
            made = shard_of(plan_model(data.tokenizer), layout_of(**degrees), rank, images=run_images(data))
            if made is None:
                continue
            shard, mine = made
            rows = [r for r in range(ROWS) if r % degrees.get("dp", 1) == mine]
            for slots, waiting in WAYS[: None if not degrees else 1]:
                talk = Questions(open_source(data, 1)) if shard.axes.talks else None
                out = shard.converse(torch.tensor(rows), SAMPLING, LIMITS, talk, seed=3, step=2, max_num_seqs=slots,
                                     waiting=waiting)
                again = shard.infer([out.batch], "logprobs", 1.0)
                error = float((again - out.logprobs).abs().max()) if len(again) else 0.0
                sizes = (out.batch.prompt_lens + out.batch.response_lens).tolist()
                assert out.batch.own is not None
                found += [(data.tokenizer, f"{degrees} {slots} {waiting}", row, *map(torch.Tensor.tolist, x), error)
                          for row, *x in zip(rows, out.batch.tokens.split(sizes), out.batch.own.split(sizes),
                                             out.logprobs.split(out.batch.response_lens.tolist()), strict=True)]
    return found


SHOWN = ("qwen2_vl", "gemma3")


@pytest.fixture(scope="module", params=[SHOWN, pytest.param([f for f in MAKERS if f not in SHOWN],
                                                            marks=pytest.mark.thorough)], ids=["shown", "others"])
def sources(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> list[Data]:
    base = tmp_path_factory.mktemp("talks")
    rows = make_rows(base, count=ROWS)
    return [data_of(rows, make(base / family, family)) for family in request.param]


@pytest.fixture(scope="module")
def said(sources: list[Data]) -> list[Any]:
    return [x for rank in run_world(2, converse, sources) for x in rank]


def test_a_first_context_is_the_prompt_of_the_row(sources: list[Data]) -> None:
    for data in sources:
        source = open_source(data, 1)
        prompts = source.read(list(range(ROWS)))[""]
        talk = Questions(source)
        for row in range(ROWS):
            talk.begin(row)
        assert [list(a.tokens) for a in talk.arrivals(True)] == [
            t[:n].tolist() for t, n in zip(prompts.tokens, prompts.prompt_lens, strict=True)]


@pytest.mark.thorough
@pytest.mark.numeric
def test_every_layout_and_way_says_the_same(sources: list[Data], said: list[Any]) -> None:
    right = {x[0::2][:1] + (x[2],): x[3:6] for x in said if x[1] == "{} 0 keep"}
    assert len(right) == len(sources) * ROWS
    for family, way, row, tokens, own, logprobs, error in said:
        expected = right[family, row]
        assert (tokens, own) == tuple(expected[:2]), (family, way, row)
        assert logprobs == pytest.approx(expected[2], abs=2e-5) and error < 2e-5, (family, way, row)


@pytest.mark.thorough
@pytest.mark.numeric
def test_the_whole_conversation_scores_as_in_transformers(sources: list[Data], said: list[Any]) -> None:
    for data in sources:
        model, source = model_of(data.tokenizer), open_source(data, 1)
        several = 0
        for _, _, row, tokens, own, logprobs, _ in (x for x in said if x[0] == data.tokenizer and x[1] == "{} 0 keep"):
            stored, mine = torch.tensor(tokens), torch.tensor(own)
            images = [Image.open(Path(data.path).parent / name) for name in source.table.read([row])[0]["images"]]
            ids = ids_of(stored)
            if source.tokens.images.processor.token_id in ids[mine]:  # transformers wants an image for it
                continue
            with torch.no_grad():
                logits = model(**inputs_of(VisionRow(stored, 0, images), data.tokenizer, ids), use_cache=False).logits[0]
            picked = logits.float().log_softmax(-1)[:-1].gather(1, ids[1:, None])[:, 0][mine[1:]]
            assert picked.tolist() == pytest.approx(logprobs, abs=2e-5), (data.tokenizer, row)
            several += len(images) > 0 and bool((image_of(stored) >= 0).any()) and int(mine.diff().sum()) > 0
        assert several >= 2
