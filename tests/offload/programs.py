"""A program with a frozen model and a trained one, each of which may be offloaded."""

from __future__ import annotations

PROGRAM = """
use std.grpo (group_norm, grpo)
cluster nodes=1 gpus={ranks}
data prompts = jsonl("data/prompts.jsonl", batch=4, max_prompt_tokens=16)
model actor  = causal_lm("models/sft"{options}) train adamw(lr=1e-3)
model ref    = causal_lm("models/sft")
flow f(steps=4, seed=7) {{
  prompt = prompts.next()
  gen    = actor.generate(prompt, n=4, max_new_tokens=6, temperature=0.9) on mesh(0:{ranks}) {generate}
  metric length = mean(len(gen))
  ref_lp = ref.logprobs(gen) on mesh(0:{ranks}) {ref}
  actor.train(gen, loss=grpo(old=gen.logprobs, adv=group_norm(len(gen)), ref=ref_lp, beta=0.1), minibatches=2) on mesh(0:{ranks}) {train}
{more}
}}
"""


def program(train: str = "tp=2", generate: str = "dp=2", ref: str = "dp=2", ranks: int = 2, more: str = "",
            options: str = "") -> str:
    return PROGRAM.format(train=train, generate=generate, ref=ref, ranks=ranks, more=more, options=options)


TWO = """
use std.grpo (group_norm, grpo_free)
use std.ppo (value_clip)
cluster nodes=1 gpus=2
data prompts = jsonl("data/prompts.jsonl", batch=4, max_prompt_tokens=16)
model actor  = causal_lm("models/sft") train adamw(lr=1e-3)
model critic = value_model("models/sft") train adamw(lr=1e-3)
place *.* on mesh(0:2) dp=2 offload=true
flow f(steps=4, seed=7) {
  prompt = prompts.next()
  gen    = actor.generate(prompt, n=4, max_new_tokens=6, temperature=0.9)
  v      = critic.values(gen)
  metric value = mean(v)
  critic.train(gen, loss=value_clip(old=v, ret=0.9 * v), minibatches=2)
  actor.train(gen, loss=grpo_free(old=gen.logprobs, adv=group_norm(len(gen))), minibatches=2)
}
"""


FOLLOWS = """
use std.sft (sft)
cluster nodes=1 gpus=2
data rows = jsonl("data/train.jsonl", batch=6, max_prompt_tokens=16, max_answer_tokens=16)
model actor = causal_lm("models/sft") train adamw(lr=0.02)
model slow  = causal_lm("models/sft")
flow f(steps=4) {
  row = rows.next()
  q = slow.logprobs(row)          on mesh(0:2) dp=2 offload=true
  metric m = mean(q)
  actor.train(row, loss=sft())    on mesh(0:2) tp=2
  ema slow from actor 0.9
  every 2 { save slow to "x" }
  checkpoint every 2
}
"""
