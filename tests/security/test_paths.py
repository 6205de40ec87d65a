"""Plans that were edited on their way: what they may write, what they may import, what the user is shown."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from rldsl import api
from rldsl.cli import main
from rldsl.diag import Failure
from rldsl.plan.codec import encode
from rldsl.plan.disk_paths import paths, text
from rldsl.plan.events import Item, Loop, Save
from rldsl.plan.model import Function, Plan
from rldsl.runtime.persist.allowed_paths import MARK, check_writes, is_foreign, with_python_as_it_is
from rldsl.verify import verify
from tests.tiny import make_model, make_sums, write_jsonl
from tests.world import run_world

PROGRAM = """
use std.sft (sft)
data sums = jsonl("sums.jsonl", batch=4, answer="answer")
model actor = causal_lm("model") train adamw(lr=1e-4)
flow tuning(steps=1, seed=1) {
  batch = sums.next()
  actor.train(batch, loss=sft())
  save actor
}
"""


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("paths")
    make_model(folder / "model")
    write_jsonl(folder / "sums.jsonl", make_sums(8))
    return folder


@pytest.fixture
def plan(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Plan:
    for name in ("model", "sums.jsonl"):
        os.symlink(source / name, tmp_path / name)
    (tmp_path / "p.rlf").write_text(PROGRAM)
    monkeypatch.chdir(tmp_path)
    return api.compile("p.rlf", {})


def saving(plan: Plan, path: str) -> Plan:
    def edit(item: Item) -> Item:
        if isinstance(item, Loop):
            return replace(item, body=tuple(map(edit, item.body)))
        return replace(item, path=path) if isinstance(item, Save) else item

    return replace(plan, body=tuple(map(edit, plan.body)))


@pytest.mark.parametrize("path", ["{out}/step-{step}/actor", "runs/x", "a/../b", "{out}/../elsewhere", "x{step}"])
def test_inside(plan: Plan, path: str) -> None:
    check_writes(saving(plan, path), Path("runs/out"))


@pytest.mark.parametrize("path", ["/etc/actor", "../actor", "{out}/../../../actor", ".", "", "a/{step}/../../../b", "a\0b",
                                  "link/x", "model"])
def test_outside(plan: Plan, path: str) -> None:
    os.symlink("/var", "link")
    with pytest.raises(Failure) as error:
        check_writes(saving(plan, path), Path("runs/out"))
    assert [d.code for d in error.value.diagnostics] == ["RL0712"]
    assert "\0" not in error.value.diagnostics[0].place


def test_allow_write(plan: Plan, tmp_path: Path) -> None:
    edited = saving(plan, "/var/models/actor")
    for allowed in ("/var", "/var/models", "/var/models/actor"):
        check_writes(edited, Path("out"), [allowed])
    for refused in ("/var/model", "/var/models/actor/deeper", "/etc"):
        with pytest.raises(Failure, match="RL0712"):
            check_writes(edited, Path("out"), [refused])


def test_an_own_directory_elsewhere_is_allowed(plan: Plan) -> None:
    check_writes(saving(plan, "{out}/actor"), Path("/var/run7"))
    with pytest.raises(Failure, match="RL0712"):
        check_writes(saving(plan, "{out}/../actor"), Path("/var/run7"))


def test_what_no_save_has_written_is_not_replaced(plan: Plan, tmp_path: Path) -> None:
    """Also a model: its owner may have made it elsewhere."""
    for name in ("empty", "saved", "mine", "downloaded"):
        (tmp_path / name).mkdir()
    (tmp_path / "saved" / MARK).write_text("{}")
    (tmp_path / "downloaded/config.json").touch()
    (tmp_path / "mine/thesis.tex").touch()
    (tmp_path / "file").touch()
    os.symlink(tmp_path / "saved", tmp_path / "link")
    os.symlink(tmp_path / "nothing", tmp_path / "dangling")
    for name in ("new", "empty", "saved", "new/deeper"):
        assert not is_foreign(tmp_path / name)
        check_writes(saving(plan, name), Path("runs/out"))
    for name in ("downloaded", "mine", "file", "link", "dangling"):
        assert is_foreign(tmp_path / name)
        with pytest.raises(Failure, match="RL0712 .*which was not written by a save"):
            check_writes(saving(plan, name), Path("runs/out"))


def test_a_save_replaces_what_a_save_wrote(plan: Plan, tmp_path: Path) -> None:
    """And stops before the first step where it is not known to be one."""
    data = encode(saving(plan, "models/x"))
    for i in (1, 2):
        assert run_world(1, _run, data, str(tmp_path / f"out{i}")) == [""]
        held = json.loads((tmp_path / "models/x" / MARK).read_text())
        assert held == {"program": "p.rlf", "flow": "tuning", "model": "actor", "step": 1}
    (tmp_path / "models/x" / MARK).unlink()
    before = (tmp_path / "models/x/model.safetensors").stat().st_mtime_ns
    assert run_world(1, _run, data, str(tmp_path / "out3")) == ["RL0712"]
    assert (tmp_path / "models/x/model.safetensors").stat().st_mtime_ns == before
    assert not (tmp_path / "out3/metrics.jsonl").exists()


def _run(rank: int, data: bytes, out: str) -> str:
    from rldsl.runtime.interpreter.interpreter import execute
    from rldsl.runtime.plan_file import PlanFile

    os.chdir(Path(out).parent)
    try:
        execute(PlanFile.from_bytes(data, "p.plan"), out)
    except Failure as failure:
        return failure.diagnostics[0].code
    return ""


def test_a_plan_cannot_choose_what_is_imported(plan: Plan) -> None:
    for name in ("os", "torch.load", "../x", ""):
        with pytest.raises(Failure, match="RL0612"):
            verify(replace(plan, layouts=tuple(replace(x, backend=name) for x in plan.layouts)))


def test_show_paths(plan: Plan) -> None:
    odd = replace(saving(plan, "a\x1b[2Jb"), functions=(Function("f", "r.py", "right", "ab" * 32),))
    shown = text(paths(odd), "runs/p")
    assert shown.splitlines() == ["reads   model (model actor, tokenizer of sums)", "        sums.jsonl (data sums)",
                                  "runs    r.py (right; sha256 abababababab)", "writes  runs/p", "        a\\x1b[2Jb"]
    Path("p.plan").write_bytes(encode(plan))
    done = CliRunner().invoke(main, ["show", "p.plan", "--paths"])
    assert done.exit_code == 0 and done.output.splitlines() == text(paths(plan)).splitlines()
    assert CliRunner().invoke(main, ["show", "p.plan", "--paths", "--rank", "0"]).exit_code == 2


def test_changed_python_takes_the_file_that_is_there(plan: Plan) -> None:
    Path("r.py").write_text("def right(rows): return [0.0 for _ in rows]\n")
    old = replace(plan, functions=(Function("f", "r.py", "right", "0" * 64), Function("g", "no.py", "x", "1" * 64)))
    new, changed = with_python_as_it_is(old)
    assert changed == ("r.py",) and new.functions[0].sha256 != "0" * 64 and new.functions[1].sha256 == "1" * 64
    assert with_python_as_it_is(new) == (new, ())
