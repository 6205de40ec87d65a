"""Every metric that runs have on their own, recomputed from what the backend was given and gave on all ranks.

The ranks dump each call of the backend: its event, the rows with their lengths, the log-probabilities that a loss saw,
what an optimizer step reported, and how long the event took. The oracle adds these rows up; it knows nothing of
`rldsl.runtime.metrics`.
"""

from __future__ import annotations

import io
import json
import os
import sys
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.metrics.program import lines, plan
from tests.samples import thorough_between
from tests.world import run_world

HEAD = """
use std.sft (sft)
data prompts = jsonl("data/prompts.jsonl", batch=5, max_prompt_tokens=16)
data more = jsonl("data/prompts.jsonl", batch=4, max_prompt_tokens=16)
data held = jsonl("data/heldout.jsonl", batch=4, max_prompt_tokens=16)
model actor = causal_lm("models/sft") train adamw(lr=1e-3, schedule=linear)
model ref = causal_lm("models/sft")
flow f(steps=3, seed=5) {
  prompt = prompts.next()
"""
CASES = {
    "plain": """
  gen = actor.generate(prompt, n=2, max_new_tokens=6)
  lp = ref.logprobs(gen)
  metric lp = mean(lp)
  actor.train(gen, loss=sft(), minibatches=3, epochs=2)
""",
    "selection of prompts": """
  odd = uniform(mean(len(prompt0) by prompt)) < 0.5
  some = prompt where odd
  gen = actor.generate(some, n=2, max_new_tokens=6)
  lp = ref.logprobs(gen)
  metric lp = mean(lp)
  actor.train(gen, loss=sft(), minibatches=2)
""".replace("  odd = uniform(mean(len(prompt0) by prompt)) < 0.5\n",
            "  probe = actor.generate(prompt, max_new_tokens=3)\n"
            "  odd = uniform(mean(len(probe) by prompt)) < 0.5\n"),
    "selection of sequences": """
  gen = actor.generate(prompt, n=3, max_new_tokens=6)
  kept = gen where len(gen) > mean(len(gen))
  lp = ref.logprobs(kept)
  metric lp = mean(lp)
  actor.train(kept, loss=sft(), minibatches=4)
""",
    "two generates and pairs of steps": """
  gen = actor.generate(prompt, n=2, max_new_tokens=6)
  short = ref.generate(prompt, n=1, max_new_tokens=2)
  lp = ref.logprobs(gen)
  lp2 = ref.logprobs(short)
  metric lp = mean(lp) + mean(lp2)
  actor.train(gen, loss=sft())
  actor.train(short, loss=sft(), minibatches=2)
""",
    "repeat": """
  repeat 2 {
    again = more.next()
    gen = actor.generate(again, n=2, max_new_tokens=5)
    lp = ref.logprobs(gen)
    metric lp = mean(lp)
    actor.train(gen, loss=sft(), minibatches=2)
  }
  end = actor.generate(prompt, max_new_tokens=3)
  metric end = mean(len(end))
""",
    "repeat until": """
  repeat {
    again = more.next()
    gen = actor.generate(again, n=2, max_new_tokens=5)
    kept = gen where len(gen) > 2
  } until count(kept) > 8 max 3
  lp = ref.logprobs(kept)
  metric lp = mean(lp)
  actor.train(kept, loss=sft(), minibatches=2)
""",
    "eval": """
  gen = actor.generate(prompt, n=2, max_new_tokens=6)
  actor.train(gen, loss=sft())
  every 2 {
    eval held {
      q = held.next()
      a = ref.generate(q, n=2, max_new_tokens=4)
      lp = ref.logprobs(a)
      metric held = mean(lp)
    }
  }
""",
}
PLACES = {
    "one rank": "cluster nodes=1 gpus=1\n",
    "dp=2": "cluster nodes=1 gpus=2\nplace *.* on mesh(0:2) dp=2\n",
    "meshes": "cluster nodes=1 gpus=2\nplace actor.* on mesh(0:2) dp=2\nplace ref.* on mesh(1:2)\n",
    "away": "cluster nodes=1 gpus=2\nplace actor.* on mesh(0:1)\nplace ref.* on mesh(1:2)\n",
}


