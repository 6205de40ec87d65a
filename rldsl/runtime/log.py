"""Metrics of each step to one rank, its progress line and `metrics.jsonl`; a summary at the end."""

from __future__ import annotations

import json
import shutil
import sys
import time
from pathlib import Path
from typing import TextIO

import torch

from rldsl.plan.model import Layout, Log, Mesh, Plan, Realloc
from rldsl.plan.project import events, times
from rldsl.runtime.exchange import post
from rldsl.runtime.files import written
from rldsl.runtime.state import State

METRICS, SUMMARY = "metrics.jsonl", "summary.json"
FIRST = ("reward", "score", "accuracy", "kl", "loss")  # what a progress line shows first, by the end of the name


def log(state: State, event: Log) -> None:
    """The first rank of each buffer's mesh sends its numbers, in one message, to rank `event.to`."""
    by_rank: dict[int, list[tuple[str, str]]] = {}
    for name, buffer in event.metrics:
        spread = state.spreads[buffer.rpartition("@")[2]]
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
    with written(target), target.open("a" if state.logged else "w") as file:
        file.write(json.dumps(line) + "\n")
    state.logged = True
    show(sys.stderr, line, state.plan.header.steps)


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


def layout_text(layout: Layout, mesh: Mesh) -> str:
    ranks = ",".join(f"{a}:{b}" for a, b in mesh.ranks)
    degrees = " ".join(f"{n}={getattr(layout, n)}" for n in ("dp", "tp", "pp") if getattr(layout, n) > 1)
    return f"mesh({ranks}) {degrees}".strip()


def summarise(state: State, steps: int, seconds: float) -> dict:
    """What a run moved and saved."""
    world, plan = state.world, state.plan

    def text(layout: str) -> str:
        return layout_text(world.layouts[layout], world.meshes[world.layouts[layout].mesh])

    moved = [{"model": e.model, "src": text(e.src), "dst": text(e.dst), "bytes": e.bytes, "messages": e.messages,
              "because": e.because, "times": times(path)} for e, path in events(plan) if isinstance(e, Realloc)]
    return {"reallocs": moved, "saved": state.saved, "steps": steps, "seconds": round(seconds, 3)}


def write_summary(plan: Plan, out: Path, summary: dict) -> None:
    with written(out / SUMMARY):
        (out / SUMMARY).write_text(json.dumps(summary, indent=2) + "\n")
    print(f"{plan.header.flow}: {summary['steps']} steps in {summary['seconds']:.1f} s", file=sys.stderr)
    for move in summary["reallocs"]:
        print(f"  realloc {move['model']}  {move['src']} -> {move['dst']}  {move['times']} x {move['bytes']:,} bytes: "
              f"{move['because']}", file=sys.stderr)
    for path in summary["saved"]:
        print(f"  saved {path}", file=sys.stderr, flush=True)
