"""Predicted time and memory above calls: worked out elsewhere while the server answers, shown when they are known."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import pytest_lsp
from lsprotocol import types as t
from pytest_lsp import ClientServerConfig, LanguageClient, client_capabilities

from rldsl.diag import Failure
from rldsl.graph import model as g
from rldsl.graph.build import read_text
from rldsl.lsp.analysis import analyze
from rldsl.lsp.forecast import CallCost, Forecast, Question, forecast, machine
from rldsl.lsp.lens import lenses, step
from rldsl.lsp.library import Library, read_file
from rldsl.lsp.worker import question_line, read_forecast
from rldsl.source import SourceFile
from rldsl.syntax.parse import parse
from tests.tiny import make_model, make_tokenizer

PROGRAM = '''cluster "h100x8"
use "mine.rlf" (double)
param base = "MODEL"
data prompts = jsonl("p.jsonl", batch=8, max_prompt_tokens=16)
model actor = causal_lm(base) train adamw(lr=1e-6)
use std.grpo (group_norm, grpo_free)

flow run(steps=3) {
  prompt = prompts.next()
  gen    = actor.generate(prompt, n=4, max_new_tokens=64) on mesh(0:8) dp=8
  reward = double(len(gen))
  actor.train(gen, loss=grpo_free(old=gen.logprobs, adv=group_norm(reward))) on mesh(0:8) dp=4 tp=2
}
'''
MINE = "fn double(x: seq) -> seq {\n  return 2 * x\n}\n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("forecast")
    make_model(found / "model")
    make_tokenizer(found / "model")
    (found / "mine.rlf").write_text(MINE)
    return found


def program(folder: Path, cluster: str = 'cluster "h100x8"\n') -> str:
    return PROGRAM.replace("MODEL", str(folder / "model")).replace('cluster "h100x8"\n', cluster)


def asked(folder: Path, text: str, cluster: str = "", **texts: str) -> Forecast:
    unsaved = {str(folder / f"{name}.rlf"): text for name, text in texts.items()}
    return forecast(Question(str(folder / "main.rlf"), text, unsaved, cluster))


# ------------------------------------------------------------------------------------------------- the forecast


def test_every_call_has_its_time_and_memory(folder: Path) -> None:
    found = asked(folder, program(folder))
    assert [(c.at, c.name) for c in found.calls] == [("10:3", "actor.generate"), ("12:3", "actor.train")]
    assert all(c.seconds > 0 and c.bytes > 0 for c in found.calls) and found.why == ""
    assert found.seconds >= max(c.seconds for c in found.calls) and found.machine == "h100x8"
    assert found.peak == max(c.bytes for c in found.calls) and found.memory == 80_000_000_000


def test_times_are_the_simulators(folder: Path) -> None:
    from rldsl.api import compile
    from rldsl.clusters import find
    from rldsl.simulate import simulate

    (folder / "main.rlf").write_text(program(folder))
    expected = simulate(compile(str(folder / "main.rlf")), find("h100x8"))
    assert asked(folder, program(folder)).seconds == pytest.approx(expected.seconds)


def test_a_setting_stands_for_a_cluster_that_does_not_say_how_fast_it_is(folder: Path) -> None:
    text = program(folder, "cluster nodes=1 gpus=8\n")
    silent = asked(folder, text)
    assert silent.seconds == -1 and "rlf.cluster" in silent.why and all(c.bytes > 0 for c in silent.calls)
    fast, slow = asked(folder, text, "b200x8"), asked(folder, text, "a100x8")
    assert 0 < fast.seconds < slow.seconds and fast.why == ""


def test_the_program_wins_over_the_setting(folder: Path) -> None:
    assert asked(folder, program(folder), "a100x8") == asked(folder, program(folder))


@pytest.mark.parametrize("text, cluster, why", [
    (PROGRAM, "", "no model directory"),
    ("flow f(", "", "unclosed"),
    ("model m = causal_lm(nothing)\nflow f(steps=1) { x = m.generate(y) }", "", "nothing"),
])
def test_what_cannot_be_compiled_says_why(folder: Path, text: str, cluster: str, why: str) -> None:
    found = asked(folder, text, cluster)
    assert found.calls == () and found.seconds == -1 and why in found.why


@pytest.mark.parametrize("cluster, why", [("nowhere.yaml", "no such file"), ("h100x7", "no such file")])
def test_a_setting_that_names_no_cluster_costs_the_time_alone(folder: Path, cluster: str, why: str) -> None:
    found = asked(folder, program(folder, "cluster nodes=1 gpus=8\n"), cluster)
    assert found.calls and found.seconds == -1 and why in found.why


def test_a_cluster_that_is_too_small(folder: Path) -> None:
    (folder / "two.yaml").write_text("preset: h100x8\ngpus: 2\n")
    found = asked(folder, program(folder, ""), str(folder / "two.yaml"))
    assert "8 ranks" in found.why and found.seconds == -1 and found.calls


def test_unsaved_texts_count(folder: Path) -> None:
    assert asked(folder, program(folder), mine=MINE).why == ""
    assert "double" in asked(folder, program(folder), mine=MINE.replace("double", "triple")).why


def test_a_machine_has_as_many_devices_as_the_program_says() -> None:
    file = parse(SourceFile("x.rlf", "cluster nodes=2 gpus=4\n"))
    found = machine(file, g.Cluster(2, 4, 80.0), "h100x64")
    assert (found.nodes, found.gpus, found.name) == (2, 4, "h100x64")
    with pytest.raises(Failure):
        machine(file, None, "")


# ------------------------------------------------------------------------------------------------------ shown


def test_a_lens_says_where_how_long_and_how_much() -> None:
    text = PROGRAM.replace('use "mine.rlf" (double)\n', "").replace("double(len(gen))", "0 + len(gen)")
    analysis = analyze("main.rlf", text, Library(read_file), read_text)
    bare = [shown for _, shown in lenses(analysis, None)]
    assert bare == ["actor.generate: mesh(0:8) dp=8", "actor.train: mesh(0:8) dp=4 tp=2"]
    calls = CallCost("9:3", "actor.generate", 72.9, 3 << 30), CallCost("11:3", "actor.train", -1.0, 90 << 30)
    known = Forecast(calls, 116.0, 6782.4, 90 << 30, 80 << 30, "h100x64")
    assert [shown for _, shown in lenses(analysis, known)] == [
        "step: 116 s, 6,782 tokens/s on h100x64, sequences at their maximum length · "
        "peak 90.0 GiB per rank, a device has 80.0 GiB",
        "actor.generate: mesh(0:8) dp=8 · 72.9 s · 3.0 GiB per rank",
        "actor.train: mesh(0:8) dp=4 tp=2 · 90.0 GiB per rank, a device has 80.0 GiB"]
    assert step(replace(known, seconds=-1.0, why="no such file: x")).endswith("no time: no such file: x")
    assert step(Forecast(why="no model directory")) == "no forecast: no model directory"


def test_which_files_a_program_reads() -> None:
    here = Path("/w/a")
    texts = {here / "p.rlf": 'use std.ppo (ppo)\nuse "mine.rlf" (f)\nuse py "r.py" (g: gen -> seq)\ncluster "c.yaml"\n',
             here / "mine.rlf": 'use "../b/deep.rlf" (h)\n', Path("/w/b/deep.rlf"): 'use "../a/mine.rlf" (f)\nfn h(',
             here / "other.rlf": 'use "p.rlf" (f)\n'}
    files = Library(lambda path: texts.get(Path(path)) or read_file(path))
    assert files.reads("/w/a/p.rlf") == {"/w/a/mine.rlf", "/w/b/deep.rlf", "/w/a/r.py", str(Path("c.yaml").resolve())}
    assert files.reads("/w/a/nothing.rlf") == set()


def test_forecasts_pass_between_processes_unchanged() -> None:
    known = Forecast((CallCost("9:3", "größer", 72.9, 3),), 1.0, 2.0, 3, 4, "m", "w")
    assert read_forecast(json.dumps(asdict(known)).encode()) == known
    for wrong in (b"", b"{}", b"[]", b'{"calls": [1]}', b"{", b'{"calls": [], "else": 1}'):
        with pytest.raises((ValueError, TypeError, KeyError)):
            read_forecast(wrong)


def test_a_worker_answers_in_order_and_ends_with_its_input(folder: Path) -> None:
    questions = [Question("a.rlf", "flow f("), Question("b.rlf", PROGRAM)]
    lines = b"".join(map(question_line, questions)) + b"no\n"
    done = subprocess.run([sys.executable, "-m", "rldsl.lsp.worker"], input=lines, capture_output=True,
                          timeout=120, check=True)
    first, second, third = (read_forecast(line).why for line in done.stdout.splitlines())
    assert "unclosed" in first and "mine.rlf" in second and third.startswith("the compiler failed: ")


# ------------------------------------------------------------------------------------------------ in an editor


@pytest_lsp.fixture(scope="module", loop_scope="module",
                    config=ClientServerConfig(server_command=[str(Path(sys.executable).with_name("rlc")), "lsp"]))
async def client(lsp_client: LanguageClient, folder: Path):
    lsp_client.refreshed = asyncio.Event()

    @lsp_client.feature(t.WORKSPACE_CODE_LENS_REFRESH)
    def refresh(params: None) -> None:
        lsp_client.refreshed.set()

    lsp_client.folder = folder
    await lsp_client.initialize_session(t.InitializeParams(
        capabilities=client_capabilities("visual-studio-code"), initialization_options={"cluster": "a100x8"},
        workspace_folders=[t.WorkspaceFolder(folder.as_uri(), "workspace")]))
    yield
    await lsp_client.shutdown_session()


async def shown(client: LanguageClient, uri: str) -> list[str]:
    found = await client.text_document_code_lens_async(t.CodeLensParams(t.TextDocumentIdentifier(uri)))
    return [c.command.title for c in found or []]


def put(client: LanguageClient, name: str, text: str) -> str:
    uri = (client.folder / name).as_uri()
    client.text_document_did_open(t.DidOpenTextDocumentParams(t.TextDocumentItem(uri, "rlf", 1, text)))
    return uri


async def until_known(client: LanguageClient, uri: str, word: str) -> list[str]:
    async with asyncio.timeout(90):
        while True:
            client.refreshed.clear()
            found = await shown(client, uri)
            if word in "\n".join(found):
                return found
            await client.refreshed.wait()


@pytest.mark.asyncio(loop_scope="module")
async def test_lenses_come_at_once_and_again_with_the_forecast(client: LanguageClient) -> None:
    uri = put(client, "lens.rlf", program(client.folder))
    client.refreshed.clear()
    first = await shown(client, uri)
    assert first == ["actor.generate: mesh(0:8) dp=8", "actor.train: mesh(0:8) dp=4 tp=2"]
    found = await until_known(client, uri, "tokens/s")
    assert "on h100x8" in found[0] and all(" s · " in x or " ms · " in x for x in found[1:])
    assert await shown(client, uri) == found  # and they stay
    put(client, "unrelated.rlf", "fn other(x: seq) -> seq {\n  return x\n}\n")
    assert await shown(client, uri) == found  # it reads no such file
    mine = put(client, "mine.rlf", MINE + "# not saved\n")
    assert await shown(client, uri) == first  # but this one
    client.text_document_did_close(t.DidCloseTextDocumentParams(t.TextDocumentIdentifier(mine)))


@pytest.mark.asyncio(loop_scope="module")
async def test_the_setting_may_change(client: LanguageClient) -> None:
    uri = put(client, "setting.rlf", program(client.folder, ""))
    assert "on a100x8" in (await until_known(client, uri, "tokens/s"))[0]
    client.workspace_did_change_configuration(t.DidChangeConfigurationParams({"rlf": {"cluster": "b200x8"}}))
    assert "on b200x8" in (await until_known(client, uri, "b200x8"))[0]
    for nothing in ({"rlf": {"cluster": 8}}, {"rlf": None}, None, {"other": 1}, []):
        client.workspace_did_change_configuration(t.DidChangeConfigurationParams(nothing))
    assert "on b200x8" in (await shown(client, uri))[0]


@pytest.mark.asyncio(loop_scope="module")
async def test_a_hover_tells_the_memory_of_a_call_though_there_is_no_cluster(client: LanguageClient) -> None:
    client.workspace_did_change_configuration(t.DidChangeConfigurationParams({"rlf": {"cluster": ""}}))
    text = program(client.folder, "")
    uri = put(client, "hover.rlf", text)
    assert [x for x in await shown(client, uri) if "rank" in x] == []
    line = text[: text.index("actor.train")].count("\n")
    at = t.HoverParams(t.TextDocumentIdentifier(uri), t.Position(line, len("  actor.tr")))
    async with asyncio.timeout(90):
        while " per rank" not in (found := await client.text_document_hover_async(at)).contents.value:
            assert "on mesh(0:8) dp=4 tp=2" in found.contents.value
            await asyncio.sleep(0.3)


@pytest.mark.asyncio(loop_scope="module")
async def test_a_program_with_mistakes_has_no_forecast(client: LanguageClient) -> None:
    uri = put(client, "wrong.rlf", program(client.folder).replace("reward = double", "reward = dubble"))
    assert not [x for x in await shown(client, uri) if "tokens/s" in x or "no forecast" in x]


@pytest.mark.asyncio(loop_scope="module")
async def test_why_there_is_none_is_said(client: LanguageClient) -> None:
    uri = put(client, "nowhere.rlf", PROGRAM)
    assert "no model directory" in (await until_known(client, uri, "no forecast"))[0]


def test_what_a_lag_gains_or_loses(folder: Path) -> None:
    """Above the flow; nothing where there is nothing to gain."""
    apart = program(folder).replace("max_new_tokens=64) on mesh(0:8) dp=8", "max_new_tokens=64) on mesh(0:4) dp=4")
    apart = apart.replace("on mesh(0:8) dp=4 tp=2", "on mesh(4:8) dp=4")
    assert step(asked(folder, program(folder))).count("lag") == 0
    assert "lag 0: with lag=1 a step would be" in step(asked(folder, apart))
    late = asked(folder, apart.replace("steps=3", "steps=3, lag=1"))
    assert "lag 1: a step is" in step(late) and "shorter than without it" in late.lag
    together = asked(folder, program(folder).replace("steps=3", "steps=3, lag=1"))
    assert "shorter" not in together.lag and together.lag.startswith("lag 1: ")
