"""What a model said in a turn: its text and its calls of tools, read from the sampled ids.

In: sampled ids and a tokenizer. A tokenizer with a response template (transformers' `parse_response`) reads its own
turns; without one, the family is recognized by the markers that its chat template writes.
Out: a Turn. A call that cannot be read is one with an error, which is answered to the model: nothing that a model
writes raises here.
Codes: RL0719 the way in which this tokenizer's model calls tools is not known.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rldsl.diag import fail
from rldsl.runtime.environments.characters import half_in

Call = dict[str, Any]  # {"name", "arguments"}, or {"name", "error"} of one that cannot be read
Reader = Callable[[str], Iterator[Call]]


@dataclass(frozen=True)
class Turn:
    """A turn of the model."""

    content: str                  # its text, without special tokens and calls
    calls: tuple[Call, ...] = ()  # in the order in which it wrote them


def _call(name: Any, arguments: Any) -> Call:
    """A call, if a name and arguments are what they must be."""
    if not isinstance(name, str) or not name:
        return _unreadable("it has no name")
    if isinstance(arguments, str):  # some models write the arguments as a string of JSON
        try:
            arguments = json.loads(arguments)
        except ValueError as error:
            return _unreadable(f"its arguments are no JSON: {error}", name)
    if arguments is None:
        arguments = {}
    if not isinstance(arguments, Mapping):
        return _unreadable("its arguments are no JSON object", name)
    return {"name": name, "arguments": dict(arguments)}


def whole(call: Call) -> Call:
    """A call, or one that cannot be read if it has half of a character, which JSON can escape: no answer could repeat
    it."""
    try:
        half = half_in(call)
    except RecursionError:
        return call
    return _unreadable(f"half of a character ({half})") if half else call


def _unreadable(why: str, name: str = "unknown") -> Call:
    return {"name": name, "error": f"Malformed tool call: {why}"}


def _from_json(text: str) -> Iterator[Call]:
    """A call, or a list of them, as JSON."""
    try:
        found = json.loads(text)
    except ValueError as error:
        yield _unreadable(str(error))
        return
    for one in found if isinstance(found, list) else [found]:
        if not isinstance(one, Mapping):
            yield _unreadable("it is no JSON object")
            continue
        one = one["function"] if isinstance(one.get("function"), Mapping) else one
        yield _call(one.get("name"), one.get("arguments", one.get("parameters")))


def _between(start: str, end: str, text: str) -> Iterator[str]:
    """What is between each pair of markers, or after the last `start`."""
    for part in text.split(start)[1:]:
        yield part.partition(end)[0]


def _tagged(text: str) -> Iterator[Call]:
    """Hermes, Qwen2.5, Qwen3: JSON in <tool_call>; Qwen3-Coder: <function=NAME><parameter=NAME> in it."""
    for body in _between("<tool_call>", "</tool_call>", text):
        function = re.search(r"<function=([^>\n]+)>(.*?)(</function>|$)", body, re.DOTALL)
        if function is None:
            yield from _from_json(body)
            continue
        found = re.findall(r"<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>", function[2], re.DOTALL)
        yield _call(function[1].strip(), {name.strip(): _value(value) for name, value in found})


def _value(text: str) -> Any:
    """A value that may be JSON, and is text otherwise."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def _llama(text: str) -> Iterator[Call]:
    """Llama 3.1: the turn is one JSON object, perhaps after <|python_tag|>; several are separated by ;"""
    text = text.replace("<|python_tag|>", "").strip()
    decoder = json.JSONDecoder()
    while text.startswith("{"):
        try:
            found, end = decoder.raw_decode(text)
        except ValueError as error:
            yield _unreadable(str(error))
            return
        yield _call(found.get("name"), found.get("parameters", found.get("arguments")))
        text = text[end:].lstrip("; \n")


