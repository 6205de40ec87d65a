"""The language server with a real client, over its standard streams."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest
import pytest_lsp
from lsprotocol import types as t
from pygls.exceptions import JsonRpcException
from pytest_lsp import ClientServerConfig, LanguageClient, client_capabilities

pytestmark = pytest.mark.asyncio(loop_scope="module")

PROGRAM = '''use std.grpo (group_norm, grpo_free)
use "mine.rlf" (double)
use py "rewards.py" (exact: gen -> seq)

# größer 🙂 than ascii
param base = "models/sft"

data prompts = jsonl("p.jsonl", batch=8)

model actor = causal_lm(base) train adamw(lr=1e-6)
model ref   = causal_lm(base)

flow run(steps=3) {
  prompt = prompts.next()
  gen    = actor.generate(prompt, n=4)   on mesh(0:8) pp=2
  reward = double(exact(gen))
  lp     = ref.logprobs(gen)
  metric reward = mean(reward + 0 * mean(lp by seq))
  actor.train(gen, loss=grpo_free(old=gen.logprobs, adv=group_norm(reward)))   on mesh(0:8) tp=2
}
'''
MINE = "# Twice.\nfn double(x: seq) -> seq {\n  return 2 * x\n}\n"


@pytest_lsp.fixture(scope="module", loop_scope="module", config=ClientServerConfig(server_command=[str(Path(sys.executable).with_name("rlc")), "lsp"]))
async def client(lsp_client: LanguageClient, tmp_path_factory: pytest.TempPathFactory):
    folder = tmp_path_factory.mktemp("workspace")
    (folder / "rewards.py").write_text("def exact(rows):\n    return [0.0 for _ in rows]\n")
    (folder / "mine.rlf").write_text(MINE)
    lsp_client.folder, lsp_client.versions = folder, {}

    @lsp_client.feature(t.WORKSPACE_CODE_LENS_REFRESH)
    def refresh(params: None) -> None:
        """The capabilities of this client promise it; forecasts that are ready ask for it at any time."""

    await lsp_client.initialize_session(t.InitializeParams(
        capabilities=client_capabilities("visual-studio-code"),
        workspace_folders=[t.WorkspaceFolder(folder.as_uri(), "workspace")]))
    yield
    await lsp_client.shutdown_session()


def put(client: LanguageClient, text: str, name: str = "main.rlf") -> str:
    """Open a text that is not saved, or put it in the place of the one that is open; its uri."""
    uri = (client.folder / name).as_uri()
    if uri in client.versions:
        change(client, uri, text)
    else:
        client.versions[uri] = 1
        client.text_document_did_open(t.DidOpenTextDocumentParams(t.TextDocumentItem(uri, "rlf", 1, text)))
    return uri


def change(client: LanguageClient, uri: str, text: str) -> None:
    client.versions[uri] += 1
    client.text_document_did_change(t.DidChangeTextDocumentParams(
        t.VersionedTextDocumentIdentifier(client.versions[uri], uri),
        [t.TextDocumentContentChangeWholeDocument(text)]))


async def diagnostics(client: LanguageClient, uri: str) -> list[t.Diagnostic]:
    """Those of the newest version, once the server shows them."""
    async with asyncio.timeout(30):
        while True:
            found = await client.wait_for_notification(t.TEXT_DOCUMENT_PUBLISH_DIAGNOSTICS)
            if (found.uri, found.version) == (uri, client.versions[uri]):
                return list(found.diagnostics)


def place(text: str, word: str, nth: int = 1, after: bool = False) -> t.Position:
    """The position of the nth occurrence of a word, in UTF-16 units."""
    at = -1
    for _ in range(nth):
        at = text.index(word, at + 1)
    at += len(word) if after else 0
    start = text.rfind("\n", 0, at) + 1
    return t.Position(text.count("\n", 0, at), len(text[start:at].encode("utf-16-le")) // 2)


def cut(text: str, range_: t.Range) -> str:
    """The text of a range, on one line."""
    line = text.split("\n")[range_.start.line].encode("utf-16-le")
    return line[2 * range_.start.character : 2 * range_.end.character].decode("utf-16-le")


def doc(uri: str) -> t.TextDocumentIdentifier:
    return t.TextDocumentIdentifier(uri)


async def completions(client: LanguageClient, text: str, after: str, nth: int = 1) -> list[str]:
    uri = put(client, text)
    found = await client.text_document_completion_async(
        t.CompletionParams(doc(uri), place(text, after, nth, after=True)))
    return [i.label for i in (found or [])]


# -------------------------------------------------------------------------------------------- diagnostics


async def test_a_right_program_has_no_diagnostics(client: LanguageClient) -> None:
    assert await diagnostics(client, put(client, PROGRAM)) == []


async def test_a_mistake_is_shown_where_it_is_and_goes_when_it_is_mended(client: LanguageClient) -> None:
    wrong = PROGRAM.replace("mean(reward +", "mean(rewarb +")
    uri = put(client, wrong)
    (found,) = await diagnostics(client, uri)
    assert found.code == "RL0101" and cut(wrong, found.range) == "rewarb"
    change(client, uri, PROGRAM)
    assert await diagnostics(client, uri) == []


async def test_a_broken_text_has_syntax_errors_and_still_a_shape(client: LanguageClient) -> None:
    text = PROGRAM.replace("prompt = prompts.next()", "prompt = = prompts.next()")
    uri = put(client, text)
    found = await diagnostics(client, uri)
    assert [d.code for d in found] == ["RL0001"]
    shape = await client.text_document_document_symbol_async(t.DocumentSymbolParams(doc(uri)))
    assert "actor" in [s.name for s in shape]


async def test_positions_are_utf16(client: LanguageClient) -> None:
    text = 'param a = "🙂🙂" + nothing\n' + PROGRAM
    (found,) = [d for d in await diagnostics(client, put(client, text)) if d.code == "RL0101"]
    assert (found.range.start.character, found.range.end.character) == (19, 26)
    assert cut(text, found.range) == "nothing"


async def test_changes_come_together(client: LanguageClient) -> None:
    """Three quick changes are looked at once, as the last one left the text."""
    uri = put(client, PROGRAM)
    await diagnostics(client, uri)
    for text in (PROGRAM + "x", PROGRAM + "xy", PROGRAM + "# fine\n"):
        change(client, uri, text)
    assert await diagnostics(client, uri) == []


async def test_an_unsaved_neighbor_counts(client: LanguageClient) -> None:
    put(client, MINE.replace("double", "triple"), "mine.rlf")
    found = await diagnostics(client, put(client, PROGRAM))
    assert [d.code for d in found] == ["RL0104"]
    put(client, MINE, "mine.rlf")


# --------------------------------------------------------------------------------------------- completion


@pytest.mark.parametrize("after, nth, some, none", [
    ("actor.", 1, {"generate", "logprobs", "train"}, {"values", "score", "metric"}),
    ("ref.", 1, {"generate", "logprobs"}, {"train", "values"}),
    ("gen.", 1, {"logprobs", "finished"}, {"chosen"}),
    ("prompts.", 1, {"next"}, {"generate"}),
    ("actor.generate(prompt, ", 1, {"n=", "max_new_tokens=", "temperature="}, {"minibatches=", "loss="}),
    ("grpo_free(old=gen.logprobs, ", 1, {"adv=", "eps="}, {"old=", "n="}),
    ("flow run(steps=3) {\n  ", 1, {"metric", "every", "actor", "mean"}, {"model", "until"}),
    ("causal_lm(base) ", 1, {"train"}, {"until"}),
    ("on ", 1, {"mesh"}, {"mean", "dp="}),
    ("mesh(0:8) ", 1, {"dp=", "tp=", "pp="}, {"mean"}),
    ("use std.grpo (", 1, {"group_norm", "grpo"}, {"ppo_clip"}),
    ("use std.", 1, {"ppo", "grpo", "dpo"}, {"prelude"}),
])
async def test_completion(client: LanguageClient, after: str, nth: int, some: set[str], none: set[str]) -> None:
    found = set(await completions(client, PROGRAM, after, nth))
    assert some <= found and not none & found, found


async def items(client: LanguageClient, text: str, after: str) -> dict[str, t.CompletionItem]:
    uri = put(client, text)
    found = await client.text_document_completion_async(t.CompletionParams(doc(uri), place(text, after, after=True)))
    return {i.label: i for i in found or []}


@pytest.mark.parametrize("text, edit", [
    ("use std.grpo (grpo_free)\nfn f(x: seq) -> seq {\n  return \n}\n", (0, 23, ", group_norm")),
    ("use std.ppo (gae)\n\nfn f(x: seq) -> seq {\n  return \n}\n", (0, 17, "\nuse std.grpo (group_norm)")),
    ("# about f\nfn f(x: seq) -> seq {\n  return \n}\n", (0, 0, "use std.grpo (group_norm)\n")),
    ("# a program\nparam a = 1\nfn f(x: seq) -> seq {\n  return \n}\n", (1, 0, "use std.grpo (group_norm)\n")),
])
async def test_a_function_of_the_library_comes_with_its_import(client: LanguageClient, text: str,
                                                               edit: tuple[int, int, str]) -> None:
    async with asyncio.timeout(30):
        while "group_norm" not in (found := await items(client, text, "return ")):
            await asyncio.sleep(0.2)
    item = found["group_norm"]
    assert item.detail.startswith("group_norm(") and item.detail.endswith("(std.grpo)")
    (added,) = item.additional_text_edits
    assert (added.range.start, added.new_text) == (t.Position(*edit[:2]), edit[2])
    assert added.range.start == added.range.end


async def test_what_is_in_scope_comes_without_an_import(client: LanguageClient) -> None:
    found = await items(client, PROGRAM, "reward = ")
    assert found["group_norm"].additional_text_edits is None and found["whiten"].additional_text_edits is None
    outside = await items(client, PROGRAM, "data prompts = ")
    assert "gae" not in outside


async def test_imports_are_offered_with_their_signatures(client: LanguageClient) -> None:
    found = await items(client, PROGRAM, "use std.grpo (group_norm, ")
    assert "group_norm" not in found and found["grpo"].detail.startswith("grpo(")


async def test_numbers_of_the_data_are_fields(client: LanguageClient) -> None:
    text = ('data rated = jsonl("r.jsonl", batch=4, kind="answers", max_answer_tokens=8, numbers=["label"])\n'
            "flow f(steps=1) {\n  row = rated.next()\n  metric m = mean(row.label)\n}\n")
    found = set(await completions(client, text, "row."))
    assert "label" in found and not {"tokens", "lengths", "columns", "generate"} & found


async def test_options_of_a_placement_are_the_compilers(client: LanguageClient) -> None:
    from rldsl.lsp.complete import PLACED
    from rldsl.placement.degrees import OPTIONS

    found = await items(client, PROGRAM, "on mesh(0:8) ")
    assert {f"{n}=" for n in OPTIONS} == set(found) and set(OPTIONS) <= set(PLACED)
    given = await items(client, PROGRAM.replace("on mesh(0:8) pp=2", "on mesh(0:8) pp=2 "), "on mesh(0:8) pp=2 ")
    assert "pp=" not in given and "dp=" in given


async def test_a_closed_file_has_no_diagnostics(client: LanguageClient) -> None:
    uri = put(client, "flow f(", "closing.rlf")
    assert await diagnostics(client, uri)
    client.text_document_did_close(t.DidCloseTextDocumentParams(doc(uri)))
    async with asyncio.timeout(30):
        while client.diagnostics.get(uri):
            await client.wait_for_notification(t.TEXT_DOCUMENT_PUBLISH_DIAGNOSTICS)


async def test_a_file_that_is_closed_in_the_midst_of_a_change_stays_without(client: LanguageClient) -> None:
    """A text is looked at after a moment's quiet, and this one is closed by then."""
    (client.folder / "kept.rlf").write_text("flow f(")
    uri = put(client, PROGRAM, "kept.rlf")
    change(client, uri, PROGRAM + "# and\n")
    client.text_document_did_close(t.DidCloseTextDocumentParams(doc(uri)))
    seen: list[tuple[str, int | None]] = []
    other = put(client, PROGRAM)
    change(client, other, PROGRAM + "# after it\n")
    async with asyncio.timeout(30):
        while not seen or (other, client.versions[other]) != seen[-1]:
            found = await client.wait_for_notification(t.TEXT_DOCUMENT_PUBLISH_DIAGNOSTICS)
            seen.append((found.uri, found.version))
    (client.folder / "kept.rlf").unlink()
    assert not client.diagnostics.get(uri)


