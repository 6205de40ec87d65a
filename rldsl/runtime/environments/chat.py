"""The tokens of a conversation: its first context, and what each answer of an environment adds.

In: a tokenizer with a chat template, messages. Out: context tokens. What the model said is never rendered: a reply is
what the template writes after the stop token of a turn, read off a short conversation that ends with the same messages.
Invariant: the context of each turn begins with the context of the turn before it. The template is probed before the run
with conversations of three turns, with tools and with thinking, so that a template that rewrites earlier turns, as many
do with thinking, is refused instead of training on texts that the model never sees.
Codes: RL0718 the chat template cannot be used for conversations, RL0719 (`tool_calls.py`).
"""

from __future__ import annotations

import functools
import inspect
import itertools
import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Protocol

from jinja2 import TemplateError, TemplateSyntaxError

from rldsl.diag import Failure, fail
from rldsl.runtime.environments import ContextImages, Message
from rldsl.runtime.environments.contract import Speaks
from rldsl.runtime.environments.tool_calls import Turn, TurnReader

ASKED = "x7asked7x"          # what the user says first in a probe
SAID = "x7said7x"            # what the model says in it
THOUGHT = "x7thought7x"      # what it thinks
ANSWERED = "x7answered7x"    # what the environment says
SHOWN = 160                  # characters of a rendering that a message shows on each side of a difference
THINKING_FIELDS = ("reasoning_content", "reasoning", "thinking")


class Chat(Protocol):
    """How a conversation becomes tokens."""

    def first(self, messages: Sequence[Message], images: ContextImages | None = None) -> tuple[int, ...]:
        """The first context. images: that its messages have."""

    def reply(self, messages: Sequence[Message], cut: bool) -> tuple[int, ...]:
        """The context that these new messages add after a turn of the model. cut: the turn has no stop token."""

    def turn(self, ids: Sequence[int], context: Sequence[int]) -> Turn:
        """What the model said. context: the ids before it, of what `first` or `reply` returned."""

    def text(self, ids: Sequence[int], special: bool) -> str:
        """Ids as text. special: whether it has control tokens."""


class ChatFactory(Protocol):
    """Makes a Chat once it is known what the environment says. A Failure if the tokenizer cannot be used for it."""

    def __call__(self, tools: Sequence[Mapping[str, Any]], speaks: Speaks | None) -> Chat:
        """tools: JSON schemas; speaks: the role of the environment's messages; None: it says only the first ones."""