def _mistral(text: str) -> Iterator[Call]:
    """Mistral: a list of JSON after [TOOL_CALLS], or NAME[ARGS]JSON after each."""
    for body in text.split("[TOOL_CALLS]")[1:]:
        name, marked, arguments = body.partition("[ARGS]")
        if marked:
            yield _call(name.partition("[CALL_ID]")[0].strip(), arguments.strip())
        else:
            yield from _from_json(body.strip())


def _deepseek(text: str) -> Iterator[Call]:
    """DeepSeek: NAME, a separator and JSON; V3 and R1 write a type before the name and a code fence around the JSON."""
    for body in _between("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", text):
        before, _, after = body.partition("<｜tool▁sep｜>")
        fenced = re.fullmatch(r"([^\n]+)\n```(?:json)?\n(.*?)\n?```\s*", after, re.DOTALL)
        yield _call(fenced[1].strip(), fenced[2]) if fenced else _call(before.strip(), after.strip())


def _harmony(text: str) -> Iterator[Call]:
    """gpt-oss: messages with a recipient, `to=functions.NAME`, in their header."""
    for header, body in re.findall(r"(?:^|<\|start\|>assistant|<\|channel\|>)([^\n]*?)<\|message\|>(.*?)"
                                   r"(?=<\|call\|>|<\|end\|>|<\|return\|>|<\|start\|>|$)", text, re.DOTALL):
        recipient = re.search(r"to=(?:functions\.)?([\w.-]+)", header)
        if recipient is not None:
            yield _call(recipient[1], body.strip())


def _gemma(text: str) -> Iterator[Call]:
    """Gemma: call:NAME{key:value, ...}, with strings between escape markers."""
    for body in re.findall(r"call:([^<]*\{(?:.*?)\})(?=<end_function_call>|<tool_call\|>|\s*$)", text, re.DOTALL):
        name, _, arguments = body.partition("{")
        strings: list[str] = []

        def kept(match: re.Match[str], strings: list[str] = strings) -> str:
            strings.append(match[1])
            return json.dumps(f"\0{len(strings) - 1}")

        plain = re.sub(r'(?:<escape>|<\|"\|>)(.*?)(?:<escape>|<\|"\|>)', kept, "{" + arguments, flags=re.DOTALL)
        plain = re.sub(r"([{,]\s*)([A-Za-z_]\w*)\s*:", r'\1"\2":', plain)
        try:
            found = json.loads(plain)
        except ValueError as error:
            yield _unreadable(str(error), name.strip() or "unknown")
            continue
        yield _call(name.strip(), _restored(found, strings))


def _restored(value: Any, strings: Sequence[str]) -> Any:
    if isinstance(value, str) and value.startswith("\0"):
        return strings[int(value[1:])]
    if isinstance(value, dict):
        return {k: _restored(v, strings) for k, v in value.items()}
    return [_restored(v, strings) for v in value] if isinstance(value, list) else value


def _phi(text: str) -> Iterator[Call]:
    """Phi-4-mini: a list of JSON in <|tool_call|>."""
    for body in _between("<|tool_call|>", "<|/tool_call|>", text):
        yield from _from_json(body)


@dataclass(frozen=True)
class Family:
    """How the models of a family call tools."""

    name: str            # for messages
    template: str        # a marker that its chat template writes
    call: str            # a pattern that a turn with calls has; the text before it is the content
    read: Reader         # the calls of a turn


FAMILIES = (  # in this order: a more special marker comes first
    Family("gpt-oss", "<|channel|>", r"to=", _harmony),
    Family("DeepSeek", "<｜tool▁calls▁begin｜>", r"<｜tool▁calls▁begin｜>|<｜tool▁call▁begin｜>", _deepseek),
    Family("Mistral", "[TOOL_CALLS]", r"\[TOOL_CALLS\]", _mistral),
    Family("Hermes and Qwen", "<tool_call>", r"<tool_call>", _tagged),
    Family("Phi", "<|tool_call|>", r"<\|tool_call\|>", _phi),
    Family("Gemma", "<start_function_call>", r"<start_function_call>", _gemma),
    Family("Gemma", "<|tool_call>", r"<\|tool_call>", _gemma),
    Family("Llama 3", "<|python_tag|>", r"^\s*(<\|python_tag\|>)?\s*\{", _llama),
    Family("Llama 3", "<|eom_id|>", r"^\s*(<\|python_tag\|>)?\s*\{", _llama),
    # its template for other tools than its own names only what the model should write
    Family("Llama 3", "<|start_header_id|>", r"^\s*(<\|python_tag\|>)?\s*\{", _llama),
)


