"""Where responses are cut, against the rule written out."""

from __future__ import annotations

import random

import pytest

from rldsl.plan.events import Derive
from rldsl.runtime.interpreter.cuts import cut_positions


def event(at: str = "", every: int = 0, fractions: tuple[float, ...] = ()) -> Derive:
    return Derive(id=0, mesh="m", op="prefixes", source="gen", frame="cuts", values=(), spread="s", cut_at=at,
                  cut_every=every, cut_fractions=fractions)


def letters(ids: list[int]) -> str:
    return "".join(map(chr, ids))


@pytest.mark.parametrize("length", range(9))
@pytest.mark.parametrize("every", [1, 2, 3, 20])
@pytest.mark.parametrize("most", [1, 2, 3, 9])
def test_every_so_many_tokens(length: int, every: int, most: int) -> None:
    wanted = [0, *range(every, length, every)]
    if len(wanted) > most:
        wanted = [wanted[i * len(wanted) // most] for i in range(most)]
    assert cut_positions(event(every=every), [7] * length, most, letters) == wanted


@pytest.mark.parametrize("text, at, wanted", [
    ("a.b.c", ".", [0, 2, 4]),
    ("a.b.", ".", [0, 2]),  # the end is no cut
    ("....", "..", [0, 2]),  # what one occurrence used belongs to no other
    ("aab", "ab", [0]),
    ("xabyab", "ab", [0, 3]),
    ("", ".", [0]),
    ("abc", ".", [0]),
])
def test_behind_a_text(text: str, at: str, wanted: list[int]) -> None:
    assert cut_positions(event(at=at), [ord(c) for c in text], 9, letters) == wanted


def test_a_token_that_completes_a_text_in_its_middle() -> None:
    pieces = ["one", ".\n", "\nTwo", ".", "\n\n\n\n", "end"]
    assert cut_positions(event(at="\n\n"), range(6), 9, lambda ids: "".join(pieces[i] for i in ids)) == [0, 3, 5]


PIECES = ["a", "b", "\n", "\n\n", "b\n", "ab", "", "\nab", " ", "é"]  # id -> its text; "" is a special token


def joined(ids: list[int]) -> str:
    return "".join(PIECES[i] for i in ids)


@pytest.mark.parametrize("text", ["\n", "\n\n", "ab", "b\na", "é"])
@pytest.mark.parametrize("most", [1, 3, 8, 100])
def test_behind_a_text_as_a_search_of_every_position_says(text: str, most: int) -> None:
    draw = random.Random(f"{text} {most}")
    for _ in range(60):
        own = [draw.randrange(len(PIECES)) for _ in range(draw.randrange(30))]
        whole, ends, at = joined(own), [], 0
        while (at := whole.find(text, at)) >= 0:
            at += len(text)
            ends.append(at)
        # the first token with which everything up to the end of the occurrence is there
        places = {next(n for n in range(len(own) + 1) if len(joined(own[:n])) >= end) for end in ends}
        wanted = sorted({0, *(n for n in places if n < len(own))})
        if len(wanted) > most:
            wanted = [wanted[int(i * len(wanted) / most + 1e-9)] for i in range(most)]
        assert cut_positions(event(at=text), own, most, joined) == wanted


def test_fractions_of_a_short_response_fall_together() -> None:
    assert cut_positions(event(fractions=(0.25, 0.5, 0.75)), [7] * 8, 4, letters) == [0, 2, 4, 6]
    assert cut_positions(event(fractions=(0.25, 0.5, 0.75)), [7] * 2, 4, letters) == [0, 1]
