"""Environments in their processes: what they see, what the model gets, and what each way of failing says."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from rldsl.diag import Failure, InternalError
from rldsl.plan.function import Function
from rldsl.runtime.environments import Arrival
from rldsl.runtime.environments.chat import ChatTemplate
from rldsl.runtime.environments.processes import EnvironmentProcesses
from rldsl.runtime.environments.several import SeveralEnvironments
from tests.environments.families import FAMILIES, ends, make

FILE = Path(__file__).parent / "envs_calculator.py"
QWEN = FAMILIES["Qwen2.5"]
TOKENIZER = make(QWEN)


def function(name: str) -> Function:
    return Function("f", os.path.relpath(FILE), name, sha256(FILE.read_bytes()).hexdigest(), "env")


def opened(name: str) -> EnvironmentProcesses:
    chat = partial(ChatTemplate, TOKENIZER, ends(TOKENIZER, QWEN), "tok")
    return EnvironmentProcesses(function(name), 20.0).open(chat)


@pytest.fixture(scope="module")
def calculator() -> Iterator[EnvironmentProcesses]:
    with opened("Calculator") as talk:
        yield talk


def ids(text: str) -> list[int]:
    return list(TOKENIZER(text, add_special_tokens=False)["input_ids"])


def call(tool: str, **arguments: Any) -> str:
    return f'<tool_call>\n{json.dumps({"name": tool, "arguments": arguments})}\n</tool_call>'


def begun(talk: EnvironmentProcesses, row: int, **columns: Any) -> str:
    talk.begin(row, {"prompt": "What?", **columns}, "What?", 7)
    return text(only(talk))


def only(talk: EnvironmentProcesses) -> Arrival:
    (arrival,) = talk.arrivals(wait=True)
    return arrival


def text(arrival: Arrival) -> str:
    return str(TOKENIZER.decode(list(arrival.tokens)))


def answered(talk: EnvironmentProcesses, row: int, said: str, cut: bool = False) -> Arrival:
    talk.said(row, ids(said if cut else said + "<|im_end|>"), cut)
    return only(talk)


def result(talk: EnvironmentProcesses, row: int, said: str) -> str:
    """What one tool answers."""
    found = text(answered(talk, row, said))
    return found.split("<tool_response>\n")[1].split("\n</tool_response>")[0]


def ended(talk: EnvironmentProcesses, row: int) -> Arrival:
    talk.finish(row, "max_turns")
    return only(talk)


@pytest.mark.thorough
def test_a_conversation(calculator: EnvironmentProcesses) -> None:
    first = begun(calculator, 0, answer=5)
    assert '"name": "add"' in first and first.endswith("<|im_start|>user\nWhat? [5]<|im_end|>\n<|im_start|>assistant\n")
    reply = answered(calculator, 0, "I add." + call("add", a=2, b=3))
    assert text(reply) == ("\n<|im_start|>user<tool_response>\n5\n</tool_response><|im_end|>\n<|im_start|>assistant\n")
    assert answered(calculator, 0, "It is 5.") == Arrival(0, (), True, "no_call", 1.0, None)
    begun(calculator, 0, answer=1)  # the row is free again
    assert ended(calculator, 0) == Arrival(0, (), True, "max_turns", 0.0, None)


def test_what_the_environment_sees_is_what_trl_shows_it(calculator: EnvironmentProcesses) -> None:
    """Functions first, in the order of the calls, then coroutines together; columns as arguments; errors as text."""
    begun(calculator, 1, answer=3, level="hard", fail="")
    several = call("slowly", seconds=0.2) + call("slowly", seconds=0.1) + call("add", a=1, b=1) + call("nothing")
    found = text(answered(calculator, 1, several))
    assert [part.split("\n</tool_response>")[0] for part in found.split("<tool_response>\n")[1:]] == [
        "2", "{'error': 'Tool nothing not found.'}", "waited 0.2", "waited 0.1"]
    assert result(calculator, 1, call("show")) == (
        "[('reset', 3, ['level']), ('add', 1, 1), ('slowly', 0.2), ('slowly', 0.1)] [3] 3 7")
    assert result(calculator, 1, call("break_down", how="raise")) == "{'error': 'broken'}"
    assert "unexpected keyword argument 'c'" in result(calculator, 1, call("add", a=1, c=2))
    assert result(calculator, 1, call("break_down", how="list")) == "one, two"
    ended(calculator, 1)


def test_a_call_that_cannot_be_read_is_answered(calculator: EnvironmentProcesses) -> None:
    begun(calculator, 2)
    assert "Malformed tool call: Expecting" in result(calculator, 2, '<tool_call>{"name": </tool_call>')
    assert "its arguments are no JSON object" in result(calculator, 2, '<tool_call>{"name": "add", "arguments": 3}')
    assert "it has no name" in result(calculator, 2, "<tool_call>{}</tool_call>")
    assert "Malformed tool call: half of a character (\\udcff)" in result(  # JSON can escape what cannot be encoded
        calculator, 2, call("break_down", how="\udcff")).replace("\\\\", "\\")
    assert "half of a character" in result(calculator, 2, call("\udcff"))
    cut = answered(calculator, 2, '<tool_call>{"name": "add", "argu', cut=True)
    assert (cut.ended, cut.stopped, cut.reward) == (True, "max_new_tokens", 1.0)


def test_a_turn_that_was_cut_after_a_call_is_closed_by_the_context(calculator: EnvironmentProcesses) -> None:
    begun(calculator, 3)
    found = answered(calculator, 3, call("add", a=1, b=2), cut=True)
    assert text(found).startswith("<|im_end|>\n<|im_start|>user<tool")
    ended(calculator, 3)


def test_an_answer_cannot_write_control_tokens(calculator: EnvironmentProcesses) -> None:
    begun(calculator, 4)
    found = answered(calculator, 4, call("break_down", how="shout"))
    (end,) = ids("<|im_end|>")
    assert "<|im_end|> ends nothing" in text(found) and found.tokens.count(end) == 1
    ended(calculator, 4)


def test_nothing_leaks_between_rows_and_what_is_printed_is_shown(
        calculator: EnvironmentProcesses, capfd: pytest.CaptureFixture[str]) -> None:
    for row in (10, 11, 12):
        calculator.begin(row, {"prompt": "", "answer": row}, "?", row)
    arrived: list[Arrival] = []
    while len(arrived) < 3:
        arrived += calculator.arrivals(wait=True)
    assert result(calculator, 11, call("show")) == "[('reset', 11, [])] [11] 11 11"
    assert result(calculator, 12, call("break_down", how="print")) == "nothing happened"
    assert "rank 0 environment 12 | hello from the tool" in capfd.readouterr().err
    for row in (10, 11, 12):
        ended(calculator, row)
    assert not calculator.rows


def test_a_conversation_costs_milliseconds(calculator: EnvironmentProcesses) -> None:
    """It is forked: it imports nothing. No assertion on time; the files that it has opened say so."""
    before = calculator.rows.copy()
    for row in range(100, 116):  # all live at once
        calculator.begin(row, {"prompt": ""}, "?", 0)
    servers = {calculator.rows[row].worker.server.worker.process.pid for row in range(100, 116)}
    assert len(servers) == 1 and len({calculator.rows[row].worker.process.pid for row in range(100, 116)}) == 16
    arrived: list[Arrival] = []
    while len(arrived) < 16:
        arrived += calculator.arrivals(wait=True)
    for row in range(100, 116):
        ended(calculator, row)
    assert calculator.rows == before


def failure_of(talk: EnvironmentProcesses, columns: dict[str, Any], said: str | None) -> str:
    with pytest.raises(Failure) as caught:
        begun(talk, 5, **columns)
        answered(talk, 5, said or "done")
    (found,) = caught.value.diagnostics
    return "\n".join((f"{found.place}: {found.code} {found.title}", *found.notes))


def line(of: str) -> str:
    return str(next(i for i, text in enumerate(FILE.read_text().splitlines(), 1) if of in text))


@pytest.mark.parametrize("columns, said, code, title, where, at", [
    ({"fail": "reset"}, None, "RL0714", "raised: RuntimeError: cannot reset", "row 5, in `reset`",
     "raise RuntimeError"),
    ({"fail": "type"}, None, "RL0715", "`reset` returned an int, not a string", "row 5, in `reset`", ""),
    ({}, call("break_down", how="exit"), "RL0717", "ended its process (exit status 3)", "row 5, turn 1", ""),
    ({}, call("break_down", how="leave"), "RL0717", "ended its process (exit status 3)", "row 5, turn 1", ""),
    ({}, call("break_down", how="leave with a word"), "RL0717", "(exit status 1)", "row 5, turn 1", ""),
    ({"fail": "half"}, None, "RL0715", "messages[0] (user) has half of a character (\\ud800)", "row 5, in `reset`", ""),
    ({}, call("break_down", how="half"), "RL0715", "the tool `break_down` returned half of a character (\\udcff)",
     "row 5, turn 1", ""),
    ({}, call("break_down", how="crash"), "RL0717", "killed by SIGSEGV", "row 5, turn 1", "os.kill"),
    ({}, call("break_down", how="flood"), "RL0717", "printed more than 4 MiB in one turn", "row 5, turn 1", "print("),
    ({}, call("break_down", how="image"), "RL0715", "a block that is not text", "row 5, turn 1", ""),
])
def test_a_failure_names_file_line_row_and_turn(
        calculator: EnvironmentProcesses, columns: dict[str, Any], said: str | None, code: str, title: str, where: str,
        at: str) -> None:
    found = failure_of(calculator, columns, said)
    assert code in found and title in found and where in found and "prompt: What?" in found
    assert f"envs_calculator.py{':' + line(at) if at else ''}: RL" in found


def test_what_is_shown_of_a_turns_output_is_bounded(calculator: EnvironmentProcesses, capfd: pytest.CaptureFixture[str]
                                                    ) -> None:
    failure_of(calculator, {}, call("break_down", how="flood"))
    shown = capfd.readouterr().err.splitlines()
    assert sum(len(text.split(" | ", 1)[1]) + 1 for text in shown[:-1]) <= 1 << 16 and len(shown) == 66
    assert "more lines of this turn: 64 KiB are shown)" in shown[-1] and "environment 5 | ... (4" in shown[-1], shown[-1]
    begun(calculator, 0)  # what others print is shown
    answered(calculator, 0, call("break_down", how="print"))
    ended(calculator, 0)
    assert "hello from the tool" in capfd.readouterr().err


def test_an_environment_that_hangs(calculator: EnvironmentProcesses, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calculator, "turn_timeout", 2.0)
    found = failure_of(calculator, {}, call("break_down", how="hang"))
    assert f"envs_calculator.py:{line('time.sleep(600)')}: RL0716 `Calculator` took more than 2 s to answer" in found
    assert "row 5, turn 1" in found


@pytest.mark.parametrize("numbers, title", [((6, 7), "`get_reward` returned nan"), ((7, 7), "raised: KeyError")])
def test_rewards_are_checked(calculator: EnvironmentProcesses, numbers: tuple[int, int], title: str) -> None:
    begun(calculator, 0)
    answered(calculator, 0, call("add", a=numbers[0], b=numbers[1]))
    with pytest.raises(Failure, match=title):
        answered(calculator, 0, "done")


def test_on_error_end(calculator: EnvironmentProcesses, monkeypatch: pytest.MonkeyPatch,
                      capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(calculator, "turn_timeout", 2.0)
    monkeypatch.setattr(calculator, "on_error", "end")
    calculator.begin(0, {"prompt": "", "fail": "reset"}, "What?", 0)
    first = only(calculator)
    assert (first.ended, first.stopped, first.reward) == (True, "error", None) and "What?" in text(first)
    begun(calculator, 0)
    begun(calculator, 1)
    assert answered(calculator, 0, call("break_down", how="exit")) == Arrival(0, (), True, "error", None, None)
    assert answered(calculator, 1, call("break_down", how="hang")) == Arrival(1, (), True, "timeout", None, None)
    begun(calculator, 0)
    assert answered(calculator, 0, call("break_down", how="half")) == Arrival(0, (), True, "error", None, None)
    begun(calculator, 1, answer=3)  # others and later ones are not touched
    assert result(calculator, 1, call("add", a=1, b=2)) == "3"
    printed = capfd.readouterr().err
    assert "RL0714 `Calculator` raised: RuntimeError: cannot reset; row 0, in `reset`: its conversation ends" in printed
    assert "RL0716" in printed and "RL0717" in printed
    ended(calculator, 1)


@pytest.mark.parametrize("name, code, title", [
    ("NoReset", "RL0713", "a NoReset has no method `reset`"), ("NoDocs", "RL0713", "the tool `add` of `NoDocs` has no"),
    ("NeedsArguments", "RL0713", "missing 1 required positional argument: 'size'"),
    ("Exits", "RL0717", "ended its process"), ("Calculater", "RL0774", "does not define a class `Calculater`"),
    ("LOG", "RL0774", "`LOG` is a list, not a class"),
])
def test_what_is_no_environment_is_refused_before_the_run(name: str, code: str, title: str) -> None:
    with pytest.raises(Failure) as caught:
        opened(name)
    (found,) = caught.value.diagnostics
    assert found.code == code and title in found.title and "envs_calculator.py" in str(found.place)


def test_an_environment_without_tools_and_reward() -> None:
    with opened("Scoreless") as talk:
        begun(talk, 0)
        assert answered(talk, 0, "Hello.") == Arrival(0, (), True, "no_call", None, None)


def test_the_text_form(capfd: pytest.CaptureFixture[str]) -> None:
    with opened("Echo") as talk:
        assert "<|im_start|>system\necho<|im_end|>" in begun(talk, 0)
        reply = answered(talk, 0, "hi")
        assert text(reply).startswith("\n<|im_start|>user\nHI<|im_end|>") and reply.turn_reward == 0.5
        assert answered(talk, 0, "bye") == Arrival(0, (), True, "done", 1.0, 0.5)
        for said, title in (("bad", "`step` returned an int, not a dict"), ("silent", "`step` said nothing"),
                            ("half", "half of a character")):
            begun(talk, 1)
            with pytest.raises(Failure, match=title):
                answered(talk, 1, said)
        while talk.ending:
            talk.arrivals(wait=False)
            time.sleep(0.01)
    assert "environment 0 | closed" in capfd.readouterr().err


@pytest.mark.thorough
def test_several_environments_wait_for_each_other_no_longer_than_for_one() -> None:
    with opened("Calculator") as tools, opened("Echo") as texts:
        talk = SeveralEnvironments({"Calculator": tools, "Echo": texts})
        for row, name in enumerate(("Calculator", "Echo")):
            talk.begin(row, {"prompt": "What?", "env": name}, "What?", 7)
        seen: list[int] = []
        while len(seen) < 2:
            seen += [a.row for a in talk.arrivals(wait=True)]
        assert sorted(seen) == [0, 1]
        talk.said(0, ids(call("slowly", seconds=30.0) + "<|im_end|>"), ended_by_limit=False)
        talk.said(1, ids("well, bye<|im_end|>"), ended_by_limit=False)
        (arrival,) = talk.arrivals(wait=True)
        assert (arrival.row, arrival.ended, arrival.reward) == (1, True, 0.5)
        with pytest.raises(KeyError):
            talk.said(1, (), False)


def test_nobody_waits_for_nothing() -> None:
    with pytest.raises(InternalError):
        SeveralEnvironments({}).arrivals(wait=True)


def test_calls_at_the_wrong_time(calculator: EnvironmentProcesses) -> None:
    with pytest.raises(InternalError, match="no conversation waits"):
        calculator.arrivals(wait=True)
    with pytest.raises(InternalError, match="row 77 has no conversation"):
        calculator.said(77, [1], False)
    begun(calculator, 77)
    with pytest.raises(InternalError, match="row 77 has begun already"):
        calculator.begin(77, {}, "", 0)
    calculator.said(77, ids(call("slowly", seconds=0.2)), False)
    with pytest.raises(InternalError, match="row 77 has no conversation that waits"):
        calculator.said(77, [1], False)
    assert calculator.arrivals(wait=False) == []
    only(calculator)
    ended(calculator, 77)


@pytest.mark.thorough
def test_nothing_outlives_its_rank() -> None:
    talk = opened("Calculator")
    begun(talk, 0)
    pid, server = talk.rows[0].worker.process.pid, talk.rows[0].worker.server.worker.process.pid
    os.kill(server, 9)
    deadline = time.monotonic() + 20
    while Path(f"/proc/{pid}").exists() and "Z" not in Path(f"/proc/{pid}/stat").read_text() and (
            time.monotonic() < deadline):
        time.sleep(0.02)
    with pytest.raises(Failure, match="ended its process"):
        answered(talk, 0, call("add", a=1, b=1))
    talk.close()
    assert not Path(f"/proc/{server}").exists()
