"""`rlc emit`: the program has every event of its ranks once, in order and in its blocks, and nothing of it comes from
texts of the plan; it takes its own plan alone."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest
from click.testing import CliRunner, Result

from rldsl.cli import main
from rldsl.commands.emit import emit
from rldsl.plan.codec import plan_id
from rldsl.plan.events import Event, When, Item
from rldsl.plan.model import Plan
from rldsl.plan.projection import class_of, schedule
from tests.forked import command
from tests.plan_views.plans import edit, encode, grpo, renumbered

Golden = Callable[[str, str], None]
SAMPLE = grpo()


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.plan").write_bytes(encode(SAMPLE))
    (tmp_path / "grpo.rlf").write_text("flow grpo {}\n")
    return tmp_path


def rlc(*arguments: str) -> Result:
    return CliRunner().invoke(main, arguments)


def shape(items: tuple[Item, ...]) -> list[Any]:
    """Events by kind and id, blocks as lists with what begins them."""
    return [(type(i).__name__.lower(), i.id) if isinstance(i, Event) else
            [i.head if isinstance(i, When) else f"loop {i.id}", *shape(i.body)] for i in items]


def shape_of(body: list[ast.stmt], turn: str = "") -> list[Any]:
    """The same of a function. Raises AssertionError where anything else stands in it."""
    found: list[Any] = []
    for statement in body:
        match statement:
            case ast.Expr(ast.Constant(str())) if statement is body[0] and not turn:
                pass
            case ast.Expr(ast.Call(ast.Attribute(ast.Name("run"), kind), [ast.Constant(int(id))], [])):
                found.append((kind, id))
            case ast.For(ast.Name(variable), ast.Call(ast.Attribute(ast.Name("run"), "loop"), [ast.Constant(str(id))],
                                                      []), inner, []):
                assert variable != turn
                found.append([f"loop {id}", *shape_of(inner, variable)])
            case ast.If(ast.Compare(ast.BinOp(ast.Name(variable), ast.Mod(), ast.Constant(int(period))), [ast.Eq()],
                                    [ast.Constant(0)]), inner, []):
                assert variable == turn
                found.append([f"every {period}", *shape_of(inner, turn)])
            case _:
                raise AssertionError(ast.unparse(statement))
    return found


def functions(text: str) -> Iterator[tuple[list[int], list[Any]]]:
    """The ranks of each function of a program, and its shape. Nothing but functions, two imports, the program and its
    start may stand in it."""
    tree = ast.parse(text)
    doc, *rest = tree.body
    assert isinstance(doc, ast.Expr)
    kinds = [type(s).__name__ for s in rest]
    assert kinds == ["ImportFrom"] * 2 + ["FunctionDef"] * (len(kinds) - 4) + ["Assign", "If"]
    program = rest[-2]
    assert isinstance(program, ast.Assign) and isinstance(program.value, ast.Call)
    listed = next(k.value for k in program.value.keywords if k.arg == "schedules")
    pairs: Any = listed
    ranks = {pair.elts[0].id: [r for c in pair.elts[1].elts for r in range(*map(ast.literal_eval, c.args))]
             for pair in pairs.elts}
    for f in rest[2:-2]:
        assert isinstance(f, ast.FunctionDef)
        yield ranks.pop(f.name), shape_of(f.body)
    assert not ranks


# ---------------------------------------------------------------------------------------------------- the program


def test_golden(work: Path, golden: Golden) -> None:
    text = emit("a.plan", None, "a_ranks.py")
    golden("plans/emitted.py", text.replace(plan_id(encode(SAMPLE)), "PLAN"))


@pytest.mark.parametrize("rank", [None, 0, 3])
def test_it_is_the_projection(work: Path, rank: int | None) -> None:
    found = dict((r, body) for ranks, body in functions(emit("a.plan", rank)) for r in ranks)
    assert sorted(found) == ([rank] if rank is not None else [0, 1, 2, 3])
    for r, body in found.items():
        assert body == shape(schedule(SAMPLE.body, SAMPLE.meshes, r)), r


def test_ranks_that_do_the_same_share_a_function(work: Path) -> None:
    apart = [replace(c, ranks=((r, r + 1),), peak_bytes=r)
             for c in SAMPLE.classes for a, b in c.ranks for r in range(a, b)]
    (work / "b.plan").write_bytes(encode(replace(SAMPLE, classes=tuple(apart))))
    assert [ranks for ranks, _ in functions(emit("b.plan", None))] == [[0, 1], [2, 3]]
    assert class_of(SAMPLE, 0) is class_of(SAMPLE, 1)


def test_each_line_says_what_it_is(work: Path) -> None:
    lines = [line for line in emit("a.plan", None).splitlines() if re.match(r" +run\.\w+\(", line)]
    assert len(lines) == sum(len(c.events) for c in SAMPLE.classes) and all(len(line) <= 120 for line in lines)
    said = {line.partition("(")[2].partition(")")[0]: line.partition("# ")[2] for line in lines}
    assert said["5"] == "grpo.rlf:9 gen = actor.generate" and said["17"] == "grpo.rlf:13 actor"
    assert said["7"] == "gen.tokens (ref_lp reads gen)" and all(said.values())


def test_no_path_of_the_machine(work: Path) -> None:
    assert str(work) not in emit("a.plan", None) and str(Path.home()) not in emit("a.plan", None)


def test_nodes_of_several_devices(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rldsl.commands.emit.verify", lambda plan: None)  # the sample's moves are those of one node
    (work / "b.plan").write_bytes(encode(replace(SAMPLE, header=replace(SAMPLE.header, devices_per_node=2))))
    text = emit("b.plan", None)
    assert "torchrun --nnodes 2 --nproc-per-node 2 b_ranks.py b.plan" in text


# ----------------------------------------------------------------------------------- texts of a plan are no code

EVIL = ['"""\nimport os\nos.abort()\n"""', "a\nos.abort()", "a\rb", "\\", "\\\"\"\"", "'''", "{{ 7 * 7 }}", "{% if %}",
        "#", "\u2028os.abort()", "\x0cb", "\x00", "\u202eevil", "é 漢"]


def tainted(plan: Plan, evil: str) -> Plan:
    """`evil` in the program's name, in positions, reasons, and the names of loops and metrics."""
    def step(item: Item) -> Iterator[Item]:
        if isinstance(item, Event):
            item = replace(item, at=evil, because=evil if item.because else "")
        elif not isinstance(item, When):
            item = replace(item, id=evil)
        yield item

    return replace(plan, body=edit(plan.body, step), header=replace(plan.header, program=evil, flow=evil))