@dataclass
class Rows:
    """What one call of the backend saw on one rank."""

    event: int  # its id in the plan
    kind: str
    frame: str  # that a generate makes
    rows: list[tuple[int, int]] = field(default_factory=list)  # prompt and response tokens of each
    sums: list[float] = field(default_factory=list)  # of the log-probabilities in each micro-batch of a minibatch
    update: dict[str, float] | None = None
    evaluated: bool = False


def _rank(rank: int, data: bytes, out: str, cwd: str) -> tuple[dict[int, list[Rows]], list[tuple[int, str, float]]]:
    """The rows by step, and (step, kind of event, seconds) of every event."""
    from rldsl.backends.torch.shard import TorchShard

    from rldsl.plan.events import Generate, Infer, Lengths, Train
    from rldsl.runtime.interpreter.interpreter import HANDLERS, execute
    from rldsl.runtime.interpreter.options import Options
    from rldsl.runtime.metrics.reporter import Reporter
    from rldsl.runtime.plan_file import PlanFile

    os.chdir(cwd)
    found: dict[int, list[Rows]] = defaultdict(list)
    times: list[tuple[int, str, float]] = []
    now: list[Any] = [None, None]  # the step and the event under way
    real = {name: getattr(TorchShard, name) for name in ("generate", "infer", "train")}
    took, handlers = Reporter.took, dict(HANDLERS)

    def record() -> Rows:
        step, event = now
        made = Rows(event.id, type(event).__name__, getattr(event, "frame", ""), evaluated=bool(step.evaluated_source))
        found[step.number].append(made)
        return made

    def lens(batch: Any) -> list[tuple[int, int]]:
        return list(zip(batch.prompt_lens.tolist(), batch.response_lens.tolist(), strict=True))

    def generate(self: Any, *args: Any, **more: Any) -> Any:
        made = real["generate"](self, *args, **more)
        record().rows += lens(made.batch)
        return made

    def infer(self: Any, batches: Any, *args: Any) -> Any:
        record().rows += [x for b in batches for x in lens(b)]
        return real["infer"](self, batches, *args)

    def train(self: Any, minibatch: Any, outputs: Any, temperature: float, loss: Any, *more: Any) -> Any:
        mine = record()
        mine.rows += [x for frames in minibatch for b in frames for x in lens(b)]

        def seen(i: int, fresh: Any) -> Any:
            mine.sums.append(float(fresh[0]["logprobs"].detach().double().sum()))
            return loss(i, fresh)

        mine.update = real["train"](self, minibatch, outputs, temperature, seen, *more)
        return mine.update

    def handler(kind: type, of: Any) -> Any:
        def run(state: Any, event: Any) -> None:
            now[:] = state.step, event
            of(state, event)
        return run

    def timed(self: Any, step: Any, event: Any, seconds: float) -> None:
        shared = f" {event.frame}" if isinstance(event, Lengths) else ""
        times.append((step.number, f"{type(event).__name__}{shared}", seconds))
        took(self, step, event, seconds)

    before, sys.stderr = sys.stderr, io.StringIO()
    for name, wrapped in (("generate", generate), ("infer", infer), ("train", train)):
        setattr(TorchShard, name, wrapped)
    Reporter.took = timed  # type: ignore[method-assign]
    HANDLERS.update({k: handler(k, handlers[k]) for k in (Generate, Infer, Train)})  # type: ignore[attr-defined]
    try:
        execute(PlanFile.from_bytes(data, "test.plan"), out, options=Options())
        return dict(found), times
    finally:
        sys.stderr, Reporter.took = before, took  # type: ignore[method-assign]
        HANDLERS.update(handlers)  # type: ignore[attr-defined]
        for name, function in real.items():
            setattr(TorchShard, name, function)


def tokens(rows: list[Rows], responses: bool = False) -> int:
    return sum(r if responses else p + r for call in rows for p, r in call.rows)


