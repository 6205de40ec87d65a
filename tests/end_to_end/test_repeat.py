"""`repeat` and `every`: new rows and new samples in each turn, the same on every placement."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.end_to_end.programs import Metrics, run_program
from tests.tiny import make_all

PROGRAM = """
use std.ppo (ppo_clip)
data prompts = jsonl("data/prompts.jsonl", batch=4, max_prompt_tokens=16)
model actor = causal_lm("models/sft") train adamw(lr=1e-3)
flow turns(steps=2, seed=3) {{
  repeat 2 {{
    prompt = prompts.next()
    gen    = actor.generate(prompt, n=2, max_new_tokens=5)                 on mesh(0:{ranks}) dp={ranks}
    r      = len(gen) + sum(gen.logprobs by seq)
    actor.train(gen, loss=ppo_clip(old=gen.logprobs, adv=r))               on mesh(0:{ranks}) tp={ranks}
    metric r = mean(r)
  }}
  every 2 {{ save actor }}
}}
"""


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    make_all(folder, num_hidden_layers=2)
    return folder


@pytest.fixture(scope="module")
def logged(tiny: Path) -> dict[int, Metrics]:
    """The metrics of a run on one rank, and of one on two."""
    with pytest.MonkeyPatch.context() as here:
        here.chdir(tiny)
        one = run_turns(tiny, 1)
        return {1: one, 2: run_turns(tiny, 2, one)}


def run_turns(tiny: Path, ranks: int, like: Metrics | None = None) -> Metrics:
    program = tiny / f"turns-{ranks}.rlf"
    program.write_text(PROGRAM.format(ranks=ranks))
    return run_program(program, {}, tiny / f"run-{ranks}", like=like)


@pytest.mark.parametrize("ranks", [1, 2])
def test_each_turn_has_rows_and_samples_of_its_own(logged: dict[int, Metrics], ranks: int) -> None:
    lines = logged[ranks]
    assert len({line["r"] for line in lines}) == len(lines) >= 2


@pytest.mark.parametrize("ranks", [1, 2])
def test_every_counts_steps(tiny: Path, logged: dict[int, Metrics], ranks: int) -> None:
    saved = {p.parent.name for p in (tiny / f"run-{ranks}/out").glob("step-*/actor")}
    assert saved == {"step-2"}
    assert (tiny / f"run-{ranks}/out/step-2/actor/config.json").is_file()


def test_two_ranks_log_what_one_does(logged: dict[int, Metrics]) -> None:
    one, two = ([line["r"] for line in logged[ranks]] for ranks in (1, 2))
    assert two == pytest.approx(one, rel=1e-4)
    assert two != pytest.approx(one[1:] + one[:1], rel=1e-4), "the comparison can fail"
