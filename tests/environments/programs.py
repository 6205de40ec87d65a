"""Programs whose models talk with scripted environments, run in real worlds."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from tests.end_to_end.programs import compile_program
from tests.tiny import make_model
from tests.world import run_world

HERE = Path(__file__).parent
HEAD = """
use py "{envs}" (Guess: env)
use std.grpo (group_norm)
data prompts = jsonl("prompts.jsonl", batch=4, max_prompt_tokens=16, shuffle=false)
model actor = causal_lm("model"{options}) train adamw(lr=0.01)
loss pg(logprobs: token; adv: token) {{ return -mean(adv * logprobs) }}
"""
TALK = "gen = actor.generate(prompt, env=Guess, n=2, max_turns=3, max_new_tokens=4, max_tokens=64)"


def folder(base: Path) -> Path:
    make_model(base / "model", num_hidden_layers=2)
    rows = [{"prompt": f"{i} + {i * 7 % 10} = " + "x" * (i % 5), "number": i} for i in range(16)]
    (base / "prompts.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    return base


def source(body: str, steps: int | str = 2, options: str = "", top: str = "") -> str:
    return f"{HEAD.format(envs=HERE / 'envs_scripted.py', options=options)}\n{top}\nflow f(steps={steps}) {{\n{body}\n}}\n"


def run(base: Path, body: str, *, steps: int | str = 2, place: str | None = None, delays: int | None = None,
        options: str = "", top: str = "") -> list[dict[str, Any]]:
    """The lines of the metrics. delays: seed of the order in which answers arrive; None: at once."""
    path = base / "program.rlf"
    path.write_text(source(body, steps, options, top))
    before = os.getcwd()
    os.chdir(base)
    try:
        data = compile_program(path, {}, place, base)
        world = json.loads(data.splitlines()[0])["world"]
        run_world(world, _rank, data, str(base / "run" / "out"), str(base), delays, timeout=240.0)
    finally:
        os.chdir(before)
    return [json.loads(line) for line in (base / "run" / "out" / "metrics.jsonl").read_text().splitlines()]


def _rank(rank: int, data: bytes, out: str, cwd: str, delays: int | None) -> None:
    from rldsl.runtime.interpreter import conversations
    from rldsl.runtime.interpreter.interpreter import execute
    from rldsl.runtime.interpreter.options import Options
    from rldsl.runtime.plan_file import PlanFile
    from tests.environments.scripted import Scripted

    os.chdir(cwd)
    seed = None if delays is None else delays * 100 + rank
    conversations.open_conversations = (  # type: ignore[assignment]
        lambda function, limits, sampling, tokens, rank, at: Scripted(tokens.tokenizer, seed))
    execute(PlanFile.from_bytes(data, "test.plan"), out, options=Options(overwrite=True))
