"""Runs that die by SIGKILL at a stated event of a stated step, one rank or all of them, and are started again.

    python -m tests.buffers.kills [--every N] [--lag K] [--per-step]

kills a run of `BODY` in every step and at every event of a step, once a rank and once all ranks, and compares each with
the undisturbed run, bit for bit; and once in every step, to start it again under another placement. `make test` does
less of it (`test_killed.py`).
"""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, chdir, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from rldsl.plan.codec import decode
from rldsl.plan.events import Event
from rldsl.plan.projection import event_paths
from tests.checkpoint.runs import held, lines, newest
from tests.end_to_end.programs import compile_program
from tests.papers.matrix import joined
from tests.papers.programs import RECORDER
from tests.selection.programs import HEAD, HERE, folder
from tests.world import _enter, context

Scope = Literal["rank", "all"]
SCOPES: tuple[Scope, ...] = ("rank", "all")
STEPS = 5
PLACES = {
    "one": "place *.* on mesh(0:1)",
    "two": "place *.generate on mesh(0:2) dp=2\nplace @now on mesh(0:2) tp=2\nplace actor.train on mesh(0:2) pp=2",
    "tp": "place *.* on mesh(0:2) tp=2",
    "zero": "place *.* on mesh(0:2) dp=2\nplace actor.train on mesh(0:2) dp=2 zero=2",
}
TOP = """
buffer good = rows(capacity=8)
state rate of prompts = 0.5
state heat = 2
"""
BODY = """
  checkpoint every 1 keep=9
  old    = good.sample(4, weight=good.value)
  prompt = prompts.next(weight=1.5 - prompts.rate)
  gen    = actor.generate(prompt, n=3, max_new_tokens=4)
  more   = actor.generate(gen, n=2, max_new_tokens=3)
  v      = mean(spread(more) by prompt)
  prompt.rate = 0.5 * prompt.rate + 0.5 * mean(parity(gen) by prompt)
  scored = gen with value=0.01 + 0.5 * v + 0.2 * uniform(v), was=gen.logprobs
  kept   = scored where scored.value > 0.25
  good.add(kept)
  duel   = pair(pick(scored, scored.value), pick(scored, -scored.value))
  now    = actor.logprobs(old)
  actor.train(duel.chosen, duel.rejected, loss=margin())
  actor.train(old, loss=pg(adv=old.value, weight=1.0), minibatches=2)
  heat = 0.9 * heat
  metric drawn = sum(old.value)
  metric moved = mean(now - old.was)
  metric rate  = mean(prompt.rate) * heat
"""


# responses continue in later steps; then nothing can be kept for the prompts of one step
PER_STEP = {
    "prompts.next(weight=1.5 - prompts.rate)": "prompts.next()",
    "n=3, max_new_tokens=4": "n=3, max_new_tokens=5, per_step=2",
    "  prompt.rate = 0.5 * prompt.rate + 0.5 * mean(parity(gen) by prompt)\n": "",
    "mean(prompt.rate) * heat": "mean(gen.version) * heat",
}


@dataclass(frozen=True)
class Kill:
    """A death. scope: "rank": of the last rank, with which the others lose contact. event: how many events of the step
    the last rank has begun when it dies; when it is not reached, it dies while the checkpoint is being written."""

    step: int
    event: int
    scope: Scope


def prepared(base: Path, lag: int = 0, per_step: bool = False) -> Path:
    """A directory with the program, a model and data; the Python functions write down each row."""
    base, body, top = folder(base), BODY, TOP
    for old, new in PER_STEP.items() if per_step else ():
        assert old in body, old
        body, top = body.replace(old, new), top.replace("state rate of prompts = 0.5\n", "")
    (base / "noted.py").write_text((HERE / "rewards_sel.py").read_text() + RECORDER)
    head = "\n".join(line for line in HEAD.format(rewards="noted.py", batch=3).splitlines()
                     if not line.startswith(("data answers", "data pairs"))).replace(", shuffle=false", "")
    (base / "p.rlf").write_text(f"{head}\n{top}\nflow f(steps={STEPS}, seed=3, lag={lag}) {{\n{body}\n}}\n")
    return base


