"""Agents with loops of their own: what they hear, what becomes tokens, and what each way of failing says, to the agent
and to the run."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from rldsl.diag import Failure
from rldsl.plan.function import Function
from rldsl.plan.payloads import Sampling
from rldsl.runtime.environments import Arrival
from rldsl.runtime.environments.agent_branches import Dialogue
from rldsl.runtime.environments.chat import ChatTemplate
from rldsl.runtime.environments.forked_worker import ForkedWorker
from rldsl.runtime.environments.processes import EnvironmentProcesses
from rldsl.runtime.environments.requests import Rules
from tests.environments.envs_agents import CALCULATOR
from tests.environments.families import FAMILIES, ends, make

FILE = Path(__file__).parent / "envs_agents.py"
QWEN = FAMILIES["Qwen2.5"]
TOKENIZER = make(QWEN)
ENDS = frozenset(ends(TOKENIZER, QWEN))
RULES = Rules(Sampling(max_new_tokens=100, temperature=0.7), ENDS, 3, 2000, 1 << 20)
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'


def function(name: str) -> Function:
    return Function("f", os.path.relpath(FILE), name, sha256(FILE.read_bytes()).hexdigest(), "env")


def opened(name: str, family: str = "Qwen2.5", **options: Any) -> EnvironmentProcesses:
    tokenizer = TOKENIZER if family == "Qwen2.5" else make(FAMILIES[family])
    chat = partial(ChatTemplate, tokenizer, ends(tokenizer, FAMILIES[family]), "tok")
    return EnvironmentProcesses(function(name), 20.0, rules=RULES, **options).open(chat)


@pytest.fixture(scope="module")
def agents() -> Iterator[EnvironmentProcesses]:
    with opened("scripted") as talk:
        yield talk


def ids(text: str) -> list[int]:
    return list(TOKENIZER(text, add_special_tokens=False)["input_ids"])


def text(arrival: Arrival) -> str:
    return str(TOKENIZER.decode(list(arrival.tokens)))


def only(talk: EnvironmentProcesses) -> Arrival:
    (arrival,) = talk.arrivals(wait=True)
    return arrival


def begin(talk: EnvironmentProcesses, *script: tuple[str, Any], row: int = 0, **columns: Any) -> None:
    talk.begin(row, {"prompt": "What?", "script": script, **columns}, "What?", 7)


def answered(talk: EnvironmentProcesses, said: str, row: int = 0, cut: bool = False) -> Arrival:
    tokens = ids(said if cut else said + "<|im_end|>")
    talk.said(row, tokens, cut, [-0.5 - i for i in range(len(tokens))])
    return only(talk)


def heard(capfd: pytest.CaptureFixture[str]) -> list[Any]:
    """What the agent got, as it has printed it: [what, answer]."""
    lines = [line.split(" | ", 1)[1] for line in capfd.readouterr().err.splitlines() if " | [" in line]
    return [json.loads(line) for line in lines]


def test_a_conversation_in_messages(agents: EnvironmentProcesses, capfd: pytest.CaptureFixture[str]) -> None:
    options = {"tools": CALCULATOR, "logprobs": True, "temperature": 0.7, "max_tokens": 100, "return_token_ids": True}
    begin(agents, ("ask", options), ("call", ["3"]), ("ask", options), reward=0.25)
    first = only(agents)
    assert not first.ended and "What?<|im_end|>" in text(first) and '"name": "add"' in text(first)
    second = answered(agents, f"Well.{CALL}")
    assert text(second) == ("\n<|im_start|>user<tool_response>\n3\n</tool_response><|im_end|>\n"
                            "<|im_start|>assistant\n")
    last = answered(agents, "It is 3.")
    assert last == Arrival(0, (), True, "done", 0.25, None)
    (_, one), (_, two) = heard(capfd)
    message, choice = one["choices"][0]["message"], one["choices"][0]
    assert message["content"] == "Well." and choice["finish_reason"] == "tool_calls"
    (call,) = message["tool_calls"]
    assert call["function"] == {"name": "add", "arguments": '{"a": 1, "b": 2}'} and len(call["id"]) == 9
    turn = ids(f"Well.{CALL}<|im_end|>")
    assert choice["token_ids"] == turn and tuple(one["prompt_token_ids"]) == first.tokens
    assert [t["logprob"] for t in choice["logprobs"]["content"]] == [-0.5 - i for i in range(len(turn))]
    assert "".join(t["token"] for t in choice["logprobs"]["content"]) == f"Well.{CALL}<|im_end|>"
    assert one["usage"]["prompt_tokens"] == len(first.tokens) and one["usage"]["completion_tokens"] == len(turn)
    assert two["choices"][0]["message"] == {"role": "assistant", "content": "It is 3."}
    assert two["prompt_token_ids"] == [*first.tokens, *turn, *second.tokens]
    assert not agents.rows and agents.endpoint is not None and not agents.endpoint.row_of


def test_a_conversation_in_tokens(agents: EnvironmentProcesses, capfd: pytest.CaptureFixture[str]) -> None:
    sampling = {"logprobs": 1, "stop_token_ids": sorted(ENDS), "skip_special_tokens": False, "temperature": 0.7}
    begin(agents, ("tokens", {"ids": [5, 6, 7], "sampling": sampling}), ("tokens", {"ids": [8]}), ("raw", {
        "path": "/v1/models", "method": "GET"}))
    assert only(agents) == Arrival(0, (5, 6, 7), False, None, None, None)
    assert answered(agents, "ab") == Arrival(0, (8,), False, None, None, None)
    assert answered(agents, "c", cut=True) == Arrival(0, (), True, "max_new_tokens", 1.0, None)
    (_, one), (_, two), (_, models) = heard(capfd)
    assert one["choices"][0]["token_ids"] == ids("ab<|im_end|>") and one["choices"][0]["finish_reason"] == "stop"
    assert [t["logprob"] for t in one["choices"][0]["logprobs"]["content"]] == [-0.5, -1.5, -2.5]
    assert two["choices"][0]["finish_reason"] == "length" and models["data"][0]["max_model_len"] == 2000


def test_events_functions_and_methods(agents: EnvironmentProcesses, capfd: pytest.CaptureFixture[str]) -> None:
    begin(agents, ("raw", {"path": "/v1/chat/completions", "body": {
        "messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}],
        "stream": True, "tools": CALCULATOR, "stream_options": {"include_usage": True}}}))
    assert "user\nab<|im_end|>" in text(only(agents))
    answered(agents, CALL)
    ((_, events),) = heard(capfd)
    *parts, end = [line.removeprefix("data: ") for line in events.split("\n\n") if line]
    delta, finish, usage = map(json.loads, parts)
    assert end == "[DONE]" and delta["choices"][0]["delta"]["tool_calls"][0]["index"] == 0
    assert finish["choices"][0]["finish_reason"] == "tool_calls" and usage["usage"]["completion_tokens"] > 9
    for name, reward in (("plain", 7.0), ("WithMethod", 0.0)):
        with opened(name) as talk:
            begin(talk)
            only(talk)
            assert answered(talk, "x") == Arrival(0, (), True, "done", reward, None)


def test_many_conversations_at_once(agents: EnvironmentProcesses, capfd: pytest.CaptureFixture[str]) -> None:
    for row in range(8):
        begin(agents, ("ask", {}), ("say", "more"), ("ask", {}), row=row, reward=row, prompt=f"row {row}")
    arrived: list[Arrival] = []
    while len(arrived) < 8:
        arrived += agents.arrivals(wait=True)
    assert all(f"row {a.row}<" in text(a) for a in arrived)
    for row in range(8):
        assert "more<|im_end|>" in text(answered(agents, f"first {row}", row))
    for row in reversed(range(8)):
        assert answered(agents, f"second {row}", row) == Arrival(row, (), True, "done", float(row), None)
    contents = {answer["id"]: answer["choices"][0]["message"]["content"] for _, answer in heard(capfd)}
    assert contents == {f"chatcmpl-{row}-{turn}": f"{word} {row}" for row in range(8)
                        for turn, word in ((1, "first"), (2, "second"))}


def test_a_call_that_cannot_be_read_is_text(agents: EnvironmentProcesses, capfd: pytest.CaptureFixture[str]) -> None:
    begin(agents, ("ask", {"tools": CALCULATOR}))
    only(agents)
    answered(agents, CALL + "<tool_call>{")
    ((_, answer),) = heard(capfd)
    assert answer["choices"][0]["message"] == {"role": "assistant", "content": CALL + "<tool_call>{"}
    assert answer["choices"][0]["finish_reason"] == "stop"


@pytest.mark.parametrize("value", ["NaN", "[1.0, true, -Infinity, \"\\ud800\"]", "{\"b\": " * 200 + "1" + "}" * 200])
def test_calls_come_back_as_they_were(agents: EnvironmentProcesses, value: str) -> None:
    """The agent repeats the model's call, whatever its arguments are."""
    begin(agents, ("ask", {"tools": CALCULATOR}), ("call", ["3"]), ("ask", {"tools": CALCULATOR}))
    only(agents)
    assert not answered(agents, CALL.replace("2}", f"{value}}}")).ended
    assert answered(agents, "x").stopped == "done"


