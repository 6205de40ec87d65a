"""The tutorial, done as it says: its files written, its commands run, its texts compared with what comes out."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from click.testing import CliRunner

from rldsl.cli import main
from tests.docs.pages import ROOT, files
from tests.forked import command
from tests.torchrun import begun

pytestmark = pytest.mark.thorough
PAGE = (ROOT / "docs/tutorial.md").read_text()
_FENCE = re.compile(r"(?:<!-- (\w+)(?:: ([\w.]+))? -->\n)?(?:<!--[^\n]*-->\n)?^```(\w+)\n(.*?)^```$",
                    re.MULTILINE | re.DOTALL)
SLOW = ("examples/tiny.py", "compile", "plot", "report")  # they would load torch, or matplotlib, to do little


def marked(mark: str, name: str) -> list[str]:
    """The fences after `<!-- MARK: NAME -->`."""
    return [body for found, its, _, body in _FENCE.findall(PAGE) if (found, its) == (mark, name)]


@dataclass(frozen=True, slots=True)
class Done:
    """folder: where it was done. said: command -> what it printed."""

    folder: Path
    said: dict[str, str] = field(default_factory=dict)

    def metrics(self, run: str) -> list[dict[str, float]]:
        return [json.loads(line) for line in (self.folder / run / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Done]:
    """All commands, in order, in a folder that has what a checkout has: as a shell runs them, or forked: SLOW, and
    torchrun (that it is executed: `tests/cluster/test_two_hosts.py`)."""
    folder = tmp_path_factory.mktemp("tutorial")
    (folder / "examples").symlink_to(ROOT / "examples")
    for name, body in files(PAGE).items():
        (folder / name).write_text(body)
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    found = Done(folder)
    with pytest.MonkeyPatch.context() as here:
        here.chdir(folder)
        for line in "".join(marked("sh", "run")).splitlines():
            program, *words = shlex.split(line)
            if program == "torchrun":
                with begun(folder, *words) as agent:
                    assert agent.wait(120) == 0, agent.said()
                    found.said[line] = agent.said()
                continue
            if words[0] in SLOW:
                ran = command(*({"rlc": ["rldsl.cli"], "python": []}[program] + words))
            else:
                ran = subprocess.run(line, shell=True, capture_output=True, text=True,
                                     env=os.environ | {"PATH": path, "OMP_NUM_THREADS": "1"})
            assert ran.returncode == 0, f"{line}\n{ran.stdout}{ran.stderr}"
            found.said[line] = ran.stdout
    yield found


def test_every_fence_is_run_or_compared() -> None:
    marks = [found for found, _, language, _ in _FENCE.findall(PAGE)]
    assert len(marks) > 12 and "" not in marks and marks.count("sh") == PAGE.count("```bash")


def test_what_is_printed(done: Done) -> None:
    (checked,) = marked("output", "")
    assert done.said["rlc check digits.rlf"] == checked
    (line,) = marked("output", "part")
    assert line in done.said["rlc compile digits.rlf --place two.rlf --set steps=5"]
    assert "critical path" in done.said["rlc sim digits.plan --cluster h100x8"]


def test_the_model_learns(done: Done) -> None:
    found = done.metrics("runs/digits")
    assert len(found) == 20 and found[0]["reward"] < 0.3 and found[-1]["reward"] > 0.9
    for line in marked("output", "metrics")[0].splitlines():
        step, reward = re.fullmatch(r"step +(\d+)/20  reward (\S+)", line).groups()
        assert found[int(step) - 1]["reward"] == pytest.approx(float(reward), abs=0.06)


def test_two_processes_give_the_same(done: Done) -> None:
    one, two = done.metrics("runs/digits")[:5], done.metrics("runs/two")
    assert [x["reward"] for x in one] == pytest.approx([x["reward"] for x in two], abs=0.01)


def test_files_are_there(done: Done) -> None:
    for name in ("digits.svg", "digits.html", "digits.plan", "runs/digits/run.plan",
                 "runs/digits/step-20/actor/config.json"):
        assert (done.folder / name).stat().st_size > 100, name
    assert re.search(r"digits +digits.rlf +finished +20/20", done.said["rlc runs"])


def test_the_trained_model_answers_with_digits(done: Done, monkeypatch: pytest.MonkeyPatch,
                                               capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(done.folder)
    exec("".join(marked("py", "trained")), {})
    answer = capsys.readouterr().out.strip().removeprefix("12+34=").replace(" ", "")
    digits = re.sub(r"\D", "", answer.partition("=")[2] or answer)
    assert len(digits) >= 6


def test_the_mistake_is_told_as_it_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name, body in files(PAGE).items():
        Path(name).write_text(body.replace("ref=ref_lp", "ref=rf_lp"))
    ran = CliRunner().invoke(main, ["check", "digits.rlf"])
    assert ran.exit_code == 1 and marked("output", "rf_lp")[0] in ran.output
