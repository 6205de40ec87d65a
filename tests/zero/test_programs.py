"""Whole programs whose training is divided by `zero`: losses, samples, checkpoints and saves as on one rank."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from rldsl import api
from rldsl.diag import Failure
from rldsl.memory import curves
from rldsl.plan.codec import decode
from rldsl.plan.events import Generate, Infer, Realloc, Train
from rldsl.plan.projection import event_paths
from rldsl.verify import verify
from tests.checkpoint.runs import held, lines, run
from tests.end_to_end.programs import Metrics, compile_program, run_program
from tests.tiny import make_all

ROOT = Path(__file__).parents[2]
GRPO = ROOT / "tests/end_to_end/grpo_small.rlf"
LORA = ROOT / "tests/lora/grpo_lora.rlf"
SMALL = ROOT / "tests/checkpoint/small.rlf"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_all(tmp_path_factory.mktemp("tiny"), tie_word_embeddings=True, num_hidden_layers=2)


def rules(ranks: int, where: str) -> str:
    """The actor is trained on all ranks; it generates there too, by default."""
    return (f"cluster nodes=1 gpus={ranks}\nplace actor.train on mesh(0:{ranks}) {where}\n"
            f"place ref.* on mesh(0:{ranks}) dp={ranks}\n")


def compare(found: Metrics, expected: Metrics) -> None:
    for mine, theirs in zip(found, expected, strict=True):
        assert mine == {k: pytest.approx(v, rel=1e-4, abs=1e-5) for k, v in theirs.items()}


FEW: dict[str, object] = {"batch": 4, "samples": 2, "minibatches": 4, "tokens": 4}


def grpo(tiny: Path, folder: Path, place: str, program: Path = GRPO, like: Metrics | None = None,
         **sets: object) -> Metrics:
    given = {"base": str(tiny / "models/sft"), "rows": str(tiny / "data/prompts.jsonl"), "steps": 3} | sets
    return run_program(program, given, folder, place, like=like)


@pytest.fixture(scope="module")
def alone(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Metrics:
    """Four minibatches of two rows, so that two of four shards have none."""
    return grpo(tiny, tmp_path_factory.mktemp("alone"), rules(1, "dp=1 zero=3"), **FEW)


@pytest.mark.thorough
@pytest.mark.parametrize("ranks, where", [
    (4, "dp=4 zero=2"), (4, "dp=2 tp=2 zero=1 mbs=1"), (4, "dp=2 pp=2 zero=3 mbs=1 recompute=full")])
def test_grpo_is_that_of_one_rank(tiny, alone, tmp_path, ranks, where):
    compare(grpo(tiny, tmp_path, rules(ranks, where), like=alone, **FEW), alone)


def test_adapters(tiny, tmp_path):
    expected = grpo(tiny, tmp_path / "one", rules(1, "dp=1"), LORA)
    compare(grpo(tiny, tmp_path / "two", rules(2, "dp=2 zero=3"), LORA, expected), expected)
    files = [load_file(str(next((tmp_path / n / "out").rglob("adapter_model.safetensors")))) for n in ("one", "two")]
    assert files[0].keys() == files[1].keys()
    assert all(torch.allclose(files[0][k], files[1][k], atol=2e-5) for k in files[0])


def test_dpo(tiny, tmp_path):
    program = tmp_path / "dpo.rlf"
    program.write_text((ROOT / "examples/dpo.rlf").read_text().replace("lr=5e-7", "lr=1e-3"))
    sets = {"base": str(tiny / "models/sft"), "rows": str(tiny / "data/pairs.jsonl"), "steps": 3, "batch": 5}
    expected, found = (run_program(program, sets, tmp_path / str(n), rules(n, where))
                       for n, where in ((1, "dp=1"), (2, "dp=2 zero=3 mbs=2")))
    compare(found, expected)


# ------------------------------------------------------------------------------------------- checkpoints


def small(ranks: int, where: str) -> str:
    return f"cluster nodes=1 gpus={ranks}\n" + "".join(
        f"place {m} on mesh(0:{ranks}) {where}\n" for m in ("actor.train", "critic.train"))


def plan(tiny: Path, folder: Path, place: str) -> bytes:
    folder.mkdir(parents=True, exist_ok=True)
    return compile_program(SMALL, {"base": str(tiny / "models/sft"), "rows": str(tiny / "data/prompts.jsonl"), "steps": 4},
                           place, folder)


@pytest.mark.thorough
def test_checkpoints_go_on_exactly_and_elsewhere(tiny, tmp_path):
    """From zero=3 on two ranks: on the same bit for bit; on one rank, and on four with another division."""
    home = small(2, "dp=2 zero=3")
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    assert set(run(plan(tiny, whole / "plan", home), whole)) == {""}
    assert set(run(plan(tiny, stopped / "plan", home), stopped, stop_after=2)) == {""}
    boxes = held(stopped / "checkpoints/step-000002")
    at = json.loads((stopped / "checkpoints/step-000002/checkpoint.json").read_text())
    assert len(at["files"]) == 2 and boxes
    for number, (place, exact) in enumerate(((small(4, "dp=2 tp=2 zero=1"), False), (small(1, "dp=1"), False), (home, True))):
        copy = tmp_path / f"on{number}"
        import shutil

        shutil.copytree(stopped, copy)
        assert set(run(plan(tiny, copy / "plan", place), copy, resume=copy, like=None if exact else whole)) == {""}
        if exact:
            assert lines(copy) == lines(whole)
            mine, theirs = held(copy / "checkpoints/step-000004"), held(whole / "checkpoints/step-000004")
            assert mine.keys() == theirs.keys() and all(torch.equal(mine[k], theirs[k]) for k in theirs)
        else:
            compare(lines(copy), lines(whole))


# ------------------------------------------------------------------------------------------- what is compiled


def compiled(tiny: Path, folder: Path, place: str) -> object:
    return decode(compile_program(GRPO, {"base": str(tiny / "models/sft"), "rows": str(tiny / "data/prompts.jsonl")},
                                  place, folder), "p.plan")


def test_other_calls_get_a_copy_on_the_same_mesh(tiny, tmp_path):
    found = compiled(tiny, tmp_path, rules(4, "dp=2 tp=2 zero=3"))
    layouts = {x.id: x for x in found.layouts}
    (train,), (gen,) = ([e for e, _ in event_paths(found) if isinstance(e, kind)] for kind in (Train, Generate))
    assert layouts[train.layout].zero == 3 and layouts[gen.layout].zero == 0
    assert layouts[train.layout].mesh == layouts[gen.layout].mesh
    assert [(e.src, e.dst) for e, _ in event_paths(found) if isinstance(e, Realloc)] == [(train.layout, gen.layout)]
    assert all(not layouts[e.layout].zero for e, _ in event_paths(found) if isinstance(e, Infer))
    verify(found)


def test_one_shard_divides_nothing(tiny, tmp_path):
    found = compiled(tiny, tmp_path, rules(2, "tp=2 zero=3"))
    assert all(x.zero == 0 for x in found.layouts)
    assert not any(isinstance(e, Realloc) for e, _ in event_paths(found))


def test_state_at_rest_is_divided_in_the_estimate(tiny, tmp_path):
    def at_rest(where: str) -> tuple[int, int]:
        held = curves(compiled(tiny, tmp_path, rules(4, where)), "cpu")[0].holdings
        return tuple(sum(h.bytes for h in held if h.what.startswith(what)) for what in ("optimizer state", "gradients of"))

    plain, three = at_rest("dp=4"), at_rest("dp=4 zero=3")
    assert all(a / 4 <= b < a / 4 * 1.1 for a, b in zip(plain, three))


REFUSED = {
    "zero=4": "RL0311", "zero=-1": "RL0001", "zero=true": "RL0311", "zero=full": "RL0101", "zero=1.5": "RL0311",
    "zero=1 zero=2": "RL0311", "zeros=1": "RL0310",
}


@pytest.mark.parametrize("options", REFUSED)
def test_refused(options, tiny, tmp_path):
    with pytest.raises(Failure) as failure:
        compiled(tiny, tmp_path, rules(4, f"dp=4 {options}"))
    assert failure.value.diagnostics[0].code == REFUSED[options]


@pytest.mark.parametrize("call", ["actor.generate", "ref.logprobs", "actor.*"])
def test_only_training_is_divided(call, tiny, tmp_path):
    place = rules(2, "dp=2 zero=1").replace("place ref.* on mesh(0:2) dp=2\n", "") + f"place {call} on mesh(0:2) dp=2 zero=1\n"
    with pytest.raises(Failure) as failure:
        compiled(tiny, tmp_path, place)
    (found,) = failure.value.diagnostics
    assert found.code == "RL0320" and found.span.text == "zero=1"


def test_a_computation_has_no_zero(tiny, tmp_path):
    with pytest.raises(Failure) as failure:
        compiled(tiny, tmp_path, rules(2, "dp=2") + "place @adv on mesh(0:2) zero=1\n")
    assert failure.value.diagnostics[0].code == "RL0311"


def test_two_train_calls_agree(tmp_path):
    program = tmp_path / "two.rlf"
    program.write_text('use std.sft (sft)\ndata rows = jsonl("rows.jsonl", batch=4)\n'
                       'model actor = causal_lm("m") train adamw(lr=1e-5)\nflow run(steps=2) {\n  row = rows.next()\n'
                       "  actor.train(row, loss=sft()) on mesh(0:2) dp=2 zero=1\n"
                       "  actor.train(row, loss=sft()) on mesh(0:2) dp=2 zero=3\n}\n")
    assert [d.code for d in api.check(program.read_text())] == ["RL0315"]