@pytest.mark.parametrize("value", ["[" * 800 + "]" * 800, "[" * 5000 + "]" * 5000])
def test_what_is_nested_too_deeply(agents: EnvironmentProcesses, capfd: pytest.CaptureFixture[str], value: str) -> None:
    begin(agents, ("ask", {"tools": CALCULATOR}))
    only(agents)
    assert answered(agents, CALL.replace("2}", f"{value}}}")).stopped == "done"
    (answer,) = [answer for _, answer in heard(capfd) if "choices" in answer]
    assert answer["choices"][0]["message"]["role"] == "assistant"
    begin(agents, ("raw", {"path": "/v1/chat/completions", "text": f'{{"messages": {value}, "tools": {value}}}'}),
          ("ask", {}))
    if len(value) < 5000:
        with pytest.raises(Failure, match="RL0730|is no list"):
            agents.arrivals(wait=True)
        return
    only(agents)
    assert answered(agents, "x").stopped == "done"


@pytest.mark.parametrize("request_, status, code", [
    ({"path": "/v1/chat/completions", "key": "wrong", "body": {"messages": []}}, 401, "invalid_api_key"),
    ({"path": "/v1/models", "key": "", "method": "GET"}, 401, "invalid_api_key"),
    ({"path": "/v1/completions", "body": {}}, 404, "not_found"),
    ({"path": "/", "method": "GET"}, 404, "not_found"),
    ({"path": "/v1/chat/completions", "method": "GET"}, 405, "method_not_allowed"),
    ({"path": "/v1/chat/completions", "text": "{broken"}, 400, "invalid_json"),
    ({"path": "/v1/chat/completions", "text": "[" * 100000}, 400, "invalid_json"),
    ({"path": "/inference/v1/generate", "text": "[1]"}, 400, "invalid_json"),
])
def test_what_is_no_request_is_answered_and_changes_nothing(
        agents: EnvironmentProcesses, capfd: pytest.CaptureFixture[str], request_: dict[str, Any], status: int, code: str
        ) -> None:
    begin(agents, ("raw", request_), ("ask", {}))
    assert not only(agents).ended
    assert answered(agents, "x") == Arrival(0, (), True, "done", 1.0, None)
    *_, (_, refused), (_, answer) = heard(capfd)  # what a stopped conversation says late may come first
    assert (refused["status"], refused["error"]["code"]) == (status, code) and refused["error"]["message"]
    assert answer["choices"][0]["message"]["content"] == "x"


