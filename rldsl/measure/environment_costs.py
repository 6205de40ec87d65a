"""What conversations with environments take of the host on this machine, besides what the user's code does.

In: the directory of a tokenizer. Out: microseconds by the names of a cluster's file. Real processes are started, of an
environment that does nothing and says a sentence after each turn. What grows with conversations and what with turns
is separated by holding fewer of each.
"""

from __future__ import annotations

import resource
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from rldsl.diag import Failure
from rldsl.plan.function import Function
from rldsl.runtime.data.tokens import text_tokens
from rldsl.runtime.environments import ContextImages, Message
from rldsl.runtime.environments.chat import Chat, ChatTemplate
from rldsl.runtime.environments.contract import Speaks
from rldsl.runtime.environments.processes import EnvironmentProcesses
from rldsl.runtime.environments.tool_calls import Turn

FEW, MANY = 4, 48  # conversations
ONE, MORE = 1, 17  # turns of each
TIMEOUT = 60.0  # seconds, of everything that is waited for
PROMPT = "What is the answer to this question?"
SOURCE = f'''
class Says:
    """Says the same after each turn; it never ends a conversation."""

    def init(self, prompt):
        return prompt, {{}}

    def step(self, text):
        return {{"observations": [{{"role": "user", "content": "{PROMPT}"}}], "reward": 0.0, "done": False}}
'''


@dataclass(frozen=True, slots=True)
class EveryContextAnew:
    """A chat whose template cannot continue a conversation with a user: it renders each answer as a first context,
    which takes as long."""

    template: ChatTemplate

    def first(self, messages: Sequence[Message], images: ContextImages | None = None) -> tuple[int, ...]:
        return self.template.first(messages, images)

    def reply(self, messages: Sequence[Message], cut: bool) -> tuple[int, ...]:
        return self.template.first(messages)

    def turn(self, ids: Sequence[int], context: Sequence[int]) -> Turn:
        return self.template.turn(ids, context)

    def text(self, ids: Sequence[int], special: bool) -> str:
        return self.template.text(ids, special)


@dataclass(frozen=True, slots=True)
class Held:
    """What some conversations took, in seconds."""

    start: float  # of the rank, to start a process
    start_computed: float  # of these, in which the rank itself computed
    answer: float  # that the rank computed per answer, of all but the last ones
    children: float  # that all processes of environments computed


def measure_environments(directory: str) -> dict[str, float]:
    """directory: of the tokenizer. Nothing where it has no chat template that conversations can use."""
    try:
        few, many, longer = (hold(directory, count, turns) for count, turns in ((FEW, ONE), (MANY, ONE), (MANY, MORE)))
    except Failure:
        return {}
    start = min((many, longer), key=lambda held: held.start)
    answer = max(longer.children - many.children, 0.0) / (MANY * (MORE - ONE))
    # with one turn a process answers twice: it begins, and it says what follows the turn
    conversation = max(many.children - few.children, 0.0) / (MANY - FEW) - (1 + ONE) * answer
    started = start.start - start.start_computed  # by then it has done this part, and the rank has waited for it
    found = {"conversation_us": start.start, "turn_us": longer.answer, "answer_us": answer,
             "environment_us": max(conversation - started, 0.0)}
    return {name: seconds * 1e6 for name, seconds in found.items()}


def hold(directory: str, count: int, turns: int) -> Held:
    """Hold `count` conversations of `turns` turns, and wait until their processes have ended. Errors: Failure."""
    tokens, before = text_tokens(directory), _children()
    tokenizer, ends = tokens.tokenizer, tokens.ends

    def make_chat(tools: Sequence[Mapping[str, Any]], speaks: Speaks | None) -> Chat:
        try:
            return ChatTemplate(tokenizer, ends, directory, tools, speaks)
        except Failure:
            return EveryContextAnew(ChatTemplate(tokenizer, ends, directory, tools, None))

    with tempfile.TemporaryDirectory(prefix="rlc-") as folder:
        file = Path(folder) / "says.py"
        file.write_text(SOURCE)
        function = Function("Says", str(file), "Says", sha256(SOURCE.encode()).hexdigest(), "env")
        with EnvironmentProcesses(function, TIMEOUT).open(make_chat) as processes:
            wall, own = time.perf_counter(), time.process_time()
            for row in range(count):
                processes.begin(row, {}, PROMPT, 0)
            wall, own = time.perf_counter() - wall, time.process_time() - own
            answers = [_answered(processes, count)]
            said = tokenizer(PROMPT)["input_ids"]
            for _ in range(turns):
                answers.append(_answered(processes, count, said))
            for row in range(count):
                processes.finish(row, "max_turns")
            _answered(processes, count)
            _wait_for_the_end(processes)
    return Held(wall / count, own / count, statistics.median(answers) / count, _children() - before)


def _answered(processes: EnvironmentProcesses, count: int, said: Sequence[int] = ()) -> float:
    """Wait for an answer in each conversation. said: by the model before; (): nothing. Returns the seconds that this
    process computed."""
    begin = time.process_time()
    for row in range(count) if said else ():
        processes.said(row, said, False)
    arrived = 0
    while arrived < count:
        arrived += len(processes.arrivals(True))
    return time.process_time() - begin


def _wait_for_the_end(processes: EnvironmentProcesses) -> None:
    """What a process has computed is known once it has ended."""
    deadline = time.monotonic() + TIMEOUT
    while processes.ending and time.monotonic() < deadline:
        time.sleep(0.01)
        processes.arrivals(False)


def _children() -> float:
    """Seconds that processes which have ended computed."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
