"""The examples of `EXAMPLES` under all placements of `PLACES`, against one rank, with the same responses.

    python -m tests.papers.matrix [--steps N] [EXAMPLE ...]

A cell of the printed table is the largest difference of a metric, as a share of the tolerance 2e-4 of the number plus
2e-5: what is above 1 fails. Compared exactly are the rows that Python functions saw, with every token, the rows of
buffers and the states of rows; and the trained parameters after the last step, within 1e-3. `make test` runs a part of
the table, with fewer steps (`test_placements.py`).
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from tests.checkpoint.runs import held
from tests.end_to_end.programs import Metrics
from tests.papers.programs import Program, program, root, run_all

SMALL: dict[str, Any] = dict(batch=4, tokens=4)
# a wrong update shows in the next step, a rounding error does not
QUICK = (r"adamw\(lr=[^)]*\)", "adamw(lr=0.01, eps=1e-3)")
SAVED = (r"every (100|iteration) \{ save", "every steps { save")
KEPT = (r"checkpoint every 100", "checkpoint every steps")


@dataclass(frozen=True)
class Case:
    """An example, made small: what is replaced in its text, and its parameters."""

    edits: tuple[tuple[str, str], ...] = ()
    sets: Mapping[str, Any] = field(default_factory=dict)


EXAMPLES = {
    # texts of letters have no lines
    "vineppo": Case(((r"at=cut, most=most", "every=1, most=most"),), dict(group=2, tails=2, most=3)),
    "self_rewarding": Case(((r"iteration = 250", "iteration = 2"),)),
    "online_ipo": Case(),
    "online_dpo": Case(),
    "sppo": Case(),
    "pf_ppo": Case(),
    "critique": Case(),
    "judge": Case(),
    "raft_replay": Case((KEPT,), dict(keep=8)),
    "dapo_curriculum": Case((KEPT,), dict(wanted=36, buffer=2)),
}
PLACES = {
    "dp": "place *.* on mesh(0:2) dp=2",
    "tp": "place *.* on mesh(0:2) tp=2",
    "pp": "place *.* on mesh(0:2) pp=2 mbs=16",
    "zero": "place *.generate on mesh(0:2) tp=2\nplace *.train on mesh(0:2) dp=2 zero=3",
    "cp": "place *.generate on mesh(0:2) dp=2\nplace *.train on mesh(0:2) cp=2",
    "apart": "place @gen on mesh(3:4)\nplace *.generate on mesh(0:2) dp=2\nplace *.train on mesh(2:4) dp=2 zero=2",
    "mixed": "place *.generate on mesh(0:4) dp=2 tp=2\nplace *.train on mesh(0:4) dp=2 pp=2",
    "meshes": "place *.* on mesh(1:3) tp=2\nplace *.generate on mesh(0:3) dp=3\nplace *.train on mesh(2:4) pp=2 mbs=3",
}
ALONE = "place *.* on mesh(0:1)"


@dataclass(frozen=True)
class Found:
    """What a run has left."""

    steps: Metrics
    seen: Counter[str]                   # (function, row, result), as JSON
    trained: Mapping[str, torch.Tensor]  # the saved models
    rows: Mapping[str, torch.Tensor]     # buffers and states of rows of the last checkpoint


def made(base: Path, name: str, steps: int) -> Program:
    case = EXAMPLES[name]
    return program(base, name, QUICK, SAVED, *case.edits, note=True, **{**SMALL, "steps": steps, **case.sets})


def results(base: Path, runs: Mapping[str, Metrics]) -> dict[str, Found]:
    """What each of these runs has left below `base`."""
    found = {}
    for name, steps in runs.items():
        out = base / "out" / name
        seen = Counter(line for file in out.glob("seen.*.jsonl") for line in file.read_text().splitlines())
        trained = {f"{file.parent.name} {key}": t for file in sorted(out.glob(f"step-{len(steps)}/*/*.safetensors"))
                   for key, t in load_file(file).items()}
        last = max(out.glob("checkpoints/step-*"), default=None)
        rows = joined(held(last)) if last else {}
        found[name] = Found(steps, seen, trained, rows)
    return found


def joined(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The buffers and states of rows in a checkpoint, each whole: how ranks share them depends on the placement."""
    pieces: dict[str, list[tuple[int, torch.Tensor]]] = {}
    for key, tensor in tensors.items():
        name, _, box = key.rpartition("|")
        if key.startswith("rows of buffer|") or "|state|rows" in key:
            pieces.setdefault(name, []).append((int(box.split(":")[0]), tensor))
    return {name: torch.cat([t for _, t in sorted(parts, key=lambda x: x[0])]) for name, parts in pieces.items()}


def distance(mine: Found, theirs: Found) -> float:
    """The largest difference of metrics as a share of the tolerance; infinite where something exact differs."""
    same = mine.seen == theirs.seen and mine.rows.keys() == theirs.rows.keys() and all(
        torch.equal(t, theirs.rows[key]) for key, t in mine.rows.items() if not key.endswith("logprobs"))
    near = mine.trained.keys() == theirs.trained.keys() and all(
        torch.allclose(t, theirs.trained[key], rtol=1e-3, atol=1e-3) for key, t in mine.trained.items())
    if not (same and near and len(mine.steps) == len(theirs.steps)):
        return float("inf")
    return max(abs(a[k] - b[k]) / (2e-4 * abs(b[k]) + 2e-5)
               for a, b in zip(mine.steps, theirs.steps, strict=True) for k in b | a)


def compare(base: Path, wanted: Mapping[str, Iterable[str]], steps: int) -> dict[str, Found]:
    """Examples alone, as "EXAMPLE", and under each of their placements, as "EXAMPLE PLACE"."""
    examples = {name: made(base, name, steps) for name in wanted}
    runs = run_in_worlds({name: example.compiled(ALONE) for name, example in examples.items()}, base, None)
    plans = {f"{name} {place}": examples[name].compiled(PLACES[place])
             for name, places in wanted.items() for place in places}
    runs |= run_in_worlds(plans, base, {plan: runs[plan.split()[0]].responses for plan in plans})
    return results(base, runs)


def run_in_worlds(plans: Mapping[str, bytes], base: Path, like: Mapping[str, Path] | None) -> dict[str, Metrics]:
    """The metrics of each plan. A process writes the checkpoints of one run only; other runs share worlds."""
    worlds: dict[tuple[int, str], dict[str, bytes]] = {}
    for name, plan in plans.items():
        size, alone = json.loads(plan.splitlines()[0])["world"], KEPT in EXAMPLES[name.split()[0]].edits
        worlds.setdefault((size, name if alone else ""), {})[name] = plan
    runs: dict[str, Metrics] = {}
    for (size, _), group in worlds.items():
        runs |= run_all(size, group, base, like)
    return runs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("examples", nargs="*", metavar="EXAMPLE", default=list(EXAMPLES))
    given = parser.parse_args()
    failed = 0
    print(f"{'':16}", *(f"{place:>7}" for place in PLACES), "  rows seen, saved, kept", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        base = root(Path(folder))
        for name in given.examples:
            begun = time.monotonic()
            found = compare(base, {name: PLACES}, given.steps)
            alone = found[name]
            cells = [distance(found[f"{name} {place}"], alone) for place in PLACES]
            failed += sum(not x <= 1 for x in cells)
            print(f"{name:16}", *(f"{x:7.3f}" for x in cells), f"  {alone.seen.total():5} {len(alone.trained):3} "
                  f"{len(alone.rows):3}  {time.monotonic() - begun:.0f} s", flush=True)
    print(f"{given.steps} steps: " + (f"{failed} FAILED" if failed else "all equal"))
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