USER = {"role": "user", "content": "a"}
EDITED = "asked for something else than the next turn of its conversation: "


@pytest.mark.parametrize("script, code, title", [
    ([("ask", {"temperature": 0.2})], "RL0730", "`temperature` is 0.2, and must be 0.7 here"),
    ([("ask", {"max_tokens": 99})], "RL0730", "`max_tokens` is 99, and must be at least max_new_tokens=100"),
    ([("tokens", {"ids": []})], "RL0730", "`token_ids` is empty"),
    ([("tokens", {"ids": [-1]})], "RL0730", "`token_ids` is no list of ids"),
    ([("tokens", {"ids": [5, 1 << 20]})], "RL0730", "`token_ids` has 1048576, and the tokenizer has 1048576 tokens"),
    ([("tokens", {"ids": ["a"]})], "RL0730", "`token_ids` is no list of ids"),
    ([("ask", {"n": 2})], "RL0730", "`n` is 2, and must be 1 here"),
    ([("ask", {"stop": ["\n"]})], "RL0730", '`stop` is ["\\n"], and must be [] here'),
    ([("ask", {"seed": 1})], "RL0730", "`seed` is not known to this endpoint"),
    ([("ask", {"tools": [{"name": "add"}]})], "RL0730", "`tools` is no list of"),
    ([("ask", {"messages": []})], "RL0730", "`messages` is no list of messages"),
    ([("ask", {"messages": [{"role": "robot", "content": "a"}]})], "RL0730", "`messages[0]` is no message"),
    ([("ask", {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]})], "RL0730", "[0].content` is neither"),
    ([("ask", {"messages": [USER, {"role": "assistant", "content": "b"}]})], "RL0730", "a turn is not continued"),
    ([("ask", {"messages": [{"role": "user", "content": "\udcff"}]})], "RL0730",
     "`messages[0]` has half of a character (\\udcff), which no tokenizer encodes"),
    ([("ask", {"tools": [{"type": "function", "function": {"name": "\udcff"}}]})], "RL0730", "`tools` has half of a"),
    ([("tokens", {"ids": [True]})], "RL0730", "`token_ids` is no list of ids"),
    ([("tokens", {"ids": [1], "sampling": {"stop_token_ids": [1]}})], "RL0730", "`stop_token_ids` is [1]"),
    ([("ask", {"messages": [USER, {"role": "tool", "tool_call_id": "x", "content": "1"}]})], "RL0736",
     "answered the call 'x', which nobody has made"),
])
def test_a_request_that_is_refused_ends_its_conversation(
        agents: EnvironmentProcesses, capfd: pytest.CaptureFixture[str], script: list[Any], code: str, title: str) -> None:
    failed(agents, capfd, script, 0, code, title)


