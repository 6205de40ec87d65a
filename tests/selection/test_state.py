"""State scalars: imperative order, blocks, every rank alike."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.selection.programs import folder, run, under
from tests.selection.test_selection import FEWER, GENERATE, close


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return folder(tmp_path_factory.mktemp("state"))


def test_reads_before_and_after_a_write(base: Path) -> None:
    found = run(base, GENERATE + """
  before = beta
  metric before = beta
  beta = 2 * beta + 1
  metric after = beta
  metric kept = before
  beta = beta + 0.5
  actor.train(gen, loss=pg(adv=beta, weight=1))""", top="state beta = 1", steps=3)
    assert [(m["before"], m["after"], m["kept"]) for m in found] == [(1, 3, 1), (3.5, 8, 3.5), (8.5, 18, 8.5)]


def test_blocks_write_as_often_as_they_run(base: Path) -> None:
    found = run(base, GENERATE + """
  every 2 { slow = slow + 1 }
  repeat 3 { fast = fast + slow }
  metric slow = slow
  metric fast = fast
  actor.train(gen, loss=nll())""", top="state slow = 0\nstate fast = 10", steps=4)
    assert [(m["slow"], m["fast"]) for m in found] == [(0, 10), (1, 13), (1, 16), (2, 22)]


def test_a_collecting_loop_may_end_by_a_state(base: Path) -> None:
    found = run(base, """
  tries = 0
  repeat {
    prompt = prompts.next()
    gen = actor.generate(prompt, n=2, max_new_tokens=4)
    tries = tries + 1
  } until tries >= wanted max 4
  wanted = wanted + 1
  metric n = count(len(gen))
  metric tries = tries
  actor.train(gen, loss=nll())""", top="state tries = 0\nstate wanted = 1", steps=3)
    assert [(m["n"], m["tries"]) for m in found] == [(8, 1), (16, 2), (24, 3)]


@pytest.mark.thorough
def test_running_moments_are_the_same_on_every_placement(base: Path) -> None:
    """Two states written at once from one function; read by a loss and by arithmetic on another mesh."""
    top = """
state m = 0
state v = 1
fn moments(x: any, m, v, decay = 0.5) -> (batch, batch) {
  return decay * m + (1 - decay) * mean(x), decay * v + (1 - decay) * mean(x ** 2)
}"""
    body = GENERATE + """
  q = spread(gen)
  m, v = moments(q, m, v)
  lp = actor.logprobs(gen)
  metric m = m
  metric v = v
  metric z = mean((q - m) / sqrt(v - m ** 2 + 1e-6))
  metric lp = mean(lp)
  actor.train(gen, loss=pg(adv=(q - m) / sqrt(v - m ** 2 + 1e-6), weight=v))"""
    found = under(base, body, FEWER, top=top, steps=3)
    assert found[0][0]["m"] != found[0][1]["m"] != found[0][2]["m"]
    for other in found[1:]:
        close(other, found[0], 1e-4)
