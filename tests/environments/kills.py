"""Runs with environments that die by SIGKILL while tools work, and are started again.

    python -m tests.environments.kills [--every N]

kills a run of `BODY` after every N-th turn that an environment is asked about, in one step or in all, one rank or all
ranks, and compares each with the undisturbed run, bit for bit: metrics and every checkpoint. Environments draw from
their seed and answer after a moment, so there are some at work whenever a rank dies. `make test` does less of it
(`test_killed.py`).
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
from collections.abc import Callable
from contextlib import chdir
from pathlib import Path
from typing import Any

from tests.buffers import kills
from tests.buffers.kills import Kill
from tests.checkpoint.runs import held, lines, newest
from tests.end_to_end.programs import compile_program
from tests.environments.programs import folder, source
from tests.environments.test_processes_of_runs import TEMPLATE

STEPS = 3
ENVIRONMENT = '''
import random, time
class Drawn:
    def __init__(self):
        self.extras = {}
    def init(self, prompt):
        self.random, self.heard = random.Random(str(self.extras["number"])), 0
        return prompt, {}
    def step(self, text):
        self.heard += 1
        time.sleep(0.002 + 0.01 * random.random())  # of the clock, not of the seed
        return {"observations": [{"role": "user", "content": f"{self.random.randrange(100)}?"}],
                "reward": self.random.random() + len(text) / 7, "done": self.heard == 3 + self.random.randrange(2)}
'''
BODY = """
  checkpoint every 1 keep=9
  prompt = prompts.next()
  gen = actor.generate(prompt, env=Drawn, n=2, max_turns=3, max_new_tokens=4, max_tokens=64)
  actor.train(gen, loss=pg(adv=per_token(gen.reward, gen.logprobs) + discount(gen.turn_reward, 0.5)))
  metric turns  = mean(gen.turns)
  metric reward = mean(gen.reward)
  metric lp     = mean(gen.logprobs)
"""
PLACES = {"one": "place *.* on mesh(0:1)", "dp": "place *.* on mesh(0:2) dp=2"}


def prepared(base: Path) -> Path:
    """A directory with the program, its environment, a model with a chat template, and data."""
    base = folder(base)
    config = base / "model" / "tokenizer_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"chat_template": TEMPLATE}))
    (base / "drawn.py").write_text(ENVIRONMENT)
    text = source(BODY, steps=STEPS, options=", invariant=true")
    path = text[text.index('use py "') + 8 : text.index('" (Guess')]
    (base / "p.rlf").write_text(text.replace(path, "drawn.py").replace("Guess: env", "Drawn: env"))
    return base


def compiled(base: Path, place: str) -> bytes:
    (base / place).mkdir(exist_ok=True)
    with chdir(base):
        return compile_program(base / "p.rlf", {}, PLACES[place], base / place)


def start(plan: bytes, base: Path, out: str, kill: Kill | None = None) -> bool:
    """As `tests.buffers.kills.start`; `kill.event`: the number of the turn of its step, on the last rank."""
    before: Callable[..., None] = kills._rank
    kills._rank = _rank
    try:
        return kills.start(plan, base, out, kill)
    finally:
        kills._rank = before


def _rank(rank: int, plan: bytes, base: str, out: str, kill: Kill | None, like: str) -> None:
    from rldsl.runtime.environments.processes import EnvironmentProcesses
    from rldsl.runtime.interpreter.interpreter import Interpreter, execute
    from rldsl.runtime.interpreter.options import Options
    from rldsl.runtime.metrics.run_record import claim_output
    from rldsl.runtime.plan_file import PlanFile

    os.chdir(base)
    last = rank == int(os.environ["WORLD_SIZE"]) - 1

    def run(interpreter: Interpreter) -> None:
        if kill is not None and last:
            _die_at(interpreter, EnvironmentProcesses, kill)
        interpreter.run()

    claimed = claim_output(Path(out), None, again=True)
    execute(PlanFile.from_bytes(plan, "test.plan"), out, run=run,
            options=Options(resume=claimed.resume, continues=claimed.continues))


def _die_at(interpreter: Any, processes: Any, kill: Kill) -> None:
    """The rank sends itself SIGKILL when an environment has just got a turn of the model, and works on it."""
    real, turns = processes.said, 0

    def said(self: Any, *arguments: Any) -> None:
        nonlocal turns
        real(self, *arguments)
        if interpreter.state.step.number == kill.step:
            if turns == kill.event:
                os.kill(os.getpid(), signal.SIGKILL)
            turns += 1

    processes.said = said


def survive(base: Path, out: str, plan: bytes, deaths: list[Kill]) -> None:
    """A run that dies and is started again until it ends."""
    for kill in deaths:
        assert start(plan, base, out, kill), f"the run was over before {kill}"
        assert newest(base / out) == kill.step - 1, "it did not die in this step"
    start(plan, base, out)


def differences(base: Path, mine: str, theirs: str) -> list[str]:
    """What is not equal bit for bit in two runs: metrics, and weights and optimizer states after each step."""
    wrong = [] if lines(base / mine) == lines(base / theirs) else ["metrics"]
    for step in range(1, STEPS + 1):
        a, b = (held(base / out / f"checkpoints/step-{step:06d}") for out in (mine, theirs))
        wrong += [f"step {step}: {key}" for key in a.keys() | b.keys()
                  if key not in a or key not in b or not a[key].equal(b[key])]
    return wrong


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--every", type=int, default=1, metavar="N", help="of the turns of a step, each N-th")
    given = parser.parse_args()
    wrong, deaths = list[str](), 0
    with tempfile.TemporaryDirectory() as place:
        base = prepared(Path(place))
        for name in PLACES:
            plan = compiled(base, name)
            start(plan, base, f"{name}-whole")
            turns = {"one": 24, "dp": 12}[name]  # of the last rank in a step: 8 conversations of 3 turns
            for turn in range(0, turns, given.every):
                for scope in kills.SCOPES:
                    chain = [Kill(step, turn, scope) for step in range(1, STEPS + 1)]
                    out = f"{name}-{turn}-{scope}"
                    survive(base, out, plan, chain)
                    deaths += len(chain)
                    wrong += (found := differences(base, out, f"{name}-whole"))
                    print(f"{name}, turn {turn} of each step, {scope}: {found or 'equal bit for bit'}", flush=True)
    print(f"{deaths} deaths: " + (f"{len(wrong)} DIFFERENCES" if wrong else "no difference"))
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
