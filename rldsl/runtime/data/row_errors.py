"""What is wrong with a row.

In: a row as a dict, its place, and what the program needs of it. Out: diagnostics, each with its file and line (or
row).
Codes: RL0743 not UTF-8, RL0746 missing column, RL0747 wrong type, RL0749 empty prompt, RL0757 another number of
answers than is needed, RL0767 the place of an image where none can be.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from difflib import get_close_matches
from math import isfinite
from typing import Any

from rldsl.diag import Diagnostic, counted
from rldsl.runtime.data.row_schema import SIDES, Row, RowNeeds, kind_of, several

LARGEST = 3.4e38  # a float32
ASSISTANT = "an answer must be a string or assistant messages: [{\"role\": \"assistant\", \"content\": \"...\"}]"


def check_row(row: Row, place: str, needs: RowNeeds) -> list[Diagnostic]:
    """The errors of a row."""
    errors = [_answers(row, name, place, needs.answers) if role == "answer" and needs.answers else
              _column(row, role, name, place) for role, name in needs.roles.items()]
    if needs.implicit_prompts and errors[0] is not None and needs.roles["prompt"] not in row:
        errors[0] = _without_shared(errors[0])
    errors += [_numbers(row, name, place, needs.answers) for name in needs.numbers]
    wrong = [d for d in errors if d is not None]
    if not wrong:
        wrong = _unread_images(row, place, needs)
    if not wrong:
        both = (_chat_after_text(row, needs.roles, place), _sides(row, needs.roles, place))
        wrong = [d for d in both if d is not None]
    return wrong


def _without_shared(found: Diagnostic) -> Diagnostic:
    return replace(found, notes=(*found.notes, "a pair needs no prompt if both sides begin with it and then differ, as "
                                               "two texts or as two lists of chat messages"))


def _unread_images(row: Row, place: str, needs: RowNeeds) -> list[Diagnostic]:
    """RL0767 for parts of chat messages that are places of images where none can be: a template writes a placeholder,
    which would stand for nothing."""
    if not needs.images and _has_image(row.get(needs.roles["prompt"])):
        return [Diagnostic("RL0767", "the prompt has a place for an image, but the data names no column of images",
                           place=place, notes=(f"columns in this row: {', '.join(f'`{k}`' for k in row)}",),
                           help='add `images="COLUMN"` to the data declaration, or remove the part {"type": "image"}')]
    found = (name for role, name in needs.roles.items() if role != "prompt" and _has_image(row.get(name)))
    return [Diagnostic("RL0767", f"the column `{name}` has a place for an image, which only a prompt can have",
                       place=place, help='remove the part {"type": "image"}') for name in found]


def _has_image(value: Any) -> bool:
    """Whether a part of a message, or of one in a list of lists, is the place of an image."""
    if isinstance(value, list):
        return any(map(_has_image, value))
    if not isinstance(value, dict):
        return False
    content = value.get("content")
    return isinstance(content, list) and any(isinstance(p, dict) and p.get("type") == "image" for p in content)


def missing(role: str, name: str, columns: Sequence[str], place: str) -> Diagnostic:
    """RL0746 for a missing column. role: "" for a column of numbers."""
    shown = ", ".join(f"`{k}`" for k in columns) or "none"
    near = get_close_matches(name, columns, n=1, cutoff=0.5)
    if not role:
        help_ = "it is listed in `numbers=` of the data declaration, so every row needs it"
        help_ = f"did you mean `{near[0]}`?" if near else help_
    elif near:
        help_ = f"did you mean `{near[0]}`? If so, set `{role}=\"{near[0]}\"` in the data declaration"
    else:
        help_ = f"add it, or set another column with `{role}=\"...\"` in the data declaration"
    return Diagnostic("RL0746", f"the column `{name}` is missing", place=place,
                      notes=(f"columns in this row: {shown}",),
                      help=help_)


def _answers(row: Row, name: str, place: str, count: int) -> Diagnostic | None:
    """RL0757 unless a row has `count` answers; what is wrong with one of them."""
    if name not in row:
        return missing("answer", name, list(row), place)
    value = row[name]
    if not several(value):
        return Diagnostic("RL0747", f"the column `{name}` is {kind_of(value)}, not a list of {count} answers",
                          place=place, help="write all answers to the prompt in one list: [\"...\", \"...\"]")
    if len(value) != count:
        return Diagnostic("RL0757", f"the column `{name}` has {counted(len(value), 'answer')}, not {count}",
                          place=place, help=f"the data declaration says `answers={count}`, which each row must have: "
                                            "add or remove answers, remove the row, or change the declaration")
    parts = (_answer(v, f"answer {i} of the column `{name}`", row, place) for i, v in enumerate(value, 1))
    return next((d for d in parts if d), None)


def _numbers(row: Row, name: str, place: str, answers: int) -> Diagnostic | None:
    """What is wrong with a number column: of rows with several answers one number, or a list with one of each."""
    value = row.get(name)
    if not answers or not isinstance(value, list):
        return _number(row, name, place)
    if len(value) != answers:
        return Diagnostic("RL0747", f"the column `{name}` has {counted(len(value), 'number')} for {answers} answers",
                          place=place, help="write one number of each answer, or a single number for all of them")
    found = (_number({name: v}, name, place) for v in value)
    return next((replace(d, title=d.title.replace("the column", f"number {i} of the column"))
                 for i, d in enumerate(found, 1) if d), None)


def _number(row: Row, name: str, place: str) -> Diagnostic | None:
    if name not in row:
        return missing("", name, list(row), place)
    value = row[name]
    if not isinstance(value, (int, float)) or abs(value) > LARGEST or value != value:
        finite = isinstance(value, int) or isinstance(value, float) and isfinite(value)
        kind = "too large for float32, whose largest number is about 3.4e38" if finite else \
            "not a finite number" if isinstance(value, float) else f"{kind_of(value)}, not a number"
        return Diagnostic("RL0747", f"the column `{name}` is {kind}", place=place)
    return None


def _column(row: Row, role: str, name: str, place: str) -> Diagnostic | None:
    if name not in row:
        return missing(role, name, list(row), place)
    value = row[name]
    if role in SIDES and several(value):
        if not value:
            return Diagnostic("RL0757", f"the column `{name}` has no answers", place=place, help="remove the row")
        parts = (_answer(v, f"a value of the column `{name}`", row, place) for v in value)
        return next((d for d in parts if d), None)
    if role != "prompt":
        return _answer(value, f"the column `{name}`", row, place)
    if isinstance(value, list) and value:
        if all(map(_message, value)):
            return _text_of(value, f"the column `{name}`", place)
        return Diagnostic("RL0747", f"the column `{name}` is a list, but not of chat messages", place=place,
                          notes=_wrong_message(value),
                          help="a message has the form {\"role\": \"user\", \"content\": \"...\"}")
    if not isinstance(value, str):
        return Diagnostic("RL0747", f"the column `{name}` is {kind_of(value)}, not a string or a list of chat messages",
                          place=place)
    if not value:
        return Diagnostic("RL0749", "the prompt is empty", place=place, help="remove the row")
    return _text_of(value, f"the column `{name}`", place)


def _answer(value: Any, what: str, row: Row, place: str) -> Diagnostic | None:
    if isinstance(value, str):
        return _text_of(value, what, place)
    if not isinstance(value, list) or not value:
        return Diagnostic("RL0747", f"{what} is {kind_of(value)}, not a string or assistant messages", place=place,
                          help=ASSISTANT)
    if not all(map(_message, value)):
        text = all(isinstance(x, str) for x in value)
        return Diagnostic("RL0747", f"{what} is a list, but not of chat messages", place=place,
                          notes=_wrong_message(value),
                          help=f"for {len(value)} answers to each prompt: `answers={len(value)}` in the declaration of "
                               "the data" if text and len(value) > 1 else ASSISTANT)
    other = next((m["role"] for m in value if m["role"] != "assistant"), None)
    if other is not None:
        return Diagnostic("RL0747", f"{what} contains a message with the role `{other}`", place=place,
                          help="an answer may contain only assistant messages; all earlier messages belong in the "
                               "prompt")
    return _text_of(value, what, place)


def _message(value: Any) -> bool:
    """Whether a value is a chat message. One with `tool_calls`, say, may lack its content."""
    return isinstance(value, dict) and isinstance(value.get("role"), str) and any(
        value[k] is not None for k in value if k not in ("role", "name"))


def _wrong_message(messages: Sequence[Any]) -> tuple[str, ...]:
    """What is missing from the first invalid message, if it looks like a message."""
    found = ((i, m) for i, m in enumerate(messages, 1) if isinstance(m, dict) and not _message(m))
    for i, message in found:
        if not isinstance(message.get("role"), str):
            return (f"message {i} has no `role`",)
        return (f"message {i} has neither `content` nor `tool_calls`",)
    return ()


def _text_of(value: Any, what: str, place: str) -> Diagnostic | None:
    if _whole(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)):
        return None
    return Diagnostic("RL0743", f"{what} contains an unpaired surrogate", place=place,
                      help="write the character as UTF-8, or as a complete surrogate pair of escapes")


def _sides(row: Row, roles: Mapping[str, str], place: str) -> Diagnostic | None:
    """RL0757 unless both sides are one answer, or lists of the same length."""
    if "chosen" not in roles:
        return None
    counts = [len(row[roles[side]]) if several(row[roles[side]]) else 0 for side in SIDES]
    if counts[0] == counts[1]:
        return None
    shown = [f"`{roles[side]}` has {n} answers" if n else f"`{roles[side]}` is one answer"
             for side, n in zip(SIDES, counts, strict=True)]
    return Diagnostic("RL0757", f"these answers cannot be paired: {' and '.join(shown)}", place=place,
                      help="both lists must have the same length: the first answers of both form a pair, and so on")


def _chat_after_text(row: Row, roles: Mapping[str, str], place: str) -> Diagnostic | None:
    """RL0747 if an answer is chat and its prompt is text."""
    if not isinstance(row.get(roles["prompt"]), str):
        return None
    for role, name in roles.items():
        value = row.get(name)
        if role != "prompt" and isinstance(value, list) and any(isinstance(v, (dict, list)) for v in value):
            return Diagnostic("RL0747", f"the column `{name}` has chat messages, but the prompt is a string",
                              place=place,
                              help='write the prompt as messages too: [{"role": "user", "content": "..."}]')
    return None


def _whole(text: str) -> bool:
    """Whether a text has no half of a surrogate pair, which JSON can escape and no tokenizer accepts."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