class ChatTemplate:
    """Conversations of one tokenizer with environments that have certain tools. It is probed when it is created."""

    def __init__(self, tokenizer: Any, ends: Collection[int], directory: str, tools: Sequence[Mapping[str, Any]],
                 speaks: Speaks | None, in_parts: bool = False):
        """ends: ids at which a turn ends. directory: of the tokenizer, for messages. tools: JSON schemas. speaks: the
        role of the environment's messages; None: it says only the first ones, which is not probed. in_parts: contents
        are lists of parts, which some templates of models that read images need. RL0718, RL0719."""
        self.tokenizer, self.directory, self.speaks, self.in_parts = tokenizer, directory, speaks, in_parts
        self.ends = frozenset(ends)
        self.tools = [dict(tool) for tool in tools] or None  # some templates write a heading for an empty list
        if not tokenizer.chat_template:
            raise self._refused("this tokenizer has no chat template", (),
                                "use the tokenizer of a chat model: conversations are rendered by its template")
        self.reader = TurnReader(tokenizer, directory, tools)
        parameters = inspect.signature(tokenizer.apply_chat_template).parameters
        self.safe = {"sanitize_control_tokens": True} if "sanitize_control_tokens" in parameters else {}
        self.end_texts = [str(text) for text in tokenizer.convert_ids_to_tokens(sorted(self.ends))]
        self.many_calls = self.text_arguments = False
        if speaks == "tool":
            self._find_form_of_calls()
        if speaks is not None:
            self._probe()

    def first(self, messages: Sequence[Message], images: ContextImages | None = None) -> tuple[int, ...]:
        """The first context of a conversation. images: that its messages have; None: it has none."""
        return self._ids(messages, images)

    def reply(self, messages: Sequence[Message], cut: bool) -> tuple[int, ...]:
        """The context that new messages add after a turn of the model. cut: the turn has no stop token, which then
        belongs to the context."""
        conversation = [{"role": "user", "content": "?"}, self._turn(messages), *map(self._addressed, messages)]
        text = self._text(conversation)
        said = text.find(SAID)
        at = min((i for end in self.end_texts if (i := text.find(end, said)) >= 0), default=-1)
        if said < 0 or at < 0 or ANSWERED in text[said:at]:
            raise self._refused("the chat template does not end a turn of the model with a stop token",
                                (f"stop tokens: {', '.join(map(repr, self.end_texts))}", f"rendering: {text!r}"),
                                "the tokens at which generation ends are `eos_token_id` of generation_config.json")
        before = sum(text.count(end, 0, at) for end in self.end_texts)  # none of them is the environment's
        ids = self._ids(conversation)
        stop = next(itertools.islice((i for i, token in enumerate(ids) if token in self.ends), before, None))
        return ids[stop:] if cut else ids[stop + 1 :]

    def turn(self, ids: Sequence[int], context: Sequence[int]) -> Turn:
        """What the model said."""
        return self.reader.turn(ids, context)

    def text(self, ids: Sequence[int], special: bool) -> str:
        """Ids as text. special: whether it has control tokens."""
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=not special))

    def _turn(self, answers: Sequence[Message]) -> Message:
        """A turn of the model that these messages answer."""
        if self.speaks == "user" or not any(m["role"] == "tool" for m in answers):
            return {"role": "assistant", "content": SAID}
        names = [str(m.get("name") or "tool") for m in answers if m["role"] == "tool"]
        arguments: object = {"argument": SAID}
        if self.text_arguments:
            arguments = json.dumps(arguments)
        return {"role": "assistant", "content": "", "tool_calls": [
            {"type": "function", "id": f"call{i:05}", "function": {"name": name, "arguments": arguments}}
            for i, name in enumerate(names if self.many_calls else names[:1])]}

    @staticmethod
    def _addressed(message: Message) -> Message:
        """Some templates want the number of the call that a tool answers."""
        return {"tool_call_id": "call00000", **message} if message["role"] == "tool" else message

    def _text(self, messages: Sequence[Message], generation: bool = True) -> str:
        try:
            return str(self.tokenizer.apply_chat_template(
                self._formed(messages), tools=self.tools, add_generation_prompt=generation, tokenize=False))
        except TemplateSyntaxError as error:
            raise self._refused(f"the chat template has a syntax error in its line {error.lineno}: {error.message}", (),
                                f"correct it: {_WHERE}") from None
        except Exception as error:  # a template is a program: it may raise anything
            roles = ("roles: " + ", ".join(str(m["role"]) for m in messages),)
            if type(error) is TemplateError:  # what `raise_exception` raises
                raise self._refused(f"the chat template rejects these messages: {error}", roles,
                                    "the template says so itself, with `raise_exception`: " + (
                                        f"messages of this environment have the role `{self.speaks}`, so use a model "
                                        "whose template takes them after a turn of the model, or change that line: "
                                        if self.speaks else "send what it takes, or change that line: ") + _WHERE
                                    ) from None
            raise self._refused(f"the chat template fails with these messages: {type(error).__name__}: {error}", roles,
                                f"what it does with them is wrong, or they lack what it reads: {_WHERE}") from None

    def _ids(self, messages: Sequence[Message], images: ContextImages | None = None) -> tuple[int, ...]:
        """The tokens of a context. Control tokens that messages spell are text."""
        self._text(messages)  # so that an error of the template is reported as one
        render = self.tokenizer.apply_chat_template if images is None else functools.partial(
            type(self.tokenizer).apply_chat_template, _WithImages(self.tokenizer, images))
        found = render(self._formed(messages), tools=self.tools, add_generation_prompt=True, tokenize=True,
                       return_dict=False, **self.safe)
        return tuple(int(i) for i in found)

    def _formed(self, messages: Sequence[Message]) -> list[Message]:
        """Messages with contents in the form that the template takes."""
        if not self.in_parts:
            return list(messages)
        return [{**m, "content": [{"type": "text", "text": m["content"]}] if m["content"] else []}
                if isinstance(m.get("content"), str) else m for m in messages]

    # probes

    def _find_form_of_calls(self) -> None:
        """Whether a turn may have several calls, which Llama's template rejects, and whether arguments are JSON text,
        as in DeepSeek's, or a mapping. What fits none of these is refused by the probes."""
        for self.text_arguments in (False, True):
            for self.many_calls in (True, False):
                answers = self._answers("a", "b") if self.many_calls else self._answers("a")
                conversation = [{"role": "user", "content": "?"}, self._turn(answers), *map(self._addressed, answers)]
                try:
                    if self._text(conversation).count(SAID) == len(answers):
                        return
                except Failure:
                    continue
        self.text_arguments = False

    def _answers(self, *contents: str) -> list[Message]:
        if self.speaks == "user":
            return [{"role": "user", "content": contents[0]}]
        name = str(self.tools[0]["function"]["name"]) if self.tools else "tool"
        return [{"role": "tool", "name": name, "content": content} for content in contents]

    def _probe(self) -> None:
        """RL0718: the template rewrites what a conversation has had, or leaves something out."""
        for turn in self._turns():
            self._probe_with(turn)

    def _turns(self) -> list[Message]:
        """Turns of the model as its template may know them: without thinking, and with it in each way there is."""
        plain = self._turn(self._answers(ANSWERED))
        turns = [plain]
        for name in THINKING_FIELDS:
            turn = {**plain, name: THOUGHT}
            if name in self.tokenizer.chat_template and THOUGHT in self._text(
                    [{"role": "user", "content": "?"}, turn], generation=False):
                turns.append(turn)
        if "</think>" in self.tokenizer.chat_template:
            turns.append({**plain, "content": f"<think>\n{THOUGHT}\n</think>\n\n{plain['content']}"})
        return turns

    def _probe_with(self, turn: Message) -> None:
        answers = [self._addressed(m) for m in self._answers(ANSWERED)]
        conversation: list[Message] = [{"role": "user", "content": ASKED}]
        before = self._text(conversation)
        for number in range(1, 4):
            conversation += [turn, *answers]
            after = self._text(conversation)
            added_now = f"turn {number} of the model and its answer (role `{self.speaks}`)"
            if not after.startswith(before):
                changed = self._changed(before, after)
                raise self._refused("the chat template rewrites earlier turns when a conversation continues",
                                    (f"{changed} is rendered differently once {added_now} follow",
                                     *_difference(before, after)), _PRESERVING)
            added = after[len(before):]
            for text, what in ((ANSWERED, f"messages of the role `{self.speaks}`"), (SAID, "turns of the model"),
                               (THOUGHT, "the thinking of earlier turns")):
                if text not in added and (text != THOUGHT or THOUGHT in str(turn)):
                    last = self._text([*conversation[: -len(answers)]], generation=False)
                    raise self._refused(f"the chat template leaves out {what} when a conversation continues",
                                        (f"of {added_now}", *_both(last, after)), _PRESERVING)
            before = after
        reply, ids = self.reply(self._answers(ANSWERED), cut=False), self._ids(conversation)
        if ids[len(ids) - len(reply):] != reply:
            raise self._refused("the chat template renders an answer differently in a longer conversation",
                                _both(self.tokenizer.decode(list(reply)), before), _PRESERVING)

    def _changed(self, before: str, after: str) -> str:
        """The message of a probe in which two renderings first differ."""
        at, found = _first_difference(before, after), list[tuple[int, str]]()
        marks = {ASKED: "the first message (role `user`)", THOUGHT: "the thinking of turn {} of the model",
                 SAID: "turn {} of the model", ANSWERED: f"answer {{}} (role `{self.speaks}`)"}
        for mark, what in marks.items():
            if (place := before.find(mark, max(0, at - len(mark) + 1))) >= 0:
                found.append((place, what.format(before.count(mark, 0, place) + 1)))
        return min(found)[1] if found else "what begins a turn of the model"

    def _refused(self, what: str, notes: tuple[str, ...], help: str) -> Failure:
        return fail("RL0718", what, place=self.directory, notes=notes, help=help)


