"""Gradients of whole compiled steps against plain torch on the samples that were drawn.

One optimizer step of AdamW with betas 0 moves a parameter by m = lr * g / (|g| + eps). With lr = eps = S that is nearly
g, and exactly g = m * S / (S - |m|): two checkpoints give the gradient, without touching the system.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.end_to_end import reference
from tests.end_to_end.programs import run_program
from tests.tiny import make_all

HERE = Path(__file__).parent
SCALE = 1e4
OPTIMIZER = f"adamw(lr={SCALE}, eps={SCALE}, betas=[0.0, 0.0], clip_grad=0)"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return make_all(tmp_path_factory.mktemp("tiny"), num_hidden_layers=2)


@pytest.fixture
def record(tmp_path):
    """Where the reward function of a test writes the rows that it saw."""
    return tmp_path / "samples.jsonl"


def samples(file: Path) -> list[reference.Sample]:
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    return [reference.Sample(r["prompt_ids"], r["completion_ids"], r["reward"]) for r in rows]


def program(folder: Path, name: str, body: str, record: Path) -> Path:
    """A program beside a reward that records its rows in `record`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "recorder.py").write_text(f'''
import json

def digits(rows):
    rewards = [sum(c.isdigit() for c in r["completion"]) - 0.1 * len(r["completion_ids"]) for r in rows]
    with open({str(record)!r}, "a") as out:
        for r, reward in zip(rows, rewards):
            kept = dict(prompt_ids=r["prompt_ids"], completion_ids=r["completion_ids"], reward=reward)
            out.write(json.dumps(kept) + chr(10))
    return rewards
''')
    path = folder / f"{name}.rlf"
    path.write_text(body)
    return path


def moved(before: Path, after: Path) -> dict[str, torch.Tensor]:
    """The gradient that one step applied; a parameter that the first checkpoint lacks began at zero."""
    old, new = load_file(before / "model.safetensors"), load_file(after / "model.safetensors")
    steps = {name: (old.get(name, torch.zeros_like(x)) - x).double() for name, x in new.items()}
    return {name: m * SCALE / (SCALE - m.abs()) for name, m in steps.items()}


def assert_same(found: dict[str, torch.Tensor], expected: reference.Gradients) -> None:
    assert found.keys() == expected.keys()
    largest = max(g.abs().max().item() for g in expected.values())
    assert largest > 1e-3
    for name, gradient in expected.items():
        difference = (found[name] - gradient).abs().max().item()
        assert difference < 2e-5 * max(1.0, largest), f"{name} differs by {difference}"


GRPO = """
use std.grpo (group_norm, grpo)
use py "recorder.py" (digits: gen -> seq)
data prompts = jsonl("{rows}", batch=5, max_prompt_tokens=16)
model actor = causal_lm("{base}") train {optimizer}
model ref   = causal_lm("{ref}")
flow one_step(steps=1, seed=3) {{
  prompt = prompts.next()
  gen    = actor.generate(prompt, n=4, max_new_tokens=24, temperature=0.8)  {on}
  ref_lp = ref.logprobs(gen)  {on}
  adv    = group_norm(digits(gen))
  actor.train(gen, loss=grpo(old=gen.logprobs, adv=adv, ref=ref_lp, beta=0.05, eps=0.2))  {on}
  save actor to "{out}"
}}
"""


@pytest.mark.thorough
@pytest.mark.parametrize("on", ["on mesh(0:1) dp=1", "on mesh(0:1) dp=1 mbs=3"])
def test_a_grpo_step_has_the_gradient_of_plain_torch(on, tiny, tmp_path, record):
    from tests.tiny import make_model

    other = make_model(tmp_path / "ref", seed=9, num_hidden_layers=2)
    out, base = tmp_path / "after", tiny / "models/sft"
    text = GRPO.format(rows=tiny / "data/prompts.jsonl", base=base, ref=other, optimizer=OPTIMIZER, on=on, out=out)
    (metrics,) = run_program(program(tmp_path, "grpo", text, record), {}, tmp_path / "run")
    drawn = samples(record)
    assert len(drawn) == 20 and len({len(s.response) for s in drawn}) > 1
    loss, expected = reference.grpo(reference.causal_lm(base), reference.causal_lm(other), drawn, 4, kl=0.05,
                                    temperature=0.8)
    assert metrics["actor/loss"] == pytest.approx(loss, abs=1e-5)
    assert_same(moved(base, out), expected)


