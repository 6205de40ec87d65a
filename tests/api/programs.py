"""A small program for the Python API: one page of text, and the models that it names.

In: a folder. Out: the models and data that `PROGRAM` reads, under it.
"""

from __future__ import annotations

from pathlib import Path

from tests.tiny import make_model, make_sums, write_jsonl

PROGRAM = """use std.grpo (group_norm, grpo)

param base = "models/tiny"
param lr: number = 1e-6
param steps = 10

cluster nodes=1 gpus=4
data prompts = jsonl("prompts.jsonl", batch=8, max_prompt_tokens=8)
model actor = causal_lm(base)  train adamw(lr=lr)
model ref   = causal_lm(base)

flow small(steps=steps) {
  prompt = prompts.next()
  gen    = actor.generate(prompt, n=2, max_new_tokens=8)  on mesh(0:4) dp=4
  ref_lp = ref.logprobs(gen)                              on mesh(0:2) dp=2
  reward = -len(gen)
  actor.train(gen, loss=grpo(old=gen.logprobs, ref=ref_lp, adv=group_norm(reward)))  on mesh(0:2) tp=2
  metric length = mean(len(gen))
}
"""
BROKEN = PROGRAM.replace("actor.generate", "actr.generate")


def make_files(folder: Path) -> Path:
    make_model(folder / "models/tiny")
    write_jsonl(folder / "prompts.jsonl", make_sums(32))
    (folder / "small.rlf").write_text(PROGRAM)
    return folder