@pytest.mark.parametrize("script, turns, code, title", [
    ([("ask", {}), ("edit", [0, USER]), ("say", "b"), ("ask", {})], 1, "RL0736", EDITED + "messages[0] (user) is not"),
    ([("ask", {}), ("edit", [1, {"role": "assistant", "content": "y"}]), ("say", "b"), ("ask", {})], 1, "RL0736",
     EDITED + "messages[1] (assistant) is not the one that the conversation has"),
    ([("ask", {}), ("forget", 1), ("ask", {})], 1, "RL0736", EDITED + "it adds no message"),
    ([("ask", {}), ("say", "b"), ("ask", {"tools": CALCULATOR})], 1, "RL0736", EDITED + "its `tools` are others"),
    ([("ask", {}), ("tokens", {"ids": [1]})], 1, "RL0736", EDITED + "it asks in messages and in tokens"),
    ([("tokens", {"ids": [1]}), ("tokens", {"ids": []})], 1, "RL0736", EDITED + "it adds no token"),
    ([("tokens", {"ids": [1]}), ("raw", {"path": "/inference/v1/generate", "body": {"token_ids": [1, 1, 2]}})], 1,
     "RL0736", EDITED + "token 1 is not the one that the conversation has"),
    ([("gather", 2)], 1, "RL0737", "asked again before its last request was answered"),
    ([("leave", 0.5)], 1, "RL0737", "returned before its request was answered"),
    ([("impatient", 0.2), ("sleep", 60)], 1, "RL0737", "gave up a request before it was answered"),
    ([], 0, "RL0739", "returned without asking the model"),
    ([("ask", {}), ("raise", "no")], 1, "RL0714", "raised: RuntimeError: no"),
    ([("raise", "no")], 0, "RL0714", "raised: RuntimeError: no"),
    ([("ask", {}), ("exit", 3)], 1, "RL0717", "ended its process (exit status 3)"),
    ([("ask", {}), ("print", 5_000_000), ("sleep", 60)], 1, "RL0717", "printed more than 4 MiB in one turn"),
])
def test_an_agent_that_fails(agents: EnvironmentProcesses, capfd: pytest.CaptureFixture[str], script: list[Any],
                             turns: int, code: str, title: str) -> None:
    failed(agents, capfd, script, turns, code, title)


