"""Whole programs whose training interleaves chunks of layers: numbers as on one rank, checkpoints, what is said."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from shutil import copytree

import pytest
import torch

from rldsl.diag import Failure
from rldsl.inspect.diff import diff
from rldsl.inspect.show import show
from rldsl.memory import curves
from rldsl.plan.codec import decode, encode
from rldsl.plan.events import Generate, Infer, Realloc, Train
from rldsl.plan.model import Plan
from rldsl.plan.projection import event_paths
from rldsl.verify import verify
from tests.checkpoint.runs import held, lines, run
from tests.end_to_end.programs import compile_program, run_program
from tests.tiny import make_all
from tests.verify.faults import codes
from tests.zero.test_programs import GRPO, SMALL, compare


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_all(tmp_path_factory.mktemp("tiny"), tie_word_embeddings=True)


def sets(tiny: Path, **more: object) -> dict[str, object]:
    return {"base": str(tiny / "models/sft"), "rows": str(tiny / "data/prompts.jsonl"), "steps": 3} | more


def rules(ranks: int, where: str) -> str:
    return (f"cluster nodes=1 gpus={ranks}\nplace actor.train on mesh(0:{ranks}) {where}\n"
            f"place ref.* on mesh(0:{ranks}) dp={ranks}\n")


def compiled(tiny: Path, folder: Path, ranks: int, where: str, **more: object) -> Plan:
    return decode(compile_program(GRPO, sets(tiny, **more), rules(ranks, where), folder), "p.plan")


def test_grpo_is_that_of_one_rank(tiny: Path, tmp_path: Path) -> None:
    few = sets(tiny, batch=3, samples=2, tokens=4)
    expected = run_program(GRPO, few, tmp_path / "one", rules(1, "dp=1"))
    compare(run_program(GRPO, few, tmp_path / "two", rules(2, "pp=2 vpp=2 mbs=1"), like=expected), expected)


def small(ranks: int, where: str) -> str:
    return f"cluster nodes=1 gpus={ranks}\n" + "".join(
        f"place {m} on mesh(0:{ranks}) {where}\n" for m in ("actor.train", "critic.train"))


@pytest.mark.thorough
def test_checkpoints_go_on_exactly_and_elsewhere(tiny: Path, tmp_path: Path) -> None:
    """From vpp=2 on two ranks: on the same bit for bit; with one chunk on each to the same numbers."""
    def plan(name: str, place: str) -> bytes:
        (tmp_path / name).mkdir()
        return compile_program(SMALL, sets(tiny, steps=2), place, tmp_path / name)

    home, whole, stopped = small(2, "pp=2 vpp=2 mbs=1"), tmp_path / "whole", tmp_path / "stopped"
    assert set(run(plan("a", home), whole)) == {""}
    assert set(run(plan("b", home), stopped, stop_after=1)) == {""}
    for name, place, exact in (("c", small(2, "pp=2 mbs=1"), False), ("d", home, True)):
        copytree(stopped, tmp_path / ("on" + name))
        on = tmp_path / ("on" + name)
        assert set(run(plan(name, place), on, resume=on, like=None if exact else whole)) == {""}
        compare(lines(tmp_path / ("on" + name)), lines(whole))
        if exact:
            mine, theirs = (held(at / "checkpoints/step-000002") for at in (tmp_path / ("on" + name), whole))
            assert mine.keys() == theirs.keys() and all(torch.equal(mine[k], theirs[k]) for k in theirs)


# ------------------------------------------------------------------------------------------- what is compiled


def test_other_calls_get_a_copy_without_it(tiny: Path, tmp_path: Path) -> None:
    found = compiled(tiny, tmp_path, 4, "dp=2 pp=2 vpp=2")
    layouts = {x.id: x for x in found.layouts}
    (train,), (gen,) = ([e for e, _ in event_paths(found) if isinstance(e, kind)] for kind in (Train, Generate))
    assert (layouts[train.layout].pp, layouts[train.layout].vpp) == (2, 2)
    assert (layouts[gen.layout].pp, layouts[gen.layout].vpp) == (2, 1)
    assert [(e.src, e.dst) for e, _ in event_paths(found) if isinstance(e, Realloc)] == [(train.layout, gen.layout)]
    assert all(layouts[e.layout].vpp == 1 for e, _ in event_paths(found) if isinstance(e, Infer))
    verify(found)
    assert decode(encode(found), "again") == found
    assert "pp=2 vpp=2" in show(found) and "without vpp" not in show(found)


def test_one_stage_has_nothing_to_interleave(tiny: Path, tmp_path: Path) -> None:
    assert all(x.vpp == 1 for x in compiled(tiny, tmp_path, 2, "dp=2 vpp=3").layouts)


def test_a_rank_keeps_more_activations_and_as_many_parameters(tiny: Path, tmp_path: Path) -> None:
    def holdings(where: str) -> dict[str, int]:
        return {h.what: h.bytes for h in curves(compiled(tiny, tmp_path, 2, where), "cpu")[0].holdings}

    one, two = holdings("pp=2 mbs=1"), holdings("pp=2 vpp=2 mbs=1")
    least = one["activations of actor.train"]
    assert least < two["activations of actor.train"] < 2 * least
    resting = [{k: n for k, n in found.items() if k.startswith(("optimizer state", "gradients of"))}
               for found in (one, two)]
    assert sorted(resting[0].values()) == sorted(resting[1].values()) and resting[0]


def refused(tiny: Path, folder: Path, place: str) -> Failure:
    with pytest.raises(Failure) as caught:
        compile_program(GRPO, sets(tiny), place, folder)
    return caught.value


@pytest.mark.parametrize("where, code, words", [
    ("on mesh(0:2) pp=2 vpp=3", "RL0308", "vpp can be at most 2 with pp=2"), ("on mesh(0:2) pp=2 vpp=0", "RL0311", "vpp=1"),
    ("on mesh(0:2) pp=2 vpp=true", "RL0311", "vpp=1"), ("on mesh(0:2) pp=2 vp=2", "RL0310", "vpp"),
    ("on mesh(0:2) pp=2 vpp=2 vpp=2", "RL0311", "remove one")])
def test_what_does_not_fit_is_refused(tiny: Path, tmp_path: Path, where: str, code: str, words: str) -> None:
    (found,) = refused(tiny, tmp_path, f"cluster nodes=1 gpus=2\nplace actor.train {where}\n").diagnostics
    assert found.code == code and words in (found.help or ""), found


@pytest.mark.parametrize("call", ["actor.generate", "ref.logprobs"])
def test_only_training_has_it(tiny: Path, tmp_path: Path, call: str) -> None:
    (found,) = refused(tiny, tmp_path, f"cluster nodes=1 gpus=2\nplace {call} on mesh(0:2) pp=2 vpp=2\n").diagnostics
    assert found.code == "RL0320" and found.span is not None and found.span.text == "vpp=2"


@pytest.mark.parametrize("change, code", [(dict(vpp=0), "RL0612"), (dict(pp=1, dp=4), "RL0612")])
def test_the_verifier_refuses_layouts_without_meaning(tiny: Path, tmp_path: Path, change: dict[str, int],
                                                      code: str) -> None:
    found = compiled(tiny, tmp_path, 4, "dp=2 pp=2 vpp=2")
    assert code in codes(replace(found, layouts=tuple(replace(x, **change) if x.vpp > 1 else x for x in found.layouts)))


def test_the_verifier_sees_inference_on_it_and_a_move_to_other_chunks(tiny: Path, tmp_path: Path) -> None:
    found = compiled(tiny, tmp_path, 2, "pp=2 vpp=2")
    (home,) = [x for x in found.layouts if x.vpp > 1]
    others = tuple(replace(x, vpp=2) if x.pp == 2 else x for x in found.layouts)
    assert "RL0537" in codes(replace(found, layouts=others))
    plain = tuple(replace(x, vpp=1) if x.id == home.id else x for x in found.layouts)
    assert codes(replace(found, layouts=plain)), "its realloc moves other boxes than the layouts say"


def test_the_difference_of_two_plans_names_it(tiny: Path, tmp_path: Path) -> None:
    a, b = (compiled(tiny, tmp_path, 2, where) for where in ("pp=2 vpp=2", "pp=2"))
    assert "vpp=2" in str(diff(a, b))


def test_the_simulator_finds_it_shorter(tiny: Path, tmp_path: Path) -> None:
    from rldsl.simulate.simulate import simulate
    from tests.simulate.plans import ROUND

    def seconds(where: str) -> float:
        plan = compiled(tiny, tmp_path, 2, where)
        return simulate(plan, replace(ROUND, link_gb_s=1e6, link_us=0.0, event_us=0.0, kernel_us=0.0)).seconds

    assert seconds("pp=2 vpp=2 mbs=1") < seconds("pp=2 mbs=1")
