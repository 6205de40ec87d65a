"""Metrics of each step to one rank, its progress line and `metrics.jsonl`."""

from __future__ import annotations

import json
import shutil
import sys
import time
from pathlib import Path
from typing import TextIO

import torch

from rldsl.plan.events import Log, split
from rldsl.runtime.exchange import post
from rldsl.runtime.files import written
from rldsl.runtime.state import State

METRICS = "metrics.jsonl"
FIRST = ("reward", "score", "accuracy", "kl", "loss")  # what a progress line shows first, by the end of the name


def log(state: State, event: Log) -> None:
    """The first rank of each buffer's mesh sends its numbers, in one message, to rank `event.to`."""
    by_rank: dict[int, list[tuple[str, str]]] = {}
    for name, buffer in event.metrics:
        spread = state.spreads[split(buffer)[1]]
        by_rank.setdefault(state.world.meshes[spread.mesh].members()[0], []).append((name, buffer))
    rank, sends, receives = state.world.rank, {}, {}
    mine = [state.store.take(b).data.reshape(-1)[:1].double() for _, b in by_rank.get(rank, ())]
    if mine and rank != event.to:
        sends[event.to] = torch.cat(mine)
    if rank == event.to:
        receives = {peer: torch.empty(len(names), dtype=torch.float64, device=state.device)
                    for peer, names in by_rank.items() if peer != rank}
    post(sends, receives, event.id * 16).wait()
    if rank == event.to:
        receives[rank] = torch.cat(mine) if mine else torch.empty(0)
        found = {name: value for peer, names in by_rank.items()
                 for (name, _), value in zip(names, receives[peer].tolist())}
        for name, _ in event.metrics:
            state.metrics.setdefault(name, []).append(found[name])


def end_step(state: State) -> None:
    """What was logged in this step, as one line for a program and one for a person. What came several times (a train in
    a `repeat`) counts by its mean."""
    if not state.metrics:
        return
    now = time.monotonic()
    seconds = max(now - state.started, 1e-9)
    means = {name: sum(found) / len(found) for name, found in state.metrics.items()}
    line = {"step": state.step, **means, "seconds": round(seconds, 4)}
    state.started = now
    state.metrics.clear()
    if state.tokens:
        line["tokens_per_second"] = round(state.tokens / seconds, 1)
    target = state.out / METRICS
    if not state.logged:
        _begin(target, state.step)
        state.logged = True
    with written(target), target.open("a") as file:
        file.write(json.dumps(line) + "\n")
    show(sys.stderr, line, state.plan.header.steps)


def _begin(file: Path, step: int) -> None:
    """The lines of the steps before this one, where the run goes on; an empty file where it begins."""
    with written(file):
        before = file.read_text().splitlines(True) if step > 1 and file.exists() else []
        file.write_text("".join(line for line in before if line.endswith("\n") and json.loads(line)["step"] < step))


def show(stream: TextIO, line: dict[str, float], steps: int) -> None:
    """On a terminal one line that is written over, otherwise one for each step."""
    names = [n for n in line if n not in ("step", "seconds", "tokens_per_second")]
    names.sort(key=lambda n: next((i for i, end in enumerate(FIRST) if n.endswith(end)), len(FIRST)))
    text = f"step {line['step']:>{len(str(steps))}}/{steps}  " + "  ".join(f"{n} {line[n]:.4g}" for n in names[:7])
    if "tokens_per_second" in line:
        text += f"  tokens/s {line['tokens_per_second']:.0f}"
    if stream.isatty():
        shown = text[: shutil.get_terminal_size().columns - 1]
        print(f"\r\033[K{shown}", end="\n" if line["step"] == steps else "", file=stream, flush=True)
    else:
        print(text, file=stream, flush=True)
