"""What a placement with cp is, and what is refused: no model directory is needed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from rldsl import api
from rldsl.diag import Failure
from rldsl.memory import curves
from rldsl.placement.model import Placement
from rldsl.placement.place import placements_of
from rldsl.plan.codec import decode
from rldsl.plan.events import Generate
from rldsl.plan.model import Layout, Plan
from rldsl.sharding.layout import Coordinate
from rldsl.source import SourceFile
from rldsl.verify import verify
from rldsl.verify.issue_order import CommOp, IssueOrder, deadlock_reason
from tests.end_to_end.programs import compile_program
from tests.end_to_end.test_invariance import HERE, placement
from tests.tiny import make_model, write_jsonl

PROGRAM = """cluster nodes=1 gpus=8
RULE
data prompts = jsonl("prompts.jsonl", batch=4)
model actor = causal_lm("models/sft") train adamw(lr=1e-6)
use std.sft (sft)
flow run(steps=2) {
  prompt = prompts.next()
  gen    = actor.generate(prompt) GENERATE
  lp     = actor.logprobs(gen) INFER
  x      = lp * 2
  metric x = mean(x)
  actor.train(gen, loss=sft()) TRAIN
}
"""


def program(train: str = "", generate: str = "", infer: str = "", rule: str = "") -> str:
    text = PROGRAM.replace("TRAIN", train).replace("GENERATE", generate).replace("INFER", infer)
    return text.replace("RULE\n", f"{rule}\n" if rule else "")


def degrees(place: Placement) -> tuple[int, int, int, int]:
    x = place.layout
    return x.dp, x.tp, x.pp, x.cp


@pytest.mark.parametrize("clause, expected", [
    ("on mesh(0:8) cp=4", (2, 1, 1, 4)), ("on mesh(0:8) cp=8", (1, 1, 1, 8)), ("on mesh(0:8) tp=2 cp=2", (2, 2, 1, 2)),
    ("on mesh(0:8) dp=2 cp=2 tp=2", (2, 2, 1, 2)), ("on mesh(0:8) dp=2 cp=2 pp=2 recompute=full", (2, 1, 2, 2)),
    ("on mesh(0:8) dp=1 tp=2 cp=2", (1, 2, 2, 2)), ("on mesh(0:8) cp=1", (8, 1, 1, 1))])
def test_degrees_are_inferred(clause: str, expected: tuple[int, int, int, int]) -> None:
    found = placements_of(api.build_graph(SourceFile("page.rlf", program(clause))))
    assert degrees(found["actor.train"]) == degrees(found["lp"]) == expected
    assert degrees(found["gen"]) == (expected[0] * expected[3], *expected[1:3], 1)  # the same boxes


@pytest.mark.parametrize("clauses, code, words", [
    (dict(train="on mesh(0:8)", generate="on mesh(0:8) cp=2"), "RL0318", "dp=8 no parameters have to move"),
    (dict(train="on mesh(0:8) cp=2", generate="cp=2"), "RL0318", "dp or tp"),
    (dict(train="on mesh(0:8) cp=3"), "RL0304", "product of dp, tp, pp and cp must be 8"),
    (dict(train="on mesh(0:8) dp=8 cp=2"), "RL0304", "dp=4 cp=2"),
    (dict(train="on mesh(0:8) dp=2 tp=2 pp=2 cp=2"), "RL0304", "dp=1 tp=2 pp=2 cp=2"),
    (dict(train="on mesh(0:8) dp=4 tp=1 pp=1 cp=1"), "RL0304", "dp=8"),
    (dict(train="on mesh(0:8) cp=0"), "RL0311", "cp=1"), (dict(train="on mesh(0:8) cp=2.5"), "RL0311", "cp=1"),
    (dict(train="on mesh(0:8) cp=true"), "RL0311", "cp=1"), (dict(train="on mesh(0:8) cp=2 cp=2"), "RL0311", "remove"),
    (dict(train="on mesh(0:8)", rule="place @x on mesh(0:8) cp=2"), "RL0311", "give only a mesh")])
def test_refused(clauses: dict[str, str], code: str, words: str) -> None:
    (found,) = api.check(program(**clauses), "page.rlf")
    assert found.code == code and words in (found.help or ""), found


@pytest.fixture(scope="module")
def plan(tmp_path_factory) -> Plan:
    folder = tmp_path_factory.mktemp("plan")
    base, rows = make_model(folder / "sft"), write_jsonl(folder / "prompts.jsonl", [{"prompt": "1+1="}] * 8)
    place = placement(8, actor_train="on mesh(0:8) dp=2 pp=2 cp=2")
    return decode(compile_program(HERE / "grpo_small.rlf", {"base": str(base), "rows": str(rows)}, place, folder), "p")


def codes(plan: Plan) -> set[str]:
    try:
        verify(plan)
    except Failure as failure:
        return {d.code for d in failure.diagnostics}
    return set()


def changed(items, change):
    return tuple(change(e) if isinstance(e, Generate) else
                 replace(e, body=changed(e.body, change)) if hasattr(e, "body") else e for e in items)


def test_the_verifier_takes_it(plan: Plan) -> None:
    assert not codes(plan)
    (home,) = [x for x in plan.layouts if x.cp > 1]
    assert (home.dp, home.tp, home.pp, home.cp) == (2, 1, 2, 2)


def test_the_verifier_refuses_a_generation_with_cp(plan: Plan) -> None:
    (home,) = [x for x in plan.layouts if x.cp > 1]
    assert "RL0537" in codes(replace(plan, body=changed(plan.body, lambda e: replace(e, layout=home.id))))


def test_the_verifier_misses_a_group(plan: Plan) -> None:
    assert "RL0531" in codes(replace(plan, groups=tuple(g for g in plan.groups if g.axis != "cp")))


def test_the_verifier_refuses_degrees_that_do_not_fill(plan: Plan) -> None:
    wider = tuple(replace(x, cp=4) if x.cp > 1 else x for x in plan.layouts)
    assert codes(replace(plan, layouts=wider))


@pytest.mark.parametrize("degrees", [(1, 1, 1, 2), (2, 2, 2, 2), (1, 2, 3, 4)])
def test_a_call_with_cp_does_not_wait_for_ever(degrees: tuple[int, int, int, int]) -> None:
    dp, tp, pp, cp = degrees
    layout = Layout("L", "m", dp=dp, tp=tp, pp=pp, cp=cp)
    torch = IssueOrder()
    for protocol in (torch.generate, torch.infer, torch.train, torch.save):
        assert not deadlock_reason(protocol, layout, 1) and not deadlock_reason(protocol, layout, pp + 2)


@pytest.mark.parametrize("wrong", ["once more", "two orders"])
def test_what_would_wait_for_ever_is_seen(wrong: str) -> None:
    def protocol(x: Layout, at: Coordinate, count: int):
        uses = [CommOp("cp", at.pp, at.dp), CommOp("mesh", 0, 0)]
        if wrong == "two orders":
            yield from uses if at.cp else reversed(uses)
        else:
            yield from uses[at.cp :] + uses[:1]

    assert deadlock_reason(protocol, Layout("L", "m", cp=2), 1)


def test_a_long_sequence_needs_less_memory(tmp_path: Path) -> None:
    base, rows = make_model(tmp_path / "sft"), write_jsonl(tmp_path / "prompts.jsonl", [{"prompt": "1+1="}] * 8)
    sets, found = {"base": str(base), "rows": str(rows), "tokens": 496}, []
    for cp in (1, 2, 4):
        place = placement(4, actor_train=f"on mesh(0:{cp}) cp={cp}", actor_generate="on mesh(0:4) dp=4",
                          **{"ref_*": "on mesh(0:4) dp=4"})
        plan = decode(compile_program(HERE / "grpo_small.rlf", sets, place, tmp_path), "grpo.plan")
        found.append(max(h.bytes for c in curves(plan) for h in c.holdings if h.what == "activations of actor.train"))
    assert 1.3 * found[1] < found[0] < 2 * found[1] and 1.2 * found[2] < found[1] < 2 * found[2], found