class TurnReader:
    """Reads turns of the model of one tokenizer."""

    def __init__(self, tokenizer: Any, directory: str, tools: Sequence[Mapping[str, Any]]):
        """directory: of the tokenizer, for messages. tools: their schemas; none: turns have no calls."""
        self.tokenizer, self.tools = tokenizer, list(tools)
        self.own = getattr(tokenizer, "response_template", None) is not None or (
            getattr(tokenizer, "response_schema", None) is not None)
        template = str(tokenizer.chat_template or "")
        self.family = next((family for family in FAMILIES if family.template in template), None)
        if self.tools and not self.own and self.family is None:
            raise fail("RL0719", "how the model of this tokenizer calls tools is not known", place=directory,
                       notes=("the tokenizer has no response template, and its chat template has no marker of "
                              + ", ".join(dict.fromkeys(family.name for family in FAMILIES)),),
                       help="add a `response_template` to its tokenizer_config.json, which transformers' "
                            "`parse_response` reads" + ("" if "tools" in template else "; the chat template does not "
                            "use `tools` either: take a model whose template writes them into the prompt"))

    def turn(self, ids: Sequence[int], context: Sequence[int]) -> Turn:
        """What the model said. context: the tokens before the turn, at least those of the generation prompt."""
        if not self.tools:
            return Turn(str(self.tokenizer.decode(list(ids), skip_special_tokens=True)))
        return self.with_calls(ids, context)

    def with_calls(self, ids: Sequence[int], context: Sequence[int]) -> Turn:
        """As `turn`, and calls are read even if no tools are known."""
        if self.own:
            return self._by_template(ids, context)
        text = str(self.tokenizer.decode(list(ids), skip_special_tokens=False))
        if self.family is None:
            return Turn(text)
        written = text
        for special in sorted(self._ends(), key=len, reverse=True):
            written = written.removesuffix(special)
        written = re.sub(r"<think>.*?(</think>|$)", "", written, flags=re.DOTALL) if "<think>" in written else (
            written.rpartition("</think>")[2])
        found = re.search(self.family.call, written)
        if found is None:
            return Turn(written.strip())
        try:
            calls = tuple(self.family.read(written))
        except (ValueError, TypeError, AttributeError, RecursionError) as error:
            calls = (_unreadable(str(error)),)
        return Turn(written[: found.start()].strip(), calls or (_unreadable("it has no name"),))

    def _ends(self) -> list[str]:
        return [str(self.tokenizer.eos_token or ""), "<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<end_of_turn>",
                "<turn|>", "</s>", "<｜end▁of▁sentence｜>", "<|end|>"]

    def _by_template(self, ids: Sequence[int], context: Sequence[int]) -> Turn:
        try:
            if getattr(self.tokenizer, "response_template", None) is not None:
                parsed = self.tokenizer.parse_response(list(ids), prefix=list(context), tools=self.tools)
            else:
                parsed = self.tokenizer.parse_response(list(ids))
        except Exception as error:  # a schema may raise anything for what a model writes
            return Turn("", (_unreadable(str(error)),))
        if not isinstance(parsed, Mapping):
            return Turn(str(self.tokenizer.decode(list(ids), skip_special_tokens=True)))
        calls = [c.get("function", c) if isinstance(c, Mapping) else {} for c in parsed.get("tool_calls") or []]
        return Turn(str(parsed.get("content") or ""), tuple(_call(c.get("name"), c.get("arguments")) for c in calls))