@pytest.mark.parametrize("evil", EVIL)
@pytest.mark.parametrize("rank", [None, 1])
def test_texts_of_a_plan_bring_no_code(work: Path, evil: str, rank: int | None) -> None:
    plan = tainted(SAMPLE, evil)
    (work / "b.plan").write_bytes(encode(plan))
    for ranks, body in functions(emit("b.plan", rank)):
        assert body == shape(schedule(plan.body, plan.meshes, ranks[0]))


@pytest.mark.parametrize("name", ['a";x.plan', "a b.plan", "a'b.plan", "a{{b}}.plan", "ä.plan"])
def test_names_of_files_bring_no_code(work: Path, name: str) -> None:
    (work / name).write_bytes(encode(SAMPLE))
    text = emit(name, None, f"{name}.py")
    assert len(list(functions(text))) == 2
    file = re.search(r"^    file=(.*),$", text, re.MULTILINE)
    assert file is not None and ast.literal_eval(file[1]) == name


# ------------------------------------------------------------------------------------------------------- the command


def test_the_command(work: Path) -> None:
    shown = rlc("emit", "a.plan", "--rank", "all")
    assert shown.exit_code == 0 and shown.output == emit("a.plan", None)
    assert rlc("emit", "a.plan", "--rank", "2", "-o", "two.py").output == "wrote two.py\n"
    made = emit("a.plan", 2, "two.py")
    assert (work / "two.py").read_text() == made and "two.py a.plan" in made


@pytest.mark.parametrize("rank", ["4", "77777777777"])
def test_no_such_rank(work: Path, rank: str) -> None:
    found = rlc("emit", "a.plan", "--rank", rank)
    assert found.exit_code == 1 and "RL0608" in found.output


@pytest.mark.parametrize("arguments", [(), ("--rank",), *(("--rank", given) for given in ("-1", "one", "1,2", ""))])
def test_usage(work: Path, arguments: tuple[str, ...]) -> None:
    assert rlc("emit", "a.plan", *arguments).exit_code == 2


@pytest.mark.parametrize("file, code", [("grpo.rlf", "RL0601"), ("gone.plan", "RL0091"), (".", "RL0092")])
def test_what_is_no_plan(work: Path, file: str, code: str) -> None:
    found = rlc("emit", file, "--rank", "all", "-o", "x.py")
    assert found.exit_code == 1 and code in found.output and not (work / "x.py").exists()


def test_a_plan_that_cannot_be_proved_is_not_emitted(work: Path) -> None:
    (work / "b.plan").write_bytes(encode(replace(SAMPLE, classes=SAMPLE.classes[:1])))
    found = rlc("emit", "b.plan", "--rank", "0", "-o", "x.py")
    assert found.exit_code == 1 and "RL05" in found.output and not (work / "x.py").exists()


def test_a_place_that_cannot_be_written(work: Path) -> None:
    assert "RL0094" in rlc("emit", "a.plan", "--rank", "all", "-o", "no/where.py").output


# -------------------------------------------------------------------------------- a program and the plan it is given


def start(*arguments: str, world: int = 4) -> CompletedProcess[str]:
    """The emitted program as one rank, without the others: what it refuses, it refuses before it looks for them."""
    return command(*arguments, env={"RANK": "0", "WORLD_SIZE": str(world)})


def test_another_plan_is_refused(work: Path) -> None:
    (work / "b.plan").write_bytes(encode(renumbered(SAMPLE, 1)))
    (work / "run.py").write_text(emit("a.plan", None, "run.py"))
    for file, code in (("b.plan", "RL0791"), ("gone.plan", "RL0700"), ("grpo.rlf", "RL0601")):
        found = start("run.py", file)
        assert found.returncode == 1 and code in found.stderr and "Traceback" not in found.stderr, found.stderr
    assert plan_id(encode(SAMPLE)) in start("run.py", "b.plan").stderr


def test_its_own_plan_is_the_default(work: Path) -> None:
    (work / "run.py").write_text(emit("a.plan", None, "run.py"))
    assert "RL0701" in start("run.py", world=3).stderr  # it is read, and another world is refused
    (work / "a.plan").unlink()
    assert "RL0700" in start("run.py").stderr
