"""A published row, predicted: its program compiled under its placement, and simulated on its cluster."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.published.rows import LOG_STD, Row
from rldsl import api
from rldsl.clusters import Cluster, read
from rldsl.plan.events import Generate, Infer, Train
from rldsl.plan.expr import Scalar
from rldsl.plan.model import Plan
from rldsl.plan.projection import event_paths
from rldsl.simulate import Lengths, Timeline, simulate

HERE = Path(__file__).parent
PROMPT = 160  # tokens of the longest prompt of OpenMathInstruct-2 that is expected; sequences have a common limit
PHASES = {Generate: "generate", Infer: "logprobs", Train: "train"}


@dataclass(frozen=True, slots=True)
class Prediction:
    """What the simulator says of a row."""

    row: Row
    plan: Plan
    timeline: Timeline

    @property
    def seconds(self) -> float:
        return self.timeline.seconds

    @property
    def ratio(self) -> float:
        """Predicted time / published time."""
        return self.seconds / self.row.seconds

    @property
    def throughput(self) -> float:
        """Tokens per second and GPU, counted as the published ones: those of all sequences."""
        return self.row.batch * self.row.n * (self.row.prompt + self.row.response) / self.seconds / self.row.gpus

    def phases(self) -> dict[str, float]:
        """Seconds in calls that generate, compute log-probs and train."""
        found = dict.fromkeys(PHASES.values(), 0.0)
        known = {e.id: e for e, _ in event_paths(self.plan)}
        for event, seconds in self.timeline.event_seconds().items():
            if (phase := PHASES.get(type(known.get(event)))) is not None:  # type: ignore[arg-type]
                found[phase] += seconds
        return found


def cluster_of(row: Row) -> Cluster:
    """The cluster of a row, with as many machines as it needs."""
    whole = read(str(HERE / "clusters" / f"{row.cluster}.yaml"))
    gpus = min(row.domain, row.gpus)
    if row.scattered:
        whole = replace(whole, link_gb_s=whole.network_gb_s, link_us=whole.network_us)
    return replace(whole, nodes=-(-row.gpus // gpus), gpus=gpus, cache_gb=row.cache * whole.memory_gb)


def lengths_of(row: Row, log_std: float = LOG_STD) -> Lengths:
    return Lengths(row.prompt, row.response, longest_of(row), log_std)


def longest_of(row: Row) -> float:
    """Tokens of the longest response."""
    return float(row.most) if row.program == "dapo" else row.most - row.prompt


def sets_of(row: Row) -> dict[str, Scalar]:
    """What the program's parameters are for a row."""
    prompts, tokens = (2048, row.most) if row.program == "dapo" else (PROMPT, row.most - PROMPT)
    gpus = min(row.domain, row.gpus)
    return {"model": row.model, "nodes": -(-row.gpus // gpus), "gpus": gpus, "batch": row.batch, "n": row.n,
            "prompts": prompts, "tokens": tokens, "updates": row.updates, "lag": row.lag}


@contextlib.contextmanager
def workplace(folder: Path) -> Iterator[Path]:
    """A directory with the programs, and the models' directories without weights; the current one inside."""
    for file in HERE.glob("*.rlf"):
        shutil.copy(file, folder)
    shutil.copy(HERE / "rewards.py", folder)
    (folder / "problems.jsonl").write_text('{"prompt": "1 + 1"}\n')
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield folder
    finally:
        os.chdir(before)


def make_model(folder: Path, name: str) -> None:
    """The directory of a model: its config, and the names of its tensors."""
    if (folder / name).exists():
        return
    from benchmarks.scale import directory

    sizes = json.loads((HERE / "models" / f"{name}.json").read_text())
    directory(folder / name, sizes.pop("model_type"), sizes, False)


def predict(row: Row, folder: Path, log_std: float = LOG_STD) -> Prediction:
    """folder: of `workplace`."""
    make_model(folder, row.model)
    plan = api.compile(f"{row.program}.rlf", sets_of(row), str(HERE / "places" / f"{row.name}.place.rlf"))
    return Prediction(row, plan, simulate(plan, cluster_of(row), lengths_of(row, log_std)))