def compiled(base: Path, place: str) -> bytes:
    (base / place).mkdir(exist_ok=True)
    with chdir(base):
        return compile_program(base / "p.rlf", {}, PLACES[place], base / place)


def start(plan: bytes, base: Path, out: str, kill: Kill | None = None, like: str = "") -> bool:
    """Start all ranks, from the newest checkpoint in `out` if there is one. Whether the kill happened; else the run has
    come to its end. like: the `out` of the run whose responses it gets too."""
    world, ctx = json.loads(plan.splitlines()[0])["world"], context()
    with tempfile.TemporaryDirectory() as place:
        ours, theirs = ctx.Pipe(duplex=False)
        arguments = (plan, str(base), out, kill, like)
        ranks = [ctx.Process(target=_enter, args=(r, world, f"{place}/store", theirs, _rank, arguments), daemon=True)
                 for r in range(world)]
        for process in ranks:
            process.start()
        end = time.monotonic() + 120
        if kill is None:
            for _ in ranks:
                assert ours.poll(max(end - time.monotonic(), 0)), "no end"
                ok, text = ours.recv()
                assert ok, text
        ranks[-1].join(max(end - time.monotonic(), 0))
        for process in ranks[:-1]:
            if kill is not None and kill.scope == "rank":  # as torchrun ends the others
                process.join(0.2)
                process.terminate()
            elif kill is not None:
                process.kill()
            process.join(30)
        died = ranks[-1].exitcode == -signal.SIGKILL
        for process in ranks:
            process.kill()
            process.join()
        ours.close()
        theirs.close()
        return died


def _rank(rank: int, plan: bytes, base: str, out: str, kill: Kill | None, like: str) -> None:
    from rldsl.runtime.interpreter.interpreter import Interpreter, execute
    from rldsl.runtime.interpreter.options import Options
    from rldsl.runtime.metrics.run_record import claim_output
    from rldsl.runtime.plan_file import PlanFile
    from tests.responses import followed, recorded

    os.chdir(base)
    os.environ["SEEN"] = f"{base}/{out}-seen.{rank}.jsonl"
    last = rank == int(os.environ["WORLD_SIZE"]) - 1
    responses: AbstractContextManager[None] = nullcontext()
    if kill is None and not like:
        responses = recorded(Path(base, f"{out}-responses"))
    elif like:
        responses = followed(Path(base, f"{like}-responses"))

    def run(interpreter: Interpreter) -> None:
        if kill is not None and last:
            _die_at(interpreter, kill)
        interpreter.run()

    with responses:
        claimed = claim_output(Path(out), None, again=True)
        execute(PlanFile.from_bytes(plan, "test.plan"), out, run=run,
                options=Options(resume=claimed.resume, continues=claimed.continues))


def _die_at(interpreter: Any, kill: Kill) -> None:
    """The rank sends itself SIGKILL as it begins an event, or after the last one of the step."""
    real, begun = interpreter.run_event, 0

    def run_event(event: Event) -> None:
        nonlocal begun
        if interpreter.state.step.number == kill.step:
            if begun == kill.event:
                os.kill(os.getpid(), signal.SIGKILL)
            begun += 1
        real(event)
        if type(event).__name__ == "Checkpoint" and interpreter.state.step.number == kill.step:
            os.kill(os.getpid(), signal.SIGKILL)  # while the checkpoint is being written

    interpreter.run_event = run_event


def num_events(plan: bytes) -> int:
    """Events of a step of the last rank."""
    made = decode(plan, "test.plan")
    meshes = {m.id: m.members() for m in made.meshes}
    return sum(made.header.world - 1 in meshes[e.mesh] for e, path in event_paths(made) if path)


def survive(base: Path, out: str, plans: Sequence[bytes], kills: Iterable[Kill], like: str = "") -> int:
    """A run that dies and is started again, with one plan after the other, until it ends. The number of deaths."""
    deaths = 0
    for kill in kills:
        died = start(plans[deaths % len(plans)], base, out, kill, like)
        assert died, f"the run was over before {kill}"
        assert newest(base / out) in (kill.step - 2, kill.step - 1, kill.step), "it did not die in this step"
        deaths += 1
    start(plans[deaths % len(plans)], base, out, None, like)
    return deaths


