"""RL0911: blocks that no step of the run reaches, against an enumeration of the steps."""

from __future__ import annotations

from collections.abc import Iterable
from random import Random
from types import SimpleNamespace
from typing import cast

import pytest

from rldsl import api
from rldsl.graph import model as g
from rldsl.graph.unreached import unreached
from rldsl.source import SourceFile, Span
from rldsl.syntax.parse import parse
from tests.lag.test_words import GEN, TRAIN, program

FILE = SourceFile("p.rlf", "x" * 1000)


def drawn(random: Random, depth: int = 0) -> tuple[g.When, ...]:
    """Some blocks, and blocks in them."""
    def block() -> g.When:
        word = random.choice(("period", "after", "first"))
        at = random.randrange(900)
        return g.When(body=drawn(random, depth + 1) if depth < 3 else (), span=Span(FILE, at, at + 1),
                      **{word: random.randint(1, 12)})

    return tuple(block() for _ in range(random.randint(0, 3)))


def never(items: Iterable[g.Item], steps: Iterable[int]) -> list[Span]:
    """The outermost blocks that run in none of the steps, in order."""
    found = []
    for item in items:
        if isinstance(item, g.When):
            runs = [i for i in steps if i % item.period == 0 and i > item.after and (not item.first or i <= item.first)]
            found += never(item.body, runs) if runs else [item.span]
    return found


@pytest.mark.parametrize("seed", range(60))
def test_every_block_that_runs_in_no_step_and_no_other(seed: int) -> None:
    random = Random(seed)
    items, steps = drawn(random), random.randint(1, 20)
    graph = cast(g.Graph, SimpleNamespace(items=items, steps=steps))
    for text, most in ((str(steps), steps), ("n", 2 * 27720)):  # the least common multiple of 1 to 12 is 27,720
        file = parse(SourceFile("p.rlf", f"flow f(steps={text}) {{ x = 1 }}"))
        found = [d.span for d in unreached(graph, [file])]
        assert found == never(items, range(1, most + 1))


# blocks of a flow of four steps -> (what is said to run never, a part of the help)
BLOCKS = {
    "after 4 {{ {} }}": [("`after 4`", "use `after 3` or less")],
    "after 3 {{ {} }}": [],
    "every 5 {{ {} }}": [("`every 5`", "use `every 4` or less")],
    "every 4 {{ {} }}": [],
    "first 1 {{ {} }}": [],
    "first 2 {{ after 2 {{ {} }} }}": [("`after 2`", "move it out of the blocks around it")],
    "first 2 {{ after 1 {{ {} }} }}": [],
    "every 3 {{ after 3 {{ {} }} }}": [("`after 3`", "move it out of the blocks around it")],
    "every 2 {{ every 3 {{ {} }} }}": [("`every 3`", "move it out of the blocks around it")],
    "after 9 {{ every 9 {{ {} }} }}": [("`after 9`", "use `after 3` or less")],
    "repeat 9 {{ after 5 {{ {} }} }}": [],
}


@pytest.mark.parametrize(("block", "codes"), [("after 4 {{ {} }}", []), ("every 50 {{ {} }}", []),
                                              ("first 2 {{ after 2 {{ {} }} }}", ["RL0911"])])
def test_a_trial_of_a_few_steps_is_not_warned(block: str, codes: list[str]) -> None:
    text = program(GEN.format(more="") + TRAIN + "  " + block.format("critic.train(gen, loss=fit(ret=len(gen)))"), "")
    text = "param turns_of = 100\n" + text.replace("steps=4", "steps=turns_of")
    found = [d for d in api.examine(text, "p.rlf", sets={"turns_of": 2}) if d.code != "RL0901"]
    assert [d.code for d in found] == codes


@pytest.mark.parametrize("block", BLOCKS)
def test_what_is_said(block: str) -> None:
    text = program(GEN.format(more="") + TRAIN + "  " + block.format("critic.train(gen, loss=fit(ret=len(gen)))"), "")
    found = [d for d in api.examine(text, "p.rlf") if d.code != "RL0901"]
    assert [d.code for d in found] == ["RL0911"] * len(BLOCKS[block])
    for d, (name, help_) in zip(found, BLOCKS[block], strict=True):
        assert d.severity == "warning" and d.title == f"{name} never runs" and help_ in d.help