async def test_levels_after_by(client: LanguageClient) -> None:
    text = PROGRAM.replace("lp by seq", "lp by ")
    assert await completions(client, text, "lp by ") == ["batch", "prompt", "seq", "turn"]


async def test_nothing_in_comments_and_texts(client: LanguageClient) -> None:
    assert await completions(client, PROGRAM, "# gr") == []
    assert await completions(client, PROGRAM, 'param base = "mod') == []


async def test_names_bound_later_are_not_offered(client: LanguageClient) -> None:
    found = await completions(client, PROGRAM, "gen    = ")
    assert "prompt" in found and "reward" not in found


# ------------------------------------------------------------------------------------------------ reading


async def hover(client: LanguageClient, text: str, word: str, nth: int = 1) -> str:
    found = await client.text_document_hover_async(t.HoverParams(doc(put(client, text)), place(text, word, nth)))
    return found.contents.value if found else ""


@pytest.mark.parametrize("word, nth, some", [
    ("group_norm", 2, "advantage of a sequence"), ("grpo_free", 1, "loss grpo_free("),
    ("reward +", 1, "seq value of gen"),
    ("gen.logprobs", 1, "batch of 32 sequences, 4 per prompt"), ("gen    =", 1, "on mesh(0:8) dp=4 pp=2"),
    ("generate", 1, "completions of each prompt"), ("mean", 1, "The mean"), ("actor.gen", 1, "model actor"),
    ("double", 2, "Twice."), ("generate(", 1, "on mesh(0:8) dp=4 pp=2"),
    ("adamw", 1, "decoupled weight decay"), ("exact", 2, "Python function"),
])
async def test_hover(client: LanguageClient, word: str, nth: int, some: str) -> None:
    assert some in await hover(client, PROGRAM, word, nth)