@pytest.mark.parametrize("where", thorough_between(PLACES))
@pytest.mark.parametrize("case", CASES)
def test_builtin_metrics_are_what_the_rows_say(case: str, where: str, place: Path) -> None:
    heldout = (place / "data/prompts.jsonl").read_text().splitlines()[:10]
    (place / "data").unlink()
    (place / "data").mkdir()
    for name, text in (("heldout", heldout), ("prompts", heldout * 4)):
        (place / f"data/{name}.jsonl").write_text("\n".join(text) + "\n")
    data = plan(place, PLACES[where], HEAD + CASES[case] + "}\n")
    world = json.loads(data.splitlines()[0])["world"]
    ranks = run_world(world, _rank, data, str(place / "out"), str(place))
    found = lines(place / "out/metrics.jsonl")
    assert len(found) == 3
    for line in found:
        _check(line, [rows.get(line["step"], []) for rows, _ in ranks],
               [(kind, s) for step, kind, s in ranks[0][1] if step == line["step"]])


def _check(line: dict[str, float], ranks: list[list[Rows]], times: list[tuple[str, float]]) -> None:
    every = [call for rows in ranks for call in rows]
    log = {(call.event, call.kind) for call in ranks[0]}  # the calls in which the rank that logs takes part
    for kind in ("Generate", "Infer", "Train"):
        calls = [c for c in every if c.kind == kind and (c.event, kind) in log]
        seconds = sum(s for k, s in times if k == kind)
        name = kind.lower()
        if not seconds:
            assert f"time/{name}" not in line and f"tokens_per_second/{name}" not in line
            continue
        assert line[f"time/{name}"] == pytest.approx(seconds, abs=1e-4)
        rate = tokens(calls, kind == "Generate") / seconds
        assert line.get(f"tokens_per_second/{name}", 0) == pytest.approx(rate, abs=0.06), kind
    made = [c for c in every if c.kind == "Generate" and f"Lengths {c.frame}" in dict(times)]  # rank 0 knows lengths
    responses = [r for c in made if not c.evaluated for _, r in c.rows]
    assert line.get("length/response", 0) == pytest.approx(sum(responses) / max(len(responses), 1))
    assert line.get("tokens_per_second", 0) * line["seconds"] == pytest.approx(tokens(made), rel=0.02)
    _check_trains(line, ranks)


def _check_trains(line: dict[str, float], ranks: list[list[Rows]]) -> None:
    """Losses are those of `sft`: minus the mean log-probability of each minibatch; then their mean."""
    shown: dict[str, list[tuple[float, dict[str, float]]]] = defaultdict(list)
    trains = [[c for c in rows if c.kind == "Train"] for rows in ranks]
    trains = [calls for calls in trains if calls]
    for minibatch in zip(*trains, strict=True):  # every rank of the mesh makes the same optimizer steps
        count = sum(r for c in minibatch for _, r in c.rows)
        loss = -sum(sum(c.sums) for c in minibatch) / max(count, 1)
        update = minibatch[0].update
        assert update is not None and len({c.event for c in minibatch}) == 1
        shown[str(minibatch[0].event)].append((loss, dict(update)))
    for i, steps in enumerate(shown.values()):
        name = "actor" if i == 0 else f"actor#{i + 1}"
        half = len(steps) // 2
        each = [steps[:half], steps[half:]] if "end" in line else [steps]  # in `repeat 2`: the mean of its iterations
        assert line[f"{name}/loss"] == pytest.approx(mean([mean([x for x, _ in s]) for s in each]), rel=1e-5)
        assert line[f"{name}/grad_norm"] == pytest.approx(
            mean([mean([u["grad_norm"] for _, u in s]) for s in each]), rel=1e-5)
        assert line[f"{name}/lr"] == pytest.approx(mean([s[-1][1]["lr"] for s in each]))
    if not shown:
        assert "actor/grad_norm" not in line and "actor/loss" not in line


def mean(x: list[float]) -> float:
    return sum(x) / len(x)