# what has happened before the model has ended its turn
WHILE_IT_ASKS: dict[str, Callable[[Dialogue, ForkedWorker], bool]] = {
    "gather": lambda dialogue, worker: dialogue.fault is not None,
    "leave": lambda dialogue, worker: worker.has_answer(),
    "impatient": lambda dialogue, worker: dialogue.request is not None and dialogue.request.connection.closed}


def wait_until(agents: EnvironmentProcesses, what: Callable[[Dialogue, ForkedWorker], bool]) -> None:
    assert agents.endpoint is not None
    deadline = time.monotonic() + 20
    while not what(agents.endpoint.dialogues[5], agents.rows[5].worker):
        assert agents.arrivals(wait=False) == [] and time.monotonic() < deadline
        time.sleep(0.01)


def failed(agents: EnvironmentProcesses, capfd: pytest.CaptureFixture[str], script: list[Any], turns: int, code: str,
           title: str) -> None:
    """The run hears of it, with the row; and so does the agent, if it is its request that is refused."""
    begin(agents, *script, row=5)
    with pytest.raises(Failure) as caught:
        for _ in range(turns):
            assert not only(agents).ended
            wait_until(agents, WHILE_IT_ASKS.get(script[0][0], lambda dialogue, worker: True))
            agents.said(5, ids("x<|im_end|>"), False, [0.0, 0.0])
        agents.arrivals(wait=True)
    (found,) = caught.value.diagnostics
    assert found.code == code and title in found.title and found.notes[0].startswith("row 5, ")
    assert "envs_agents.py" in str(found.place) and not agents.rows and not agents.endpoint.row_of


@pytest.mark.parametrize("name, title", [
    ("no_key", "`no_key` is no agent: it has no parameter `api_key`"),
    ("RunsOtherwise", "`RunsOtherwise` is no agent: it has no parameter `base_url`"),
    ("takes_columns", "`takes_columns` cannot be called as an agent: missing a required argument: 'answer'"),
    ("takes_no_row", "`takes_no_row` cannot be called as an agent: too many positional arguments"),
])
def test_what_is_no_agent_is_refused_before_the_run(name: str, title: str) -> None:
    with pytest.raises(Failure) as caught:
        opened(name)
    (found,) = caught.value.diagnostics
    assert found.code == "RL0713" and found.title == title


