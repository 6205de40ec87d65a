"""Classes of ranks against every rank by itself: its list of events, what it holds, which groups it is in."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.scale import GRPO, LLAMA, PPO, directory
from rldsl import api
from rldsl.memory.curve import peak
from rldsl.memory.holder_classes import HolderClass
from rldsl.memory.lifetimes import lifetimes
from rldsl.memory.reshard_buffers import reshard_plans
from rldsl.plan.codec import decode, encode
from rldsl.plan.model import Plan
from rldsl.plan.projection import class_of, event_paths, schedule, walk
from rldsl.sharding.boxes import cell_of
from tests.samples import thorough_between

SHARED = GRPO.replace("on one", "on all").replace("on other", "on all")  # every call on all ranks


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("scale")
    for name, head in (("actor", False), ("judge", True)):
        directory(made / name, "llama", LLAMA, head)
    return made


def compiled(folder: Path, text: str, ranks: int) -> Plan:
    program = folder / "run.rlf"
    text = text.format(nodes=ranks // 8, half=ranks // 16, batch=4 * ranks, keep="", offload="", train="")
    for name in ("actor", "judge"):
        text = text.replace(f'"{name}"', f'"{folder / name}"')
    program.write_text(text.replace("memory_gb=80", "memory_gb=4000"))
    plan = api.compile(str(program))
    return decode(encode(plan), "run.plan")


@pytest.mark.parametrize("ranks", thorough_between([64, 128, 256]))
@pytest.mark.parametrize("text", [PPO, GRPO, SHARED], ids=["ppo", "grpo", "shared"])
def test_every_rank_has_its_own_program(folder: Path, text: str, ranks: int) -> None:
    """A rank's events are those whose mesh lists it, one rank and one event at a time."""
    plan = compiled(folder, text, ranks)
    members = {m.id: set(m.members()) for m in plan.meshes}
    seen = 0
    for rank in range(ranks):
        naive = tuple(e.id for e, _ in event_paths(plan) if rank in members[e.mesh])
        assert class_of(plan, rank).events == naive
        assert tuple(e.id for e, _ in walk(schedule(plan.body, plan.meshes, rank))) == naive
        seen += len(naive)
    assert seen == sum(len(c.events) * sum(b - a for a, b in c.ranks) for c in plan.classes)
    assert sorted(r for c in plan.classes for a, b in c.ranks for r in range(a, b)) == list(range(ranks))


@pytest.mark.parametrize("text", [PPO, GRPO], ids=["ppo", "grpo"])
def test_every_rank_holds_what_its_class_says(folder: Path, text: str) -> None:
    """The peak of a class is that of its ranks: of none less, and of some the same."""
    plan = compiled(folder, text, 64)
    meshes, found = {m.id: m for m in plan.meshes}, reshard_plans(plan)
    for c in plan.classes:
        alone = []
        for rank in (r for a, b in c.ranks for r in range(a, b)):
            cells = {x.id: at for x in plan.layouts if (at := cell_of(x, meshes[x.mesh], rank)) is not None}
            inside = frozenset(m.id for m in plan.meshes if rank in m.members())
            alone.append(peak(lifetimes(plan, HolderClass(((rank, rank + 1),), inside, (cells,)), "cuda", found)).bytes)
        assert max(alone) <= c.peak_bytes * 1.005 and max(alone) >= c.peak_bytes * 0.995
