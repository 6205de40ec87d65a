"""Real steps on a device that the host cannot reach: nothing waits for it, copies to it or mixes with it but where that
is allowed (`device_allowed.py`), no stream uses what another one has not finished, and decode steps are captured."""

from __future__ import annotations

import ast
import json
import random
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rldsl.runtime.metrics.names import computed
from tests.cuda_paths.device_allowed import HOT, PLACES
from tests.cuda_paths.device_guard import ROOT, Border
from tests.cuda_paths.device_programs import CASES, Found, prepare, run
from tests.end_to_end.programs import run_program

ONE = CASES["one rank"]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare(tmp_path_factory.mktemp("device"))


@pytest.fixture(autouse=True)
def there(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tiny)


def refused(found: Iterable[Found]) -> list[str]:
    """The crossings that are not allowed, each with its line."""
    return sorted({f"{border}{f', in {region}' * bool(region)}" for rank in found for region, border in rank.crossings
                   if border.kind not in ("wait", "copy")
                   or (border.file, border.function) not in (HOT if region else PLACES)})


@pytest.mark.thorough
@pytest.mark.many
def test_runs_cross_the_border_where_they_may(tmp_path: Path) -> None:
    """And every place of the list is one where some run does."""
    used: set[tuple[bool, str, str]] = set()
    for name, case in CASES.items():
        folder = tmp_path / name.replace(" ", "-")
        found = run(case, folder)
        resumed = run(case, folder, resume=True) if case is ONE else []
        assert refused([*found, *resumed]) == [], name
        captured = [f.graphs > 0 and f.replays > 0 for f in found]
        assert captured == {"one rank": [True], "adapter": [True], "moves": [True, True, False, False]}.get(
            name, [False] * case.ranks), f"{name}: which ranks capture decode steps"
        used |= {(bool(region), b.file, b.function) for f in (*found, *resumed) for region, b in f.crossings}
    listed = {(hot, *place) for hot, places in ((False, PLACES), (True, HOT)) for place in places}
    assert listed - used == set(), "places where nothing crosses any more"


@pytest.mark.thorough
def test_a_run_resumes_and_its_numbers_are_those_of_the_cpu(tmp_path: Path) -> None:
    """In float32: other kernels, graphs and copies than on the CPU, and the same numbers but for rounding."""
    case = replace(ONE, source=ONE.source.replace(', dtype="bfloat16"', ""))
    found = [*run(case, tmp_path / "device"), *run(case, tmp_path / "device", resume=True)]
    (tmp_path / "cpu.rlf").write_text(case.source.replace("steps=1", "steps=2"))
    expected = run_program(tmp_path / "cpu.rlf", {}, tmp_path / "cpu", "cluster nodes=1 gpus=1\n")
    lines = [json.loads(x) for x in (tmp_path / "device/run/out/metrics.jsonl").read_text().splitlines()]
    numbers = [{n: line[n] for n in computed(line)} for line in lines]
    assert numbers == [pytest.approx({n: x for n, x in line.items() if n != "step"}, rel=1e-3, abs=1e-5)
                       for line in expected]
    assert sum(f.replays for f in found) > 10


# ---------------------------------------------------------------------------- what the rule about `device=` was for


@pytest.mark.thorough
def test_a_tensor_that_is_made_on_the_wrong_side_is_found(tmp_path: Path) -> None:
    """Lines that make a tensor on the device, drawn by chance: one that makes it on the host shows in the run."""
    (found,) = run(ONE, tmp_path / "right")
    lines = sorted(found.sites)
    missed = [site for i, site in enumerate(random.Random(7).sample(lines, 4))
              if not shows(tmp_path / f"wrong-{i}", site, found)]
    assert missed == []


def shows(folder: Path, site: tuple[str, str, int], right: Found) -> bool:
    """Whether a run in which a line makes its tensor on the host fails, or is refused."""
    try:
        return bool(refused(run(ONE, folder, forgotten=site)))
    except AssertionError:
        return True


@pytest.mark.thorough
@pytest.mark.parametrize("unjoined", [False, True])
def test_parameters_that_have_not_come_yet_are_seen(unjoined: bool, tmp_path: Path) -> None:
    case = replace(ONE, place="place ref.logprobs on mesh(0:1) offload=true")
    found = refused(run(case, tmp_path, unjoined=unjoined))
    assert bool(found) == unjoined and all("race: " in x for x in found), found


# ------------------------------------------------------------------------------------------------ the list


def functions(node: ast.AST, prefix: str = "") -> Iterator[str]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.ClassDef):
            yield prefix + child.name
            yield from functions(child, f"{prefix}{child.name}.")


@pytest.mark.parametrize("place", [*PLACES, *HOT])
def test_places_of_the_list_exist(place: tuple[str, str]) -> None:
    file, function = place
    assert function in set(functions(ast.parse((ROOT / file).read_text())))


@pytest.mark.parametrize("change", ["", "unknown", "hot"])
def test_the_list_decides(change: str) -> None:
    place = next(iter(PLACES))
    border = Border("wait", "tolist", "x.py" if change == "unknown" else place[0], place[1], 3)
    found: Any = [Found(Counter({("passes" if change == "hot" else "", border): 1}), frozenset(), 0, 0, 0.0)]
    assert bool(refused(found)) == bool(change)
    assert refused([replace(found[0], crossings=Counter({("", border._replace(kind="mix")): 1}))])
