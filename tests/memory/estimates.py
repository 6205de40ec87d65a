"""The estimate of a run's memory against what its ranks hold while it runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from rldsl.api import compile
from rldsl.memory import curves
from rldsl.memory.curve import each_rank, left_out, peak, points
from rldsl.plan.codec import encode
from rldsl.plan.events import Generate, Infer, Train
from rldsl.plan.projection import event_paths
from tests.memory.accounting import measured
from tests.memory.plans import GRPO, Case
from tests.tiny import write_jsonl

GATE = 0.10


def compare_with_run(folder: Path, case: Case) -> None:
    """A GRPO step of the model in `folder`/m, which is the working directory: peaks of all ranks, and the bytes before,
    during and after each call, agree within GATE; nothing is left out."""
    # no two prompts are alike, since those that are share a prefill
    write_jsonl(folder / "prompts.jsonl", [{"prompt": f"{i:02d}" + "7" * (case.prompt - 2)} for i in range(48)])
    (folder / "run.rlf").write_text(f"cluster nodes=1 gpus={case.world}\n" + GRPO.format(
        **{k: getattr(case, k) for k in Case.__dataclass_fields__}) + f"\n{case.place}\n")
    plan = compile(str(folder / "run.rlf"))
    calls = {e.id: e for e, _ in event_paths(plan) if isinstance(e, Generate | Infer | Train)}
    found = measured(encode(plan), folder / "out", case.world)
    for rank, curve in each_rank(curves(plan, "cpu")):
        assert peak(curve).bytes == pytest.approx(found[rank].peak, rel=GATE), f"rank {rank}"
        for point in points(curve):
            if point.event in calls:
                said = (point.before, point.during, point.after)
                real = found[rank].events[point.event]
                assert said == pytest.approx(real, rel=GATE), f"rank {rank}, {type(calls[point.event]).__name__}"
    assert left_out(plan) == ()
