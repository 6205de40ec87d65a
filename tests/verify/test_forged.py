"""Plans that are made by hand to violate what `sharding`, `reshard`, `memory` and `simulate` rely on: the verifier
refuses each with a code before any of these packages sees it, so none ends in an internal error or a traceback."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from rldsl.diag import InternalError
from rldsl.plan.events import Realloc, Train, Transfer
from rldsl.plan.model import Plan, Split
from rldsl.plan.projection import event_paths
from rldsl.plan.spaces import indexed_frames
from rldsl.sharding import boxes, layout, partition
from tests.plan.sample import grpo
from tests.verify.faults import change, codes, row


def first(plan: Plan, kind: type) -> int:
    """The id of the first event of a kind."""
    return next(e.id for e, _ in event_paths(plan) if isinstance(e, kind))


def parameter(plan: Plan, layered: bool = False, **new: object) -> Plan:
    """The plan with another first parameter that is divided, in its first model. layered: one per layer."""
    params = list(plan.models[0].params)
    at = next(i for i, p in enumerate(params) if p.split is not None and ("{}" in p.name) == layered)
    params[at] = replace(params[at], **new)
    return row(plan, "models", 0, params=tuple(params))


def size_of(plan: Plan, mesh: str) -> int:
    return next(len(m.members()) for m in plan.meshes if m.id == mesh)


@pytest.mark.parametrize("more", [False, True])
def test_a_node_of_a_program_with_too_few_or_too_many_arguments_is_refused(more: bool) -> None:
    """Whichever node it is: the check of losses looks at the arguments of reductions and divisions."""
    plan, tried = grpo(), 0
    for number, program in enumerate(plan.programs):
        for i, node in enumerate(program.nodes):
            if not (i if more else node.args):
                continue
            args = (*node.args, 0) if more else node.args[:-1]
            forged = (*program.nodes[:i], replace(node, args=args), *program.nodes[i + 1 :])
            tried += 1
            assert "RL0616" in codes(row(plan, "programs", number, nodes=forged)), (program.id, node)
    assert tried >= 8


@pytest.mark.parametrize("attrs", [(("function", "exact"), ("frame", "wen")), (("function", "exact"), ("freme", "gen")),
                                   (("function", "exakt"), ("frame", "gen"))])
def test_a_python_call_of_unknown_rows_or_functions_is_refused(attrs: tuple[tuple[str, str], ...]) -> None:
    """Several checks look at it; the others leave it to the one that reports it."""
    plan, tried = grpo(), 0
    for number, program in enumerate(plan.programs):
        for i, node in enumerate(program.nodes):
            if node.op == "py":
                forged = (*program.nodes[:i], replace(node, attrs=attrs), *program.nodes[i + 1 :])
                tried += 1
                assert "RL0616" in codes(row(plan, "programs", number, nodes=forged))
    assert tried == 1


def divided(plan: Plan) -> int:
    """The number of the first spread that divides rows."""
    return next(i for i, s in enumerate(plan.spreads) if s.granularity != "all")


def train_spread(plan: Plan) -> int:
    train = next(e for e, _ in event_paths(plan) if isinstance(e, Train))
    return next(i for i, s in enumerate(plan.spreads) if s.id == train.spread)


def unequal_frames(plan: Plan) -> Plan:
    """A spread that divides two frames with different numbers of rows."""
    at = train_spread(plan)
    frames = indexed_frames(plan)
    other = next(f for f in frames.values() if f.count != frames[plan.spreads[at].frames[0]].count)
    return row(plan, "spreads", at, frames=(*plan.spreads[at].frames, other.id))


FORGED: dict[str, Callable[[Plan], Plan]] = {
    "a layout that does not fill its mesh": lambda p: row(p, "layouts", 0, dp=p.layouts[0].dp + 1),
    "a layout with a degree of 0": lambda p: row(p, "layouts", 0, tp=0),
    "a layout with a negative degree": lambda p: row(p, "layouts", 0, dp=-p.layouts[0].dp),
    "a layout on another mesh": lambda p: row(p, "layouts", 0, mesh=next(
        m.id for m in p.meshes if len(m.members()) != size_of(p, p.layouts[0].mesh))),
    "more stages than layers": lambda p: row(p, "models", 0, layers=0),
    "parts that do not fill a dimension": lambda p: parameter(p, split=Split(0, ((1, 3),))),
    "a split along a dimension that does not exist": lambda p: parameter(p, split=Split(7, ((1, 3),))),
    "experts that ep does not divide": lambda p: parameter(p, experts=3),
    "a parameter of each layer that all stages hold": lambda p: parameter(p, layered=True, stage="all"),
    "a parameter of no layer that the stage of its layer holds": lambda p: parameter(p, stage="layer"),
    "a spread without frames": lambda p: row(p, "spreads", divided(p), frames=()),
    "a spread of unknown frames": lambda p: row(p, "spreads", divided(p), frames=("nothing",)),
    "a spread of frames with different numbers of rows": unequal_frames,
    "a spread with slots and minibatches": lambda p: row(p, "spreads", train_spread(p), balance_by="slot"),
    "a frame that cuts a prompt": lambda p: row(p, "spaces", len(p.spaces) - 1, fan=7),
    "a realloc between layouts of which one does not exist": lambda p: change(p, first(p, Realloc), dst="L99"),
    "a transfer from a spread that does not exist": lambda p: change(p, first(p, Transfer), src="s99"),
    "no iterations of a frame": lambda p: row(p, "spaces", 0, iterations=0),
    "no minibatches": lambda p: row(p, "spreads", train_spread(p), minibatches=0),
}


@pytest.mark.parametrize("forge", FORGED.values(), ids=FORGED.keys())
def test_a_forged_plan_is_refused_with_a_code(forge: Callable[[Plan], Plan]) -> None:
    found = codes(forge(grpo()))  # which raises what is no Failure: an internal error, or any other
    assert found and all(code[:4] in ("RL05", "RL06") and code != "RL0699" for code in found)


def test_without_the_verifier_they_are_internal_errors() -> None:
    """What the verifier must refuse is not silently computed either."""
    plan = grpo()
    x, mesh = plan.layouts[0], next(m for m in plan.meshes if m.id == plan.layouts[0].mesh)
    for wrong in (replace(x, dp=x.dp + 1), replace(x, mesh="elsewhere")):
        with pytest.raises(InternalError, match="RL0699"):
            layout.coordinate(wrong, mesh, mesh.members()[0])
    spec = next(p for p in plan.models[0].params if p.split is not None)
    with pytest.raises(InternalError, match="parts fill 3 of"):
        boxes.pieces(replace(spec, split=Split(0, ((1, 3),))), 1, 0)
    spread = replace(plan.spreads[divided(plan)], frames=("nothing",))
    with pytest.raises(InternalError, match="unknown frames"):
        partition.rows_by_dp(spread, 2, plan.frames, {}, 0, 0)