async def test_hover_says_nothing_of_nothing(client: LanguageClient) -> None:
    assert await hover(client, PROGRAM, "größer") == ""


NESTED = '''use std.ppo (ppo_clip)
fn three(a: any, b: any, c = 1) -> any {{ return a }}
fn h(x: token) -> token {{
  y = {}
}}
'''


@pytest.mark.parametrize("written, label, active", [
    ("three(x", "three(", 0),
    ("three(x, ", "three(", 1),
    ("three(three(x, x), ", "three(", 1),          # the commas of an inner call are its own
    ("three(clip(x, 0, 1), x, ", "three(", 2),
    ("three(x, [1, 2, ", "three(", 1),             # a list is one argument
    ("three((x + 1), ", "three(", 1),
    ("three(x, c=", "three(", 2),                  # by its name
    ("three(x, x, 1, 1, ", "three(", 2),           # never beyond the last
    ("three(three(x, x), three(x", "three(", 0),   # the innermost call that is open
    ("ppo_clip(adv=three(x, x), eps=", "ppo_clip(", 2),
])
async def test_signature_help_counts_the_arguments_of_its_own_call(client: LanguageClient, written: str, label: str,
                                                                   active: int) -> None:
    text = NESTED.format(written)
    at = place(text, written, after=True)
    found = await client.text_document_signature_help_async(t.SignatureHelpParams(doc(put(client, text)), at))
    assert found is not None
    assert (found.signatures[0].label[: len(label)], found.active_parameter) == (label, active)


