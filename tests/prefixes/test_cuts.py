"""Where a response is cut, against a search of every position."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rldsl.plan.expr import Node
from rldsl.plan.model import Frame, Space
from rldsl.plan.spaces import indexed
from rldsl.runtime.interpreter.cut_positions import cuts
from rldsl.runtime.interpreter.expression_ops import FrameRows, RaggedIndex, evaluate

PIECES = ["a", "b", "\n", "\n\n", "b\n", "ab", "", "\nab", " ", "é"]  # id -> its text; "" is a special token


def decode(ids: list[int], skip_special_tokens: bool) -> str:
    assert skip_special_tokens
    return "".join(PIECES[i] for i in ids)


def event(at: str = "", every: int = 0, fractions: tuple[float, ...] = ()) -> Any:
    return SimpleNamespace(cut_at=at, cut_every=every, cut_fractions=fractions)


def thinned(places: list[int], most: int) -> list[int]:
    """Those that stay, with rational arithmetic in place of the formula's integers."""
    return places if len(places) <= most else [places[int(i * len(places) / most + 1e-9)] for i in range(most)]


@pytest.mark.parametrize("text", ["\n", "\n\n", "ab", "b\na", "é"])
@pytest.mark.parametrize("most", [1, 3, 8, 100])
def test_behind_a_text(text: str, most: int) -> None:
    draw = random.Random(f"{text} {most}")
    for _ in range(60):
        own = [draw.randrange(len(PIECES)) for _ in range(draw.randrange(30))]
        whole, ends, at = decode(own, skip_special_tokens=True), [], 0
        while (at := whole.find(text, at)) >= 0:
            at += len(text)
            ends.append(at)
        # the first token with which everything up to the end of the occurrence is there
        places = {next(n for n in range(len(own) + 1) if len(decode(own[:n], skip_special_tokens=True)) >= end)
                  for end in ends}
        wanted = sorted({0, *(n for n in places if n < len(own))})
        assert cuts(event(at=text), own, decode, most) == thinned(wanted, most)


@pytest.mark.parametrize(("length", "every", "wanted"), [
    (0, 3, [0]), (1, 3, [0]), (3, 3, [0]), (4, 3, [0, 3]), (10, 3, [0, 3, 6, 9]), (2, 1, [0, 1]),
])
def test_every_so_many_tokens(length: int, every: int, wanted: list[int]) -> None:
    assert cuts(event(every=every), [0] * length, decode, 8) == wanted


@pytest.mark.parametrize(("length", "fractions", "wanted"), [
    (10, (0.25, 0.5), [0, 2, 5]), (1, (0.5,), [0]), (0, (0.5,), [0]), (4, (0.1, 0.2, 0.99), [0, 3]),
])
def test_fractions(length: int, fractions: tuple[float, ...], wanted: list[int]) -> None:
    assert cuts(event(fractions=fractions), [0] * length, decode, 8) == wanted


def test_those_that_stay_are_spread_evenly() -> None:
    assert cuts(event(every=1), [0] * 10, decode, 4) == [0, 2, 5, 7]


# ---------------------------------------------------------------------------------------------------- along


def test_values_of_cuts_lie_on_the_tokens_behind_them() -> None:
    """Rows of `gen` at hand: 1, 2, 4, with 5, 0 and 3 tokens; cuts of three per row, the absent ones left out."""
    tree = {s.id: s for s in (Space("gen", 6), Space("cuts", 18, "gen", 3))}
    kind = {"data": "d", "max_prompt_tokens": 4, "max_response_tokens": 8}
    frames = {name: indexed(Frame(name, name, **kind), tree) for name in ("gen", "cuts")}
    ragged = RaggedIndex({
        "gen": FrameRows(torch.tensor([1, 2, 4]), torch.tensor([1, 2, 4]), torch.tensor([5, 0, 3])),
        "cuts": FrameRows(torch.tensor([3, 4, 6, 12, 13, 14]), torch.tensor([1, 1, 2, 4, 4, 4]), torch.zeros(6).long()),
    }, frames)
    inner = [Node("input", (), "seq", "cuts", (("name", n),)) for n in ("v", "at")]
    node = Node("along", (0, 1), "token", "gen", (("frame", "gen"),))
    values, at = torch.tensor([10.0, 20, 30, 40, 50, 60]), torch.tensor([0.0, 2, 0, 0, 1, 2])
    got = evaluate(node, inner, [values, at], ragged, torch.float32)
    assert got.tolist() == [10, 10, 20, 20, 20, 40, 50, 60]
    # a row whose first cut is missing gets 0 there, and never a value of another row
    got = evaluate(node, inner, [values, torch.tensor([1.0, 2, 0, 1, 1, 2])], ragged, torch.float32)
    assert got.tolist() == [0, 10, 20, 20, 20, 0, 50, 60]
