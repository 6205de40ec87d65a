"""Each phase of a step as a fraction of the least time that this machine could take for it.

    python -m benchmarks.bound [--seed S] [--shapes N] [--turns N] [--step] [--peer PYTHON]
    python -m benchmarks.bound --model DIR [--prompts N] [--n N] [--prompt TOKENS] [--tokens TOKENS] [--step]

Shapes are drawn by seed (`bound_shapes.py`), or one is given with a model directory without experts. For each, one
process with one thread measures the rate of matrix products at the very shapes of its phases, all layers' weights in
turn, and the bandwidth of memory, and from these the least times (`bound_least.py`), before and after it has run the
phases (`bound_sides.py`) as rldsl and as transformers run them, in turns. Fractions are least time / time, of the least
CPU times of all turns, so that what else runs on the machine meets both sides of a fraction. transformers samples other
tokens, so its least time of decoding is scaled by their number.

--step: whole GRPO steps as well, by rldsl and by TRL's GRPOTrainer, each in a separate process (`step.py`); their
least time is the sum of prefill, decoding, forward, backward and update, scaled by the tokens that they sampled.
TRL is looked for in the interpreter that --peer or the environment variable RLDSL_TRL_PYTHON names.

--ranks N: whole GRPO steps by rldsl on N ranks with one thread each, dp=N; their least time is the mean of the shares
of the ranks, measured by N processes at once (`bound_ranks.py`), and their time is that of the wall, so nothing else
may run. Messages are not counted in the least time.

Gates are of the medians over shapes: decode 0.75, training (forward, backward and update) 0.85, a GRPO step 0.8.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from benchmarks.bound_least import Decoder, Lengths, Machine, least_times
from benchmarks.bound_ranks import least_of_ranks
from benchmarks.bound_shapes import Shape, directory, drawn, prompt_lengths
from benchmarks.bound_sides import Ours, Phases, Transformers, Turn
from benchmarks.step import measured
from benchmarks.step_work import WARM, Work, write_data

GATES = {"decode": 0.75, "training": 0.85, "step": 0.8}
TRAINING = ("forward", "backward", "update")
COLUMNS = ("decode", "prefill", "logprobs", *TRAINING, "training")
STEP = ("prefill", "decode", *TRAINING)
RANKS = " ranks"  # what follows their number


@dataclass
class Row:
    """What was measured of a shape: CPU seconds, the least of all turns."""

    least: Phases
    ours: Turn
    theirs: Turn
    lengths: Lengths  # of what the least times are
    steps: dict[str, float] = field(default_factory=dict)  # system, or "N ranks" -> least time of a step / its time

    def fraction(self, side: Turn, column: str) -> float:
        """Of the least time."""
        names = TRAINING if column == "training" else (column,)
        least = sum(self.least[name] for name in names)
        scale = side.tokens / self.ours.tokens if column == "decode" else 1.0
        return scale * least / sum(side.phases[name] for name in names)


def least_of(turns: list[Phases]) -> Phases:
    return {name: min(turn[name] for turn in turns) for name in turns[0]}


def measure(shape: Shape, path: str, turns: int) -> Row:
    draw = random.Random(0)
    prompts = [[draw.randrange(2, 46) for _ in range(size)] for size in prompt_lengths(shape, 0)]
    ours, theirs, machine = Ours(path), Transformers(path), Machine(Decoder.of(path))
    least: list[Phases] = []
    own: list[Turn] = []
    peer: list[Turn] = []
    for turn in range(turns + 1):
        one = ours.turn(prompts, shape.n, shape.tokens)
        if turn:  # the first is for what is set up once
            own.append(one)
        if ours.made is None:
            raise RuntimeError("nothing was generated")
        if turn < max(2, turns):
            torch.manual_seed(turn)
            peer.append(theirs.turn(prompts, shape.n, shape.tokens, ours.made))
        if turn in (0, turns):
            least.append(least_times(machine, ours.lengths(shape.n)))
    return Row(least_of(least), Turn(least_of([t.phases for t in own]), own[-1].tokens),
               Turn(least_of([t.phases for t in peer]), round(statistics.mean(t.tokens for t in peer))),
               ours.lengths(shape.n))


def measure_steps(shape: Shape, path: str, row: Row, folder: Path, peer: str, steps: int, ranks: int
                  ) -> dict[str, float]:
    """System -> least time / time of a whole step; prints why there is none. ranks: of ours, besides one; 0: none."""
    (folder / "models").mkdir(parents=True, exist_ok=True)
    if not (folder / "models/sft").exists():
        (folder / "models/sft").symlink_to(path)
    write_data(folder, max(64, shape.prompts), shape.prompt, shape.tokens)
    work = Work("grpo", str(folder), steps + WARM, shape.prompts, shape.n, shape.prompt, shape.tokens)
    runs = {"ours": (sys.executable, "benchmarks.step_ours", work), "TRL": (peer, "benchmarks.step_trl", work)}
    if ranks:
        runs[f"{ranks}{RANKS}"] = (sys.executable, "benchmarks.step_ours", replace(work, ranks=ranks))
    found = {}
    for system, (python, module, its_work) in runs.items():
        times = measured(python, module, its_work) if python else "no interpreter with TRL is named"
        if isinstance(times, str):
            print(f"  {system}: not measured: {times.strip().splitlines()[-1]}", flush=True)
            continue
        phases = row.least if its_work.ranks == 1 else least_of_ranks(path, row.lengths, ranks)
        least, taken = sum(phases[name] for name in STEP), times.cpu if its_work.ranks == 1 else times.wall
        found[system] = max(least * s / row.ours.tokens / t for s, t in zip(times.tokens, taken, strict=True))
    return found


def show(shape: Shape, parameters: int, row: Row) -> None:
    print(f"{shape.name}: {parameters / 1e6:.1f}M parameters, {row.ours.tokens} tokens sampled")
    print("  least, ms   " + "".join(f"{1e3 * sum(row.least[n] for n in (TRAINING if c == 'training' else (c,))):10.1f}"
                                     for c in COLUMNS))
    for name, side in (("ours", row.ours), ("transformers", row.theirs)):
        print(f"  {name:12}" + "".join(f"{row.fraction(side, c):10.2f}" for c in COLUMNS), flush=True)
    if row.steps:
        print("  whole step  " + "   ".join(f"{name} {value:.2f}" for name, value in row.steps.items()), flush=True)


def medians(rows: list[Row]) -> Mapping[str, tuple[float, float, int]]:
    """Column -> (ours, the peer's, shapes in which ours is not the higher)."""
    found = {}
    for column in COLUMNS:
        pairs = [(row.fraction(row.ours, column), row.fraction(row.theirs, column)) for row in rows]
        found[column] = (*map(statistics.median, zip(*pairs, strict=True)), sum(a <= b for a, b in pairs))
    pairs = [(row.steps["ours"], row.steps.get("TRL", 0.0)) for row in rows if "ours" in row.steps]
    if pairs:
        found["step"] = (*map(statistics.median, zip(*pairs, strict=True)), sum(a <= b for a, b in pairs))
    for name in dict.fromkeys(name for row in rows for name in row.steps if name.endswith(RANKS)):
        found[name] = (statistics.median(row.steps[name] for row in rows if name in row.steps), 0.0, 0)
    return found


def main() -> int:
    """The number of gates that are missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--shapes", type=int, default=10)
    parser.add_argument("--only", type=int, nargs="*", help="numbers of some of them")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--step", action="store_true", help="whole GRPO steps, too")
    parser.add_argument("--peer", default=os.environ.get("RLDSL_TRL_PYTHON", ""), help="interpreter that has trl")
    parser.add_argument("--ranks", type=int, default=0, help="whole GRPO steps on so many ranks, too")
    parser.add_argument("--model", help="a model directory instead of drawn shapes")
    for name, value in (("prompts", 8), ("n", 4), ("prompt", 32), ("tokens", 64)):
        parser.add_argument(f"--{name}", type=int, default=value)
    given = parser.parse_args()
    torch.set_num_threads(1)
    shapes = [Shape({}, given.prompts, given.n, given.prompt, given.tokens)] if given.model else \
        drawn(given.seed, given.shapes)
    rows = []
    print(f"{'':14}" + "".join(f"{c:>10}" for c in COLUMNS), flush=True)
    with tempfile.TemporaryDirectory() as place:
        for i, shape in enumerate(shapes):
            if given.only and i not in given.only:
                continue
            path = str(Path(given.model).resolve()) if given.model else directory(shape, Path(place) / f"model{i}")
            row = measure(shape, path, given.turns)
            if given.step or given.ranks:
                row.steps = measure_steps(shape, path, row, Path(place) / f"step{i}", given.peer, given.turns,
                                          given.ranks)
            show(shape, Decoder.of(path).parameters, row)
            rows.append(row)
    missed = 0
    print(f"median of {len(rows)}; transformers' (of whole steps: TRL's); shapes in which ours is not the higher")
    for column, (own, peer, lower) in medians(rows).items():
        gate = GATES.get("step" if column.endswith(RANKS) else column)
        missed += gate is not None and own < gate
        print(f"  {column:10}{own:6.2f}{peer:6.2f}{lower:4}" + (f"  gate {gate}{'' if own >= gate else ' MISSED'}"
                                                              if gate else ""))
    return missed


if __name__ == "__main__":
    sys.exit(main() > 0)