@pytest.mark.parametrize("written", ["three(x, x)", "x + 1", "(x, "])
async def test_no_signature_outside_a_call(client: LanguageClient, written: str) -> None:
    text = NESTED.format(written)
    at = place(text, written, after=True)
    assert await client.text_document_signature_help_async(t.SignatureHelpParams(doc(put(client, text)), at)) is None


async def test_options_of_an_inner_call_are_not_those_of_the_outer_one(client: LanguageClient) -> None:
    written = "n=max(min_new_tokens=3), "
    found = await completions(client, PROGRAM.replace("n=4)", written, 1), written)
    assert "min_new_tokens=" in found and "n=" not in found


async def test_signature_help(client: LanguageClient) -> None:
    at = place(PROGRAM, "old=gen.logprobs, ", after=True)
    found = await client.text_document_signature_help_async(t.SignatureHelpParams(doc(put(client, PROGRAM)), at))
    assert found.signatures[0].label.startswith("grpo_free(old: token, adv: token") and found.active_parameter == 1


async def test_inlay_hints(client: LanguageClient) -> None:
    whole = t.Range(t.Position(0, 0), t.Position(99, 0))
    found = await client.text_document_inlay_hint_async(t.InlayHintParams(doc(put(client, PROGRAM)), whole))
    assert {": seq", ": token", " dp=4"} <= {str(h.label) for h in found}