class _WithImages:
    """A tokenizer, as its `apply_chat_template` sees it: in what the template has rendered, images get their tokens."""

    def __init__(self, tokenizer: Any, images: ContextImages):
        self._tokenizer, self._images = tokenizer, images

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def __call__(self, text: str, **options: Any) -> dict[str, list[int]]:
        return {"input_ids": self._images.ids(text, lambda whole: list(self._tokenizer(whole, **options)["input_ids"]))}


_WHERE = ("the template is the file chat_template.jinja in the model's directory, or `chat_template` of "
          "tokenizer_config.json")
_PRESERVING = ("use a template that only adds to what it has rendered (many models have a variant for training, or one "
               "that keeps thinking): edit chat_template.jinja in the model's directory")


def _both(before: str, after: str) -> tuple[str, str]:
    return f"before: {before!r}", f"after: {after!r}"


def _difference(before: str, after: str) -> tuple[str, str]:
    """The two renderings, from a little before the place where they differ."""
    at = _first_difference(before, after)
    cut = slice(max(0, at - SHOWN), at + SHOWN)
    more = "... " if at > SHOWN else ""
    return f"before: {more}{before[cut]!r}", f"after: {more}{after[cut]!r}"


def _first_difference(before: str, after: str) -> int:
    return next((i for i, (a, b) in enumerate(zip(before, after, strict=False)) if a != b),
                min(len(before), len(after)))
