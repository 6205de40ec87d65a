"""Plans that are made to cost: each is refused with a message, and nothing grows out of hand on the way."""

from __future__ import annotations

import json
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

import pytest
from click.testing import CliRunner

from rldsl.cli import main
from rldsl.clusters.model import FIELDS
from rldsl.diag import Failure
from rldsl.passes.reallocs import reallocs
from rldsl.passes.transfers import transfers
from rldsl.plan.codec import decode, encode
from rldsl.plan.events import Item, Loop
from rldsl.plan.expr import Node
from rldsl.plan.model import MAX_NESTED_BLOCKS, MAX_RANKS, Plan
from rldsl.plan.projection import ranges
from rldsl.semantics.options import CLUSTER
from rldsl.syntax.parse import MAX_DEPTH
from rldsl.verify import programs, verify, versions
from rldsl.verify.tables import tables
from tests.effort import calls
from tests.plan.sample import grpo
from tests.verify.faults import change, codes, faults


def refused(data: bytes) -> tuple[str, str]:
    with pytest.raises(Failure) as caught:
        decode(data, "x.plan")
    (found,) = caught.value.diagnostics
    assert found.help and found.place.startswith("x.plan:")
    return found.code, found.title


def nested(depth: int) -> bytes:
    """The sample with blocks around a free, sealed as a plan is: built as text, because encoding is not what is
    tested."""
    lines = encode(grpo()).decode().split("\n")[:-2]
    at = max(i for i, x in enumerate(lines) if '"kind":"end"' in x)  # of the loop of steps
    loops = [json.dumps({"id": f"n{i}", "kind": "loop", "trips": 2}, sort_keys=True, separators=(",", ":"))
             for i in range(depth)]
    return sealed([*lines[:at], *loops, *['{"kind":"end"}'] * depth, *lines[at:]])


def sealed(lines: list[str]) -> bytes:
    text = ("\n".join(lines) + "\n").encode()
    return text + f'{{"kind":"digest","sha256":"{sha256(text).hexdigest()}"}}\n'.encode()


def test_blocks_nest_as_deep_as_a_program_may_and_no_deeper() -> None:
    assert MAX_DEPTH < MAX_NESTED_BLOCKS
    decode(nested(MAX_NESTED_BLOCKS - 1), "x.plan")  # the loop of steps is around them
    for depth in (MAX_NESTED_BLOCKS, 1500):
        code, title = refused(nested(depth))
        assert (code, str(MAX_NESTED_BLOCKS) in title) == ("RL0607", True)


@pytest.mark.parametrize("ranks", [((0, 10**12),), ((0, 5),), ((2, 2),), ((3, 1),), ((-1, 2),), ((0, 4),) * 1000, ((0, 3), (1, 4))])
@pytest.mark.parametrize("table", ["meshes", "classes"])
def test_ranks_are_of_the_world(table: str, ranks: tuple[tuple[int, int], ...]) -> None:
    plan = grpo()
    rows = getattr(plan, table)
    code, _ = refused(encode(replace(plan, **{table: (replace(rows[0], ranks=ranks), *rows[1:])})))
    assert code == "RL0612"


@pytest.mark.parametrize("world", [0, -4, MAX_RANKS + 1, 10**15])
def test_a_world_is_bounded(world: int) -> None:
    plan = grpo()
    assert refused(encode(replace(plan, header=replace(plan.header, world=world))))[0] == "RL0612"


def test_no_cluster_that_can_be_written_is_too_large_for_a_plan() -> None:
    assert FIELDS["nodes"].high * FIELDS["gpus"].high <= MAX_RANKS
    assert CLUSTER["nodes"].high * CLUSTER["gpus"].high <= MAX_RANKS


def test_a_run_has_one_loop_of_steps() -> None:
    plan = grpo()
    assert "RL0536" in codes(replace(plan, body=tuple(x for x in plan.body if not isinstance(x, Loop))))
    loop = next(x for x in plan.body if isinstance(x, Loop))
    assert "RL0536" in codes(replace(plan, body=(*plan.body, replace(loop, id="again", body=()))))


# ------------------------------------------------------------------------------------------------------ programs


