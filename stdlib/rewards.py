"""Rewards that need no model: `use py "std/rewards.py" (exact_match: gen -> seq)`.

In: rows, dicts with the text `completion`, all columns of the data and, for most functions, `answer`: a text, a number,
or a list of these, any of which is accepted. Out: 1.0 or 0.0 for each row, independent of the other rows.
"""

from __future__ import annotations

import logging
import re
from collections import deque
from collections.abc import Callable
from fractions import Fraction
from typing import Any

from rldsl.stdlib.mathematics import equal

Row = dict[str, Any]

_NUMBER = re.compile(r"-?(?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+)(?:[eE][+-]?\d{1,3}(?!\d))?", re.ASCII)
_BRACES = re.compile(r"\\f?boxed\s*\{|\\.|[{}]", re.DOTALL)
_LONGEST = 4000  # digits of a number that is worth reading
_STATED = re.compile(r"(?:answer\s+is|answer\s*[:=])[:\s]*", re.IGNORECASE)


def whole(rows: list[Row], source: str) -> list[Row]:
    """Rows of continuations with the whole response as `completion`: the part of the prompt that a model wrote, and
    what continues it. source: the name under which the function gets the response that was cut, or continued; its
    prompt is where the response begins."""
    made: list[Row] = []
    for row in rows:
        asked, text = str(row[source]["prompt"]), str(row["prompt"])
        written = text[len(asked):] if text.startswith(asked) else text
        made.append(row | {"prompt": asked, "completion": written + row["completion"]})
    return made


def exact_match(rows: list[Row]) -> list[float]:
    """Whether the completion equals the answer, up to the amount of white space."""
    return _each(rows, lambda row, answer: _words(row["completion"]) == _words(answer))


def last_number(rows: list[Row]) -> list[float]:
    """Whether the last number of the completion equals the last number of the answer. Commas may group thousands."""
    return _each(rows, lambda row, answer: (found := _last(row["completion"])) is not None and found == _last(answer))


def boxed(rows: list[Row]) -> list[float]:
    r"""Whether the content of the completion's last \boxed{...} equals the answer, ignoring white space."""
    def right(row: Row, answer: str) -> bool:
        found, wanted = in_box(row["completion"]), in_box(answer)
        return found is not None and _bare(found) == _bare(answer if wanted is None else wanted)

    return _each(rows, right)


def math_equal(rows: list[Row]) -> list[float]:
    """Whether the completion's final answer is mathematically equal to the answer: numbers, expressions, tuples,
    intervals, sets, equations, in LaTeX or plain text."""
    return _each(rows, lambda row, answer: equal(final_answer(row["completion"]), final_answer(answer)))


def math_verify(rows: list[Row]) -> list[float]:
    """The same as judged by the package math-verify, which reads and compares with sympy. It is slower and reads more
    of LaTeX; it sets no time limit here, as the run has its own. Raises ImportError without the package."""
    try:
        from math_verify import parse, verify
    except ModuleNotFoundError as error:
        raise ImportError(f"{error.name} is not installed: pip install 'rldsl[math]'") from None

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that it has no time limit

    def right(row: Row, answer: str) -> bool:
        reference = parse(f"\\boxed{{{final_answer(answer)}}}", parsing_timeout=None)  # as LaTeX, not as prose
        return bool(verify(reference, parse(row["completion"], parsing_timeout=None), timeout_seconds=None))

    return _each(rows, right)


def format_reward(rows: list[Row]) -> list[float]:
    """Whether the completion is <think>...</think><answer>...</answer>, each once; the opening <think> may be at the
    end of the prompt."""
    return [float(_formatted(row["completion"], row.get("prompt", ""))) for row in rows]


def in_box(text: str) -> str | None:
    r"""The content of the last \boxed{...} or \fbox{...} that is closed; None without one."""
    opened: list[int] = []  # where the content of each open brace begins; -1 for those that are not of a box
    last: tuple[int, int] | None = None
    for token in _BRACES.finditer(text):
        if token.group() == "}":
            begin = opened.pop() if opened else -1
            if begin >= 0 and (last is None or begin > last[0]):
                last = begin, token.start()
        elif token.group().endswith("{") and token.group() != "\\{":
            opened.append(token.end() if token.group() != "{" else -1)
    return text[slice(*last)] if last else None


def final_answer(text: str) -> str:
    r"""What a text ends up with: the last \boxed{...}, else what follows the last `####`, else the rest of the line
    after the last "answer is" or "answer:", else the last line that is not empty."""
    held = in_box(text)
    if held is not None:
        return held.strip()
    if "####" in text:
        return text.rpartition("####")[2].strip()
    stated = [*_STATED.finditer(text)]
    after = text[stated[-1].end() :] if stated else ""
    lines = [line.strip() for line in after.splitlines()[:1] if line.strip()]
    lines = lines or [line for line in text.splitlines() if line.strip()]
    return lines[-1].strip() if lines else ""


def _each(rows: list[Row], right: Callable[[Row, str], bool]) -> list[float]:
    return [float(any(right(row, answer) for answer in _answers(row))) for row in rows]


def _answers(row: Row) -> list[str]:
    if "answer" not in row:
        raise LookupError("the data has no column `answer`, with which this function compares")
    held = row["answer"]
    return [str(a) for a in (held if isinstance(held, list) else [held])]


def _words(text: str) -> str:
    return " ".join(text.split())


def _bare(text: str) -> str:
    return "".join(text.split())


def _last(text: str) -> Fraction | None:
    """The last number of a text. A minus is a sign where no digit, letter or bracket stands before it."""
    found = next(iter(deque(_NUMBER.finditer(text), maxlen=1)), None)
    if found is None or len(found.group()) > _LONGEST:
        return None
    number = found.group().replace(",", "")
    if number.startswith("-") and re.search(r"[\w)\]}]", text[max(0, found.start() - 1) : found.start()]):
        number = number[1:]
    return Fraction(number)


def _formatted(completion: str, prompt: Any) -> bool:
    if isinstance(prompt, str) and prompt.rstrip().endswith("<think>"):
        completion = "<think>" + completion
    text = completion.strip()
    tags = ("<think>", "</think>", "<answer>", "</answer>")
    if any(text.count(tag) != 1 for tag in tags) or not text.startswith(tags[0]) or not text.endswith(tags[3]):
        return False
    end, begin = text.index(tags[1]), text.index(tags[2])
    return end < begin and not text[end + len(tags[1]) : begin].strip()