def seen(base: Path, out: str) -> set[str]:
    """What the Python functions got and gave. A step that is repeated gives it again."""
    return {line for file in base.glob(f"{out}-seen.*.jsonl") for line in file.read_text().splitlines()}


def checkpoints(base: Path, out: str, steps: int = STEPS) -> dict[int, dict[str, torch.Tensor]]:
    return {step: held(base / out / f"checkpoints/step-{step:06d}") for step in range(1, steps + 1)}


def differences(base: Path, mine: str, theirs: str) -> list[str]:
    """What is not equal bit for bit in two runs of one placement: metrics, rows with their tokens, checkpoints."""
    wrong = [] if lines(base / mine) == lines(base / theirs) else ["metrics"]
    wrong += [] if seen(base, mine) == seen(base, theirs) else ["rows seen"]
    for step, (a, b) in enumerate(zip(*(checkpoints(base, x).values() for x in (mine, theirs)), strict=True), 1):
        wrong += [f"step {step}: {key}" for key in a.keys() | b.keys()
                  if key not in a or key not in b or not a[key].equal(b[key])]
    return wrong


def in_every_step(events: int, scopes: Sequence[Scope]) -> list[Kill]:
    """Each step at another place; in the last one all events are over, but the checkpoint is not. events: of a step."""
    return [Kill(step, (step - 1) * events // (STEPS - 1), scopes[step % len(scopes)]) for step in range(1, STEPS + 1)]


def rows_of(base: Path, out: str, step: int) -> dict[str, torch.Tensor]:
    """The buffer and the states of rows after a step."""
    return joined(checkpoints(base, out)[step])


def rounded_differences(base: Path, mine: str, theirs: str) -> list[str]:
    """What is not equal in two runs of two placements: rows with their tokens exactly, metrics, the values that are
    kept with rows, and states within rounding."""
    wrong = [] if seen(base, mine) == seen(base, theirs) else ["rows seen"]
    wrong += [f"step {a['step']}: {key} is {a.get(key)} and {b.get(key)}"
              for a, b in zip(lines(base / mine), lines(base / theirs), strict=True) for key in a | b
              if not math.isclose(a.get(key, math.inf), b.get(key, math.inf), rel_tol=2e-4, abs_tol=2e-5)]
    for step in range(1, STEPS + 1):
        a, b = rows_of(base, mine, step), rows_of(base, theirs, step)
        wrong += [f"step {step}: {key}" for key in a.keys() | b.keys()
                  if key not in a or key not in b or a[key].shape != b[key].shape
                  or not torch.allclose(a[key], b[key], rtol=1e-4)]
    return wrong


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--every", type=int, default=1, metavar="N", help="of the events of step 3, each N-th")
    parser.add_argument("--lag", type=int, default=0, metavar="K", help="of the flow: generation runs K steps ahead")
    parser.add_argument("--per-step", action="store_true", help="responses continue in later steps")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        base = prepared(Path(place), given.lag, given.per_step)
        plan = compiled(base, "two")
        start(plan, base, "whole")
        wrong, deaths, count = list[str](), 0, num_events(plan)
        chains: dict[str, list[Kill]] = {}
        for scope in SCOPES:
            chains[f"{scope} in every step"] = in_every_step(count, [scope])
            for i in range(0, count + 1, given.every):
                chains[f"{scope} at event {i} of {count}"] = [Kill(3, i, scope)]
        for name, kills in chains.items():
            deaths += survive(base, name, [plan], kills)
            wrong += (found := differences(base, name, "whole"))
            print(f"{name}: {found or 'equal bit for bit'}", flush=True)
        plans = [compiled(base, place) for place in PLACES]
        deaths += survive(base, "moved", plans, in_every_step(9, ["all"]), like="whole")
        wrong += (found := rounded_differences(base, "moved", "whole"))
        print(f"in every step, resumed under another placement: {found or 'equal within rounding'}")
    print(f"{deaths} deaths: " + (f"{len(wrong)} DIFFERENCES" if wrong else "no difference"))
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
