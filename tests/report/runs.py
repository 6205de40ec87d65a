"""Directories of runs, as a run of the sample plan leaves them."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path
from typing import Any

from rldsl.plan.codec import encode, plan_id
from rldsl.plan.model import Plan
from rldsl.runtime.metrics.run_lock import born
from tests.plan.sample import grpo

TURNS = [{"role": "assistant", "content": "multiply 2 3", "calls": [{"name": "multiply", "arguments": {"a": 2}}],
          "reward": 0.25}, {"role": "environment", "content": "6.0"},
         {"role": "assistant", "content": "It is 6.", "reward": 1.0}]


def line(step: int, **more: Any) -> dict[str, Any]:
    return {"step": step, "actor/loss": 1.0 / step, "reward": step / 10, "seconds": 2.0 if step > 1 else 9.0,
            "tokens_per_second": 100.0 * step, "memory/peak_bytes": 2**30 + step, **more}


def make_run(folder: Path, steps: int = 5, state: str = "finished", plan: Plan | None = None, **record: Any) -> Path:
    """A run that has made so many steps of 5."""
    data = encode(plan or grpo())
    folder.mkdir(parents=True)
    (folder / "run.plan").write_bytes(data)
    header = (plan or grpo()).header
    held = {"program": header.program, "flow": header.flow, "state": state, "step": steps, "steps": 5,
            "started": "2026-01-02T03:04:05+00:00", "ended": "", "resumed": [], "plan": plan_id(data), "seed": 1,
            "params": {"lr": 1e-6}, "world": 4, "devices": ["cpu", "cpu"], "host": socket.gethostname(),
            "pid": os.getpid(), "born": born(os.getpid()), "command": ["rlc", "run", "grpo.rlf"],
            "versions": {"python": "3.11", "torch": "2.13"}, "sources": [], **record}
    (folder / "run.json").write_text(json.dumps(held))
    write_lines(folder / "metrics.jsonl", [line(step) for step in range(1, steps + 1)])
    (folder / "samples").mkdir()
    write_lines(folder / "samples" / "gen.jsonl", [sample(step, row) for step in range(1, steps + 1)
                                                   for row in range(2)])
    return folder


def sample(step: int, row: int, **more: Any) -> dict[str, Any]:
    return {"step": step, "row": row, "prompt": f"2*3={step}", "completion": f"six {row}", "adv": -row, "reward":
            step / 10 + row, "gen.finished": True, **more}


def write_lines(file: Path, lines: list[dict[str, Any]]) -> None:
    file.write_text("".join(json.dumps(one) + "\n" for one in lines))
