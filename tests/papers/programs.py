"""The examples that follow papers, as copies that tests can run: small, with models that differ, and with Python
functions that write down what they see."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from contextlib import chdir, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rldsl import api
from rldsl.plan.codec import encode
from rldsl.runtime.metrics.names import computed
from tests.end_to_end.programs import Metrics
from tests.end_to_end.reference import Sample
from tests.responses import followed, recorded
from tests.tiny import make_all
from tests.world import run_world

EXAMPLES = Path(__file__).parents[2] / "examples"
RECORDER = """

def _noted(name, function):
    def call(rows):
        import json, os
        found = function(rows)
        with open(os.environ["SEEN"], "a", encoding="utf-8") as file:
            for row, result in zip(rows, found):
                file.write(json.dumps([name, row, result]) + chr(10))
        return found
    return call

for _name in [x for x, f in globals().items() if callable(f) and not x.startswith("_")]:
    globals()[_name] = _noted(_name, globals()[_name])
"""
REWARDS = """
def exact_match(rows):
    return [float(sum(x in "0123456789" for x in row["completion"]) % 3) for row in rows]

def seen(rows):
    return [1.0 for _ in rows]

def taken(rows):
    return [1.0 for _ in rows]
"""

VINE = """
from rldsl.stdlib.rewards import whole as _whole

def right(rows):
    return [float(sum(map(ord, row["completion"])) % 5) for row in rows]

def right_after(rows):
    return [float(sum(map(ord, row["completion"])) % 5) for row in _whole(rows, "gen")]
"""


@dataclass(frozen=True)
class Program:
    """A copy of an example in a directory of its own, below one with the models and data."""

    name: str
    folder: Path
    text: str
    sets: Mapping[str, Any]

    def compiled(self, place: str) -> bytes:
        """The plan. place: a placement file's text."""
        path = self.folder / f"{self.name}.rlf"
        path.write_text(self.text)
        rules = self.folder / "place.rlf"
        rules.write_text(place)
        with chdir(self.folder.parent):
            return encode(api.compile(str(path), dict(self.sets), str(rules)))

    def rows(self, function: str) -> list[tuple[dict[str, Any], Any]]:
        """(row, result) of each call of a Python function, in order, of a run of this name on one rank."""
        lines = (self.folder.parent / "out" / self.name / "seen.0.jsonl").read_text().splitlines()
        return [(row, x) for name, row, x in map(json.loads, lines) if name == function]


def sample(row: dict[str, Any], reward: float = 0.0) -> Sample:
    return Sample(row["prompt_ids"], row["completion_ids"], reward)


def root(folder: Path) -> Path:
    """Models and data of the examples; the judge has other letters under other ids."""
    return make_all(folder, num_hidden_layers=2)


def program(base: Path, name: str, /, *edits: tuple[str, str], note: bool = False, **sets: Any) -> Program:
    """The example `name`, with texts replaced. note: the Python functions of a run `x` write what they see on rank i to
    `out/x/seen.i.jsonl`."""
    folder = base / name
    folder.mkdir()
    text = (EXAMPLES / f"{name}.rlf").read_text()
    for old, new in edits:
        assert re.search(old, text), f"{old} is not in {name}"
        text = re.sub(old, new, text)
    recorder = RECORDER if note else ""
    (folder / "judge.py").write_text((EXAMPLES / "judge.py").read_text() + recorder)
    (folder / "rewards.py").write_text(REWARDS + recorder)
    (folder / "vine.py").write_text(VINE + recorder)
    return Program(name, folder, text, sets)


def run_all(size: int, plans: Mapping[str, bytes], base: Path,
            like: Mapping[str, Path] | None = None) -> dict[str, Metrics]:
    """The metrics of several plans, one after the other in one world of `size` ranks. like: the recorded responses that
    each of them follows; without it they are recorded."""
    given = {name: like[name] if like else base / "responses" / name for name in plans}
    run_world(size, _rank, dict(plans), str(base), given, like is not None, timeout=300.0)
    made = {}
    for name in plans:
        lines = map(json.loads, (base / "out" / name / "metrics.jsonl").read_text().splitlines())
        made[name] = Metrics(({k: line[k] for k in computed(line)} for line in lines), given[name])
    return made


def _rank(rank: int, plans: dict[str, bytes], base: str, responses: dict[str, Path], follow: bool) -> None:
    from rldsl.runtime.interpreter.interpreter import execute
    from rldsl.runtime.interpreter.options import Options
    from rldsl.runtime.plan_file import PlanFile

    os.chdir(base)
    for name, data in plans.items():
        with (open(f"{base}/said", "a", encoding="utf-8") as said, redirect_stdout(said), redirect_stderr(said),
              followed(responses[name]) if follow else recorded(responses[name])):
            plan, out = PlanFile.from_bytes(data, f"{name}.plan"), f"{base}/out/{name}"
            os.environ["SEEN"] = f"{out}/seen.{rank}.jsonl"
            execute(plan, out, options=Options(allow_write=(base,)))
