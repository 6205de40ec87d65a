"""`rlc profile`: measure this machine and the models of a plan on it; the file is a cluster's, for `rlc sim --cluster`.

In: a plan or a program. Out: a YAML file. What was measured is kept by machine, libraries and threads, and model by
model, so that the next profile measures only what is new. The measuring is `measure/profile.py`, in separate
processes.
Errors: RL0788 the measuring fails.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from rldsl.clusters.model import FIELDS, PASSES
from rldsl.commands.inputs import plan_or_program
from rldsl.diag import fail
from rldsl.files import keep_inputs, with_digest, without_digest, write
from rldsl.models.families import describe
from rldsl.plan.codec import encode
from rldsl.plan.conversing import conversing_models, is_conversing
from rldsl.plan.events import ModelCall
from rldsl.plan.expr import Scalar
from rldsl.plan.model import DEFAULT_BACKEND, Plan
from rldsl.plan.projection import event_paths
from rldsl.progress import stage
from rldsl.python.start import interpreter
from rldsl.search.space import can_tp

FORMAT = 5  # of what is kept; it grows with every change of what is measured
RANKS = 8  # at most, on a processor: to see how much its cores slow each other down


@dataclass(frozen=True, slots=True)
class Facts:
    """The machine."""

    device: str  # its name
    devices: int  # GPUs; 0: ranks run on the CPU
    cores: int  # CPU cores
    threads: int  # per rank, on a CPU
    versions: tuple[str, ...]  # of torch and other libraries

    def key(self) -> str:
        return sha256(json.dumps([FORMAT, *astuple(self)]).encode()).hexdigest()[:16]


def profile(file: str, sets: Mapping[str, Scalar], place: str | None, overrides: Sequence[str], target: str,
            cache: Path | None, device: str | None, fresh: bool, degrees: Sequence[int] = ()) -> str:
    """target: where the file goes. cache: where measurements are kept, None for nowhere. fresh: measure everything
    again. degrees: of tensor parallelism, besides those of the program. A summary."""
    keep_inputs(target, (file, place))
    plan = plan_or_program(file, sets, place, overrides).record
    facts = _facts(plan, device)
    ranks = facts.devices or max(2, min(facts.cores, RANKS))
    kept = cache / "profile" / f"{facts.key()}.json" if cache is not None else None
    known = {} if fresh or kept is None else _read(kept)
    asked = shards(plan, degrees)
    wanted = [w for w in asked if not any(_same(m, plan, w) for m in known.get("measured", ()))]
    talks = "turn_us" not in known and bool(conversing_models(plan))
    if not known or wanted or talks:
        found = _measured(plan, facts, ranks, wanted, machine=not known, environments=talks)
        before = [m for m in known.get("measured", ()) if _shard(m) not in map(_shard, found["measured"])]
        known = {**known, **found, "measured": [*before, *found["measured"]]}
        if kept is not None:
            kept.parent.mkdir(parents=True, exist_ok=True)
            write(str(kept), with_digest(json.dumps(known).encode()), "")
    write(target, _file(plan, facts, known).encode(), "choose another path with -o")
    refused = [str(d) for d in degrees if d not in {tp for _, tp, _ in asked}]
    left = f"; no model supports tp={', '.join(refused)}" if refused else ""
    new = f"measured {len(wanted)} shard{'s' * (len(wanted) != 1)}" if wanted else "nothing new to measure"
    return f"wrote {target}: {facts.device}, {new}{left}; next: rlc sim {file} --cluster {target}\n"


def shards(plan: Plan, degrees: Sequence[int] = ()) -> tuple[tuple[str, int, str], ...]:
    """(model, tp, backend) of every call, and with each of the degrees that its family allows. One rank alone stands
    for all of them on the usual backend, and its times for those of others: what is measured is the machine and the
    shapes."""
    layouts = {x.id: x for x in plan.layouts}
    calls = [e for e, _ in event_paths(plan) if isinstance(e, ModelCall)]
    found = dict.fromkeys((e.model, layouts[e.layout].tp, DEFAULT_BACKEND) for e in calls)
    models = [m for m in plan.models if any(e.model == m.name for e in calls)] if degrees else []
    for m in models:
        family = describe(m.path, m.head_name, trained=bool(m.train_layout))
        found |= dict.fromkeys((m.name, tp, DEFAULT_BACKEND) for tp in degrees if can_tp(family, tp))
    return tuple(found)


def _shard(held: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(held[k] for k in ("config", "head", "dtype", "tp"))


def _same(held: Mapping[str, Any], plan: Plan, wanted: tuple[str, int, str]) -> bool:
    """Whether what is held is all that is wanted of a shard: with the vision tower, if the plan has images, and with
    the passes of conversations, if it has these."""
    model = next(m for m in plan.models if m.name == wanted[0])
    asked = {"config": model.config_digest, "head": model.head_name, "dtype": model.dtype, "tp": wanted[1]}
    tower = "tower" in held or not (model.sizes.towers and any(d.images for d in plan.data))
    talks = "turn" in held or not is_conversing(plan, model)
    return tower and talks and all(held.get(k) == v for k, v in asked.items())


def _facts(plan: Plan, device: str | None) -> Facts:
    command = [sys.executable, "-m", "rldsl.measure.profile", "--facts", *(["--device", device] if device else [])]
    found = json.loads(_run(command, os.environ).splitlines()[-1])
    cores = 0 if found["devices"] else found["cores"]
    ranks = max(1, plan.header.world)
    threads = int(os.environ.get("OMP_NUM_THREADS") or 0) or max(1, cores // ranks)
    return Facts(found["device"], found["devices"], cores, threads, tuple(found["versions"]))


def _measured(plan: Plan, facts: Facts, ranks: int, wanted: Sequence[tuple[str, int, str]],
              machine: bool, environments: bool) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="rlc-") as folder:
        asked, found = Path(folder) / "wanted.json", Path(folder) / "found.json"
        file = Path(folder) / "profile.plan"
        file.write_bytes(encode(plan))
        firsts: dict[tuple[Any, ...], Any] = {}  # models with one config and kind are alike
        models = {m.name: m for m in plan.models}
        for w in wanted:
            model = models[w[0]]
            firsts.setdefault((model.config_digest, model.head_name, model.dtype, w[1]), w)
        asked.write_text(json.dumps({"models": list(firsts.values()), "machine": machine,
                                     "environments": environments}))
        stage("measuring", detail=f"{len(firsts)} model shard{'s' * (len(firsts) != 1)}")
        _run([*interpreter(), "-m", "rldsl.runtime.launch", "--parent", str(os.getpid()), "--standalone",
              "--nproc-per-node", str(ranks), "-m", "rldsl.measure.profile", str(file), str(asked), str(found),
              "--device", "cuda" if facts.devices else "cpu"], os.environ | {"OMP_NUM_THREADS": str(facts.threads)})
        result: dict[str, Any] = json.loads(found.read_text())
        return result


def _run(command: Sequence[str], environment: Mapping[str, str]) -> str:
    done = subprocess.run(command, env=dict(environment), capture_output=True, text=True)
    if done.returncode:
        output = [line for line in done.stderr.splitlines() if line.strip()]
        raise fail("RL0788", "profiling failed on this machine", notes=tuple(output[-3:]),
                   help="the model directories must be at the paths in the plan, with config.json and a tokenizer")
    return done.stdout


def _read(file: Path) -> dict[str, Any]:
    """What is kept; nothing where it has changed since it was written, so that it is measured again."""
    try:
        text = without_digest(file.read_bytes())
    except OSError:
        return {}
    held: dict[str, Any] = json.loads(text) if text is not None else {}
    return held


def _file(plan: Plan, facts: Facts, known: Mapping[str, Any]) -> str:
    """A cluster's file: one machine with as many devices as it has, or as the plan has ranks on its processor."""
    import yaml

    gpus = facts.devices or plan.header.world
    values: dict[str, Any] = {"nodes": 1, "gpus": gpus,
                              "source": f"rlc profile: {facts.device}, {', '.join(facts.versions)}"}
    if not facts.devices:
        values |= {"cores": facts.cores, "threads": facts.threads}
    values |= {k: _short(v) for k, v in known.items() if k in FIELDS}
    lines = ["# Measured by `rlc profile`. Efficiencies are 1, because the rates are measured.\n",
             yaml.safe_dump(values, sort_keys=False)]
    lines.append("measured:\n")
    for m in known["measured"]:
        head = ", ".join(f"{k}: {json.dumps(m[k])}" for k in ("config", "head", "dtype", "tp"))
        lines.append(f"  - {{{head}, threads: {m['threads']},\n")
        passes = [f"     {p}: {{{', '.join(f'{k}: {_short(v)}' for k, v in m[p].items())}}}" for p in PASSES if p in m]
        lines.append(",\n".join(passes) + "}\n")
    return "".join(lines)


def _short(value: float) -> float:
    """Four digits."""
    return float(f"{value:.4g}")