async def test_code_lenses_name_places(client: LanguageClient) -> None:
    found = await client.text_document_code_lens_async(t.CodeLensParams(doc(put(client, PROGRAM))))
    assert "actor.train: mesh(0:8) dp=4 tp=2" in [c.command.title for c in found]


async def test_semantic_tokens_cover_the_names(client: LanguageClient) -> None:
    found = (await client.text_document_semantic_tokens_full_async(t.SemanticTokensParams(doc(put(client, PROGRAM))))).data
    line = unit = 0
    words: dict[str, set[int]] = {}
    for i in range(0, len(found), 5):
        lines, units, length, kind, _ = found[i : i + 5]
        line, unit = line + lines, units if lines else unit + units
        words.setdefault(cut(PROGRAM, t.Range(t.Position(line, unit), t.Position(line, unit + length))), set()).add(kind)
    assert words["actor"] == {3} and words["gen"] == {0} and words["double"] == {2} and words["adv"] == {1}


async def test_folding_and_outline(client: LanguageClient) -> None:
    uri = put(client, PROGRAM)
    folds = await client.text_document_folding_range_async(t.FoldingRangeParams(doc(uri)))
    assert (12, 18) in {(f.start_line, f.end_line) for f in folds}
    shape = await client.text_document_document_symbol_async(t.DocumentSymbolParams(doc(uri)))
    assert [s.name for s in shape] == ["exact", "base", "prompts", "actor", "ref", "run"]
    assert [c.name for c in shape[-1].children] == ["prompt", "gen", "reward", "lp", "reward"]


# ------------------------------------------------------------------------------------------------ finding


async def test_definition_here_next_door_and_in_the_library(client: LanguageClient) -> None:
    uri = put(client, PROGRAM)

    async def go(word: str, nth: int) -> tuple[str, int]:
        found = await client.text_document_definition_async(t.DefinitionParams(doc(uri), place(PROGRAM, word, nth)))
        return Path(found.uri).name, found.range.start.line

    assert await go("gen.logprobs", 1) == ("main.rlf", 14)
    assert await go("double", 2) == ("mine.rlf", 1)
    assert (await go("group_norm", 2))[0] == "grpo.rlf"
    assert (await go("adv=", 1))[0] == "grpo.rlf"


