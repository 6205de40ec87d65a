"""What a user waits for before anything happens, on a tiny model: the whole command, from Enter.

    python -m benchmarks.start [TIMES]

compile: `rlc compile` of a GRPO program with every cache empty (neither the tables of the grammar nor the description
of the model are kept; gate 4 s), with the description alone missing (gate 4 s), and with all that an earlier start kept
(gate 1 s). run: `rlc run` of the same program until the line of its first step, on one rank and on two (gate 7 s); all
is kept. It prints the seconds of CPU, user and system, of the command and of all processes that it started, and those
of the wall clock: the least of TIMES (5). The gates are for the wall clock of an idle machine.
"""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tests.cpu import seconds
from tests.tiny import make_all

COLD, WARM, FIRST_STEP = 4.0, 1.0, 7.0  # gates, seconds of the wall clock
REWARD = 'def digits(rows):\n    return [sum(c.isdigit() for c in r["completion"]) / 8 for r in rows]\n'
PROGRAM = """use std.grpo (group_norm, grpo)
use py "reward.py" (digits: gen -> seq)

data sums = jsonl("data/prompts.jsonl", batch=16 prompts, max_prompt_tokens=8)

model actor = causal_lm("models/base") train adamw(lr=3e-3)
model ref   = causal_lm("models/base")

flow answer(steps=2, seed=1) {
  prompt = sums.next()
  gen    = actor.generate(prompt, n=8, max_new_tokens=8)
  ref_lp = ref.logprobs(gen)
  reward = digits(gen)
  metric reward = mean(reward)
  actor.train(gen, loss=grpo(old=gen.logprobs, adv=group_norm(reward), ref=ref_lp, beta=0.001), minibatches=2)
}
"""
TWO = "place * on mesh(0:2) dp=2\n"


@dataclass(frozen=True, slots=True)
class Wait:
    """Seconds of one command."""

    cpu: float  # user and system, of the whole tree of processes
    wall: float


def command(folder: Path, cache: Path, *arguments: str) -> subprocess.Popen[str]:
    """`rlc` as a user types it."""
    return subprocess.Popen([sys.executable, "-c", "from rldsl.rlc import main; main()", *arguments], cwd=folder,
                            env=os.environ | {"RLDSL_CACHE": str(cache)}, stdout=subprocess.PIPE,
                            stderr=subprocess.STDOUT, text=True)


def to_the_end(folder: Path, cache: Path, *arguments: str) -> Wait:
    """Errors: RuntimeError when the command fails."""
    before, begin = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    process = command(folder, cache, *arguments)
    said = process.communicate()[0]
    wall, after = time.perf_counter() - begin, resource.getrusage(resource.RUSAGE_CHILDREN)
    if process.returncode:
        raise RuntimeError(said)
    return Wait(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, wall)


def to_the_first_step(folder: Path, cache: Path, *arguments: str) -> Wait:
    """Until the line of the first step is there. Errors: RuntimeError when the command ends without it."""
    begin = time.perf_counter()
    process, said = command(folder, cache, *arguments), ""
    for line in process.stdout or ():
        said += line
        if line.startswith("step 1/"):
            found = Wait(seconds(process.pid), time.perf_counter() - begin)
            process.communicate()
            return found
    raise RuntimeError(said)


def kept(cache: Path, *patterns: str) -> None:
    """Remove what the patterns match of the cache."""
    for pattern in patterns:
        for found in cache.glob(pattern):
            shutil.rmtree(found) if found.is_dir() else found.unlink()


def report(name: str, gate: float, times: int, once: Callable[[], Wait]) -> None:
    """Print the least of each."""
    found = [once() for _ in range(times)]
    cpu, wall = min(w.cpu for w in found), min(w.wall for w in found)
    print(f"{name:<44} {cpu:6.2f} s CPU {wall:6.2f} s wall   gate {gate:.0f} s: {'yes' if wall <= gate else 'no'}",
          flush=True)


def main() -> None:
    times = int(sys.argv[1]) if len(sys.argv) > 1 else 5
    with tempfile.TemporaryDirectory() as name:
        folder, cache = Path(name), Path(name) / "cache"
        make_all(folder)
        (folder / "reward.py").write_text(REWARD)
        (folder / "p.rlf").write_text(PROGRAM)
        (folder / "two.place").write_text(TWO)

        def compiling(*gone: str) -> Callable[[], Wait]:
            def once() -> Wait:
                kept(cache, *gone)
                return to_the_end(folder, cache, "compile", "p.rlf")
            return once

        report("rlc compile, nothing kept", COLD, times, compiling("*"))
        report("rlc compile, no description of the model", COLD, times, compiling("models"))
        report("rlc compile, all kept", WARM, times, compiling())
        for ranks, place in ((1, ()), (2, ("--place", "two.place"))):
            def running(place: tuple[str, ...] = place) -> Wait:
                return to_the_first_step(folder, cache, "run", "p.rlf", *place, "--plain", "--out", "out",
                                         "--overwrite")

            running()
            report(f"rlc run until its first step, ranks: {ranks}", FIRST_STEP, times, running)
        print(f"load of the machine: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")


if __name__ == "__main__":
    main()
