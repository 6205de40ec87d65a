"""Layouts that hold the same boxes are one copy: no realloc, no memory, and what is trained is what generates."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from rldsl import api
from rldsl.diag import InternalError
from rldsl.memory import curves
from rldsl.memory.curve import each_rank, points
from rldsl.plan.codec import encode
from rldsl.plan.events import Event, Free, Generate, Load, Offload, Onload, Realloc, Train
from rldsl.plan.model import Plan
from rldsl.plan.projection import event_paths
from rldsl.reshard import alias
from tests.end_to_end.programs import Metrics, run_program
from tests.end_to_end.test_invariance import compare
from tests.memory.accounting import measured
from tests.relabelled.programs import program
from tests.tiny import make_all
from tests.verify.faults import change, codes, edited, faults, moved, with_body
from tests.verify.mutate import repaired
from tests.verify.plans import folder


@cache
def plan(train: str, generate: str, dtype: str = "") -> Plan:
    with folder() as here:
        text = program(train, generate, "mesh(0:4)").replace('"models/sft")', f'"models/sft"{dtype})')
        (here / "p.rlf").write_text(text)
        return api.compile("p.rlf")


def of(p: Plan, kind: type[Event]) -> list:
    return [e for e, _ in event_paths(p) if isinstance(e, kind)]


def one(p: Plan) -> list[Load]:
    return [e for e in of(p, Load) if e.alias_of]


@pytest.mark.parametrize("train, generate", [("dp=2 cp=2", "dp=4"), ("cp=4", "dp=4"), ("cp=2 tp=2", "dp=2 tp=2"),
                                             ("cp=2 pp=2", "dp=2 pp=2")])
def test_the_same_boxes_are_one_copy(train: str, generate: str) -> None:
    p = plan(train, generate)
    (load,) = one(p)
    assert not of(p, Realloc) and load.alias_of == p.models[0].train_layout and "one copy" in load.because
    assert of(p, Generate)[0].layout == load.layout and not faults(p)
    for curve in curves(p):
        assert len([h for h in curve.holdings if h.what.startswith("parameters of")]) == 1


@pytest.mark.parametrize("train, generate, dtype", [
    ("dp=2 cp=2", "dp=2 tp=2", ""), ("tp=4", "dp=4", ""), ("dp=4 zero=1", "dp=4", ""), ("dp=2 pp=2", "dp=4", ""),
    ("cp=4", "dp=4", ', dtype="bfloat16"')])
def test_others_are_copies(train: str, generate: str, dtype: str) -> None:
    p = plan(train, generate, dtype)
    assert not one(p) and of(p, Realloc)


def test_one_layout_needs_no_load_of_its_own() -> None:
    assert len(of(plan("dp=4", "dp=4"), Load)) == 1


# ------------------------------------------------------------------------------------------------ mistakes in plans


def test_other_boxes_are_not_one_copy() -> None:
    p = plan("tp=4", "dp=4")
    realloc = of(p, Realloc)[0]
    same = Load(id=900, mesh=of(p, Generate)[0].mesh, reads=(f"actor@{realloc.src}",),
                writes=(f"actor@{realloc.dst}",), model="actor", layout=realloc.dst, alias_of=realloc.src)
    body = edited(p.body, lambda e: (e, same) if e.id == of(p, Load)[0].id else () if e.id == realloc.id else (e,))
    assert "RL0615" in codes(with_body(p, body))


def test_the_verifier_decides_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """A compiler that takes all ranks to stand at the same place under every layout."""
    class Same:
        of = staticmethod(lambda *_: 0)

    text = program("dp=4", "dp=4", "mesh(4:8)").replace("gpus=4", "gpus=8")
    with folder() as here:
        (here / "p.rlf").write_text(text)
        assert of(api.compile("p.rlf"), Realloc)
        monkeypatch.setattr(alias, "MeshView", Same)
        with pytest.raises(InternalError, match="RL0615.*their contents differ"):
            api.compile("p.rlf")


@pytest.mark.parametrize("train, generate, dtype", [
    ("tp=4", "dp=2 tp=2", ""), ("dp=4 zero=1", "dp=4", ""), ("cp=4", "dp=4", ', dtype="bfloat16"'),
    ("pp=2 tp=2", "dp=2 tp=2", "")])
def test_what_is_another_copy_is_not_said_to_be_one(train: str, generate: str, dtype: str) -> None:
    """By its cells, its rows over dp, its dtype, its stages."""
    p = plan(train, generate, dtype)
    realloc = of(p, Realloc)[0]
    same = Load(id=900, mesh=realloc.mesh, reads=(f"actor@{realloc.src}",), writes=(f"actor@{realloc.dst}",),
                model="actor", layout=realloc.dst, alias_of=realloc.src)
    body = edited(p.body, lambda e: (e, same) if e.id == of(p, Load)[0].id else () if e.id == realloc.id else (e,))
    assert "RL0615" in codes(with_body(p, body))


def test_it_stands_behind_what_it_is_one_with() -> None:
    p = plan("cp=4", "dp=4")
    assert "RL0520" in codes(moved(p, one(p)[0].id, of(p, Load)[0].id))


@pytest.mark.parametrize("new", [dict(alias_of="L9"), dict(alias_of=""), dict(layout="L0", writes=("actor@L0",)), dict(reads=())])
def test_a_load_that_says_something_else_is_rejected(new: dict) -> None:
    p = plan("cp=4", "dp=4")
    assert codes(change(p, one(p)[0].id, **new))


def test_it_is_not_freed_moved_or_brought() -> None:
    p = plan("cp=4", "dp=4")
    (load,), (train,) = one(p), of(p, Train)
    generate = of(p, Generate)[0]
    free = Free(id=900, mesh=load.mesh, buffers=(f"actor@{load.layout}",))
    assert "RL0615" in codes(with_body(p, edited(p.body, lambda e: (e, free) if e.id == generate.id else (e,))))
    for layout in (load.layout, load.alias_of):
        away, back = (kind(id=901 + i, mesh=load.mesh, model="actor", layout=layout)
                      for i, kind in enumerate((Offload, Onload)))
        found = codes(with_body(p, edited(p.body, lambda e: (e, away, back) if e.id == train.id else (e,))))
        assert "RL0615" in found
    other = plan("tp=4", "dp=4")
    realloc = replace(of(other, Realloc)[0], id=904, mesh=load.mesh, src=load.alias_of, dst=load.layout,
                      reads=(f"actor@{load.alias_of}",), writes=(f"actor@{load.layout}",))
    again = with_body(p, edited(p.body, lambda e: (realloc, e) if e.id == generate.id else (e,)))
    assert "RL0522" in codes(repaired(again))


# ------------------------------------------------------------------------------------------------------------ runs


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_all(tmp_path_factory.mktemp("tiny"), tie_word_embeddings=True, num_hidden_layers=2)


def test_losses_are_those_of_one_rank(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is trained is what generates: a copy that stayed behind would sample other tokens."""
    monkeypatch.chdir(tiny)
    found: list[Metrics] = []
    for name, (train, generate, ranks) in {"one": ("dp=1", "dp=1", 1), "cp": ("cp=2", "dp=2", 2)}.items():
        (tmp_path / f"{name}.rlf").write_text(program(train, generate, f"mesh(0:{ranks})", ranks))
        found.append(run_program(tmp_path / f"{name}.rlf", {}, tmp_path / name, like=found[0] if found else None))
    compare(found[1], found[0])


def test_there_is_memory_for_one(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tiny)
    (tmp_path / "p.rlf").write_text(program("cp=2", "dp=2", "mesh(0:2)", 2).replace("steps=5", "steps=2"))
    p = api.compile(str(tmp_path / "p.rlf"))
    found = measured(encode(p), tmp_path / "out", 2)
    train = of(p, Train)[0]
    for rank, curve in each_rank(curves(p, "cpu")):
        said = next(x for x in points(curve) if x.event == train.id)
        assert found[rank].events[train.id][0] == pytest.approx(said.before, rel=0.1)
