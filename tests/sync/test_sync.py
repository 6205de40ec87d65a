"""`sync` and `ema` in whole runs: what the files of the models say afterwards, on one rank and on many."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig

from tests.end_to_end.programs import Metrics, run_program
from tests.samples import thorough_between
from tests.tiny import make_model, make_sums, write_jsonl

Weights = dict[str, torch.Tensor]

PROGRAM = """
use std.sft (sft)
data rows = jsonl("{rows}", batch=6, max_prompt_tokens=16, max_answer_tokens=8, shuffle=false)
model actor = causal_lm("{base}") train adamw(lr=0.02)
model ref   = causal_lm("{other}"{options})
{top}
flow f(steps={steps}) {{
  row = rows.next()
{body}
}}
"""


@dataclass(frozen=True)
class Tiny:
    base: Path
    other: Path
    rows: Path


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> Tiny:
    folder = tmp_path_factory.mktemp("tiny")
    sizes = dict(tie_word_embeddings=True, num_hidden_layers=2)
    return Tiny(make_model(folder / "sft", **sizes), make_model(folder / "other", seed=3, **sizes),
                write_jsonl(folder / "rows.jsonl", make_sums(24)))


def run(tiny: Tiny, folder: Path, body: str, steps: int = 2, options: str = "", top: str = "",
        place: str | None = None) -> Metrics:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "sync.rlf"
    path.write_text(PROGRAM.format(rows=tiny.rows, base=tiny.base, other=tiny.other, steps=steps, body=body, top=top,
                                   options=options))
    return run_program(path, {}, folder / "run", place)


def saved(folder: Path, model: str, step: int) -> Weights:
    found: Weights = {}
    for file in (folder / f"run/out/step-{step}/{model}").glob("*.safetensors"):
        found |= load_file(file)
    assert found, f"{model} was not saved at step {step}"
    return found


def equal(a: Weights, b: Weights) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[n], b[n]) for n in a)


def weights(directory: Path) -> Weights:
    return load_file(directory / "model.safetensors")


def places(ranks: int, train: str, ref: str, also: str = "") -> str:
    return (f"cluster nodes=1 gpus={ranks}\nplace actor.* on {train}\n"
            f"place ref.logprobs on {ref}\n{also}")


TRAIN = "  actor.train(row, loss=sft(), minibatches=2, shuffle=false)\n"
SYNC = TRAIN + """  sync ref from actor
  r = ref.logprobs(row)
  a = actor.logprobs(row)
  metric gap  = max(abs(r - a))
  metric mean = mean(r)
  save actor, ref"""
PLACES = {
    "one": places(1, "mesh(0:1) dp=1", "mesh(0:1) dp=1"),
    "alike": places(2, "mesh(0:2) dp=2", "mesh(0:2) dp=2"),
    "dp_tp": places(2, "mesh(0:2) dp=2", "mesh(0:2) tp=2"),
    "tp_pp": places(2, "mesh(0:2) tp=2", "mesh(0:2) pp=2"),
    "pp_disjoint": places(4, "mesh(0:2) pp=2", "mesh(2:4) tp=2"),
    "fewer": places(4, "mesh(0:4) dp=2 tp=2", "mesh(3:4) dp=1"),
    "offload": places(4, "mesh(0:2) tp=2", "mesh(1:3) dp=2", "").replace("dp=2\n", "dp=2 offload=true\n"),
}


@pytest.fixture(scope="module")
def alone(tiny, tmp_path_factory) -> Metrics:
    return run(tiny, tmp_path_factory.mktemp("alone"), SYNC, place=PLACES["one"])


@pytest.mark.parametrize("name", thorough_between(PLACES))
def test_a_synced_model_is_its_source_bit_for_bit(name, tiny, alone, tmp_path):
    metrics = run(tiny, tmp_path, SYNC, place=PLACES[name])
    for step in (1, 2):
        assert equal(saved(tmp_path, "ref", step), saved(tmp_path, "actor", step))
    assert not equal(saved(tmp_path, "ref", 1), saved(tmp_path, "ref", 2))
    for mine, theirs in zip(metrics, alone):
        assert mine["gap"] < 1e-4 and mine["mean"] == pytest.approx(theirs["mean"], abs=1e-4)
        assert mine["actor/loss"] == pytest.approx(theirs["actor/loss"], abs=1e-4)


def test_a_call_before_the_sync_sees_the_old_parameters(tiny, tmp_path):
    body = "  r = ref.logprobs(row)\n" + TRAIN + """  sync ref from actor
  s = ref.logprobs(row)
  metric moved = max(abs(r - s))
  save actor, ref"""
    metrics = run(tiny, tmp_path, body, place=places(2, "mesh(0:1) dp=1", "mesh(1:2) dp=1"))
    assert all(step["moved"] > 0.05 for step in metrics)


def test_a_sync_before_the_first_train_takes_what_was_loaded(tiny, tmp_path):
    body = "  sync ref from actor\n  r = ref.logprobs(row)\n  metric m = mean(r)\n  save ref\n" + TRAIN + "  save actor"
    run(tiny, tmp_path, body, place=places(2, "mesh(0:2) tp=2", "mesh(0:2) dp=2"))
    assert equal(saved(tmp_path, "ref", 1), weights(tiny.base))
    assert equal(saved(tmp_path, "ref", 2), saved(tmp_path, "actor", 1))


EMA = TRAIN + "  ema ref from actor 0.75\n  r = ref.logprobs(row)\n  metric m = mean(r)\n  save actor, ref"


@pytest.mark.parametrize("name, options", thorough_between([("one", ""), ("dp_tp", ""), ("pp_disjoint", ""),
                                           ("dp_tp", ', dtype="bfloat16"')]))
def test_the_mean_is_that_of_the_formula(name, options, tiny, tmp_path):
    """In bfloat16 too: it is kept in float32 where it is taken, so that small parts of it are not lost."""
    run(tiny, tmp_path, EMA, steps=3, options=options, place=PLACES[name])
    expected = weights(tiny.other)
    for step in (1, 2, 3):
        actor = saved(tmp_path, "actor", step)
        expected = {n: 0.75 * x + (1 - 0.75) * actor[n] for n, x in expected.items()}
        for n, found in saved(tmp_path, "ref", step).items():
            assert torch.allclose(found, expected[n], rtol=0, atol=1e-7), n


def test_a_half_precision_copy_is_rounded_once(tiny, tmp_path):
    run(tiny, tmp_path, SYNC, steps=1, options=', dtype="bfloat16"', place=PLACES["pp_disjoint"])
    actor = saved(tmp_path, "actor", 1)
    assert all(torch.equal(x, actor[n].bfloat16()) for n, x in saved(tmp_path, "ref", 1).items())
    for name, dtype in (("actor", torch.float32), ("ref", torch.bfloat16)):
        folder = tmp_path / f"run/out/step-1/{name}"
        assert AutoConfig.from_pretrained(folder).dtype == dtype, "what the file has, and no reader makes larger"
        assert {x.dtype for x in saved(tmp_path, name, 1).values()} == {dtype}


def test_every_and_a_decay_of_one(tiny, tmp_path):
    body = TRAIN + "  sync ref from actor every 2\n  ema still from actor 1.0\n  save actor, ref, still"
    run(tiny, tmp_path, body, steps=3, top=f'model still = causal_lm("{tiny.other}")',
        place="cluster nodes=1 gpus=2\nplace actor.* on mesh(0:2) tp=2\n")
    assert equal(saved(tmp_path, "ref", 1), weights(tiny.other))
    assert equal(saved(tmp_path, "ref", 2), saved(tmp_path, "actor", 2))
    assert equal(saved(tmp_path, "ref", 3), saved(tmp_path, "actor", 2))
    assert equal(saved(tmp_path, "still", 3), weights(tiny.other))


def test_all_copies_of_the_target_move(tiny, tmp_path):
    body = TRAIN + """  sync ref from actor every 2
  r = ref.logprobs(row)  on mesh(0:1) dp=1
  s = ref.logprobs(row)  on mesh(2:4) pp=2
  metric apart = max(abs(r - s))
  metric mean  = mean(r)"""
    place = "cluster nodes=1 gpus=4\nplace actor.* on mesh(0:2) tp=2\n"
    metrics = run(tiny, tmp_path, body, steps=4, place=place)
    assert all(step["apart"] < 1e-4 for step in metrics)
    frozen = run(tiny, tmp_path / "b", body.replace("sync ref from actor every 2\n", "\n"), steps=4, place=place)
    same = [a["mean"] == pytest.approx(b["mean"], abs=1e-4) for a, b in zip(metrics, frozen)]
    assert same == [True, False, False, False]


def test_a_chain_in_a_repeat(tiny, tmp_path):
    body = "  repeat 2 {\n  " + TRAIN + """    sync newest from actor
    ema ref from newest 0.5
  }
  save actor, newest, ref"""
    run(tiny, tmp_path, body, steps=1, top=f'model newest = causal_lm("{tiny.other}")',
        place="cluster nodes=1 gpus=2\nplace actor.* on mesh(0:2) pp=2\n")
    assert equal(saved(tmp_path, "newest", 1), saved(tmp_path, "actor", 1))
    assert not equal(saved(tmp_path, "ref", 1), saved(tmp_path, "newest", 1))


def test_a_frozen_source_gives_its_parameters_back(tiny, tmp_path):
    body = TRAIN + "  ema ref from actor 0.5\n  sync ref from start every 2\n  save ref"
    run(tiny, tmp_path, body, top=f'model start = causal_lm("{tiny.base}")',
        place="cluster nodes=1 gpus=2\nplace actor.* on mesh(0:2) dp=2\n")
    assert equal(saved(tmp_path, "ref", 2), weights(tiny.base))
    assert not equal(saved(tmp_path, "ref", 1), weights(tiny.base))
