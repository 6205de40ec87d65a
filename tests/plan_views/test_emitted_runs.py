"""An emitted program in a real world computes what the plan does, number for number."""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
from bdb import BdbQuit
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rldsl import api
from rldsl.commands.emit import emit
from rldsl.diag import Failure
from rldsl.plan.codec import encode
from rldsl.plan.events import Generate, split_buffer
from rldsl.plan.projection import event_paths
from rldsl.runtime.metrics.names import computed
from tests.plan_views.programs import GENERATE, GRPO, PPO
from tests.tiny import make_all
from tests.torchrun import begun
from tests.world import run_world

WORLD = 4


def walked(rank: int, cwd: str, out: str, program: str) -> None:
    """One rank of a run. program: the emitted file, "" for the plan itself."""
    from rldsl.runtime.interpreter.interpreter import Interpreter, execute
    from rldsl.runtime.plan_file import PlanFile

    os.chdir(cwd)
    made = runpy.run_path(program)["PROGRAM"] if program else None
    data = Path("some.plan").read_bytes()
    if made is not None:
        made.check_plan(PlanFile.from_bytes(data, "some.plan"))
    execute(PlanFile.from_bytes(data, "some.plan"), out, run=made.run if made is not None else Interpreter.run)


def lines(folder: Path) -> list[dict[str, float]]:
    found = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{"step": line["step"], **{name: line[name] for name in computed(line)}} for line in found]


def files(folder: Path) -> set[str]:
    """What the run left behind, besides what tells of its time."""
    return {str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file()}


def compiled(folder: Path, tiny: Path, program: str) -> Path:
    """`folder` with a plan of the program and what it reads."""
    for name in ("models", "data"):
        (folder / name).symlink_to(tiny / name)
    with pytest.MonkeyPatch.context() as here:
        here.chdir(folder)
        Path("some.rlf").write_text(program)
        Path("some.plan").write_bytes(encode(api.compile("some.rlf")))
    return folder


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_all(tmp_path_factory.mktemp("tiny"), num_hidden_layers=2)


@pytest.fixture(scope="module", params=["ppo", "grpo"])
def place(request: pytest.FixtureRequest, tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a plan, and what a run of it left under `plain`."""
    folder = compiled(tmp_path_factory.mktemp(request.param), tiny, {"ppo": PPO, "grpo": GRPO}[request.param])
    run_world(WORLD, walked, str(folder), "plain", "")
    return folder


@pytest.mark.thorough
@pytest.mark.parametrize("rank", [None, 2], ids=["all", "one"])
def test_the_same_numbers(place: Path, rank: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place)
    if rank is not None and not (place / "plain/checkpoints").exists():
        return  # one program is enough for a rank beside others that run the plan
    out = "all" if rank is None else "one"
    Path(f"{out}.py").write_text(emit("some.plan", rank, f"{out}.py"))
    run_world(WORLD, walked, str(place), out, f"{out}.py")
    assert lines(place / out) == lines(place / "plain") and len(lines(place / out)) == 3
    assert files(place / out) == files(place / "plain")


def test_the_programs_have_what_they_are_to_show(place: Path) -> None:
    """Saves; and of the one with blocks also a checkpoint, an evaluation every second step, turns that differ."""
    found = {name.split("/")[0] for name in files(place / "plain")}
    assert "step-2" in found
    if "checkpoints" in found:
        assert [("heldout_length" in line) for line in lines(place / "plain")] == [False, True, False]


@pytest.mark.thorough
def test_under_torchrun_with_a_debugger(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = compiled(tmp_path, tiny, GENERATE.replace("RANKS", "2"))
    monkeypatch.chdir(folder)
    run_world(2, walked, str(folder), "plain", "")
    text = emit("some.plan", 1, "one.py")
    assert text.count("        run.lengths(") == 1
    stop = "        if step == 2: breakpoint()\n"
    Path("one.py").write_text(text.replace("        run.lengths(", f"{stop}        run.lengths("))
    typed = ["p step, run.state.step.number", f"p run.value('gen.tokens@{_spread(folder)}').ids.tolist()",
             "p run.value('no@s9')", "c", ""]
    with begun(folder, "--nproc-per-node", "2", "one.py", "--plain", "--out", "out", typed="\n".join(typed)) as agent:
        assert agent.wait(200) == 0, agent.said()
    assert all(word in agent.said() for word in ("(2, 2)", "[2, 3]", "RL0792"))
    assert lines(folder / "out") == lines(folder / "plain")


@pytest.mark.thorough
def test_as_it_is_started_by_hand(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Executed, with nothing imported yet, by torchrun's own command."""
    folder = compiled(tmp_path, tiny, GENERATE.replace("RANKS", "2"))
    monkeypatch.chdir(folder)
    run_world(2, walked, str(folder), "plain", "")
    Path("all.py").write_text(emit("some.plan", None, "all.py"))
    ran = subprocess.run([sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
                          "all.py", "--plain", "--out", "out"], capture_output=True, text=True, timeout=200,
                         env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert ran.returncode == 0, ran.stderr
    assert lines(folder / "out") == lines(folder / "plain")


def _spread(folder: Path) -> str:
    """Where the sampled tokens are when they are made."""
    plan = api.read_plan(str(folder / "some.plan"))
    return next(split_buffer(b)[1] for e, _ in event_paths(plan) if isinstance(e, Generate) for b in e.writes)


def probed(rank: int, cwd: str) -> list[str]:
    """What a rank says to calls of events, loops and values that it does not have; then it runs the plan."""
    from rldsl.runtime.interpreter.emitted_program import Program, Rank
    from rldsl.runtime.interpreter.interpreter import execute
    from rldsl.runtime.plan_file import PlanFile

    os.chdir(cwd)
    said: list[str] = []

    def probe(run: Rank) -> None:
        for wrong in (lambda: run.generate(0), lambda: run.load(99), lambda: run.free(-1),
                      lambda: list(run.loop("turns")), lambda: run.value("gen.tokens@s0"),
                      lambda: run.value("actor@L0")):
            try:
                wrong()
            except Failure as failure:
                said.append(failure.diagnostics[0].code)
        run._interpreter.run()
        said.append(str(run.state.step.number))

    execute(PlanFile.read("some.plan"), "out", run=Program("", "", ((probe, (range(1),)),)).run)
    return said


def test_what_a_rank_does_not_have(tiny: Path, tmp_path: Path) -> None:
    folder = compiled(tmp_path, tiny, GENERATE.replace("RANKS", "1"))
    assert run_world(1, probed, str(folder)) == [["RL0792"] * 6 + ["2"]]


@pytest.mark.parametrize("rank, ended", [(0, True), (1, True), (2, False), (5, True)])
def test_leaving_the_debugger_is_an_interrupt(rank: int, ended: bool) -> None:
    from rldsl.runtime.interpreter.emitted_program import Program

    def leave(run: object) -> None:
        raise BdbQuit

    whole: list[int] = []
    walk: Any = SimpleNamespace(state=SimpleNamespace(context=SimpleNamespace(rank=rank)), items=(),
                                run=lambda: whole.append(rank))
    program = Program("id", "a.plan", ((leave, (range(0, 2), range(4, 6))),))
    if ended:
        with pytest.raises(KeyboardInterrupt):
            program.run(walk)
    else:
        program.run(walk)
    assert whole == ([] if ended else [rank])
