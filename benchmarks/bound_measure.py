"""The measurements of `benchmarks/bound.py`, and what is printed of them."""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from transformers.utils import logging

from benchmarks.bound_arguments import shapes_of
from benchmarks.bound_least import Decoder, Lengths, Machine, least_times
from benchmarks.bound_ranks import least_of_ranks
from benchmarks.bound_shapes import Shape, directory, prompt_lengths
from benchmarks.bound_sides import Ours, Phases, Transformers, Turn
from benchmarks.step_processes import measured
from benchmarks.step_work import WARM, Work, write_data
from rldsl.diag import Failure
from rldsl.report import render

GATES = {"decode": 0.75, "training": 0.85, "step": 0.8}
TRAINING = ("forward", "backward", "update")
COLUMNS = ("decode", "prefill", "logprobs", *TRAINING, "training")
STEP = ("prefill", "decode", *TRAINING)
OURS, TRL = "ours", "TRL"  # whole steps on one rank
RANKS = " ranks"           # what follows their number
SLOWEST = 100.0            # times its least time: no step takes so long
PATIENCE = 600.0           # seconds for all else that a system does until it has ended


@dataclass
class Row:
    """What was measured of a shape: CPU seconds, the least of all turns."""

    least: Phases
    ours: Turn
    theirs: Turn
    lengths: Lengths  # of what the least times are
    steps: dict[str, float] = field(default_factory=dict)  # system -> least time of a step / its time; see `peer_of`

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


def peer_of(system: str) -> str:
    """The name of TRL on as many ranks as ours has: of "ours", and of "N ranks"."""
    return TRL if system == OURS else f"{TRL}, {system}"


def measure_steps(shape: Shape, path: str, row: Row, folder: Path, peer: str, steps: int, ranks: int
                  ) -> dict[str, float]:
    """System -> least time / time of a whole step; prints why there is none. ranks: besides one; 0: none."""
    (folder / "models").mkdir(parents=True, exist_ok=True)
    if not (folder / "models/sft").exists():
        (folder / "models/sft").symlink_to(path)
    write_data(folder, max(64, shape.prompts), shape.prompt, shape.tokens)
    work = Work("grpo", str(folder), steps + WARM, shape.prompts, shape.n, shape.prompt, shape.tokens)
    found = fractions(work, OURS, row.least, row, peer)
    if ranks:
        least = least_of_ranks(path, row.lengths, ranks)
        found |= fractions(replace(work, ranks=ranks), f"{ranks}{RANKS}", least, row, peer)
    return found


def fractions(work: Work, ours: str, phases: Phases, row: Row, peer: str) -> dict[str, float]:
    """Of the least time of phases, of ours and of TRL on as many ranks: CPU time on one rank, else wall time."""
    least, found = sum(phases[name] for name in STEP), {}
    limit = PATIENCE + SLOWEST * work.steps * least
    for system, python, module, processes in ((ours, sys.executable, "benchmarks.step_ours", 1),
                                              (peer_of(ours), peer, "benchmarks.step_trl", work.ranks)):
        times = measured(python, module, work, processes, limit) if python else "no interpreter with TRL is named"
        if isinstance(times, str):
            print(f"  {system}: not measured: {times.splitlines()[-1]}", flush=True)
            continue
        taken = times.cpu if work.ranks == 1 else times.wall
        found[system] = max(least * s / row.ours.tokens / t for s, t in zip(times.tokens, taken, strict=True))
    return found


def show(shape: Shape, parameters: int, row: Row) -> None:
    print(f"{shape.name}: {parameters / 1e6:.{1 if parameters > 1e5 else 3}f}M parameters, "
          f"{row.ours.tokens} tokens sampled")
    print("  least, ms   " + "".join(f"{1e3 * sum(row.least[n] for n in (TRAINING if c == 'training' else (c,))):10.1f}"
                                     for c in COLUMNS))
    for name, side in (("ours", row.ours), ("transformers", row.theirs)):
        print(f"  {name:12}" + "".join(f"{row.fraction(side, c):10.2f}" for c in COLUMNS), flush=True)
    if row.steps:
        print("  whole step  " + "   ".join(f"{name} {value:.2f}" for name, value in row.steps.items()), flush=True)


def medians(rows: list[Row]) -> Mapping[str, tuple[float, float | None, int | None]]:
    """Column -> (ours, the peer's, shapes in which ours is not the higher). None: the peer was not measured."""
    found: dict[str, tuple[float, float | None, int | None]] = {}
    for column in COLUMNS:
        pairs = [(row.fraction(row.ours, column), row.fraction(row.theirs, column)) for row in rows]
        own, peer = map(statistics.median, zip(*pairs, strict=True))
        found[column] = own, peer, sum(a <= b for a, b in pairs)
    for name in dict.fromkeys(name for row in rows for name in row.steps if not name.startswith(TRL)):
        steps, trl = [row.steps for row in rows if name in row.steps], peer_of(name)
        both = [x for x in steps if trl in x]
        found["step" if name == OURS else name] = (
            statistics.median(x[name] for x in steps),
            statistics.median(x[trl] for x in both) if both else None,
            sum(x[name] <= x[trl] for x in both) if both else None)
    return found


def show_medians(rows: list[Row]) -> int:
    """The number of gates that are missed."""
    missed = 0
    print(f"median of {len(rows)}   ours  peer  not higher in   "
          "(the peer is transformers, of whole steps TRL on as many ranks)")
    for column, (own, peer, lower) in medians(rows).items():
        gate = GATES.get("step" if column.endswith(RANKS) else column)
        missed += gate is not None and own < gate
        theirs, shapes = ("-", "-") if peer is None else (f"{peer:.2f}", str(lower))
        print(f"  {column:10}{own:8.2f}{theirs:>6}{shapes:>8}" + (
            f"       gate {gate}{'' if own >= gate else ' MISSED'}" if gate else ""))
    return missed


def run(given: argparse.Namespace) -> int:
    """Measure what the options ask for. Returns the exit status."""
    logging.disable_progress_bar()
    torch.set_num_threads(1)
    rows = []
    print(f"{'':14}" + "".join(f"{c:>10}" for c in COLUMNS), flush=True)
    with tempfile.TemporaryDirectory() as place:
        for i, shape in shapes_of(given).items():
            path = str(Path(given.model).resolve()) if given.model else directory(shape, Path(place) / f"model{i}")
            try:
                row = measure(shape, path, given.turns)
            except Failure as failure:
                print(render(failure.diagnostics), file=sys.stderr)
                return 2
            except ValueError as error:  # of a model whose least time is not known
                print(f"error: {error}", file=sys.stderr)
                return 2
            if given.step or given.ranks:
                row.steps = measure_steps(shape, path, row, Path(place) / f"step{i}", given.peer, given.turns,
                                          given.ranks)
            show(shape, Decoder.of(path).parameters, row)
            rows.append(row)
    return int(show_medians(rows) > 0)