async def test_references_and_rename_across_files(client: LanguageClient) -> None:
    uri = put(client, PROGRAM)
    at = t.TextDocumentPositionParams(doc(uri), place(PROGRAM, "double", 2))
    found = await client.text_document_references_async(
        t.ReferenceParams(t.ReferenceContext(True), at.text_document, at.position))
    assert sorted((Path(x.uri).name, x.range.start.line) for x in found) == [("main.rlf", 1), ("main.rlf", 15),
                                                                           ("mine.rlf", 1)]
    edit = await client.text_document_rename_async(t.RenameParams(at.text_document, at.position, "twice"))
    assert sorted((Path(u).name, len(e)) for u, e in edit.changes.items()) == [("main.rlf", 2), ("mine.rlf", 1)]
    value = await client.text_document_rename_async(t.RenameParams(doc(uri), place(PROGRAM, "gen.logprobs"), "g"))
    assert len(value.changes[uri]) == 5


async def test_what_cannot_be_renamed(client: LanguageClient) -> None:
    uri = put(client, PROGRAM)
    library = t.PrepareRenameParams(doc(uri), place(PROGRAM, "group_norm", 2))
    assert await client.text_document_prepare_rename_async(library) is None
    assert await client.text_document_rename_async(t.RenameParams(doc(uri), place(PROGRAM, "steps"), "x")) is None
    for word, nth, name, why in [("gen.logprobs", 1, "two words", "is not a valid name"), ("gen.logprobs", 1, "", "is not a valid name"),
                                 ("gen.logprobs", 1, "prompt", "already defined in main.rlf"),
                                 ("gen.logprobs", 1, "actor", "already defined"), ("actor.", 1, "lp", "already defined"),
                                 ("double", 2, "reward", "already defined in main.rlf"),
                                 ("double", 2, "whiten", "already defined"),
                                 ("gen.logprobs", 1, "not", "keyword or built-in name"),
                                 ("gen.logprobs", 1, "mean", "keyword or built-in name"),
                                 ("group_norm", 2, "norm", "belongs to the standard library")]:
        with pytest.raises(JsonRpcException, match=why):
            await client.text_document_rename_async(t.RenameParams(doc(uri), place(PROGRAM, word, nth), name))


async def test_a_name_may_be_one_of_another_body(client: LanguageClient) -> None:
    text = "fn f(a: seq) -> seq {\n  b = a\n  return b\n}\nfn g(c: seq) -> seq {\n  return c\n}\n"
    uri = put(client, text, "bodies.rlf")
    edit = await client.text_document_rename_async(t.RenameParams(doc(uri), place(text, "b ="), "c"))
    assert len(edit.changes[uri]) == 2


async def test_the_file_that_binds_a_name_is_renamed_in_though_nobody_opened_it(client: LanguageClient,
                                                                                tmp_path: Path) -> None:
    (tmp_path / "far.rlf").write_text(MINE.replace("double", "distant"))
    text = f'use "{tmp_path / "far.rlf"}" (distant)\nfn f(x: seq) -> seq {{\n  return distant(x)\n}}\n'
    uri = put(client, text, "near.rlf")
    edit = await client.text_document_rename_async(t.RenameParams(doc(uri), place(text, "distant", 2), "close"))
    assert {Path(u).name: len(e) for u, e in edit.changes.items()} == {"near.rlf": 2, "far.rlf": 1}


async def test_references_go_into_the_library(client: LanguageClient) -> None:
    text = PROGRAM.replace("group_norm(reward)", "whiten(reward)")
    uri = put(client, text)
    found = await client.text_document_references_async(
        t.ReferenceParams(t.ReferenceContext(False), doc(uri), place(text, "whiten")))
    names = {Path(x.uri).name for x in found}
    assert "main.rlf" in names and len(names) > 1
    for x in found:
        saved = not x.uri.endswith("/main.rlf")
        line = (Path(x.uri.removeprefix("file://")).read_text() if saved else text).split("\n")
        assert line[x.range.start.line][x.range.start.character : x.range.end.character] == "whiten"


