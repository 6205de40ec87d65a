"""Inside calls: the order in which communicators are used has no cycle, and is the one that the backend really
issues."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import groupby, product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from rldsl import api
from rldsl.plan.backends import costs
from rldsl.plan.codec import decode, encode
from rldsl.plan.events import Generate, Infer, Save, Train
from rldsl.plan.model import Layout
from rldsl.plan.projection import walk
from rldsl.runtime.shared_memory import SharedMemoryGroup
from rldsl.sharding.layout import Coordinate, axis_ranks, coordinate
from rldsl.verify import issue_order
from rldsl.verify.issue_order import CommOp, IssueOrder, _case, _dp_coordinates_to_check, deadlock_reason
from tests.plan.sample import grpo
from tests.samples import thorough_between
from tests.verify.faults import codes
from tests.verify.plans import folder
from tests.world import run_world

TORCH = costs("torch", "issue_order", IssueOrder)
X = Layout("x", "m")


@pytest.mark.parametrize("kind", [Generate, Infer, Train, Save])
def test_no_call_of_the_backend_can_stop_for_ever(kind: type) -> None:
    for pp, tp, dp, count in product((1, 2, 3, 5), (1, 2), (1, 2), (1, 2, 3, 7)):
        assert not deadlock_reason(TORCH.sequence_of(kind), replace(X, pp=pp, tp=tp, dp=dp), count), (pp, tp, dp, count)


@pytest.mark.thorough
def test_interleaved_training_cannot_stop_for_ever() -> None:
    for pp, vpp, tp, zero, count in product((2, 3, 4), (2, 3), (1, 2), (0, 3), (1, 2, 3, 7, 8)):
        x = replace(X, pp=pp, vpp=vpp, tp=tp, dp=2, zero=zero)
        assert not deadlock_reason(TORCH.train, x, count), (x, count)


@pytest.mark.parametrize("kind", thorough_between([Generate, Infer, Train]))
def test_ranks_that_share_experts_cannot_stop_for_ever(kind: type) -> None:
    for pp, tp, zero, (dp, ep), count in product((1, 3), (1, 2), (0, 1, 2, 3), ((2, 2), (4, 2), (8, 4)), (1, 2, 5)):
        x = replace(X, pp=pp, tp=tp, dp=dp, ep=ep, zero=zero)
        assert not deadlock_reason(TORCH.sequence_of(kind), x, count), (x, count)


@pytest.mark.parametrize("train", [TORCH.train, TORCH.train_in_leaves], ids=["sums", "leaves"])
def test_sums_of_the_loads_of_experts_cannot_stop_for_ever(train: issue_order.CommSequence) -> None:
    for pp, tp, cp, (dp, ep), zero in product((1, 3), (1, 2), (1, 2), ((1, 1), (2, 2), (4, 2)), (0, 3)):
        x = replace(X, pp=pp, tp=tp, cp=cp, dp=dp, ep=ep, zero=zero)
        assert not deadlock_reason(partial(train, loads=True), x, 3), x
        counted = [len([*partial(train, loads=loads)(x, Coordinate(0, 0, 0, 0), 3)]) for loads in (False, True)]  # type: ignore[call-arg]
        assert counted[1] - counted[0] == 2 * ((cp > 1) + (dp > 1)), x


def test_conversations_cannot_stop_for_ever() -> None:
    for pp, tp, (dp, ep), count in product((1, 2, 3, 5), (1, 2), ((1, 1), (2, 1), (2, 2), (4, 2)), (1, 2, 7)):
        assert not deadlock_reason(TORCH.converse, replace(X, pp=pp, tp=tp, dp=dp, ep=ep), count), (pp, tp, ep, count)


def link(x: Layout, at: Coordinate, to: int, flow: str) -> Iterator[CommOp]:
    if 0 <= at.pp + to < x.pp:
        yield CommOp("link", min(at.pp, at.pp + to), at.dp, flow)


def apart(x: Layout, at: Coordinate, count: int) -> Iterator[CommOp]:
    """1F1B that posts what goes and what comes one after the other: under rendezvous both neighbors send first."""
    ahead = min(x.pp - 1 - at.pp, count)
    for _ in range(ahead):
        yield from link(x, at, -1, "down")
        yield from link(x, at, 1, "down")
    yield from link(x, at, -1, "down")
    for i in range(ahead, count):
        yield from link(x, at, 1, "down")
        yield from link(x, at, 1, "up")
        yield from link(x, at, -1, "up")
        yield from link(x, at, -1, "down") if i + 1 < count else ()


def crossed(x: Layout, at: Coordinate, count: int) -> Iterator[CommOp]:
    """Ranks that use two communicators in different orders."""
    both = [CommOp("tp", at.pp, at.dp), CommOp("mesh", 0, 0)]
    yield from both if at.tp else both[::-1]


def unequal(x: Layout, at: Coordinate, count: int) -> Iterator[CommOp]:
    """A collective that one rank leaves out."""
    for _ in range(2 - at.tp):
        yield CommOp("tp", at.pp, at.dp)


def early(x: Layout, at: Coordinate, count: int) -> Iterator[CommOp]:
    """The last rank takes one message of its neighbor before another that comes first."""
    uses = list(TORCH.train(replace(x, vpp=min(x.pp, 2)), at, count))
    links = [i for i, u in enumerate(uses) if u.axis == "link"]
    if 0 < at.pp == x.pp - 1:
        uses[links[0]], uses[links[1]] = uses[links[1]], uses[links[0]]
    yield from uses


def backwards(x: Layout, at: Coordinate, count: int) -> Iterator[CommOp]:
    """The first stage hands on before a collective of all stages, the others take after it."""
    if at.pp == 0:
        yield from link(x, at, 1, "down")
    yield CommOp("pp", 0, at.dp)
    yield from link(x, at, -1, "down")
    if at.pp:
        yield from link(x, at, 1, "down")


@pytest.mark.parametrize("protocol", [apart, crossed, unequal, backwards, early])
def test_a_sequence_that_can_deadlock_is_found(protocol: issue_order.CommSequence,
                                               monkeypatch: pytest.MonkeyPatch) -> None:
    assert deadlock_reason(protocol, replace(X, pp=3, tp=2), 3)
    monkeypatch.setattr(IssueOrder, "sequence_of", lambda self, kind: protocol)
    assert "RL0537" in codes(grpo()) or protocol in (apart, backwards, early), "the sample has two tensor-parallel ranks"


def test_a_backend_that_does_not_exist_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(issue_order, "described", lambda name: None)
    assert codes(grpo()) == {"RL0537"}


@pytest.mark.parametrize("use", ["tp", CommOp("elsewhere", 0, 0), ("tp", 0, 0)])
def test_what_is_no_use_of_a_communicator_is_refused(use: object, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "which is no use of a communicator" in deadlock_reason(lambda x, at, count: iter([use]), X, 1)
    monkeypatch.setattr(IssueOrder, "train", lambda self, x, at, count: iter([use]))
    assert codes(grpo()) == {"RL0537"}


# ------------------------------------------------------------------------------------------- what is really issued

PROGRAM = """
use std.grpo (group_norm, grpo_free)
cluster nodes=1 gpus=4
data prompts = jsonl("data/prompts.jsonl", batch=8, max_prompt_tokens=16)
model actor = causal_lm("models/sft") train adamw(lr=1e-3)
flow f(steps=1, seed=7) {{
  prompt = prompts.next()
  gen    = actor.generate(prompt, n=2, max_new_tokens=4)   on mesh(0:4) {0}
  lp     = actor.logprobs(gen)                             on mesh(0:4) {0} mbs=3
  adv    = group_norm(len(gen) + sum(lp by seq))
  actor.train(gen, loss=grpo_free(old=gen.logprobs, adv=adv), minibatches=2)   on mesh(0:4) {0} {1} mbs=2
  save actor
}}
"""


def recorded(rank: int, data: bytes, out: str, here: str) -> dict[int, list[tuple[str, tuple[int, ...]]]]:
    """Event -> what torch.distributed was asked to do during it: (kind, ranks)."""
    import os

    from rldsl.backends.torch.generate import op_trace
    from rldsl.runtime.interpreter import interpreter
    from rldsl.runtime.plan_file import PlanFile

    os.chdir(here)
    at: list[int] = [-1]
    asked: dict[int, list[tuple[str, tuple[int, ...]]]] = {}

    def note(kind: str, group: Any, peers: tuple[int, ...] = ()) -> None:
        ranks = peers or tuple(dist.get_process_group_ranks(group or dist.group.WORLD))
        asked.setdefault(at[0], []).append((kind, ranks))

    def collective(name: str) -> None:
        plain = getattr(dist, name)

        def wrapped(*args: Any, **options: Any) -> Any:
            note("all", options.get("group"))
            return plain(*args, **options)
        setattr(dist, name, wrapped)

    def through_memory(name: str) -> None:
        plain = getattr(SharedMemoryGroup, name)

        def wrapped(made: SharedMemoryGroup, *args: Any) -> None:
            note("all", made.group())
            plain(made, *args)
        setattr(SharedMemoryGroup, name, wrapped)

    for name in ("all_reduce", "broadcast", "all_gather", "all_to_all_single"):
        collective(name)
    replayed = op_trace._communicate

    def again(operator: Any, args: Any, kwargs: Any) -> None:
        (group,) = (x for x in args if isinstance(x, torch.ScriptObject) and "ProcessGroup" in str(x._type()))
        note("all", dist.ProcessGroup.unbox(group))
        replayed(operator, args, kwargs)

    op_trace._communicate = again  # collectives of a captured step
    for name in ("all_reduce", "all_gather", "all_to_all"):  # through shared memory
        through_memory(name)
    batch, send, receive = dist.batch_isend_irecv, dist.send, dist.recv
    dist.batch_isend_irecv = lambda ops: (note("link", None, tuple(sorted({o.peer for o in ops}))), batch(ops))[1]
    dist.send = lambda t, dst, **more: (note("link", None, (dst,)), send(t, dst, **more))[1]
    dist.recv = lambda t, src, **more: (note("link", None, (src,)), receive(t, src, **more))[1]

    def during(handler: Any, state: Any, event: Any) -> None:
        at[0] = event.id
        handler(state, event)

    interpreter.HANDLERS = {kind: partial(during, handler) for kind, handler in interpreter.HANDLERS.items()}
    interpreter.execute(PlanFile.from_bytes(data, "x.plan"), out)
    return asked


@pytest.mark.thorough
@pytest.mark.parametrize("degrees, more", [("tp=2 pp=2", ""), ("dp=2 pp=2", "vpp=2"), ("dp=2 tp=2", "")])
def test_the_backend_issues_what_is_written_down(degrees: str, more: str, tmp_path: Path) -> None:
    with folder() as here:
        (here / "p.rlf").write_text(PROGRAM.format(degrees, more))
        data = encode(api.compile("p.rlf"))
        keep_to_it(data, run_world(4, recorded, data, str(tmp_path / "out"), str(here), timeout=200.0))


def keep_to_it(data: bytes, asked: list[dict[int, list[tuple[str, tuple[int, ...]]]]]) -> None:
    """asked: by rank, as `recorded` found it."""
    plan = decode(data, "x")
    layouts, meshes = {x.id: x for x in plan.layouts}, {m.id: m for m in plan.meshes}
    calls = [e for e, _ in walk(plan.body) if isinstance(e, Generate | Infer | Train)]
    assert len(calls) == 3
    for e, rank in product(calls, range(4)):
        x = layouts[e.layout]
        mesh = meshes[x.mesh]
        axes = {axis: {ranks for ranks in axis_ranks(x, mesh, axis)} for axis in ("tp", "dp", "pp", "mesh")}
        found = [(next(a for a, sets in axes.items() if ranks in sets) if kind == "all" else "link", ranks)
                 for kind, ranks in asked[rank].get(e.id, ())]
        names = [key for key, _ in groupby(a if a != "link" else f"link{ranks}" for a, ranks in found)]
        protocol = costs(x.backend, "issue_order", IssueOrder).sequence_of(type(e))
        written = (v for count in range(1, 13) for v in versions(protocol, x, mesh, rank, count))
        assert any(names == v for v in written), (type(e).__name__, rank, names)


def versions(protocol: issue_order.CommSequence, x: Layout, mesh: Any, rank: int, count: int) -> Iterator[list[str]]:
    """The uses of a rank, one for all that follow each other on one communicator, with and without those that only some
    models and losses have: a vote on stopping, gradients in parts, tied embeddings."""
    at = coordinate(x, mesh, rank)
    uses = list(protocol(x, at, count))
    names = []
    for axis, stage, *_ in uses:
        to = (x.pp - 1 if axis == "tokens" else at.pp + 1) if stage == at.pp else stage if axis == "tokens" else at.pp - 1
        peer = mesh.members()[(to * x.dp + at.dp) * x.tp + at.tp] if axis in ("link", "tokens") else 0
        names.append(f"link({peer},)" if axis in ("link", "tokens") else axis)
    ends = [i for i, n in enumerate(names) if n == "mesh"]
    votes = set(ends[0::2][:-1]) if protocol == TORCH.train else set()
    for vote, partial_, tied in product((True, False), repeat=3):
        kept = []
        for i, n in enumerate(names):
            after_vote = protocol == TORCH.train and any(v < i < ends[2 * k + 1] for k, v in enumerate(sorted(votes)))
            if i in votes and not vote or after_vote and (n == "tp" and not partial_ or n == "pp" and not tied):
                continue
            kept.append(n)
        yield [key for key, _ in groupby(kept)]


def test_what_is_proved_for_one_layout_is_taken_over_only_by_layouts_with_the_same_lists() -> None:
    """ep=2 dp=4 has communicators of expert dp, which ep=2 dp=2 has not."""
    def case(**degrees: int) -> tuple[object, ...]:
        return _case(Train, replace(X, **degrees))

    assert case(ep=2, dp=2) != case(ep=2, dp=4)
    assert case(ep=2, dp=4) == case(ep=2, dp=8) and case(dp=2) == case(dp=64)
    assert case(dp=1) != case(dp=2) and case(tp=2) == case(tp=8) != case(tp=1)
    for field in ("pp", "cp", "zero", "vpp"):
        assert case(**{field: 2}) != case(**{field: 3}), field


def test_every_case_lists_what_its_layouts_issue() -> None:
    """Layouts of one case have equal lists at the coordinates that are looked at."""
    lists: dict[object, set[tuple[object, ...]]] = {}
    for ep, dp in product((1, 2, 4), (1, 2, 4, 8, 16)):
        if dp % ep == 0:
            x = replace(X, ep=ep, dp=dp)
            uses = tuple(use for at in product(range(x.pp), _dp_coordinates_to_check(x), range(1), range(1))
                         for use in TORCH.train(x, Coordinate(*at), 3))
            lists.setdefault(_case(Train, x), set()).add(uses)
    assert all(len(found) == 1 for found in lists.values()) and len(lists) > 4
