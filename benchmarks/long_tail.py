"""What `per_step` saves where a few responses are much longer than the others: idle slots and decoding time.

    python -m benchmarks.long_tail [STEPS [ROUNDS]]

Whole runs of a random model on one rank, whose responses end with the same probability at each token, so that their
lengths fall off exponentially: one with responses of up to MOST tokens in one step, one with `per_step`. Both begin the
same number of responses in each step. Of the steps in which the longest responses end, printed for both: tokens that a
step samples, decoding steps, the share of idle slots (a slot is idle from the end of its response to that of the
longest), CPU seconds of `generate`, and CPU seconds for 1,000 tokens of responses that are trained on. Next to them the
bound, which has no idle slots: the time of a step with `per_step` times its busy share; and what `rlc sim` predicts.
The two run in turns, and a time is the median over the steps of all rounds, so another load of the machine concerns
both. Then the share of idle slots for a lognormal distribution, drawn. Gate: fewer idle slots, in both. Time is no
gate: on a CPU a decoding step costs about in proportion to its rows, so idle slots cost little there.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass, replace
from itertools import pairwise
from math import log
from pathlib import Path
from random import Random
from statistics import median

from tests.tiny import make_model, make_sums, write_jsonl

PROMPTS, N, MOST, PER_STEP = 24, 4, 512, 64
DRAWN = 3200.0, 16384, 1.0  # tokens on average and at most, standard deviation of the logarithm
PROGRAM = '''use std.grpo (group_norm, grpo_free)
use py "reward.py" (noted: gen -> seq)
cluster nodes=1 gpus=1
data prompts = jsonl("prompts.jsonl", batch={prompts}, max_prompt_tokens=16)
model actor = causal_lm("model") train adamw(lr=0)
flow run(steps={steps}, seed=3) {{
  prompt = prompts.next()
  gen    = actor.generate(prompt, n={n}, max_new_tokens={most}, per_step={per_step})
  r      = noted(gen)
  actor.train(gen, loss=grpo_free(old=gen.logprobs, adv=group_norm(r)))
  metric rows_of_step = count(r)
}}
'''
REWARD = '''def noted(rows):
    with open("lengths.txt", "a") as file:
        file.writelines(f"{len(row['completion_ids'])}\\n" for row in rows)
    return [float(len(row["completion_ids"])) for row in rows]
'''


@dataclass(frozen=True)
class Result:
    """Of a steady step, means."""

    sampled: float  # tokens
    rounds: float  # decoding steps
    idle: float  # share of the slots
    seconds: float  # CPU seconds of `generate`
    trained: float  # tokens that are trained on

    @property
    def thousand(self) -> float:
        """CPU seconds of `generate` for 1,000 tokens that are trained on."""
        return 1000 * self.seconds / self.trained


def run(folder: Path, steps: int, per_step: int) -> tuple[Result, float, list[float]]:
    """What was measured, the mean length of a response, and CPU seconds of `generate` in each steady step."""
    (folder / "reward.py").write_text(REWARD)
    (folder / "lengths.txt").write_text("")
    (folder / "p.rlf").write_text(PROGRAM.format(prompts=PROMPTS, n=N, most=MOST, per_step=per_step, steps=steps))
    done = subprocess.run([sys.executable, "-c", "from rldsl.rlc import main; main()", "run", "p.rlf", "--out", "out",
                           "--overwrite", "--plain", "--trace", "trace.json"], cwd=folder, capture_output=True, text=True,
                          env={**os.environ, "OMP_NUM_THREADS": "1"})
    if done.returncode:
        sys.exit(done.stderr[-3000:])
    lines = [json.loads(x) for x in (folder / "out/metrics.jsonl").read_text().splitlines()]
    lengths = [int(x) for x in (folder / "lengths.txt").read_text().split()]
    first = -(-MOST // per_step)  # from here on the longest responses end
    before = sum(int(x["rows_of_step"]) for x in lines[:first])
    steady = lines[first:]
    spans = json.loads((folder / "trace.json").read_text())["traceEvents"]
    seconds = [x["args"]["busy"] for x in spans if x["name"].endswith("generate") and x["args"]["step"] > first]
    slots = [occupied(lengths, per_step, PROMPTS * N)] if per_step < MOST else [
        occupied(lengths[i:i + PROMPTS * N], MOST, PROMPTS * N) for i in range(before, len(lengths), PROMPTS * N)]
    sampled, rounds, places = (sum(x) / len(slots) for x in zip(*slots, strict=True))
    trained = sum(lengths[before:]) / len(steady)
    return (Result(sampled, rounds, 1 - sampled / places, median(seconds), trained), sum(lengths) / len(lengths),
            seconds)


def in_turns(folder: Path, steps: int, rounds: int) -> tuple[Result, Result, float]:
    """Without and with `per_step`, and the mean length of a response."""
    found: dict[int, list[tuple[Result, float, list[float]]]] = {MOST: [], PER_STEP: []}
    for _ in range(rounds):
        for per_step, results in found.items():
            results.append(run(folder, steps, per_step))
    whole, cut = (replace(x[0][0], seconds=median(s for _, _, seconds in x for s in seconds)) for x in found.values())
    return whole, cut, found[MOST][0][1]


def occupied(lengths: list[int], per_step: int, begun: int) -> tuple[float, float, float]:
    """(tokens, decoding steps, slots x decoding steps) of a step in which `begun` responses begin. With `per_step`
    below the longest, of a step that has responses of every age, in the proportion of all lengths."""
    share = begun / len(lengths)
    ages = range(-(-max(lengths) // per_step))
    parts = [min(n - age * per_step, per_step) for age in ages for n in lengths if n > age * per_step]
    return sum(parts) * share, max(parts), len(parts) * share * max(parts)


def predicted(folder: Path, per_step: int, mean: float, longest: int) -> float:
    """Seconds of `generate` in `rlc sim`, on a GPU's cluster file: only ratios of these mean anything here."""
    (folder / "p.rlf").write_text(PROGRAM.format(prompts=PROMPTS, n=N, most=MOST, per_step=per_step, steps=100))
    done = subprocess.run([sys.executable, "-c", "from rldsl.rlc import main; main()", "sim", "p.rlf", "--cluster",
                           "h100x8", "--response-tokens", f"{mean:.0f}", "--longest", str(longest), "--json"],
                          cwd=folder, capture_output=True, text=True)
    if done.returncode:
        sys.exit(done.stderr[-2000:])
    return float(next(c["seconds"] for c in json.loads(done.stdout)["calls"] if c["call"].endswith("generate")))