async def test_workspace_symbols(client: LanguageClient) -> None:
    put(client, PROGRAM)
    found = await client.workspace_symbol_async(t.WorkspaceSymbolParams("DOUB"))
    assert [s.name for s in found] == ["double"]


# ------------------------------------------------------------------------------------------------ mending


async def test_formatting(client: LanguageClient) -> None:
    text = PROGRAM.replace("reward = double", "reward=double")
    (edit,) = await client.text_document_formatting_async(
        t.DocumentFormattingParams(doc(put(client, text)), t.FormattingOptions(2, True)))
    assert "reward = double(exact(gen))" in edit.new_text
    broken = put(client, PROGRAM + "flow (", "broken.rlf")
    assert not await client.text_document_formatting_async(
        t.DocumentFormattingParams(doc(broken), t.FormattingOptions(2, True)))


async def test_a_fix_is_offered(client: LanguageClient) -> None:
    text = PROGRAM.replace("actor.generate", "actor.generat")
    uri = put(client, text)
    await diagnostics(client, uri)
    at = place(text, "generat")
    found = await client.text_document_code_action_async(
        t.CodeActionParams(doc(uri), t.Range(at, at), t.CodeActionContext([])))
    assert [e.new_text for a in found for e in a.edit.changes[uri]] == ["generate"]


async def test_answers_are_quick(client: LanguageClient) -> None:
    """Not a measurement: forty answers on one page do not add up to seconds."""
    uri = put(client, PROGRAM)
    at = place(PROGRAM, "gen.logprobs")
    async with asyncio.timeout(20):
        for _ in range(40):
            await client.text_document_hover_async(t.HoverParams(doc(uri), at))


# ------------------------------------------------------------------------------------- links, forms, selections


async def test_a_name_that_nothing_uses_is_faded_and_its_code_is_a_link(client: LanguageClient) -> None:
    found = await diagnostics(client, put(client, PROGRAM + "\nparam spare = 1\n"))
    [one] = found
    assert one.code == "RL0901" and list(one.tags) == [t.DiagnosticTag.Unnecessary]
    page = Path(str(one.code_description.href).removeprefix("file://"))
    assert page.read_text().startswith("# RL0901:")


async def test_errors_are_not_faded(client: LanguageClient) -> None:
    [one, *_] = await diagnostics(client, put(client, PROGRAM.replace("group_norm(reward)", "group_nrm(reward)")))
    assert not one.tags and one.code_description.href.endswith(f"{one.code}.md")
    await diagnostics(client, put(client, PROGRAM))


async def defined(client: LanguageClient, text: str, word: str, nth: int = 1) -> t.Location | None:
    uri = put(client, text)
    return await client.text_document_definition_async(t.DefinitionParams(doc(uri), place(text, word, nth)))


async def test_a_python_function_leads_into_python(client: LanguageClient) -> None:
    for nth in (1, 2):
        found = await defined(client, PROGRAM, "exact", nth)
        assert found is not None and found.uri.endswith("rewards.py")
        assert (found.range.start.line, found.range.start.character) == (0, 4)


async def test_of_the_library_too(client: LanguageClient) -> None:
    text = PROGRAM.replace('"rewards.py" (exact: gen -> seq)', '"std/rewards.py" (math_equal: gen -> seq)')
    found = await defined(client, text.replace("exact(gen)", "math_equal(gen)"), "math_equal")
    assert found is not None and found.uri.endswith("rewards.py") and found.range.start.line > 0


@pytest.mark.parametrize("change", [("rewards.py", "no.py"), ("(exact:", "(gone:"), ("rewards.py", "mine.rlf")])
async def test_what_python_does_not_define_leads_to_the_program(client: LanguageClient, change: tuple[str, str]) -> None:
    text = PROGRAM.replace(*change).replace("exact(gen)", "gone(gen)" if "gone" in change[1] else "exact(gen)")
    found = await defined(client, text, "gone" if "gone" in change[1] else "exact")
    assert found is not None and found.uri.endswith("main.rlf")


