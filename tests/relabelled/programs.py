"""A program that is trained under one layout and generates under another, on ranks that may be free."""

from __future__ import annotations

PROGRAM = """
use std.grpo (group_norm, grpo_free)
cluster nodes=1 gpus={ranks}
data prompts = jsonl("data/prompts.jsonl", batch=4, max_prompt_tokens=16)
model actor  = causal_lm("models/sft") train adamw(lr=1e-3)
flow f(steps=5, seed=7) {{
  prompt = prompts.next()
  gen    = actor.generate(prompt, n=4, max_new_tokens=6, temperature=0.9) on {mesh} {generate}
  metric length = mean(len(gen))
  lp     = actor.logprobs(gen)
  metric gap = mean(gen.logprobs - lp)
  actor.train(gen, loss=grpo_free(old=gen.logprobs, adv=group_norm(len(gen))), minibatches=2) on mesh(0:{ranks}) {train}
}}
{more}
"""


def program(train: str, generate: str, mesh: str, ranks: int = 4, more: str = "") -> str:
    return PROGRAM.format(train=train, generate=generate, mesh=mesh, ranks=ranks, more=more)