def drawn(mean: float, most: int, spread: float, count: int = 20_000) -> list[int]:
    """Lengths of a lognormal distribution cut at `most`, as `docs/published.md` has them."""
    random, middle = Random(1), log(mean) - spread ** 2 / 2
    return [min(most, max(1, round(random.lognormvariate(middle, spread)))) for _ in range(count)]


def simulated(begun: int = 512) -> list[tuple[int, float, float]]:
    """(per_step, decoding steps of a step, idle share) of DRAWN lengths, when `begun` responses begin in a step."""
    lengths = drawn(*DRAWN)
    whole = [lengths[i:i + begun] for i in range(0, len(lengths) - begun + 1, begun)]
    found = []
    for per_step in (DRAWN[1], DRAWN[1] // 2, DRAWN[1] // 4, DRAWN[1] // 8, DRAWN[1] // 16):
        slots = [occupied(x, per_step, begun) for x in whole] if per_step == DRAWN[1] else [
            occupied(lengths, per_step, begun)]
        sampled, rounds, places = (sum(x) / len(slots) for x in zip(*slots, strict=True))
        found.append((per_step, rounds, 1 - sampled / places))
    return found


def main() -> None:
    steps, rounds = (*map(int, sys.argv[1:]), *(16, 3)[len(sys.argv) - 1:])
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_model(folder / "model", hidden_size=96, intermediate_size=192, num_hidden_layers=4, scale=0.02,
                   max_position_embeddings=1024)
        write_jsonl(folder / "prompts.jsonl", make_sums(2000))
        whole, cut, mean = in_turns(folder, steps, rounds)
        print(f"{PROMPTS} x {N} responses begin in a step, of {mean:.0f} tokens on average, of up to {MOST}")
        for what, x in (("in one step", whole), (f"per_step={PER_STEP}", cut)):
            print(f"{what:14} {x.sampled:7.0f} tokens in {x.rounds:5.0f} decoding steps   idle slots {x.idle:5.1%}   "
                  f"generate {x.seconds:6.3f} CPU s   {x.thousand:6.3f} CPU s for 1,000 tokens")
        print(f"bound without idle slots: {cut.thousand * (1 - cut.idle):.3f} CPU s for 1,000 tokens")
        longest = round(whole.rounds)
        ratio = predicted(folder, MOST, mean, longest) / predicted(folder, PER_STEP, mean, longest)
        print(f"a step of generation is {whole.seconds / cut.seconds:.2f} times shorter; rlc sim says {ratio:.2f} (on h100x8)")
        lengths = drawn(*DRAWN)
        print(f"\n512 responses begin in a step, of {sum(lengths) / len(lengths):.0f} tokens on average, of up to "
              f"{DRAWN[1]}, lognormal with a spread of {DRAWN[2]:g}")
        shares = simulated()
        for per_step, decoding, idle in shares:
            print(f"per_step={per_step:<6} {decoding:6.0f} decoding steps   idle slots {idle:5.1%}")
        held = cut.idle < whole.idle and all(a[2] > b[2] for a, b in pairwise(shares))
        print("gate: held" if held else "gate: FAILED")
        sys.exit(not held)


if __name__ == "__main__":
    main()
