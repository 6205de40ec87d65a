"""The language server on what lasts over steps and on rows of several batches: buffers, states of rows, weights,
`concat`, prefixes."""

from __future__ import annotations

import pytest
from lsprotocol import types as t
from pygls.exceptions import JsonRpcException
from pytest_lsp import LanguageClient

from tests.lsp.test_server import client, completions, diagnostics, doc, hover, place, put  # noqa: F401

pytestmark = pytest.mark.asyncio(loop_scope="module")

PROGRAM = """use std.grpo (grpo_free)
use py "rewards.py" (exact: gen -> seq)

data prompts = jsonl("p.jsonl", batch=8, numbers=["label"])
state rate of prompts = 0.5
buffer good = rows(capacity=64)
model actor = causal_lm("models/sft") train adamw(lr=1e-6)

flow run(steps=3) {
  past   = good.sample(4, weight=good.score + 1)
  old    = past with fresh=0
  prompt = prompts.next(weight=1 - prompts.rate)
  gen    = actor.generate(prompt, n=4)
  right  = exact(gen)
  prompt.rate = mean(right by prompt)
  scored = gen with score=right, fresh=1
  good.add(scored where scored.score > 0)
  mix    = concat(scored, old)
  cuts   = prefixes(gen, every=4, most=3)
  few    = cuts where cuts.at > 0
  metric fresh = mean(mix.fresh) + mean(few.at) + mean(past.score) + mean(prompt.rate)
  actor.train(mix, loss=grpo_free(old=mix.logprobs, adv=mix.score))
}
"""


async def test_the_program_is_right(client: LanguageClient) -> None:  # noqa: F811
    assert await diagnostics(client, put(client, PROGRAM)) == []


@pytest.mark.parametrize("after, some, none", [
    ("good.", {"add", "sample"}, {"score", "next"}), ("weight=good.", {"score", "finished"}, {"add", "logprobs"}),
    ("good.sample(4, ", {"weight="}, {"n="}), ("prompts.next(", {"weight="}, {"n="}),
    ("weight=1 - prompts.", {"rate", "label"}, {"next"}), ("prompt = prompts.", {"next"}, {"rate", "add"}),
    ("mean(prompt.", {"rate", "label"}, {"logprobs", "score"}), ("rows(", {"capacity="}, {"batch="}),
    ("mean(mix.", {"fresh", "score", "logprobs", "finished"}, {"at", "rate"}),
    ("mean(few.", {"at"}, {"logprobs", "score", "finished"}), ("where cuts.", {"at"}, {"score"}),
    ("mean(past.", {"score", "logprobs"}, {"at", "rate"}), ("prefixes(gen, every=4, ", {"most=", "at="}, {"every="}),
    ("good.add(", {"scored", "concat", "prefixes"}, {"weight="}),
])
async def test_completion(client: LanguageClient, after: str, some: set[str], none: set[str]) -> None:  # noqa: F811
    found = set(await completions(client, PROGRAM, after))
    assert some <= found and not none & found, found


@pytest.mark.parametrize("word, nth, some", [
    ("sample", 1, "drawn by the numbers"), ("add(", 1, "the oldest leave"), ("next(", 1, "next(weight=...)"),
    ("rate =", 1, "state rate of prompts = 0.5"), ("rate", 2, "state rate of prompts = 0.5"),
    ("at >", 1, "how many tokens of the response"), ("at)", 1, "cuts.at"), ("concat", 1, "rows of several batches"),
    ("prefixes", 1, "beginnings of each response"), ("logprobs", 1, "of the sampled tokens"),
    ("good", 1, "kept for later steps"), ("score + 1", 1, "score = right"), ("fresh)", 1, "fresh = 1"),
    ("mix    =", 1, "batch of at most"),
])
async def test_hover(client: LanguageClient, word: str, nth: int, some: str) -> None:  # noqa: F811
    assert some in await hover(client, PROGRAM, word, nth)


async def rename(client: LanguageClient, word: str, name: str, nth: int = 1) -> list[str]:  # noqa: F811
    """The lines that a new name changes, as they are now."""
    uri = put(client, PROGRAM)
    edit = await client.text_document_rename_async(t.RenameParams(doc(uri), place(PROGRAM, word, nth), name))
    return [PROGRAM.split("\n")[e.range.start.line].split()[0] for e in edit.changes[uri]]


async def test_fields_that_meet_are_renamed_together(client: LanguageClient) -> None:  # noqa: F811
    assert sorted(await rename(client, "fresh=1", "new")) == ["metric", "old", "scored"]
    assert sorted(await rename(client, "fresh=0", "new")) == ["metric", "old", "scored"]
    assert sorted(await rename(client, "score=right", "mark")) == ["actor.train(mix,", "good.add(scored", "metric",
                                                                   "past", "scored"]
    with pytest.raises(JsonRpcException, match="already defined"):
        await rename(client, "fresh=1", "score")