def with_nodes(*nodes: Node) -> Plan:
    """The first train's loss is `nodes`, which are what stops it too."""
    plan = grpo()
    first = plan.programs[-1]
    made = replace(first, nodes=nodes, outputs=(("loss", 0), ("stop", len(nodes) - 1)))
    return replace(plan, programs=(*plan.programs[:-1], made))


def test_a_node_that_is_its_own_argument_is_malformed() -> None:
    found = faults(with_nodes(Node("const", attrs=(("value", True),)), Node("where", (1, 1, 1))))
    assert {d.code for d in found} == {"RL0616"}


def test_truth_of_shared_arguments_is_found_once() -> None:
    """Each node is twice an argument of the next: 2 ** 200 ways to the first."""
    first = Node("const", attrs=(("value", True),))
    plan = with_nodes(first, *(Node("where", (0, i, i)) for i in range(200)))
    assert all(programs._truths(plan.programs[-1], set()))
    assert calls(lambda: codes(plan)) < 100_000


def test_truth_follows_the_arguments() -> None:
    true, one = Node("const", attrs=(("value", True),)), Node("const", attrs=(("value", 1.0),))
    given = with_nodes(true, one, Node("where", (0, 0, 0)), Node("where", (0, 0, 1)), Node("lt", (1, 1)),
                       Node("stop_gradient", (1,)), Node("input", attrs=(("name", "b"),)))
    assert programs._truths(given.programs[-1], {"b"}) == [True, False, True, False, True, False, True]
    assert not programs._truths(given.programs[-1], set())[-1]


# --------------------------------------------------------------------------------------------------------- loops


def around(items: tuple[Item, ...], depth: int) -> tuple[Item, ...]:
    for i in range(depth):
        items = (Loop(f"n{i}", 2, items),)
    return items


def test_loops_in_loops_are_not_walked_again_and_again() -> None:
    """2 ** 60 walks otherwise."""
    plan = grpo()
    t = tables(replace(plan, body=around(next(x for x in plan.body if isinstance(x, Loop)).body, 60)))
    assert calls(lambda: versions._run(t, t.plan.body, versions.CopyStates(), [], {})) < 500_000


def test_reallocs_walk_loops_in_loops_once() -> None:
    from rldsl.passes.lengths import lengths
    from rldsl.passes.loads import loads
    from rldsl.passes.node_events import node_events
    from rldsl.placement.place import place_graph
    from tests.compiler.graphs import family, ppo

    draft = loads(lengths(transfers(node_events(place_graph(ppo(), "", family)))))
    deep, made = replace(draft, body=around(draft.body, 40)), []
    assert calls(lambda: made.append(reallocs(deep))) < 500_000 and made[0].body != draft.body


# ------------------------------------------------------------------------------------------------------ messages


def test_every_message_says_how_to_mend() -> None:
    plan = grpo()
    for broken in (change(plan, 4, bytes=7), change(plan, 17, mesh="all"), replace(plan, classes=plan.classes[1:]),
                   change(plan, 4, mesh="no")):
        assert all("compile the program again" in d.help and "report" in d.help for d in faults(broken))


def test_an_event_of_no_mesh_says_how_to_mend() -> None:
    event = replace(next(x for x in grpo().body if not isinstance(x, Loop)), mesh="no")
    with pytest.raises(Failure) as caught:
        ranges(grpo(), event)
    assert "compile the program again" in caught.value.diagnostics[0].help


def test_only_proved_plans_are_simulated(tmp_path: Path) -> None:
    good, bad = tmp_path / "good.plan", tmp_path / "bad.plan"
    good.write_bytes(encode(grpo()))
    bad.write_bytes(encode(replace(grpo(), classes=grpo().classes[1:])))
    found = CliRunner().invoke(main, ["diff", str(good), str(bad), "--cluster", "h100x8"])
    assert found.exit_code == 2 and "RL0541" in found.output and "bad.plan" in found.output
    assert CliRunner().invoke(main, ["diff", str(good), str(bad)]).exit_code == 1  # no proof is needed to compare
    verify(decode(good.read_bytes(), "good.plan"))