async def test_a_selection_grows(client: LanguageClient) -> None:
    uri = put(client, PROGRAM)
    [found] = await client.text_document_selection_range_async(
        t.SelectionRangeParams(doc(uri), [place(PROGRAM, "group_norm", 2)]))
    texts, at = [], found
    while at is not None:
        texts.append((at.range.start, at.range.end))
        at = at.parent
    assert cut(PROGRAM, found.range) == "group_norm" and cut(PROGRAM, found.parent.range) == "group_norm(reward)"
    assert texts[-1] == (t.Position(0, 0), t.Position(PROGRAM.count("\n"), 0)) and len(texts) >= 5
    assert all((b[0].line, b[0].character) <= (a[0].line, a[0].character) and
               (a[1].line, a[1].character) <= (b[1].line, b[1].character) for a, b in zip(texts, texts[1:], strict=False))


async def test_a_selection_in_a_broken_text_is_the_word_and_the_text(client: LanguageClient) -> None:
    uri = put(client, "flow {{ word")
    [found] = await client.text_document_selection_range_async(
        t.SelectionRangeParams(doc(uri), [t.Position(0, 9)]))
    assert cut("flow {{ word", found.range) == "word" and found.parent is not None


async def hovered(client: LanguageClient, text: str, word: str, nth: int = 1) -> str:
    uri = put(client, text)
    found = await client.text_document_hover_async(t.HoverParams(doc(uri), place(text, word, nth)))
    return found.contents.value if found is not None else ""


@pytest.mark.parametrize("word, nth, said", [
    ("n=4", 1, "option of `generate`: default 1"), ("lr=", 1, "option of `adamw`"), ("batch=", 1, "option of `jsonl`: needed"),
    ("loss=", 1, "option of `train`: needed"), ("pp=2", 1, "pipeline stages"), ("tp=2", 1, "tensor-parallel degree")])
async def test_options_say_what_they_are(client: LanguageClient, word: str, nth: int, said: str) -> None:
    assert said in await hovered(client, PROGRAM, word, nth)


@pytest.mark.parametrize("text, word", [("x = 1\n", "x"), (PROGRAM.replace("n=4", "wrong=4"), "wrong"),
                                        (PROGRAM.replace("pp=2", "zz=2"), "zz")])
async def test_other_words_say_nothing_of_options(client: LanguageClient, text: str, word: str) -> None:
    assert "option" not in await hovered(client, text, word)


async def test_forms_are_offered_where_their_keyword_is(client: LanguageClient) -> None:
    text = PROGRAM + "\n"
    uri = put(client, text)
    end = t.Position(text.count("\n"), 0)
    found = await client.text_document_completion_async(t.CompletionParams(doc(uri), end))
    forms = {i.label: i for i in found if i.kind == t.CompletionItemKind.Snippet}
    assert {"flow ...", "model ...", "place ...", "loss ..."} <= {*forms} and "every ..." not in forms
    assert all(i.insert_text_format == t.InsertTextFormat.Snippet and "$" in i.insert_text for i in forms.values())
    inside = await client.text_document_completion_async(t.CompletionParams(doc(uri), place(text, "  metric")))
    labels = {i.label for i in inside if i.kind == t.CompletionItemKind.Snippet}
    assert "flow ..." not in labels


async def test_a_format_changes_only_lines_that_differ(client: LanguageClient) -> None:
    text = PROGRAM.replace("model ref   =", "model ref =").replace("  lp     =", "  lp =")
    uri = put(client, text)
    found = await client.text_document_formatting_async(
        t.DocumentFormattingParams(doc(uri), t.FormattingOptions(2, True)))
    assert len(found) == 2 and all(e.range.end.line - e.range.start.line == 1 for e in found)
    assert [e.new_text.split("=")[0].strip() for e in found] == ["model ref", "lp"]
