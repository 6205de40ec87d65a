"""What a message says about an environment that failed: where in the user's files, where in its conversation, and how.

In: a function, a stack trace, the messages of a conversation, an exit status. Out: texts.
"""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Sequence

from rldsl.plan.function import Function
from rldsl.runtime.environments import Message
from rldsl.runtime.environments.characters import half_in
from rldsl.runtime.rewards import user_functions


def innermost_place(function: Function, lines: str) -> str:
    """"file.py:12": the innermost line of the user's files that a stack trace has; the file where it has none."""
    paths = {str(user_functions.function_path(p)): p for p in (
        function.path, *(path for _, path, _ in function.modules))}
    for file, line in re.findall(r'File "(.*)", line (\d+) in', lines):
        if os.path.realpath(file) in paths:
            return f"{paths[os.path.realpath(file)]}:{line}"
    return function.path


def in_conversation(row: int, messages: Sequence[Message], turn: int | None, first: str) -> tuple[str, ...]:
    """The row, the turn, and the last message of the prompt. turn: None before the first context, which is called
    `first`."""
    last = messages[-1]["content"] if messages else ""
    name, *prompt = user_functions.describe({"prompt": last}, str(row))
    return f"{name}, {first if turn is None else f'turn {turn}'}", *prompt


def half_character(messages: Sequence[Message]) -> str:
    """Which message cannot be encoded, and what it has; "" if all can."""
    for number, message in enumerate(messages):
        if half := half_in(message):
            who = f"the tool `{message['name']}` returned" if message["role"] == "tool" and "name" in message else (
                f"messages[{number}] ({message['role']}) has")
            return f"{who} half of a character ({half})"
    return ""


def ended(status: int) -> tuple[str, str]:
    """How a process ended, and what helps. status: its exit status, or minus the signal that killed it."""
    names = {s.value: s.name for s in signal.Signals}
    how = f"killed by {names.get(-status, -status)}" if status < 0 else f"exit status {status}"
    if status == -signal.SIGKILL:
        return how, "the system kills processes that use too much memory"
    return how, "an environment must not exit" if status >= 0 else "a library that it uses crashed"
