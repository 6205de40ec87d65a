"""The language server on sequences from sequences: `gen with reward=r`, `pick`, `others` and `pair`."""

from __future__ import annotations

import pytest
from lsprotocol import types as t
from pygls.exceptions import JsonRpcException
from pytest_lsp import LanguageClient

from tests.lsp.test_server import PROGRAM, client, completions, diagnostics, doc, hover, place, put  # noqa: F401

pytestmark = pytest.mark.asyncio(loop_scope="module")

NAMED = PROGRAM.replace("  lp     = ", """  scored = gen with score=reward, old=gen.logprobs
  kept   = scored where scored.score > 0
  best   = pick(scored, scored.score)
  least  = pick(kept, -kept.score)
  rival  = others(scored)
  duel   = pair(best, pick(scored, -scored.score))
  metric best = mean(best.score) + mean(rival.score) + mean(duel.chosen.old) + mean(least.old)
  lp     = """)
ALL = {"score", "old", "logprobs", "finished"}


@pytest.mark.parametrize("word, nth, some", [
    ("score=", 1, "seq value of gen"), ("score > 0", 1, "score = reward"), ("old)", 1, "token value of gen"),
    ("score) + mean(rival", 1, "named in `scored = gen with score=reward"), ("scored =", 1, "batch of 32 sequences"),
    ("rival  =", 1, "batch of 96 sequences, 3 per prompt"), ("others", 1, "other sequences of its prompt"),
])
async def test_hover(client: LanguageClient, word: str, nth: int, some: str) -> None:  # noqa: F811
    assert some in await hover(client, NAMED, word, nth)


@pytest.mark.parametrize("after, some, none", [
    ("scored.", ALL, {"chosen", "index"}), ("kept.", ALL, {"index"}), ("best.", ALL, {"index", "tokens"}),
    ("rival.", ALL, {"chosen"}), ("duel.chosen.", ALL, {"chosen"}), ("duel.", {"chosen", "rejected"}, {"score", "old"}),
    ("gen.", {"logprobs"}, {"score", "old"}), ("prompt = prompts.", {"next"}, {"score"}),
])
async def test_completion(client: LanguageClient, after: str, some: set[str], none: set[str]) -> None:  # noqa: F811
    found = set(await completions(client, NAMED, after))
    assert some <= found and not none & found, found


async def rename(client: LanguageClient, word: str, name: str, nth: int = 1) -> list[int]:  # noqa: F811
    """The lines that a new name changes."""
    uri = put(client, NAMED)
    edit = await client.text_document_rename_async(t.RenameParams(doc(uri), place(NAMED, word, nth), name))
    return [e.range.start.line for e in edit.changes[uri]]


async def test_a_field_is_renamed_wherever_it_came_along(client: LanguageClient) -> None:  # noqa: F811
    first = NAMED.split("\n").index("  scored = gen with score=reward, old=gen.logprobs")
    assert await rename(client, "score=", "mark") == [first, first + 1, first + 2, first + 3, first + 5, first + 6, first + 6]
    assert await rename(client, "score) + mean(rival", "mark") == await rename(client, "score=", "mark")
    assert await rename(client, "old)", "before") == [first, first + 6, first + 6]
    assert await rename(client, "score=", "reward") == await rename(client, "score=", "mark"), "a value may have its name"
    uri = put(client, NAMED.replace("score", "mark").replace("markd", "scored"))
    assert await diagnostics(client, uri) == []


@pytest.mark.parametrize("name, why", [("old", "already defined"), ("logprobs", "a field of all sequences"),
                                       ("index", "a field of all sequences"), ("two words", "not a valid name")])
async def test_a_field_that_cannot_be_renamed(client: LanguageClient, name: str, why: str) -> None:  # noqa: F811
    with pytest.raises(JsonRpcException, match=why):
        await rename(client, "score=", name)
