"""`stop when`: what training does after it, against a plain loop with torch's own AdamW, and on many ranks."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from rldsl import api
from rldsl.diag import Failure
from rldsl.plan.expr import Program
from rldsl.verify import verify
from tests.end_to_end import reference
from tests.end_to_end.programs import Metrics, run_program
from tests.end_to_end.reference import Sample
from tests.samples import thorough_between
from tests.tiny import make_model, make_sums, write_jsonl

ROWS, MINIBATCHES, EPOCHS, LR, DECAY = 12, 4, 2, 0.02, 0.3

PROGRAM = """
param limit = 0.0
data rows = jsonl("{rows}", batch={count}, max_prompt_tokens=16, max_answer_tokens=8, shuffle=false)
model actor = causal_lm("{base}") train adamw(
  lr={lr}, weight_decay={decay}, eps=0.0001, schedule=linear, clip_grad=0)
loss nll(logprobs: token; limit) {{
  worst = max(-logprobs)
  metric worst = worst
  {stops}
  return -mean(logprobs)
}}
flow f(steps={steps}) {{
  row = rows.next()
  actor.train(row, loss=nll(limit=limit), minibatches={minibatches}, epochs={epochs}, shuffle=false)  {on}
  save actor
}}
"""


@dataclass(frozen=True)
class Tiny:
    base: Path
    rows: Path
    samples: tuple[Sample, ...]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> Tiny:
    from transformers import AutoTokenizer

    folder = tmp_path_factory.mktemp("tiny")
    base = make_model(folder / "sft", tie_word_embeddings=True, num_hidden_layers=2)
    rows = write_jsonl(folder / "rows.jsonl", make_sums(2 * ROWS))
    tokenizer = AutoTokenizer.from_pretrained(base)
    ids = [[tokenizer(r[name])["input_ids"] for name in ("prompt", "answer")] for r in make_sums(2 * ROWS)]
    return Tiny(base, rows, tuple(Sample(prompt, [*answer, tokenizer.eos_token_id]) for prompt, answer in ids))


def write(tiny: Tiny, folder: Path, stops: str = "stop when -mean(logprobs) < limit", on: str = "on mesh(0:1) dp=1",
          steps: int = 1) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "stop.rlf"
    path.write_text(PROGRAM.format(rows=tiny.rows, base=tiny.base, count=ROWS, lr=LR, decay=DECAY, stops=stops, on=on,
                                   steps=steps, minibatches=MINIBATCHES, epochs=EPOCHS))
    return path


def run(tiny: Tiny, folder: Path, limit: float, **options) -> tuple[Metrics, dict[str, torch.Tensor]]:
    """Metrics, and the weights after the last step."""
    metrics = run_program(write(tiny, folder, **options), {"limit": limit}, folder / "run")
    last = folder / f"run/out/step-{options.get('steps', 1)}/actor"
    weights: dict[str, torch.Tensor] = {}
    for file in last.glob("*.safetensors"):
        weights |= load_file(file)
    return metrics, weights


@dataclass
class Plain:
    """What a loop by hand did: losses of the minibatches that ran in each step, updates made, weights at the end."""

    losses: list[list[float]]
    updates: list[int]
    weights: dict[str, torch.Tensor]


def plain(tiny: Tiny, limit: float, steps: int = 1) -> Plain:
    """The same training in a straight line; the rate falls linearly over all planned updates."""
    model = reference.causal_lm(tiny.base)
    adam = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=DECAY, eps=1e-4)
    planned, each = steps * MINIBATCHES * EPOCHS, ROWS // MINIBATCHES
    losses, updates = [], []
    for step in range(steps):
        ran, made = [], 0
        for i in range(MINIBATCHES * EPOCHS):
            first = step * ROWS + i % MINIBATCHES * each
            tokens = torch.cat([-reference.response_logprobs(model, s) for s in tiny.samples[first : first + each]])
            loss = tokens.mean()
            ran.append(loss.item())
            if loss < limit:
                break
            adam.zero_grad()
            loss.backward()
            adam.param_groups[0]["lr"] = LR * (1 - (step * MINIBATCHES * EPOCHS + i) / planned)
            adam.step()
            made += 1
        losses.append(ran)
        updates.append(made)
    return Plain(losses, updates, {n: p.detach() for n, p in model.named_parameters()})


@pytest.fixture(scope="module")
def limit(tiny) -> float:
    """A bound that a minibatch in the middle is the first to fall below."""
    losses = plain(tiny, -math.inf).losses[0]
    k = max(k for k in range(2, len(losses) - 1) if losses[k] < min(losses[:k]))
    return (losses[k] + min(losses[:k])) / 2


def same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], near: float = 2e-5) -> None:
    for name, value in expected.items():
        if name in found:
            assert (found[name] - value).abs().max() < near, name
    assert len(found) >= len(expected) - 1


def test_a_stop_leaves_the_weights_of_the_updates_before_it(tiny, limit, tmp_path):
    expected = plain(tiny, limit)
    (made,), (losses,) = expected.updates, expected.losses
    assert 2 <= made < MINIBATCHES * EPOCHS - 1 and len(losses) == made + 1
    (metrics,), weights = run(tiny, tmp_path, limit)
    same(weights, expected.weights)
    assert metrics["actor/updates"] == made
    assert metrics["actor/loss"] == pytest.approx(sum(losses) / len(losses), rel=1e-5)
    assert metrics["actor/lr"] == pytest.approx(LR * (1 - (made - 1) / (MINIBATCHES * EPOCHS)))


def test_the_next_call_goes_on_and_the_schedule_is_not_stretched(tiny, tmp_path):
    losses = plain(tiny, -math.inf, steps=2).losses[0]
    limit = (losses[2] + min(losses[:2])) / 2 if losses[2] < min(losses[:2]) else sorted(losses)[2]
    expected = plain(tiny, limit, steps=2)
    assert expected.updates[0] < MINIBATCHES * EPOCHS
    metrics, weights = run(tiny, tmp_path, limit, steps=2)
    assert [m["actor/updates"] for m in metrics] == expected.updates
    same(weights, expected.weights)


PLACES = ["on mesh(0:2) dp=2", "on mesh(0:2) tp=2", "on mesh(0:2) pp=2", "on mesh(0:4) dp=2 pp=2 mbs=1"]


@pytest.mark.parametrize("on", thorough_between(PLACES))
def test_all_ranks_stop_alike(on, tiny, limit, tmp_path):
    expected = plain(tiny, limit)
    (metrics,), weights = run(tiny, tmp_path, limit, on=on)
    assert metrics["actor/updates"] == expected.updates[0]
    assert metrics["actor/loss"] == pytest.approx(sum(expected.losses[0]) / len(expected.losses[0]), rel=1e-4)
    same(weights, expected.weights, 1e-4)


def test_a_stop_at_once_changes_nothing(tiny, tmp_path):
    """Not even by weight decay."""
    (metrics,), weights = run(tiny, tmp_path, 1e9)
    assert metrics["actor/updates"] == 0
    assert metrics["actor/lr"] == pytest.approx(LR / (MINIBATCHES * EPOCHS))  # the rate that the last planned update would have
    assert "actor/grad_norm" not in metrics and metrics["actor/loss"] > 0
    for name, value in load_file(tiny.base / "model.safetensors").items():
        assert torch.equal(weights[name], value), name


def test_a_stop_that_never_comes_is_as_none(tiny, tmp_path):
    (without,), plain_weights = run(tiny, tmp_path / "a", 0.0, stops="metric mark = mean(logprobs) * 0 + limit")
    (never,), weights = run(tiny, tmp_path / "b", -1.0)
    assert "actor/updates" not in without and never["actor/updates"] == MINIBATCHES * EPOCHS
    for name in ("loss", "worst", "grad_norm", "lr"):
        assert never[f"actor/{name}"] == without[f"actor/{name}"]
    assert all(torch.equal(weights[n], x) for n, x in plain_weights.items())


def test_any_of_several_conditions_stops(tiny, tmp_path):
    two = "stop when mean(logprobs) > 0\n  stop when worst > limit"
    (metrics,), _ = run(tiny, tmp_path, 0.0, stops=two)
    assert metrics["actor/updates"] == 0


@pytest.mark.parametrize("stops, code, underlined, words", [
    ("stop when logprobs < 0", "RL0201", "logprobs < 0", "single condition per minibatch, not a token value"),
    ("stop when mean(logprobs by seq) < 0", "RL0201", "mean(logprobs by seq) < 0", "not a seq value"),
    ("stop when mean(logprobs)", "RL0203", "mean(logprobs)", "needs a condition"),
    ("stop when mean(logprobz) > 1", "RL0101", "logprobz", "unknown name"),
    ("stop when mean(logprobs) < limit\n  metric stop = limit", "RL0102", "stop", "cannot be named `stop`"),
    ("metric stop = limit", "RL0102", "stop", "cannot be named `stop`"),
    ("stop when mean(logprobs) < limit\n  metric updates = limit", "RL0102", "updates", "defined twice"),
    ('stop when "no"', "RL0203", '"no"', "needs a condition"),
])
def test_mistakes(stops, code, underlined, words, tiny, tmp_path):
    path = write(tiny, tmp_path, stops)
    (found,) = api.check(path.read_text(), str(path))
    assert (found.code, found.span.text) == (code, underlined) and words in found.title


def stop_is_the_loss(p: Program) -> Program:
    return replace(p, outputs=tuple((n, dict(p.outputs)["loss"] if n == "stop" else i) for n, i in p.outputs))


def no_stop(p: Program) -> Program:
    return replace(p, outputs=tuple(o for o in p.outputs if o[0] != "stop"))


@pytest.mark.parametrize("change", [stop_is_the_loss, no_stop])
def test_the_verifier_refuses(change, tiny, tmp_path):
    plan = api.compile(str(write(tiny, tmp_path)))
    with pytest.raises(Failure) as caught:
        verify(replace(plan, programs=tuple(change(p) if "stop" in dict(p.outputs) else p for p in plan.programs)))
    assert {d.code for d in caught.value.diagnostics} == {"RL0617"}


def test_in_a_function(tiny, tmp_path):
    path = write(tiny, tmp_path)
    text = path.read_text()
    text += "fn g(x: token) -> batch {\n  stop when mean(x) > 1\n  return mean(x)\n}\n"
    (found,) = [d for d in api.check(text, str(path)) if d.severity == "error"]
    assert found.code == "RL0212" and found.span.text.startswith("stop when")