PPO = """
use std.ppo (kl_rewards, gae, ppo_clip, value_clip)
use py "recorder.py" (digits: gen -> seq)
data prompts = jsonl("{rows}", batch=12, max_prompt_tokens=16)
model actor  = causal_lm("{base}")   train {optimizer}
model critic = value_model("{critic}") train {optimizer}
model ref    = causal_lm("{ref}")
model judge  = reward_model("{rm}")
flow one_step(steps=1, seed=4) {{
  prompt = prompts.next()
  gen    = actor.generate(prompt, max_new_tokens=16)  on mesh(0:1) dp=1
  score  = judge.score(gen)
  ref_lp = ref.logprobs(gen)
  v      = critic.values(gen)
  metric seen = mean(digits(gen))
  r        = kl_rewards(score, gen.logprobs, ref_lp, coef=0.1)
  adv, ret = gae(r, v, gamma=0.97, lam=0.9)
  critic.train(gen, loss=value_clip(old=v, ret=ret))
  actor.train(gen, loss=ppo_clip(old=gen.logprobs, adv=whiten(adv)))
  save actor to "{out}/actor"
  save critic to "{out}/critic"
}}
"""


def test_a_ppo_step_has_the_gradients_of_plain_torch(tiny, tmp_path, record):
    from tests.tiny import make_model

    base, rm = tiny / "models/sft", tiny / "models/rm"
    other = make_model(tmp_path / "ref", seed=9, num_hidden_layers=2)
    critic = make_model(tmp_path / "critic", head="reward_model", seed=5, num_hidden_layers=2)
    text = PPO.format(rows=tiny / "data/prompts.jsonl", base=base, critic=critic, ref=other, rm=rm,
                      optimizer=OPTIMIZER, out=tmp_path / "after")
    (metrics,) = run_program(program(tmp_path, "ppo", text, record), {}, tmp_path / "run")
    expected = reference.ppo(
        reference.causal_lm(base), reference.sequence_classifier(critic), reference.causal_lm(other),
        reference.sequence_classifier(rm), samples(record), gamma=0.97, lam=0.9)
    for name, before in (("actor", base), ("critic", critic)):
        loss, gradients = expected[name]
        assert metrics[f"{name}/loss"] == pytest.approx(loss, abs=2e-5)
        assert_same(moved(before, tmp_path / "after" / name), gradients)


@pytest.mark.thorough
def test_the_checkpoint_gives_the_logits_of_the_trained_model(tiny, tmp_path, record):
    """Saved from dp=2 tp=2: transformers loads it and its log-probs are those that the run itself takes next."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    out, base = tmp_path / "after", tiny / "models/sft"
    text = GRPO.format(rows=tiny / "data/prompts.jsonl", base=base, ref=base, out=out, on="on mesh(0:4) dp=2 tp=2",
                       optimizer="adamw(lr=1e-2)")
    run_program(program(tmp_path, "grpo", text, record), {}, tmp_path / "run")
    look = f"""
use py "recorder.py" (digits: gen -> seq)
data prompts = jsonl("{tiny / 'data/prompts.jsonl'}", batch=5, max_prompt_tokens=16)
model actor = causal_lm("{out}")
flow look(steps=1, seed=3) {{
  prompt = prompts.next()
  gen    = actor.generate(prompt, max_new_tokens=6)  on mesh(0:2) pp=2
  metric seen    = mean(digits(gen))
  metric logprob = mean(gen.logprobs)
}}
"""
    record.unlink()
    (metrics,) = run_program(program(tmp_path, "look", look, record), {}, tmp_path / "look")
    model = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32).eval()
    with torch.no_grad():
        theirs = torch.cat([reference.response_logprobs(model, s) for s in samples(record)]).mean().item()
    assert metrics["logprob"] == pytest.approx(theirs, abs=1e-5)
    assert AutoTokenizer.from_pretrained(out)("12+3=").input_ids == AutoTokenizer.from_pretrained(base)("12+3=").input_ids


def test_two_generates_of_one_step_draw_different_samples(tiny, tmp_path, record):
    text = f"""
use py "recorder.py" (digits: gen -> seq)
data prompts = jsonl("{tiny / 'data/prompts.jsonl'}", batch=8, max_prompt_tokens=16)
model actor = causal_lm("{tiny / 'models/sft'}")
flow twice(steps=1, seed=3) {{
  prompt = prompts.next()
  a = actor.generate(prompt, max_new_tokens=8)  on mesh(0:1) dp=1
  b = actor.generate(prompt, max_new_tokens=8)  on mesh(0:1) dp=1
  metric first  = mean(digits(a))
  metric second = mean(digits(b))
}}
"""
    run_program(program(tmp_path, "twice", text, record), {}, tmp_path / "run")
    drawn = samples(record)
    assert [s.prompt for s in drawn[:8]] == [s.prompt for s in drawn[8:]]
    assert [s.response for s in drawn[:8]] != [s.response for s in drawn[8:]]