def test_time_limits(agents: EnvironmentProcesses, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between a request's answer and the next one, and before the first; not while the model works."""
    monkeypatch.setattr(agents, "turn_timeout", 0.5)
    begin(agents, ("ask", {}), ("sleep", 60))
    only(agents)
    time.sleep(0.6)
    with pytest.raises(Failure, match="took more than 0.5 s to answer") as caught:
        answered(agents, "x")
    (found,) = caught.value.diagnostics
    assert found.code == "RL0716" and f":{line('time.sleep(argument)')}" in str(found.place)
    assert found.notes[0] == "row 0, turn 1"
    begin(agents, ("sleep", 60))
    with pytest.raises(Failure) as caught:
        only(agents)
    assert caught.value.diagnostics[0].notes[0] == "row 0, before its first turn"


def line(of: str) -> int:
    return next(i for i, text in enumerate(FILE.read_text().splitlines(), 1) if of in text)


def test_limits_of_the_program(agents: EnvironmentProcesses, capfd: pytest.CaptureFixture[str]) -> None:
    """The agent hears of a limit as an error of its request, and still gives its reward; if the error ends it, the
    conversation's reward is 0."""
    for what, reward in (("ask", 0.5), ("must ask", None)):
        for why, code in (("max_turns", "max_turns"), ("max_tokens", "context_length_exceeded")):
            begin(agents, ("ask", {}), ("say", "b"), (what, {}), reward=0.5)
            only(agents)
            assert not answered(agents, "x").ended
            agents.finish(0, why)  # type: ignore[arg-type]
            assert only(agents) == Arrival(0, (), True, why, reward, None)
            printed = capfd.readouterr().err
            assert (code if reward else f"{why}=") in printed and ("and its reward is 0" in printed) == (reward is None)
    begin(agents, ("ask", {}), ("ask", {}))  # a request after the end is answered, too
    only(agents)
    agents.finish(0, "max_tokens")
    assert only(agents).stopped == "max_tokens"
    (_, first), (_, second) = heard(capfd)
    assert first == second and first["error"]["message"].startswith("This model's maximum context length is 2000 tokens")


def test_help_for_wrong_ids_is_about_ids(agents: EnvironmentProcesses) -> None:
    begin(agents, ("tokens", {"ids": []}))
    with pytest.raises(Failure) as caught:
        only(agents)
    help = str(caught.value.diagnostics[0].help)
    assert "at least one id" in help and "messages" not in help


def test_on_error_end(agents: EnvironmentProcesses, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
                      ) -> None:
    monkeypatch.setattr(agents, "on_error", "end")
    begin(agents, ("ask", {}), ("say", "b"), ("ask", {}), row=1)
    only(agents)
    begin(agents, ("ask", {"n": 3}))
    first = only(agents)
    assert (first.ended, first.stopped, first.reward) == (True, "error", None) and "What?" in text(first)
    begin(agents)
    assert only(agents).stopped == "error"  # it has not asked
    begin(agents, ("ask", {}), ("edit", [0, USER]), ("say", "b"), ("ask", {}))
    only(agents)
    assert answered(agents, "x") == Arrival(0, (), True, "error", None, None)
    assert not answered(agents, "x", row=1).ended
    assert answered(agents, "x", row=1).stopped == "done"
    printed = capfd.readouterr().err
    assert all(f"{code} `scripted` " in printed for code in ("RL0730", "RL0739", "RL0736"))


@pytest.mark.parametrize("reward, title", [("much", "`scripted`: it returned a str, not a number"),
                                           (None, "`scripted`: it returned None, not a number"),
                                           (float("inf"), "`scripted`: it returned inf"), ({"a": 1}, "a dict, not a")])
def test_what_it_returns_is_checked(agents: EnvironmentProcesses, reward: Any, title: str) -> None:
    begin(agents, ("ask", {}), reward=reward)
    only(agents)
    with pytest.raises(Failure) as caught:
        answered(agents, "x")
    assert caught.value.diagnostics[0].code == "RL0715" and title in caught.value.diagnostics[0].title


def test_a_key_ends_with_its_conversation(agents: EnvironmentProcesses) -> None:
    assert agents.endpoint is not None
    keys = []
    for row in (0, 1):
        begin(agents, ("ask", {}), row=row)
        only(agents)
        keys.append(agents.endpoint.dialogues[row].key)
    assert keys[0] != keys[1] and all(len(key) >= 43 for key in keys)
    answered(agents, "x")
    assert list(agents.endpoint.row_of) == keys[1:]
    answered(agents, "x", row=1)


def test_templates_that_rewrite_turns_are_refused_when_it_matters() -> None:
    """Qwen3 drops thinking when the user speaks again: one turn, and tools, can be used."""
    with opened("scripted", "Qwen3") as talk:
        begin(talk, ("ask", {}))
        only(talk)
        assert answered(talk, "x").stopped == "done"
        begin(talk, ("ask", {"tools": CALCULATOR}), ("call", ["3"]), ("ask", {"tools": CALCULATOR}))
        only(talk)
        assert "3\n</tool_response>" in text(answered(talk, CALL))
        answered(talk, "x")
        begin(talk, ("ask", {}), ("say", "b"), ("ask", {}))
        only(talk)
        with pytest.raises(Failure) as caught:
            answered(talk, "x")
        assert caught.value.diagnostics[0].code == "RL0718"
