"""What `rlc check` costs on a long program: by its lines, not by their square. Counted, so load changes nothing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from examples.tiny import make_model
from rldsl import api
from tests.effort import calls

HEAD = 'data prompts = jsonl("prompts.jsonl", batch=4)\nmodel actor = causal_lm("actor") train adamw(lr=1e-6)\n'
FLOW = "flow run(steps=2) {{\n  prompt = prompts.next()\n  gen = actor.generate(prompt)\n{body}}}\n"


def chain(lines: int) -> str:
    return "".join(f"  x{i} = x{i - 1} + x{i - 1}\n" for i in range(1, lines + 1))


def in_flow(lines: int) -> str:
    return HEAD + FLOW.format(body=f"  x0 = len(gen)\n{chain(lines)}  metric x = mean(x{lines})\n")


def in_loss(lines: int) -> str:
    loss = f"loss own(logprobs: token;) {{\n  x0 = logprobs\n{chain(lines)}  return mean(x{lines})\n}}\n"
    return loss + HEAD + FLOW.format(body="  actor.train(gen, loss=own())\n")


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    make_model("actor")
    Path("prompts.jsonl").write_text('{"prompt": "1+1="}\n' * 8)


@pytest.mark.thorough
@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("program", [in_flow, in_loss])
def test_four_times_the_lines_cost_four_times_the_calls(program: Callable[[int], str]) -> None:
    def cost(lines: int) -> int:
        def work() -> None:
            assert not api.examine(program(lines), "long.rlf")
        return calls(work)

    cost(10)  # what only the first check does: imports, and reading the model
    short, long = cost(750), cost(3000)
    assert long > 3000, "nothing was checked"
    assert long < 4.4 * short, (short, long)
